"""Ranks that die while experts are lent, and ranks with another plan: typed errors on every other rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import moe_comm
from moe_comm.errors import MoeCommError, PeerDied, RankMismatch
from moe_comm.layers.data_parallel import copies, lending
from moe_comm.topology.balance import Lent, digest
from tests.layers.test_balance import ALWAYS, Run, build, routed
from tests.pool import RankPool

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Death:
    """Where rank 1 is killed.

    what: the transfer; "" for the exchange of counts. received: when rank 1 has rows of others, which do not know that
    it has read them. False: before it sends. error: part of the errors of the other ranks. sharded: FSDP2 shards the
    experts, whose weights are sent between the dispatch and the combine. halves: backward computes the gradients of
    weights after those of inputs, as zero-bubble schedules do.
    """

    backend: str
    what: str
    received: bool = False
    error: str = ""
    sharded: bool = False
    halves: bool = False


DEATHS = [
    Death("shared_memory", "", error="the row counts"),
    Death("all_to_all", "lending experts", error="lending experts"),
    Death("all_to_all", "lending experts", received=True),
    Death("all_to_all", "publishing lent experts", error="publishing lent experts"),  # residents
    Death("all_to_all", "returning the gradients", error="returning the gradients"),
    Death("shared_memory", "returning the gradients", error="returning the gradients"),
    Death("shared_memory", "returning the gradients", received=True, error="returning the gradients"),
    Death("shared_memory", "lending experts", error="lending experts", sharded=True),
    Death("all_to_all", "lending experts", error="lending experts", sharded=True),
    Death("shared_memory", "returning the gradients", error="returning the gradients", sharded=True),
    Death("all_to_all", "returning the gradients", error="returning the gradients", halves=True),
    Death("shared_memory", "returning the gradients", received=True, error="returning the gradients", halves=True),
]


def kill_myself(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def killed_in(death: Death) -> Iterator[None]:
    """Kill this rank in the next transfer. A private name is patched: nothing public runs between its parts."""

    def fatal(send: Callable[..., Any]) -> Callable[..., Any]:
        def transfer(channel: Any, transfers: Any, tensors: Any, receive: Any, what: str, *memory: Any) -> Any:
            if what.startswith(death.what):
                if not death.received:
                    kill_myself()
                receive = kill_myself
            return send(channel, transfers, tensors, receive, what, *memory)

        return transfer

    with pytest.MonkeyPatch.context() as patch:
        if death.what:
            for name in ("start_rows", "transfer_rows"):
                patch.setattr(copies, name, fatal(getattr(copies, name)))
        else:
            patch.setattr(lending.LentExperts, "plan", kill_myself)
        yield


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the type and the text of the error of a call."""
    try:
        call()
    except MoeCommError as error:
        return type(error).__name__, str(error)
    return "none", ""


def lose_rank_1(rank: int, world: int, death: Death) -> tuple[tuple[str, str], tuple[str, str]]:
    """Train until rank 1 is killed. Return the error of this rank, and that of its next call."""
    layer = build(ALWAYS, Run(death.backend))
    if death.sharded:
        moe_comm.prepare_fsdp(layer)
    sends = death.received is death.what.startswith("returning")  # rank 1 lends experts
    x, routing = routed(layer, Run(), rank, 2 if sends else 0)

    def train() -> None:
        loss = layer(x, routing).sum()
        if death.halves:
            _, groups = stage_backward_input([loss], None, [x], layer.parameters())
            stage_backward_weight(layer.parameters(), groups)
        else:
            loss.backward()

    train()
    assert isinstance(layer.copies, lending.LentExperts)
    if not death.what.startswith("publishing"):
        layer.copies.forget()
    layer.publish_copies()  # the next call sends the weights again
    plan, homes = layer.last_plan, layer.placement.homes
    assert plan is not None and any((homes[one.expert] if sends else one.rank) == 1 for one in plan.lent)
    if rank == 1:
        with killed_in(death):
            train()
    # The others may have completed the call.
    return error_of(lambda: [train() for _ in range(2)]), error_of(lambda: layer(x, routing))


@pytest.mark.parametrize("death", DEATHS, ids=str)
def test_a_rank_killed_while_experts_are_lent_is_named_and_leaves_nothing(
    pools: dict[int, RankPool], death: Death
) -> None:
    if death.backend == "shared_memory":
        pytest.importorskip("moe_comm._C", reason="the native core is not built")
    pids = pools[3].pids
    results = pools[3].run(lose_rank_1, death, timeout=60, expect_dead={1})
    for rank in (0, 2):
        (kind, text), (again, _) = results[rank]
        assert kind == again == PeerDied.__name__ and "rank 1" in text and death.error in text, text
    assert [path for pid in pids for path in SHARED_MEMORY.glob(f"*moe_comm*.{pid}.*")] == []


CHANGES: dict[str, Callable[[Lent], list[Lent]]] = {
    "other rows": lambda one: [one._replace(rows=one.rows - 1)],
    "another expert": lambda one: [one._replace(expert=one.expert ^ 1)],
    "no expert": lambda one: [],
    "two experts": lambda one: [one._replace(rows=one.rows - 1), Lent(one.expert ^ 1, one.rank, 1)],
}


def call_with_another_plan(rank: int, world: int, arg: tuple[str, str]) -> tuple[tuple[str, str], int, bool]:
    """Change the first lent expert in the plan of rank 1. Return the error, rows that the experts got, and whether a
    call with equal plans has the bits of one without lending then.
    """
    backend, change = arg
    layer, fixed = (build(balance, Run(backend)) for balance in (ALWAYS, None))
    x, routing = routed(layer, Run(), rank, 0)
    layer(x, routing)
    assert isinstance(layer.copies, lending.LentExperts)
    layer.copies.forget()
    layer.publish_copies()  # the next call sends the weights again
    computed, choose = list[int](), lending.choose_rows

    def changed(*args: Any) -> tuple[Sequence[Lent], int]:
        (first, *others), _ = choose(*args)
        lent = (*CHANGES[change](first), *others)
        return lent, digest(lent)

    hook = layer.experts.register_forward_pre_hook(lambda _, args: computed.append(args[0].shape[0]))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:  # equal counts give equal plans, so the planner is replaced
            patch.setattr(lending, "choose_rows", changed)
        error = error_of(lambda: layer(x, routing))
    hook.remove()
    same = torch.equal(layer(x, routing), fixed(x, routing))
    for one in (layer, fixed):
        one.dispatcher.close()
    return error, len(computed), same


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("backend", ["shared_memory", "all_to_all"])
def test_another_plan_on_one_rank_is_an_error_on_every_rank_before_rows_are_sent(
    pool2: RankPool, backend: str, change: str
) -> None:
    if backend == "shared_memory":
        pytest.importorskip("moe_comm._C", reason="the native core is not built")
    for (kind, text), computed, same in pool2.run(call_with_another_plan, (backend, change), timeout=60):
        assert (kind, computed, same) == (RankMismatch.__name__, 0, True), text
