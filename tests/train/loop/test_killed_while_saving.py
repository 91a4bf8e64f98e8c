"""A rank is killed while a checkpoint is written in the background: only the previous one is valid."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm.observe.records import ATTEMPTS, Attempt, read_lines
from moe_comm.train import run
from moe_comm.train.checkpoint import files, latest
from moe_comm.train.loop.trainer import Trainer
from tests.pool import RankPool
from tests.train.checkpoint.common import patched
from tests.train.loop.test_resume import AUTO, folder_of, losses_of, state_of

SAVING = ("run.steps=8", "checkpoint.every=2", "checkpoint.keep=2", "checkpoint.background=true", "watch.enabled=false")
WAIT_S = 60.0
HALF = "step-00000004"


def _run(rank: int, world: int, settings: list[str]) -> str:
    return run(None, settings).status


def _run_until_killed(rank: int, world: int, arg: tuple[list[str], int, str, Path]) -> str:
    """Kill rank ``arg[1]`` in step 5, while step 4 is saved in the background: after the first bytes of its file or
    before the rename of the checkpoint (``arg[2]``). ``arg[3]``: file to write before. Return the other rank's end."""
    settings, victim, moment, marker = arg
    training, train_step, write_block, rename = threading.Event(), Trainer.train_step, files.write_block, os.rename

    def begin(self: Trainer, step: int) -> Any:
        if step + 1 == 5:
            training.set()
        return train_step(self, step)

    def kill() -> None:
        assert training.wait(WAIT_S)
        marker.write_text(threading.current_thread().name)
        os.kill(os.getpid(), signal.SIGKILL)

    def after_bytes(file: Any, block: memoryview) -> None:
        write_block(file, block)
        if f"{HALF}.partial" in str(file.name) and moment == "bytes":
            file.flush()
            kill()

    def before_commit(source: Any, target: Any) -> None:
        if Path(target).name == HALF and moment == "commit":
            kill()
        rename(source, target)

    if rank != victim:
        try:
            return _run(rank, world, settings)
        except Exception as error:
            return type(error).__name__
    with (
        patched(Trainer, "train_step", begin),
        patched(files, "write_block", after_bytes),
        patched(os, "rename", before_commit),
    ):
        return _run(rank, world, settings)


@pytest.fixture(scope="module")
def plain(pool2: RankPool, shared_settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = [*shared_settings, *SAVING, f"run.folder={tmp_path_factory.mktemp('plain')}"]
    assert pool2.run(_run, settings, timeout=90) == ["finished"] * 2
    return folder_of(settings)


@pytest.mark.parametrize(("victim", "moment"), [(0, "commit"), (1, "bytes")])
def test_a_rank_killed_in_a_background_save_loses_the_steps_since_the_previous_checkpoint(
    pool2: RankPool, settings: list[str], plain: Path, tmp_path: Path, victim: int, moment: str
) -> None:
    settings = [*settings, *SAVING]
    marker = tmp_path / "killed"
    arg = (settings, victim, moment, marker)
    ends = pool2.run(_run_until_killed, arg, timeout=90, expect_dead={victim})
    assert ends[1 - victim] not in (None, "finished")
    assert "checkpoint-4" in marker.read_text(), "the save was not in the background"
    checkpoints = folder_of(settings) / "checkpoints"
    assert latest(checkpoints) == checkpoints / "step-00000002"
    if victim == 0:  # no rank could delete the partial checkpoint
        partial_files = {path.name for path in (checkpoints / f"{HALF}.partial").iterdir()}
        assert {"rank-00000.safetensors", "rank-00001.safetensors", "COMPLETE"} <= partial_files, "all but the rename"
    # Resume in the same folder: the step is saved over the partial checkpoint.
    assert pool2.run(_run, [*settings, AUTO], timeout=90) == ["finished"] * 2
    folder = folder_of(settings)
    attempts = list(read_lines(folder / ATTEMPTS, Attempt))
    assert [(attempt.first_step, attempt.source) for attempt in attempts] == [(1, "fresh"), (3, "checkpoint")]
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000006", "step-00000008"]
    assert losses_of(folder) == losses_of(plain)
    resumed, uninterrupted = state_of(folder), state_of(plain)
    assert resumed.keys() == uninterrupted.keys()
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in resumed)
