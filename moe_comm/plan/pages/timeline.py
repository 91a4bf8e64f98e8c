"""The pieces of a predicted step on each pipeline position: passes, their operators on streams, and what follows.

    position 0   pass       [ forward 0                    ][ forward 1 ...
                 compute    [norm][qkv]       [router] [up] ...
                 gather           [gather]
                 dispatch                            [dispatch]           beside compute if they overlap
                 stage                                      [ send activations ]

Passes and transfers between positions are those of the replay; a pass is cut into its operators in their order.
Transfers that overlap take less of a pass than they last: their pieces lie beside those of "compute".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_comm.plan.pipeline.orders import PassKind
from moe_comm.plan.step.operators import Operation
from moe_comm.plan.step.parts import Parts, parts_of
from moe_comm.plan.step.step import StepModel

MOST_PIECES = 200_000
STREAMS = (
    "pass",
    "compute",
    "dispatch",
    "combine",
    "gather",
    "scatter",
    "swap",
    "transfer",
    "stage",
    "stage back",
    "gradients",
    "weights",
)
"""In the order in which they are shown. "transfer": what none of those before it is. "stage", "stage back": activations
and gradients between positions, where they are sent; at the receiver if that waits for them."""
_MOVES = ("dispatch", "combine", "gather", "scatter", "swap")


@dataclass(frozen=True, slots=True)
class Piece:
    """What a stream of a pipeline position does. Seconds after the step began; -1 where it belongs to no stage or
    micro-batch. rank: the position."""

    rank: int
    stream: str
    name: str
    begin: float
    end: float
    stage: int = -1
    micro_batch: int = -1

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Timeline:
    """A step of ``ranks`` pipeline positions. cut: what was left out because there would be too much of it, or ""."""

    pieces: tuple[Piece, ...]
    seconds: float
    ranks: int
    cut: str = ""

    def of(self, rank: int, stream: str | None = None) -> tuple[Piece, ...]:
        """The pieces of a position, on one stream or on all."""
        return tuple(one for one in self.pieces if one.rank == rank and stream in (None, one.stream))


@dataclass(frozen=True, slots=True)
class _Cut:
    """An operator within its pass; seconds after the pass began."""

    stream: str
    name: str
    begin: float
    end: float


def timeline(model: StepModel, most: int = MOST_PIECES) -> Timeline:
    """The step that ``model.predict()`` foresees, piece by piece; both take the same seconds.

    Args:
        most: pieces. With more, only the first micro-batches are cut into operators, of the others there are passes.
    """
    parts = parts_of(model)
    cuts = _cuts(model, parts)
    micro_batches = parts.order.micro_batches
    each = np.array([len(cuts[stage, way]) for stage, way in zip(parts.order.stage, parts.order.kind, strict=True)])
    per_micro = np.bincount(parts.order.micro, each, minlength=micro_batches)
    fixed = len(parts.tasks) + len(parts.after) * parts.order.pp
    detailed = int(np.searchsorted(np.cumsum(per_micro), max(most - fixed, 0), side="right"))
    pieces = [*_passes(parts, cuts, detailed), *_hops(parts), *_behind(parts)]
    cut = ""
    if detailed < micro_batches:
        cut = f"operators are shown for the first {detailed} of {micro_batches} micro-batches"
    return Timeline(tuple(pieces), max(one.end for one in pieces), parts.order.pp, cut)


def _passes(parts: Parts, cuts: dict[tuple[int, int], list[_Cut]], detailed: int) -> list[Piece]:
    order, times = parts.order, parts.times
    columns = (order.rank, order.kind, order.stage, order.micro, times.begin, times.end)
    rows = zip(*(column[: len(order)].tolist() for column in columns), strict=True)
    names = {int(kind): kind.name.lower() for kind in PassKind}
    found = []
    for rank, kind, stage, micro, begin, end in rows:
        found.append(Piece(rank, "pass", names[kind], begin, end, stage, micro))
        if micro < detailed:
            found += [
                Piece(rank, one.stream, one.name, begin + one.begin, min(begin + one.end, end), stage, micro)
                for one in cuts[stage, kind]
            ]
    return found


def _hops(parts: Parts) -> list[Piece]:
    """Transfers between positions: at the one that sends, or where the one that receives waits for them, there."""
    order, first = parts.order, len(parts.order)
    verb, ends = ("receive", parts.receiver) if parts.exposed else ("send", parts.sender)
    found = []
    for at, (sender, end) in enumerate(zip(parts.sender.tolist(), ends.tolist(), strict=True)):
        forward = order.kind[sender] == PassKind.FORWARD
        name, stream = ("activations", "stage") if forward else ("gradients", "stage back")
        span = float(parts.times.begin[first + at]), float(parts.times.end[first + at])
        place = int(order.rank[end]), int(order.stage[end]), int(order.micro[end])
        found.append(Piece(place[0], stream, f"{verb} {name}", *span, place[1], place[2]))
    return found


def _behind(parts: Parts) -> list[Piece]:
    """Sums of gradients, the optimizer and the new weights.

    What is hidden of sums comes before the last pass ends; of weights, it is where the step before left them to this
    one: beside its first passes.
    """
    kinds = [[one for one in parts.after if one.kind == kind] for kind in ("gradients", "optimizer", "weights")]
    found = []
    for rank, at in enumerate(parts.last.tolist()):
        start = 0.0
        for one in kinds[2]:
            found.append(Piece(rank, "weights", one.name, start, start + one.whole - one.seconds))
            start = found[-1].end
        start = max(at - sum(one.whole - one.seconds for one in kinds[0]), 0.0)
        at += sum(one.seconds for one in kinds[0])
        for one in kinds[0]:
            found.append(Piece(rank, "gradients", one.name, start, min(start + one.whole, at)))
            start = found[-1].end
        for stream, several in (("compute", kinds[1]), ("weights", kinds[2])):
            for one in several:
                found.append(Piece(rank, stream, one.name, at, at + one.seconds))
                at = found[-1].end
    return [one for one in found if one.end > one.begin]


# ---- a pass in operators


def _cuts(model: StepModel, parts: Parts) -> dict[tuple[int, int], list[_Cut]]:
    """The operators of each stage's passes, by kind."""
    takes: dict[tuple[int, int], float] = {}
    order = parts.order
    for stage, kind, seconds in zip(order.stage.tolist(), order.kind.tolist(), parts.seconds.tolist(), strict=False):
        takes[stage, kind] = max(seconds, takes.get((stage, kind), 0.0))
    known: dict[tuple[tuple[Operation, ...], float, float], list[_Cut]] = {}
    found = {}
    for (stage, kind), seconds in takes.items():
        key = model.stage_passes[stage].kinds[kind], seconds, float(parts.weights[stage, kind])
        if key not in known:
            known[key] = _cut(*key)
        found[stage, kind] = known[key]
    return found


def _cut(operations: tuple[Operation, ...], seconds: float, weights: float) -> list[_Cut]:
    """One operator after another in ``seconds``; a transfer begins earlier by what is hidden of it.

    weights: seconds of transfers of sharded weights, which begin first; the pass waits for what it does not hide.
    """
    found = [_Cut("weights", "weights and gradients", 0.0, min(weights, seconds))] if weights else []
    clock = max(seconds - sum(one.shown for one in operations), 0.0)
    free: dict[str, float] = {}
    for one in operations:
        if one.kind != "transfer":
            found.append(_Cut("compute", one.name, clock, clock + one.seconds))
        else:
            stream = stream_of(one)
            begin = max(clock - one.hidden, free.get(stream, 0.0))
            end = min(begin + one.seconds, seconds)
            found.append(_Cut(stream, one.name, min(begin, end), end))
            free[stream] = end
        clock += one.shown
    return found


def stream_of(operation: Operation) -> str:
    """The stream on which a transfer is shown."""
    words = operation.name.split()
    return next((move for move in _MOVES if move in words), "transfer")
