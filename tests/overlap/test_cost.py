"""The cost model chooses one chunk if nothing can be hidden, and several if a lot can be hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from moe_comm.errors import ConfigError
from moe_comm.overlap.tuning.cost import (
    CHUNKS,
    DIRECTIONS,
    EXPERTS,
    GATHERS,
    SCATTERS,
    GroupRates,
    OperatorWork,
    cheapest,
    predict,
)

LINK = 119e6
"""1 Gbit/s, in bytes."""
RATES = GroupRates(2e-4, LINK, 1.0, 3e-5, 2e-6, ((16, 5e9), (64, 20e9), (256, 60e9), (1024, 100e9)))
WORKS = [(operator, direction) for operator in GATHERS + SCATTERS for direction in DIRECTIONS]
sizes = st.integers(0, 20_000)


def work(operator: str, direction: str, rows: int, sent: int = 512, other: int = 512, world: int = 2) -> OperatorWork:
    return OperatorWork(operator, direction, rows, sent, other, torch.float32, world)


@st.composite
def works(draw: st.DrawFn) -> OperatorWork:
    operator, direction = draw(st.sampled_from(WORKS))
    return work(operator, direction, draw(sizes), draw(sizes), draw(sizes), draw(st.integers(1, 64)))


@st.composite
def rates(draw: st.DrawFn) -> GroupRates:
    times = [draw(st.floats(1e-7, 1e-2)) for _ in range(3)]
    gemm = tuple((rows, draw(st.floats(1e8, 1e14))) for rows in (16, 64, 256, 1024))
    return GroupRates(times[0], draw(st.floats(1e6, 1e12)), draw(st.floats(0, 1)), times[1], times[2], gemm)


def balanced(operator: str, direction: str, rows: int) -> OperatorWork:
    """Return work whose communication and compute take equally long, at the best rate."""
    base = work(operator, direction, rows)
    columns = RATES.gemm[-1][1] * 4 / (2 * LINK) * (base.world - 1) / base.world
    return replace(base, other=round(columns))


@given(works(), rates())
def test_without_communication_there_is_one_chunk(work: OperatorWork, rates: GroupRates) -> None:
    assert cheapest(replace(work, world=1), rates) == 1
    assert cheapest(replace(work, sent=0), rates) == 1


@given(works(), rates())
def test_there_is_one_chunk_if_transfers_use_the_cores(work: OperatorWork, rates: GroupRates) -> None:
    flat = tuple((rows, 1e10) for rows, _ in rates.gemm)
    assert cheapest(work, replace(rates, hides=0.0, gemm=flat), margin=1e-9) == 1


@given(works(), rates(), st.sampled_from(CHUNKS))
def test_slower_links_and_gemms_never_take_less_time(work: OperatorWork, rates: GroupRates, chunks: int) -> None:
    seconds = predict(work, rates, chunks)
    slower = [
        replace(rates, bytes_per_s=rates.bytes_per_s / 2),
        replace(rates, latency_s=rates.latency_s * 2),
        replace(rates, chunk_s=rates.chunk_s * 2),
        replace(rates, call_s=rates.call_s * 2),
        replace(rates, hides=rates.hides / 2),
        replace(rates, gemm=tuple((rows, rate / 2) for rows, rate in rates.gemm)),
    ]
    assert all(predict(work, other, chunks) >= seconds * (1 - 1e-9) for other in slower)


@given(works(), rates(), st.sampled_from(CHUNKS))
def test_predictions_are_not_below_transfers_or_gemm(work: OperatorWork, rates: GroupRates, chunks: int) -> None:
    predicted = predict(work, rates, chunks)
    network = sum(rates.transfer_s(num_bytes) for num_bytes in (work.gathered, work.scattered))
    assert predicted >= network * (1 - 1e-9)
    ideal = replace(rates, gemm=((1, max(rate for _, rate in rates.gemm)),), call_s=0.0)
    assert predicted >= ideal.gemm_s(work.gemm) * (1 - 1e-9)


@pytest.mark.parametrize(("operator", "direction"), WORKS)
def test_many_rows_on_a_slow_link_are_chunked_and_few_are_not(operator: str, direction: str) -> None:
    # Their backward computes the weight gradient during the transfer, so one chunk hides as much as several.
    hidden_in_one_chunk = operator in ("gather_matmul", "swap_matmul") and direction == "backward"
    assert (cheapest(balanced(operator, direction, 4096), RATES) > 1) is not hidden_in_one_chunk
    assert cheapest(balanced(operator, direction, 16), RATES) == 1


@pytest.mark.parametrize(("operator", "direction"), WORKS)
def test_chunks_hide_most_of_the_shorter_of_compute_and_transfer(operator: str, direction: str) -> None:
    load = balanced(operator, direction, 65536)
    sequential = sum(RATES.transfer_s(n) for n in (load.gathered, load.scattered))
    sequential += RATES.gemm_s(load.gemm) * (2 if load.weight else 1)
    best = min(predict(load, RATES, chunks) for chunks in CHUNKS)
    shorter = min(RATES.transfer_s(load.gathered or load.scattered), RATES.gemm_s(load.gemm))
    assert sequential - best > 0.75 * shorter


def test_only_linear_layers_with_many_rows_read_shared_memory_in_place() -> None:
    shared = replace(RATES, shared=True, hides=0.0, bytes_per_s=5e9, latency_s=2e-5)
    assert cheapest(work("gather_matmul", "forward", 8192, other=64), shared) > 1
    assert cheapest(work("gather_matmul", "forward", 8192, other=64), replace(shared, shared=False)) == 1
    assert cheapest(work("gather_matmul", "forward", 32), shared) == 1
    assert cheapest(work("dispatch_matmul", "forward", 8192, other=64), shared) == 1


def test_one_chunk_takes_the_sum_of_transfer_and_gemm() -> None:
    for operator, direction in (("gather_matmul", "forward"), ("matmul_scatter", "forward")):
        load = work(operator, direction, 512)
        transfer_s = RATES.transfer_s(load.gathered + load.scattered)
        assert predict(load, RATES, 1) == pytest.approx(transfer_s + RATES.gemm_s(load.gemm))


def test_rates_are_interpolated_between_measured_ones() -> None:
    gemm = work("gather_matmul", "forward", 1).gemm
    rates_at_rows = [2 * rows * 512 * 512 / RATES.gemm_s(replace(gemm, rows=rows)) for rows in (16, 40, 64, 4096)]
    assert rates_at_rows == pytest.approx([5e9, rates_at_rows[1], 20e9, 100e9])
    assert 5e9 < rates_at_rows[1] < 20e9


def test_grouped_gemms_run_at_the_rate_of_fewer_rows() -> None:
    ungrouped = work("dispatch_matmul", "forward", 1024)
    ungrouped_s = RATES.gemm_s(ungrouped.gemm)
    assert RATES.gemm_s(replace(ungrouped, groups=64).gemm) > 2 * ungrouped_s


def test_unknown_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown work 'matmul' 'forward'; known: gather_matmul"):
        work("matmul", "forward", 1)
    with pytest.raises(ConfigError, match="must not be negative"):
        work("gather_matmul", "forward", -1)


@pytest.mark.parametrize(("operator", "direction"), [(o, d) for o in EXPERTS for d in DIRECTIONS])
def test_chunks_hide_transfers_behind_other_operators_and_one_chunk_does_not(operator: str, direction: str) -> None:
    """The experts alone are too small to hide their transfers."""
    alone = work(operator, direction, 2048, other=16)
    beside = replace(alone, beside=512)
    beside_s = RATES.gemm_s(beside.beside_gemm)
    assert predict(beside, RATES, 1) == pytest.approx(predict(alone, RATES, 1) + beside_s)
    assert predict(beside, RATES, 2) < predict(alone, RATES, 2) + 0.6 * beside_s
    assert cheapest(alone, RATES) == 1 and cheapest(beside, RATES) > 1
    without_hiding = replace(RATES, hides=0.0)
    assert cheapest(beside, without_hiding) == 1
