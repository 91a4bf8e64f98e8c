"""The chunks of a dispatch: every row crosses once, to its place by (expert, source rank, token, slot)."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_comm.overlap.chunk_plan import Board, Crossing, Piece, travelling_rows
from moe_comm.topology import ExpertPlacement


@st.composite
def _cases(draw: st.DrawFn) -> tuple[NDArray[np.int64], ExpertPlacement, int]:
    world = draw(st.integers(1, 4))
    experts = draw(st.integers(1, 9))
    counts = st.lists(st.integers(0, 7), min_size=world * experts, max_size=world * experts)
    rows_WE = np.array(draw(counts), np.int64).reshape(world, experts)
    return rows_WE, ExpertPlacement.of(experts, world), draw(st.integers(1, 7))


@given(_cases())
@settings(max_examples=150, deadline=None)
def test_every_row_crosses_once_to_its_place(case: tuple[NDArray[np.int64], ExpertPlacement, int]) -> None:
    rows_WE, placement, chunks = case
    world, offsets = placement.world, placement.offsets
    crossings = [Crossing.of(rows_WE, placement, rank, chunks) for rank in range(world)]
    for here in range(world):
        # A row is named by its source and its place among that rank's slots, sorted by expert.
        found: dict[int, tuple[int, int]] = {}
        for chunk in range(chunks):
            arriving = []
            for source in range(world):
                sent = crossings[source].chunks[chunk]
                ends = np.concatenate(([0], np.cumsum(sent.send)))
                leaving = sent.leaving_S.tolist()[ends[here] : ends[here + 1]]
                assert len(leaving) == crossings[here].chunks[chunk].receive[source]
                arriving += [(source, slot) for slot in leaving]
            for place, row in zip(crossings[here].chunks[chunk].arriving_R.tolist(), arriving, strict=True):
                assert found.setdefault(place, row) == row
        slots = range(crossings[here].own_slots.start, crossings[here].own_slots.stop)
        for place, slot in zip(crossings[here].own_R.tolist(), slots, strict=True):
            assert found.setdefault(place, (here, slot)) == (here, slot)
        wanted = [
            (source, int(rows_WE[source, :expert].sum()) + row)
            for expert in range(offsets[here], offsets[here + 1])
            for source in range(world)
            for row in range(rows_WE[source, expert])
        ]
        assert [found[place] for place in range(len(wanted))] == wanted
        assert len(found) == len(wanted)


@given(_cases(), st.randoms())
@settings(max_examples=150, deadline=None)
def test_every_row_is_computed_once_and_none_before_it_is_there(
    case: tuple[NDArray[np.int64], ExpertPlacement, int], random: object
) -> None:
    rows_WE, placement, chunks = case
    for rank in range(placement.world):
        crossing = Crossing.of(rows_WE, placement, rank, chunks)
        here = set(crossing.own_R.tolist())
        computed: list[int] = []

        def compute(piece: Piece, here: set[int] = here, computed: list[int] = computed) -> None:
            rows = range(piece.first, piece.end)
            assert here.issuperset(rows)
            computed.extend(rows)

        board = Board(crossing.parts)
        for chunk in range(chunks):
            for _ in range(random.randrange(3)):  # type: ignore[attr-defined]
                if (piece := board.own()) is not None:
                    compute(piece)
            here.update(crossing.chunks[chunk].arriving_R.tolist())
            for piece in board.arrived([chunk]):
                compute(piece)
        while (piece := board.own()) is not None:
            compute(piece)
        assert sorted(computed) == list(range(rows_WE[:, placement.local_range(rank)].sum()))


def test_most_experts_arrive_whole_and_with_own_rows_in_one_piece() -> None:
    """Rank 1 of 3 with experts 4 to 7, four chunks: chunk c is expert c, and own rows join it if they still wait."""
    placement = ExpertPlacement.of(12, 3)
    crossing = Crossing.of(np.full((3, 12), 5), placement, 1, 4)
    assert [len(chunk.pieces) for chunk in crossing.chunks] == [2, 2, 2, 2]
    board = Board(crossing.parts)
    assert board.own() == Piece(3, 50, 55)  # of the expert whose others come last
    assert board.arrived([0]) == (Piece(0, 0, 15),)
    assert board.arrived([3]) == (Piece(3, 45, 50), Piece(3, 55, 60))
    assert travelling_rows(np.full((3, 12), 5), placement) == 40
