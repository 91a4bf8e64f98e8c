"""Cost of GEMMs and collectives on described machines: exact volumes, bounds, published times, and invalid input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from moe_comm.errors import ConfigError
from moe_plan.machine import collectives
from moe_plan.machine.collectives import GroupSpan, Link, PodRanks
from moe_plan.machine.hardware import BYTES, Accelerator, Cluster, GemmTile, Pod
from moe_plan.machine.hardware_table import H100, MACHINES

INSIDE = Link("inside", 100e9, 0.0, 1.0)
BETWEEN = Link("between", 10e9, 0.0, 1.0)
SLOW = Link("slow", 1e9, 0.0, 1.0)
START = 1e-12
"""A negligible latency of collectives in seconds."""
PLAIN = Accelerator(
    "plain",
    flops={"fp32": 1e12, "bf16": 4e12},
    efficiency={"fp32": 1.0, "bf16": 0.5},
    memory_bytes=2**30,
    memory_bytes_per_s=1e15,
    units=10,
    tiles=(GemmTile(128, 64),),
    fill_k=0,
    memory_reach=1.0,
    launch_s=1e-12,
)


def cluster(gpus: int = 16, **changed: Any) -> Cluster:
    return replace(Cluster(H100, gpus, 4, INSIDE, BETWEEN, start_s=START), **changed)


def pods() -> Cluster:
    """Return four hosts of two accelerators: three in a pod with fast links, one in another pod."""
    return Cluster(H100, 8, 2, INSIDE, BETWEEN, (Pod(3, BETWEEN), Pod(1, SLOW)), Link("ethernet", 2e9, 0.0, 1.0), START)


# GEMMs


@pytest.mark.parametrize(
    ("k", "published_ms"), [(1024, 2.918), (2048, 5.567), (4096, 11.78), (8192, 23.285)], ids=["1k", "2k", "4k", "8k"]
)
def test_large_gemms_on_an_h100_take_the_published_time_within_ten_percent(k: int, published_ms: float) -> None:
    # ParallelKittens (arXiv 2511.13940), table 3: M = N = 32768 on each GPU, bf16.
    assert H100.gemm_seconds(32768, 32768, k, "bf16") * 1e3 == pytest.approx(published_ms, rel=0.1)


def test_a_gemm_of_full_waves_runs_at_the_efficiency_of_its_dtype() -> None:
    m, n, k = 128 * 5, 64 * 4, 4096  # 20 tiles on 10 units
    assert PLAIN.gemm_seconds(m, n, k, "fp32") == pytest.approx(2 * m * n * k / 1e12)
    assert PLAIN.gemm_seconds(m, n, k, "bf16") == pytest.approx(2 * m * n * k / 2e12)


def test_one_more_tile_than_units_costs_another_wave() -> None:
    one_round = PLAIN.gemm_seconds(128 * 10, 64, 4096, "fp32")
    assert PLAIN.gemm_seconds(128 * 11, 64, 4096, "fp32") == pytest.approx(2 * one_round)
    filling = replace(PLAIN, fill_k=512)
    assert filling.gemm_seconds(128 * 10, 64, 4096, "fp32") == pytest.approx(one_round * (4096 + 512) / 4096)


def test_k_is_split_for_few_tiles_but_not_for_grouped_gemms() -> None:
    k = 2**20
    whole = 2 * 128 * 64 * k / (1e12 / 10)
    split = replace(PLAIN, fill_k=1).gemm_seconds(128, 64, k, "fp32")
    assert whole / 10 < split < whole / 9.5
    assert PLAIN.gemm_seconds(64, 64, k, "fp32", groups=2) == pytest.approx(whole)


def test_a_grouped_gemm_takes_as_long_as_the_tiles_of_its_groups() -> None:
    one = PLAIN.gemm_seconds(128 * 5, 64 * 2, 512, "fp32")
    assert PLAIN.gemm_seconds(128 * 5, 64 * 2, 512, "fp32", groups=7) == pytest.approx(7 * one)
    # A group with one row takes as long as a group with a half-filled tile.
    assert PLAIN.gemm_seconds(1, 64, 512, "fp32", groups=10) == PLAIN.gemm_seconds(64, 64, 512, "fp32", groups=10)


def test_a_gemm_with_one_row_takes_the_time_of_reading_its_weights() -> None:
    n, k = 28672, 8192
    read = n * k * 2 / (H100.memory_bytes_per_s * H100.memory_reach)
    assert read < H100.gemm_seconds(1, n, k, "bf16") < 1.05 * read + H100.launch_s


def test_an_empty_gemm_costs_a_launch() -> None:
    assert H100.gemm_seconds(0, 4096, 4096, "bf16", groups=8) == H100.launch_s


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 20_000),
    n=st.integers(1, 20_000),
    k=st.integers(1, 20_000),
    groups=st.integers(1, 64),
    dtype=st.sampled_from(["fp32", "bf16", "fp8"]),
)
def test_no_gemm_exceeds_the_peak_flops_or_the_memory_bandwidth(
    m: int, n: int, k: int, groups: int, dtype: str
) -> None:
    seconds = H100.gemm_seconds(m, n, k, dtype, groups)
    assert seconds > 2 * m * n * k * groups / H100.flops[dtype]
    assert seconds > groups * (m + n) * k * BYTES[dtype] / H100.memory_bytes_per_s
    assert H100.gemm_seconds(m, n, 2 * k, dtype, 2 * groups) >= seconds


def test_an_unsupported_dtype_is_rejected_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'a100' does not support products in 'fp8'; it supports fp32, bf16"):
        MACHINES["a100"].accelerator.gemm_seconds(8, 8, 8, "fp8")
    with pytest.raises(ConfigError, match="not negative"):
        H100.gemm_seconds(-1, 8, 8, "bf16")
    with pytest.raises(ConfigError, match="finite"):
        H100.gemm_seconds(float("nan"), 8, 8, "bf16")


def test_attention_runs_at_its_own_fraction_of_the_peak() -> None:
    forward = H100.attention_seconds(1e12, "bf16") - H100.launch_s
    assert forward == pytest.approx(1e12 / (H100.flops["bf16"] * H100.attention_forward))
    assert H100.attention_seconds(1e12, "bf16", backward=True) > forward


# Groups


def test_the_span_of_a_group_has_its_hosts_and_ranks_per_host() -> None:
    assert cluster().span(range(4)) == GroupSpan((PodRanks(0, 1, 4, 4, 4),))
    assert cluster().span([15, 0, 1, 4]) == GroupSpan((PodRanks(0, 3, 4, 1, 2),))
    assert cluster(100_000).span(np.arange(100_000)) == GroupSpan((PodRanks(0, 25_000, 100_000, 4, 4),))
    assert pods().span([0, 1, 2, 6, 7]) == GroupSpan((PodRanks(0, 2, 3, 1, 2), PodRanks(1, 1, 2, 2, 2)))


@pytest.mark.parametrize("ranks", [[], [-1], [16], [3, 3], [0.5], ["a"]])
def test_invalid_and_repeated_ranks_are_rejected(ranks: list[Any]) -> None:
    with pytest.raises(ConfigError, match="different ranks from 0 to 15"):
        cluster().span(ranks)


# Collectives, on links without latency


def test_a_ring_inside_a_host_transfers_all_chunks_but_one() -> None:
    moved = cluster().all_gather(8e9, range(4))
    assert (moved.inside, moved.between, moved.across) == (6e9, 0, 0)
    assert moved.seconds == pytest.approx(6e9 / 100e9)
    assert cluster().reduce_scatter(8e9, range(4)) == moved
    assert cluster().all_reduce(8e9, range(4)).seconds == pytest.approx(2 * moved.seconds)


def test_a_ring_between_hosts_uses_one_link_per_rank_of_the_host() -> None:
    for per_host in (1, 2, 4):
        group = [host * 4 + rank for host in range(4) for rank in range(per_host)]
        moved = cluster().all_gather(16e9, group)
        volume = 16e9 * (len(group) - 1) / len(group)
        assert moved.between == pytest.approx(volume / per_host)
        assert moved.inside == pytest.approx(volume * (per_host - 1) / per_host)
        assert moved.seconds == pytest.approx(max(moved.between / 10e9, moved.inside / 100e9))
    uneven = cluster().all_gather(16e9, [0, 1, 2, 3, 4])
    assert uneven.between == pytest.approx(16e9 * 4 / 5), "one rank on the second host receives over one link"


@settings(max_examples=40, deadline=None)
@given(ranks=st.sets(st.integers(0, 7), min_size=2))
def test_all_to_all_counts_the_bytes_of_the_busiest_rank_by_kind_of_link(ranks: set[int]) -> None:
    machine, group = pods(), sorted(ranks)
    sent = {kind: [0.0] * len(group) for kind in ("inside", "between", "across")}
    for i, rank in enumerate(group):
        for other in group:
            if other != rank:
                same_host, same_pod = rank // 2 == other // 2, (rank < 6) == (other < 6)
                sent["inside" if same_host else "between" if same_pod else "across"][i] += 6e9 / len(group)
    moved = machine.all_to_all(6e9, group)
    for kind, counts in sent.items():
        assert getattr(moved, kind) == pytest.approx(max(counts))
    assert moved.seconds == pytest.approx(max(moved.inside / 100e9, moved.between / 10e9, moved.across / 2e9))


def test_the_slowest_kind_of_link_determines_the_time_of_a_ring() -> None:
    machine = pods()
    assert machine.all_gather(4e9, range(6)).seconds == pytest.approx(4e9 * 5 / 6 / 2 / 10e9)
    over_ethernet = machine.all_gather(4e9, range(8))
    assert over_ethernet.across == pytest.approx(4e9 * 7 / 8 / 2)
    assert over_ethernet.seconds == pytest.approx(over_ethernet.across / 2e9)
    alone = replace(machine, across=None)
    assert alone.all_gather(4e9, range(8)).seconds == pytest.approx(over_ethernet.across / 10e9), "uses `between`"


def test_a_send_uses_the_link_between_its_two_ranks() -> None:
    machine = pods()
    assert [machine.send(1e9, pair).seconds for pair in ((0, 1), (1, 2), (5, 6))] == pytest.approx([0.01, 0.1, 0.5])
    assert machine.send(1e9, (5, 6)).across == 1e9
    with pytest.raises(ConfigError, match="needs a group of 2 ranks; got 3"):
        machine.send(1e9, range(3))


def test_an_exchange_takes_separate_bytes_for_each_pod() -> None:
    machine = pods()
    span = machine.span([0, 2, 6])
    moved = collectives.exchange(machine.network, span, 0.0, (1e9, 0.0), 3e9)
    assert moved.seconds == pytest.approx(1.5)
    with pytest.raises(ConfigError, match="each of 2 pods; got 1"):
        collectives.exchange(machine.network, span, 0.0, (1e9,))


def test_latency_is_that_of_a_ring_for_large_and_of_a_tree_for_small_messages() -> None:
    hop = 1e-6
    machine = cluster(64, inside=replace(INSIDE, latency_s=hop), between=replace(BETWEEN, latency_s=hop), start_s=1e-5)
    assert machine.all_gather(1e12, range(64)).latency_s == pytest.approx(1e-5 + 63 * hop)
    assert machine.all_gather(64, range(64)).latency_s == pytest.approx(1e-5 + 6 * hop)
    assert machine.all_reduce(1e12, range(4)).latency_s == pytest.approx(1e-5 + 2 * 3 * hop)
    assert machine.all_to_all(64, range(64)).latency_s == pytest.approx(1e-5 + 6 * hop)
    assert machine.send(64, (0, 63)).latency_s == pytest.approx(1e-5 + hop)


def test_groups_of_one_rank_and_empty_messages_cost_nothing() -> None:
    for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        assert getattr(cluster(), name)(1e9, [3]).seconds == 0
        assert getattr(cluster(), name)(0, range(8)).seconds == 0


@settings(max_examples=40, deadline=None)
@given(ranks=st.sets(st.integers(0, 15), min_size=2), few=st.floats(1, 1e11), more=st.floats(0, 1e11))
def test_more_bytes_never_take_less_time(ranks: set[int], few: float, more: float) -> None:
    machine = cluster(start_s=1e-5, inside=MACHINES["h100"].inside, between=MACHINES["h100"].between)
    for name in ("all_gather", "all_reduce", "all_to_all"):
        less = getattr(machine, name)(few, ranks).seconds
        assert getattr(machine, name)(few + more, ranks).seconds >= less > 1e-5
