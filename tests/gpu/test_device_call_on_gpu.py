"""A layer over ``local`` on a GPU: the CPU never waits for it, and the bits are those of dispatch, experts, combine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from moe_comm.errors import RoutingError
from moe_comm.layers.moe.config import MoEConfig
from moe_comm.layers.moe.experts import Experts
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.moe.router import RouterConfig, Routing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
TOKENS, HIDDEN, EXPERTS, TOP_K = 700, 256, 16, 4


def layer() -> MoELayer:
    config = MoEConfig(HIDDEN, 128, RouterConfig(EXPERTS, TOP_K))
    return MoELayer.build(config, backend="local", seed=0, dtype=torch.bfloat16, device="cuda")


def tokens(seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(TOKENS, HIDDEN, device="cuda", generator=generator).to(torch.bfloat16)


def passes(built: MoELayer, x_TD: Tensor, grad_TD: Tensor) -> list[Tensor]:
    x_TD = x_TD.detach().requires_grad_()
    built.zero_grad(set_to_none=True)
    y_TD = built(x_TD)
    y_TD.backward(grad_TD)
    return [y_TD.detach(), *(p.grad for p in (x_TD, *built.parameters()) if p.grad is not None)]


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_layer_never_waits_and_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    built, x_TD, grad_TD = layer(), tokens(), tokens(1)
    with monkeypatch.context() as patch:
        patch.setattr(Experts, "is_uncounted", lambda *_: False)
        expected, stats = passes(built, x_TD, grad_TD), built.dispatch_stats
    load_E = built.router.load_E.clone()
    passes(built, x_TD, grad_TD)  # compiles, and allocates pinned memory
    with no_waiting():
        actual = passes(built, x_TD, grad_TD)
    assert len(actual) == len(expected) == 5 and all(map(torch.equal, actual, expected))
    assert built.dispatch_stats == stats
    assert torch.equal(built.router.load_E, 3 * load_E) and int(load_E.sum()) == TOKENS * TOP_K


def test_invalid_ids_make_results_nan_and_raise_in_the_next_call() -> None:
    built, x_TD = layer(), tokens()
    ids_TK = torch.arange(TOP_K, device="cuda").expand(TOKENS, TOP_K).contiguous()
    wrong_TK, weights_TK = ids_TK.clone(), torch.full((TOKENS, TOP_K), 0.25, device="cuda")
    wrong_TK[400, 1], wrong_TK[600, 0] = EXPERTS, -2
    y_TD = built(x_TD, Routing(wrong_TK, weights_TK))
    with pytest.raises(RoutingError, match=rf"expert id {EXPERTS} of token 400, slot 1.*2 bad ids"):
        built.dispatcher.check_ids()
    assert y_TD.isnan().any(1).nonzero().flatten().tolist() == [400, 600]
    built(x_TD, Routing(wrong_TK, weights_TK))
    torch.cuda.synchronize()
    with pytest.raises(RoutingError, match="earlier call"):
        built(x_TD, Routing(ids_TK, weights_TK))
    assert not built(x_TD, Routing(ids_TK, weights_TK)).isnan().any()


def test_a_graph_captures_forward_and_backward() -> None:
    built, x_TD, grad_TD = layer(), tokens().requires_grad_(), tokens(1)
    wanted = [x_TD, *built.parameters()]

    def step() -> list[Tensor]:
        y_TD = built(x_TD)
        return [y_TD.detach(), *torch.autograd.grad(y_TD, wanted, grad_TD)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (2, 3):
        with torch.no_grad():
            x_TD.copy_(tokens(seed))
        built.router.take_load()
        graph.replay()
        actual, load_E = [t.clone() for t in captured], built.router.take_load()
        assert all(map(torch.equal, actual, step()))
        assert torch.equal(load_E, built.router.take_load()) and int(load_E.sum()) == TOKENS * TOP_K
    with torch.no_grad():
        x_TD[5] = float("nan")
    graph.replay()
    with pytest.raises(RoutingError, match="router logits of token 5"):
        built.dispatcher.check_ids()
