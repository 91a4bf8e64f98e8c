"""Pairs of passes of dualpipev: forward passes run while transfers of their backward pass are in flight."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_comm.errors import InputError, MoeCommError
from moe_comm.layers.transformer.model import Transformer
from moe_comm.layers.transformer.shape import Recompute
from moe_comm.runtime.event_reader import read_spans
from moe_comm.runtime.events import EVENTS
from moe_comm.topology import ParallelConfig
from tests.layers.transfers import record_transfers
from tests.pool import RankPool, with_longer_deadline
from tests.train.interleaving import BY_WEIGHT_4, EXPERTS_ONLY, TIED, Case, differing, train

PP2 = ParallelConfig(pp=2)
PP2_EP2 = ParallelConfig(pp=2, dp=2, ep=2)
EIGHT_LAYERS = replace(EXPERTS_ONLY, layers=8)
SPANS_STEP = 4_321


@pytest.mark.parametrize(
    ("recompute", "steps"),
    [("none", 2), *(pytest.param(one, 1, marks=pytest.mark.slow) for one in ("selective", "full"))],
)
def test_pairs_have_the_bits_of_sequential_micro_batches(recompute: Recompute, steps: int, pool4: RankPool) -> None:
    case = Case(PP2_EP2, "dualpipev", 8, BY_WEIGHT_4, recompute, "zero1", "on")
    assert pool4.run(differing, (case, steps)) == [[]] * 4


@pytest.mark.parametrize(
    "case",
    [
        Case(PP2_EP2, backend="shared_memory"),
        Case(ParallelConfig(pp=2, tp=2, ep=2), recompute="selective"),
        pytest.param(Case(ParallelConfig(pp=2, cp=2, ep=2), recompute="full"), marks=pytest.mark.slow),
    ],
    ids=["shared memory", "tp", "cp"],
)
def test_pairs_with_other_transfers(case: Case, pool4: RankPool) -> None:
    assert pool4.run(differing, (replace(case, schedule="dualpipev", micro_batches=8), 1)) == [[]] * 4


@pytest.mark.parametrize(
    "case",
    [
        Case(PP2, recompute="full", config=TIED),
        Case(PP2, dtype=torch.bfloat16),
        Case(PP2, config=replace(EXPERTS_ONLY, shortcut=True), overlap=None),
    ],
    ids=["tied, recompute", "bf16", "shortcut, not overlapped"],
)
def test_pairs_without_expert_parallelism(case: Case, pool2: RankPool) -> None:
    assert pool2.run(differing, (replace(case, schedule="dualpipev", micro_batches=10), 1)) == [[]] * 2


@pytest.mark.slow
def test_pairs_over_four_stages(pool4: RankPool) -> None:
    case = Case(ParallelConfig(pp=4), "dualpipev", 18, EIGHT_LAYERS)
    assert pool4.run(differing, (case, 1)) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_pairs_over_four_expert_parallel_stages(recompute: Recompute, pool8: RankPool) -> None:
    case = Case(ParallelConfig(pp=4, dp=2, ep=2), "dualpipev", 18, EIGHT_LAYERS, recompute)
    assert pool8.run(differing, (case, 1)) == [[]] * 8


def test_with_fsdp_pairs_run_one_after_the_other(pool4: RankPool) -> None:
    case = Case(PP2_EP2, "dualpipev", 8, EXPERTS_ONLY, strategy="fsdp")
    assert pool4.run(differing, (case, 1)) == [[]] * 4
    assert pool4.run(_overlapping, case) == [(0, 0)] * 4


def _overlapping(rank: int, world: int, case: Case) -> tuple[int, int]:
    """Return how many attentions run in a forward pass while gradients of other layers are in flight, and how many run
    in a backward pass while rows or results of other layers are in flight."""

    def watch(model: Transformer) -> None:
        for layer, block in model.layers.items():
            log.watch(f"layers.{layer}.", block.attention)  # type: ignore[arg-type]

    with record_transfers() as log:
        train(case, True, prepare=watch)
    assert log.in_flight == 0 or case.recompute == "full"
    counts = [0, 0]
    for name, pending in log.events:
        layer, _, backward = name.partition(" ")
        others = [text for text in pending if layer not in text]
        counts[bool(backward)] += any(("backward" in text) != bool(backward) for text in others)
    return counts[0], counts[1]


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_a_forward_pass_runs_while_transfers_of_its_backward_pass_are_in_flight(
    recompute: Recompute, pool4: RankPool
) -> None:
    """Each rank has seven pairs, each with two micro-batches in both directions."""
    case = Case(PP2_EP2, "dualpipev", 12, EXPERTS_ONLY, recompute)
    forward, backward = zip(*pool4.run(_overlapping, case), strict=True)
    other_forward, other_backward = zip(*pool4.run(_overlapping, replace(case, schedule="zbv")), strict=True)
    assert forward == (14,) * 4 and other_forward == (0,) * 4
    if recompute == "none":  # recomputation ends before it waits for the last results, which stay in the log
        assert backward == (14,) * 4 and other_backward == (0,) * 4


def _receives(rank: int, world: int, case: Case) -> tuple[int, int]:
    """Return how many waits for activations are recorded, and how many of them after the last forward pass began."""
    EVENTS.step = SPANS_STEP
    train(case, True)
    spans = [span for span in read_spans(EVENTS.region) if span.step == SPANS_STEP]
    begins = [span.begin_ns for span in spans if span.name == "receive activations"]
    forward = {(span.layer, span.micro): span.begin_ns for span in reversed(spans) if span.name == "forward"}
    return len(begins), sum(begin > max(forward.values()) for begin in begins)


def test_the_wait_for_the_input_of_a_pair_is_recorded_before_its_forward_pass(pool2: RankPool) -> None:
    for receives, late in pool2.run(_receives, Case(PP2, "dualpipev", 8, EXPERTS_ONLY)):
        assert receives >= 4 and late == 0


def _fail(rank: int, world: int, arg: tuple[str, float]) -> tuple[str, str]:
    """Raise on rank 0 in the forward pass of a pair, and return each rank's error. If attention fails, rank 0 exits."""
    where, timeout_s = arg

    def raise_in_pair(module: Any, args: Any, output: Tensor) -> None:
        if rank == 0 and torch._C._current_graph_task_id() != -1:  # in a backward pass
            raise InputError("broken")

    def prepare(model: Transformer) -> None:
        for block in model.layers.values():
            getattr(block if where == "attention" else block.moe, where).register_forward_hook(raise_in_pair)

    case = Case(PP2_EP2, "dualpipev", 8, EXPERTS_ONLY, timeout_s=timeout_s)
    with pytest.raises(MoeCommError) as caught:
        train(case, True, prepare=prepare)
    error = type(caught.value).__name__, str(caught.value)
    if rank == 0 and where == "attention" and error == ("InputError", "broken"):
        os._exit(1)
    return error


def test_an_error_of_the_experts_in_a_pair_is_raised_on_its_rank_and_reported_to_the_others(pool4: RankPool) -> None:
    def check(timeout_s: float) -> None:
        failed, peer, *others = pool4.run(_fail, ("experts", timeout_s))
        assert failed == ("InputError", "broken")
        assert peer[0] == "PeerError" and "rank 0 raised InputError" in peer[1] and "broken" in peer[1]
        assert all(name in ("PeerDied", "PeerTimeout") for name, _ in others)

    with_longer_deadline(check, 2.5, 30.0)


def test_a_rank_that_exits_after_an_error_in_a_pair_is_peer_died_for_its_groups(pool4: RankPool) -> None:
    def check(timeout_s: float) -> None:
        _, *peers, last = pool4.run(_fail, ("attention", timeout_s), expect_dead={0})
        assert [name for name, _ in peers] == ["PeerDied"] * 2
        assert last[0] in ("PeerDied", "PeerTimeout")  # it waits for rank 1, which does not exit

    with_longer_deadline(check, 2.5, 30.0)
