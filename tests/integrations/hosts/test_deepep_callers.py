"""Megatron-Core and NeMo Automodel call the ``deep_ep`` module of moe_comm, on CPU ranks.

Each reference is the program's own all-gather path, or one process in float64.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.integrations.deepep import install, uninstall
from tests.pool import RankPool

HIDDEN = 16


@dataclass(frozen=True)
class Case:
    """tokens: of the even and odd ranks. one: all tokens choose the first experts. capacity: Megatron's drop factor."""

    name: str
    tokens: tuple[int, int] = (6, 6)
    num_experts: int = 4
    top_k: int = 2
    one: bool = False
    capacity: float | None = None
    etp: int = 1


def inputs(case: Case, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens [T, 1, H], a router [H, E] that all ranks share, and the gradient of the output."""
    shared = torch.Generator().manual_seed(3)
    router = torch.randn(HIDDEN, case.num_experts, generator=shared)
    g = torch.Generator().manual_seed(50 + rank)
    tokens = case.tokens[rank % 2]
    x, grad = (torch.randn(tokens, 1, HIDDEN, generator=g).to(dtype) for _ in range(2))
    return x, router.to(dtype), grad


def route(case: Case, x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities [T, E], 0 for experts that a token does not choose, and the map of its choices."""
    logits = x.flatten(0, 1) @ router
    if case.one:
        logits = logits + torch.linspace(200, 0, case.num_experts, dtype=logits.dtype)
    scores, chosen = logits.softmax(-1).topk(case.top_k)
    if case.one:
        scores = scores * 0 + logits[:, : case.top_k].sigmoid()  # not all 0 or 1
    if case.capacity is not None:  # as Megatron drops, by the score of the token
        most = max(1, int(case.capacity * x.shape[0] * case.top_k / case.num_experts))
        dense = torch.zeros_like(logits).scatter(1, chosen, scores.detach())
        keep = torch.zeros_like(logits).scatter(0, dense.topk(min(most, len(dense)), 0).indices, 1).gather(1, chosen)
        scores = scores * keep
    probs = torch.zeros_like(logits).scatter(1, chosen, scores)
    return probs, probs > 0


def experts(rows: Tensor, counts: list[int], probs: Tensor, own: range) -> Tensor:
    """Apply expert e, x * (e + 1), and the probabilities."""
    scale = torch.tensor([float(e + 1) for e, n in zip(own, counts, strict=True) for _ in range(n)])
    return (rows * (scale.to(rows.dtype) * probs.to(rows.dtype)).unsqueeze(1)).to(rows.dtype)


def expected(case: Case, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, input gradient and router gradient of one rank's tokens, in float64 and without dispatch."""
    x, router, grad = inputs(case, rank, torch.float64)
    x.requires_grad_()
    router.requires_grad_()
    probs, _ = route(case, x, router)
    scale = torch.arange(1, case.num_experts + 1, dtype=torch.float64)
    y = x * (probs * scale).sum(1)[:, None, None]
    y.backward(grad)
    assert x.grad is not None and router.grad is not None
    return y.detach(), x.grad, router.grad


def megatron(rank: int, world: int, arg: tuple[str, Case]) -> Any:
    """Return output and gradients of Megatron's dispatcher ``kind``, and of one process."""
    kind, case = arg
    install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Transformer Engine and Apex are absent
        from megatron.core import parallel_state
        from megatron.core.transformer.moe import token_dispatcher
        from megatron.core.transformer.transformer_config import TransformerConfig

        config = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=1,
            num_moe_experts=case.num_experts,
            moe_router_topk=case.top_k,
            moe_router_pre_softmax=True,
            moe_token_dispatcher_type=kind,
            moe_flex_dispatcher_backend="deepep",
            moe_router_dtype="fp32",
            moe_expert_capacity_factor=case.capacity,
            add_bias_linear=False,
            use_cpu_initialization=True,
        )
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]  # of Megatron's own buffers
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    ep = world // case.etp
    tp_groups = [dist.new_group(list(range(i * case.etp, (i + 1) * case.etp))) for i in range(ep)]
    ep_groups = [dist.new_group(list(range(i, world, case.etp))) for i in range(case.etp)]
    groups = SimpleNamespace(ep=ep_groups[rank % case.etp], expt_tp=tp_groups[rank // case.etp], tp_ep=dist.group.WORLD)
    local = case.num_experts // ep
    own = range(rank // case.etp * local, (rank // case.etp + 1) * local)
    kinds = {
        "flex": token_dispatcher.MoEFlexTokenDispatcher,
        "allgather": token_dispatcher.MoEAllGatherTokenDispatcher,
    }
    dispatcher = kinds[kind](local, list(own), config, groups)
    x, router, grad = inputs(case, rank, torch.float32)
    x.requires_grad_()
    router.requires_grad_()
    probs, chosen = route(case, x, router)
    hidden, dispatched_probs = dispatcher.dispatch_preprocess(x, chosen, probs)
    hidden, dispatched_probs = dispatcher.token_dispatch(hidden, dispatched_probs)
    rows, counts, permuted_probs = dispatcher.dispatch_postprocess(hidden, dispatched_probs)
    # With expert tensor parallelism each rank computes a share of the output.
    out = experts(rows, counts.tolist(), permuted_probs / case.etp, own)
    y = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(out)))
    y.backward(grad)
    assert x.grad is not None and router.grad is not None
    uninstall()
    return (y.detach(), x.grad, router.grad), counts.tolist(), expected(case, rank)


CASES = (
    Case("plain"),
    Case("all tokens to two experts", one=True),
    Case("top-k 1", top_k=1, num_experts=8),
    Case("capacity drops", capacity=1.0, tokens=(8, 8)),
)
FLEX_ONLY = (Case("zero tokens on some ranks", tokens=(0, 7)),)  # Megatron's all-gather needs equal tokens


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", [*CASES, *FLEX_ONLY], ids=lambda case: case.name)
def test_megatron_flex_equals_its_allgather_dispatcher(case: Case, world: int, pools: dict[int, RankPool]) -> None:
    pytest.importorskip("megatron.core", reason="needs Megatron-Core: make adapters")
    flex = pools[world].run(megatron, ("flex", case))
    for result, _, whole in flex:
        for got, want in zip(result, whole, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    if case in FLEX_ONLY:
        return
    for (result, counts, _), (reference, reference_counts, _) in zip(
        flex, pools[world].run(megatron, ("allgather", case)), strict=True
    ):
        assert counts == reference_counts
        for got, want in zip(result, reference, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_megatron_flex_with_expert_tensor_parallelism(pools: dict[int, RankPool]) -> None:
    pytest.importorskip("megatron.core", reason="needs Megatron-Core: make adapters")
    for result, _, whole in pools[4].run(megatron, ("flex", Case("ETP 2, EP 2", etp=2))):
        for got, want in zip(result, whole, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def automodel(rank: int, world: int, case: Case) -> Any:
    """Return output and gradients of Automodel's DeepEP manager, and of one process."""
    install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nemo_automodel.components.moe.megatron.token_dispatcher import _DeepepManager

    local = case.num_experts // world
    manager = _DeepepManager(dist.group.WORLD, case.top_k, num_experts=case.num_experts, num_local_experts=local)
    x, router, grad = inputs(case, rank, torch.float32)
    x.requires_grad_()
    router.requires_grad_()
    probs, _ = route(case, x, router)
    manager.setup_metadata(x.shape[0], probs)
    hidden = manager.dispatch(x.flatten(0, 1), async_finish=True, allocate_on_comm_stream=True)
    rows, permuted_probs = manager.get_permuted_hidden_states_by_experts(hidden)
    counts = manager.get_number_of_tokens_per_expert().tolist()
    out = experts(rows, counts, permuted_probs, range(rank * local, (rank + 1) * local))
    y = manager.combine(manager.get_restored_hidden_states_by_experts(out)).view_as(x)
    y.backward(grad)
    assert x.grad is not None and router.grad is not None
    uninstall()
    return (y.detach(), x.grad, router.grad), expected(case, rank)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", [*CASES[:3], *FLEX_ONLY], ids=lambda case: case.name)
def test_automodel_equals_one_process(case: Case, world: int, pools: dict[int, RankPool]) -> None:
    pytest.importorskip("nemo_automodel", reason="needs NeMo Automodel: make adapters")
    for result, whole in pools[world].run(automodel, case):
        for got, want in zip(result, whole, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
