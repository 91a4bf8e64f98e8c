"""Micro-batches of one rank run at the same time, and generate the tokens of the whole batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig

import moe_comm
from moe_comm.comm.group_setup import communicator_of
from moe_comm.dispatch import DispatchOptions
from moe_comm.errors import ConfigError, MoeCommError, PeerDied, RankMismatch, UnsupportedModel
from moe_comm.integrations.hugging_face import swap_moe
from moe_comm.integrations.hugging_face.swap import swapped_experts
from moe_comm.topology import Placement
from moe_comm.topology.balance import Balance
from tests.integrations.models import VOCAB, load
from tests.integrations.test_disaggregated import Run
from tests.integrations.test_recovery import Death, dying
from tests.pool import RankPool

LENGTH = 6


@dataclass(frozen=True)
class Cut:
    """micro_batches of each attention rank of ``run``."""

    run: Run
    micro_batches: int


def batch(rank: int, count: int = 5) -> Tensor:
    """Return prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, VOCAB, (count, 4 + count), generator=generator, device="cpu")
    for row in range(count):
        ids[row, :row] = 0
    return ids


def tokens(model: Any, ids: Tensor, eos: int | None = None, length: int = LENGTH) -> Tensor:
    return model.generate(
        input_ids=ids,
        attention_mask=(ids != 0).long(),
        do_sample=False,
        max_new_tokens=length,
        eos_token_id=eos,
        pad_token_id=1,
    )


def sizes(model: Any) -> list[int]:
    """Return the batch sizes of the forward passes of ``model`` from now on."""
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, __, named: seen.append(named["input_ids"].shape[0]), with_kwargs=True)
    return seen


def generate(rank: int, world: int, cut: Cut) -> None:
    run = cut.run
    group = dist.new_group(range(run.world))
    if rank >= run.world:
        return
    with run.model(group) as model:
        if rank >= run.attention > 0:
            moe_comm.serve_experts(model, micro_batches=cut.micro_batches)
            return
        plain, ids = load(run.folder), batch(rank)
        whole = tokens(plain, ids)
        (eos,) = set(whole[0, -LENGTH + 2 : -LENGTH + 3].tolist())  # one row ends early
        expected = [whole, tokens(plain, ids, eos), tokens(plain, ids[:1])]
        seen = sizes(model)
        with moe_comm.serving(model, micro_batches=cut.micro_batches):
            got = [tokens(model, ids), tokens(model, ids, eos), tokens(model, ids[:1])]
            cuts = set(seen)
            seen.clear()
            model.generate(ids, max_new_tokens=1, do_sample=True)
            assert seen == [5]  # rows draw from one generator
        assert all(map(torch.equal, got, expected)) and not torch.equal(*expected[:2])
        assert cuts == {2: {1, 2, 3}, 3: {1, 2}, 4: {1, 2}}[cut.micro_batches]
        assert "generate" not in vars(model)


@pytest.mark.parametrize(
    ("backend", "shape", "micro_batches"),  # without attention ranks, all ranks have experts and run the model
    [
        ("shared_memory", (1, 1), 2),
        pytest.param("shared_memory", (2, 1), 4, marks=pytest.mark.slow),
        ("all_to_all", (1, 2), 3),
        ("peer_to_peer", (1, 1), 2),
        ("shared_memory", (0, 2), 2),
    ],
)
def test_generate_of_micro_batches_returns_the_tokens_of_the_batch(
    backend: str, shape: tuple[int, int], micro_batches: int, saved: Callable[[str], str], pool4: RankPool
) -> None:
    pool4.run(generate, Cut(Run(saved("qwen3_moe"), *shape, backend), micro_batches), timeout=60)


# --- continuous batching ---

CACHE = ContinuousBatchingConfig(num_blocks=14, page_size=16, max_batch_tokens=32)


def prompts(rank: int, count: int = 5) -> list[list[int]]:
    return [row[row != 0].tolist() for row in batch(rank, count)]


def settings(length: int = LENGTH) -> GenerationConfig:
    return GenerationConfig(do_sample=False, max_new_tokens=length, eos_token_id=-1, pad_token_id=0)


def batched(model: Any, ids: list[list[int]]) -> list[list[int]]:
    results = model.generate_batch(ids, settings(), CACHE)
    return [result.generated_tokens for result in results.values()]


def continuous(rank: int, world: int, cut: Cut) -> None:
    """Also with a manager of the caller's: a request is cancelled, and another one arrives later."""
    run = cut.run
    group = dist.new_group(range(run.world))
    if rank >= run.world:
        return
    with run.model(group) as model:
        if rank >= run.attention:
            moe_comm.serve_experts(model, micro_batches=cut.micro_batches)
            return
        plain, ids = load(run.folder, attn_implementation="sdpa"), prompts(rank)
        expected = batched(plain, ids)
        threads: set[int] = set()
        with moe_comm.serving(model, micro_batches=cut.micro_batches):
            model.register_forward_pre_hook(lambda *_: threads.add(threading.get_ident()))
            assert batched(model, ids) == expected and len(threads) == cut.micro_batches
            with pytest.raises(ConfigError, match="num_blocks"):
                model.init_continuous_batching(settings())
            manager = model.init_continuous_batching(settings(), continuous_batching_config=CACHE)
            manager.start()
            endless = manager.add_request(ids[0], max_new_tokens=60, streaming=True)
            names = [manager.add_request(one) for one in ids]
            next(manager.request_id_iter(endless))
            manager.cancel_request(endless)
            got: dict[str, list[int]] = {}
            while len(got) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.request_id in names and result.is_finished():
                    got[result.request_id] = result.generated_tokens
            with manager.pause():
                assert manager.is_running()
            manager.stop()
            assert [got[name] for name in names] == expected and not manager.is_running()


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_continuous_batching_divides_its_requests(
    micro_batches: int, saved: Callable[[str], str], pool4: RankPool
) -> None:
    run = Run(saved("qwen3_moe"), 1, 1, "shared_memory", attention_code="sdpa")
    pool4.run(continuous, Cut(run, micro_batches), timeout=60)


# --- failures and placements ---


def dies(rank: int, world: int, death: Death) -> list[str]:
    """A rank with experts dies in a call of one of two micro-batches. Return the errors."""
    run = death.run
    group = dist.new_group(range(run.world))
    if rank >= run.world:
        return []
    with run.model(group) as model:
        checkpoint = run.folder if death.recovers else None
        plain, ids = load(run.folder), batch(rank)
        try:
            with moe_comm.serving(model, checkpoint=checkpoint, micro_batches=2) as serving:
                if rank == death.dies:
                    dying(death, model)
                if rank < run.attention:
                    assert torch.equal(tokens(model, ids), tokens(plain, ids))
            return [type(error).__name__ for error in serving.failures]
        except PeerDied as error:
            return [type(error).__name__]


@pytest.mark.parametrize(
    ("backend", "shape", "where", "recovers"),
    [
        ("shared_memory", (1, 2), "with rows", True),
        pytest.param("shared_memory", (2, 1), "before dispatch", True, marks=pytest.mark.slow),
        pytest.param("shared_memory", (1, 1), "in a vote", True, marks=pytest.mark.slow),
        pytest.param("all_to_all", (1, 2), "with rows", True, marks=pytest.mark.slow),
        ("shared_memory", (1, 2), "with rows", False),
    ],
)
def test_a_rank_with_experts_dies_during_two_micro_batches(
    backend: str, shape: tuple[int, int], where: str, recovers: bool, saved: Callable[[str], str], pool4: RankPool
) -> None:
    dead = sum(shape) - 1
    death = Death(Run(saved("qwen3_moe"), *shape, backend), dead, where, 9, recovers)
    results = pool4.run(dies, death, expect_dead={dead}, timeout=60)
    assert results[:dead] == [["PeerDied"]] * dead


def placed(rank: int, world: int, run: Run) -> None:
    """Experts move while micro-batches run, also to copies, and both ranks with experts ask for it."""
    group = dist.new_group(range(run.world))
    if rank >= run.world:
        return
    copies = Placement(tuple((1 + e % 2, 2 - e % 2) if e < 3 else (1 + e % 2,) for e in range(8)), run.world)
    with run.model(group) as model:
        store = dist.PrefixStore("micro-batches", communicator_of(group).store)
        plain, ids = load(run.folder), batch(rank)
        with moe_comm.serving(model, micro_batches=2) as serving:
            if rank > 0:
                for placement in ([0, 0, 8], copies, [0, 3, 5]):
                    serving.place(placement)
                store.set(f"rank {rank} has placed", "")
            while rank == 0 and not store.check(["rank 1 has placed", "rank 2 has placed"]):
                assert torch.equal(tokens(model, ids), tokens(plain, ids))
            if rank == 0:
                assert torch.equal(tokens(model, ids), tokens(plain, ids))


def test_experts_move_while_micro_batches_run(saved: Callable[[str], str], pool4: RankPool) -> None:
    pool4.run(placed, Run(saved("mixtral"), 1, 2, "shared_memory"), timeout=60)


def sends_weights(rank: int, world: int, folder: str) -> None:
    """Copies are published before the first call. Calls that send weights need one micro-batch."""
    group = dist.new_group(range(2))
    if rank >= 2:
        return
    copies = Placement(tuple((e % 2, 1 - e % 2) if e < 3 else (e % 2,) for e in range(8)), 2)
    plain, ids = load(folder), batch(rank)
    model = swap_moe(load(folder), group, placement=copies)
    with moe_comm.serving(model, micro_batches=2):
        assert torch.equal(tokens(model, ids), tokens(plain, ids))
    lending = swap_moe(load(folder), group, options=DispatchOptions(balance=Balance(1.0, worth=0)))
    with pytest.raises(UnsupportedModel, match="order"), moe_comm.serving(lending, micro_batches=2):
        pass
    with moe_comm.serving(lending) as serving:
        if rank == 0:
            with pytest.raises(ConfigError, match="balance"):
                serving.place(copies)
        assert torch.equal(tokens(lending, ids), tokens(plain, ids))
    dist.destroy_process_group(group)


def test_calls_of_micro_batches_send_no_weights(saved: Callable[[str], str], pool4: RankPool) -> None:
    pool4.run(sends_weights, saved("qwen3_moe"), timeout=60)


def changes_weights(rank: int, world: int, arg: tuple[str, int, bool]) -> None:
    """Rank 1 changes weights of experts that have copies, and does not generate. Rank 0 generates until it knows."""
    folder, micro_batches, loads = arg
    group = dist.new_group(range(2))
    if rank >= 2:
        return
    copies = Placement(tuple((1 - e % 2, e % 2) if e < 3 else (e % 2,) for e in range(8)), 2)
    model, ids = swap_moe(load(folder), group, placement=copies), batch(rank)
    experts = next(iter(swapped_experts(model).values()))
    with (  # noqa: PT012
        pytest.raises(ConfigError, match="changed in a serving context"),
        moe_comm.serving(model, micro_batches=micro_batches),
    ):
        if rank == 1:
            with torch.no_grad():
                experts.down_proj.mul_(2)
            if loads:
                experts.load_state_dict(experts.state_dict())
        while rank == 0:
            tokens(model, ids)
    with moe_comm.serving(model, micro_batches=micro_batches):  # which publishes them
        assert tokens(model, ids).shape == (5, ids.shape[1] + LENGTH)
    dist.destroy_process_group(group)


@pytest.mark.parametrize(("micro_batches", "loads"), [(1, True), (2, False)])
def test_weights_with_copies_do_not_change_in_a_context(
    micro_batches: int, loads: bool, saved: Callable[[str], str], pool4: RankPool
) -> None:
    pool4.run(changes_weights, (saved("qwen3_moe"), micro_batches, loads), timeout=60)


class _Stop(Exception):
    pass


def raising(rank: int, world: int, arg: tuple[Run, str]) -> str:
    """One of two micro-batches raises on rank 0, and rank 1 generates until it knows. Then the ranks serve again."""
    run, what = arg
    group = dist.new_group(range(run.world))
    if rank >= run.world:
        return ""
    error, text = {"exception": _Stop("no more"), "Ctrl-C": KeyboardInterrupt()}[what], ""
    calls, main = 0, threading.main_thread()

    def stop(*_: Any) -> None:
        nonlocal calls
        # Python raises KeyboardInterrupt in the main thread only.
        if (what == "exception") == (threading.current_thread() is not main):
            calls += 1
            if calls >= 3:
                raise error

    with run.model(group) as model:
        plain, ids = load(run.folder), batch(rank)
        with pytest.raises(RankMismatch, match="micro-batches"), moe_comm.serving(model, micro_batches=1 + rank):
            pass
        try:
            with moe_comm.serving(model, micro_batches=2):
                if rank == 0:
                    handle = model.model.layers[1].self_attn.register_forward_pre_hook(stop)
                    try:
                        tokens(model, ids)
                    finally:
                        handle.remove()
                while rank == 1:
                    tokens(model, ids)
        except (_Stop, KeyboardInterrupt, MoeCommError) as raised:
            text = f"{type(raised).__name__}: {raised}"
        with moe_comm.serving(model, micro_batches=2):
            assert rank > 1 or torch.equal(tokens(model, ids), tokens(plain, ids))
    return text


@pytest.mark.parametrize("what", ["exception", "Ctrl-C"])
def test_an_exception_in_one_micro_batch_ends_all(what: str, saved: Callable[[str], str], pool4: RankPool) -> None:
    first, *others = pool4.run(raising, (Run(saved("qwen3_moe"), 2, 1, "shared_memory"), what), timeout=60)[:3]
    assert first.startswith({"exception": "_Stop", "Ctrl-C": "KeyboardInterrupt"}[what]), first
    assert all(one.startswith("PeerRaised: rank 0 raised") for one in others), others


def calibrated(rank: int, world: int, run: Run) -> None:
    group = dist.new_group(range(run.world))
    if rank >= run.world:
        return
    with run.model(group) as model, moe_comm.serving(model, micro_batches=2) as serving:
        if rank == 0:
            seen, ids = sizes(model), batch(0)
            with pytest.raises(ConfigError, match="at least 2"):
                serving.smallest_batch = 1
            serving.smallest_batch = 6
            tokens(model, ids)
            assert set(seen) == {5}
            found = serving.calibrate(length=2)
            assert found == serving.smallest_batch and found in {2**power for power in range(1, 10)}


def test_small_batches_are_not_cut(saved: Callable[[str], str], pool4: RankPool) -> None:
    pool4.run(calibrated, Run(saved("qwen3_moe"), 1, 1, "shared_memory"), timeout=60)
    with pytest.raises(ConfigError, match="1 to 4"), moe_comm.serving(micro_batches=5):
        pass
