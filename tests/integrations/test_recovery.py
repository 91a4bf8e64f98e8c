"""A rank dies, or experts move, while models are served: the other ranks generate the same tokens."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from transformers import ContinuousBatchingConfig, GenerationConfig

import moe_comm
from moe_comm.errors import ConfigError, PeerDied
from moe_comm.integrations.hugging_face import record_routing, swap_moe
from moe_comm.integrations.hugging_face.swap import swapped_experts
from moe_comm.integrations.recovery import Recovery
from moe_comm.topology import Placement, placement_from_routing
from tests.integrations.models import ep_group, load
from tests.integrations.test_disaggregated import Run
from tests.integrations.test_serving import prompts, tokens
from tests.pool import RankPool

WHERE = ("before dispatch", "with rows", "in a vote")
LIMIT_S = 2.0
"""Until all ranks have the error. It takes less than one second if the ranks have cores of their own."""


@dataclass(frozen=True)
class Death:
    """Rank ``dies`` of the ranks of ``run`` dies in its call ``at`` of experts, ``where`` in it."""

    run: Run
    dies: int
    where: str
    at: int = 7
    recovers: bool = True


def die(store: Any) -> None:
    store.set("died", str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def dying(death: Death, model: Any) -> None:
    """Let this rank die."""
    store, calls = dist.distributed_c10d._get_default_store(), 0
    experts = list(swapped_experts(model).values())

    def count(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == death.at:
                die(store)
            return run(*args, **kwargs)

        return call

    for one in experts:
        name = {"before dispatch": "_run", "with rows": "_prepare_experts"}.get(death.where)
        if name is not None:
            setattr(one, name, count(getattr(one, name)))
        if death.where == "with rows":
            one._run_at_once = lambda *_: None  # private: a call in one piece cannot be interrupted from Python
    if death.where == "in a vote":
        rounds = experts[0].rounds.rounds[0]
        rounds._try_vote = count(rounds._try_vote)  # private: no public call tells when a rank votes


def serve(rank: int, world: int, death: Death) -> tuple[float, list[str]]:
    """Return the seconds from the death to the error, and the types of errors."""
    run, store = death.run, dist.distributed_c10d._get_default_store()
    group = dist.new_group(range(run.world))
    if rank >= run.world:
        return 0.0, []
    seen: list[float] = []
    recover = Recovery.recover

    def timed(*args: Any) -> Any:
        seen.append(time.monotonic())
        return recover(*args)

    with pytest.MonkeyPatch.context() as patch, run.model(group) as model:
        patch.setattr(Recovery, "recover", timed)
        plain, errors = load(run.folder), []
        try:
            with moe_comm.serving(model, checkpoint=run.folder if death.recovers else None) as serving:
                if rank == death.dies:
                    dying(death, model)
                if rank < run.attention:
                    for ids in prompts(rank, 3):
                        assert torch.equal(tokens(model, ids, run.length), tokens(plain, ids, run.length))
            errors = [type(error).__name__ for error in serving.failures]
            experts = next(iter(swapped_experts(model).values()))
            assert experts.dispatcher.world == run.world - 1
        except PeerDied as error:
            errors.append(type(error).__name__)
        return seen[0] - float(store.get("died")), errors


@pytest.mark.parametrize(
    ("backend", "shape", "where"),
    [
        *(("shared_memory", shape, where) for shape in ((1, 2), (1, 1)) for where in WHERE),
        *(("all_to_all", (2, 2), where) for where in WHERE),
    ],
)
def test_the_others_generate_the_same_tokens_after_a_rank_with_experts_has_died(
    backend: str, shape: tuple[int, int], where: str, saved: Callable[[str], str], pool4: RankPool
) -> None:
    death = Death(Run(saved("qwen3_moe"), *shape, backend, 6), sum(shape) - 1, where)
    results = pool4.run(serve, death, expect_dead={death.dies}, timeout=60)
    for seconds, errors in results[: death.dies]:
        assert errors == ["PeerDied"]
        assert 0 <= seconds < LIMIT_S


@pytest.mark.parametrize("backend", ["shared_memory", "all_to_all"])
def test_without_a_checkpoint_all_ranks_raise_within_a_second(
    backend: str, saved: Callable[[str], str], pool4: RankPool
) -> None:
    death = Death(Run(saved("qwen3_moe"), 2, 2, backend, 6), 3, "with rows", recovers=False)
    for seconds, errors in pool4.run(serve, death, expect_dead={3}, timeout=60)[:3]:
        assert errors == ["PeerDied"]
        assert 0 <= seconds < LIMIT_S


def twice(rank: int, world: int, run: Run) -> None:
    """Ranks 3 and 2 die one after the other, and rank 0 has all experts in the end."""
    group, store = dist.new_group(range(run.world)), dist.distributed_c10d._get_default_store()
    with run.model(group) as model:
        plain = load(run.folder)
        with moe_comm.serving(model, checkpoint=run.folder) as serving:
            for dies in (3, 2, 1):
                if rank == dies:
                    dying(Death(run, dies, "with rows", 3), model)
                    threading.Event().wait()
                if rank == 0:
                    for ids in prompts(dies, 2):
                        assert torch.equal(tokens(model, ids, run.length), tokens(plain, ids, run.length))
                    store.set(f"after {dies}", "")
                else:
                    store.wait([f"after {dies}"])
            assert len(serving.failures) == 3
        assert torch.equal(tokens(model, prompts(0, 1)[0], 4), tokens(plain, prompts(0, 1)[0], 4))


def test_ranks_die_one_after_the_other(saved: Callable[[str], str], pool4: RankPool) -> None:
    pool4.run(twice, Run(saved("gpt_oss"), 1, 3, "shared_memory", 4), expect_dead={1, 2, 3}, timeout=60)


CACHE = ContinuousBatchingConfig(num_blocks=7, page_size=16, max_batch_tokens=32)


def batched(model: Any, ids: list[torch.Tensor]) -> list[list[int]]:
    settings = GenerationConfig(do_sample=False, max_new_tokens=8, eos_token_id=-1, pad_token_id=0)
    results = model.generate_batch([one[0].tolist() for one in ids], settings, CACHE)
    return [result.generated_tokens for result in results.values()]


def in_a_manager(rank: int, world: int, run: Run) -> None:
    group = dist.new_group(range(run.world))
    if rank >= run.world:
        return
    with run.model(group) as model, moe_comm.serving(model, checkpoint=run.folder):
        if rank == 2:
            dying(Death(run, 2, "with rows"), model)
        if rank == 0:
            assert batched(model, prompts(0, 3)) == batched(load(run.folder, attn_implementation="sdpa"), prompts(0, 3))


def test_a_manager_of_continuous_batching_continues(saved: Callable[[str], str], pool4: RankPool) -> None:
    run = Run(saved("qwen3_moe"), 1, 2, "shared_memory", attention_code="sdpa")
    pool4.run(in_a_manager, run, expect_dead={2}, timeout=60)


# --- other placements, without failures ---


def placed(rank: int, world: int, run: Run) -> None:
    """Rank 0 generates while rank 1 changes the placement."""
    group, default_store = dist.new_group(range(run.world)), dist.distributed_c10d._get_default_store()
    if rank >= run.world:
        return
    store = dist.PrefixStore(run.backend, default_store)
    copies = Placement(tuple((1 + e % 2, 2 - e % 2) if e < 3 else (1 + e % 2,) for e in range(8)), run.world)
    with run.model(group) as model:
        plain = load(run.folder)
        experts = next(iter(swapped_experts(model).values()))
        with torch.no_grad():  # not the weights of the files
            for parameter in experts.parameters(recurse=False):
                parameter.mul_(2)
            for parameter in plain.model.layers[0].mlp.experts.parameters():
                parameter.mul_(2)
        with moe_comm.serving(model, checkpoint=run.folder) as serving:
            for number, placement in enumerate(([0, 0, 8], copies, [0, 3, 5], [2, 3, 3], [0, 8, 0])):
                if rank == 1:
                    serving.place(placement)
                    store.set(f"placed {number}", "")
                    with pytest.raises(ConfigError, match="must hold 3 counts"):
                        serving.place([8])
                (ids,) = prompts(number, 1)
                while rank == 0 and not store.check([f"placed {number}"]):
                    assert torch.equal(tokens(model, ids, 3), tokens(plain, ids, 3))
                store.wait([f"placed {number}"])
                if rank == 0:
                    assert torch.equal(tokens(model, ids, 4), tokens(plain, ids, 4))
                counts = [len(homes) for homes in map(experts.placement.homes_of, range(3))]
                assert counts == (list(placement) if isinstance(placement, list) else [0, 4, 4])
                assert len(experts.gate_up_proj) == counts[rank]
                store.set(f"checked {number} by {rank}", "")
                store.wait([f"checked {number} by {other}" for other in range(run.world)])
            if rank == 0:
                assert torch.equal(tokens(model, ids, 9), tokens(plain, ids, 9))


@pytest.mark.parametrize("backend", ["shared_memory", "all_to_all", "peer_to_peer"])
def test_experts_move_while_requests_run(backend: str, saved: Callable[[str], str], pool4: RankPool) -> None:
    pool4.run(placed, Run(saved("mixtral"), 1, 2, backend), timeout=60)


def outdated(rank: int, world: int, run: Run) -> None:
    """Rank 2 dies when rank 0 has asked for a placement, and before the experts move.

    Through shared memory it has voted, and waits for rank 1. The others then get its vote.
    """
    group, late = dist.new_group(range(run.world)), 1 if run.backend == "shared_memory" else 2
    if rank >= run.world:
        return
    with run.model(group) as model, moe_comm.serving(model, checkpoint=run.folder) as serving:
        plain, (ids,) = load(run.folder), prompts(0, 1)
        rounds: Any = next(iter(swapped_experts(model).values())).rounds.rounds[0]
        if rank == 2:
            dist.distributed_c10d._get_default_store().set("process of rank 2", str(os.getpid()))
        if rank == late:
            vote, dying = rounds._try_vote, int(dist.distributed_c10d._get_default_store().get("process of rank 2"))

            def let_die_in_the_vote_for_a_change(*args: Any) -> Any:
                time.sleep(0.2)  # the other ranks begin their vote meanwhile
                if dist.distributed_c10d._get_default_store().check(["a placement is wanted"]):
                    rounds._try_vote = vote
                    os.kill(dying, signal.SIGKILL)
                    with suppress(psutil.NoSuchProcess):
                        while psutil.Process(dying).status() != psutil.STATUS_ZOMBIE:
                            time.sleep(0.01)
                return vote(*args)

            rounds._try_vote = let_die_in_the_vote_for_a_change
            dist.distributed_c10d._get_default_store().set("a rank votes late", "")
        if rank == 0:
            offer = Recovery.offer
            dist.distributed_c10d._get_default_store().wait(["a rank votes late"])
            time.sleep(0.5)  # until the vote during which it was set has ended

            def offer_and_let_die(*args: Any) -> None:
                offer(*args)
                dist.distributed_c10d._get_default_store().set("a placement is wanted", "")

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Recovery, "offer", offer_and_let_die)
                with pytest.raises(ConfigError, match="a rank died before the experts moved"):
                    serving.place([0, 3, 5])
            assert torch.equal(tokens(model, ids, 4), tokens(plain, ids, 4))
            serving.place([4, 4])
            assert torch.equal(tokens(model, ids, 4), tokens(plain, ids, 4))


@pytest.mark.parametrize("backend", ["all_to_all", "shared_memory"])
def test_a_placement_for_a_rank_that_died_is_refused(
    backend: str, saved: Callable[[str], str], pool4: RankPool
) -> None:
    pool4.run(outdated, Run(saved("mixtral"), 1, 2, backend), expect_dead={2}, timeout=30)


def followed(rank: int, world: int, folder: str) -> None:
    """The placement follows the routing of the first requests."""
    model, plain, (ids,) = swap_moe(load(folder), ep_group(world)), load(folder), prompts(rank, 1)
    store = dist.distributed_c10d._get_default_store()
    with record_routing(plain) as routing:
        expected = tokens(plain, ids, 12)
    with moe_comm.serving(model) as serving:
        if rank == 1:
            placement = placement_from_routing(routing.ids.numpy(), 8, world, slots=1)
            serving.place(placement)
            store.set("placement from routing", placement.to_json())
        assert torch.equal(tokens(model, ids, 12), expected)
    experts = next(iter(swapped_experts(model).values()))
    assert experts.placement.to_json() == store.get("placement from routing").decode()
    assert experts.placement.owners != tuple((e // 2,) for e in range(8))  # homes may stay, and experts have copies


def test_the_placement_follows_recorded_routing(saved: Callable[[str], str], pool4: RankPool) -> None:
    pool4.run(followed, saved("qwen3_moe"), timeout=60)
