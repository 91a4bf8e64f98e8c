"""With little shared memory, the error is that of the rank that needed more, not of a rank that heard of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("moe_comm._C", reason="the native core is not built")

from moe_comm import DispatchOptions, make_dispatcher
from moe_comm.dispatch.backends.native import SharedMemoryDispatcher
from moe_comm.errors import HeapError
from moe_comm.runtime.launch import init_ranks
from moe_comm.topology import ExpertPlacement
from tests.dispatch.workers import heap_constants
from tests.pool import on_ranks

ROOT = Path(__file__).parents[2]
SMALL = """
from moe_comm.errors import HeapError
from tests.reports.test_small_shared_memory import dispatch
from moe_comm.runtime.launch import launch
for rank in (0, 1):
    try:
        launch(dispatch, (rank,), ranks=2, preload=("torch",))
    except HeapError as error:
        print(error)
"""


def dispatch(large: int) -> None:
    """Dispatch more rows to the experts of rank ``large`` than fit into its shared memory."""
    with init_ranks("cpu", timeout_s=60):
        dispatcher = make_dispatcher(2, dist.group.WORLD, backend="shared_memory")
        dispatcher.dispatch(torch.ones(2048, 1024), torch.full((2048, 1), large))


def test_the_launcher_raises_the_error_of_the_rank_without_memory() -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make a mount namespace")
    mount = 'mount -t tmpfs -o size=14m tmpfs /dev/shm && exec "$0" "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, sys.executable, "-c", SMALL]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    if "mount:" in done.stderr:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done
    for rank, line in enumerate(lines):
        assert line.startswith(f"rank {rank}: cannot grow shared memory") and "/dev/shm is full" in line


@on_ranks(2)
@pytest.mark.parametrize("failing", [0, 1])
def test_ranks_raise_the_cause_of_a_rank_that_cannot_set_up(rank: int, world: int, failing: int) -> None:
    sizes = {"INITIAL_BYTES": 8 << 20, "RESERVE_BYTES": 4 << 20} if rank == failing else {}
    cause = "" if rank == failing else f"rank {failing}: "
    with heap_constants(**sizes), pytest.raises(HeapError, match=rf"^{cause}(?!rank).*reserved address range"):
        SharedMemoryDispatcher(
            ExpertPlacement.balanced(4, world), dist.new_group(), rank, DispatchOptions(timeout_s=60)
        )
