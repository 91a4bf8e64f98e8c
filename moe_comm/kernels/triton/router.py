"""Top-k routing: one kernel for forward, one for backward.

    logits_TE ──score──▶ (+ bias, groups) ──▶ top-k ──▶ ids_TK ──(normalise, scale)──▶ weights_TK

The K largest values are selected one by one, so ids are in descending order of the selection value. Of equal values the
lowest id is selected (torch's topk guarantees no order). NaN counts as the largest value, as in torch. The backward
pass recomputes the scores from the logits. A token whose ids are all -2 gets a zero gradient.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.kernels.autograd import once_differentiable
from moe_comm.kernels.triton.device import int64, sigmoid
from moe_comm.kernels.triton.launch import check_index, check_tensors, launch, power_of_two
from moe_comm.kernels.triton.program import Program

MAX_EXPERTS = 1024
TILE_ELEMENTS = 2048
SCORES = {"softmax": 0, "sigmoid": 1, "topk_softmax": 2}
_SIGMOID, _TOPK_SOFTMAX = tl.constexpr(SCORES["sigmoid"]), tl.constexpr(SCORES["topk_softmax"])
_EPSILON = tl.constexpr(1e-20)
"""Added to sums of scores, which can underflow to zero."""


@triton.jit
def _largest(choice, at, AXIS_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return two [TOKENS, 1]: the largest value of each row of ``choice`` (without NaN), and its lowest index."""
    top = tl.max(choice, axis=1, keep_dims=True)
    return top, tl.min(tl.where(choice == top, at, AXIS_SIZE), axis=1, keep_dims=True)


@triton.jit
def _scores(logits, inside, SCORE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return [TOKENS, BLOCK_E] fp32 scores; 0 outside."""
    if SCORE == _SIGMOID:
        return tl.where(inside, sigmoid(logits), 0.0)
    else:
        top = tl.max(logits, axis=1, keep_dims=True)
        exponentials = tl.where(inside, tl.exp(logits - top), 0.0)
        return exponentials / tl.sum(exponentials, axis=1, keep_dims=True)


@triton.jit
def route_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [tokens, experts] fp32
    logits_stride,
    bias_ptr,  # [experts] fp32; any pointer unless BIASED
    ids_ptr,  # [tokens, TOP_K] int64
    weights_ptr,  # [tokens, TOP_K] fp32
    scores_ptr,  # [tokens, experts] fp32; any pointer unless SCORED
    load_ptr,  # [experts] int64; any pointer unless COUNTED
    tokens, experts, scale,
    SCORE: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr, NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, TOP_TWO: tl.constexpr, NORMALIZE: tl.constexpr,
    BIASED: tl.constexpr, SCORED: tl.constexpr, COUNTED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Route TOKENS tokens per program. COUNTED: add the number of slots of each expert to its load."""
    token = (int64(tl.program_id(0)) * TOKENS + tl.arange(0, TOKENS))[:, None]
    live = token < tokens
    expert = tl.arange(0, BLOCK_E)[None, :]
    inside = live & (expert < experts)
    neg_inf = float("-inf")
    logits = tl.load(logits_ptr + token * logits_stride + expert, mask=inside, other=neg_inf)
    invalid = tl.where((logits != logits) | (logits == float("inf")), 1, 0)
    invalid = tl.max(invalid, axis=1, keep_dims=True) > 0
    forbidden = logits == neg_inf
    invalid = invalid | (tl.min(tl.where(forbidden, 1, 0), axis=1, keep_dims=True) > 0)
    logits = tl.where(invalid, 0.0, logits)  # no NaN in the following computations
    scores = _scores(logits, inside, SCORE)
    if SCORED:
        tl.store(scores_ptr + token * experts + expert, tl.where(invalid, float("nan"), scores), mask=inside)
    choice = scores
    if SCORE == _TOPK_SOFTMAX:
        choice = logits
    if BIASED:
        choice += tl.load(bias_ptr + expert, mask=expert < experts, other=0.0)
        choice = tl.where(choice == choice, choice, float("inf"))
    choice = tl.where(forbidden | (expert >= experts), neg_inf, choice)
    if TOP_GROUPS < NUM_GROUPS:
        group_of = expert // (experts // NUM_GROUPS)
        groups = tl.arange(0, BLOCK_G)[None, :]
        group_values = tl.full((TOKENS, BLOCK_G), neg_inf, tl.float32)
        for group in range(NUM_GROUPS):
            members = tl.where((group_of == group) & (expert < experts), choice, neg_inf)
            best, first = _largest(members, expert, BLOCK_E)
            if TOP_TWO:
                best += tl.max(tl.where(expert == first, neg_inf, members), axis=1, keep_dims=True)
            # A group of forbidden experts can still be selected, but only once: selected groups become -Inf.
            group_values = tl.where(groups == group, tl.maximum(best, -3.0e38), group_values)
        allowed = tl.zeros((TOKENS, BLOCK_E), tl.int32)
        for _ in range(TOP_GROUPS):
            _best, best_group = _largest(group_values, groups, BLOCK_G)
            group_values = tl.where(groups == best_group, neg_inf, group_values)
            allowed = tl.where(group_of == best_group, 1, allowed)
        choice = tl.where(allowed > 0, choice, neg_inf)
    slots = tl.arange(0, BLOCK_K)[None, :]
    weights = tl.full((TOKENS, BLOCK_K), neg_inf if SCORE == _TOPK_SOFTMAX else 0.0, tl.float32)
    for k in range(TOP_K):
        top, first = _largest(choice, expert, BLOCK_E)
        chosen = (top > neg_inf) & (invalid == 0)
        picked = (expert == first) & chosen
        if SCORE == _TOPK_SOFTMAX:
            weight = tl.max(tl.where(picked, logits, neg_inf), axis=1, keep_dims=True)
        else:
            weight = tl.sum(tl.where(picked, scores, 0.0), axis=1, keep_dims=True)
        weights = tl.where(slots == k, weight, weights)
        chosen_id = tl.where(chosen, first, tl.where(invalid, -2, -1))
        tl.store(ids_ptr + token * TOP_K + k, chosen_id.to(tl.int64), mask=live)
        if COUNTED:
            one = tl.full((TOKENS, 1), 1, tl.int64)
            tl.atomic_add(load_ptr + chosen_id, one, mask=live & chosen, sem="relaxed")
        choice = tl.where(expert == first, neg_inf, choice)
    if SCORE == _TOPK_SOFTMAX:
        top = tl.max(weights, axis=1, keep_dims=True)
        exponentials = tl.exp(weights - tl.where(top > neg_inf, top, 0.0))
        weights = exponentials / tl.where(top > neg_inf, tl.sum(exponentials, axis=1, keep_dims=True), 1.0)
    elif NORMALIZE:
        weights = weights / (tl.sum(weights, axis=1, keep_dims=True) + _EPSILON)
    tl.store(weights_ptr + token * TOP_K + slots, weights * scale, mask=live & (slots < TOP_K))


@triton.jit
def route_backward_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [tokens, experts] fp32
    logits_stride,
    ids_ptr,  # [tokens, TOP_K] int64
    grad_weights_ptr,  # [tokens, TOP_K] fp32
    grad_scores_ptr,  # [tokens, experts] fp32; any pointer unless SCORED
    grad_ptr,  # [tokens, experts] fp32
    zeros_ptr,  # [num_zeros] int32, set to 0; any pointer if ZEROS is 0
    tokens, experts, num_zeros, scale,
    SCORE: tl.constexpr, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, NORMALIZE: tl.constexpr, WEIGHTED: tl.constexpr,
    SCORED: tl.constexpr, TOKENS: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Process TOKENS tokens per program. Scatter gradients of selected experts to [TOKENS, BLOCK_E] and sum them."""
    if ZEROS:
        if tl.program_id(0) == 0:
            at = tl.arange(0, ZEROS)
            tl.store(zeros_ptr + at, tl.zeros((ZEROS,), tl.int32), mask=at < num_zeros)
    token = (int64(tl.program_id(0)) * TOKENS + tl.arange(0, TOKENS))[:, None]
    live = token < tokens
    expert = tl.arange(0, BLOCK_E)[None, :]
    inside = live & (expert < experts)
    logits = tl.load(logits_ptr + token * logits_stride + expert, mask=inside, other=float("-inf"))
    valid = tl.load(ids_ptr + token * TOP_K, mask=live, other=-2) != -2
    logits = tl.where(valid, logits, 0.0)
    scores = _scores(logits, inside, SCORE)
    chosen = tl.zeros((TOKENS, BLOCK_E), tl.int32)
    grad_w = tl.zeros((TOKENS, BLOCK_E), tl.float32)
    if WEIGHTED:
        for k in range(TOP_K):
            slot = token * TOP_K + k
            selected = expert == tl.load(ids_ptr + slot, mask=live, other=-2)
            grad_w = tl.where(selected, tl.load(grad_weights_ptr + slot, mask=live, other=0.0) * scale, grad_w)
            chosen = tl.where(selected, 1, chosen)
    grad_s = tl.zeros((TOKENS, BLOCK_E), tl.float32)
    grad = tl.zeros((TOKENS, BLOCK_E), tl.float32)
    if SCORE == _TOPK_SOFTMAX:
        among = tl.where(chosen > 0, logits, float("-inf"))
        top = tl.max(among, axis=1, keep_dims=True)
        exponentials = tl.where(chosen > 0, tl.exp(among - tl.where(top > float("-inf"), top, 0.0)), 0.0)
        total = tl.sum(exponentials, axis=1, keep_dims=True)
        probabilities = exponentials / tl.where(total > 0.0, total, 1.0)
        grad = probabilities * (grad_w - tl.sum(probabilities * grad_w, axis=1, keep_dims=True))
    elif NORMALIZE:
        picked = tl.where(chosen > 0, scores, 0.0)
        total = tl.sum(picked, axis=1, keep_dims=True) + _EPSILON
        mean = tl.sum(picked / total * grad_w, axis=1, keep_dims=True)
        grad_s = tl.where(chosen > 0, (grad_w - mean) / total, 0.0)
    else:
        grad_s = grad_w
    if SCORED:
        grad_s += tl.load(grad_scores_ptr + token * experts + expert, mask=inside, other=0.0)
    if SCORE == _SIGMOID:
        grad += grad_s * scores * (1.0 - scores)
    else:
        grad += scores * (grad_s - tl.sum(scores * grad_s, axis=1, keep_dims=True))
    tl.store(grad_ptr + token * experts + expert, tl.where(valid, grad, 0.0), mask=inside)


def takes(logits_TE: Tensor, rule: Any) -> bool:
    """Return whether the kernels support these logits and this number of experts."""
    return logits_TE.dtype == torch.float32 and rule.num_choices <= MAX_EXPERTS and logits_TE.stride(-1) == 1


def select(
    logits_TE: Tensor, bias_E: Tensor | None, load_E: Tensor | None, rule: Any, return_scores: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ids, weights and scores, as ``route`` does. No autograd."""
    tokens, experts = logits_TE.shape
    ids_TK = torch.empty(tokens, rule.top_k, dtype=torch.int64, device=logits_TE.device)
    weights_TK = torch.empty(tokens, rule.top_k, dtype=torch.float32, device=logits_TE.device)
    scores_TE = torch.empty(tokens, experts, dtype=torch.float32, device=logits_TE.device) if return_scores else None
    sizes = _sizes(rule)
    if tokens:
        launch(
            route_kernel, (-(-tokens // sizes["TOKENS"]),), logits_TE,
            (logits_TE, logits_TE.stride(0), logits_TE if bias_E is None else bias_E, ids_TK, weights_TK,
             weights_TK if scores_TE is None else scores_TE, ids_TK if load_E is None else load_E,
             tokens, experts, float(rule.scale)),
            BLOCK_K=power_of_two(rule.top_k), NUM_GROUPS=rule.num_groups, TOP_GROUPS=rule.top_groups,
            BLOCK_G=power_of_two(rule.num_groups), TOP_TWO=rule.group_score == "top2_sum" and experts > rule.num_groups,
            BIASED=bias_E is not None, SCORED=return_scores, COUNTED=load_E is not None, **sizes, num_warps=4,
        )  # fmt: skip
    return ids_TK, weights_TK, scores_TE


def select_backward(
    logits_TE: Tensor, ids_TK: Tensor, grad_TK: Tensor | None, grad_TE: Tensor | None, rule: Any,
    zeros: Tensor | None = None,
) -> tuple[Tensor]:  # fmt: skip
    """Return the gradient of the logits, from those of the weights and scores. zeros: int32 [N], set to 0."""
    tokens, experts = logits_TE.shape
    grad = torch.empty(tokens, experts, dtype=torch.float32, device=logits_TE.device)
    sizes = _sizes(rule)
    if tokens:
        launch(
            route_backward_kernel, (-(-tokens // sizes["TOKENS"]),), logits_TE,
            (logits_TE, logits_TE.stride(0), ids_TK, grad if grad_TK is None else grad_TK,
             grad if grad_TE is None else grad_TE, grad, ids_TK if zeros is None else zeros, tokens, experts,
             0 if zeros is None else zeros.numel(), float(rule.scale)),
            WEIGHTED=grad_TK is not None, SCORED=grad_TE is not None,
            ZEROS=0 if zeros is None else power_of_two(zeros.numel()), **sizes, num_warps=4,
        )  # fmt: skip
    return (grad,)


_FORWARD, _BACKWARD = Program(select), Program(select_backward)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, rule: Any, return_scores: bool, load_E: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        results: tuple[Tensor, Tensor, Tensor | None] = _FORWARD(1, (logits_TE, bias_E, load_E), rule, return_scores)
        ids_TK = results[0]
        ctx.mark_non_differentiable(ids_TK)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits_TE, ids_TK)
        ctx.rule = rule
        return results

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, _: None, grad_TK: Tensor | None, grad_TE: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        logits_TE, ids_TK = ctx.saved_tensors
        if grad_TK is None and grad_TE is None:
            return None, None, None, None, None
        grad_TK, grad_TE = (None if grad is None else grad.contiguous() for grad in (grad_TK, grad_TE))
        (grad,) = _BACKWARD(1, (logits_TE, ids_TK, grad_TK, grad_TE), ctx.rule)
        return grad, None, None, None, None


def route(
    logits_TE: Tensor, bias_E: Tensor | None, rule: Any, *, scores: bool = False, load_E: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Select the top-k experts and compute their weights; differentiable with respect to the logits.

    Args:
        logits_TE: [T, E] fp32, dense rows.
        bias_E: [E] fp32, added for the selection only; or None.
        rule: a ``layers.RouterConfig``, which this package does not import.
        scores: Whether to return the scores.
        load_E: [E] int64 to which the kernel adds the number of slots of each expert, or None.

    Returns:
        ids_TK: int64; -1: no expert is left to select; -2: the token's logits are NaN, +Inf or all -Inf.
        weights_TK: fp32.
        scores_TE: fp32, or None.
    """
    check_tensors("route", logits_TE, bias_E, load_E)
    if logits_TE.dim() != 2 or logits_TE.shape[1] != rule.num_choices or not takes(logits_TE, rule):
        raise InputError(
            f"route to {rule.num_choices} experts (at most {MAX_EXPERTS}) needs dense fp32 logits "
            f"[T, {rule.num_choices}]; got {tuple(logits_TE.shape)} of {logits_TE.dtype}"
        )
    if bias_E is not None and (bias_E.shape != logits_TE.shape[1:] or bias_E.dtype != torch.float32):
        raise InputError(f"route needs a fp32 bias [{rule.num_choices}]; got {tuple(bias_E.shape)} of {bias_E.dtype}")
    if load_E is not None:
        check_index("route", "load", load_E, (rule.num_choices,))
    return _Route.apply(logits_TE, bias_E, rule, scores, load_E)  # type: ignore[no-any-return]


@lru_cache
def _sizes(rule: Any) -> dict[str, Any]:
    block = power_of_two(rule.num_choices)
    return {
        "SCORE": SCORES[rule.score],
        "TOP_K": rule.top_k,
        "BLOCK_E": block,
        "NORMALIZE": rule.normalize,
        "TOKENS": min(16, max(1, TILE_ELEMENTS // block)),
    }
