"""Cost model of dispatchers: bytes per kind of link equal those of real routing, and the cheapest is chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_comm.dispatch.hierarchical.relay_routes import inter_host_bytes
from moe_comm.errors import ConfigError
from moe_comm.plan.machine.collectives import CollectiveCost, Link
from moe_comm.plan.machine.hardware import Cluster, Pod
from moe_comm.plan.machine.hardware_table import cluster_named
from moe_comm.plan.model.files import model_named
from moe_comm.plan.model.load import Workload
from moe_comm.plan.model.mapping import Dispatcher, Mapping, PlacedMapping, inapplicable
from moe_comm.plan.model.routing import remote_copies, sends_sums
from moe_comm.plan.model.shape import ModelShape
from moe_comm.plan.step.dispatching import DispatchCost, DispatchRows, beats_all_to_all, dispatching
from moe_comm.plan.step.operators import Operators
from moe_comm.topology import ExpertPlacement, ParallelConfig

HIDDEN, TOKENS = 16, 4000
ALL: tuple[Dispatcher, ...] = ("all_to_all", "all_gather", "hierarchical")


def shape(experts: int, top_k: int, groups: int = 1, top_groups: int = 1) -> ModelShape:
    return ModelShape("one", 1, HIDDEN, 1, 1, 8, 8, experts, top_k, 8, groups=groups, top_groups=top_groups)


def routed(one: ModelShape, ranks: int) -> list[torch.Tensor]:
    """Return uniformly distributed, distinct experts of all ranks' tokens."""
    random, size = np.random.default_rng(0), one.experts // one.groups
    result = []
    for _ in range(ranks):
        scores_TE = random.random((TOKENS, one.experts))
        allowed_TG = random.random((TOKENS, one.groups)).argsort(1) < one.top_groups
        scores_TE[~np.repeat(allowed_TG, size, 1)] = -1
        result.append(torch.from_numpy(scores_TE.argsort(1)[:, -one.top_k :].copy()))
    return result


def costs(
    dispatcher: Dispatcher, one: ModelShape, cluster: Cluster, *, uneven: float = 1.0, kept: float = 1.0, **how: bool
) -> DispatchCost:
    rows = DispatchRows(TOKENS, TOKENS * one.chosen, kept, uneven, one.hidden, 2)
    return dispatching(dispatcher, one, cluster, cluster.span(range(cluster.gpus)), rows, **how)


@pytest.mark.parametrize(
    ("ranks", "host", "one"),
    [(4, 2, shape(16, 4)), (8, 4, shape(32, 8)), (8, 2, shape(32, 6, 4, 2)), (12, 4, shape(24, 3))],
)
def test_between_hosts_goes_what_the_library_sends(ranks: int, host: int, one: ModelShape) -> None:
    ids_WTK, hosts = routed(one, ranks), [rank // host for rank in range(ranks)]
    placement = ExpertPlacement((one.experts // ranks,) * ranks)
    sent = inter_host_bytes(ids_WTK, placement, hosts, HIDDEN, torch.bfloat16, deterministic=False)
    result = costs("hierarchical", one, cluster_named("h100", ranks, host))
    for op, moved in (("dispatch", result.dispatch.cost), ("combine", result.combine.cost)):
        assert ranks * moved.between == pytest.approx(sent[op].rows, rel=0.01), op
        assert moved.across == 0
    rows = inter_host_bytes(ids_WTK, placement, hosts, HIDDEN, torch.bfloat16)["combine"].rows
    plain = costs("all_to_all", one, cluster_named("h100", ranks, host)).dispatch.cost
    assert ranks * plain.between == pytest.approx(rows, rel=0.01)


@pytest.mark.parametrize(
    ("dispatcher", "way_back", "measured"),
    [("all_to_all", "all_to_all", 270), ("all_gather", "all_to_all", 186), ("hierarchical", "hierarchical", 67)],
)
def test_links_carry_what_was_measured_on_them(dispatcher: Dispatcher, way_back: Dispatcher, measured: float) -> None:
    """docs/layers.md: 2 hosts of 2 ranks, 1024 tokens a rank, top 8 of 64; MB of forward and backward together.
    all_gather sent rows back there, not sums."""
    one, cluster = replace(shape(64, 8), hidden=1024), cluster_named("h100", 4, 2)
    rows = DispatchRows(1024, 1024 * 8, 1.0, 1.0, 1024, 4)
    out, back = (dispatching(each, one, cluster, cluster.span(range(4)), rows) for each in (dispatcher, way_back))
    sent = 4 * 2 * (out.dispatch.cost.between + back.combine.cost.between)
    assert sent / 1e6 == pytest.approx(measured, rel=0.015)


def test_inside_a_host_a_relay_passes_on_a_row_for_each_expert() -> None:
    one, ranks, host = shape(32, 6), 8, 4
    inside = 0
    for rank, ids_TK in enumerate(routed(one, ranks)):
        owner_TK = ids_TK // (one.experts // ranks)
        relay_TK = owner_TK // host * host + rank % host
        inside += int((owner_TK != relay_TK).sum())
    result = costs("hierarchical", one, cluster_named("h100", ranks, host)).dispatch.cost
    assert ranks * result.inside == pytest.approx(inside * HIDDEN * 2, rel=0.01)


@pytest.mark.parametrize(("ranks", "host"), [(8, 8), (8, 2)])
def test_all_gather_sends_each_token_to_all_ranks(ranks: int, host: int) -> None:
    one = shape(32, 12)
    result = costs("all_gather", one, cluster_named("h100", ranks, host), uneven=3.0).dispatch.cost
    assert result.inside + result.between == pytest.approx((ranks - 1) * TOKENS * HIDDEN * 2), (
        "however uneven routing is"
    )


def test_over_pods_copies_take_the_links_there_are() -> None:
    fast, slow = Link("fast", 50e9, 4e-6, 0.9), Link("slow", 5e9, 4e-6, 0.9)
    cluster = replace(cluster_named("h100", 16, 4), pods=(Pod(1, fast), Pod(3, fast)), across=slow)
    one = shape(64, 4)
    result, flat = (
        costs("hierarchical", one, each).dispatch.cost for each in (cluster, replace(cluster, pods=(), across=None))
    )
    assert result.between == pytest.approx(flat.between * 2 / 3), "of a pod of three hosts, to two others"
    assert result.across == pytest.approx(flat.between), "of the host that is alone, to three"
    assert result.seconds > flat.seconds


@pytest.mark.parametrize("top_k", [1, 2, 4, 7, 8, 9, 16, 20])
def test_all_gather_pays_on_one_host_where_experts_are_more_than_ranks(top_k: int) -> None:
    """MegaScale-MoE (2505.11432), section 3.2: rows to everybody are fewer from top-k = ranks on."""
    one, place = shape(64, top_k), PlacedMapping(Mapping.parse("ep=8", 8), cluster_named("h100", 8))
    assert beats_all_to_all("all_gather", one, place, 1.0, 1.0, 2) == (top_k > 8)


def test_a_token_that_all_gather_has_brought_is_there_for_all_parts_of_its_experts() -> None:
    """MegaScale-MoE (2505.11432), section 3: with tensor-parallel experts 2 b s h (n - 1) / n; not as often as a token
    has experts."""
    one, cluster = model_named("mixtral-8x7b"), cluster_named("h100", 8)
    for degrees, n in (("etp=8", 8), ("etp=2", 2), ("ep=4,etp=2", 8)):
        place = PlacedMapping(Mapping.parse(degrees, 8, dispatcher="all_gather"), cluster)
        result = Operators(one, place, Workload(4096)).experts()
        moves = {each.name: each.bytes for each in result.forward if each.kind == "transfer"}
        assert set(moves) == {"dispatch", "combine"}
        token = 4096 * one.hidden * 2
        assert moves["dispatch"] == pytest.approx(token * (n - 1))
        etp = place.mapping.parallel.etp
        rows = one.top_k * etp * token * (n - 1) / n
        assert moves["combine"] == pytest.approx(min(rows, 2 * token * (n - 1))), "rows, or sums in fp32"
    tensor = PlacedMapping(Mapping.parse("etp=8", 8), cluster)
    assert beats_all_to_all("all_gather", one, tensor, 1.0, 1.0, 2), "two experts a token"
    assert not beats_all_to_all("all_gather", shape(64, 1), tensor, 1.0, 1.0, 4)


@pytest.mark.parametrize(("top_k", "ranks", "size"), [(8, 2, 2), (8, 4, 2), (9, 4, 2), (8, 4, 4), (2, 2, 4), (3, 2, 4)])
def test_sums_come_back_where_they_are_fewer_bytes(top_k: int, ranks: int, size: int) -> None:
    one, cluster = shape(32, top_k), cluster_named("h100", ranks)
    rows = DispatchRows(TOKENS, TOKENS * top_k, 1.0, 1.0, HIDDEN, size)
    result = dispatching("all_gather", one, cluster, cluster.span(range(ranks)), rows).combine.cost
    by_rows = top_k * TOKENS * HIDDEN * size * (ranks - 1) / ranks
    by_sums = 4 * HIDDEN * TOKENS * (ranks - 1)
    assert result.inside == pytest.approx(min(by_rows, by_sums))
    assert sends_sums("all_gather", one, ranks, size) == (by_sums < by_rows)


def test_two_levels_pay_where_rows_would_cross_more_than_once() -> None:
    cluster = cluster_named("h800", 64)
    place = PlacedMapping(Mapping.parse("ep=64", 64), cluster)

    def wins(one: ModelShape) -> bool:
        return beats_all_to_all("hierarchical", one, place, 1.0, 1.0, 2)

    assert wins(model_named("deepseek-v3")) and wins(shape(256, 8)) and not wins(shape(256, 1))
    by_limit = [costs("hierarchical", shape(256, 8, 8, top), cluster).dispatch.cost for top in (2, 4, 8)]
    assert by_limit[0].between < by_limit[1].between < by_limit[2].between
    assert remote_copies(shape(256, 8, 8, 2), 8, 1.0) == pytest.approx(2 * 7 / 8, rel=0.01)


@pytest.mark.parametrize("uneven", [1.0, 1.5, 100.0])
def test_no_token_goes_to_a_host_twice_however_uneven_routing_is(uneven: float) -> None:
    one, cluster = shape(64, 8), cluster_named("h100", 16)
    result = costs("hierarchical", one, cluster, uneven=uneven).dispatch.cost
    even = costs("hierarchical", one, cluster).dispatch.cost
    assert even.between <= result.between <= TOKENS * HIDDEN * 2 * (1 + 1e-12)
    assert result.inside == pytest.approx(uneven * even.inside)


def test_passing_on_as_rows_come_hides_the_shorter_of_the_two() -> None:
    one, cluster = model_named("deepseek-v3"), cluster_named("h800", 64)
    after, beside = (costs("hierarchical", one, cluster, overlapped=over).dispatch.cost for over in (False, True))
    wire, host = cluster.between.rate, cluster.inside.rate
    longer = max(after.between / wire, after.inside / host)
    assert longer < beside.seconds < after.seconds < after.between / wire + after.inside / host + 1e-3
    assert replace(beside, seconds=after.seconds) == after


@pytest.mark.parametrize("dispatcher", ALL)
@pytest.mark.parametrize("mapping", ["ep=16", "ep=8,etp=2", "tp=2,ep=16"])
def test_backward_goes_the_other_way_round(dispatcher: Dispatcher, mapping: str) -> None:
    def operators(dispatcher: Dispatcher) -> Operators:
        place = PlacedMapping(Mapping.parse(mapping, 16, dispatcher=dispatcher), cluster_named("h100", 16))
        return Operators(model_named("qwen3-30b-a3b"), place, Workload(4096))

    layer = operators(dispatcher).experts()
    there, back = (
        {one.name: one.cost for one in way if one.name in ("dispatch", "combine")}
        for way in (layer.forward, layer.backward)
    )
    assert set(there) == {"dispatch", "combine"}
    assert there["dispatch"] == back["combine"] and there["combine"] == back["dispatch"]
    plain = operators("all_to_all").experts()
    for kind in ("forward", "backward"):
        moved, products = (
            [one for one in getattr(each, kind) if (one.kind == "product") == wanted]
            for each, wanted in ((layer, False), (layer, True))
        )
        assert products == [one for one in getattr(plain, kind) if one.kind == "product"], "which stay the same"
        assert all(one.seconds > 0 for one in moved)


def test_fewer_tokens_are_kept_fewer_hosts_reached() -> None:
    one, cluster = shape(64, 4), cluster_named("h100", 32)
    moved: list[CollectiveCost] = [
        costs("hierarchical", one, cluster, kept=kept, uneven=kept).dispatch.cost for kept in (0.25, 0.5, 1)
    ]
    assert moved[0].between < moved[1].between < moved[2].between < 4 * moved[0].between
    assert moved[2].inside == pytest.approx(4 * moved[0].inside)


def test_a_dispatcher_that_cannot_run_is_refused() -> None:
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
        "over hosts rows go through a network"
    )
