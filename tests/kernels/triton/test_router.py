"""The routing kernel against ``layers/moe/router.py`` in plain torch: the same ids, and values to fp32's rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_comm.errors import InputError
from moe_comm.layers.moe.router import Router, RouterConfig
from tests.kernels.triton.common import drawn, kernels
from tests.overlap.triton.common import needs_triton
from tests.pool import RankPool, on_ranks

pytestmark = needs_triton
NAN, INF = float("nan"), float("inf")
CONFIGS: dict[str, dict[str, Any]] = {
    "top 2 of 8": {"num_experts": 8, "top_k": 2, "scale": 2.5},
    "every expert": {"num_experts": 12, "top_k": 12},
    "one expert": {"num_experts": 1, "top_k": 1},
    "groups, bias": {"num_experts": 24, "top_k": 5, "num_groups": 6, "top_groups": 2, "correction_bias": True},
    "best of groups": {"num_experts": 20, "top_k": 3, "num_groups": 4, "top_groups": 2, "group_score": "max"},
    "groups of one": {"num_experts": 6, "top_k": 3, "num_groups": 6, "top_groups": 4},
    "bias": {"num_experts": 7, "top_k": 3, "correction_bias": True},
    "512 experts": {"num_experts": 512, "top_k": 16},
}


@on_ranks(1, timeout=60)
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "topk_softmax"])
@pytest.mark.parametrize("name", CONFIGS)
def test_ids_weights_scores_and_gradients_agree_with_the_router(name: str, score: str) -> None:
    """Also for tokens whose logits are NaN, +Inf or all -Inf, and for tokens with fewer than K allowed experts."""
    route = kernels("router").route
    for normalize in (True, False):
        config = RouterConfig(**CONFIGS[name], score=score, normalize=normalize)
        router = Router(4, config)
        if router.correction_bias is not None:
            router.correction_bias.copy_(drawn(config.num_experts, seed=1) * 0.1)
        logits_TE = drawn(7, config.num_experts + 2)[:, : config.num_experts] * 3
        logits_TE[1, 0], logits_TE[2, -1], logits_TE[3] = NAN, INF, -INF
        if config.num_groups == 1:  # otherwise groups with only forbidden experts tie
            logits_TE[4, config.num_experts // 2 + 1 :] = -INF
        plain_logits, kernel_logits = logits_TE.clone().requires_grad_(), logits_TE.clone().requires_grad_()
        scores_TE = plain_logits.sigmoid() if score == "sigmoid" else plain_logits.softmax(-1)
        ids_TK = router._choose(logits_TE, scores_TE.detach())
        weights_TK = router._weights(plain_logits, scores_TE, ids_TK)
        kernel_ids, kernel_weights, kernel_scores = route(kernel_logits, router.correction_bias, config, scores=True)
        valid = ids_TK[:, 0] != -2
        assert torch.equal(kernel_ids, ids_TK), (kernel_ids, ids_TK)
        torch.testing.assert_close(kernel_weights, weights_TK)
        torch.testing.assert_close(kernel_scores[valid], scores_TE[valid])
        grad_TK, grad_TE = drawn(*weights_TK.shape, seed=2), drawn(*scores_TE.shape, seed=3)
        for weight_factor, score_factor in ((1.0, 0.0), (1.0, 1.0)):
            with torch.no_grad():
                output_grads = (grad_TK * weight_factor)[valid], (grad_TE * score_factor)[valid]
            (expected,) = torch.autograd.grad(
                (weights_TK[valid] * output_grads[0]).sum() + (scores_TE[valid] * output_grads[1]).sum(),
                plain_logits,
                retain_graph=True,
            )
            (actual,) = torch.autograd.grad(
                (kernel_weights[valid] * output_grads[0]).sum() + (kernel_scores[valid] * output_grads[1]).sum(),
                kernel_logits,
                retain_graph=True,
            )
            torch.testing.assert_close(actual[valid], expected[valid], rtol=1e-4, atol=1e-6)
            assert not actual[~valid].any()  # tokens without experts have zero gradients
        (weights_grad,) = torch.autograd.grad((kernel_weights * grad_TK).sum(), kernel_logits)
        (expected,) = torch.autograd.grad((weights_TK[valid] * grad_TK[valid]).sum(), plain_logits)
        torch.testing.assert_close(weights_grad[valid], expected[valid], rtol=1e-4, atol=1e-6)


def _ties(rank: int, world: int, arg: None) -> list[Any]:
    route = kernels("router").route
    equal = torch.zeros(1, 12)
    one_allowed = torch.full((1, 12), -INF)
    one_allowed[0, 7] = 0.0
    groups = RouterConfig(12, 3, num_groups=4, top_groups=2)
    return [
        route(equal, None, RouterConfig(12, 3))[0].tolist(),
        route(equal, None, groups)[0].tolist(),
        route(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), None, RouterConfig(4, 3))[0].tolist(),
        route(one_allowed, None, RouterConfig(12, 3))[0].tolist(),
        route(equal[:0], None, groups, scores=True)[2].shape,
    ]


def test_ties_select_the_lowest_id_and_missing_experts_are_dropped(interpreter: RankPool) -> None:
    results = interpreter.run(_ties)[0]
    assert results == [[[0, 1, 2]], [[0, 1, 2]], [[1, 2, 3]], [[7, -1, -1]], (0, 12)]


@on_ranks(1)
def test_a_tokens_bits_do_not_depend_on_its_batch() -> None:
    route = kernels("router").route
    config = RouterConfig(24, 5, "sigmoid", num_groups=6, top_groups=3)
    logits_TE = drawn(40, 24)
    whole = route(logits_TE, None, config)
    for first, last in ((0, 1), (3, 20), (39, 40)):
        part = route(logits_TE[first:last], None, config)
        assert torch.equal(part[0], whole[0][first:last]) and torch.equal(part[1], whole[1][first:last])


@on_ranks(1)
def test_wrong_shapes_dtypes_and_too_many_experts_are_input_errors() -> None:
    route, config = kernels("router").route, RouterConfig(8, 2)
    for logits_TE, bias_E in (
        (drawn(3, 7), None),
        (drawn(3, 8).double(), None),
        (drawn(8, 3).t(), None),
        (drawn(3, 8), drawn(7)),
        (drawn(3, 8), drawn(8).bfloat16()),
    ):
        with pytest.raises(InputError, match="got"):
            route(logits_TE, bias_E, config)
    with pytest.raises(InputError, match="at most 1024"):
        route(drawn(1, 1025), None, RouterConfig(1025, 2))
