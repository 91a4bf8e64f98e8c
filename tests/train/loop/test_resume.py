"""Runs that are killed, stopped or corrupted and resume: same bits on the same mapping, same numbers on another."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe_comm.errors import CheckpointError, ConfigError
from moe_comm.observe.records import ATTEMPTS
from moe_comm.train import RunResult, run
from moe_comm.train.checkpoint import CheckpointReader, latest
from moe_comm.train.config import load
from moe_comm.train.loop.trainer import Trainer
from tests.pool import RankPool
from tests.train.common import assert_close, assert_floats

AUTO = "checkpoint.resume=auto"
DEADLINE_S = 300.0


class Crash(RuntimeError):
    """Ends a run in the middle, without an extra checkpoint."""


@contextlib.contextmanager
def crash_after(step: int | None) -> Iterator[None]:
    """Make all runs raise ``Crash`` in step ``step + 1``, after its report is written and before its checkpoint is.

    Background checkpoints of earlier steps are completed.
    """
    if step is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        fit = Trainer.fit

        def crashing(self: Trainer, after_step: Any = None) -> str:
            def after(report: Any) -> None:
                if report.step == step + 1:
                    raise Crash

            return fit(self, after)

        patch.setattr(Trainer, "fit", crashing)
        yield


def _run_until(rank: int, world: int, arg: tuple[list[str], int | None]) -> RunResult | None:
    settings, crash = arg
    with crash_after(crash):
        try:
            return run(None, settings)
        except Crash:
            return None


def folder_of(settings: list[str]) -> Path:
    (folder,) = Path(load(None, settings).run.folder).iterdir()
    return folder


def losses_of(folder: Path) -> list[float]:
    """Return the losses by step; each step must be present once and in order."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    return [line["loss"] for line in steps]


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return weights and optimizer state of the newest checkpoint."""
    path = latest(folder / "checkpoints")
    assert path is not None
    reader = CheckpointReader(path)
    return {name: reader.read(name) for name in reader.names}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state_of(folder).items() if name.startswith("model/")}


MOMENTUM = ("optimizer.kind=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.03")
SAME_MAPPING = {
    "ep that lends experts, correction bias": (
        "parallel.ep=2",
        "placement.balance={rows = 1.0, worth = 0}",
        "model.family=deepseek_v3",
        "model.bias_rate=0.05",
    ),
    "ep that sends weights of lent experts": (
        "parallel.ep=2",
        "parallel.backend=all_to_all",
        "placement.balance={rows = 1.0, worth = 0}",
    ),
    "fsdp, bf16": ("parallel.sharding=fsdp", "model.dtype=bfloat16"),
    "zero1, muon": (
        "parallel.sharding=zero1",
        "optimizer.kind=muon",
        "optimizer.momentum=0.9",
        "optimizer.lr=0.01",
        "checkpoint.background=false",
    ),
    "zbv, tied, sgd": ("parallel.pp=2", "parallel.schedule=zbv", "model.layers=4", "model.tie=true", *MOMENTUM),
}


@pytest.mark.parametrize("case", SAME_MAPPING)
def test_a_crashed_run_resumes_to_the_same_bits(
    pool2: RankPool, shared_settings: list[str], tmp_path: Path, case: str
) -> None:
    common = [*shared_settings, *SAME_MAPPING[case], "run.steps=6", "checkpoint.every=2", "run.eval_every=2"]
    reference, crashed = ([*common, f"run.folder={tmp_path / name}"] for name in ("through", "broken"))
    pool2.run(_run_until, (reference, None), timeout=90)
    pool2.run(_run_until, (crashed, 4), timeout=90)
    folder = folder_of(crashed)
    assert json.loads((folder / "result.json").read_text())["status"] == "failed"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 5 + 2, (
        "expected 5 steps, the last of which the resumed run repeats, and 2 evaluations"
    )
    result = pool2.run(_run_until, ([*crashed, AUTO], None), timeout=90)[0]
    assert (result.status, result.steps, result.folder) == ("finished", 6, folder)
    assert losses_of(folder) == losses_of(folder_of(reference))
    resumed_state, expected_state = state_of(folder), state_of(folder_of(reference))
    assert resumed_state.keys() == expected_state.keys()
    assert all(torch.equal(resumed_state[name], expected_state[name]) for name in resumed_state)
    # Names of files have whole seconds, so those of both runs may be read in either order.
    events: Any = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=False)
    events.Reload()
    assert sorted({event.step for event in events.Scalars("train/loss")}) == [1, 2, 3, 4, 5, 6]


Stage = tuple[int, tuple[str, ...]]
CHAINS: dict[str, tuple[tuple[str, ...], tuple[Stage, ...]]] = {
    "ep, tp, pp with tied embeddings, alone": (
        ("model.tie=true", "model.layers=4", "model.family=deepseek_v3", "model.bias_rate=0.01"),
        (
            (2, ("parallel.dp=2", "parallel.ep=2")),
            (2, ("parallel.tp=2", "parallel.ep=1")),
            (2, ("parallel.pp=2", "parallel.schedule=zbv")),
            (2, ("parallel.pp=2", "parallel.schedule=1f1b")),
            (1, ()),
        ),
    ),
    "strategies and folds": (
        ("optimizer.clip=0.5",),
        (
            (1, ()),
            (4, ("parallel.sharding=fsdp", "parallel.ep=2")),
            (
                4,
                ("parallel.sharding=fsdp", "parallel.ep=1", "parallel.dp_replicate=2", "parallel.overlap_gradients=on"),
            ),
            (4, ("parallel.tp=2", "parallel.cp=2", "parallel.etp=2", "parallel.ep=2", "parallel.sharding=zero1")),
            (2, ("parallel.sharding=replicate", "parallel.ep=1", "parallel.etp=2")),
            (2, ("parallel.cp=2", "parallel.context=ring", "parallel.sharding=fsdp")),
        ),
    ),
    "fewer experts on a rank than ranks that shard them, or none": (
        ("model.experts=2",),
        (
            (4, ("parallel.sharding=zero1", "parallel.ep=2")),
            (4, ("parallel.sharding=fsdp", "parallel.ep=2", "parallel.dp_replicate=2")),
            (4, ("parallel.sharding=fsdp", "parallel.ep=1")),
            (4, ("parallel.sharding=fsdp", "parallel.ep=4")),
            (2, ("parallel.tp=2", "parallel.etp=2", "parallel.ep=1")),
        ),
    ),
    "static and balanced lengths": (
        ("data.documents=separate",),
        (
            (2, ("parallel.cp=2", "parallel.context=ring", "parallel.lengths=balanced")),
            (2, ("parallel.cp=2", "parallel.context=ring")),
            (4, ("parallel.dp=2", "parallel.cp=2", "parallel.context=ring", "parallel.lengths=balanced")),
            (1, ()),
        ),
    ),
}


@pytest.mark.parametrize(
    ("chain", "optimizer", "tolerance"),
    [
        pytest.param(chain, *(((), 1e-3) if number == 1 else (MOMENTUM, 1e-5)), marks=[pytest.mark.slow] * (number > 0))
        for number, chain in enumerate(CHAINS)
    ],
    ids=CHAINS,
)
def test_a_run_resumes_on_other_mappings(
    pool2: RankPool,
    pool4: RankPool,
    shared_settings: list[str],
    tmp_path: Path,
    chain: str,
    optimizer: tuple[str, ...],
    tolerance: float,
) -> None:
    """Two steps on each mapping. Losses, and with SGD also weights, are within 1e-5 of one process. The weights of
    AdamW differ more, because it divides by the magnitude of the gradient, which can be tiny."""
    model_settings, stages = CHAINS[chain]
    steps = 2 * len(stages)
    common = [*shared_settings, *model_settings, *optimizer, f"run.steps={steps}", "checkpoint.every=2"]
    one_process = [*common, f"run.folder={tmp_path / 'alone'}"]
    _run_until(0, 1, (one_process, None))
    resharded = [*common, f"run.folder={tmp_path / 'moving'}", AUTO]
    for number, (ranks, mapping) in enumerate(stages, 1):
        crash_after_step = 2 * number if number < len(stages) else None
        arg = ([*resharded, *mapping], crash_after_step)
        if ranks == 1:
            _run_until(0, 1, arg)
        else:
            {2: pool2, 4: pool4}[ranks].run(_run_until, arg, timeout=90)
    folder = folder_of(resharded)
    assert_floats(losses_of(folder), losses_of(folder_of(one_process)))
    assert_close(weights_of(folder), weights_of(folder_of(one_process)), tolerance)


def _resume_fails(rank: int, world: int, settings: list[str]) -> tuple[str, str]:
    try:
        run(None, settings)
    except (CheckpointError, ConfigError) as error:
        return type(error).__name__, str(error)
    return "resumed", ""


def test_a_failed_resume_raises_the_reason_on_every_rank(pool2: RankPool, settings: list[str], tmp_path: Path) -> None:
    settings = [*settings, "run.steps=4", "checkpoint.every=2", AUTO]
    pool2.run(_run_until, (settings, 2), timeout=90)
    for change, kind, expected in (
        ("data.batch=4", "ConfigError", "data.batch was 8 and is 4"),
        ("data.seq_len=8", "ConfigError", "data.seq_len was 16 and is 8"),
        ("run.seed=1", "ConfigError", "seed"),
        ("model.layers=3", "CheckpointError", "lacks tensors: model/layers.2."),
        ("model.hidden=32", "CheckpointError", "has shape"),
        ("optimizer.kind=sgd", "CheckpointError", "no rank requests: optimizer/"),
    ):
        for name, message in pool2.run(_resume_fails, [*settings, change], timeout=90):
            assert (name, expected in message) == (kind, True), (change, name, message)
    saved = latest(folder_of(settings) / "checkpoints")
    assert saved is not None
    damaged = saved / "rank-00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    for name, message in pool2.run(_resume_fails, settings, timeout=90):
        assert (name, "rank-00001.safetensors" in message) == ("CheckpointError", True), message


def test_auto_starts_a_new_run_without_a_checkpoint(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    settings = [*settings, AUTO, "run.steps=2"]
    first = run(None, settings)
    assert first.steps == 2
    assert "starting a new run" not in capsys.readouterr().out
    second = run(None, settings)
    assert second.folder != first.folder, "the first run has completed all its steps"
    assert f"{first.folder} has completed its 2 steps; starting a new run" in capsys.readouterr().out
    with crash_after(0), pytest.raises(Crash):
        run(None, settings)
    third = run(None, settings)
    assert third.steps == len(losses_of(third.folder)) == 2
    assert len(list(first.folder.parent.iterdir())) == 4, "auto considers only the newest run, which has no checkpoint"


CONSTANT = ("optimizer.schedule=constant", "checkpoint.every=2", "checkpoint.keep=9")
"""A schedule that does not depend on the number of steps."""


@pytest.mark.parametrize("resume", ["auto", "run", "checkpoint", "earlier checkpoint"])
def test_more_steps_extend_a_finished_run(settings: list[str], tmp_path: Path, resume: str) -> None:
    settings = [*settings, *CONSTANT]
    reference = run(None, [*settings, "run.steps=6", f"run.folder={tmp_path / 'through'}"])
    first = run(None, [*settings, "run.steps=4"])
    assert json.loads((first.folder / "result.json").read_text())["status"] == "finished"
    paths = {
        "run": first.folder,
        "checkpoint": first.folder / "checkpoints" / "step-00000004",
        "earlier checkpoint": first.folder / "checkpoints" / "step-00000002",
    }
    result = run(None, [*settings, "run.steps=6", f"checkpoint.resume={paths.get(resume, resume)}"])
    assert (result.folder, result.steps, result.status) == (first.folder, 6, "finished")
    assert result.first_step == (3 if resume == "earlier checkpoint" else 5)
    assert losses_of(result.folder) == losses_of(reference.folder)
    extended_state, expected_state = state_of(result.folder), state_of(reference.folder)
    assert all(torch.equal(extended_state[name], expected_state[name]) for name in expected_state)


def test_an_invalid_resume_raises_and_changes_nothing(settings: list[str], tmp_path: Path) -> None:
    settings = [*settings, *CONSTANT]
    folder = run(None, [*settings, "run.steps=4"]).folder
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    for change, resume, expected in (
        ("run.steps=2", "auto", "has completed 4 steps, but run.steps is 2"),
        ("run.steps=3", folder, "has completed 4 steps, but run.steps is 3"),
        ("run.steps=4", folder, "has completed its 4 steps; increase run.steps to continue it"),
        ("run.steps=4", tmp_path / "nothing", "neither no nor auto, nor the folder of a run"),
        ("run.steps=4", tmp_path / "empty", "has no complete checkpoint"),
    ):
        with pytest.raises(ConfigError, match=expected):
            run(None, [*settings, change, f"checkpoint.resume={resume}"])
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert len(list(folder.parent.iterdir())) == 1


# --- runs in separate processes ---


def _command(settings: list[str]) -> list[str]:
    return [sys.executable, "-m", "moe_comm", "train", "tiny", *settings]


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    try:
        yield process
    finally:
        if process.poll() is None:
            for pid in [*_children(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.communicate()


def _children(pid: int) -> list[int]:
    pids: list[int] = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pids += [*_children(int(child)), int(child)]
    return pids


def _wait(process: subprocess.Popen[str], done: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not done():
        assert process.poll() is None, f"ended before {what}: {process.communicate()[0]}"
        assert time.monotonic() < end, f"no {what} within {DEADLINE_S} s"
        time.sleep(0.01)


def _saved(runs: Path) -> bool:
    """Return whether the run in a subfolder of ``runs`` has a checkpoint and trained another step."""
    for folder in runs.iterdir() if runs.exists() else ():
        path = latest(folder / "checkpoints")
        if path is not None and (folder / "metrics.jsonl").exists():
            return (folder / "metrics.jsonl").read_text().count("\n") > CheckpointReader(path).step
    return False


def _rank_processes(launcher: int) -> list[int]:
    """Return the ranks of ``launcher``: torchrun's by their environment, others as children of the fork server."""
    pids = []
    for pid in _children(launcher):
        with contextlib.suppress(OSError):
            if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                pids.append(pid)
            if b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes():
                pids += _children(pid)
    return pids


STEPS = 20
LONG = (f"run.steps={STEPS}", "checkpoint.every=2", "run.log_every=50", "parallel.ranks=2")


@pytest.fixture(scope="module")
def uninterrupted(shared_settings: list[str], tmp_path_factory: pytest.TempPathFactory, pool2: RankPool) -> list[float]:
    settings = [*shared_settings, *LONG, f"run.folder={tmp_path_factory.mktemp('uninterrupted')}"]
    pool2.run(_run_tiny, settings, timeout=120)
    return losses_of(folder_of(settings))


def _run_tiny(rank: int, world: int, settings: list[str]) -> None:
    run("tiny", settings)


def _restarted(runs: Path) -> bool:
    (folder,) = runs.iterdir()
    return len((folder / ATTEMPTS).read_text().splitlines()) == 2


@pytest.mark.timeout(1200)
@pytest.mark.slow
def test_a_killed_rank_is_restarted_and_sigterm_saves_and_exits_0(
    pool2: RankPool, settings: list[str], uninterrupted: list[float]
) -> None:
    """The restarted ranks resume from the last checkpoint, and a later run from that of SIGTERM."""
    settings = [*settings, *LONG]
    runs = Path(load("tiny", settings).run.folder)
    with started([*_command(settings), "--restarts", "2"]) as process:
        _wait(process, lambda: _saved(runs), "a checkpoint")
        ranks = _rank_processes(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[-1], signal.SIGKILL)
        _wait(process, lambda: _restarted(runs) and _saved(runs), "a step of the restarted ranks")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    assert "resumes after step" in out
    folder = folder_of(settings)
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "interrupted"
    saved = latest(folder / "checkpoints")
    assert saved is not None and CheckpointReader(saved).step == result["steps"] < STEPS
    pool2.run(_run_tiny, [*settings, AUTO], timeout=120)
    assert losses_of(folder) == uninterrupted


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_torchrun_restarts_a_killed_rank_which_resumes_from_the_last_checkpoint(
    settings: list[str], uninterrupted: list[float]
) -> None:
    settings = [*settings, *LONG]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    runs = Path(load("tiny", settings).run.folder)
    with started([*torchrun, "--max-restarts", "2", *_command(settings)[1:], AUTO]) as process:
        _wait(process, lambda: _saved(runs), "a checkpoint")
        ranks = _rank_processes(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[-1], signal.SIGKILL)
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    assert "resumes after step" in out
    folder = folder_of(settings)
    assert json.loads((folder / "result.json").read_text())["status"] == "finished"
    assert losses_of(folder) == uninterrupted
