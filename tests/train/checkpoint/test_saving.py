"""Saving in the background: changes during a save, and the state of the folder after failures."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm.errors import CheckpointError, ConfigError
from moe_comm.topology import Box, ParallelConfig, Sharding, Split
from moe_comm.train.checkpoint import (
    Checkpointer,
    CheckpointReader,
    Entry,
    files,
    folder,
    latest,
    planner,
    restore_rng,
    rng_state,
)
from tests.pool import RankPool, on_ranks
from tests.train.checkpoint.common import patched

WAIT_S = 60.0


def path_of(parent: Path, step: int) -> Path:
    return parent / f"step-{step:08d}"


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def sharded_and_replicated(rank: int, world: int, value: float) -> dict[str, Entry]:
    """Return entries of a vector that is sharded over the ranks, and of a replicated one."""
    config = ParallelConfig(tp=world)
    sharding = Sharding((4 * world,), (Split(0, "tp"),))
    sharded = Entry.of(torch.full((4,), value), sharding, config.place(rank), config.sizes)
    return {"cut": sharded, "copy": Entry.whole(torch.full((3,), value))}


class Gate:
    """Replaces a function of a module or class. Calls wait until the gate is opened, and then call the function."""

    def __init__(self, owner: Any, name: str) -> None:
        self._real = getattr(owner, name)
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.reached.set()
        assert self.opened.wait(WAIT_S)
        return self._real(*args, **kwargs)


def test_weights_changed_after_wait_staged_are_not_in_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(files, "write_block")
    monkeypatch.setattr(files, "write_block", gate)
    weights = torch.arange(1000.0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": Entry.whole(weights)})
        checkpointer.wait_staged()
        weights.fill_(-1.0)
        assert gate.reached.wait(WAIT_S)  # nothing has been written yet
        gate.opened.set()
    assert torch.equal(CheckpointReader(path_of(tmp_path, 1)).read("w"), torch.arange(1000.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_on_a_gpu_are_saved_after_the_work_enqueued_before_the_call(tmp_path: Path) -> None:
    weights = torch.zeros(1 << 22, device="cuda")
    rows = torch.zeros(64, 64, device="cuda")
    with Checkpointer(tmp_path) as checkpointer:
        for _ in range(100):
            weights += 1.0
        every = (slice(0, 64), slice(0, 64))
        entries = {"w": Entry.whole(weights), "rows": Entry(rows.t(), (64, 64), (Box(every, every),))}
        checkpointer.save(1, entries)
        checkpointer.wait_staged()
        weights.fill_(-1.0)
        checkpointer.wait()
        checkpointer.resume(entries)
    assert (weights == 100.0).all()


def test_wait_staged_waits_for_the_copy_and_counts_the_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(planner.Stager, "stage")
    copied = []

    def stage(self: planner.Stager, *args: Any) -> Any:
        result = gate(self, *args)
        copied.append(True)
        return result

    monkeypatch.setattr(planner.Stager, "stage", stage)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.wait_staged() == 0.0
        checkpointer.save(1, {"w": Entry.whole(torch.ones(3))})
        assert gate.reached.wait(WAIT_S)
        opener = threading.Thread(target=gate.opened.set)
        opener.start()
        seconds = checkpointer.wait_staged()
        assert copied == [True]
        report = checkpointer.wait()
        opener.join()
    assert report is not None
    assert report.stall_s >= seconds
    assert report.total_s >= report.stage_s > 0
    assert (report.step, report.path) == (1, path_of(tmp_path, 1))
    assert report.bytes == (report.path / "rank-00000.safetensors").stat().st_size


def test_one_save_is_in_flight_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(files, "write_block")
    monkeypatch.setattr(files, "write_block", gate)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": Entry.whole(torch.ones(3))})
        assert gate.reached.wait(WAIT_S)
        assert latest(tmp_path) is None
        assert names(tmp_path) == ["step-00000001.partial"]
        threading.Thread(target=gate.opened.set).start()
        checkpointer.save(2, {"w": Entry.whole(torch.ones(3))})
        assert path_of(tmp_path, 1).is_dir()  # the first was complete before the second began
    assert latest(tmp_path) == path_of(tmp_path, 2)


@on_ranks(2)
def test_saving_does_not_interfere_with_collectives_of_training(rank: int, world: int, tmp_path: Path) -> None:
    gate = Gate(files, "write_block")
    with Checkpointer(tmp_path) as checkpointer, patched(files, "write_block", gate):
        entries = sharded_and_replicated(rank, world, 1.0)
        checkpointer.save(1, entries)
        checkpointer.wait_staged()
        for step in range(20):
            for entry in entries.values():
                entry.tensor.add_(1.0)
            total = torch.tensor([float(rank + step)])
            dist.all_reduce(total)
            assert total.item() == 1.0 + 2 * step
            if step == 10:
                gate.opened.set()
        checkpointer.wait()
    assert torch.equal(CheckpointReader(path_of(tmp_path, 1)).read("cut"), torch.ones(8))


@on_ranks(2)
@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_on_one_rank_is_raised_on_all_at_the_next_save_and_training_continues(
    rank: int, world: int, tmp_path: Path, full: int
) -> None:
    def write_block(file: Any, block: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, sharded_and_replicated(rank, world, 1.0))
        checkpointer.wait()
        with patched(files, "write_block", write_block if rank == full else files.write_block):
            checkpointer.save(2, sharded_and_replicated(rank, world, 2.0))
            assert checkpointer.wait_staged() >= 0  # training continues: the next save raises the error
            with pytest.raises(CheckpointError, match="step 2 could not be saved") as caught:
                checkpointer.save(3, sharded_and_replicated(rank, world, 3.0))
        assert f"rank-{full:05d}.safetensors: No space left on device" in str(caught.value)
        assert checkpointer.latest() == path_of(tmp_path, 1)
        assert names(tmp_path) == ["step-00000001"]
        checkpointer.latest()  # collective: every rank has listed the folder before the next save
        checkpointer.save(3, sharded_and_replicated(rank, world, 3.0))
    dist.barrier()
    assert latest(tmp_path) == path_of(tmp_path, 3)
    assert torch.equal(CheckpointReader(path_of(tmp_path, 3)).read("cut"), torch.full((8,), 3.0))


def test_an_error_inside_the_block_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_block(file: Any, block: memoryview) -> None:
        raise OSError(errno.EIO, "bad disk")

    monkeypatch.setattr(files, "write_block", write_block)
    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path) as checkpointer:  # noqa: PT012
        checkpointer.save(1, {"w": Entry.whole(torch.ones(3))})
        raise ZeroDivisionError
    with pytest.raises(CheckpointError, match="bad disk"), Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": Entry.whole(torch.ones(3))})


def test_a_limit_of_the_system_on_file_size_is_reported_by_close(tmp_path: Path) -> None:
    """The system writes a part of a block, and then refuses the rest."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpointer = Checkpointer(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        checkpointer.save(1, {"w": Entry.whole(torch.ones(1 << 16))})
        with pytest.raises(CheckpointError, match=r"rank-00000.safetensors: File too large"):
            checkpointer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == []


class Stop(Exception):
    pass


def test_close_after_a_signal_finishes_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(files, "write_block")
    monkeypatch.setattr(files, "write_block", gate)

    def stop(*_: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGTERM, stop)
    checkpointer = Checkpointer(tmp_path)
    try:
        checkpointer.save(1, {"w": Entry.whole(torch.ones(3))})
        assert gate.reached.wait(WAIT_S)
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        killer = threading.Thread(target=signal.pthread_kill, args=(main_thread, signal.SIGTERM))
        with pytest.raises(Stop):  # noqa: PT012  the signal may also arrive before close is called
            killer.start()
            checkpointer.close()
    finally:
        signal.signal(signal.SIGTERM, before)
    killer.join()
    assert latest(tmp_path) is None
    gate.opened.set()
    checkpointer.close()
    assert latest(tmp_path) == path_of(tmp_path, 1)


def die_while_writing(rank: int, world: int, arg: tuple[Path, int]) -> tuple[str, str]:
    """Save 1; during save 2 the rank ``arg[1]`` is killed after its first bytes. Returns the errors of the others."""
    parent, victim = arg
    real = files.write_block

    def write_block(file: Any, block: memoryview) -> None:
        real(file, block)
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    checkpointer = Checkpointer(parent, timeout_s=200.0)
    checkpointer.save(1, sharded_and_replicated(rank, world, 1.0))
    checkpointer.wait()
    with patched(files, "write_block", write_block if rank == victim else real):
        checkpointer.save(2, sharded_and_replicated(rank, world, 2.0))
        checkpointer.wait_staged()
        with pytest.raises(CheckpointError) as first:
            checkpointer.wait()
        with pytest.raises(CheckpointError) as second:
            checkpointer.save(3, sharded_and_replicated(rank, world, 3.0))
    checkpointer.close()
    return str(first.value), str(second.value)


def resume(rank: int, world: int, parent: Path) -> float:
    with Checkpointer(parent) as checkpointer:
        entries = sharded_and_replicated(rank, world, 0.0)
        loaded = checkpointer.resume(entries)
        assert loaded is not None
        checkpointer.save(2, sharded_and_replicated(rank, world, 5.0))
        return float(loaded.step) + entries["cut"].tensor.sum().item()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_while_saving_leaves_the_previous_checkpoint_as_the_newest(
    pool4: RankPool, tmp_path: Path, victim: int
) -> None:
    outcomes = pool4.run(die_while_writing, (tmp_path, victim), timeout=120, expect_dead={victim})
    for rank, texts in enumerate(outcomes):
        if rank != victim:
            assert f"lost rank {victim} (pid " in texts[0]
            assert f"lost rank {victim} (pid " in texts[1]
    assert latest(tmp_path) == path_of(tmp_path, 1)
    assert pool4.run(resume, tmp_path) == [5.0] * 4
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert torch.equal(CheckpointReader(path_of(tmp_path, 2)).read("cut"), torch.full((16,), 5.0))


OPERATIONS = ((files, "write_block"), (os, "fsync"), (os, "rename"))


def count_operations(parent: Path, last: int) -> None:
    """Save step 1 with other values and list its disk operations; be killed before operation number ``last``."""
    operations: list[str] = []

    def counting(name: str, real: Any) -> Any:
        def operation(*args: Any) -> Any:
            operations.append(name)
            if len(operations) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        return operation

    for owner, name in OPERATIONS:  # safe, because this process does nothing else
        setattr(owner, name, counting(name, getattr(owner, name)))
    checkpointer = Checkpointer(parent)
    checkpointer.save(1, {"w": Entry.whole(torch.full((3,), 2.0))})
    checkpointer.close()
    (parent.parent / "operations").write_text(" ".join(operations))


def test_killed_at_any_disk_operation_one_complete_checkpoint_is_the_newest(tmp_path: Path) -> None:
    """This holds also if the saved step replaces the only checkpoint."""

    def save_first(name: str) -> Path:
        with Checkpointer(tmp_path / name) as checkpointer:
            checkpointer.save(1, {"w": Entry.whole(torch.full((3,), 1.0))})
        return tmp_path / name

    def run(parent: Path, last: int) -> int | None:
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=count_operations, args=(parent, last))
        process.start()
        process.join()
        return process.exitcode

    assert run(save_first("all"), 0) == 0
    operations = (tmp_path / "operations").read_text().split()
    assert {"write_block", "fsync", "rename"} == set(operations)
    newest_values = []
    for last in range(1, len(operations) + 1):
        parent = save_first(str(last))
        assert run(parent, last) == -signal.SIGKILL
        newest = latest(parent)
        assert newest is not None
        newest_values.append(CheckpointReader(newest).read("w")[0].item())
        with Checkpointer(parent) as checkpointer:  # files left by the crash do not stop the next run
            checkpointer.save(1, {"w": Entry.whole(torch.full((3,), 3.0))})
        assert names(parent) == ["step-00000001"]
    assert newest_values == sorted(newest_values)
    assert set(newest_values) == {1.0, 2.0}


def save_steps(parent: Path, steps: list[int], keep: int) -> None:
    with Checkpointer(parent, keep=keep) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"w": Entry.whole(torch.full((3,), float(step)))})


def test_the_checkpoints_saved_last_are_kept_also_after_resuming_from_an_earlier_step(tmp_path: Path) -> None:
    save_steps(tmp_path, [10, 20, 30, 40], keep=3)
    assert names(tmp_path) == ["step-00000020", "step-00000030", "step-00000040"]
    save_steps(tmp_path, [12], keep=1)
    assert names(tmp_path) == ["step-00000012"]
    assert latest(tmp_path) == path_of(tmp_path, 12)


def test_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    save_steps(tmp_path, [1, 2], keep=3)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": Entry.whole(torch.zeros(3))})
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert latest(tmp_path) == path_of(tmp_path, 1)
    assert torch.equal(CheckpointReader(path_of(tmp_path, 1)).read("w"), torch.zeros(3))


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    save_steps(tmp_path, [1], keep=3)
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "step-00000008.partial").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-00000010").write_text("a file")
    assert latest(tmp_path) == path_of(tmp_path, 1)
    save_steps(tmp_path, [2], keep=1)
    assert latest(tmp_path) == path_of(tmp_path, 2)
    assert names(tmp_path) == ["notes", "step-00000002", "step-00000009", "step-00000010"]


def test_a_checkpoint_with_a_damaged_marker_is_neither_counted_nor_deleted_by_a_save(tmp_path: Path) -> None:
    save_steps(tmp_path, [1], keep=1)
    (path_of(tmp_path, 1) / folder.COMPLETE).write_text("{}")
    save_steps(tmp_path, [2], keep=1)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_random_number_generators_continue() -> None:
    import json
    import random

    state = json.loads(json.dumps(rng_state()))
    expected = (torch.rand(3).tolist(), random.random())
    restore_rng(state)
    assert (torch.rand(3).tolist(), random.random()) == expected
    with pytest.raises(CheckpointError, match="not a state"):
        restore_rng({"torch": "x"})


def test_settings_out_of_range_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep"):
        Checkpointer(tmp_path, keep=0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(-1, {})
        with pytest.raises(CheckpointError, match="step must be a whole number from 0"):
            checkpointer.wait()
