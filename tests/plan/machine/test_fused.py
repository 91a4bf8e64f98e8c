"""Cost of fused operators (a GEMM overlapped with a transfer): the fraction of the transfer that is hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from benchmarks.plan_validation.operators import ADDS, UNITS, dispatch_gemm, gather_gemm, gemm_combine, gemm_scatter
from moe_comm.errors import ConfigError
from moe_plan.machine.fused import COPIES, STORES, SYNC_S, Gemm, Transport, fused, overlapped
from moe_plan.machine.hardware_table import cluster_named

H100 = cluster_named("h100")
EIGHT = H100.span(range(8))
SECONDS = st.floats(1e-6, 1.0)


@given(SECONDS, SECONDS, st.integers(2, 64))
def test_overlap_takes_the_longer_stage_and_at_most_one_chunk_of_the_gemm(
    product: float, transfer: float, chunks: int
) -> None:
    seconds = overlapped(product, transfer, chunks, sync_s=0.0)
    longer = max(product, transfer)
    assert longer <= seconds <= longer + product / chunks + 1e-12


def simulate_chunks(product: float, transfer: float, chunks: int, own_first: bool) -> float:
    """Simulate both stages chunk by chunk; the rank's own rows are not transferred."""
    chunk_s, chunk_transfer_s = product / chunks, transfer / (chunks - 1)
    if own_first:
        done = chunk_s
        for i in range(1, chunks):
            done = max(done, i * chunk_transfer_s) + chunk_s
        return done
    link = 0.0
    for i in range(1, chunks):
        link = max(link, i * chunk_s) + chunk_transfer_s
    return max(link, product)


@given(SECONDS, SECONDS, st.integers(2, 16), st.booleans())
def test_overlap_equals_a_simulation_of_the_chunks(product: float, transfer: float, chunks: int, first: bool) -> None:
    assert overlapped(product, transfer, chunks, 0.0) == pytest.approx(
        simulate_chunks(product, transfer, chunks, first), rel=1e-9
    )


def test_one_chunk_hides_nothing() -> None:
    assert overlapped(2.0, 3.0, 1, 0.0) == 5.0


def test_every_chunk_adds_one_synchronization() -> None:
    assert overlapped(2.0, 1.0, 8) == pytest.approx(2.0 + 8 * SYNC_S)


def test_zero_chunks_are_rejected() -> None:
    with pytest.raises(ConfigError, match="at least one chunk; got 0"):
        overlapped(1.0, 1.0, 0)


def test_long_gemms_hide_the_scatter_and_short_ones_do_not() -> None:
    """On an H100, the scatter is hidden if K is above about 2197 (ParallelKittens, arXiv 2511.13940)."""
    hidden = [gemm_scatter(H100, EIGHT, Gemm(32768, 32768, k), ADDS).hidden for k in (256, 1024, 4096, 16384)]
    assert hidden == sorted(hidden)
    assert hidden[0] < 0.3
    assert hidden[-1] > 0.98


def test_fused_is_never_shorter_than_its_parts() -> None:
    for k in (64, 512, 4096):
        for transport in (COPIES, STORES, UNITS):
            result = gather_gemm(H100, EIGHT, Gemm(8192, 4096, k), transport)
            assert result.seconds >= max(result.gemm_s, result.transfer_s)
            assert 0 <= result.hidden <= 1


def test_transfers_on_units_slow_the_gemm_and_copies_do_not() -> None:
    product = Gemm(16384, 8192, 8192)
    alone = product.seconds(H100.accelerator)
    assert gather_gemm(H100, EIGHT, product, COPIES).gemm_s == alone
    units = UNITS.units(H100)
    slowed = gather_gemm(H100, EIGHT, product, UNITS).gemm_s
    assert slowed == pytest.approx(alone * 132 / (132 - units), rel=0.1)


def test_a_slow_link_takes_fewer_units() -> None:
    slow = replace(H100, inside=replace(H100.inside, bytes_per_s=20e9))
    assert 0 < UNITS.units(slow) < UNITS.units(H100)
    greedy = Transport("greedy", 1.0, 1.0)
    assert greedy.units(H100) == H100.accelerator.units // 2


def test_few_rows_are_not_divided_into_chunks_so_nothing_is_hidden() -> None:
    result = gather_gemm(H100, EIGHT, Gemm(64, 8192, 8192))
    assert result.seconds >= result.gemm_s + result.transfer_s


def test_one_rank_has_nothing_to_hide() -> None:
    product = Gemm(1024, 1024, 1024)
    result = gather_gemm(H100, H100.span([0]), product)
    assert result.seconds == result.serial_s == product.seconds(H100.accelerator)
    assert result.hidden == 0.0


def test_the_transfer_takes_longer_between_hosts() -> None:
    wide = cluster_named("h100", 16)
    product = Gemm(16384, 4096, 8192)
    inside = gather_gemm(wide, wide.span(range(8)), product)
    across = gather_gemm(wide, wide.span(range(4, 12)), product)
    assert across.transfer_s > inside.transfer_s


def test_longer_gemms_hide_more_of_dispatch() -> None:
    rows = 4096 * 2 * 8192 * 2.0
    hidden = [
        dispatch_gemm(H100, EIGHT, Gemm(8192, n, 8192, groups=1), rows, "exchange").hidden for n in (256, 1024, 14336)
    ]
    assert hidden == sorted(hidden)
    assert hidden[-1] > 0.9


def test_combine_sums_the_rows_of_a_token_before_a_scatter_only() -> None:
    product = Gemm(1024, 8192, 1024, groups=32)
    scattered = gemm_combine(H100, EIGHT, product, 8192 * 8192 * 2.0, "scatter")
    exchanged = gemm_combine(H100, EIGHT, product, 8192 * 8192 * 2.0, "exchange")
    assert scattered.serial_s > exchanged.serial_s


def test_errors_contain_the_invalid_value() -> None:
    with pytest.raises(ConfigError, match="not be negative; got -1"):
        fused(H100, EIGHT, Gemm(64, 64, 64), "gather", -1.0, COPIES)
    with pytest.raises(ConfigError, match="one of gather, scatter, exchange; got 'swap'"):
        fused(H100, EIGHT, Gemm(64, 64, 64), "swap", 1.0, COPIES)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="reach"):
        Transport("wrong", 1.5)
