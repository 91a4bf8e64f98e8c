"""MoE blocks as users write them: each swaps exactly, or is refused on every rank before the model changes."""

from __future__ import annotations

import os
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import moe_comm
from moe_comm.errors import InputError, UnsupportedModel
from tests.pool import on_ranks

D, WIDTH, EXPERTS = 16, 24, 3


def _mlp(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, WIDTH, bias), nn.GELU(), nn.Linear(WIDTH, D, bias))


class Switch(nn.Module):
    """One expert per token, jitter multiplied on the router's input in training."""

    count = EXPERTS
    bias = True

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, self.count, bias=False)
        self.experts: Any = nn.ModuleList(_mlp(self.bias) for _ in range(self.count))

    def weights(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * torch.empty_like(x).uniform_(0.9, 1.1)
        probs = self.router(x).softmax(-1)
        return probs * F.one_hot(probs.argmax(-1), self.count)

    def mixed(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        w, y = self.weights(flat), torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            t = w[:, e].nonzero()[:, 0]
            if len(t) == 0:
                continue
            y = y.index_add(0, t, (expert(flat[t]) * w[t, e, None]).to(y.dtype))
        return y.view_as(x)

    def forward(self, x: Tensor) -> Any:
        return self.mixed(x)


class TensorAttribute(Switch):
    """Has a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor([1.0, 0.5, 2.0])

    def weights(self, x: Tensor) -> Tensor:
        return super().weights(x) * self.scale


class NoBias(Switch):
    bias = False


class Jitter(Switch):
    """Jitter on the input of the experts also."""

    def forward(self, x: Tensor) -> Any:
        if self.training:
            x = x * torch.empty_like(x).uniform_(0.9, 1.1)
        return self.mixed(x)


class ExpertChoice(Switch):
    def weights(self, x: Tensor) -> Tensor:
        probs = self.router(x).softmax(-1)
        ids = probs.topk(max(len(x) // 2, 1) if len(x) else 0, 0).indices
        return torch.zeros_like(probs).scatter(0, ids, probs.gather(0, ids))


class TopP(Switch):
    def weights(self, x: Tensor) -> Tensor:
        probs = (4 * self.router(x)).softmax(-1)
        ordered, ids = probs.sort(-1, descending=True)
        kept = (ordered.cumsum(-1) - ordered) < 0.6
        return torch.zeros_like(probs).scatter(1, ids, ordered * kept)


class Relu(Switch):
    def weights(self, x: Tensor) -> Tensor:
        return self.router(x).relu()


class Passthrough(Switch):
    """Tokens beyond the capacity pass unchanged."""

    def forward(self, x: Tensor) -> Any:
        flat = x.reshape(-1, D)
        w, y = self.weights(flat), flat.clone()
        for e, expert in enumerate(self.experts):
            t = w[:, e].nonzero()[: len(flat) // EXPERTS, 0]
            y[t] = expert(flat[t]) * w[t, e, None]
        return y.view_as(x)


class DictOfExperts(Switch):
    """Experts by key, in an order of their own, found in four ways."""

    names = ("b", "a", "10")

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict(dict(zip(self.names, self.experts, strict=True)))

    def weights(self, x: Tensor) -> Tensor:
        return self.router(x).softmax(-1)

    def forward(self, x: Tensor) -> Any:
        assert list(self.experts) == list(self.experts.keys()) == list(self.names) and "a" in self.experts
        (_, first), *_ = self.experts.items()
        chosen = first, getattr(self.experts, self.names[1]), list(self.experts.values())[2]
        assert len(self.experts) == len(chosen)
        w = self.weights(x)
        y = sum(w[..., e, None] * expert(x) for e, expert in enumerate(chosen))
        return y + w[..., :1] * self.experts[self.names[0]](x)


class NumberedExperts(DictOfExperts):
    names = ("2", "a", "1")


class Residual(Switch):
    def forward(self, x: Tensor) -> Any:
        return x + self.mixed(x)


class SharedResidual(Residual):
    """A shared expert beside the tokens, of which dropout draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(_mlp(), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Any:
        return 0.5 * super().forward(x) + self.shared(x)


class RectifiedSum(Residual):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).relu()


class Dropped(Switch):
    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts:
            expert.append(nn.Dropout(0.0))


class AsDict(Switch):
    def forward(self, x: Tensor) -> Any:
        return {"loss": self.router(x).logsumexp(-1).sum(), "y": self.mixed(x)}


Named = namedtuple("Named", "y logits")


class AsNamed(Switch):
    def forward(self, x: Tensor) -> Any:
        return Named(self.mixed(x), self.router(x))


@dataclass
class Data:
    y: Tensor
    logits: Tensor


class AsData(Switch):
    def forward(self, x: Tensor) -> Any:
        return Data(self.mixed(x), self.router(x))


class KeywordOnly(Switch):
    def forward(self, *, hidden_states: Tensor) -> Any:
        return self.mixed(hidden_states)


class MixedActivations(Switch):
    """The last of many experts, which no token of a check may reach, has another activation."""

    count = 40

    def __init__(self) -> None:
        super().__init__()
        self.experts[39][1] = nn.ReLU()


class MixedNumbers(Switch):
    """Experts that are different by a number."""

    class Expert(nn.Sequential):
        def __init__(self, number: int) -> None:
            super().__init__(*_mlp())
            self.number = number

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            return y.sin() if self.number == 2 else y

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(self.Expert(number) for number in range(EXPERTS))


class TiedExperts(Switch):
    def __init__(self) -> None:
        super().__init__()
        self.experts[1][2].weight = self.experts[0][2].weight


class Reentrant(Switch):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.mixed, x, use_reentrant=True)


class NonReentrant(Switch):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.mixed, x, use_reentrant=False)


class CheckpointedExperts(Switch):
    def forward(self, x: Tensor) -> Any:
        w = self.weights(x)
        return sum(
            w[..., e, None] * checkpoint(expert, x, use_reentrant=False) for e, expert in enumerate(self.experts)
        )


class Many(Switch):
    """More experts than a token has values."""

    count = 2 * D + 4


class ManyResidual(Residual):
    count = D + 4


class ManyShared(Many):
    def __init__(self) -> None:
        super().__init__()
        self.shared = _mlp()

    def forward(self, x: Tensor) -> Any:
        return self.shared(x) + self.mixed(x)


class Lone(Switch):
    count = 1


class SharedAndBuffers(Switch):
    """A shared expert, and buffers: one scales the weights, one counts."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = _mlp()
        self.register_buffer("scale", torch.full((EXPERTS,), 1.5))
        self.register_buffer("load", torch.zeros(EXPERTS), persistent=False)

    def weights(self, x: Tensor) -> Tensor:
        w = super().weights(x) * self.scale
        with torch.no_grad():
            self.load += (w > 0).sum(0)
        return w

    def forward(self, x: Tensor) -> Any:
        return self.mixed(x) + self.shared(x)


class PartlyFrozen(Switch):
    def __init__(self) -> None:
        super().__init__()
        self.experts[1].requires_grad_(False)


class FrozenExperts(Switch):
    def __init__(self) -> None:
        super().__init__()
        self.experts.requires_grad_(False)


class FrozenRouter(Switch):
    def __init__(self) -> None:
        super().__init__()
        self.router.requires_grad_(False)


class MixedDtypes(Switch):
    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts:
            expert[0].double()


class ScaledByZero(Switch):
    """One expert's weight is exactly 0, with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 0.0, 1.0]))

    def weights(self, x: Tensor) -> Tensor:
        return self.router(x).softmax(-1) * self.scale

    def forward(self, x: Tensor) -> Any:
        w = self.weights(x)
        return sum(w[..., e, None] * expert(x) for e, expert in enumerate(self.experts))


class RaisesOnRank1(Switch):
    def forward(self, x: Tensor) -> Any:
        if len(x.reshape(-1, D)) and os.environ.get("TEST_RANK") == "1":
            raise OSError("no disk")
        return self.mixed(x)


class RaisesInGrad(Switch):
    """Works until gradients are needed, on rank 1."""

    def forward(self, x: Tensor) -> Any:
        if x.requires_grad and os.environ.get("TEST_RANK") == "1":
            raise OSError("no disk")
        return self.mixed(x)


class Unpicklable(Switch):
    def __init__(self) -> None:
        super().__init__()
        self.file = open(os.devnull)  # noqa: SIM115


class DenseStack(nn.Module):
    """Layers in sequence, and a matrix of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(_mlp() for _ in range(EXPERTS)), nn.Linear(D, EXPERTS)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MORE = [DictOfExperts, NumberedExperts, Passthrough, Residual, SharedResidual, Many, ManyResidual, ManyShared]
SWAPPED = [
    *MORE,
    TensorAttribute,
    Switch,
    NoBias,
    ExpertChoice,
    TopP,
    Relu,
    Dropped,
    AsDict,
    AsNamed,
    CheckpointedExperts,
    SharedAndBuffers,
    FrozenExperts,
    FrozenRouter,
    KeywordOnly,
]
REFUSED = [
    Jitter,
    Reentrant,
    NonReentrant,
    RectifiedSum,
    MixedActivations,
    MixedNumbers,
    AsData,
    TiedExperts,
    Lone,
    PartlyFrozen,
    MixedDtypes,
    ScaledByZero,
    RaisesOnRank1,
    RaisesInGrad,
    Unpicklable,
    DenseStack,
]


def _block(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(moe=kind()))


def _run(block: nn.Module, source: int) -> list[Any]:
    torch.manual_seed(source)
    x = (torch.randn(3 * (source != 1), 4, D)).requires_grad_()
    inner: Any = block.moe
    y = block.moe(hidden_states=x) if isinstance(inner, KeywordOnly) else block(x)
    leaves = list(y.values()) if isinstance(y, dict) else list(y) if isinstance(y, tuple) else [y]
    (sum(leaf.square().sum() for leaf in leaves) + x.sum()).backward()
    return [*leaves, x.grad]


@on_ranks(4)  # one more than experts; rank 1 has no tokens
@pytest.mark.parametrize("kind", SWAPPED, ids=lambda k: k.__name__)
def test_swaps(kind: type[nn.Module], rank: int, world: int, group: ProcessGroup) -> None:
    _swaps(kind, rank, world, group)


@on_ranks(2)
@pytest.mark.parametrize("kind", MORE, ids=lambda k: k.__name__)
def test_swaps_on_two_ranks(kind: type[nn.Module], rank: int, world: int, group: ProcessGroup) -> None:
    _swaps(kind, rank, world, group)


@pytest.mark.parametrize("kind", SWAPPED, ids=lambda k: k.__name__)
def test_swaps_alone(kind: type[nn.Module]) -> None:
    _swaps(kind, 0, 1, None)


def _swaps(kind: type[nn.Module], rank: int, world: int, group: ProcessGroup | None) -> None:
    original, block = _block(kind), _block(kind)
    state = torch.get_rng_state()
    moe_comm.swap_moe(block, group)
    assert torch.equal(torch.get_rng_state(), state)
    expected = [_run(original, source) for source in range(world)]
    torch.testing.assert_close(_run(block, rank), expected[rank], rtol=1e-5, atol=1e-5)
    if world > 1:
        moe_comm.sync_gradients(block)
    gradients = deepcopy(block)
    for param, source in zip(gradients.parameters(), block.parameters(), strict=True):
        assert source.requires_grad or source.grad is None
        param.data = torch.zeros_like(source) if source.grad is None else source.grad.detach().clone()
    full = moe_comm.gather_state_dict(gradients)
    for name, param in original.named_parameters():
        torch.testing.assert_close(
            full[name], torch.zeros_like(param) if param.grad is None else param.grad, rtol=1e-4, atol=1e-4
        )


@on_ranks(2)
@pytest.mark.parametrize("kind", REFUSED, ids=lambda k: k.__name__)
def test_refused(kind: type[nn.Module], rank: int, group: ProcessGroup) -> None:
    os.environ["TEST_RANK"] = str(rank)
    model = _block(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds, state = [type(m) for m in model.modules()], torch.get_rng_state()
    with pytest.raises(UnsupportedModel) as raised:
        moe_comm.swap_moe(model, group)
    assert "moe_comm.block_adapter" in str(raised.value) or kind is Lone
    assert torch.equal(torch.get_rng_state(), state)
    assert kinds == [type(m) for m in model.modules()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Packed(nn.Module):
    """A layer as those of bitsandbytes: packed values, and a scale that is in state dicts only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
        self.scale, self.full = torch.ones(1), linear.weight.detach()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scale"] = self.scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.full)


def test_quantized_layers_may_surround_experts_only(tmp_path: Path) -> None:
    model: Any = nn.Sequential(OrderedDict(first=Packed(nn.Linear(D, D)), moe=NoBias()))
    moe_comm.swap_moe(model)(torch.randn(2, 3, D)).sum().backward()
    with pytest.raises(UnsupportedModel, match=r"first \(Packed\) has weight.scale in its state dict"):
        moe_comm.save_checkpoint(model, tmp_path)
    for expert in (model := _block(NoBias)).moe.experts:  # type: ignore[union-attr]
        expert[0] = Packed(expert[0])
    with pytest.raises(UnsupportedModel, match=r"moe.experts.0.0 \(Packed\) is quantized \(torch.uint8\)"):
        moe_comm.swap_moe(model)


class Late(Passthrough):
    """Passes tokens beyond the capacity only for more tokens than the check has."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) if len(x.reshape(-1, D)) > 40 else self.mixed(x)


def test_a_block_that_later_adds_its_tokens_raises() -> None:
    model = moe_comm.swap_moe(_block(Late))
    model(torch.randn(4, 4, D))
    with pytest.raises(InputError):
        model(torch.randn(16, 4, D))


@on_ranks(2)
@pytest.mark.parametrize("size", [1.0, 1000.0])
def test_a_residual_does_not_round_the_weights(size: float, rank: int, group: ProcessGroup) -> None:
    original: Any = _block(Residual).eval()
    model = moe_comm.swap_moe(deepcopy(original), group)
    x = size * torch.randn(2, 4, D)
    torch.testing.assert_close(model(x), original(x), rtol=1e-6, atol=1e-5)
    original, model = original.bfloat16(), model.bfloat16()
    y, expected = model(x.bfloat16()), original(x.bfloat16())
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)
    with pytest.raises(InputError, match="cannot be separated in float16"):
        model.half()(x.half())


class LowerPrecision(Switch):
    """Relies on the dtype of the experts' outputs under autocast."""

    def mixed(self, x: Tensor) -> Tensor:
        w, y = self.weights(x), torch.zeros_like(x, dtype=self.experts[0](x[:0]).dtype)
        for e, expert in enumerate(self.experts):
            y[w[:, e] > 0] = expert(x[w[:, e] > 0]) * w[w[:, e] > 0, e, None].to(y.dtype)
        return y

    def forward(self, x: Tensor) -> Any:
        return self.mixed(x.view(-1, D)).view_as(x)


def test_autocast_applies_to_the_probes_and_not_to_the_check() -> None:
    model, x = _block(LowerPrecision).eval(), torch.randn(4, 4, D)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        torch.testing.assert_close(moe_comm.swap_moe(model)(x), expected, rtol=0.02, atol=0.02)


def test_a_dict_beside_a_block_is_no_block(caplog: pytest.LogCaptureFixture) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict({name: _mlp() for name in ("text", "image")})
            self.output = nn.Linear(D, 2)

    model: Any = nn.ModuleList([Heads(), Switch()])
    moe_comm.swap_moe(model)
    assert type(model[0].heads) is nn.ModuleDict and type(model[1]) is not Switch
    assert "swap_moe: 0 unchanged" in caplog.text
    with pytest.raises(UnsupportedModel, match="looks like an MoE block with 2 experts in heads"):
        moe_comm.swap_moe(nn.ModuleList([Heads()]))


def test_a_block_whose_experts_differ_in_parameters_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = nn.ModuleList([NoBias(), NoBias()])
    prune.l1_unstructured(model[1].experts[2][0], "weight", 0.5)
    moe_comm.swap_moe(model)
    assert type(model[0]) is not NoBias and type(model[1]) is NoBias
    assert "swap_moe: 1 unchanged" in caplog.text and "do not have the same parameters" in caplog.text


def test_a_list_beside_a_block_is_no_block() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads, self.moe = nn.ModuleList(_mlp() for _ in range(EXPERTS)), Switch()

    model = moe_comm.swap_moe(Heads())
    assert type(model.heads) is nn.ModuleList and type(model.moe) is not Switch


class Choice(Enum):
    ONE = 1
    TWO = 2


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


def _returning(value: int) -> Any:
    return lambda: value


SETTINGS: dict[str, tuple[Callable[[int], Any], Callable[[Any], int]]] = {
    "number": (int, int),
    "buffer": (lambda value: torch.tensor([value]), int),
    "closure": (_returning, lambda function: function()),
    "partial": (lambda value: partial(int, value), lambda function: function()),
    "namespace": (lambda value: SimpleNamespace(inner=[{"value": value}]), lambda space: space.inner[0]["value"]),
    "slots": (Slots, lambda slots: slots.value),
    "set": (lambda value: {value}, max),
    "enum": (Choice, lambda choice: choice.value),
}


class Rectified(Switch):
    """Swaps exactly, unless a setting is 2. Counts its calls."""

    calls = 0

    def __init__(self, kind: str, value: int) -> None:
        super().__init__()
        make, self.read = SETTINGS[kind]
        if kind == "buffer":
            self.register_buffer("setting", make(value), persistent=False)
        else:
            self.setting = make(value)

    def forward(self, x: Tensor) -> Any:
        Rectified.calls += 1
        y = self.mixed(x)
        return y.relu() if self.read(self.setting) == 2 else y


@pytest.mark.parametrize("kind", SETTINGS)
def test_equal_blocks_are_checked_once_and_others_each(kind: str) -> None:
    calls = []
    for count in (2, 12):
        Rectified.calls = 0
        moe_comm.swap_moe(nn.Sequential(*[Rectified(kind, 1) for _ in range(count)]))
        calls.append(Rectified.calls)
    assert calls[0] == calls[1]
    with pytest.raises(UnsupportedModel, match=r"^2 \(Rectified\) was recognised .* differs from the original"):
        moe_comm.swap_moe(nn.Sequential(*[Rectified(kind, value) for value in (1, 1, 2)]))


class Numbered(Switch):
    """Layers with their number, which they read if there is a threshold."""

    calls = 0

    def __init__(self, number: int, threshold: int) -> None:
        super().__init__()
        self.number, self.threshold = number, threshold
        self.router.number = number  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Any:
        Numbered.calls += 1
        y = self.mixed(x)
        return y.relu() if self.threshold and self.number > self.threshold else y


def test_numbers_of_layers_that_are_not_read_make_no_difference() -> None:
    calls = []
    for count in (2, 12):
        Numbered.calls = 0
        moe_comm.swap_moe(nn.Sequential(*[Numbered(number, 0) for number in range(count)]))
        calls.append(Numbered.calls)
    assert calls[0] == calls[1]
    with pytest.raises(UnsupportedModel, match=r"^7 \(Numbered\) was recognised .* differs from the original"):
        moe_comm.swap_moe(nn.Sequential(*[Numbered(number, 6) for number in range(9)]))


@on_ranks(2)
def test_ranks_check_the_same_blocks(rank: int, group: ProcessGroup) -> None:
    model = nn.Sequential(Switch(), Switch(), Switch())
    for index, block in enumerate(model):
        block.number = index * rank  # differs on one rank only
    moe_comm.swap_moe(model, group)
    model(torch.randn(2, 3, D)).sum().backward()


class Zero(Switch):
    def __init__(self) -> None:
        super().__init__()
        for param in self.experts.parameters():
            nn.init.zeros_(param)


class Sine(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self[2](torch.sin(self[0](x)))
        return y


class ZeroSine(Zero):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Sine(*expert) for expert in self.experts)


def test_weights_that_are_zero_hide_nothing() -> None:
    """Each formula, and each mistake in it, maps to 0."""
    original, model = _block(Zero), moe_comm.swap_moe(_block(Zero))
    trained = {name: torch.randn_like(value) for name, value in original.state_dict().items()}
    for block in original, model:
        block.load_state_dict(trained)
    torch.testing.assert_close(_run(model, 0), _run(original, 0), rtol=1e-4, atol=1e-4)
    with pytest.raises(UnsupportedModel):
        moe_comm.swap_moe(_block(ZeroSine))
