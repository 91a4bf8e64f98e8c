"""The chunks of a dispatch: each row is sent once, to its position by (expert, source rank, token, slot)."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from moe_comm.overlap.chunk_plan import ChunkPlan, PendingOwnRows, RowRange, max_sent_rows
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
def test_every_row_is_sent_once_to_its_position(case: tuple[NDArray[np.int64], ExpertPlacement, int]) -> None:
    rows_WE, placement, chunks = case
    world, offsets = placement.world, placement.offsets
    plans = [ChunkPlan.of(rows_WE, placement, rank, chunks) for rank in range(world)]
    for receiver in range(world):
        # A row is identified by its source and its index in that rank's slots, sorted by expert.
        received: dict[int, tuple[int, int]] = {}
        for chunk in range(chunks):
            rows = []
            for source in range(world):
                sent = plans[source].chunks[chunk]
                ends = np.concatenate(([0], np.cumsum(sent.send_counts)))
                slots_sent = sent.send_S.tolist()[ends[receiver] : ends[receiver + 1]]
                assert len(slots_sent) == plans[receiver].chunks[chunk].receive_counts[source]
                rows += [(source, slot) for slot in slots_sent]
            for position, row in zip(plans[receiver].chunks[chunk].receive_R.tolist(), rows, strict=True):
                assert received.setdefault(position, row) == row
        slots = range(plans[receiver].own_slots.start, plans[receiver].own_slots.stop)
        for position, slot in zip(plans[receiver].own_R.tolist(), slots, strict=True):
            assert received.setdefault(position, (receiver, slot)) == (receiver, slot)
        expected = [
            (source, int(rows_WE[source, :expert].sum()) + row)
            for expert in range(offsets[receiver], offsets[receiver + 1])
            for source in range(world)
            for row in range(rows_WE[source, expert])
        ]
        assert [received[position] for position in range(len(expected))] == expected
        assert len(received) == len(expected)


@given(_cases(), st.randoms())
@settings(max_examples=150, deadline=None)
def test_every_row_is_computed_once_and_after_it_is_received(
    case: tuple[NDArray[np.int64], ExpertPlacement, int], random: object
) -> None:
    rows_WE, placement, chunks = case
    for rank in range(placement.world):
        chunk_plan = ChunkPlan.of(rows_WE, placement, rank, chunks)
        received = set(chunk_plan.own_R.tolist())
        computed: list[int] = []

        def compute(row_range: RowRange, received: set[int] = received, computed: list[int] = computed) -> None:
            rows = range(row_range.first, row_range.end)
            assert received.issuperset(rows)
            computed.extend(rows)

        pending = PendingOwnRows(chunk_plan.segments)
        for chunk in range(chunks):
            for _ in range(random.randrange(3)):  # type: ignore[attr-defined]
                if (row_range := pending.pop()) is not None:
                    compute(row_range)
            received.update(chunk_plan.chunks[chunk].receive_R.tolist())
            for row_range in pending.join([chunk]):
                compute(row_range)
        while (row_range := pending.pop()) is not None:
            compute(row_range)
        assert sorted(computed) == list(range(rows_WE[:, placement.local_range(rank)].sum()))


def test_received_rows_of_a_chunk_merge_with_pending_own_rows() -> None:
    """Rank 1 of 3 with experts 4 to 7, four chunks: chunk c is expert c, merged with pending own rows."""
    placement = ExpertPlacement.of(12, 3)
    chunk_plan = ChunkPlan.of(np.full((3, 12), 5), placement, 1, 4)
    assert [len(chunk.ranges) for chunk in chunk_plan.chunks] == [2, 2, 2, 2]
    pending = PendingOwnRows(chunk_plan.segments)
    assert pending.pop() == RowRange(3, 50, 55)  # own rows of the last expert
    assert pending.join([0]) == (RowRange(0, 0, 15),)
    assert pending.join([3]) == (RowRange(3, 45, 50), RowRange(3, 55, 60))
    assert max_sent_rows(np.full((3, 12), 5), placement) == 40
