"""The pieces of a predicted step: as long as the prediction, nothing twice on a stream, all of what operators take."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest

from moe_comm.plan.pages.timeline import STREAMS, Piece, Timeline, timeline
from moe_comm.plan.step.replay import replay
from tests.plan.step.test_step import model

MAPPINGS = ["tp=2,pp=8,ep=8", "tp=2,pp=4,vpp=2,ep=4,etp=2", "tp=2,cp=2,ep=8", "pp=8,ep=2"]
WAYS = [
    {"overlap": overlap, "sharding": sharding, "recompute": recompute}
    for overlap, sharding, recompute in (
        ("none", "zero1", "none"),
        ("none", "fsdp", "full"),
        ("inter", "zero1", "selective"),
        ("all", "replicate", "none"),
        ("all", "fsdp", "none"),
    )
]


def streams(found: Timeline) -> dict[tuple[int, str], list[Piece]]:
    every: dict[tuple[int, str], list[Piece]] = defaultdict(list)
    for one in found.pieces:
        every[one.rank, one.stream].append(one)
    return every


SPLIT = [{"pipeline": schedule, **way} for schedule in ("zero_bubble", "zbv", "dualpipev") for way in WAYS]


@pytest.mark.parametrize(
    ("mapping", "way"),
    [(mapping, way) for mapping in MAPPINGS for way in WAYS] + [("tp=2,pp=4,ep=8", way) for way in SPLIT],
    ids=lambda each: each if isinstance(each, str) else "-".join(each.values()),
)
def test_a_timeline_is_as_long_as_the_prediction_and_no_stream_does_two_things_at_once(
    mapping: str, way: dict[str, str]
) -> None:
    one = model("mixtral-8x7b", mapping, 64, batch=64, **way)
    found = timeline(one)
    assert found.seconds == pytest.approx(one.predict().seconds, rel=1e-9)
    assert found.ranks == one.place.mapping.parallel.pp and found.cut == ""
    for (rank, stream), pieces in streams(found).items():
        assert 0 <= rank < found.ranks and stream in STREAMS
        pieces = sorted(pieces, key=lambda piece: (piece.begin, piece.end))
        assert all(piece.end >= piece.begin >= 0 for piece in pieces)
        assert all(a.end <= b.begin + 1e-9 for a, b in pairwise(pieces)), (rank, stream)


def test_every_operator_of_every_pass_is_there_and_inside_its_pass() -> None:
    one = model("mixtral-8x7b", "tp=2,pp=4,ep=8", 32, batch=16)
    found = timeline(one)
    for stage, passes in enumerate(one.stage_passes):
        for name, operations in (("forward", passes.forward), ("backward", passes.backward)):
            (whole,) = [piece for piece in found.of(stage, "pass") if (piece.name, piece.micro_batch) == (name, 1)]
            inside = [
                piece
                for piece in found.of(stage)
                if (piece.stage, piece.micro_batch) == (stage, 1)
                and whole.begin <= piece.begin < piece.end <= whole.end + 1e-12
                and piece.stream not in ("pass", "stage", "stage back")
            ]
            assert [piece.name for piece in inside] == [operation.name for operation in operations]
            assert sum(piece.seconds for piece in inside) == pytest.approx(passes.seconds()[name == "backward"])


def test_halves_of_a_backward_have_the_operators_of_their_own() -> None:
    one = model("mixtral-8x7b", "tp=2,pp=4,ep=8", 32, batch=16, pipeline="zbv")
    found = timeline(one)
    for rank, stage in ((0, 0), (2, 2), (1, 6)):
        passes = one.stage_passes[stage]
        for name, operations in (("input", passes.input), ("weight", passes.weight)):
            (whole,) = [p for p in found.of(rank, "pass") if (p.name, p.stage, p.micro_batch) == (name, stage, 1)]
            inside = [
                piece.name
                for piece in found.of(rank)
                if (piece.stage, piece.micro_batch) == (stage, 1)
                and whole.begin <= piece.begin < piece.end <= whole.end + 1e-12
                and piece.stream not in ("pass", "stage", "stage back")
            ]
            assert inside == [operation.name for operation in operations]


def test_passes_are_those_of_the_replay_and_the_optimizer_is_behind_them() -> None:
    one = model("mixtral-8x7b", "tp=2,pp=4,ep=4", 32, batch=16)
    order, plan, seconds = one.pipeline()
    times = replay(plan, seconds)
    found = timeline(one)
    passes = [piece for piece in found.pieces if piece.stream == "pass"]
    assert [piece.begin for piece in passes] == times.begin[: len(order)].tolist()
    for rank in range(4):
        *_, last = sorted(found.of(rank, "pass"), key=lambda piece: piece.end)
        behind = [piece for piece in found.of(rank) if piece.stage < 0]
        names = [piece.name for piece in behind]
        assert names == ["dense gradients", "expert gradients", "optimizer", "dense weights", "expert weights"]
        assert all(piece.begin >= last.end - 1e-12 for piece in behind)


def test_neighbours_send_beside_passes_or_the_receiver_waits() -> None:
    for overlap, rank, names in (
        ("none", 0, {"stage back": {"receive gradients"}}),
        ("none", 3, {"stage": {"receive activations"}}),
        ("inter", 0, {"stage": {"send activations"}}),
        ("inter", 1, {"stage": {"send activations"}, "stage back": {"send gradients"}}),
    ):
        found = streams(timeline(model("mixtral-8x7b", "tp=2,pp=4,ep=8", 32, batch=16, overlap=overlap)))
        told = {stream: {piece.name for piece in found.get((rank, stream), ())} for stream in ("stage", "stage back")}
        assert {stream: some for stream, some in told.items() if some} == names


@pytest.mark.parametrize("overlap", ["inter", "all"])
def test_transfers_that_are_hidden_lie_beside_what_computes(overlap: str) -> None:
    one = model("mixtral-8x7b", "tp=2,pp=2,ep=8", 32, batch=16, overlap=overlap)
    found = timeline(one)
    operations = [each for way in (one.stage_passes[0].forward, one.stage_passes[0].backward) for each in way]
    hidden = sum(each.hidden for each in operations)
    moved = sum(each.seconds for each in operations if each.kind == "transfer")
    mine = [piece for piece in found.of(0) if piece.micro_batch == 0]
    computes = [piece for piece in mine if piece.stream == "compute"]
    beside = 0.0
    for piece in mine:
        if piece.stream not in ("pass", "compute", "stage", "stage back"):
            beside += sum(max(0.0, min(piece.end, c.end) - max(piece.begin, c.begin)) for c in computes)
    assert 0 < 0.9 * hidden <= beside <= moved * (1 + 1e-9), "what comes first has little to hide behind"


def test_of_many_micro_batches_only_the_first_are_cut_into_operators_and_that_is_said() -> None:
    one = model("mixtral-8x7b", "tp=2,pp=4,ep=8", 32, batch=256)
    found = timeline(one, most=10_000)
    assert len(found.pieces) <= 10_000
    assert found.seconds == pytest.approx(one.predict().seconds, rel=1e-9)
    cut = {piece.micro_batch for piece in found.pieces if piece.stream == "compute" and piece.micro_batch >= 0}
    assert cut == set(range(len(cut))) and 0 < len(cut) < one.micro_batches
    assert found.cut == f"operators are shown for the first {len(cut)} of {one.micro_batches} micro-batches"
    assert {piece.micro_batch for piece in found.pieces if piece.stream == "pass"} == set(range(one.micro_batches))
