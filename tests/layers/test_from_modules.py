"""``MoELayer.from_modules`` and ``to_modules``, against a loop over the modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import moe_comm
from moe_comm import MoEBlock, MoEGroups, MoELayer, Placement, Router, RouterConfig, Routing
from moe_comm.errors import ConfigError, InputError, MoeCommError, RankMismatch, UnsupportedModel
from tests.pool import on_ranks

E, D, WIDTH, TOP_K = 5, 12, 20, 2


class SwiGLU(nn.Module):
    def __init__(self, bias: bool = False, act: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(D, WIDTH, bias), nn.Linear(D, WIDTH, bias)
        self.w2, self.act = nn.Linear(WIDTH, D, bias), act

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class Interleaved(nn.Module):
    """x @ w, with gate and up in alternating columns of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(D, 2 * WIDTH) / 4)
        self.outer = nn.Parameter(torch.randn(WIDTH, D) / 4)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        h = x @ self.inner
        return F.gelu(h[..., 1::2]) * h[..., ::2] @ self.outer, None


def gelu_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, WIDTH), nn.GELU(), nn.Linear(WIDTH, D))


class Stacked(nn.Module):
    """Called with tokens, ids and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(E, WIDTH, D) / 4)
        self.down = nn.Parameter(torch.randn(E, D, WIDTH) / 4)

    def one(self, e: int, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, self.up[e])), self.down[e])

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for e in range(E):
            weight = (weights * (ids == e)).sum(-1, keepdim=True)
            y = y + weight * self.one(e, x)
        return y


class Gate(nn.Module):
    """Returns weights and ids, or only logits; does not take zero tokens."""

    def __init__(self, logits: bool) -> None:
        super().__init__()
        self.weight, self.logits = nn.Parameter(torch.randn(E, D)), logits

    def forward(self, x: Tensor) -> Any:
        assert len(x)
        logits = F.linear(torch.tanh(x), self.weight)
        return logits if self.logits else torch.sigmoid(logits).topk(TOP_K)


@dataclass
class Plain:
    """The modules, and the layer that they are: a loop over all experts."""

    router: Any
    experts: Any
    given: dict[str, Any] = field(default_factory=dict)

    def weights(self, x: Tensor) -> Tensor:
        """Return [T, E]."""
        result = self.router(x)
        if isinstance(result, tuple):
            values, ids = result
        elif "routing" in self.given:
            values, ids = torch.sigmoid(result).topk(TOP_K)
        else:
            values, ids = result.softmax(-1).topk(TOP_K)
            values = values / values.sum(-1, keepdim=True)
        return torch.zeros(len(x), E).scatter(1, ids, values)

    def expert(self, e: int, x: Tensor) -> Tensor:
        if isinstance(self.experts, Stacked):
            return self.experts.one(e, x)
        if isinstance(self.experts, nn.ParameterDict):
            gate, up, down = (self.experts[name][e] for name in ("gate", "up", "down"))
            return (F.silu(x @ gate) * (x @ up)) @ down
        items = self.experts.values() if isinstance(self.experts, nn.ModuleDict) else self.experts
        result = list(items)[e](x)
        return result[0] if isinstance(result, tuple) else result

    def __call__(self, x: Tensor) -> Tensor:
        weights = self.weights(x)
        return sum(weights[:, e, None] * self.expert(e, x) for e in range(E))  # type: ignore[return-value]

    def layer(self, group: Any = None, **settings: Any) -> MoELayer:
        router = deepcopy(self.router)  # the layer uses a module itself
        return MoELayer.from_modules(router, self.experts, group, **self.given, **settings)

    def parameters(self) -> dict[str, Tensor]:
        return _parameters(self.router, self.experts)


def _parameters(router: Any, experts: Any) -> dict[str, Tensor]:
    modules = experts if isinstance(experts, nn.Module) else nn.ModuleList(experts)
    return dict(nn.ModuleDict({"router": router, "experts": modules}).named_parameters())


def _plain(kind: str) -> Plain:
    torch.manual_seed(3)
    linear, top_k = nn.Linear(D, E, bias=kind == "dict"), {"top_k": TOP_K}
    if kind == "list":
        return Plain(linear, [SwiGLU() for _ in range(E)], top_k)
    if kind == "dict":
        return Plain(linear, nn.ModuleDict({f"expert {e}": gelu_mlp() for e in range(E)}), top_k)
    if kind == "interleaved":
        routing = RouterConfig(E, TOP_K, score="sigmoid", normalize=False)
        return Plain(Gate(logits=True), nn.ModuleList(Interleaved() for _ in range(E)), {"routing": routing})
    if kind == "stacked":
        return Plain(Gate(logits=False), Stacked())
    shapes = {"gate": (E, D, WIDTH), "up": (E, D, WIDTH), "down": (E, WIDTH, D)}
    stacks = nn.ParameterDict({name: nn.Parameter(torch.randn(shape) / 4) for name, shape in shapes.items()})
    return Plain(linear, stacks, {**top_k, "description": MoEBlock(("gate", "up"), "down", transposed=True)})


KINDS = pytest.mark.parametrize("kind", ["list", "dict", "interleaved", "stacked", "described"])


def _tokens(rank: int) -> Tensor:
    return torch.randn(3 * rank, D, generator=torch.Generator().manual_seed(rank))  # none on rank 0


@on_ranks(2, 4)
@KINDS
def test_outputs_a_step_of_training_and_the_modules_afterwards_equal_those_of_the_modules(
    kind: str, rank: int, world: int, group: ProcessGroup
) -> None:
    _train_and_convert(kind, rank, world, group)


@KINDS
def test_one_process_trains_and_converts_back(kind: str) -> None:
    _train_and_convert(kind, 1, 1, None)


def _train_and_convert(kind: str, rank: int, world: int, group: ProcessGroup | None) -> None:
    plain = _plain(kind)
    layer = plain.layer(group)
    before = {name: value.detach().clone() for name, value in plain.parameters().items()}
    for name, value in _parameters(*layer.to_modules()).items():
        assert torch.equal(value, before[name]), name

    batches = [_tokens(source) for source in (range(world) if world > 1 else [rank])]
    expected = [plain(x) if len(x) else x for x in batches]
    y = layer(_tokens(rank))
    torch.testing.assert_close(y, expected[rank if world > 1 else 0])
    torch.cat(expected).square().sum().backward()
    y.square().sum().backward()
    if group is not None:
        moe_comm.sync_gradients(layer)
    for params in (list(layer.parameters()), list(plain.parameters().values())):
        torch.optim.SGD(params, 0.01).step()
    router, experts = layer.to_modules()
    assert type(router) is type(plain.router) and type(experts) is type(plain.experts)
    trained = plain.parameters()
    assert any(not torch.equal(value, before[name]) for name, value in trained.items())
    for name, value in _parameters(router, experts).items():
        torch.testing.assert_close(value, trained[name], msg=name)
    again = Plain(router, experts, plain.given)
    torch.testing.assert_close(again(batches[-1]), plain(batches[-1]))


@on_ranks(4)
def test_any_mapping_has_the_bits_of_one_rank_and_gives_the_modules_back(rank: int, group: ProcessGroup) -> None:
    plain = _plain("list")
    alone = torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)
    whole = plain.layer(alone)
    expected = whole(_tokens(rank))
    mappings: list[tuple[Any, dict[str, Any]]] = [
        (group, {"experts_per_rank": (0, 3, 1, 1)}),
        (group, {"placement": Placement(((2,), (0, 1), (1,), (3,), (0,)), 4), "recompute": True}),
        (group, {"overlap": "auto"}),
        (MoEGroups(group, etp=2), {}),
    ]
    for ranks, settings in mappings:
        layer = plain.layer(ranks, **settings)
        with torch.set_grad_enabled("placement" not in settings):  # copies are for inference
            y = layer(_tokens(rank))
        assert torch.equal(y, expected) or (layer.sizes["etp"] == 2 and torch.allclose(y, expected, atol=1e-6))
        router, experts = layer.to_modules(rank0_only=True, cpu=True)
        assert (router is None and experts is None) == (rank != 0)
        if rank == 0:
            for name, value in _parameters(router, experts).items():
                assert torch.equal(value, plain.parameters()[name]), name

    state = moe_comm.gather_state_dict(layer)
    other = Plain(nn.Linear(D, E, False), [SwiGLU() for _ in range(E)], plain.given).layer(alone)
    other.load_state_dict(state)
    for name, value in _parameters(*deepcopy(other).to_modules()).items():
        assert torch.equal(value, plain.parameters()[name]), name


@on_ranks(2)
def test_a_rank_with_other_modules_raises_on_every_rank(rank: int, group: ProcessGroup) -> None:
    plain = _plain("list")
    wrong = _plain("list")
    wrong.experts[4] = SwiGLU(bias=True)
    with pytest.raises(UnsupportedModel, match=r"expert 4 has the parameters .*'w1.bias'"):
        (wrong if rank else plain).layer(group)
    wrong = _plain("list")
    wrong.experts[4].act = F.gelu  # on the rank that holds it, only this rank compares it
    with pytest.raises(UnsupportedModel, match=r"expert 4 differs in training: its output differs by \d"):
        wrong.layer(group)
    with torch.no_grad():
        plain.experts[rank].w1.weight.mul_(1 + rank)
    with pytest.raises(RankMismatch, match=r"experts\.1\.w1\.weight"):
        plain.layer(group)

    def made(plain: Plain) -> Iterator[nn.Module]:
        for number, expert in enumerate(plain.experts):
            if rank and number == E - 1:
                raise OSError("no such file")
            yield expert

    plain = _plain("list")
    with pytest.raises(UnsupportedModel, match="OSError: no such file"):
        MoELayer.from_modules(plain.router, made(plain), group, top_k=TOP_K)
    layer = MoELayer.from_modules(plain.router, dict(enumerate(plain.experts)).values(), group, top_k=TOP_K)
    assert layer(_tokens(rank)).shape == (3 * rank, D)
    for name, value in _parameters(*layer.to_modules()).items():
        assert torch.equal(value, plain.parameters()[name]), name


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.relu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class FunctionalDropout(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


def _five(make: Callable[[], nn.Module]) -> list[nn.Module]:
    return [make() for _ in range(E)]


def _hooked() -> nn.Module:
    expert = SwiGLU()
    expert.w1.register_forward_hook(lambda *_: None)
    return expert


def _tied() -> list[nn.Module]:
    experts = _five(SwiGLU)
    experts[1].w1 = experts[0].w1
    return experts


def _hooked_router(name: str) -> nn.Linear:
    router = nn.Linear(D, E)
    getattr(router.weight if name == "register_hook" else router, name)(lambda *_: None)
    return router


LINEAR = nn.Linear(D, E)
BAD: list[tuple[type[MoeCommError], str, Any, Any, dict[str, Any]]] = [
    (ConfigError, "from 12 to 5", nn.Linear(D, E + 1), _five(SwiGLU), {}),
    (ConfigError, "from 12 to 5", nn.Linear(D + 1, E), _five(SwiGLU), {}),
    (ConfigError, "from 12 to 4", LINEAR, _five(SwiGLU)[:4], {}),
    (ConfigError, "Sequential does not run on tokens", nn.Sequential(nn.Linear(D + 1, E)), _five(SwiGLU), {}),
    (ConfigError, "does not route among 5", nn.Sequential(nn.Linear(D, E + 1)), _five(SwiGLU), {}),
    (ConfigError, "selects the experts 7 to 7", lambda x: (x[:, :1].long() * 0 + 7, x[:, :1]), _five(SwiGLU), {}),
    (ConfigError, "does not route among 5", lambda x: (x[:, :0].long(), x[:, :0]), _five(SwiGLU), {}),
    (ConfigError, "of 2 experts itself", Gate(logits=False), _five(SwiGLU), {"top_k": 3}),
    (ConfigError, "own configuration", Router(D, RouterConfig(E, 2)), _five(SwiGLU), {}),
    (ConfigError, "4 experts of hidden size 12", Router(D, RouterConfig(4, 2)), _five(SwiGLU), {"top_k": None}),
    (ConfigError, "pass top_k", LINEAR, _five(SwiGLU), {"top_k": None}),
    (ConfigError, "top_k must be", LINEAR, _five(SwiGLU), {"top_k": E + 1}),
    (ConfigError, "4 experts", LINEAR, _five(SwiGLU), {"placement": Placement.contiguous(4, 1)}),
    (ConfigError, "experts must be modules", LINEAR, [], {}),
    (ConfigError, "a list or a dict; got set", LINEAR, set(_five(SwiGLU)), {}),
    (ConfigError, "a list or a dict; got int", LINEAR, E, {}),
    (ConfigError, "stacked", LINEAR, SwiGLU(), {}),
    (UnsupportedModel, "dropout 0.5", LINEAR, _five(lambda: nn.Sequential(gelu_mlp(), nn.Dropout())), {}),
    (UnsupportedModel, "no known formula", LINEAR, _five(FunctionalDropout), {}),
    (UnsupportedModel, "no known formula", LINEAR, _five(lambda: SwiGLU(act=torch.sin)), {}),
    (UnsupportedModel, "gradient of input differs by", LINEAR, _five(lambda: SwiGLU(act=Backward.apply)), {}),
    (UnsupportedModel, "buffers", LINEAR, _five(lambda: nn.Sequential(gelu_mlp(), nn.BatchNorm1d(D))), {}),
    (UnsupportedModel, "forward or backward hooks", LINEAR, _five(_hooked), {}),
    (UnsupportedModel, "router has forward or b", _hooked_router("register_full_backward_hook"), _five(SwiGLU), {}),
    (UnsupportedModel, "router has state-dict", _hooked_router("register_state_dict_post_hook"), _five(SwiGLU), {}),
    (UnsupportedModel, "weight has gradient hooks", _hooked_router("register_hook"), _five(SwiGLU), {}),
    (UnsupportedModel, "several experts", LINEAR, _tied(), {}),
    (UnsupportedModel, "one dtype", LINEAR, [*_five(SwiGLU)[:4], SwiGLU().double()], {}),
    (UnsupportedModel, "w_missing", LINEAR, Stacked(), {"description": MoEBlock("w_missing", "down", "relu")}),
    (UnsupportedModel, "were described as", LINEAR, Stacked(), {"description": MoEBlock("up", "down", "gelu")}),
]


@pytest.mark.parametrize(("error", "message", "router", "experts", "given"), BAD, ids=range(len(BAD)))
def test_modules_that_do_not_fit_raise(
    error: type[MoeCommError], message: str, router: Any, experts: Any, given: dict[str, Any]
) -> None:
    with pytest.raises(error, match=message):
        MoELayer.from_modules(router, experts, **{"top_k": TOP_K, **given})


def test_a_function_routes_and_any_module_is_a_shared_expert() -> None:
    plain = _plain("list")
    gate = nn.Linear(D, E, bias=False)

    def route(x: Tensor) -> Routing:
        weights, ids = gate(x).softmax(-1).topk(TOP_K)
        return Routing(ids, weights)

    shared = nn.Sequential(gelu_mlp(), nn.Dropout(0.0))
    shared.ffn = nn.Identity()
    plain.experts[0].requires_grad_(False)
    with pytest.raises(UnsupportedModel, match="require gradients"):
        MoELayer.from_modules(route, plain.experts, shared=shared)
    for expert in plain.experts:
        expert.requires_grad_(False)
    layer = MoELayer.from_modules(route, plain.experts, shared=shared)
    x = torch.randn(2, 3, D)
    weights, ids = gate(x.view(-1, D)).softmax(-1).topk(TOP_K)
    weights_TE = torch.zeros(6, E).scatter(1, ids, weights)
    routed = sum(weights_TE[:, e, None] * plain.expert(e, x.view(-1, D)) for e in range(E))
    torch.testing.assert_close(layer(x), (routed + shared(x).view(-1, D)).view(2, 3, D))
    assert {name.partition(".")[0] for name, param in layer.named_parameters() if param.requires_grad} == {"shared"}
    assert layer.to_modules()[0] is route

    built = MoELayer.build(moe_comm.MoEConfig(D, WIDTH, RouterConfig(E, 2)), seed=0)
    with pytest.raises(ConfigError, match="from_modules has built"):
        built.to_modules()
    with pytest.raises(ConfigError, match="got ModuleRouter"):
        moe_comm.check_grads(layer)
    corrected = MoELayer.from_modules(gate, plain.experts, routing=RouterConfig(E, 2, correction_bias=True))
    with pytest.raises(ConfigError, match="cannot hold its correction_bias"):
        corrected.to_modules()
    changing = MoELayer.from_modules(lambda x: x[:, :E] if len(x) == 8 else x, plain.experts, top_k=1)
    with pytest.raises(InputError, match=r"it returned \[\[6, 12\]\]"):
        changing(x)


@on_ranks(2)
def test_modules_on_meta_make_a_layer_on_meta_that_loads_a_checkpoint(
    rank: int, group: ProcessGroup, tmp_path: Path
) -> None:
    plain = _plain("dict")
    whole = plain.layer(group)
    with torch.device("meta"):
        empty = _plain("dict")
    layer = empty.layer(group)
    assert layer.experts.w13.is_meta
    with pytest.raises(ConfigError, match="meta device"):
        layer.to_modules()
    moe_comm.save_checkpoint(whole, tmp_path)
    moe_comm.load_checkpoint(layer, tmp_path)
    assert torch.equal(layer(_tokens(1 + rank)), whole(_tokens(1 + rank)))
    for name, value in _parameters(*layer.to_modules()).items():
        assert torch.equal(value, plain.parameters()[name]), name
