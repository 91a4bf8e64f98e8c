"""The search for the culprit in the status of all ranks, and the report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.watch.graph import OpenSpan, RankStatus, Verdict, analyse, isolated_host, waits
from moe_comm.runtime.watch.report import describe, main_first, statuses_from_json, statuses_to_json

WORLD = (0, 1, 2, 3)


def at_work(rank: int, stalled_s: float = 0.0, **more: Any) -> RankStatus:
    """Return the status of a rank that computes. Its timeout is 5 s."""
    return RankStatus(rank, stalled_s=stalled_s, open_spans=(OpenSpan(Kind.COMPUTE, "experts", stalled_s),), **more)


def waiting(
    rank: int, group: tuple[int, ...], call: int, age_s: float = 6.0, kind: Kind = Kind.COLLECTIVE
) -> RankStatus:
    open_spans = (OpenSpan(Kind.STEP, "step", age_s), OpenSpan(kind, "sum", age_s, group=group, call=call))
    return RankStatus(rank, stalled_s=age_s, open_spans=open_spans, calls={(group, kind): call})


def culprits(*statuses: RankStatus) -> tuple[int, ...]:
    verdict = analyse(statuses)
    return () if verdict is None else verdict.ranks


def test_no_culprit_while_all_ranks_make_progress() -> None:
    assert analyse([at_work(0), at_work(1), waiting(2, WORLD, 1, 0.1)]) is None
    assert analyse([]) is None


def test_the_rank_that_waits_for_no_rank_is_the_culprit_after_its_timeout() -> None:
    others = [waiting(rank, WORLD, 7) for rank in (0, 2, 3)]
    assert culprits(*others, at_work(1, 4.9)) == ()
    assert culprits(*others, at_work(1, 5.1)) == (1,)
    assert culprits(*others, at_work(1, 5.1, timeout_s=50.0)) == ()


def test_a_stalled_rank_for_which_no_rank_waits_is_no_culprit() -> None:
    assert culprits(at_work(0), at_work(1, 100.0)) == ()
    assert culprits(waiting(0, (0, 2), 3), at_work(1, 100.0), at_work(2)) == ()


def test_a_rank_that_others_have_just_begun_to_wait_for_is_no_culprit() -> None:
    assert culprits(waiting(0, (0, 1), 3, 0.5), at_work(1, 5.1)) == ()


def test_a_chain_of_waits_over_several_groups_leads_to_its_last_rank() -> None:
    statuses = [
        waiting(0, (0, 1), 4),
        replace(
            waiting(1, (1, 2), 9, kind=Kind.DISPATCH), calls={((1, 2), Kind.DISPATCH): 9, ((0, 1), Kind.COLLECTIVE): 3}
        ),
        replace(waiting(2, (2, 3), 1), calls={((2, 3), Kind.COLLECTIVE): 1, ((1, 2), Kind.DISPATCH): 8}),
        at_work(3, 5.5),
    ]
    assert waits(statuses) == {0: (1,), 1: (2,), 2: (3,)}
    assert culprits(*statuses) == (3,)


def test_ranks_that_save_wait_for_a_rank_that_has_not_begun_to_save() -> None:
    """Background threads exchange the checkpoint, so the main threads record no communication."""
    saves = (OpenSpan(Kind.CHECKPOINT, "save", 6.0, group=WORLD, call=3),)
    saving = [
        RankStatus(rank, stalled_s=6.0, open_spans=saves, calls={(WORLD, Kind.CHECKPOINT): 3}) for rank in (0, 2, 3)
    ]
    absent = RankStatus(1, stalled_s=6.0, heartbeat_age_s=6.0, calls={(WORLD, Kind.CHECKPOINT): 2})
    assert waits([*saving, absent]) == {0: (1,), 2: (1,), 3: (1,)}
    assert culprits(*saving, absent) == (1,)
    slow = replace(absent, open_spans=saves, calls={(WORLD, Kind.CHECKPOINT): 3}, heartbeat_age_s=0.1)
    assert culprits(*saving, slow) == (), "its disk is slow"


def test_two_culprits_are_both_reported() -> None:
    verdict = analyse([waiting(0, WORLD, 7), at_work(1, 6.0), waiting(2, WORLD, 7), at_work(3, 7.0)])
    assert verdict is not None
    assert (verdict.ranks, verdict.kind) == ((1, 3), "stuck")
    assert "rank 1" in verdict.summary
    assert "rank 3" in verdict.summary


def test_a_slow_link_makes_no_rank_a_culprit() -> None:
    """All ranks have begun the call, and the transfers are slow."""
    assert culprits(*(waiting(rank, WORLD, 7, 60.0) for rank in WORLD)) == ()
    pair = [replace(waiting(rank, (0, 1), 5, 60.0)) for rank in (0, 1)]
    third = replace(waiting(2, (1, 2), 1, 60.0, Kind.DISPATCH))
    assert culprits(*pair, third) == ()


def test_ranks_that_wait_for_each_other_in_different_operations_are_culprits() -> None:
    statuses = [waiting(0, (0, 1), 4), waiting(1, (0, 1), 2, kind=Kind.DISPATCH), waiting(2, (0, 2), 3), at_work(3)]
    verdict = analyse(statuses)
    assert verdict is not None
    assert verdict.ranks == (0, 1)
    assert "different operations" in verdict.summary
    assert "dispatch" in verdict.summary
    young = [replace(status, stalled_s=1.0) for status in statuses]
    assert analyse(young) is None


def receiving(rank: int, peer: int, stalled_s: float = 6.0) -> RankStatus:
    return RankStatus(
        rank, stalled_s=stalled_s, open_spans=(OpenSpan(Kind.TRANSFER, "receive activations", stalled_s, peer=peer),)
    )


def test_pipeline_stages_wait_for_the_previous_stage() -> None:
    statuses = [at_work(0, 5.5), receiving(1, 0), receiving(2, 1), receiving(3, 2)]
    assert waits(statuses) == {1: (0,), 2: (1,), 3: (2,)}
    assert culprits(*statuses) == (0,)
    assert culprits(replace(statuses[0], stalled_s=1.0), *statuses[1:]) == ()


def test_ranks_in_the_same_transfer_do_not_wait_for_each_other() -> None:
    assert waits([receiving(0, 1), receiving(1, 0)]) == {}
    unknown = RankStatus(1, stalled_s=9.0, open_spans=(OpenSpan(Kind.TRANSFER, "between passes", 9.0),))
    assert culprits(receiving(0, 1), unknown) == (), "it may wait for its own sends to complete"


@pytest.mark.parametrize("kind", [Kind.CHECKPOINT, Kind.DATA, Kind.PAUSE])
def test_saving_and_reading_have_the_longer_timeout(kind: Kind) -> None:
    busy = RankStatus(1, stalled_s=60.0, open_spans=(OpenSpan(kind, "save", 60.0),))
    assert culprits(waiting(0, (0, 1), 3, 60.0), busy) == ()
    assert culprits(waiting(0, (0, 1), 3, 301.0), replace(busy, stalled_s=301.0)) == (1,)


def test_dead_ranks_are_reported_first_and_at_once() -> None:
    verdict = analyse(
        [waiting(0, WORLD, 7), at_work(1, 9.0), RankStatus(2, state="ended", stalled_s=0.2, heartbeat_age_s=0.1)]
    )
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.stalled_s) == ("died", (2,), 0.1)


@pytest.mark.parametrize(("state", "expected"), [("stopped", (1,)), ("traced", ()), ("left", ())])
def test_a_stopped_rank_is_stuck_but_not_one_in_a_debugger_or_that_left(state: Any, expected: tuple[int, ...]) -> None:
    stalled = RankStatus(1, state=state, stalled_s=5.5, heartbeat_age_s=5.5, left_s=5.5)
    assert culprits(waiting(0, (0, 1), 3), stalled) == expected


def test_a_rank_stopped_in_a_call_is_the_culprit_although_it_has_begun_the_call() -> None:
    frozen = replace(waiting(1, (0, 1), 3), heartbeat_age_s=6.0)
    assert culprits(waiting(0, (0, 1), 3), frozen) == (1,), "the interpreter's lock is held"
    assert culprits(waiting(0, (0, 1), 3), replace(frozen, state="stopped")) == (1,)


def test_the_first_rank_that_failed_with_its_own_error_is_the_culprit() -> None:
    failed = RankStatus(1, state="failed", message="ValueError: no", left_s=0.3)
    verdict = analyse([waiting(0, (0, 1), 3, 0.1), failed])
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("error", (1,))
    assert "ValueError: no" in verdict.summary
    assert culprits(RankStatus(0, state="caught"), failed, RankStatus(2, state="failed", left_s=0.1)) == (1,)
    assert culprits(replace(failed, rank=0), failed) == (), "all raised it together"


def test_a_rank_that_waits_for_its_gpu_waits_for_ranks_with_fewer_calls() -> None:
    ahead = RankStatus(0, stalled_s=6.0, calls={((0, 1), Kind.COLLECTIVE): 5})
    behind = RankStatus(1, stalled_s=6.0, calls={((0, 1), Kind.COLLECTIVE): 4})
    assert culprits(ahead, behind) == (1,)
    assert culprits(ahead, replace(behind, calls=ahead.calls)) == ()


def test_status_json_round_trip() -> None:
    statuses = [waiting(0, (0, 1), 4), receiving(1, 0), RankStatus(2, state="failed", message='"é')]
    assert statuses_from_json(statuses_to_json(statuses)) == statuses


def test_the_report_names_operation_layer_micro_batch_and_step() -> None:
    span = OpenSpan(Kind.DISPATCH, "dispatch", 5.5, layer="layers.3.moe", step=12, micro=2, group=(0, 1), call=77)
    statuses = [RankStatus(0, stalled_s=5.5, open_spans=(span,)), RankStatus(1, stalled_s=5.5, step=12)]
    verdict = Verdict("stuck", (1,), "rank 1 is stuck", 12, 5.5, {0: (1,)})
    text = describe(verdict, statuses, {1: "Thread 2\n  a\n\nThread 1\n  b"})
    where = "layer layers.3.moe, micro-batch 2, step 12, call 77 of ranks 0, 1"
    assert f"rank 0  waits for rank 1 in dispatch 'dispatch' ({where}) for 5.5 s" in text
    assert "rank 1  is the culprit" in text
    assert text.index("Thread 1") < text.index("Thread 2")
    assert main_first("T\n  moe_comm/runtime/watch/watcher.py\n\nmain") == "main"


def test_ranks_of_a_host_without_heartbeats_are_unreachable_and_reported_after_dead_ranks() -> None:
    lost = [replace(at_work(rank, 2.0), state="unreachable", message="no heartbeat") for rank in (2, 3)]
    local = [replace(waiting(rank, (0, 1, 2, 3), 7), step=9) for rank in (0, 1)]
    verdict = analyse([*local, *lost])
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.step) == ("unreachable", (2, 3), 9)
    assert "no heartbeat; it is down, or the link to it" in verdict.summary
    text = describe(verdict, [*local, *lost], {})
    assert "rank 2  cannot be reached" in text and "culprit" not in text
    assert culprits(*local, lost[0], RankStatus(3, state="ended")) == (3,)


def test_a_host_that_waits_for_others_without_an_answer_of_the_store_is_isolated() -> None:
    others = [waiting(0, (0, 1, 2, 3), 6, 0.2), waiting(1, (0, 1, 2, 3), 6, 0.2)]
    stuck, fine = waiting(2, (0, 1, 2, 3), 7, 12.5), at_work(3, 0.1)
    verdict = isolated_host([stuck, fine, *others], (2, 3), 13.0, 12.0)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("unreachable", (2, 3))
    assert "is cut off, alive" in describe(verdict, [stuck, fine, *others], {})
    gpu = replace(at_work(2, 12.5), open_spans=(), calls={((0, 2), Kind.COLLECTIVE): 5})
    assert isolated_host([gpu, fine, *others], (2, 3), 13.0, 12.0) is not None


@pytest.mark.parametrize(
    "status",
    [
        waiting(2, (0, 1, 2, 3), 7, 11.0),
        waiting(2, (2, 3), 7, 60.0),
        at_work(2, 60.0),
        replace(waiting(2, (0, 1, 2, 3), 7, 60.0), timeout_s=300.0),
        replace(waiting(2, (0, 1, 2, 3), 7, 60.0), state="left"),
    ],
    ids=["not for long", "for its own ranks", "for no rank", "within its timeout", "has left"],
)
def test_a_host_that_does_not_wait_for_others_is_not_isolated(status: RankStatus) -> None:
    assert isolated_host([status, at_work(3, 0.1), at_work(0, 0.1), at_work(1, 0.1)], (2, 3), 60.0, 12.0) is None
