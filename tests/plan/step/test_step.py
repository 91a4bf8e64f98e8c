"""Predicted steps: causes add up, pipelines idle as the schedule determines, and single ranks send nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_comm.errors import ConfigError
from moe_plan.machine.hardware_table import cluster_named
from moe_plan.model.files import model_named
from moe_plan.model.load import Workload
from moe_plan.model.mapping import Mapping, PlacedMapping
from moe_plan.model.memory import MemoryPolicy
from moe_plan.step import blocks as blocks_module, step as step_module
from moe_plan.step.blocks import exposed_seconds
from moe_plan.step.replay import ReplayPlan, replay
from moe_plan.step.step import FULL, StepModel, StepPrediction, _period


def model(
    name: str, mapping: str, gpus: int, *, batch: int = 256, seq: int = 4096, reshard: bool = False, **settings: object
) -> StepModel:
    placed = PlacedMapping(Mapping.parse(mapping, gpus, **settings), cluster_named("h100", gpus))
    return StepModel(model_named(name), placed, Workload(seq, capacity=1.0), batch, MemoryPolicy(reshard=reshard))


def step(name: str, mapping: str, gpus: int, **settings: object) -> StepPrediction:
    return model(name, mapping, gpus, **settings).predict()  # type: ignore[arg-type]


@pytest.mark.parametrize("mapping", ["tp=2,pp=8,ep=8", "tp=2,pp=4,vpp=2,ep=4,etp=2", "tp=2,cp=2,ep=8", "ep=8"])
def test_parts_add_up_to_the_step(mapping: str) -> None:
    result = step("mixtral-8x22b", mapping, 128)
    assert sum(result.breakdown.values()) == pytest.approx(result.seconds)
    assert min(result.breakdown.values()) > -1e-9
    assert 0.05 < result.mfu < 0.8
    assert result.tokens_per_s == pytest.approx(256 * 4096 / result.seconds)
    assert result.mfu * result.seconds == pytest.approx(result.model_flops / (128 * 989.5e12), rel=1e-3)


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble", "zbv", "dualpipev"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"overlap": "all", "recompute": "selective"}, {"recompute": "full"}, {"sharding": "fsdp", "overlap": "inter"}],
    ids=lambda settings: "-".join(settings.values()),
)
def test_parts_of_every_schedule_add_up(schedule: str, settings: dict[str, str]) -> None:
    step_model = model("mixtral-8x22b", "tp=2,pp=4,ep=8", 64, batch=128, pipeline=schedule, **settings)
    result = step_model.predict()
    assert sum(result.breakdown.values()) == pytest.approx(result.seconds)
    assert min(result.breakdown.values()) > -1e-9
    order, plan, seconds = step_model.pipeline()
    busy = [seconds[: len(order)][order.rank == rank].sum() for rank in range(4)]
    assert step_model.busy == pytest.approx(np.array(busy))
    assert step_model.span == pytest.approx(float(replay(plan, seconds).span), rel=1e-12)
    waiting = {"pipeline", "gradients and weights", "optimizer"}
    assert sum(cause_s for name, cause_s in result.breakdown.items() if name not in waiting) == pytest.approx(max(busy))
    whole = model("mixtral-8x22b", "tp=2,pp=4,ep=8", 64, batch=128, **settings).predict()
    for name in ("dispatch", "combine"):
        sent, usual = (sum(each.sent[name].values()) for each in (result, whole))
        assert sent == pytest.approx(usual), "all schedules send the same bytes"


def test_split_backward_passes_leave_less_of_a_bubble_and_cost_more_work() -> None:
    def result(schedule: str | None) -> StepModel:
        return model("mixtral-8x22b", "tp=2,pp=8,ep=8", 128, pipeline=schedule)

    plain = result(None)
    for schedule in ("zero_bubble", "zbv", "dualpipev"):
        step_model = result(schedule)
        assert step_model.predict().breakdown["pipeline"] < plain.predict().breakdown["pipeline"] / 2
        assert step_model.busy.sum() > plain.busy.sum(), "some gradient work is repeated in the second half"
    fused = model("mixtral-8x22b", "tp=2,pp=8,ep=8", 128, pipeline="zero_bubble", overlap="all")
    assert fused.predict().breakdown["products"] == pytest.approx(plain.predict().breakdown["products"])


def test_one_rank_sends_nothing_and_never_waits() -> None:
    result = step("olmoe-1b-7b", "", 1, batch=4)
    assert result.sent == {} and set(result.breakdown) == {
        "products",
        "memory passes",
        "pipeline",
        "gradients and weights",
        "optimizer",
    }
    assert result.breakdown["pipeline"] == pytest.approx(0) and result.breakdown["gradients and weights"] == 0


def test_the_bubble_of_equal_stages_matches_the_schedule() -> None:
    result = model("llama3-8x70b", "tp=8,pp=16,ep=8", 256, overlap="inter")
    busy = [sum(one.seconds()) for one in result.stage_passes]
    parts = result.predict().breakdown
    # The last stage also has the head. All other stages wait for it, except at the start and end of the step.
    whole, others = result.micro_batches * busy[-1], sum(busy[:-1])
    assert max(busy) == busy[-1]
    assert parts["pipeline"] == pytest.approx(others, rel=0.03)
    assert parts["pipeline"] / whole == pytest.approx(15 / 128, rel=0.15)


@pytest.mark.parametrize(("mapping", "sends_per_micro_batch"), [("pp=2,ep=8", 1), ("pp=2,vpp=2,ep=8", 3)])
def test_first_and_last_stages_send_in_one_direction(mapping: str, sends_per_micro_batch: int) -> None:
    result = model("mixtral-8x22b", mapping, 16, batch=32)
    sent = sum(result.predict().sent["stages"].values())
    # Every stage but the last sends activations, every stage but the first sends gradients: the rows in bf16.
    assert sent == sends_per_micro_batch * result.micro_batches * 4096 * 6144 * 2


def test_more_stages_per_rank_reduce_the_bubble() -> None:
    plain = step("mixtral-8x22b", "tp=2,pp=8,ep=8", 128, overlap="inter").breakdown["pipeline"]
    interleaved = step("mixtral-8x22b", "tp=2,pp=8,vpp=7,ep=8", 128, overlap="inter").breakdown["pipeline"]
    assert interleaved < plain / 3
    waiting = step("mixtral-8x22b", "tp=2,pp=8,vpp=7,ep=8", 128).breakdown["pipeline"]
    assert waiting > interleaved, "more transfers between stages, and ranks wait for them"


def test_recomputation_costs_the_repeated_work() -> None:
    def backward(recompute: str) -> float:
        result = model("mixtral-8x7b", "tp=2,pp=2,ep=8", 32, recompute=recompute)
        return result.stage_passes[0].seconds()[1]

    forward = model("mixtral-8x7b", "tp=2,pp=2,ep=8", 32).stage_passes[0].seconds()[0]
    embedding = model("mixtral-8x7b", "tp=2,pp=2,ep=8", 32).operators.embedding().seconds()[0]
    assert backward("none") < backward("selective") < backward("full")
    assert backward("full") == pytest.approx(backward("none") + forward - embedding)


def test_bytes_of_gradients_and_weights_are_those_of_the_sharding() -> None:
    def sent(sharding: str) -> dict[str, float]:
        result = step("mixtral-8x7b", "ep=8", 64, sharding=sharding).sent
        return {name: sum(links.values()) for name, links in result.items() if "gradients" in name or "weights" in name}

    shape = model_named("mixtral-8x7b")
    experts = shape.parameters()["experts"] / 8
    zero1, replicate = sent("zero1"), sent("replicate")
    # Each of the 8 replicas of an expert is on another host, so all bytes are sent between hosts.
    assert zero1["expert gradients"] == pytest.approx(4 * experts * 7 / 8)
    assert zero1["expert weights"] == pytest.approx(2 * experts * 7 / 8)
    assert replicate["expert gradients"] == pytest.approx(2 * 4 * experts * 7 / 8)
    assert "expert weights" not in replicate
    fsdp = step("mixtral-8x7b", "ep=8", 64, sharding="fsdp", batch=64).sent  # one micro-batch
    assert sum(fsdp["expert gradients"].values()) == pytest.approx(4 * experts * 7 / 8)
    assert sum(fsdp["expert weights"].values()) == pytest.approx(2 * 2 * experts * 7 / 8)


def test_sharded_weights_cost_the_time_that_compute_does_not_hide() -> None:
    few = step("mixtral-8x22b", "ep=8", 128, sharding="fsdp", batch=128)
    many = step("mixtral-8x22b", "ep=8", 128, sharding="fsdp", batch=128 * 16, micro_batch=16)
    overlapped = step("mixtral-8x22b", "ep=8", 128, sharding="fsdp", batch=128 * 16, micro_batch=16, overlap="inter")
    assert few.breakdown["sharded weights"] > 0.3 * few.seconds and "sharded weights" not in few.hidden
    assert few.breakdown["sharded weights"] == pytest.approx(many.breakdown["sharded weights"]), (
        "not hidden without overlap"
    )
    visible, hidden = overlapped.breakdown["sharded weights"], overlapped.hidden["sharded weights"]
    assert visible + hidden == pytest.approx(few.breakdown["sharded weights"])
    assert visible < 0.25 * hidden, "16 times the work hides all but the slowdown of compute"


def test_sharded_weights_of_a_dense_model_use_all_nics_of_a_host() -> None:
    """On 8 hosts of 8, each NIC carries an eighth of the bytes: two gathers in bf16 and one scatter in fp32."""
    result = step("llama3-70b", "", 64, sharding="fsdp", batch=64)
    parameters, rate = model_named("llama3-70b").params, 50e9 * 0.9
    expected = 8 * parameters * (63 / 64) / 8 / rate
    assert result.breakdown["sharded weights"] == pytest.approx(expected, rel=0.02)


PUBLISHED = [
    ("mixtral-8x22b", "tp=2,pp=8,ep=4", True, 128, 46.3),
    ("qwen2-57b-a14b", "tp=2,pp=4,ep=4", True, 64, 35.3),
    ("mixtral-8x22b-g8t8", "tp=2,pp=8,ep=8", True, 128, 17.1),
    ("llama3-8x70b", "tp=8,pp=8,ep=4", True, 256, 38.8),
    ("mixtral-8x22b", "tp=2,pp=8,ep=8", False, 128, 49.3),
    ("qwen2-57b-a14b", "tp=2,pp=4,ep=4", False, 64, 39.0),
    ("mixtral-8x22b-g8t8", "tp=4,pp=8,ep=8", False, 128, 28.8),
    ("llama3-8x70b", "tp=8,pp=16,ep=8", False, 256, 41.6),
]
"""MoE Parallel Folding (2504.14960), table 3: model, mapping, whether it is coupled, GPUs, MFU in percent."""


def test_published_mfu_is_predicted_and_folding_is_always_faster() -> None:
    result = [100 * step(name, mapping, gpus, coupled=coupled).mfu for name, mapping, coupled, gpus, _ in PUBLISHED]
    errors = [abs(mfu / row[-1] - 1) for mfu, row in zip(result, PUBLISHED, strict=True)]
    assert sorted(errors)[4] < 0.12 and max(errors) < 0.25, errors
    assert all(folded > coupled for coupled, folded in zip(result[:4], result[4:], strict=True))


def test_indivisible_layers_and_batches_are_rejected() -> None:
    with pytest.raises(ConfigError, match="layers cannot fill"):
        step("mixtral-8x7b", "pp=64", 64)
    with pytest.raises(ConfigError, match="cannot be divided"):
        model("mixtral-8x7b", "ep=8", 64, batch=100)


@pytest.mark.parametrize("mapping", ["tp=2,pp=2,ep=8", "cp=4,ep=4", "ep=4,etp=2"])
def test_more_overlap_hides_more_and_reports_it(mapping: str) -> None:
    none, inter, every = (step("qwen2-57b-a14b", mapping, 32, overlap=name) for name in ("none", "inter", "all"))
    assert none.seconds > inter.seconds > every.seconds
    assert none.hidden == {} and sum(every.hidden.values()) > sum(inter.hidden.values()) > 0
    for result in (inter, every):
        assert sum(result.breakdown.values()) == pytest.approx(result.seconds)
        assert set(result.hidden) <= set(result.sent)
        assert result.sent == none.sent, "overlap must not change the bytes"
        for name in ("dispatch", "combine"):
            assert result.breakdown[name] + result.hidden[name] == pytest.approx(none.breakdown[name])
    parts = ("expert gradients", "dense gradients", "dense weights", "expert weights")
    hidden = sum(inter.hidden.get(name, 0.0) for name in parts)
    assert inter.breakdown["gradients and weights"] + hidden == pytest.approx(none.breakdown["gradients and weights"])


@pytest.mark.parametrize("virtual", [1, 4])
def test_overlap_outer_hides_only_transfers_between_passes(virtual: int) -> None:
    mapping = f"tp=2,pp=4,vpp={virtual},ep=4" if virtual > 1 else "tp=2,pp=4,ep=4"
    none, outer, inter = (step("mixtral-8x7b", mapping, 64, overlap=name) for name in ("none", "outer", "inter"))
    assert none.seconds > outer.seconds > inter.seconds
    within = ("dispatch", "combine", "attention gather", "attention scatter", "products", "memory passes")
    assert {name: outer.breakdown[name] for name in within} == {name: none.breakdown[name] for name in within}
    assert {name.split()[-1] for name in outer.hidden} == {"gradients", "weights"}
    assert outer.breakdown["gradients and weights"] == pytest.approx(inter.breakdown["gradients and weights"], abs=0.1)
    assert (outer.breakdown["pipeline"] < none.breakdown["pipeline"]) == (virtual > 1), "1F1B waits for transfers"


def test_weights_are_sent_in_the_compute_dtype() -> None:
    def moved(dtype: str) -> dict[str, dict[str, float]]:
        placed = PlacedMapping(Mapping.parse("ep=8", 64), cluster_named("h100", 64))
        return StepModel(model_named("mixtral-8x7b"), placed, Workload(4096, dtype), 256).predict().sent

    bf16, fp32, fp8 = moved("bf16"), moved("fp32"), moved("fp8")
    assert fp32["expert weights"]["between"] == 2 * bf16["expert weights"]["between"]
    assert fp8["expert weights"] == bf16["expert weights"], "fp8 does not change the dtype of gathered weights"
    assert fp32["expert gradients"] == bf16["expert gradients"], "sums are in fp32"
    assert fp32["dispatch"]["inside"] == 2 * bf16["dispatch"]["inside"]


def test_extrapolating_the_steady_state_equals_a_full_replay() -> None:
    for mapping, batch in (("tp=2,pp=4,ep=8", 640), ("tp=2,pp=4,vpp=2,ep=8", 640), ("tp=4,pp=2,ep=8", 352)):
        for overlap in ("none", "inter"):
            result = model("mixtral-8x7b", mapping, 64, batch=batch, overlap=overlap)
            assert result.micro_batches > (FULL + 1) * result.placed.mapping.parallel.pp
            _, plan, seconds = result.pipeline()
            assert result.span == pytest.approx(float(replay(plan, seconds).span), rel=1e-12)
            replayed = result._replayed(FULL * result.placed.mapping.parallel.pp)
            assert _period(replayed[0], replay(*replayed[1:]).end[: len(replayed[0])], result.span) is not None


def test_the_cost_of_a_prediction_is_independent_of_ranks_and_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 accelerators replay as many tasks and time as many blocks as 1,440 with the same pipeline."""
    tasks, timed = [], []
    real, blocks = step_module.replay, step_module.Operators

    def counted_replay(plan: ReplayPlan, seconds: object) -> object:
        tasks.append(len(plan.tasks))
        return real(plan, seconds)  # type: ignore[arg-type]

    def counted_operators(*args: object) -> object:
        timed.append(args)
        return blocks(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(step_module, "replay", counted_replay)
    monkeypatch.setattr(step_module, "Operators", counted_operators)
    monkeypatch.setattr(blocks_module, "Operators", counted_operators)
    blocks_module._block_costs.cache_clear()
    for gpus, batch in ((1440, 18 * 100), (100_000, 1250 * 100), (100_000, 1250 * 400)):
        assert step("deepseek-v3", "tp=8,pp=10,ep=8", gpus, batch=batch).seconds > 0
    assert len(tasks) == 3 and len(set(tasks)) == 1, "the replay does not grow in the steady state"
    assert len(timed) <= 2 + 3, "blocks once for each cluster, rows between stages once for each step"


def test_gpipe_is_no_faster_than_1f1b() -> None:
    for overlap in ("none", "inter"):
        plain, gpipe = (
            step("mixtral-8x22b", "tp=2,pp=8,ep=8", 128, overlap=overlap, pipeline=schedule)
            for schedule in (None, "gpipe")
        )
        assert gpipe.seconds == pytest.approx(plain.seconds, rel=1e-9)


def test_gradients_overlap_with_backward_and_weights_with_forward() -> None:
    def result(sharding: str, host_size: int = 1, **load: object) -> StepPrediction:
        cluster = replace(cluster_named("h100", 16, host_size), direct=True)
        placed = PlacedMapping(Mapping.parse("ep=8", 16, sharding=sharding), cluster)
        return StepModel(model_named("olmoe-1b-7b"), placed, Workload(4096, **load), 64).predict()  # type: ignore[arg-type]

    for sharding in ("replicate", "zero1"):
        late, early = result(sharding), result(sharding, overlap_gradients=True)
        kinds = ("gradients", "weights") if sharding == "zero1" else ("gradients",)
        assert {name.split()[-1] for name in early.hidden} == set(kinds) and not late.hidden
        assert late.seconds - early.seconds == pytest.approx(sum(early.hidden.values()))
        assert not result(sharding, 16, overlap_gradients=True).hidden, "CPU ranks of a host copy with their cores"
        assert {name.split()[0] for name in early.hidden} == {"dense", "expert"}
    assert exposed_seconds(3.0, 2.0) == 1.0 and exposed_seconds(2.0, 3.0) == 0.0


def test_bf16_gradients_send_half_the_bytes() -> None:
    for sharding in ("replicate", "zero1", "fsdp"):
        placed = PlacedMapping(Mapping.parse("ep=1", 2, sharding=sharding), cluster_named("h100", 2, 1))
        full, half = (
            StepModel(model_named("olmoe-1b-7b"), placed, Workload(512, gradient_bytes=size), 2).predict()
            for size in (4, 2)
        )
        assert half.seconds < full.seconds
        if sharding == "replicate":
            sent = [sum(sum(links.values()) for links in one.sent.values()) for one in (half, full)]
            assert sent[0] == pytest.approx(sent[1] / 2)


def test_chunks_hide_transfers_between_hosts_behind_experts_only() -> None:
    def result(overlap: str, host_size: int, dispatcher: str = "all_to_all") -> StepPrediction:
        mapping = Mapping.parse("ep=4", 4, overlap=overlap, dispatcher=dispatcher)
        cluster = replace(cluster_named("h100", 4, host_size), direct=True)
        placed = PlacedMapping(mapping, cluster)
        return StepModel(model_named("olmoe-1b-7b"), placed, Workload(4096), 16).predict()

    serial, chunked = result("none", 1), result("chunks", 1)
    assert set(chunked.hidden) == {"dispatch", "combine"}
    assert serial.seconds - chunked.seconds == pytest.approx(sum(chunked.hidden.values()))
    assert not result("chunks", 4).hidden, "ranks of a host copy rows with the cores that compute"
    assert not result("chunks", 1, "all_gather").hidden
