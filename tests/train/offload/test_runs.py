"""Runs with offloaded state have the same bits as runs without, also after a resume from each other's checkpoints."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from moe_comm.bench.common.ranks import memory_limit
from moe_comm.errors import CheckpointError, ConfigError, CorruptFile, StoreFull, StoreIOError
from moe_comm.observe.report.figures import panels
from moe_comm.observe.report.read import read_run
from moe_comm.runtime.offload import files
from moe_comm.train import run
from moe_comm.train.loop.saver import RunSaver
from tests.pool import RankPool
from tests.train.common import session
from tests.train.loop.test_resume import AUTO, _run_until, folder_of, losses_of, state_of

SIZE = ("model.hidden=64", "model.ffn=128", "optimizer.clip=0.5")
"""State of 0.2 to 4 MB on a rank, and gradients that are clipped."""
ZERO1 = ("parallel.sharding=zero1", "parallel.ep=1")
CASES = {
    "zero1, bf16, overlap": (
        "256KiB",
        (*ZERO1, "model.dtype=bfloat16", "parallel.overlap_gradients=on", "run.nonfinite=rerun"),
    ),
    "fsdp, bf16, recompute": (
        "256KiB",
        ("parallel.sharding=fsdp", "model.dtype=bfloat16", "model.recompute=full", "checkpoint.background=false"),
    ),
    "zbv, tied, sgd, bf16": (
        "192KiB",
        (
            *("parallel.pp=2", "parallel.schedule=zbv", "model.layers=4", "model.tie=true", "model.dtype=bfloat16"),
            *("optimizer.kind=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.03"),
        ),
    ),
    "zero1, muon": ("2MiB", (*ZERO1, "optimizer.kind=muon", "optimizer.momentum=0.9", "optimizer.lr=0.01")),
    "tp, etp, lamb": ("1MiB", ("parallel.tp=2", "parallel.etp=2", "parallel.ep=1", "optimizer.kind=lamb")),
    "ep": ("200KiB", ("parallel.ep=2", "offload.in_flight=1", "offload.checksums=false")),
}


def offload(folder: Path, budget: str) -> list[str]:
    return ["offload.optimizer=file", f"offload.path={folder}", f"offload.budget={budget}"]


@pytest.mark.parametrize("case", CASES)
def test_offloaded_runs_have_the_bits_of_resident_ones(
    pool2: RankPool, shared_settings: list[str], tmp_path: Path, case: str
) -> None:
    budget, settings = CASES[case]
    common = [*shared_settings, *SIZE, *settings, "run.steps=6", "checkpoint.every=2"]
    resident, mixed = ([*common, f"run.folder={tmp_path / name}"] for name in ("resident", "mixed"))
    stored = offload(tmp_path, budget)
    pool2.run(_run_until, (resident, None), timeout=90)
    pool2.run(_run_until, ([*mixed, *stored], 2), timeout=90)
    pool2.run(_run_until, ([*mixed, AUTO], 4), timeout=90)
    pool2.run(_run_until, ([*mixed, *stored, AUTO], None), timeout=90)
    assert losses_of(folder_of(mixed)) == losses_of(folder_of(resident))
    actual, expected = state_of(folder_of(mixed)), state_of(folder_of(resident))
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mixed", "resident"], "a file of state remains"
    shown = panels(read_run(folder_of(mixed)))["curves"]["values"]
    assert [value is not None for value in shown["offload_stored"]] == [True, True, False, False, True, True]
    assert not any("activations" in name for name in shown)
    assert "offload_stored" not in panels(read_run(folder_of(resident)))["curves"]["values"]


def test_steps_that_are_run_again_have_the_same_bits(
    pool2: RankPool, shared_settings: list[str], tmp_path: Path
) -> None:
    common = [*shared_settings, *SIZE, *ZERO1, "model.dtype=bfloat16", "run.steps=5", "run.nonfinite=rerun"]
    plain, faulty = ([*common, f"run.folder={tmp_path / name}"] for name in ("plain", "faulty"))
    faulty += offload(tmp_path, "200KiB")
    faulty += ["offload.activations=file", "offload.activation_budget=256KiB"]
    faulty += ['faults.plan=["nan_loss:rank=1,step=2", "nan_grad:rank=0,step=3"]']
    for settings in (plain, faulty):
        pool2.run(_run_until, (settings, None), timeout=90)
    lines = [json.loads(line) for line in (folder_of(faulty) / "metrics.jsonl").read_text().splitlines()]
    assert [line["reruns"] for line in lines if "loss" in line] == [0, 1, 1, 0, 0]
    assert losses_of(folder_of(faulty)) == losses_of(folder_of(plain))
    actual, expected = state_of(folder_of(faulty)), state_of(folder_of(plain))
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def _updates(rank: int, world: int, settings: list[str]) -> list[Any]:
    with session(settings) as active:
        reports = []
        for step in range(3):
            active.trainer.train_step(step)
            reports.append(active.trainer.train_state.optimizer.memory.report)
        return reports


def test_a_sweep_moves_only_what_did_not_stay_in_memory(shared_settings: list[str], tmp_path: Path) -> None:
    settings = [*shared_settings, *SIZE, "model.dtype=bfloat16", *offload(tmp_path, "512KiB")]
    reports = _updates(0, 1, settings)
    assert reports[0].stored > 4 * (512 << 10)
    with session(settings) as active:  # as planned, without alignment and with the routers' own masters
        state = active.trainer.train_state
        planned = sum(item.value.numel() * 4 * (2 + (item.weights is not None)) for item in state.data_parallel.owned())
    assert planned <= reports[0].stored < 1.02 * planned
    assert all(report.peak <= report.budget for report in reports)
    # Chunks in the budget at the end of a sweep are the first of the next one, and are not written meanwhile.
    kept = reports[2].budget // (64 << 10) * (64 << 10)
    assert reports[2].read <= reports[2].stored - kept + (64 << 10)
    assert reports[2].written <= reports[2].stored - kept + (64 << 10)


def _fail(rank: int, world: int, arg: tuple[list[str], str]) -> str:
    """Train with a fault of rank 1's file, and return the class of the error that this rank raises."""
    settings, fault = arg
    fault, _, in_save = fault.partition(" in ")
    calls, saving, ended = 0, False, threading.Event()
    save = RunSaver.save

    def begin(saver: RunSaver, step: int) -> None:
        nonlocal saving
        saving = True
        save(saver, step)

    def faulty(original: Any) -> Any:
        def call(file: int, view: memoryview, offset: int) -> int:
            nonlocal calls
            calls += 1
            if rank == 1 and (saving if in_save else calls > 60):
                if fault == "stall":
                    ended.wait()
                if fault == "flip":
                    count = original(file, view, offset)
                    view[5] ^= 4
                    return int(count)
                if fault == "end":
                    return 0
                raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)))
            # Short transfers are completed.
            return int(original(file, view[: len(view) // 2 // 4096 * 4096 or len(view)], offset))

        return call

    with pytest.MonkeyPatch.context() as patch:
        name = "write_block" if fault == "ENOSPC" else "read_block"
        patch.setattr(files, name, faulty(getattr(files, name)))
        patch.setattr(RunSaver, "save", begin)
        try:
            run(None, settings)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            ended.set()
    return "none"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("EIO", StoreIOError),
        ("ENOSPC", StoreIOError),
        ("flip", CorruptFile),
        ("end", CorruptFile),
        ("stall", StoreIOError),
        ("flip in a save", CheckpointError),
    ],
)
def test_an_error_of_one_rank_is_raised_on_every_rank(
    pool2: RankPool, shared_settings: list[str], tmp_path: Path, fault: str, kind: type[Exception]
) -> None:
    kinds = {"EIO": "optimizer.kind=muon", "flip": "optimizer.kind=lamb"}  # they communicate in the update
    settings = [*shared_settings, *SIZE, *ZERO1, *offload(tmp_path, "2MiB"), kinds.get(fault, "optimizer.kind=adamw")]
    settings += ["offload.budget=200KiB"] if "adamw" in settings[-1] else []
    settings += [f"run.folder={tmp_path / 'runs'}", "checkpoint.every=2", "checkpoint.background=false"]
    settings += ["offload.deadline_s=0.5"] if fault == "stall" else []
    for text in pool2.run(_fail, (settings, fault), timeout=90):
        assert text.startswith(kind.__name__), text
        causes = {"EIO": "EIO", "ENOSPC": "ENOSPC", "end": "ends before", "stall": "deadline_s = 0.5"}
        assert causes.get(fault, "fails its checksum") in text


def test_parameters_without_stored_state_are_updated(shared_settings: list[str], tmp_path: Path) -> None:
    """SGD without momentum has no state, and fp32 weights have no separate masters."""
    settings = [*shared_settings, "optimizer.kind=sgd", "optimizer.lr=0.3", "run.steps=2"]
    weights = []
    for options in ([], offload(tmp_path, "192KiB")):
        with session([*settings, *options]) as active:
            owned = active.trainer.train_state.data_parallel.owned()
            before = {item.name: item.value.detach().clone() for item in owned}
            active.trainer.train_step(0)
            weights.append({item.name: item.value.detach().clone() for item in owned})
            assert any(not torch.equal(before[name], value) for name, value in weights[-1].items())
    resident, stored = weights
    assert [name for name, value in resident.items() if not torch.equal(value, stored[name])] == []


def test_the_budget_is_checked_before_the_first_step(shared_settings: list[str], tmp_path: Path) -> None:
    least = 3 * (64 << 10)
    for budget, fits in ((least, True), (least - 1, False)):
        settings = [*shared_settings, *SIZE, *offload(tmp_path, str(budget))]
        if fits:
            assert _updates(0, 1, settings)[-1].peak == least
        else:
            with pytest.raises(ConfigError, match=f"{least - 1} bytes, and at least {least} are needed"):
                _updates(0, 1, settings)


def test_faults_at_the_start_are_typed(
    shared_settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*shared_settings, *SIZE, *offload(tmp_path, "1MiB")]
    before = threading.enumerate()
    with pytest.raises(StoreIOError, match="memory: choose a local disk"):
        _updates(0, 1, [*settings, "offload.path=/dev/shm"])
    with pytest.raises(StoreIOError, match="No such file"):
        _updates(0, 1, [*settings, f"offload.path={tmp_path / 'missing'}"])
    with pytest.raises(ConfigError, match="use 'file'"):
        _updates(0, 1, [*settings, "offload.optimizer=host"])
    with pytest.raises(ConfigError, match=r"placement\.kind"):
        run(None, [*settings, "placement.kind=relocate"])

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_block", full)
        with pytest.raises(StoreIOError, match="cannot write"):
            _updates(0, 1, [*settings, "model.dtype=bfloat16", "offload.budget=192KiB"])
    started = (one.name for one in threading.enumerate() if one not in before)
    assert [name for name in started if name.startswith("moe_comm offload")] == []
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreFull, match=r"needs \d+ bytes .* free"):
        _updates(0, 1, settings)


def test_twenty_steps_have_the_bits_of_a_resident_run_and_a_save_reads_the_state_once(
    shared_settings: list[str], tmp_path: Path
) -> None:
    settings = [*shared_settings, *SIZE, "model.dtype=bfloat16", "run.steps=20", "checkpoint.every=10"]
    settings += ["run.eval_every=0", "checkpoint.background=false"]
    resident, stored = ([*settings, f"run.folder={tmp_path / name}"] for name in ("resident", "stored"))
    run(None, resident)
    run(None, [*stored, *offload(tmp_path, "256KiB")])
    expected, actual = state_of(folder_of(resident)), state_of(folder_of(stored))
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
    lines = [json.loads(line) for line in (folder_of(stored) / "metrics.jsonl").read_text().splitlines()]
    offloaded = [line["offload"] for line in lines if "loss" in line]
    assert len(offloaded) == 20
    # Step 11 counts the bytes that the save after step 10 read.
    of_save = offloaded[10]["read"] - offloaded[11]["read"]
    assert 0.8 < of_save / offloaded[10]["stored"] < 1.3
    assert all(one["peak"] <= one["budget"] for one in offloaded)


LARGE = ("model.hidden=256", "model.ffn=256", "model.experts=16")


def _memory(rank: int, world: int, arg: tuple[list[str], float]) -> tuple[int, int]:
    """Return the bytes that this process adds in two steps, within a limit in MiB, and those of offloaded state."""
    settings, limit = arg
    before = psutil.Process().memory_info().rss
    with memory_limit(limit), session(settings) as active:
        for step in range(2):
            active.trainer.train_step(step)
        report = active.trainer.train_state.optimizer.memory.report
        return psutil.Process().memory_info().rss - before, 0 if report is None else report.stored


def test_the_process_holds_the_budget_and_not_the_state(shared_settings: list[str], tmp_path: Path) -> None:
    def measure(options: list[str], limit: float) -> tuple[int, int]:
        with RankPool(1) as pool:  # a fresh process
            return pool.run(_memory, ([*shared_settings, *LARGE, *options], limit), timeout=60)[0]  # type: ignore[no-any-return]

    resident, _ = measure([], 0)
    offloaded, stored = measure(offload(tmp_path, "2MiB"), 0)
    assert stored > 16 * (2 << 20)
    assert resident - offloaded > 0.8 * stored
    with contextlib.suppress(ConfigError):  # no cgroup here
        measure(offload(tmp_path, "2MiB"), (resident - stored / 2) / 2**20)  # else the process is killed


def _killed(rank: int, world: int, settings: list[str]) -> str:
    """Train until rank 1 is killed while it writes, and return the error of rank 0."""
    calls = 0

    def kill(file: int, view: memoryview, offset: int) -> int:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.pwritev(file, [view], offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write_block", kill)
        try:
            with session(settings) as active:
                active.trainer.fit()
        except Exception as error:
            return type(error).__name__
    return "none"


def test_a_killed_rank_leaves_no_file(shared_settings: list[str], tmp_path: Path) -> None:
    settings = [*shared_settings, *SIZE, *ZERO1, *offload(tmp_path, "200KiB"), "run.steps=50"]
    with RankPool(2) as pool:
        pids = pool.pids
        results = pool.run(_killed, settings, timeout=60, expect_dead={1})
    assert results[0] in ("PeerDied", "PeerLost", "PeerError"), results
    assert list(tmp_path.iterdir()) == []
    # Processes of other tests have segments, too.
    assert not [path for pid in pids for path in Path("/dev/shm").glob(f"moe_comm.{pid}.*")]
