"""``swap_moe`` with MoE blocks of a user's own model, against the model before the swap."""

from __future__ import annotations

import io
import pickle
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import moe_comm
from moe_comm.errors import ConfigError, InputError, PeerRaised, UnsupportedModel
from moe_comm.topology import Placement
from tests.integrations.blocks.styles import (
    EXPERTS,
    STYLES,
    TOP_K,
    D,
    DeepSeek,
    FlatTokens,
    InlineMath,
    Mixtral,
    Model,
    NoisyTopK,
    StMoE,
    ThreeLayers,
    Torchtitan,
    TwoLayers,
)
from tests.integrations.models import assert_close, new_model
from tests.pool import on_ranks


def _tokens(rank: int) -> Tensor:
    return torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(10 + rank))


def _backward(model: nn.Module, rank: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rank)  # for the noise of a router
    logits, other = model(_tokens(rank))
    target = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    (F.mse_loss(logits, target, reduction="sum") + other).backward()
    return logits.detach(), other.detach() if isinstance(other, Tensor) else torch.zeros(())


def _model(style: type[nn.Module]) -> Model:
    torch.manual_seed(0)
    return Model(style)


def _adapter(block: InlineMath) -> moe_comm.MoEBlock:
    return moe_comm.MoEBlock(
        first=("w_gate", "w_up"),
        last="w_down",
        transposed=True,
        route=InlineMath.route,
        output=lambda block, x, y, extra: (y, extra[0]),
    )


@pytest.fixture(autouse=True)
def _without_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_comm.integrations.blocks.adapter._adapters", {})


ALL = pytest.mark.parametrize("style", [*STYLES, InlineMath], ids=lambda style: style.__name__)


@on_ranks(2, 4)
@ALL
def test_results_and_all_gradients_are_those_of_the_original_model(
    style: type[nn.Module], rank: int, world: int, group: ProcessGroup
) -> None:
    _compare(style, rank, world, group)


@ALL
def test_one_process_has_the_results_and_gradients_of_the_original_model(style: type[nn.Module]) -> None:
    _compare(style, 0, 1, None)


def _compare(style: type[nn.Module], rank: int, world: int, group: ProcessGroup | None) -> None:
    moe_comm.block_adapter(InlineMath)(_adapter)
    original, model = _model(style), _model(style)
    moe_comm.swap_moe(model, group)
    expected = [_backward(original, source) for source in range(world)]
    result = _backward(model, rank)
    if world > 1:
        moe_comm.sync_gradients(model)

    torch.testing.assert_close(result, expected[rank], rtol=1e-5, atol=1e-5)
    full = moe_comm.gather_gradients(model)
    for name, param in original.named_parameters():
        expected_grad = torch.zeros_like(param) if param.grad is None else param.grad
        torch.testing.assert_close(full[name], expected_grad, rtol=1e-4, atol=1e-4)


@on_ranks(2)
@ALL
def test_checkpoints_of_the_original_load_and_are_gathered(style: type[nn.Module], group: ProcessGroup) -> None:
    _load_and_gather(style, group)


@ALL
def test_one_process_loads_checkpoints_of_the_original(style: type[nn.Module]) -> None:
    model, other = _load_and_gather(style, None)
    assert model.state_dict().keys() == other.state_dict().keys()


def _load_and_gather(style: type[nn.Module], group: ProcessGroup | None) -> tuple[nn.Module, nn.Module]:
    moe_comm.block_adapter(InlineMath)(_adapter)
    model = moe_comm.swap_moe(_model(style), group)
    torch.manual_seed(1)
    other = Model(style)
    model.load_state_dict(other.state_dict())
    full = moe_comm.gather_state_dict(model)
    assert full.keys() == other.state_dict().keys()
    for name, value in other.state_dict().items():
        assert torch.equal(full[name], value), name
    again = _model(style)
    again.load_state_dict(full)
    missing = dict(list(other.state_dict().items())[:-1])
    del missing[next(name for name in full if name.startswith("blocks.0"))]
    with pytest.raises(RuntimeError, match=r"blocks\.0"):
        model.load_state_dict(missing)
    return model, other


class Saveable(Model):
    """A model with ``save_pretrained``, as transformers and ``PyTorchModelHubMixin`` have it."""

    saved: Any = None

    def save_pretrained(self, folder: str, state_dict: dict[str, Tensor]) -> None:
        self.saved = state_dict


@on_ranks(2)
def test_save_pretrained_takes_a_state_dict_of_all_experts_only(rank: int, group: ProcessGroup) -> None:
    model: Any = moe_comm.swap_moe(Saveable(Mixtral), group)
    full = moe_comm.gather_state_dict(model)
    model.save_pretrained("folder", state_dict=full)
    assert model.saved is full
    name = "blocks.0.experts.6.w1.weight"
    for state, reason in (
        ({key: value for key, value in full.items() if key != name}, f"{name} is missing"),
        (full | {name: full[name][:1]}, f"{name} has shape"),
        (None, "it got no state_dict"),
    ):
        with pytest.raises(ConfigError, match=reason):
            model.save_pretrained("folder", state_dict=state)


@on_ranks(2)
def test_a_swapped_model_trains_as_the_original_on_one_process(rank: int, group: ProcessGroup) -> None:
    original, model = _model(Mixtral), moe_comm.swap_moe(_model(Mixtral), group)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (original, model)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for source in range(2):
            _backward(original, source)
        _backward(model, rank)
        moe_comm.sync_gradients(model)
        for optimizer in optimizers:
            optimizer.step()
    full = moe_comm.gather_state_dict(model)
    for name, value in original.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=1e-4, atol=1e-4)
    with pytest.raises(moe_comm.errors.ConfigError):
        moe_comm.swap_moe(model, group)


class Unusual(Mixtral):
    """Weights the input of experts instead of their output."""

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.view(-1, D)
        weights, selected = torch.topk(self.gate(flat), TOP_K)
        results = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(selected == number)
            results[token] += expert(flat[token] * weights[token, slot, None].sigmoid())
        return results.view_as(inputs)


class Rectified(Mixtral):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).relu()


class Normalized(Mixtral):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)

    def forward(self, inputs: Tensor) -> Tensor:
        y: Tensor = self.norm(super().forward(inputs))
        return y


class OwnActivation(Mixtral):
    class Expert(ThreeLayers):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.w2(torch.sin(self.w1(x)) * self.w3(x))
            return y

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(self.Expert() for _ in range(EXPERTS))


class Dropout(NoisyTopK):
    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts:
            expert.dropout = nn.Dropout(0.1)


class Needy(Mixtral):
    def forward(self, inputs: Tensor, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(inputs)


@on_ranks(2)
@pytest.mark.parametrize("style", [Mixtral, Torchtitan])
def test_a_placement_with_copies_is_for_inference(style: type[nn.Module], rank: int, group: ProcessGroup) -> None:
    homes = [(expert * 2 // EXPERTS,) for expert in range(1, EXPERTS)]
    placement = Placement(((0, 1), *homes), 2, slots=2)
    original = _model(style)
    model = moe_comm.swap_moe(deepcopy(original), group, placement=placement)
    with torch.no_grad():
        block = next(module for module in model.modules() if hasattr(module, "block_plan"))
        x = torch.randn(2, 3, D)
        with pytest.raises(InputError):  # in the first call, which publishes the copies
            block(x.long() if rank else x)
        assert_close(model(_tokens(rank))[0], original(_tokens(rank))[0], "logits")
    with pytest.raises(ConfigError, match="for inference"):
        model(_tokens(rank))


@on_ranks(2)
@pytest.mark.parametrize(
    ("style", "reason"),
    [
        (Unusual, "differs from the original"),
        (Rectified, "differs from the original"),
        (Normalized, "one weight each"),
        (OwnActivation, "no known formula"),
        (Dropout, "dropout 0.1"),
        (Needy, "cannot run on tokens"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_block_that_computes_something_else_is_refused_and_unchanged(
    style: type[nn.Module], reason: str, group: ProcessGroup
) -> None:
    model = _model(style)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UnsupportedModel, match=reason) as raised:
        moe_comm.swap_moe(model, group)
    assert "blocks.0" in str(raised.value) and "block_adapter" in str(raised.value)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_block_of_flat_tokens() -> None:
    torch.manual_seed(0)
    x, original = torch.randn(9, D), FlatTokens()
    model = moe_comm.swap_moe(nn.Sequential(deepcopy(original)))
    torch.testing.assert_close(model(x), original(x))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_shared_experts_are_computed_once_unless_they_draw_random_numbers(dropout: float) -> None:
    original = DeepSeek()
    original.shared_experts = nn.Sequential(original.shared_experts, nn.Dropout(dropout))  # type: ignore[assignment]
    model = moe_comm.swap_moe(nn.Sequential(deepcopy(original)))
    calls: list[int] = []
    w1 = model[0].shared_experts[0].w1
    w1.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(3, 4, D)
    torch.manual_seed(3)
    y = model(x)
    torch.manual_seed(3)
    torch.testing.assert_close(y, original(x))
    assert len(calls) == (2 if dropout else 1)


@on_ranks(2)
def test_an_adapter_is_not_trusted(group: ProcessGroup) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"first": ("w_up", "w_gate")}, "result 0"),
        ({"output": None}, "result 1"),
    ]
    for changes, difference in wrong:
        moe_comm.block_adapter(InlineMath)(lambda block, changes=changes: replace(_adapter(block), **changes))
        with pytest.raises(UnsupportedModel, match=difference):
            moe_comm.swap_moe(_model(InlineMath), group)


@pytest.mark.parametrize(
    "description",
    [
        moe_comm.MoEBlock("w_gate", "w_missing"),
        moe_comm.MoEBlock("w_gate", "w_down", transposed=True),  # half of a gated activation
        moe_comm.MoEBlock(("w_gate", "w_up"), "gate.weight", transposed=True),
    ],
)
def test_a_description_that_does_not_fit_raises(description: moe_comm.MoEBlock) -> None:
    moe_comm.block_adapter(InlineMath)(lambda block: description)
    with pytest.raises(UnsupportedModel):
        moe_comm.swap_moe(_model(InlineMath))


def test_an_adapter_that_returns_none_leaves_the_block_alone() -> None:
    model = _model(Mixtral)
    model.blocks[1] = Unusual()  # whose recognition would be refused
    moe_comm.block_adapter(Unusual)(lambda block: None)
    moe_comm.swap_moe(model)
    assert type(model.blocks[1]) is Unusual and type(model.blocks[0]) is not Mixtral
    moe_comm.block_adapter(Mixtral)(lambda block: None)  # also of Unusual, a subclass with an adapter of its own
    with pytest.raises(UnsupportedModel, match="no MoE block"):
        moe_comm.swap_moe(_model(Mixtral))
    moe_comm.block_adapter(Mixtral)(lambda block: {"first": "w1"})  # type: ignore[arg-type, return-value]
    with pytest.raises(UnsupportedModel, match="must return a MoEBlock or None; got dict"):
        moe_comm.swap_moe(_model(Mixtral))


def test_an_adapter_of_the_model_itself() -> None:
    moe_comm.block_adapter(Mixtral)(
        lambda block: moe_comm.MoEBlock(("experts.{}.w1.weight", "experts.{}.w3.weight"), "experts.{}.w2.weight")
    )
    original, x = Mixtral(), torch.randn(2, 3, D)
    torch.testing.assert_close(moe_comm.swap_moe(deepcopy(original))(x), original(x))


class DictOfExperts(Mixtral):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({f"expert_{e}": expert for e, expert in enumerate(self.experts)})  # type: ignore[assignment]

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.topk(self.gate(x_TD), TOP_K)
        return ids, weights.softmax(1)

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.view(-1, D)
        ids, weights = self.route(flat)
        y = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts.values()):  # type: ignore[operator]
            token, slot = torch.where(ids == e)
            y[token] += weights[token, slot, None] * expert(flat[token])
        return y.view_as(inputs)


@on_ranks(2)
@pytest.mark.parametrize("key", ["expert_{}", "{}"])
@pytest.mark.parametrize("route", [True, False])
def test_an_adapter_of_a_dict_of_experts(key: str, route: bool, rank: int, group: ProcessGroup) -> None:
    first, last = [f"experts.{key}.{name}.weight" for name in ("w1", "w3")], f"experts.{key}.w2.weight"
    moe_comm.block_adapter(DictOfExperts)(
        lambda block: moe_comm.MoEBlock(tuple(first), last, route=DictOfExperts.route if route else None)
    )
    original = _model(DictOfExperts)
    model = moe_comm.swap_moe(deepcopy(original), group)
    torch.testing.assert_close(_backward(model, rank), _backward(original, rank))
    full, state = moe_comm.gather_state_dict(model), original.state_dict()
    assert full.keys() == state.keys() and all(torch.equal(full[name], value) for name, value in state.items())


def test_an_adapter_that_returns_none_leaves_a_block_of_transformers_alone() -> None:
    model = new_model("mixtral")
    swapped, left = (layer.mlp for layer in model.model.layers)
    kind, kind_of_experts = type(left), type(left.experts)
    left.__class__ = type("Left", (kind,), {})
    moe_comm.block_adapter(type(left))(lambda block: None)
    moe_comm.swap_moe(model)
    assert type(left.experts) is kind_of_experts and type(swapped.experts) is not kind_of_experts


def test_a_shared_expert_parameter_is_refused() -> None:
    model = _model(Mixtral)
    first, second = model.blocks
    second.experts[0].w1.weight = first.experts[0].w1.weight
    with pytest.raises(UnsupportedModel, match="one parameter of experts"):
        moe_comm.swap_moe(model)


def test_modules_that_are_no_blocks_are_left_alone() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(TwoLayers() for _ in range(3))

    with pytest.raises(UnsupportedModel, match="no MoE block"):
        moe_comm.swap_moe(Towers())


@on_ranks(2)
def test_an_error_of_one_rank_reaches_the_others(rank: int, group: ProcessGroup) -> None:
    model = moe_comm.swap_moe(_model(Mixtral), group)
    x = torch.randn(2, 3, D) if rank == 0 else torch.randn(2, 3, D + 1)
    with pytest.raises((InputError, PeerRaised)):
        model.blocks[0](x)
    _backward(model, rank)  # the group is usable


@on_ranks(2)
def test_copies_and_wrappers(rank: int, group: ProcessGroup) -> None:
    model = moe_comm.swap_moe(_model(NoisyTopK), group)
    copied: Any = deepcopy(model)
    torch.testing.assert_close(_backward(copied, rank), _backward(model, rank), rtol=0, atol=0)
    assert isinstance(model.blocks[0], NoisyTopK)
    with torch.no_grad():
        copied.blocks[0].experts.down_proj.zero_()
    assert bool(model.blocks[0].experts.down_proj.any())
    wrapped = nn.parallel.DistributedDataParallel(model)
    _backward(wrapped, rank)


@pytest.mark.parametrize("style", [NoisyTopK, Torchtitan])
def test_a_swapped_model_cannot_be_pickled(style: type[nn.Module]) -> None:
    model = moe_comm.swap_moe(_model(style))
    for protocol in (0, 2, pickle.HIGHEST_PROTOCOL):
        with pytest.raises(UnsupportedModel, match="cannot be pickled"):
            pickle.dumps(model, protocol)
    with pytest.raises(UnsupportedModel, match="cannot be pickled"):
        torch.save(model, io.BytesIO())
    copied = deepcopy(model)
    assert type(copied.blocks[0]) is type(model.blocks[0])
    torch.manual_seed(0)
    expected = model(_tokens(0))[0]
    torch.manual_seed(0)
    assert torch.equal(copied(_tokens(0))[0], expected)


def test_a_call_without_tokens_and_in_bf16() -> None:
    model = moe_comm.swap_moe(_model(Mixtral).bfloat16())
    y, _ = model(torch.randn(0, 4, 5, dtype=torch.bfloat16))
    assert y.shape == (0, 4, 11)
    y, _ = model(torch.randn(2, 4, 5, dtype=torch.bfloat16))
    reference, _ = _model(Mixtral).bfloat16()(torch.randn(2, 4, 5, dtype=torch.bfloat16))
    assert y.dtype == reference.dtype


@pytest.mark.parametrize(("style", "name"), [(Mixtral, "experts.3.w2"), (StMoE, "experts")])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hooks_of_replaced_modules_are_refused(style: type[nn.Module], name: str, kind: str) -> None:
    model = _model(style)
    calls: list[int] = []
    getattr(model.blocks[1], f"register_{kind}_hook")(lambda *_: calls.append(1))  # the block keeps it
    handle = getattr(model.blocks[1].get_submodule(name), f"register_{kind}_hook")(lambda *_: None)
    with pytest.raises(UnsupportedModel, match=rf"blocks\.1\.{name} has forward or backward hooks"):
        moe_comm.swap_moe(model)
    handle.remove()
    moe_comm.swap_moe(model)
    calls.clear()
    _backward(model, 0)
    assert calls == [1]


@pytest.mark.parametrize("kind", ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"])
def test_state_dict_hooks_of_replaced_modules_are_refused(kind: str) -> None:
    model = _model(Mixtral)
    handle = getattr(model.blocks[1].get_submodule("experts.3"), f"register_{kind}_hook")(lambda *_: None)
    with pytest.raises(UnsupportedModel, match=r"blocks\.1\.experts\.3 has state-dict hooks"):
        moe_comm.swap_moe(model)
    handle.remove()
    moe_comm.swap_moe(model)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_of_replaced_parameters_are_refused(kind: str) -> None:
    moe_comm.block_adapter(InlineMath)(_adapter)
    calls: list[int] = []
    for style, name in (Mixtral, "experts.3.w2.weight"), (InlineMath, "w_up"):
        model = _model(style)
        getattr(model.blocks[1].gate.weight, kind)(lambda _: calls.append(1))  # the router keeps its own
        handle = getattr(model.blocks[1].get_parameter(name), kind)(lambda _: None)
        with pytest.raises(UnsupportedModel, match=rf"blocks\.1\.{name} has gradient hooks"):
            moe_comm.swap_moe(model)
        handle.remove()
        moe_comm.swap_moe(model)
        calls.clear()
        _backward(model, 0)
        assert calls == [1]
