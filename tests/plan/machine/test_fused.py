"""Fused operators: which part of a transfer is hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from moe_comm.errors import ConfigError
from moe_comm.plan.machine.fused import (
    ADDS,
    COPIES,
    STORES,
    SYNC_S,
    UNITS,
    Gemm,
    Transport,
    dispatch_gemm,
    fused,
    gather_gemm,
    gemm_combine,
    gemm_scatter,
    overlapped,
)
from moe_comm.plan.machine.hardware_table import cluster_named

H100 = cluster_named("h100")
EIGHT = H100.span(range(8))
SECONDS = st.floats(1e-6, 1.0)


@given(SECONDS, SECONDS, st.integers(2, 64))
def test_overlap_is_the_longer_stage_and_at_most_one_chunk_of_the_product(
    product: float, transfer: float, chunks: int
) -> None:
    taken = overlapped(product, transfer, chunks, sync_s=0.0)
    longer = max(product, transfer)
    assert longer <= taken <= longer + product / chunks + 1e-12


def brute(product: float, transfer: float, chunks: int, own_first: bool) -> float:
    """Simulate both stages chunk by chunk; the rank's own rows are not transferred."""
    each, moved = product / chunks, transfer / (chunks - 1)
    if own_first:
        done = each
        for i in range(1, chunks):
            done = max(done, i * moved) + each
        return done
    link = 0.0
    for i in range(1, chunks):
        link = max(link, i * each) + moved
    return max(link, product)


@given(SECONDS, SECONDS, st.integers(2, 16), st.booleans())
def test_overlap_equals_the_chunks_played_one_by_one(product: float, transfer: float, chunks: int, first: bool) -> None:
    assert overlapped(product, transfer, chunks, 0.0) == pytest.approx(
        brute(product, transfer, chunks, first), rel=1e-9
    )


def test_one_chunk_hides_nothing() -> None:
    assert overlapped(2.0, 3.0, 1, 0.0) == 5.0


def test_every_chunk_pays_a_flag() -> None:
    assert overlapped(2.0, 1.0, 8) == pytest.approx(2.0 + 8 * SYNC_S)


def test_no_chunks_are_an_error() -> None:
    with pytest.raises(ConfigError, match="at least one chunk; got 0"):
        overlapped(1.0, 1.0, 0)


def test_long_products_hide_the_scatter_and_short_ones_do_not() -> None:
    """ParallelKittens' rule: K above about 2197 on an H100 hides it."""
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


def test_units_of_its_own_slow_the_product_and_copies_do_not() -> None:
    product = Gemm(16384, 8192, 8192)
    alone = product.seconds(H100.accelerator)
    assert gather_gemm(H100, EIGHT, product, COPIES).gemm_s == alone
    taken = UNITS.units(H100)
    slowed = gather_gemm(H100, EIGHT, product, UNITS).gemm_s
    assert slowed == pytest.approx(alone * 132 / (132 - taken), rel=0.1)


def test_a_slow_link_takes_fewer_units() -> None:
    slow = replace(H100, inside=replace(H100.inside, bytes_per_s=20e9))
    assert 0 < UNITS.units(slow) < UNITS.units(H100)
    greedy = Transport("greedy", 1.0, 1.0)
    assert greedy.units(H100) == H100.accelerator.units // 2


def test_few_rows_cannot_be_cut_so_nothing_hides() -> None:
    result = gather_gemm(H100, EIGHT, Gemm(64, 8192, 8192))
    assert result.seconds >= result.gemm_s + result.transfer_s


def test_one_rank_has_nothing_to_hide() -> None:
    product = Gemm(1024, 1024, 1024)
    result = gather_gemm(H100, H100.span([0]), product)
    assert result.seconds == result.serial_s == product.seconds(H100.accelerator)
    assert result.hidden == 0.0


def test_between_hosts_the_network_sets_the_pace() -> None:
    wide = cluster_named("h100", 16)
    product = Gemm(16384, 4096, 8192)
    inside = gather_gemm(wide, wide.span(range(8)), product)
    across = gather_gemm(wide, wide.span(range(4, 12)), product)
    assert across.transfer_s > inside.transfer_s


def test_dispatch_hides_more_the_more_there_is_to_compute() -> None:
    rows = 4096 * 2 * 8192 * 2.0
    hidden = [
        dispatch_gemm(H100, EIGHT, Gemm(8192, n, 8192, groups=1), rows, "exchange").hidden for n in (256, 1024, 14336)
    ]
    assert hidden == sorted(hidden)
    assert hidden[-1] > 0.9


def test_combine_reads_rows_of_a_token_before_a_scatter_only() -> None:
    product = Gemm(1024, 8192, 1024, groups=32)
    scattered = gemm_combine(H100, EIGHT, product, 8192 * 8192 * 2.0, "scatter")
    exchanged = gemm_combine(H100, EIGHT, product, 8192 * 8192 * 2.0, "exchange")
    assert scattered.serial_s > exchanged.serial_s


def test_bad_input_says_what_was_given() -> None:
    with pytest.raises(ConfigError, match="not be negative; got -1"):
        fused(H100, EIGHT, Gemm(64, 64, 64), "gather", -1.0, COPIES)
    with pytest.raises(ConfigError, match="one of gather, scatter, exchange; got 'swap'"):
        fused(H100, EIGHT, Gemm(64, 64, 64), "swap", 1.0, COPIES)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="reach"):
        Transport("wrong", 1.5)
