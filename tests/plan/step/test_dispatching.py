"""Cost model of dispatchers: bytes per kind of link equal those of real routing, and the cheapest is chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.topology import ExpertPlacement, ParallelConfig
from moe_plan.machine.collectives import CollectiveCost, Link
from moe_plan.machine.hardware import Cluster, Pod
from moe_plan.machine.hardware_table import cluster_named
from moe_plan.model.files import model_named
from moe_plan.model.load import Workload
from moe_plan.model.mapping import Dispatcher, Mapping, PlacedMapping, inapplicable, remote_copies, sends_sums
from moe_plan.step.dispatching import DispatchCost, DispatchRows, beats_all_to_all, dispatching
from moe_plan.step.operators import Operators
from tests.dispatch.inter_host import inter_host_bytes

HIDDEN, TOKENS = 16, 4000
ALL: tuple[Dispatcher, ...] = ("all_to_all", "all_gather", "hierarchical")


def shape(experts: int, top_k: int, groups: int = 1, top_groups: int = 1) -> ModelShape:
    return ModelShape("one", 1, HIDDEN, 1, 1, 8, 8, experts, top_k, 8, groups=groups, top_groups=top_groups)


def routed(model_shape: ModelShape, ranks: int) -> list[torch.Tensor]:
    """Return uniformly distributed, distinct experts of all ranks' tokens."""
    random, size = np.random.default_rng(0), model_shape.experts // model_shape.groups
    result = []
    for _ in range(ranks):
        scores_TE = random.random((TOKENS, model_shape.experts))
        allowed_TG = random.random((TOKENS, model_shape.groups)).argsort(1) < model_shape.top_groups
        scores_TE[~np.repeat(allowed_TG, size, 1)] = -1
        result.append(torch.from_numpy(scores_TE.argsort(1)[:, -model_shape.top_k :].copy()))
    return result


def costs(
    dispatcher: Dispatcher,
    model_shape: ModelShape,
    cluster: Cluster,
    *,
    uneven: float = 1.0,
    kept: float = 1.0,
    **how: bool,
) -> DispatchCost:
    rows = DispatchRows(TOKENS, TOKENS * model_shape.chosen, kept, uneven, model_shape.hidden, 2)
    return dispatching(dispatcher, model_shape, cluster, cluster.span(range(cluster.gpus)), rows, **how)


@pytest.mark.parametrize(
    ("ranks", "host", "model_shape"),
    [(4, 2, shape(16, 4)), (8, 4, shape(32, 8)), (8, 2, shape(32, 6, 4, 2)), (12, 4, shape(24, 3))],
)
def test_inter_host_bytes_equal_those_of_the_library(ranks: int, host: int, model_shape: ModelShape) -> None:
    ids_WTK, hosts = routed(model_shape, ranks), [rank // host for rank in range(ranks)]
    placement = ExpertPlacement((model_shape.experts // ranks,) * ranks)
    sent = inter_host_bytes(ids_WTK, placement, hosts, HIDDEN, torch.bfloat16, deterministic=False)
    result = costs("hierarchical", model_shape, cluster_named("h100", ranks, host))
    for op, moved in (("dispatch", result.dispatch.cost), ("combine", result.combine.cost)):
        assert ranks * moved.between == pytest.approx(sent[op].rows, rel=0.01), op
        assert moved.across == 0
    rows = inter_host_bytes(ids_WTK, placement, hosts, HIDDEN, torch.bfloat16)["combine"].rows
    plain = costs("all_to_all", model_shape, cluster_named("h100", ranks, host)).dispatch.cost
    assert ranks * plain.between == pytest.approx(rows, rel=0.01)


@pytest.mark.parametrize(
    ("dispatcher", "combine_dispatcher", "measured"),
    [("all_to_all", "all_to_all", 270), ("all_gather", "all_to_all", 186), ("hierarchical", "hierarchical", 67)],
)
def test_inter_host_bytes_match_the_measurement(
    dispatcher: Dispatcher, combine_dispatcher: Dispatcher, measured: float
) -> None:
    """MB of forward and backward from docs/layers.md: 2 hosts x 2 ranks, 1024 tokens per rank, top 8 of 64 experts.

    In that measurement, all_gather returned rows, not sums.
    """
    model_shape, cluster = replace(shape(64, 8), hidden=1024), cluster_named("h100", 4, 2)
    rows = DispatchRows(1024, 1024 * 8, 1.0, 1.0, 1024, 4)
    names = (dispatcher, combine_dispatcher)
    out, back = (dispatching(name, model_shape, cluster, cluster.span(range(4)), rows) for name in names)
    sent = 4 * 2 * (out.dispatch.cost.between + back.combine.cost.between)
    assert sent / 1e6 == pytest.approx(measured, rel=0.015)


def test_relays_forward_one_row_per_expert_inside_a_host() -> None:
    model_shape, ranks, host = shape(32, 6), 8, 4
    inside = 0
    for rank, ids_TK in enumerate(routed(model_shape, ranks)):
        owner_TK = ids_TK // (model_shape.experts // ranks)
        relay_TK = owner_TK // host * host + rank % host
        inside += int((owner_TK != relay_TK).sum())
    result = costs("hierarchical", model_shape, cluster_named("h100", ranks, host)).dispatch.cost
    assert ranks * result.inside == pytest.approx(inside * HIDDEN * 2, rel=0.01)


@pytest.mark.parametrize(("ranks", "host"), [(8, 8), (8, 2)])
def test_all_gather_sends_each_token_to_all_ranks(ranks: int, host: int) -> None:
    model_shape = shape(32, 12)
    result = costs("all_gather", model_shape, cluster_named("h100", ranks, host), uneven=3.0).dispatch.cost
    assert result.inside + result.between == pytest.approx((ranks - 1) * TOKENS * HIDDEN * 2), (
        "must not depend on the imbalance"
    )


def test_copies_between_pods_use_the_across_link() -> None:
    fast, slow = Link("fast", 50e9, 4e-6, 0.9), Link("slow", 5e9, 4e-6, 0.9)
    cluster = replace(cluster_named("h100", 16, 4), pods=(Pod(1, fast), Pod(3, fast)), across=slow)
    model_shape = shape(64, 4)
    result, flat = (
        costs("hierarchical", model_shape, each).dispatch.cost
        for each in (cluster, replace(cluster, pods=(), across=None))
    )
    assert result.between == pytest.approx(flat.between * 2 / 3), (
        "each host of the pod of three sends to the two others"
    )
    assert result.across == pytest.approx(flat.between), "the host that is alone in its pod sends to three"
    assert result.seconds > flat.seconds


@pytest.mark.parametrize("top_k", [1, 2, 4, 7, 8, 9, 16, 20])
def test_all_gather_is_faster_on_one_host_if_top_k_exceeds_the_ranks(top_k: int) -> None:
    """MegaScale-MoE (2505.11432), section 3.2: sending all tokens to all ranks is less if top-k exceeds the ranks."""
    model_shape, place = shape(64, top_k), PlacedMapping(Mapping.parse("ep=8", 8), cluster_named("h100", 8))
    assert beats_all_to_all("all_gather", model_shape, place, Workload(1)) == (top_k > 8)


def test_all_gather_sends_a_token_once_for_all_shards_of_its_experts() -> None:
    """MegaScale-MoE (2505.11432), section 3: all_gather sends 2 b s h (n - 1) / n elements, independently of top-k."""
    model_shape, cluster = model_named("mixtral-8x7b"), cluster_named("h100", 8)
    for degrees, n in (("etp=8", 8), ("etp=2", 2), ("ep=4,etp=2", 8)):
        place = PlacedMapping(Mapping.parse(degrees, 8, dispatcher="all_gather"), cluster)
        result = Operators(model_shape, place, Workload(4096)).experts()
        moves = {each.name: each.bytes for each in result.forward if each.kind == "transfer"}
        assert set(moves) == {"dispatch", "combine"}
        token = 4096 * model_shape.hidden * 2
        assert moves["dispatch"] == pytest.approx(token * (n - 1))
        etp = place.mapping.parallel.etp
        rows = model_shape.top_k * etp * token * (n - 1) / n
        assert moves["combine"] == pytest.approx(min(rows, 2 * token * (n - 1))), (
            "combine sends rows or fp32 sums, whichever is less"
        )
    tensor = PlacedMapping(Mapping.parse("etp=8", 8), cluster)
    assert beats_all_to_all("all_gather", model_shape, tensor, Workload(1)), "top-k is 2"
    assert not beats_all_to_all("all_gather", shape(64, 1), tensor, Workload(1, "fp32"))


@pytest.mark.parametrize(("top_k", "ranks", "size"), [(8, 2, 2), (8, 4, 2), (9, 4, 2), (8, 4, 4), (2, 2, 4), (3, 2, 4)])
def test_all_gather_returns_sums_if_they_are_fewer_bytes_than_rows(top_k: int, ranks: int, size: int) -> None:
    model_shape, cluster = shape(32, top_k), cluster_named("h100", ranks)
    rows = DispatchRows(TOKENS, TOKENS * top_k, 1.0, 1.0, HIDDEN, size)
    result = dispatching("all_gather", model_shape, cluster, cluster.span(range(ranks)), rows).combine.cost
    by_rows = top_k * TOKENS * HIDDEN * size * (ranks - 1) / ranks
    by_sums = 4 * HIDDEN * TOKENS * (ranks - 1)
    assert result.inside == pytest.approx(min(by_rows, by_sums))
    assert sends_sums("all_gather", model_shape, ranks, size) == (by_sums < by_rows)


def test_deterministic_dispatchers_return_rows() -> None:
    model_shape, cluster = shape(64, 8), cluster_named("h100", 16)  # 2 hosts
    rows = DispatchRows(TOKENS, TOKENS * 8, 1.0, 1.0, HIDDEN, 4, deterministic=True)
    span, row_bytes = cluster.span(range(16)), HIDDEN * 4
    both = {name: dispatching(name, model_shape, cluster, span, rows) for name in ALL}
    assert both["all_gather"].combine == both["all_to_all"].combine
    assert both["hierarchical"].combine.cost.between == pytest.approx(TOKENS * 8 / 2 * row_bytes)
    fast = dispatching("hierarchical", model_shape, cluster, span, replace(rows, deterministic=False))
    assert both["hierarchical"].dispatch == fast.dispatch
    assert fast.combine.cost.between < both["hierarchical"].combine.cost.between
    assert not sends_sums("all_gather", shape(64, 64), 2, 4, deterministic=True)
    assert sends_sums("all_gather", shape(64, 64), 2, 4)


@pytest.mark.parametrize("name", ALL)
def test_a_wire_dtype_shortens_rows_in_transfer_and_not_in_memory(name: Dispatcher) -> None:
    model_shape, cluster = shape(64, 2), cluster_named("h100", 16)
    rows = DispatchRows(TOKENS, TOKENS * 2, 1.0, 1.0, HIDDEN, 4, deterministic=True)
    full, narrow = (
        dispatching(name, model_shape, cluster, cluster.span(range(16)), replace(rows, wire=wire))
        for wire in (1.0, 0.25)
    )
    for whole, part in ((full.dispatch, narrow.dispatch), (full.combine, narrow.combine)):
        assert part.cost.between == pytest.approx(whole.cost.between / 4)
    assert (narrow.permute_bytes, narrow.receive_bytes) == (full.permute_bytes, full.receive_bytes)


def test_hierarchical_is_faster_if_rows_would_cross_hosts_more_than_once() -> None:
    cluster = cluster_named("h800", 64)
    place = PlacedMapping(Mapping.parse("ep=64", 64), cluster)

    def wins(model_shape: ModelShape) -> bool:
        return beats_all_to_all("hierarchical", model_shape, place, Workload(1))

    assert wins(model_named("deepseek-v3")) and wins(shape(256, 8)) and not wins(shape(256, 1))
    by_limit = [costs("hierarchical", shape(256, 8, 8, top), cluster).dispatch.cost for top in (2, 4, 8)]
    assert by_limit[0].between < by_limit[1].between < by_limit[2].between
    assert remote_copies(shape(256, 8, 8, 2), 8, 1.0) == pytest.approx(2 * 7 / 8, rel=0.01)


@pytest.mark.parametrize("uneven", [1.0, 1.5, 100.0])
def test_hierarchical_sends_a_token_at_most_once_to_a_host(uneven: float) -> None:
    model_shape, cluster = shape(64, 8), cluster_named("h100", 16)
    result = costs("hierarchical", model_shape, cluster, uneven=uneven).dispatch.cost
    even = costs("hierarchical", model_shape, cluster).dispatch.cost
    assert even.between <= result.between <= TOKENS * HIDDEN * 2 * (1 + 1e-12)
    assert result.inside == pytest.approx(uneven * even.inside)


def test_overlapped_relaying_hides_the_shorter_transfer() -> None:
    model_shape, cluster = model_named("deepseek-v3"), cluster_named("h800", 64)
    sequential, concurrent = (
        costs("hierarchical", model_shape, cluster, overlapped=overlapped).dispatch.cost for overlapped in (False, True)
    )
    wire, host = cluster.between.rate, cluster.inside.rate
    longer = max(sequential.between / wire, sequential.inside / host)
    sum_s = sequential.between / wire + sequential.inside / host
    assert longer < concurrent.seconds < sequential.seconds < sum_s + 1e-3
    assert replace(concurrent, seconds=sequential.seconds) == sequential


@pytest.mark.parametrize("dispatcher", ALL)
@pytest.mark.parametrize("mapping", ["ep=16", "ep=8,etp=2", "tp=2,ep=16"])
def test_backward_swaps_the_costs_of_dispatch_and_combine(dispatcher: Dispatcher, mapping: str) -> None:
    def operators(dispatcher: Dispatcher) -> Operators:
        place = PlacedMapping(Mapping.parse(mapping, 16, dispatcher=dispatcher), cluster_named("h100", 16))
        return Operators(model_named("qwen3-30b-a3b"), place, Workload(4096))

    layer = operators(dispatcher).experts()
    forward_costs, backward_costs = (
        {one.name: one.cost for one in operations if one.name in ("dispatch", "combine")}
        for operations in (layer.forward, layer.backward)
    )
    assert set(forward_costs) == {"dispatch", "combine"}
    assert (
        forward_costs["dispatch"] == backward_costs["combine"]
        and forward_costs["combine"] == backward_costs["dispatch"]
    )
    plain = operators("all_to_all").experts()
    for kind in ("forward", "backward"):
        moved, products = (
            [one for one in getattr(each, kind) if (one.kind == "product") == is_gemm]
            for each, is_gemm in ((layer, False), (layer, True))
        )
        assert products == [one for one in getattr(plain, kind) if one.kind == "product"], (
            "GEMMs must not depend on the dispatcher"
        )
        assert all(one.seconds > 0 for one in moved)


def test_dropped_slots_reduce_inter_host_bytes() -> None:
    model_shape, cluster = shape(64, 4), cluster_named("h100", 32)
    moved: list[CollectiveCost] = [
        costs("hierarchical", model_shape, cluster, kept=kept, uneven=kept).dispatch.cost for kept in (0.25, 0.5, 1)
    ]
    assert moved[0].between < moved[1].between < moved[2].between < 4 * moved[0].between
    assert moved[2].inside == pytest.approx(4 * moved[0].inside)


def test_an_inapplicable_dispatcher_is_rejected() -> None:
    cluster = cluster_named("h100", 32)
    for text, dispatcher, why in (
        ("tp=2", "all_gather", "every rank has all experts"),
        ("ep=8", "hierarchical", "all on one host"),
        ("ep=4,etp=8", "hierarchical", "at least 2"),
    ):
        with pytest.raises(ConfigError, match=f"dispatcher {dispatcher} .*{why}"):
            PlacedMapping(Mapping.parse(text, 32, dispatcher=dispatcher), cluster)
    assert inapplicable("hierarchical", cluster_named("h100", 24, 8), ParallelConfig(dp=24, ep=12))
    assert all(inapplicable(one, cluster, ParallelConfig(dp=32, ep=16)) is None for one in ALL)
    direct = replace(cluster, direct=True)
    assert "each other's memory" in str(inapplicable("all_gather", direct, ParallelConfig(dp=32, ep=8)))
    assert inapplicable("all_gather", direct, ParallelConfig(dp=32, ep=16)) is None, (
        "between hosts, rows use the network"
    )
