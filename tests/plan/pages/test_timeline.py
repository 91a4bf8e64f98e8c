"""Timeline of a predicted step: total time, no overlapping slices on a stream, and completeness of the operators."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest

from moe_plan.pages.timeline import STREAMS, StepTimeline, TimelineSlice, timeline
from moe_plan.step.replay import replay
from tests.plan.step.test_step import model

MAPPINGS = ["tp=2,pp=8,ep=8", "tp=2,pp=4,vpp=2,ep=4,etp=2", "tp=2,cp=2,ep=8", "pp=8,ep=2"]
SETTINGS = [
    {"overlap": overlap, "sharding": sharding, "recompute": recompute}
    for overlap, sharding, recompute in (
        ("none", "zero1", "none"),
        ("none", "fsdp", "full"),
        ("inter", "zero1", "selective"),
        ("all", "replicate", "none"),
        ("all", "fsdp", "none"),
    )
]


def streams(result: StepTimeline) -> dict[tuple[int, str], list[TimelineSlice]]:
    by_stream: dict[tuple[int, str], list[TimelineSlice]] = defaultdict(list)
    for item in result.slices:
        by_stream[item.rank, item.stream].append(item)
    return by_stream


SPLIT_SETTINGS = [
    {"pipeline": schedule, **settings} for schedule in ("zero_bubble", "zbv", "dualpipev") for settings in SETTINGS
]
"""Settings with schedules that split a backward pass into the gradients of its inputs and of its weights."""


@pytest.mark.parametrize(
    ("mapping", "settings"),
    [(mapping, settings) for mapping in MAPPINGS for settings in SETTINGS]
    + [("tp=2,pp=4,ep=8", settings) for settings in SPLIT_SETTINGS],
    ids=lambda each: each if isinstance(each, str) else "-".join(each.values()),
)
def test_a_timeline_has_the_predicted_length_and_no_overlap_within_a_stream(
    mapping: str, settings: dict[str, str]
) -> None:
    step_model = model("mixtral-8x7b", mapping, 64, batch=64, **settings)
    result = timeline(step_model)
    assert result.seconds == pytest.approx(step_model.predict().seconds, rel=1e-9)
    assert result.ranks == step_model.placed.mapping.parallel.pp and result.omitted == ""
    for (rank, stream), slices in streams(result).items():
        assert 0 <= rank < result.ranks and stream in STREAMS
        slices = sorted(slices, key=lambda item: (item.begin, item.end))
        assert all(item.end >= item.begin >= 0 for item in slices)
        assert all(a.end <= b.begin + 1e-9 for a, b in pairwise(slices)), (rank, stream)


def test_every_pass_contains_all_its_operators() -> None:
    step_model = model("mixtral-8x7b", "tp=2,pp=4,ep=8", 32, batch=16)
    result = timeline(step_model)
    for stage, passes in enumerate(step_model.stage_passes):
        for name, operations in (("forward", passes.forward), ("backward", passes.backward)):
            (whole,) = [item for item in result.of(stage, "pass") if (item.name, item.micro_batch) == (name, 1)]
            inside = [
                item
                for item in result.of(stage)
                if (item.stage, item.micro_batch) == (stage, 1)
                and whole.begin <= item.begin < item.end <= whole.end + 1e-12
                and item.stream not in ("pass", "stage", "stage back")
            ]
            assert [item.name for item in inside] == [operation.name for operation in operations]
            assert sum(item.seconds for item in inside) == pytest.approx(passes.seconds()[name == "backward"])


def test_halves_of_a_backward_pass_contain_their_own_operators() -> None:
    step_model = model("mixtral-8x7b", "tp=2,pp=4,ep=8", 32, batch=16, pipeline="zbv")
    result = timeline(step_model)
    for rank, stage in ((0, 0), (2, 2), (1, 6)):
        passes = step_model.stage_passes[stage]
        for name, operations in (("input", passes.input), ("weight", passes.weight)):
            (whole,) = [p for p in result.of(rank, "pass") if (p.name, p.stage, p.micro_batch) == (name, stage, 1)]
            inside = [
                item.name
                for item in result.of(rank)
                if (item.stage, item.micro_batch) == (stage, 1)
                and whole.begin <= item.begin < item.end <= whole.end + 1e-12
                and item.stream not in ("pass", "stage", "stage back")
            ]
            assert inside == [operation.name for operation in operations]


def test_passes_equal_the_replay_and_the_optimizer_follows_them() -> None:
    step_model = model("mixtral-8x7b", "tp=2,pp=4,ep=4", 32, batch=16)
    order, plan, seconds = step_model.pipeline()
    times = replay(plan, seconds)
    result = timeline(step_model)
    passes = [item for item in result.slices if item.stream == "pass"]
    assert [item.begin for item in passes] == times.begin[: len(order)].tolist()
    for rank in range(4):
        *_, last = sorted(result.of(rank, "pass"), key=lambda item: item.end)
        update = [item for item in result.of(rank) if item.stage < 0]
        names = [item.name for item in update]
        assert names == ["dense gradients", "expert gradients", "optimizer", "dense weights", "expert weights"]
        assert all(item.begin >= last.end - 1e-12 for item in update)


def test_transfers_overlap_with_passes_or_the_receiver_waits() -> None:
    for overlap, rank, names in (
        ("none", 0, {"stage back": {"receive gradients"}}),
        ("none", 3, {"stage": {"receive activations"}}),
        ("inter", 0, {"stage": {"send activations"}}),
        ("inter", 1, {"stage": {"send activations"}, "stage back": {"send gradients"}}),
    ):
        result = streams(timeline(model("mixtral-8x7b", "tp=2,pp=4,ep=8", 32, batch=16, overlap=overlap)))
        sent = {stream: {item.name for item in result.get((rank, stream), ())} for stream in ("stage", "stage back")}
        assert {stream: used for stream, used in sent.items() if used} == names


@pytest.mark.parametrize("overlap", ["inter", "all"])
def test_hidden_transfers_overlap_with_compute(overlap: str) -> None:
    step_model = model("mixtral-8x7b", "tp=2,pp=2,ep=8", 32, batch=16, overlap=overlap)
    result = timeline(step_model)
    operations = [op for ops in (step_model.stage_passes[0].forward, step_model.stage_passes[0].backward) for op in ops]
    hidden = sum(op.hidden for op in operations)
    total_s = sum(op.seconds for op in operations if op.kind == "transfer")
    first_micro_batch = [item for item in result.of(0) if item.micro_batch == 0]
    computes = [item for item in first_micro_batch if item.stream == "compute"]
    overlapped_s = 0.0
    for item in first_micro_batch:
        if item.stream not in ("pass", "compute", "stage", "stage back"):
            overlapped_s += sum(max(0.0, min(item.end, other.end) - max(item.begin, other.begin)) for other in computes)
    # 0.9: transfers at the start of a pass overlap little.
    assert 0 < 0.9 * hidden <= overlapped_s <= total_s * (1 + 1e-9)


def test_only_the_first_of_many_micro_batches_are_divided_into_operators() -> None:
    step_model = model("mixtral-8x7b", "tp=2,pp=4,ep=8", 32, batch=256)
    result = timeline(step_model, most=10_000)
    assert len(result.slices) <= 10_000
    assert result.seconds == pytest.approx(step_model.predict().seconds, rel=1e-9)
    divided = {item.micro_batch for item in result.slices if item.stream == "compute" and item.micro_batch >= 0}
    assert divided == set(range(len(divided))) and 0 < len(divided) < step_model.micro_batches
    assert (
        result.omitted
        == f"operators are shown for the first {len(divided)} of {step_model.micro_batches} micro-batches"
    )
    assert {item.micro_batch for item in result.slices if item.stream == "pass"} == set(range(step_model.micro_batches))
