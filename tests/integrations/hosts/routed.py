"""Routed tokens for tests of token dispatchers, the reference of one process, and Megatron-Core on CPU ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

HIDDEN = 16


@dataclass(frozen=True)
class Case:
    """tokens: of the even and odd ranks. one: all tokens choose the first experts. capacity: Megatron's drop factor.

    pad: with ``capacity``, experts also get tokens that have not chosen them, with probability zero.
    """

    name: str
    tokens: tuple[int, int] = (6, 6)
    num_experts: int = 4
    top_k: int = 2
    one: bool = False
    capacity: float | None = None
    pad: bool = False


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
    probs = torch.zeros_like(logits).scatter(1, chosen, scores)
    if case.capacity is None:
        return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
    # As Megatron drops, by the score of the token.
    most = max(1, int(case.capacity * x.shape[0] * case.top_k / case.num_experts))
    kept = torch.zeros_like(logits).scatter(0, probs.detach().topk(min(most, len(probs)), 0).indices, 1)
    probs = probs * kept
    return probs, kept > 0 if case.pad else probs > 0


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


CASES = (
    Case("plain"),
    Case("all tokens to two experts", one=True),
    Case("top-k 1", top_k=1, num_experts=8),
    Case("capacity drops", capacity=1.0, tokens=(8, 8)),
)


@contextmanager
def megatron_on_cpu(**parallel: int) -> Iterator[None]:
    """Inside the block, Megatron-Core runs on CPU ranks, with the groups of ``initialize_model_parallel``."""
    on_cpu = patch.object(torch.cuda, "current_device", lambda: torch.device("cpu"))
    with warnings.catch_warnings(), on_cpu, torch._dynamo.config.patch(disable=True):  # compiling takes seconds
        warnings.simplefilter("ignore")  # Transformer Engine and Apex are absent
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
        from megatron.core.transformer.moe import moe_utils

        parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **parallel)
        try:
            with (
                patch.object(CudaRNGStatesTracker, "fork", lambda *_: nullcontext()),  # there are no CUDA generators
                patch.object(moe_utils, "te_general_gemm", None, create=True),  # undefined without Transformer Engine
            ):
                yield
        finally:
            parallel_state.destroy_model_parallel()


def megatron_config(case: Case, **options: Any) -> Any:
    """Return a ``TransformerConfig``."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    defaults: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 1,
        "num_moe_experts": case.num_experts,
        "moe_router_topk": case.top_k,
        "moe_router_pre_softmax": True,
        "moe_router_dtype": "fp32",
        "moe_expert_capacity_factor": case.capacity,
        "moe_pad_expert_input_to_capacity": case.pad,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
    }
    return TransformerConfig(**defaults | options)


def megatron_dispatcher(kind: str, case: Case, **options: Any) -> Any:
    """Return the dispatcher "flex", "allgather" or "moe_comm", inside ``megatron_on_cpu``."""
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    kinds: dict[str, Any] = {
        "flex": token_dispatcher.MoEFlexTokenDispatcher,
        "allgather": token_dispatcher.MoEAllGatherTokenDispatcher,
    }
    if kind == "moe_comm":
        from moe_comm.integrations.megatron import MoeCommTokenDispatcher

        kinds[kind] = MoeCommTokenDispatcher
    else:
        options = {"moe_token_dispatcher_type": kind, "moe_flex_dispatcher_backend": "deepep"}
    groups = get_default_pg_collection()
    local = case.num_experts // groups.ep.size()
    own = list(range(groups.ep.rank() * local, (groups.ep.rank() + 1) * local))
    config = megatron_config(case, **options)
    return kinds[kind](local, own, config, groups)


def run_dispatcher(dispatcher: Any, case: Case, rank: int, etp: int = 1) -> tuple[tuple[Tensor, ...], list[int]]:
    """Return output, input gradient, router gradient, rows and probabilities, and the rows of each local expert."""
    x, router, grad = inputs(case, rank, torch.float32)
    x.requires_grad_()
    router.requires_grad_()
    probs, chosen = route(case, x, router)
    rows, counts, row_probs = dispatcher.dispatch_postprocess(
        *dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, chosen, probs))
    )
    first = dispatcher.ep_group.rank() * len(counts)
    # With expert tensor parallelism each rank computes a part of the output.
    out = experts(rows, counts.tolist(), row_probs / etp, range(first, first + len(counts)))
    y = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(out)))
    y.backward(grad)
    assert x.grad is not None and router.grad is not None
    return (y.detach(), x.grad, router.grad, rows.detach(), row_probs.detach()), counts.tolist()
