"""``experts_implementation="moe_comm"`` of transformers. ``make adapters`` runs these with older versions, too."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch

from moe_comm.errors import RoutingError, UnsupportedModel
from moe_comm.integrations.hugging_face import register
from tests.integrations.models import SMALL, assert_close, batch, gradients, load, token_loss


@pytest.mark.parametrize("family", SMALL)
def test_experts_implementation_computes_what_transformers_computes(family: str, saved: Callable[[str], str]) -> None:
    register()
    ids = torch.cat(batch())
    results = []
    for name in ("eager", "moe_comm"):
        model = load(saved(family), experts_implementation=name)
        assert model.config._experts_implementation == name
        logits = model(ids).logits
        token_loss(logits, ids, ids.numel()).backward()
        results.append((logits.detach(), gradients(model)))
    (expected, expected_grads), (got, grads) = results
    assert_close(got, expected, "logits")
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        assert_close(grads[name], grad, name)


def test_experts_implementation_can_be_set_on_a_loaded_model_and_back(saved: Callable[[str], str]) -> None:
    register()
    model, ids = load(saved("mixtral")), batch()[0]
    before = model(ids).logits
    model.set_experts_implementation("moe_comm")
    assert_close(model(ids).logits.detach(), before.detach(), "logits")
    assert_close(deepcopy(model)(ids).logits.detach(), before.detach(), "logits of a copy")
    model.set_experts_implementation("grouped_mm")
    assert torch.equal(model(ids).logits, before)


def test_routes_to_other_ranks_add_nothing_and_get_no_gradient(saved: Callable[[str], str]) -> None:
    register()
    experts = load(saved("mixtral"), experts_implementation="moe_comm").model.layers[0].mlp.experts
    x_TD, ids_TK = torch.randn(5, 32), torch.tensor([[0, 1], [2, 8], [8, 8], [9, 3], [4, 5]])
    weights_TK = torch.rand(5, 2).masked_fill(ids_TK >= 8, 0.0).requires_grad_()
    experts._is_expert_parallel = True
    got = experts(x_TD, ids_TK, weights_TK)
    got.sum().backward()
    experts.config._experts_implementation = "eager"
    expected = experts(x_TD, ids_TK.clamp(max=7), weights_TK)
    assert_close(got.detach(), expected.detach(), "output")
    assert bool((got[2] == 0).all())
    assert weights_TK.grad is not None and bool((weights_TK.grad[ids_TK >= 8] == 0).all())


def test_experts_implementation_reports_nan_weights(saved: Callable[[str], str]) -> None:
    register()
    model = load(saved("mixtral"), experts_implementation="moe_comm")
    embeds = model.get_input_embeddings()(batch()[0]).detach()
    embeds[1, 2] = float("nan")
    with pytest.raises(RoutingError, match="NaN"):
        model(inputs_embeds=embeds)


def test_experts_implementation_refuses_experts_it_cannot_compute(saved: Callable[[str], str]) -> None:
    register()
    model = load(saved("mixtral"), experts_implementation="moe_comm")
    model.model.layers[0].mlp.experts.has_post_expert_norm = True
    with pytest.raises(UnsupportedModel, match="normalizes"):
        model(batch()[0])
