"""``ExpertLoads``: recorded loads on any number of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.topology import ParallelConfig
from moe_comm.topology.balance import Balance
from moe_plan.machine.hardware import Cluster
from moe_plan.machine.hardware_table import cluster_named
from moe_plan.model.lending import Lending, replay_lending
from moe_plan.model.load import ExpertLoads, Workload
from moe_plan.model.mapping import Mapping
from moe_plan.search.request import PlanRequest

SMALL = ModelShape("small", 6, 512, 8, 4, 64, 4096, 8, 2, 1024, dense_layers=1, dense_ffn=2048)
HOT = (((90000, 1000, 1000, 1000, 1000, 1000, 1000, 1000),) * 3,)


def lent_on(cluster: Cluster) -> ExpertLoads:
    return ExpertLoads(HOT, "balance", lending=Lending.of(SMALL, cluster, "bf16"))


@pytest.mark.parametrize(("ranks", "kind"), [(2, "relocate"), (4, "fixed"), (1, "fixed")])
def test_experts_move_if_ranks_have_several(ranks: int, kind: str) -> None:
    placed = ExpertLoads(((((9000, 5000, 500, 500)),) * 5,), "relocate").placed(ranks)
    assert placed.kind == kind
    if kind == "fixed":
        assert placed.ratio == placed.before and placed.moved == 0
    else:
        assert placed.ratio == pytest.approx(9500 / 7500) and placed.before == pytest.approx(14000 / 7500)


def test_a_replay_lends_the_rows_above_the_limit() -> None:
    steps = [(9, 3, 1, 1), (4, 3, 4, 3)]
    lent = replay_lending(steps, 2, Balance(rows=1.0), costs=(1000, 2000))
    # In the first step, 5 rows of expert 0 on rank 1 for one copy; none in the second.
    assert lent.before == pytest.approx((12 + 7) / 14) and lent.ratio == 1.0
    assert (lent.copies, lent.busiest, lent.fresh) == (0.5, 0.5, 0.5)
    assert (lent.residents, lent.published, lent.resident) == (0.5, 0.5, 0)  # in the second step, which lends none
    assert lent.saved_s == pytest.approx((5 * 1000 - 2000) / 2 * 1e-9)
    dear = replay_lending(steps, 2, Balance(rows=1.0), costs=(1000, 6000))
    assert dear.ratio == dear.before and dear.copies == 0
    again, in_place = (replay_lending(steps[:1] * 2, 2, Balance(rows=1.0), (1000, 2000), one) for one in (False, True))
    assert (again.copies, again.resident, again.fresh) == (1, 0.5, 0.5)
    assert again.saved_s == pytest.approx((2 * 5 * 1000 - 2000) / 2 * 1e-9)
    assert (in_place.resident, in_place.residents, in_place.fresh) == (0, 0, 1)


def test_a_plan_counts_slots_bytes_and_time_of_lent_experts() -> None:
    cluster = cluster_named("h100", 4)
    expert, homes, mapping = 3 * 512 * 1024, 2, Mapping(ParallelConfig(dp=4, ep=4))
    requests = [
        PlanRequest(SMALL, cluster, Workload(4096, loads=loads), 16) for loads in (ExpertLoads(HOT), lent_on(cluster))
    ]
    (still, lent) = (one.candidate(mapping) for one in requests)
    placed = lent_on(cluster).placed(4)
    assert placed.kind == "balance" and placed.before > 3.5 > 1.2 > placed.ratio
    memories = [candidate.fit.fullest for candidate in (still, lent)]
    # In bf16: slots of 5 layers. In fp32: gradients of one layer's experts and slots.
    assert memories[1].weights - memories[0].weights == 2 * 5 * homes * expert
    assert memories[1].gradients - memories[0].gradients == 4 * 2 * homes * expert
    # Equal loads in 3 steps: all copies are resident in two of them.
    assert placed.fresh == pytest.approx(placed.moved / 3) and placed.published == pytest.approx(placed.moved * 2 / 3)
    # In 4 micro-batches of 5 layers weights in two passes, but those of residents once, and gradients.
    sent = (4 * (placed.fresh * 2 * 2 + placed.moved * 4) + placed.published * 2) * expert * 5
    assert sum(lent.step.sent["expert lending"].values()) == pytest.approx(sent)
    assert lent.step.seconds < still.step.seconds
    with pytest.raises(ConfigError, match="sharding must be replicate or zero1"):
        requests[1].fit(replace(mapping, sharding="fsdp"))


def test_ranks_that_share_memory_need_no_slots_and_send_gradients_only() -> None:
    cluster = replace(cluster_named("h100", 4), direct=True)
    lending = Lending.of(SMALL, cluster, "bf16")
    assert lending.in_place(4) and lending.bytes_of_step(3, 2, 1, ranks=4, calls=5) == 5 * 3 * 4
    assert not lending.in_place(16) and lending.bytes_of_step(3, 2, 1, ranks=16, calls=5) == 5 * (3 * 4 + 4) + 2 * 2
    mapping = Mapping(ParallelConfig(dp=4, ep=4))
    weights = [
        PlanRequest(SMALL, cluster, Workload(4096, loads=loads), 16).fit(mapping).fullest.weights
        for loads in (ExpertLoads(HOT), lent_on(cluster))
    ]
    assert weights[0] == weights[1]
