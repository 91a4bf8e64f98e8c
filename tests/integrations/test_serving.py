"""Ranks of a swapped model generate independently: any number of requests, none included."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import ContinuousBatchingConfig, GenerationConfig

import moe_comm
from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import configure_collectives
from moe_comm.errors import ConfigError, MoeCommError, PeerRaised, RankMismatch, UnsupportedModel
from moe_comm.integrations.hugging_face import swap_moe
from tests.integrations.models import VOCAB, assert_close, ep_group, load, save_model
from tests.pool import RankPool

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")


def prompts(rank: int, count: int) -> list[Tensor]:
    """Return prompts of different lengths."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(3, VOCAB, (1, 3 + i), generator=generator, device="cpu") for i in range(count)]


def tokens(model: Any, ids: Tensor, length: int, **settings: Any) -> Tensor:
    """Return greedy tokens. Zeros in the prompt are padding."""
    return model.generate(
        ids, attention_mask=(ids != 0).long(), do_sample=False, max_new_tokens=length, eos_token_id=None, **settings
    )


def generate(rank: int, world: int, arg: tuple[Any, ...]) -> list[tuple[Tensor, Tensor]]:
    """Rank 0 has no prompts, and the others different numbers."""
    folder, length, *backend = arg
    plain, swapped = load(folder), swap_moe(load(folder), ep_group(world), backend=(*backend, "auto")[0])
    expected = [tokens(plain, ids, length + rank) for ids in prompts(rank, rank)]
    with moe_comm.serving(swapped):
        got = [tokens(swapped, ids, length + rank) for ids in prompts(rank, rank)]
    return list(zip(got, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_with_any_number_of_prompts_generate_the_tokens_of_the_unswapped_model(
    family: str, saved: Callable[[str], str], pool4: RankPool
) -> None:
    compare(pool4.run(generate, (saved(family), 6)))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_equal_up_to_200(family: str, tmp_path: Path, pool4: RankPool) -> None:
    folder = save_model(family, tmp_path, max_position_embeddings=256)
    compare(pool4.run(generate, (folder, 200)))


def compare(results: list[Any]) -> None:
    assert [len(result) for result in results] == [0, 1, 2, 3]
    assert all(torch.equal(got, expected) for result in results for got, expected in result)


def over_sockets(rank: int, world: int, folder: str) -> list[tuple[Tensor, Tensor]]:
    configure_collectives(CollectiveOptions(shared_memory=False))
    try:
        return generate(rank, world, (folder, 4, "all_to_all"))
    finally:
        configure_collectives(CollectiveOptions())


def test_ranks_that_share_no_memory_generate_the_same(saved: Callable[[str], str], pool4: RankPool) -> None:
    compare(pool4.run(over_sockets, saved("qwen3_moe")))


# --- continuous batching ---

CACHE = ContinuousBatchingConfig(num_blocks=7, page_size=16, max_batch_tokens=32)


def settings(length: int) -> GenerationConfig:
    return GenerationConfig(do_sample=False, max_new_tokens=length, eos_token_id=-1, pad_token_id=0)


def batched(model: Any, ids: list[Tensor], length: int) -> list[list[int]]:
    results = model.generate_batch([one[0].tolist() for one in ids], settings(length), CACHE)
    return [result.generated_tokens for result in results.values()]


def continuous(rank: int, world: int, folder: str) -> None:
    """A request arrives at rank 0 while rank 1 generates, and one of rank 1 is cancelled."""
    store, (first, *more) = dist.distributed_c10d._get_default_store(), prompts(rank, 4)
    plain = load(folder, attn_implementation="sdpa")
    expected = batched(plain, [first], 6)
    expected_batch = batched(plain, more, 5)
    model = swap_moe(load(folder, attn_implementation="sdpa"), ep_group(world))
    with moe_comm.serving(model):
        manager = model.init_continuous_batching(settings(6), continuous_batching_config=CACHE)
        manager.start()
        if rank == 1:
            cancelled = manager.add_request(first[0].tolist(), max_new_tokens=10_000, streaming=True)
            for count, _ in enumerate(manager.request_id_iter(cancelled)):
                if count == 2:
                    store.set("rank 1 generates", "")
                if count > 2 and store.check(["rank 0 has its tokens"]):
                    break
            manager.cancel_request(cancelled)
        if rank == 0:
            store.wait(["rank 1 generates"])
        if rank < 2:
            name = manager.add_request(first[0].tolist())
            result = next(one for one in iter(manager) if one.request_id == name and one.is_finished())
            store.set(f"rank {rank} has its tokens", "")
            assert [result.generated_tokens] == expected
        manager.stop()
        assert batched(model, more[: rank + 1], 5) == expected_batch[: rank + 1]


@pytest.mark.parametrize("family", ["qwen3_moe"])
def test_continuous_batching_serves_requests_that_arrive_at_any_rank_and_time(
    family: str, saved: Callable[[str], str], pool4: RankPool
) -> None:
    pool4.run(continuous, saved(family))


# --- errors ---


class _Stop(Exception):
    pass


def raising(rank: int, world: int, arg: tuple[str, str]) -> list[str]:
    """Rank 1 raises, rank 2 generates until it raises, the others have no requests. Then all ranks serve again."""
    folder, where = arg
    model, errors = swap_moe(load(folder, attn_implementation="sdpa"), ep_group(world)), []
    manager = None
    ids, (prompt,) = tokens(load(folder), prompts(9, 1)[0], 5), prompts(9, 1)

    def stop(*_: Any) -> None:
        raise _Stop("no more")

    try:
        with moe_comm.serving(model):
            if rank == 1 and where == "router":
                router = model.model.layers[1].mlp.gate.weight
                weight = router.detach().clone()
                try:
                    tokens(model, prompt, 2)
                    router.data.fill_(torch.nan)
                    tokens(model, prompt, 3)
                finally:
                    router.data.copy_(weight)
            if rank == 1 and where in ("manager", "status"):
                manager = model.init_continuous_batching(settings(10_000), continuous_batching_config=CACHE)
                if where == "manager":  # which generates on
                    manager.start()
                    manager.add_request(prompt[0].tolist(), max_new_tokens=60, streaming=True)
                    next(iter(manager))
                    stop()
                broken = {"background_thread_status": property(stop, lambda *_: None)}
                manager.__class__ = type("Broken", (type(manager),), broken)
                while True:
                    tokens(model, prompt, 3)
            if rank == 1:
                tokens(model, prompt, 2)
                handle = model.model.layers[1].self_attn.register_forward_pre_hook(stop)
                if where == "context":
                    handle.remove()
                    stop()
                with pytest.raises(_Stop):
                    tokens(model, prompt, 3)
                handle.remove()
            while rank == 2:
                tokens(model, prompt, 3)
    except (_Stop, MoeCommError) as error:
        errors.append(f"{type(error).__name__}: {error}")
    assert where != "manager" or manager is None or not manager.is_running()
    with moe_comm.serving(model):
        assert torch.equal(tokens(model, prompt, 5), ids)
    return errors


@pytest.mark.parametrize("where", ["model", "context", "router", "manager", "status"])
def test_an_exception_of_one_rank_ends_serving_on_all_ranks_and_they_can_serve_again(
    where: str, saved: Callable[[str], str], pool4: RankPool
) -> None:
    first, second, *others = pool4.run(raising, (saved("mixtral"), where))
    assert others == [first, first]
    if where == "router":
        assert "RoutingError" in second[0]
        assert "RoutingError" in first[0]
    else:
        assert second == ["_Stop: no more"]
        assert first == ["PeerRaised: rank 1 raised _Stop: no more. Serving has ended on all ranks"]


def interrupted(rank: int, world: int, arg: tuple[str, str]) -> str:
    """Ctrl-C at rank 1, whose caller catches it and stays in the context. Rank 2 generates until it raises."""
    folder, where = arg
    store, group = dist.distributed_c10d._get_default_store(), dist.new_group(range(world))
    model, (prompt,), told = swap_moe(load(folder), group), prompts(0, 1), f"rank 2 knows of Ctrl-C, {where}"
    layer = model.model.layers[1]
    if where == "between layers, compiled":
        model.compile(backend="eager")

    def interrupting(run: Callable[..., Any]) -> Callable[..., Any]:
        @torch.compiler.disable
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            return run(*args, **kwargs)

        return call

    try:
        with moe_comm.serving(model):
            if rank == 1:
                tokens(model, prompt, 2)
                at = {
                    "between layers": (layer.self_attn, "forward"),
                    "between layers, compiled": (layer.self_attn, "forward"),
                    "in an operation": (layer.mlp.experts, "_run"),
                    "before a vote": (layer.mlp.experts.rounds.rounds[0], "_vote"),
                }
                target, name = at[where]
                with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
                    patch.setattr(target, name, interrupting(getattr(target, name)))
                    tokens(model, prompt, 2)
                store.wait([told], timedelta(seconds=10))
            try:
                while rank == 2:
                    tokens(model, prompt, 3)
            finally:
                if rank == 2:
                    store.set(told, "")
    except (KeyboardInterrupt, MoeCommError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group(group)
    raise AssertionError("the context ended without an error")


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("between layers", "PeerRaised: rank 1 raised KeyboardInterrupt"),
        pytest.param("between layers, compiled", "PeerRaised: rank 1 raised KeyboardInterrupt", marks=pytest.mark.slow),
        ("in an operation", "PeerError"),
        ("before a vote", "PeerError"),
    ],
)
def test_ranks_learn_of_an_interrupt_that_the_caller_of_another_rank_catches(
    where: str, text: str, saved: Callable[[str], str], pool4: RankPool
) -> None:
    first, second, *others = pool4.run(interrupted, (saved("mixtral"), where), timeout=40)
    assert second.startswith("KeyboardInterrupt")
    for error in (first, *others):
        assert error.startswith(text)
        assert "rank 1" in error


def manager_raises(rank: int, world: int, folder: str) -> str:
    model = swap_moe(load(folder, attn_implementation="sdpa"), ep_group(world))
    (prompt,) = prompts(rank, 1)
    with pytest.raises(RuntimeError) as caught, moe_comm.serving(model):  # noqa: PT012
        if rank == 1:  # the cache is too small, which ends the thread of the manager before it calls the model
            assert batched(model, [prompt.repeat(1, 40)], 4) == [[]]
        while rank == 2:
            tokens(model, prompt, 3)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_ranks_learn_of_an_error_that_the_manager_of_another_rank_hides(
    saved: Callable[[str], str], pool4: RankPool
) -> None:
    first, second, *others = pool4.run(manager_raises, saved("qwen3_moe"))
    assert second.startswith("RuntimeError: No requests can be scheduled")
    assert first.startswith("PeerRaised: rank 1 raised RuntimeError: No requests can be scheduled")
    assert others == [first, first]


def paused(rank: int, world: int, folder: str) -> None:
    """The context of rank 1 ends while its manager is paused."""
    model, (prompt,) = swap_moe(load(folder, attn_implementation="sdpa"), ep_group(world)), prompts(rank, 1)
    with ExitStack() as stack:
        with moe_comm.serving(model):
            if rank == 1:
                manager = model.init_continuous_batching(settings(60), continuous_batching_config=CACHE)
                manager.start()
                manager.add_request(prompt[0].tolist(), streaming=True)
                next(iter(manager))
                stack.enter_context(manager.pause())
        assert rank != 1 or not manager.is_running()
    assert tokens(model, prompt, 3).shape == (1, 6)


def test_a_paused_manager_is_stopped_at_the_end(saved: Callable[[str], str], pool4: RankPool) -> None:
    pool4.run(paused, saved("qwen3_moe"))


# --- other kinds of generation ---


def other_kinds(rank: int, world: int, folders: list[str]) -> None:
    """Each rank generates in another way."""
    plain, plain_assistant = map(load, folders)
    model, assistant = (swap_moe(load(folder), ep_group(world)) for folder in folders)
    (prompt,) = prompts(rank, 1)
    prompt = prompt.repeat(2, 1) if rank == 0 else prompt
    padded = [F.pad(ids, (8 - ids.shape[1], 0)) for ids in prompts(rank, 2)]

    def run(model: Any, assistant: Any) -> Tensor:
        if rank == 0:
            return tokens(model, prompt, 6, num_beams=3)
        if rank == 1:
            with torch.inference_mode(), ThreadPoolExecutor() as pool:
                return torch.cat(list(pool.map(partial(tokens, model, length=6), padded)), dim=1)
        if rank == 2:
            return tokens(model, prompt, 6, assistant_model=assistant)
        return model.model(prompt, use_cache=False).last_hidden_state  # the inner model, called directly

    with torch.no_grad():
        expected = run(plain, plain_assistant)
        with moe_comm.serving(model, assistant):
            got = run(model, assistant)
    if rank == 3:
        assert_close(got, expected, "hidden states")
    else:
        assert torch.equal(got, expected)


def test_beams_assistants_threads_and_inner_models_at_the_same_time(
    saved: Callable[[str], str], pool4: RankPool
) -> None:
    pool4.run(other_kinds, [saved("mixtral"), saved("qwen3_moe")])


def in_autocast(rank: int, world: int, folder: str) -> None:
    model, results = swap_moe(load(folder), ep_group(world)), []
    (prompt,) = prompts(5, 1)
    with torch.no_grad(), moe_comm.serving(model):
        for _ in range(2 if rank else 0):
            with torch.autocast("cpu", torch.bfloat16):
                results.append(model(prompt, use_cache=False).logits)
            results.append(model(prompt, use_cache=False).logits)
    for low, full in zip(results[::2], results[1::2], strict=True):
        assert low.dtype is torch.bfloat16
        assert_close(low.float(), full, "logits", rtol=0.1)


def test_ranks_without_work_follow_autocast(saved: Callable[[str], str], pool4: RankPool) -> None:
    pool4.run(in_autocast, saved("mixtral"))


def copied(rank: int, world: int, folder: str) -> None:
    model, (prompt,) = swap_moe(load(folder), ep_group(world)), prompts(0, 1)
    expected = tokens(load(folder), prompt, 3)
    with moe_comm.serving(model):
        copy = deepcopy(model)
    assert torch.equal(tokens(copy, prompt, 3), expected)
    copy(prompt).logits.sum().backward()
    with moe_comm.serving(copy):
        assert rank == 0 or torch.equal(tokens(copy, prompt, 3), expected)


def test_a_copy_that_is_made_in_a_context_runs_after_it(saved: Callable[[str], str], pool4: RankPool) -> None:
    pool4.run(copied, saved("mixtral"), timeout=60)


def refused(rank: int, world: int, folder: str) -> None:
    plain = load(folder)
    for counts in ([0, 8], [0, 0, 0, 7]):
        with pytest.raises(ConfigError, match="must hold 4 counts that add up to 8"):
            swap_moe(plain, ep_group(world), placement=counts)
    with pytest.raises(RankMismatch, match="experts"):
        swap_moe(plain, ep_group(world), placement=[2] * 4 if rank else [0, 2, 3, 3])
    model = swap_moe(load(folder), ep_group(world))
    with pytest.raises(ConfigError, match="has no experts of swap_moe"), moe_comm.serving(plain):
        pass
    with pytest.raises(ConfigError, match="it got no model"), moe_comm.serving():
        pass
    with (
        moe_comm.serving(model),
        pytest.raises(ConfigError, match="already in a serving context"),
        moe_comm.serving(model),
    ):
        pass
    replicated = DistributedDataParallel(model, process_group=ep_group(world))
    with pytest.raises(UnsupportedModel, match="broadcasts buffers"), moe_comm.serving(replicated):
        pass
    (prompt,) = prompts(0, 1)
    embedded = model.get_input_embeddings()(prompt).detach().requires_grad_()
    for given in ({"input_ids": prompt}, {"inputs_embeds": embedded}):
        model.requires_grad_("input_ids" in given)
        expected = ConfigError if rank == 1 else PeerRaised
        with pytest.raises(expected, match="gradients") as caught, moe_comm.serving(model):  # noqa: PT012
            if rank == 1:
                model(**given)
        assert type(caught.value) is expected


def test_models_that_cannot_be_served_and_gradients_are_refused(saved: Callable[[str], str], pool4: RankPool) -> None:
    pool4.run(refused, saved("mixtral"))


def without_files(rank: int, world: int, folder: str) -> str:
    """Only rank 1 lacks the checkpoint, and it goes on after its error."""
    model = swap_moe(load(folder), ep_group(world))
    with pytest.raises(ConfigError, match="does not exist") as raised:
        moe_comm.serve_experts(model, checkpoint="/does/not/exist" if rank == 1 else folder)
    with moe_comm.serving(model):  # it opens
        pass
    return str(raised.value)


def test_a_checkpoint_that_one_rank_lacks_is_an_error_on_all_ranks(
    saved: Callable[[str], str], pool4: RankPool
) -> None:
    results = pool4.run(without_files, saved("mixtral"), timeout=30)
    assert all("/does/not/exist" in text for text in results)
