"""Routers compared with Hugging Face's formulas; special logits, losses, bias updates, counters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_comm.dispatch import DROPPED, INVALID_LOGITS, make_dispatcher
from moe_comm.errors import ConfigError, InputError, RoutingError
from moe_comm.layers import Router, RouterConfig, attach_loss
from moe_comm.layers.moe.losses import sequence_balance_sums
from tests.layers.reference import draw

NAN, INF = float("nan"), float("inf")


def router_for(logits: Tensor, config: RouterConfig) -> tuple[Router, Tensor]:
    """Return a router and an input that give exactly these logits."""
    router = Router(config.num_choices, config)
    router.weight.data.copy_(torch.eye(config.num_choices))
    return router, logits


def by_expert(routing_ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    return torch.zeros(weights.shape[0], experts, dtype=weights.dtype).scatter(1, routing_ids, weights)


@pytest.mark.parametrize("normalize", [True, False])
def test_softmax_top_k_is_that_of_mixtral_qwen_and_olmoe(normalize: bool) -> None:
    router = Router(32, RouterConfig(8, 3, normalize=normalize))
    x = draw(50, 32)
    probs = (x @ router.weight.t()).softmax(-1)
    values, ids = probs.topk(3)
    values = values / values.sum(-1, keepdim=True) if normalize else values
    routing = router(x)
    assert torch.equal(routing.ids_TK, ids)
    torch.testing.assert_close(routing.weights_TK, values)


def test_sigmoid_with_groups_and_bias_is_that_of_deepseek_v3() -> None:
    config = RouterConfig(
        16, 4, score="sigmoid", scale=2.5, num_groups=4, top_groups=2, group_score="top2_sum", correction_bias=True
    )
    router = Router(32, config)
    router.weight.data.mul_(20)
    assert router.correction_bias is not None
    router.correction_bias.copy_(draw(16, seed=3) * 0.3)
    x = draw(60, 32)
    scores = (x @ router.weight.t()).sigmoid()
    choice = scores + router.correction_bias
    groups = choice.view(-1, 4, 4).topk(2, -1).values.sum(-1).topk(2, -1).indices
    mask = torch.zeros(60, 4).scatter_(1, groups, 1).bool().repeat_interleave(4, 1)
    ids = choice.masked_fill(~mask, -INF).topk(4, -1).indices
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
    routing = router(x)
    torch.testing.assert_close(by_expert(routing.ids_TK, routing.weights_TK, 16), by_expert(ids, weights, 16))
    router.weight.grad = None
    assert not router.correction_bias.requires_grad


def test_topk_softmax_is_that_of_gpt_oss_and_of_normalized_softmax() -> None:
    router = Router(32, RouterConfig(8, 3, score="topk_softmax", linear_bias=True))
    assert router.bias is not None
    router.bias.data.copy_(draw(8, seed=4))
    x = draw(40, 32)
    values, ids = (x @ router.weight.t() + router.bias).topk(3)
    routing = router(x)
    assert torch.equal(routing.ids_TK, ids)
    torch.testing.assert_close(routing.weights_TK, values.softmax(-1))
    twin = Router(32, RouterConfig(8, 3, linear_bias=True))
    twin.load_state_dict(router.state_dict())
    torch.testing.assert_close(twin(x).weights_TK, routing.weights_TK)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "topk_softmax"])
def test_gradients_pass_gradcheck(score: str) -> None:
    router = Router(5, RouterConfig(6, 2, score=score, linear_bias=True, balance_loss=0.1, z_loss=0.1)).double()  # type: ignore[arg-type]
    router.weight.data.copy_(draw(6, 5, dtype=torch.float64))
    x = draw(7, 5, dtype=torch.float64).requires_grad_()

    def run(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.func.functional_call(router, {"weight": w, "bias": b}, x)
        return out.weights_TK, out.aux_loss

    assert torch.autograd.gradcheck(
        run, (x, router.weight.detach().requires_grad_(), router.bias.detach().requires_grad_())
    )  # type: ignore[union-attr]


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "topk_softmax"])
@pytest.mark.parametrize("experts", [7, 64])
def test_a_tokens_routing_has_the_same_bits_in_every_batch(score: str, experts: int) -> None:
    router = Router(48, RouterConfig(experts, 3, score=score))  # type: ignore[arg-type]
    router.weight.data.mul_(20)
    x, grad = draw(130, 48), draw(130, 3, seed=1)

    def run(rows: slice) -> tuple[Tensor, ...]:
        leaf = x[rows].clone().requires_grad_()
        out = router(leaf)
        out.weights_TK.backward(grad[rows])
        assert leaf.grad is not None
        return out.ids_TK, out.weights_TK.detach(), leaf.grad

    full = run(slice(None))
    for rows in (1, 2, 3, 5, 16, 31, 64, 129):
        for part in (slice(0, rows), slice(130 - rows, 130)):
            assert all(torch.equal(a, b[part]) for a, b in zip(run(part), full, strict=True)), (rows, part)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "topk_softmax"])
def test_bad_logits_mark_the_token_and_dispatch_raises(score: str) -> None:
    config = RouterConfig(4, 2, score=score)  # type: ignore[arg-type]
    router = Router(4, config)
    x = draw(6, 4)
    router.weight.data.abs_()
    valid_routing = router(x)
    assert valid_routing.ids_TK.min() >= 0
    for bad in (NAN, INF):
        x_with_bad_value = x.clone()
        x_with_bad_value[3, 1] = bad
        routing = router(x_with_bad_value)
        assert (routing.ids_TK[3] == INVALID_LOGITS).all() and (routing.weights_TK[3] == 0).all()
        others = [0, 1, 2, 4, 5]
        assert torch.equal(routing.ids_TK[others], valid_routing.ids_TK[others])
        assert torch.equal(routing.weights_TK[others], valid_routing.weights_TK[others])
        with pytest.raises(RoutingError, match="token 3"):
            make_dispatcher(4).dispatch(x, routing.ids_TK)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "topk_softmax"])
def test_minus_infinity_forbids_an_expert(score: str) -> None:
    config = RouterConfig(5, 3, score=score, linear_bias=True, correction_bias=score == "sigmoid")  # type: ignore[arg-type]
    router = Router(8, config)
    assert router.bias is not None
    if router.correction_bias is not None:
        router.correction_bias.copy_(torch.tensor([5.0, 5.0, -9.0, -9.0, -9.0]))
    router.bias.data[:2] = -INF
    x = draw(20, 8).requires_grad_()
    routing = router(x)
    assert sorted(routing.ids_TK[0].tolist()) == [2, 3, 4]
    assert (routing.ids_TK >= 2).all()
    routing.weights_TK.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    router.bias.data[2] = -INF
    routing = router(x)
    assert ((routing.ids_TK == DROPPED).sum(1) == 1).all() and (
        routing.weights_TK[routing.ids_TK == DROPPED] == 0
    ).all()
    torch.testing.assert_close(routing.weights_TK.sum(1), torch.ones(20))
    router.bias.data.fill_(-INF)
    assert (router(x).ids_TK == INVALID_LOGITS).all()


def test_experts_whose_softmax_underflows_are_selected_once_each() -> None:
    router, x = router_for(torch.tensor([[500.0, 0.0, -500.0, -501.0]]), RouterConfig(4, 4))
    assert sorted(router(x).ids_TK[0].tolist()) == [0, 1, 2, 3]


def test_routing_runs_in_fp32_under_autocast_and_in_bf16_models() -> None:
    router = Router(64, RouterConfig(8, 2, correction_bias=True))
    x = draw(30, 64)
    plain = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        routing = router(x)
    assert routing.logits_TE.dtype == routing.weights_TK.dtype == torch.float32
    assert torch.equal(routing.logits_TE, plain.logits_TE)
    half = router.bfloat16()(x.bfloat16())
    assert half.weights_TK.dtype == torch.float32
    assert router.correction_bias is not None and router.correction_bias.dtype == torch.float32


def test_balance_loss_is_that_of_switch_and_hugging_face() -> None:
    config = RouterConfig(8, 2, balance_loss=0.5, z_loss=0.25)
    router = Router(16, config)
    x = draw(33, 16)
    routing = router(x)
    logits = x @ router.weight.t()
    probs = logits.softmax(-1)
    chosen = torch.nn.functional.one_hot(probs.topk(2).indices, 8).float()
    expected = 8 * (chosen.mean(0) * probs.mean(0).unsqueeze(0)).sum()
    torch.testing.assert_close(router.losses["balance"], expected)
    torch.testing.assert_close(router.losses["z"], logits.logsumexp(-1).square().mean())
    torch.testing.assert_close(routing.aux_loss, 0.5 * expected + 0.25 * logits.logsumexp(-1).square().mean())
    assert router.eval()(x).aux_loss is None


def test_sequence_balance_loss_is_that_of_deepseek_v3() -> None:
    probs = draw(12, 4).softmax(-1)
    ids = probs.topk(2).indices
    total = 0.0
    for s in range(3):
        p, i = probs[4 * s : 4 * s + 4], ids[4 * s : 4 * s + 4]
        for e in range(4):
            total += float((i == e).sum()) * 4 / (2 * 4) * float(p[:, e].mean())
    loss = sequence_balance_sums(probs, ids, 3)[0] / 3
    assert float(loss) == pytest.approx(total / 3, rel=1e-5)
    config = RouterConfig(4, 2, score="sigmoid", balance_loss=1.0, balance_form="sequence", z_loss=1.0)
    router = Router(6, config)
    assert router(draw(12, 6), 3).aux_loss.isfinite()
    assert router(draw(0, 6), 3).aux_loss == 0


def test_an_attached_loss_keeps_the_value_and_adds_its_gradient() -> None:
    x, w = draw(4, 3).requires_grad_(), draw(3, seed=1).requires_grad_()
    y = attach_loss(x * 2, (w * w).sum(), 3.0)
    assert torch.equal(y, x * 2)
    y.sum().backward()
    assert x.grad is not None and w.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 2)) and torch.equal(w.grad, 6 * w.detach())


def test_bias_update_raises_idle_experts_and_lowers_busy_ones() -> None:
    router = Router(8, RouterConfig(4, 1, score="sigmoid", correction_bias=True))
    router.update_bias(torch.tensor([10, 0, 5, 5]), 0.5)
    assert router.correction_bias is not None and router.correction_bias.tolist() == [-0.5, 0.5, 0, 0]
    router.update_bias(torch.tensor([9, 1, 1, 1]), 0.5, recenter=True)
    assert float(router.correction_bias.mean()) == pytest.approx(0, abs=1e-7)
    assert "correction_bias" in router.state_dict() and "load_E" not in router.state_dict()
    with pytest.raises(InputError):
        router.update_bias(torch.zeros(3))
    with pytest.raises(ConfigError):
        Router(8, RouterConfig(4, 1)).update_bias(torch.zeros(4))


def test_bias_updates_balance_a_skewed_load() -> None:
    router = Router(16, RouterConfig(8, 2, score="sigmoid", correction_bias=True))
    router.weight.data.copy_(draw(8, 16) * 0.2)
    x = draw(400, 16) + 1.0
    imbalance = []
    for _ in range(200):
        router(x)
        load = router.take_load()
        imbalance.append(float(load.max()) / float(load.float().mean()))
        router.update_bias(load, 0.01)
    assert imbalance[-1] < 1.2 < imbalance[0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_load_is_counted_once_under_checkpointing_and_never_in_eval(reentrant: bool) -> None:
    router = Router(8, RouterConfig(4, 2))
    x = draw(10, 8).requires_grad_()
    checkpoint(lambda x: router(x).weights_TK, x, use_reentrant=reentrant).sum().backward()
    assert int(router.load_E.sum()) == 20
    router.eval()(x)
    assert int(router.take_load().sum()) == 20
    assert int(router.load_E.sum()) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 0},
        {"top_k": 9},
        {"score": "softmux"},
        {"num_groups": 3},
        {"num_groups": 4, "top_groups": 5},
        {"num_groups": 8, "top_groups": 1},
        {"balance_loss": -1.0},
    ],
)
def test_invalid_settings_raise(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        RouterConfig(**{"num_experts": 8, "top_k": 2, **settings})  # type: ignore[arg-type]


def test_an_empty_batch_gives_empty_routing_and_zero_loss() -> None:
    router = Router(8, RouterConfig(4, 2, balance_loss=0.1, z_loss=0.1))
    routing = router(torch.zeros(0, 8))
    assert routing.ids_TK.shape == routing.weights_TK.shape == (0, 2) and routing.aux_loss == 0
    routing.aux_loss.backward()
    assert router.weight.grad is not None and not router.weight.grad.any()


def test_the_correction_bias_is_fp32_in_a_model_built_with_another_default_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        router = Router(8, RouterConfig(4, 2, score="sigmoid", correction_bias=True))
    finally:
        torch.set_default_dtype(before)
    assert router.weight.dtype == torch.bfloat16
    assert router.correction_bias is not None and router.correction_bias.dtype == torch.float32


@pytest.mark.parametrize("form", ["batch", "sequence"])
def test_balance_loss_is_finite_where_every_sigmoid_underflows(form: str) -> None:
    router = Router(4, RouterConfig(4, 2, score="sigmoid", balance_loss=0.1, balance_form=form))  # type: ignore[arg-type]
    router.weight.data.fill_(-100.0)
    loss = router(torch.ones(3, 4)).aux_loss
    assert loss is not None and loss.isfinite()
    loss.backward()
    assert router.weight.grad is not None and router.weight.grad.isfinite().all()
