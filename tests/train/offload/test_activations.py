"""Runs with offloaded activations have the bits of runs without, within a budget, and errors are raised everywhere."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm.bench.common.ranks import SingleRankMesh
from moe_comm.errors import ConfigError, CorruptFile, StoreFull, StoreIOError
from moe_comm.runtime.offload import files
from moe_comm.runtime.offload.store import Store, Traffic
from moe_comm.train.offload.activations import ActivationOffload
from tests.pool import RankPool
from tests.support.activation_memory import activation_bytes
from tests.train.common import config_of, session

SIZE = ("model.hidden=64", "model.ffn=128", "model.layers=4", "data.seq_len=256", "optimizer.clip=0.5")
BUDGET = 4 * (64 << 10)
"""Four pages."""
CASES = {
    "none, ep": ("parallel.ep=2", "data.micro_batches=2", "run.nonfinite=rerun"),
    "full, zero1, offloaded state": (
        *("model.recompute=full", "parallel.sharding=zero1", "model.dtype=bfloat16", "parallel.overlap_gradients=on"),
        *("offload.optimizer=file", "offload.budget=256KiB", "offload.in_flight=1", "data.seq_len=512"),
    ),
    "selective, fsdp, bf16": ("model.recompute=selective", "parallel.sharding=fsdp", "model.dtype=bfloat16"),
    "selective, tp": ("model.recompute=selective", "parallel.tp=2", "parallel.ep=2"),
    "none, zbv": ("parallel.pp=2", "parallel.schedule=zbv", "data.micro_batches=4", "offload.checksums=false"),
    "full, interleaved": (
        *("model.recompute=full", "parallel.ep=2", "parallel.overlap_chunks=2", "parallel.interleave=true"),
        *("data.micro_batches=4", "data.batch=16"),
    ),
    "selective, balanced lengths": (
        *("model.recompute=selective", "parallel.cp=2", "parallel.context=ring"),
        *("data.documents=separate", "parallel.lengths=balanced"),
    ),
}


def offload(folder: Path, budget: int = BUDGET) -> list[str]:
    return ["offload.activations=file", f"offload.path={folder}", f"offload.activation_budget={budget}"]


def _train(rank: int, world: int, arg: tuple[Sequence[str], list[str]]) -> tuple[list[Any], list[Any], list[str]]:
    """Train without and with offload; return the losses of both, the reports, and the names of tensors that differ."""
    settings, stored = arg
    losses, weights = [], []
    reports: list[Any] = []
    for options in ([], stored):
        with session([*settings, *options]) as active:
            steps = [active.trainer.train_step(step) for step in range(3)]
            losses.append([(step.loss, step.grad_norm) for step in steps])
            # Masters in a file are not in memory.
            parts = active.copies() if "offload.optimizer=file" in settings else active.parts()
            weights.append({f"{name} {n}": part for name, (_, one) in parts.items() for n, (_, part) in enumerate(one)})
            reports = [step.activations for step in steps]
    expected, actual = weights
    assert expected.keys() == actual.keys()
    return losses, reports, [name for name in expected if not torch.equal(expected[name], actual[name])]


@pytest.mark.parametrize("case", CASES)
def test_offloaded_activations_have_the_bits_of_resident_ones(
    pool2: RankPool, shared_settings: list[str], tmp_path: Path, case: str
) -> None:
    settings = [*shared_settings, *SIZE, *CASES[case]]
    if "offload.optimizer=file" in settings:
        settings.append(f"offload.path={tmp_path}")
    for losses, reports, different in pool2.run(_train, (settings, offload(tmp_path)), timeout=90):
        assert losses[0] == losses[1]
        assert different == []
        for report in reports:
            assert report.peak <= report.budget < report.stored
            assert report.written > 0 and report.read > 0
    assert list(tmp_path.iterdir()) == []


def _fail(rank: int, world: int, arg: tuple[list[str], str]) -> str:
    """Train with a fault of rank 1's file, and return the class of the error that this rank raises."""
    settings, fault = arg
    fault, _, at_start = fault.partition(" ")
    calls, good = 0, 0 if at_start else 4

    def faulty(original: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if rank == 1 and calls > good:
                if fault == "flip":
                    count = original(*args)
                    args[1][5] ^= 4
                    return count
                raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)))
            return original(*args)

        return call

    target, name = {
        "EIO": (files, "write_block"),
        "flip": (files, "read_block"),
        "ENOSPC": (os, "posix_fallocate"),
    }[fault]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, faulty(getattr(target, name)))
        try:
            with session(settings) as active:
                active.trainer.fit()
        except Exception as error:
            threads = [one.name for one in threading.enumerate() if one.name.startswith("moe_comm offload")]
            return f"{type(error).__name__}: {error} {threads or ''}"
    return "none"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("EIO", StoreIOError), ("ENOSPC", StoreFull), ("ENOSPC at the start", StoreFull), ("flip", CorruptFile)],
)
def test_an_error_of_one_rank_is_raised_on_every_rank(
    pool2: RankPool, shared_settings: list[str], tmp_path: Path, fault: str, kind: type[Exception]
) -> None:
    settings = [*shared_settings, *SIZE, "parallel.ep=2", "model.layers=6", *offload(tmp_path)]
    for text in pool2.run(_fail, (settings, fault), timeout=90):
        assert text.startswith(kind.__name__), text
        assert "moe_comm offload" not in text, text  # threads, and with them the file, are released


def test_the_budget_and_the_tier_are_checked_before_the_first_step(shared_settings: list[str], tmp_path: Path) -> None:
    least = 3 * (64 << 10)
    settings = [*shared_settings, *SIZE]
    with session([*settings, *offload(tmp_path, least)]) as active:
        assert active.trainer.train_step(0).activations.peak == least
    with pytest.raises(ConfigError, match=f"{least - 1} bytes, and at least {least} are needed"):
        _ = session([*settings, *offload(tmp_path, least - 1)]).__enter__()
    with pytest.raises(ConfigError, match="use 'file'"):
        _ = session([*settings, *offload(tmp_path), "offload.activations=host"]).__enter__()
    with pytest.raises(ConfigError, match="requires activation_budget"):
        config_of([*settings, *offload(tmp_path, 0)])
    with pytest.raises(ConfigError, match=r"placement\.kind"):
        config_of([*settings, *offload(tmp_path), "placement.kind=relocate"])
    with pytest.raises(ConfigError, match="weights"):
        config_of([*settings, "offload.weights=file"])


def test_a_forward_pass_keeps_the_budget_in_memory(shared_settings: list[str], tmp_path: Path) -> None:
    settings = [*shared_settings, *SIZE, "data.micro_batches=1", "model.layers=8"]
    held = []
    for options in ([], offload(tmp_path)):
        with session([*settings, *options]) as active:
            [stage] = active.trainer.train_state.stages
            [batch] = active.trainer.feed.train(0).micro
            forward = partial(stage, batch.ids_BS, **batch.arguments)
            held.append(activation_bytes(forward, [*stage.parameters(), *stage.buffers()]))
    resident, offloaded = held
    assert resident > 16 * BUDGET
    assert offloaded < BUDGET + resident / 8


def test_a_step_may_end_while_the_first_tensor_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors are freed without a backward pass, so the rate of the file is not known."""
    written = threading.Event()
    monkeypatch.setattr(files, "write_block", lambda _, view, offset: written.wait() and len(view))
    active = ActivationOffload(config_of(offload(tmp_path)).offload, [], SingleRankMesh())
    active.start()
    assert not active.prefers("layers.0", 0, 1.0, 1 << 20)
    kept = [active.keep(torch.zeros(1 << 14, device="cpu")) for _ in range(4)]
    assert all(kept)
    kept.clear()
    active.finish()
    assert active.report.busy_s > 0 == active.report.written
    written.set()
    active.close()


@pytest.mark.parametrize("fast", [True, False])
def test_recomputed_values_are_stored_if_that_costs_less(
    shared_settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    """The store reports that its transfers took no time, or longer than any computation."""
    take = Store.take_traffic

    def reported(store: Store) -> Traffic:
        return replace(take(store), busy_s=1e-9 if fast else 1e9)

    monkeypatch.setattr(Store, "take_traffic", reported)
    settings = [*shared_settings, *SIZE, "model.recompute=selective", *offload(tmp_path)]
    with session(settings) as active:
        reports = [active.trainer.train_step(step).activations for step in range(2)]
    first, second = (0 if report is None else report.stored for report in reports)
    assert second > 1.1 * first if fast else second < 1.1 * first
