"""A rank whose process ends before its function returns is an error that names the rank, whatever its exit code."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_comm.runtime.launch import RankFailed, init_ranks, launch

FORKED = ("torch",)


def leave(how: str, where: str) -> int:
    """Rank 1 ends its process. ``where``: the other rank "waits" for it, or "all" ranks leave."""
    with init_ranks("cpu", timeout_s=60) as ranks:
        dist.barrier()
        if ranks.rank == 1 or where == "all":
            sys.exit(0) if how == "sys.exit" else os._exit(0)
        dist.all_reduce(torch.zeros(1))
    return ranks.rank


def leave_at_first(folder: str) -> int:
    rank, left = int(os.environ["RANK"]), Path(folder, "left")
    if rank == 1 and not left.exists():
        left.touch()
        os._exit(0)
    return rank


def leave_from_a_thread() -> None:
    threading.Thread(target=os._exit, args=(0,)).start()
    threading.Event().wait()


@pytest.mark.parametrize(
    ("how", "where", "expected"),
    [
        ("sys.exit", "waits", r"^rank 1 failed with SystemExit: the function exited with code 0"),
        ("os._exit", "waits", r"^rank 1 \(pid \d+\) ended with exit code 0 before its function returned"),
        ("os._exit", "all", r"^rank [01] \(pid \d+\) ended with exit code 0 before its function returned"),
    ],
)
def test_a_rank_that_exits_with_code_0_is_named(how: str, where: str, expected: str) -> None:
    with pytest.raises(RankFailed, match=expected):
        launch(leave, (how, where), ranks=2, preload=FORKED)


def test_ranks_that_exit_are_restarted(tmp_path: Path) -> None:
    assert launch(leave_at_first, (str(tmp_path),), ranks=2, restarts=1, preload=FORKED) == [0, 1]
    assert len(set(launch(os.getpid, ranks=2, preload=FORKED))) == 2, "the next launch is not affected"


def test_a_single_process_that_exits_is_an_error_too() -> None:
    """With restarts, one rank has its own process."""
    with pytest.raises(RankFailed, match="exit code 0 before its function returned"):
        launch(leave_from_a_thread, ranks=1, restarts=1, preload=FORKED)
