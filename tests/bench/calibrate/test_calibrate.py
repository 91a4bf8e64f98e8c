"""Calibration recovers known rates from predicted measurements, and a real calibration can be saved and loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_comm.bench.calibrate import ranks as calibrate_ranks, steps as calibrate_steps
from moe_comm.bench.calibrate.fit import accelerator_of, pass_seconds
from moe_comm.bench.calibrate.machine import calibrate
from moe_comm.bench.calibrate.ranks import (
    BATCHES,
    EXPERT_ROWS,
    HEAD_DIM,
    HEADS,
    MODELS,
    PRODUCTS,
    SEQUENCES,
    UPDATED,
    WIDTH,
    MeasuredPass,
    RankMeasurements,
    measure,
)
from moe_comm.bench.calibrate.steps import CalibrationStep, imbalance, measure_steps, runs, step_seconds, within_steps
from moe_comm.errors import ConfigError
from moe_plan.machine.collectives import CollectiveCost, Link
from moe_plan.machine.hardware import Accelerator, Cluster, GemmTile
from moe_plan.machine.hardware_file import load, save
from moe_plan.machine.link_fit import MeasuredTransfer, between_of, inside_of, nearest
from tests.pool import RankPool

CORE = Accelerator(
    "this-machine",
    flops={"fp32": 60e9},
    efficiency={"fp32": 1.0},
    memory_bytes=4 << 30,
    memory_bytes_per_s=20e9,
    units=1,
    tiles=(GemmTile(8, 8),),
    fill_k=8,
    memory_reach=1.0,
    launch_s=8e-5,
    attention_forward=0.4,
    attention_backward=0.3,
    accumulate=6.0,
    grouped=0.8,
)
MEMORY, CABLE = Link("shared memory", 1.5e9, 5e-5, 1.0), Link("cable", 0.12e9, 3e-4, 1.0)
HOST = Cluster(CORE, 4, 4, MEMORY, MEMORY, start_s=1e-4)


def measured_by(core: Accelerator) -> RankMeasurements:
    """Return the measurements that the cost model predicts for ``core``."""
    ideal = replace(core, launch_s=1e-12)
    products = tuple((m, k, n, ideal.gemm_seconds(m, n, k, "fp32")) for m, k, n in PRODUCTS)
    attention = []
    for length in SEQUENCES:
        flops = 4 * HEADS * HEAD_DIM * length * (length + 1) / 2
        forward_s, backward_s = (ideal.attention_seconds(factor * flops, "fp32", factor > 1) for factor in (1.0, 2.5))
        attention.append((length, forward_s, backward_s))
    passes = [
        MeasuredPass(model, sequences, length, 0.0) for model in range(len(MODELS)) for sequences, length in BATCHES
    ]
    rows = sum(EXPERT_ROWS)
    gemm_s = 2 * 3 * rows * WIDTH * 3 * WIDTH / core.flops["fp32"]
    return RankMeasurements(
        cores=2,
        products={"fp32": products},
        attention=tuple(attention),
        experts=gemm_s / core.grouped + core.memory_seconds(8 * rows * WIDTH * 4),
        update=28 * UPDATED / core.memory_bytes_per_s,
        memory_bytes=core.memory_bytes,
        passes=tuple(replace(one, seconds=pass_seconds(core, one)) for one in passes),
    )


def test_the_fit_finds_numbers_of_any_magnitude() -> None:
    reference = (3e-6, 2.5, 7e9)

    def errors(*values: float) -> Sequence[float]:
        a, b, c = (math.log(fitted / expected) for fitted, expected in zip(values, reference, strict=True))
        return (a + b, b - c, a, c)

    assert nearest(errors, (1e-3, 1.0, 1e6)) == pytest.approx(reference, rel=1e-2)


def test_an_accelerator_is_recovered_from_its_own_predictions() -> None:
    fitted = accelerator_of([measured_by(CORE)] * 2, ranks_per_core=1.0)
    assert fitted.flops["fp32"] == pytest.approx(CORE.flops["fp32"], rel=0.05)
    assert (fitted.memory_bytes, fitted.memory_bytes_per_s) == (CORE.memory_bytes, pytest.approx(20e9))
    assert fitted.attention_forward == pytest.approx(0.4, rel=0.05)
    assert fitted.attention_backward == pytest.approx(0.3, rel=0.05)
    assert fitted.grouped == pytest.approx(0.8, rel=0.1)
    for one in measured_by(CORE).passes:
        assert pass_seconds(fitted, one) == pytest.approx(one.seconds, rel=0.05)


def test_ranks_that_share_a_core_have_proportional_rates() -> None:
    alone, sharing = (accelerator_of([measured_by(CORE)], ranks_per_core) for ranks_per_core in (1.0, 4.0))
    assert sharing.shared == 4.0 and alone.shared == 1.0
    assert sharing.flops["fp32"] == pytest.approx(alone.flops["fp32"] / 4)
    one = MeasuredPass(0, 2, 256, 1.0)
    assert pass_seconds(sharing, one) == pytest.approx(4 * pass_seconds(alone, one), rel=1e-6)


@pytest.mark.parametrize("ranks", [2, 4])
def test_links_are_recovered_from_their_own_predictions(ranks: int) -> None:
    reference = replace(HOST, gpus=4)

    def transfers(cluster: Cluster, count: int) -> list[MeasuredTransfer]:
        kinds: dict[Any, Callable[..., CollectiveCost]] = {
            "all_gather": cluster.all_gather,
            "all_reduce": cluster.all_reduce,
        }
        sizes = (1 << 14, 1 << 18, 1 << 22)
        return [
            MeasuredTransfer(kind, count, size, collective(size, range(count)).seconds)
            for kind, collective in kinds.items()
            for size in sizes
        ]

    start = replace(reference, inside=Link("x", 1e9, 1e-5, 1.0), start_s=1e-5)
    fitted = inside_of(start, transfers(reference, ranks))
    for one in transfers(reference, ranks):
        assert getattr(fitted, one.kind)(one.num_bytes, range(ranks)).seconds == pytest.approx(one.seconds, rel=0.05)
    separate_hosts = replace(reference, host_size=1, between=CABLE)
    cable = between_of(reference, transfers(separate_hosts, 2), "cable")
    assert cable.rate == pytest.approx(CABLE.rate, rel=0.05) and cable.name == "cable"
    assert cable.processor == 0.0  # not measured
    occupied = [replace(one, processor_s=0.75 * one.seconds) for one in transfers(separate_hosts, 2)]
    assert between_of(reference, occupied, "cable").processor == pytest.approx(0.75)
    assert between_of(reference, occupied, "cable", spare_cores=True).processor == 0.0


@pytest.mark.parametrize(
    ("share", "start"), [(0.6, 1e-3), (1.0, 2e-4), pytest.param(0.9, 1e-4, marks=pytest.mark.slow)]
)
def test_sustained_rates_and_start_times_are_recovered_from_steps(share: float, start: float) -> None:
    reference = replace(HOST, accelerator=replace(CORE, sustained=share), start_s=start)
    steps = [CalibrationStep(model, mapping, 0.0, 1.2) for model, mapping in runs(4)]
    assert {mapping for _, mapping in runs(4)} == {"dp=4,ep=1", "dp=4,ep=4", "tp=2,dp=2,ep=4"}
    fitted = within_steps(HOST, [replace(one, seconds=step_seconds(reference, one)) for one in steps])
    assert fitted.accelerator.sustained == pytest.approx(share, rel=0.02)
    assert fitted.start_s == pytest.approx(start, rel=0.05)
    faster = within_steps(HOST, [replace(one, seconds=step_seconds(reference, one) / 2) for one in steps])
    assert faster.accelerator.sustained <= 1.0 and faster.start_s >= HOST.start_s, (
        "not faster than separate measurements"
    )


def test_imbalance_is_the_load_of_the_busiest_rank_over_the_mean() -> None:
    assert imbalance([[1, 1, 1, 1]], 2) == 1.0
    assert imbalance([[3, 3, 1, 1]], 2) == pytest.approx(1.5)
    assert imbalance([[3, 3, 1, 1], [1, 3, 3, 1]], 2) == pytest.approx((1.5 + 1.0) / 2)
    assert imbalance([[4, 0, 0, 0]], 4) == 4.0
    assert imbalance([[3, 1]], 1) == 1.0
    assert imbalance([], 2) == 1.0


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce all measurements to a minimum."""
    _shorten(monkeypatch.setattr)


def _shorten(set_attribute: Callable[[Any, str, Any], None]) -> None:
    tiny = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 2, "experts": 2, "top_k": 1, "ffn": 32, "vocab": 64}
    values: dict[str, Any] = {"BUDGET_S": 0.0, "WINDOWS": 1, "PRODUCTS": ((32, 32, 32),), "EMULATED": ((32, 32, 32),)}
    values |= {"SEQUENCES": (16,), "UPDATED": 1 << 12, "SUMMED": (1 << 10,), "MODELS": (tiny,), "BATCHES": ((1, 16),)}
    values |= {"ROWS": (16,), "EXPERT_ROWS": (5, 11)}
    for name, value in values.items():
        set_attribute(calibrate_ranks, name, value)
    for name, value in {"MODELS": (tiny,), "LENGTH": 16, "STEPS": 1}.items():
        set_attribute(calibrate_steps, name, value)


def test_a_calibration_of_one_rank_can_be_saved_and_loaded(short: None, tmp_path: Path) -> None:
    messages: list[str] = []
    cluster = calibrate(1, say=messages.append)
    assert (cluster.gpus, cluster.accelerator.name, cluster.accelerator.shared) == (1, "this-machine", 1.0)
    assert set(cluster.accelerator.flops) == {"fp32", "bf16"}
    assert messages and "1 rank" in messages[0]
    save(cluster, tmp_path / "this.json")
    assert load(tmp_path / "this.json") == cluster


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as two_ranks:
        yield two_ranks


def _move(rank: int, world: int, arg: None) -> tuple[MeasuredTransfer, ...]:
    _shorten(setattr)
    return measure(("moves",)).moves


def test_ranks_measure_every_kind_of_transfer(pool: RankPool) -> None:
    for moves in pool.run(_move, None, timeout=60):
        assert {one.kind for one in moves} == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"}
        assert all(one.seconds > 0 and one.num_bytes > 0 and one.ranks == 2 for one in moves)


def _step(rank: int, world: int, arg: None) -> list[CalibrationStep]:
    _shorten(setattr)
    return measure_steps()


def test_ranks_time_the_same_training_steps(pool: RankPool) -> None:
    first, second = pool.run(_step, None, timeout=60)
    assert first == second and [one.mapping for one in first] == ["dp=2,ep=1", "dp=2,ep=2", "tp=2,dp=1,ep=2"]
    assert all(one.seconds > 0 and one.imbalance >= 1 for one in first)


@pytest.mark.parametrize(
    ("ranks", "arguments", "message"),
    [
        (0, {}, "positive multiple of hosts"),
        (3, {"hosts": 2}, "multiple of hosts"),
        (2, {"host": HOST}, "has 4 ranks; expected 2"),
    ],
)
def test_invalid_numbers_are_rejected_before_measuring(ranks: int, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        calibrate(ranks, **arguments)
