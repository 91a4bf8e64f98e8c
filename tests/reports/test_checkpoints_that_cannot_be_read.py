"""Errors of checkpoints are typed, and name the rank or the folder that caused them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_comm.errors import CheckpointError, ConfigError
from moe_comm.train.checkpoint import Checkpointer, Entry, latest
from moe_comm.train.loop.run_folder import resolve_resume_path
from tests.pool import RankPool


def error_after_a_death(rank: int, world: int, how: tuple[str, str]) -> str:
    """Rank 1 dies. The other rank saves, or looks for the latest checkpoint."""
    folder, call = how
    checkpoints = Checkpointer(folder, timeout_s=60)
    entries = {"x": Entry.whole(torch.ones(4))}
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if call == "save":
        checkpoints.save(1, entries)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.wait() if call == "save" else checkpoints.latest()
    with pytest.raises(CheckpointError) as later:
        checkpoints.latest()
    assert "lost rank 1 (pid " in str(later.value)
    return str(caught.value)


@pytest.mark.parametrize("call", ["save", "latest"])
def test_an_error_after_the_death_of_a_rank_names_it(call: str, tmp_path: Path) -> None:
    with RankPool(2) as pool:
        message = pool.run(error_after_a_death, (str(tmp_path / "checkpoints"), call), expect_dead=(1,))[0]
    assert "lost rank 1 (pid " in message and ", ended)" in message


def test_a_folder_that_cannot_be_read_is_a_checkpoint_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below", tmp_path / ("x" * 300)):
        with pytest.raises(CheckpointError, match="cannot be read"):
            latest(folder)
        with pytest.raises(CheckpointError, match="cannot be read"):
            Checkpointer(folder).latest()
    with pytest.raises(ConfigError, match=r"checkpoint\.resume: cannot read"):
        resolve_resume_path("x" * 300)
    assert latest(tmp_path / "missing") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("name", ["", "step-00000001"])
def test_a_folder_without_permission_is_a_checkpoint_error(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (folder / "step-00000001").mkdir(parents=True)
    (folder / "step-00000001" / "COMPLETE").touch()
    (folder / name).chmod(0)
    for parent in (tmp_path, *tmp_path.parents):
        if parent != Path("/") and parent.stat().st_uid == 0:
            parent.chmod(parent.stat().st_mode | 0o011)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setuid(65534)
            try:
                latest(folder)
            except CheckpointError as error:
                code = 0 if "cannot be read: Permission denied" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
