"""Who is to blame, of what is known of every rank; and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.watch.graph import Doing, Verdict, View, analyse, cut_off, waits
from moe_comm.runtime.watch.report import describe, main_first, views_from_json, views_to_json

WORLD = (0, 1, 2, 3)


def at_work(rank: int, silent_s: float = 0.0, **more: Any) -> View:
    """Computes; 5 s of silence are too many."""
    return View(rank, silent_s=silent_s, description=(Doing(Kind.COMPUTE, "experts", silent_s),), **more)


def waiting(rank: int, group: tuple[int, ...], call: int, age_s: float = 6.0, kind: Kind = Kind.COLLECTIVE) -> View:
    description = (Doing(Kind.STEP, "step", age_s), Doing(kind, "sum", age_s, group=group, call=call))
    return View(rank, silent_s=age_s, description=description, calls={(group, kind): call})


def culprits(*views: View) -> tuple[int, ...]:
    verdict = analyse(views)
    return () if verdict is None else verdict.ranks


def test_nobody_is_to_blame_while_all_are_at_work() -> None:
    assert analyse([at_work(0), at_work(1), waiting(2, WORLD, 1, 0.1)]) is None
    assert analyse([]) is None


def test_the_one_that_waits_for_nobody_is_to_blame_when_its_patience_is_over() -> None:
    others = [waiting(rank, WORLD, 7) for rank in (0, 2, 3)]
    assert culprits(*others, at_work(1, 4.9)) == ()
    assert culprits(*others, at_work(1, 5.1)) == (1,)
    assert culprits(*others, at_work(1, 5.1, patience_s=50.0)) == ()


def test_a_silent_rank_for_which_nobody_waits_is_left_alone() -> None:
    assert culprits(at_work(0), at_work(1, 100.0)) == ()
    assert culprits(waiting(0, (0, 2), 3), at_work(1, 100.0), at_work(2)) == ()


def test_one_that_is_awaited_only_now_gets_time() -> None:
    assert culprits(waiting(0, (0, 1), 3, 0.5), at_work(1, 5.1)) == ()


def test_a_chain_over_several_groups_is_followed_to_its_end() -> None:
    views = [
        waiting(0, (0, 1), 4),
        replace(
            waiting(1, (1, 2), 9, kind=Kind.DISPATCH), calls={((1, 2), Kind.DISPATCH): 9, ((0, 1), Kind.COLLECTIVE): 3}
        ),
        replace(waiting(2, (2, 3), 1), calls={((2, 3), Kind.COLLECTIVE): 1, ((1, 2), Kind.DISPATCH): 8}),
        at_work(3, 5.5),
    ]
    assert waits(views) == {0: (1,), 1: (2,), 2: (3,)}
    assert culprits(*views) == (3,)


def test_who_does_not_come_to_save_is_waited_for_by_those_that_do() -> None:
    """Threads beside the main ones exchange what is saved: no call of the main thread says so."""
    saves = (Doing(Kind.CHECKPOINT, "save", 6.0, group=WORLD, call=3),)
    saving = [View(rank, silent_s=6.0, description=saves, calls={(WORLD, Kind.CHECKPOINT): 3}) for rank in (0, 2, 3)]
    absent = View(1, silent_s=6.0, unbeaten_s=6.0, calls={(WORLD, Kind.CHECKPOINT): 2})
    assert waits([*saving, absent]) == {0: (1,), 2: (1,), 3: (1,)}
    assert culprits(*saving, absent) == (1,)
    slow = replace(absent, description=saves, calls={(WORLD, Kind.CHECKPOINT): 3}, unbeaten_s=0.1)
    assert culprits(*saving, slow) == (), "its disk takes long"


def test_two_culprits_are_both_named() -> None:
    verdict = analyse([waiting(0, WORLD, 7), at_work(1, 6.0), waiting(2, WORLD, 7), at_work(3, 7.0)])
    assert verdict is not None
    assert (verdict.ranks, verdict.kind) == ((1, 3), "stuck")
    assert "rank 1" in verdict.what
    assert "rank 3" in verdict.what


def test_a_slow_link_is_nobodys_fault() -> None:
    """All have arrived, and what they send takes long."""
    assert culprits(*(waiting(rank, WORLD, 7, 60.0) for rank in WORLD)) == ()
    pair = [replace(waiting(rank, (0, 1), 5, 60.0)) for rank in (0, 1)]
    third = replace(waiting(2, (1, 2), 1, 60.0, Kind.DISPATCH))
    assert culprits(*pair, third) == ()


def test_ranks_that_wait_for_each_other_took_different_paths() -> None:
    views = [waiting(0, (0, 1), 4), waiting(1, (0, 1), 2, kind=Kind.DISPATCH), waiting(2, (0, 2), 3), at_work(3)]
    verdict = analyse(views)
    assert verdict is not None
    assert verdict.ranks == (0, 1)
    assert "different operations" in verdict.what
    assert "dispatch" in verdict.what
    young = [replace(view, silent_s=1.0) for view in views]
    assert analyse(young) is None


def receiving(rank: int, peer: int, silent_s: float = 6.0) -> View:
    return View(
        rank, silent_s=silent_s, description=(Doing(Kind.TRANSFER, "receive activations", silent_s, peer=peer),)
    )


def test_stages_of_a_pipeline_wait_for_the_one_before() -> None:
    views = [at_work(0, 5.5), receiving(1, 0), receiving(2, 1), receiving(3, 2)]
    assert waits(views) == {1: (0,), 2: (1,), 3: (2,)}
    assert culprits(*views) == (0,)
    assert culprits(replace(views[0], silent_s=1.0), *views[1:]) == ()


def test_a_transfer_with_both_ends_in_it_is_under_way() -> None:
    assert waits([receiving(0, 1), receiving(1, 0)]) == {}
    unknown = View(1, silent_s=9.0, description=(Doing(Kind.TRANSFER, "between passes", 9.0),))
    assert culprits(receiving(0, 1), unknown) == (), "it may wait for its own sends to go out"


@pytest.mark.parametrize("kind", [Kind.CHECKPOINT, Kind.DATA, Kind.PAUSE])
def test_saving_and_reading_may_take_long_but_not_for_ever(kind: Kind) -> None:
    busy = View(1, silent_s=60.0, description=(Doing(kind, "save", 60.0),))
    assert culprits(waiting(0, (0, 1), 3, 60.0), busy) == ()
    assert culprits(waiting(0, (0, 1), 3, 301.0), replace(busy, silent_s=301.0)) == (1,)


def test_dead_ones_come_before_all_others_and_at_once() -> None:
    verdict = analyse([waiting(0, WORLD, 7), at_work(1, 9.0), View(2, fate="ended", silent_s=0.2, unbeaten_s=0.1)])
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.silent_s) == ("died", (2,), 0.1)


@pytest.mark.parametrize(("fate", "found"), [("stopped", (1,)), ("traced", ()), ("left", ())])
def test_a_stopped_rank_is_stuck_and_one_in_a_debugger_or_done_is_not(fate: Any, found: tuple[int, ...]) -> None:
    silent = View(1, fate=fate, silent_s=5.5, unbeaten_s=5.5, left_s=5.5)
    assert culprits(waiting(0, (0, 1), 3), silent) == found


def test_a_rank_stopped_in_a_call_is_to_blame_though_it_has_begun_it() -> None:
    frozen = replace(waiting(1, (0, 1), 3), unbeaten_s=6.0)
    assert culprits(waiting(0, (0, 1), 3), frozen) == (1,), "the interpreter's lock is held"
    assert culprits(waiting(0, (0, 1), 3), replace(frozen, fate="stopped")) == (1,)


def test_an_error_is_blamed_on_the_first_that_left_with_one_of_its_own() -> None:
    failed = View(1, fate="failed", words="ValueError: no", left_s=0.3)
    verdict = analyse([waiting(0, (0, 1), 3, 0.1), failed])
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("error", (1,))
    assert "ValueError: no" in verdict.what
    assert culprits(View(0, fate="caught"), failed, View(2, fate="failed", left_s=0.1)) == (1,)
    assert culprits(replace(failed, rank=0), failed) == (), "all raised it together"


def test_a_rank_that_waits_for_its_gpu_may_wait_for_one_that_is_behind() -> None:
    ahead = View(0, silent_s=6.0, calls={((0, 1), Kind.COLLECTIVE): 5})
    behind = View(1, silent_s=6.0, calls={((0, 1), Kind.COLLECTIVE): 4})
    assert culprits(ahead, behind) == (1,)
    assert culprits(ahead, replace(behind, calls=ahead.calls)) == ()


def test_views_travel_between_hosts() -> None:
    views = [waiting(0, (0, 1), 4), receiving(1, 0), View(2, fate="failed", words='"é')]
    assert views_from_json(views_to_json(views)) == views


def test_the_report_names_operation_layer_micro_batch_and_step() -> None:
    description = Doing(Kind.DISPATCH, "dispatch", 5.5, layer="layers.3.moe", step=12, micro=2, group=(0, 1), call=77)
    views = [View(0, silent_s=5.5, description=(description,)), View(1, silent_s=5.5, step=12)]
    verdict = Verdict("stuck", (1,), "rank 1 is stuck", 12, 5.5, {0: (1,)})
    text = describe(verdict, views, {1: "Thread 2\n  a\n\nThread 1\n  b"})
    where = "layer layers.3.moe, micro-batch 2, step 12, call 77 of ranks 0, 1"
    assert f"rank 0  waits for rank 1 in dispatch 'dispatch' ({where}) for 5.5 s" in text
    assert "rank 1  is the culprit" in text
    assert text.index("Thread 1") < text.index("Thread 2")
    assert main_first("T\n  moe_comm/runtime/watch/watcher.py\n\nmain") == "main"


def test_ranks_of_a_host_that_is_not_heard_are_unreachable_and_come_after_those_that_died() -> None:
    lost = [replace(at_work(rank, 2.0), fate="unreachable", words="nothing was heard") for rank in (2, 3)]
    here = [replace(waiting(rank, (0, 1, 2, 3), 7), step=9) for rank in (0, 1)]
    verdict = analyse([*here, *lost])
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.step) == ("unreachable", (2, 3), 9)
    assert "nothing was heard; it is down, or the link to it" in verdict.what
    text = describe(verdict, [*here, *lost], {})
    assert "rank 2  cannot be reached" in text and "culprit" not in text
    assert culprits(*here, lost[0], View(3, fate="ended")) == (3,)


def test_a_host_is_cut_off_when_it_waits_for_others_and_its_store_does_not_answer() -> None:
    others = [waiting(0, (0, 1, 2, 3), 6, 0.2), waiting(1, (0, 1, 2, 3), 6, 0.2)]
    stuck, fine = waiting(2, (0, 1, 2, 3), 7, 12.5), at_work(3, 0.1)
    verdict = cut_off([stuck, fine, *others], (2, 3), 13.0, 12.0)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("unreachable", (2, 3))
    assert "is cut off, alive" in describe(verdict, [stuck, fine, *others], {})
    gpu = replace(at_work(2, 12.5), description=(), calls={((0, 2), Kind.COLLECTIVE): 5})
    assert cut_off([gpu, fine, *others], (2, 3), 13.0, 12.0) is not None


@pytest.mark.parametrize(
    "view",
    [
        waiting(2, (0, 1, 2, 3), 7, 11.0),
        waiting(2, (2, 3), 7, 60.0),
        at_work(2, 60.0),
        replace(waiting(2, (0, 1, 2, 3), 7, 60.0), patience_s=300.0),
        replace(waiting(2, (0, 1, 2, 3), 7, 60.0), fate="left"),
    ],
    ids=["not for long", "among themselves", "for nobody", "with patience", "that has left"],
)
def test_a_host_that_waits_otherwise_is_not_cut_off(view: View) -> None:
    assert cut_off([view, at_work(3, 0.1), at_work(0, 0.1), at_work(1, 0.1)], (2, 3), 60.0, 12.0) is None
