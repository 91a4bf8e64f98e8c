"""PEFT's LoRA of experts in blocks with distributed experts: of linear layers of single experts, of stacked parameters.

The swapped experts of a block have stacked weights and no layers. So that PEFT finds the layers of the unswapped block,
they get them, for the experts of all ranks and without parameters. PEFT wraps those that it selects; the others are
removed again:

    experts.3.w1                          ``ExpertLinear``, a layer of PEFT; the forward pass does not call it
    experts.3.w1.base_layer               ``ExpertWeight``: its weight is rows of ``gate_up_proj`` of the experts
    experts.3.w1.lora_A.default.weight    [rank, inputs] on the rank of expert 3, [0, inputs] on the others
    experts.3.w1.lora_B.default.weight    [outputs, rank] on the rank of expert 3, [0, rank] on the others

A and B are sharded expert parameters with PEFT's names, so gradients, norms, state dicts, optimizer state and PEFT's
files follow from ``attach_experts``. In a forward pass those of this rank's experts are stacked, and passed to the
experts (``kernels/low_rank.py``). Ranks of experts may differ: they are padded with zeros.

Stacked parameters (``target_parameters``) are those of the experts module of the unswapped block, such as ``w1``
[E, F, D]. The swapped experts get parameters of these names while PEFT looks for its targets, and PEFT's wrapper is
``ParamWrapper``: as that of the experts of transformers, with B in the rows of the stacked weight that are ``w1``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import layer, model as lora_model
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from moe_comm.errors import ConfigError, InputError, UnsupportedModel
from moe_comm.integrations.blocks.adapter import is_inside
from moe_comm.integrations.blocks.block import BlockExperts, BlockPlan, child_of
from moe_comm.integrations.blocks.find import FoundBlock
from moe_comm.integrations.hugging_face.families import is_experts
from moe_comm.integrations.hugging_face.lora import (
    ParamWrapper as StackWrapper,
    audit_without_router,
    gradients_in,
    refuse_initialization,
    refuse_settings,
    shard_linear,
    weight_of,
)
from moe_comm.kernels.fp8 import GemmDtype
from moe_comm.kernels.low_rank import Dropout, LowRank
from moe_comm.layers.data_parallel.attach import gradients_of
from moe_comm.overlap.options import Overlap
from moe_comm.topology import Placement, Sharding, Split

_PeftLinear: Any = layer.Linear
_PeftWrapper: Any = layer.ParamWrapper


class ExpertWeight(nn.Linear):
    """A linear layer of one expert, whose weight is part of the stacked ones of ``BlockExperts``, without parameters.

    name: of the layer in the experts of the block, with "{}" for the number of the expert.
    """

    def __init__(self, experts: BlockExperts, name: str, expert: int) -> None:
        nn.Module.__init__(self)
        self._owner = (experts,)  # no submodule
        self.path, self.expert = f"{experts.plan.path}.{name}.weight", expert
        self.out_features, self.in_features = experts.plan.formula.shapes[self.path]
        self.register_parameter("bias", None)

    @property
    def experts(self) -> BlockExperts:
        return self._owner[0]

    @property
    def label(self) -> str:
        name = self.path.removeprefix(f"{self.experts.plan.path}.").removesuffix(".weight")
        return f"{self.experts.label}.{self.experts.plan.formula.name_of(name, self.expert)}"

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A tensor without elements, from which PEFT reads device and dtype."""
        return self.experts.gate_up_proj.detach().new_empty(0, self.in_features)

    @torch.no_grad()
    def add(self, delta_OI: Tensor) -> None:
        """Add to the weight, which this rank must have."""
        experts = self.experts
        local = experts.local_experts.index(self.expert)
        for key in experts.plan.formula.parts:
            for piece in experts.plan.formula.pieces(key, self.expert):
                if piece.name == experts.plan.formula.name_of(self.path, self.expert):
                    stack = getattr(experts, key)
                    stack.data[local, piece.rows] += piece.of(delta_OI).to(stack.device, stack.dtype)

    @property
    def is_local(self) -> bool:
        return self.expert in self.experts.local_experts


class _Merging:
    """Merges adapters into the weights of this rank. Subclasses add those of one adapter."""

    lora_A: Any
    merged_adapters: list[str]

    def add(self, name: str, sign: int, check: bool = False) -> None:
        """Add an adapter, times ``sign``. check: raise ValueError if it is not finite."""
        raise NotImplementedError

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        for name in check_adapters_to_merge(self, adapter_names):
            if name in self.lora_A:
                self.add(name, 1, safe_merge)
                self.merged_adapters.append(name)

    def unmerge(self) -> None:
        while self.merged_adapters:
            name = self.merged_adapters.pop()
            if name in self.lora_A:
                self.add(name, -1)


class ParamWrapper(_Merging, StackWrapper):  # PEFT recognizes it by this name
    """The adapters of a stacked parameter of the unswapped block; A and B of this rank's experts."""

    @property
    def _path(self) -> str:
        return f"{self.get_base_layer().plan.path}.{self.parameter_name}"

    @property
    def stack(self) -> str:
        parts: Mapping[str, Any] = self.get_base_layer().plan.formula.parts
        return next(key for key, of in parts.items() if any(part.path == self._path for part in of))

    def refuse(self, experts: Any) -> None:
        refuse_settings(
            f"{experts.label}.{self.parameter_name}", experts.gemm_dtype, experts.overlap, experts.placement
        )

    def get_param(self) -> Tensor:
        """Return a tensor in the shape of the parameter, with the experts of this rank, without memory."""
        experts = self.get_base_layer()
        shape = experts.plan.formula.shapes[self._path]
        value: Tensor = experts.gate_up_proj.detach().new_empty(()).expand(len(experts.local_experts), *shape)
        return value

    def low_rank(self, adapter_name: str) -> LowRank:
        """Return A and B of an adapter for rows of the experts."""
        experts, one = self.get_base_layer(), super().low_rank(adapter_name)
        # A is of the last dimension of the parameter, unless the experts module has ``is_transposed``.
        a_ELI, b_ELO = one.a_ELI, one.b_ELO
        if self._did_swap_in_out_features == experts.plan.formula.transposed:
            a_ELI, b_ELO = b_ELO, a_ELI
        return LowRank(a_ELI, _in_stack(experts, self.stack, self._path, b_ELO), one.scaling)

    def add(self, name: str, sign: int, check: bool = False) -> None:
        one, experts = self.low_rank(name), self.get_base_layer()
        delta_EOI = torch.einsum("elo,eli->eoi", one.b_ELO, one.a_ELI) * one.scaling
        if check and not bool(delta_EOI.isfinite().all()):
            raise ValueError(f"the adapter {name} of {experts.label} is not finite; nothing was merged")
        stack = getattr(experts, self.stack)
        stack.data.add_(delta_EOI.to(stack.device, stack.dtype), alpha=sign)


class ExpertLinear(_Merging, _PeftLinear):  # type: ignore[misc]
    """PEFT's layer around an ``ExpertWeight``. A and B have elements on the rank of the expert only."""

    base_layer: ExpertWeight

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        weight, experts = self.base_layer, self.base_layer.experts
        refuse_settings(weight.label, experts.gemm_dtype, experts.overlap, experts.placement)
        refuse_initialization(weight.label, config)
        if config.bias != "none" and experts.layout.bias:
            raise UnsupportedModel(f"adapters (LoRA) of {weight.label} are not supported with bias={config.bias!r}")
        refuse_kind(weight.label, config.lora_bias or self.resolve_lora_variant(config=config) is not None)
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        self.shard(adapter_name)

    def shard(self, adapter_name: str) -> None:
        """Keep A and B if the expert is one of this rank's, else parameters without elements."""
        experts = self.base_layer.experts
        own = gradients_of(experts)
        if own is None:  # one rank
            return
        placement = experts.placement
        owner = next(rank for rank in range(placement.world) if self.base_layer.expert in placement.homes_of(rank))
        for key in ("lora_A", "lora_B"):
            linear = getattr(self, key)[adapter_name]
            rows = tuple(linear.out_features if rank == owner else 0 for rank in range(placement.world))
            sharding = Sharding(tuple(linear.weight.shape), (Split(0, "ep", sizes=rows),), expert=True)
            shard_linear(linear, sharding, own, f"{self.base_layer.label}.{key}")
            gradients = gradients_in(linear)
            gradients.unit, gradients.replicated = experts, _nothing  # one of all is audited

    def active(self) -> list[str]:
        """Return the names of the adapters that the forward pass adds."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        off = self.disable_adapters or self.merged
        return [] if off else [name for name in self.active_adapters if name in self.lora_A]

    def add(self, name: str, sign: int, check: bool = False) -> None:
        if self.base_layer.is_local:
            delta_OI = self.get_delta_weight(name)
            if check and not bool(delta_OI.isfinite().all()):
                raise ValueError(f"the adapter {name} of {self.base_layer.label} is not finite; nothing was merged")
            self.base_layer.add(sign * delta_OI)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        raise ConfigError("the experts of a swapped block run in the block's forward pass only")


def _nothing() -> None:
    """Return no replicated parameter."""


def _layers(experts: BlockExperts) -> dict[str, list[ExpertLinear | None]]:
    """Return the adapted layers by name: of each expert of all ranks, or None."""
    result: dict[str, list[ExpertLinear | None]] = {}
    for name in experts.linears if experts._modules else ():
        modules = [child_of(experts, path) for path in experts.plan.formula.names_of(name)]
        result[name] = [module if isinstance(module, ExpertLinear) else None for module in modules]
    return result


def _activate(experts: Any, _: Any) -> None:
    """Before a forward pass, pass the active adapters to the experts."""
    by_name = _layers(experts)
    layers = [one for by_expert in by_name.values() for one in by_expert if one is not None]
    if layers and layers[0]._forward_pre_hooks:  # PEFT passes the names of the rows' adapters in this way
        fault = InputError(f"adapters of the experts {experts.label} cannot differ between rows (adapter_names)")
        experts.dispatcher.refuse(fault, label=experts.label)
    adapters: dict[str, list[LowRank]] = {key: [] for key in experts.plan.formula.parts}
    seed: int | None = None
    for name, by_expert in by_name.items():
        active = [[] if one is None else one.active() for one in by_expert]
        for adapter in dict.fromkeys(adapter for names in active for adapter in names):
            chosen = [one if adapter in names else None for one, names in zip(by_expert, active, strict=True)]
            p = next(_dropout_of(one, adapter) for one in chosen if one is not None)
            dropout = None
            if p > 0:
                # Equal on ranks with equal random states. Checkpointing restores them.
                seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_()) if seed is None else seed + 1
                dropout = Dropout(p, seed, tuple(experts.local_experts))
            a_ELI, b_ELO = _stacked(experts, chosen, adapter)
            path = f"{experts.plan.path}.{name}.weight"
            for key, parts in experts.plan.formula.parts.items():
                if any(part.path == path for part in parts):
                    adapters[key].append(LowRank(a_ELI, _in_stack(experts, key, path, b_ELO), 1.0, dropout))
    experts.adapters = {key: of for key, of in adapters.items() if of}


def _dropout_of(one: Any, adapter: str) -> float:
    dropout = one.lora_dropout[adapter]
    return float(dropout.p) if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


def _stacked(experts: BlockExperts, layers: Sequence[ExpertLinear | None], adapter: str) -> tuple[Tensor, Tensor]:
    """Return A and B of this rank's experts, B scaled; zeros for an expert that is not adapted."""
    adapted = [one for one in layers if one is not None]
    rank = max(one.r[adapter] for one in adapted)
    for one in adapted:
        for linears in (one.lora_A, one.lora_B):
            if (gradients := gradients_of(linears[adapter])) is not None:
                gradients.before_forward(linears[adapter])
    like, inputs, outputs = adapted[0].lora_A[adapter].weight, adapted[0].in_features, adapted[0].out_features
    # Parameters without elements take part, so that all ranks have the same gradients.
    others = [one for one in adapted if not one.base_layer.is_local]
    a_LI = [weight_of(one.lora_A[adapter]).reshape(0, rank, inputs) for one in others]
    b_LO = [weight_of(one.lora_B[adapter]).reshape(0, rank, outputs) for one in others]
    for expert in experts.local_experts:
        if (local := layers[expert]) is None:
            a_LI.append(like.new_zeros(1, rank, inputs))
            b_LO.append(like.new_zeros(1, rank, outputs))
            continue
        padding = (0, 0, 0, rank - local.r[adapter])
        a_LI.append(F.pad(weight_of(local.lora_A[adapter]), padding)[None])
        b_LO.append(F.pad(weight_of(local.lora_B[adapter]).t() * local.scaling[adapter], padding)[None])
    return torch.cat(a_LI), torch.cat(b_LO)


def _in_stack(experts: BlockExperts, key: str, path: str, b_ELO: Tensor) -> Tensor:
    """Return B of one layer with the outputs of the stacked weight ``key``; zeros for outputs of other layers."""
    pieces = list(experts.plan.formula.pieces(key, 0))
    if len(pieces) == 1 and pieces[0].rows == slice(0, b_ELO.shape[2]) and pieces[0].index[-1] == slice(0, None, 1):
        return b_ELO
    columns = [
        b_ELO[:, :, piece.index[-1]]
        if piece.name == experts.plan.formula.name_of(path, 0)
        else b_ELO.new_zeros(*b_ELO.shape[:2], piece.rows.stop - piece.rows.start)
        for piece in pieces
    ]
    return torch.cat(columns, 2)


def _deactivate(experts: Any, *_: Any) -> None:
    experts.adapters = {}


def _follow(experts: BlockExperts) -> None:
    """Let the forward pass of ``experts`` use their adapters, if they have any, and audit the gradient of one."""
    layers = (one for by_expert in _layers(experts).values() for one in by_expert if one is not None)
    first = next((linear for one in layers for linear in one.lora_B.values()), None)
    if first is None:
        return
    if (own := gradients_of(experts)) is not None:
        gradients_in(first).replicated = own.replicated
    if not any(hook is _activate for hook in experts._forward_pre_hooks.values()):
        experts.register_forward_pre_hook(_activate)
        experts.register_forward_hook(_deactivate, always_call=True)


@contextmanager
def _offered_layers(model: nn.Module) -> Iterator[None]:
    """Context in which the experts of swapped blocks have the linear layers of the unswapped ones."""
    swapped = [module for module in model.modules() if isinstance(module, BlockExperts)]
    parameters = [(experts, experts._parameters) for experts in swapped]
    for experts, own in parameters:
        offered = {key: own.get(key) for key in experts.stacked}
        empty = {
            key: nn.Parameter(experts.gate_up_proj.detach()[:0], False)
            for key, param in offered.items()
            if param is None
        }
        experts._parameters = {**offered, **empty, **{key: own[key] for key in own if key not in offered}}
    blocks = [experts for experts in swapped if experts.linears]
    for experts in blocks:
        for expert in experts.plan.keys.values() or range(experts.num_experts):  # in the order of the original
            for name in experts.linears:
                _place(experts, name, expert)
    try:
        yield
    finally:
        for experts, own in parameters:
            experts._parameters = own
        for experts in blocks:
            _prune(experts)
            _follow(experts)


def _place(experts: BlockExperts, name: str, expert: int, wrapper: Any = None) -> None:
    """Add a layer of an expert, or the layer of PEFT that wraps it, if there is none."""
    module: nn.Module = experts
    *parents, key = experts.plan.formula.name_of(name, expert).split(".")
    for part in parents:
        if part not in module._modules:
            module._modules[part] = nn.Module()  # the experts have probes under the names of a ``ModuleDict``
        module = module._modules[part]  # type: ignore[assignment]
    if key not in module._modules:
        weight = ExpertWeight(experts, name, expert)
        if wrapper is not None:
            wrapper.base_layer = weight
        module.add_module(key, weight if wrapper is None else wrapper)


def _prune(module: nn.Module) -> None:
    """Remove layers that are not adapted."""
    for key, child in list(module.named_children()):
        if not isinstance(child, ExpertLinear):
            _prune(child)
            if not child._modules:
                delattr(module, key)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Context in which linear layers and stacked parameters have no adapters, so that blocks are recognised.

    Yields the adapters by name. Those that remain in the dictionary are put back.
    """
    taken: dict[str, Any] = {}
    for name, module in model.named_modules():
        linear = type(module) is _PeftLinear and isinstance(module.base_layer, nn.Linear)
        if linear or (type(module) is _PeftWrapper and not is_inside(name, taken) and _is_own(module)):
            taken[name] = module
    for name, wrapper in taken.items():
        setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], wrapper.get_base_layer())
    try:
        yield taken
    finally:
        for name, wrapper in taken.items():
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], wrapper)


def _is_own(wrapper: Any) -> bool:
    """Return whether PEFT wraps a module with stacked parameters that is not from transformers."""
    base = wrapper.get_base_layer()
    return not is_experts(base) and any(param.dim() > 2 for param in base.parameters(recurse=False))


def refuse_adapters(
    taken: Mapping[str, Any],
    found: FoundBlock,
    plan: BlockPlan,
    settings: tuple[GemmDtype, Overlap | None, Placement],
) -> None:
    """Raise UnsupportedModel unless ``adopt`` supports the adapters of a block's experts. Equal on all ranks.

    taken: from ``without_adapters``.
    """
    inside = f"{found.name}.{plan.path}.".lstrip(".")
    weights = {f"{found.name}.{name}".lstrip(".").rpartition(".")[0] for name in plan.formula.names}
    for name in sorted(weights & taken.keys()):
        refuse_settings(name, *settings)
        if type(taken[name]) is _PeftWrapper:
            _refuse_stacked(taken[name], name, plan)
            continue
        refuse_kind(name, taken[name].lora_variant or any(taken[name].lora_bias.values()))
        trained = any(param.requires_grad for param in taken[name].base_layer.parameters())
        if plan.formula.transposed or trained or not name.startswith(inside):
            raise UnsupportedModel(
                f"adapters (LoRA) of {name} are not supported: the layer is not one of an expert in {inside}, or its "
                "weight is transposed, or it has parameters that require gradients"
            )


def _refuse_stacked(wrapper: Any, name: str, plan: BlockPlan) -> None:
    """Raise UnsupportedModel unless the adapters of the stacked parameters of a module can be distributed."""
    adapted = {one.parameter_name for one in _wrappers(wrapper)}
    for key in sorted(adapted):
        inside = name.endswith(f".{plan.path}") or name == plan.path
        if not inside or len(plan.formula.shapes.get(f"{plan.path}.{key}", ())) != 2:
            raise _no_target(f"{name}.{key}")
    if any(param.requires_grad for param in wrapper.get_base_layer().parameters()):
        raise UnsupportedModel(
            f"adapters (LoRA) of {name} are not supported, as its parameters require gradients; freeze them first"
        )


def _no_target(name: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"adapters (LoRA) of {name} are not supported: it is no matrix [E, ...] of the experts module of the unswapped "
        "block. Target such parameters by target_parameters, the linear layers of its experts by target_modules, or "
        "modules other than experts"
    )


def _wrappers(wrapper: Any) -> list[Any]:
    """Return PEFT's wrappers of the parameters of one module, from the outermost to the innermost."""
    found = []
    while isinstance(wrapper, _PeftWrapper):
        found.append(wrapper)
        wrapper = wrapper.base_layer
    return found


def refuse_kind(name: str, special: Any) -> None:
    """Raise UnsupportedModel if the adapters of a layer are not plain LoRA."""
    if special:
        raise UnsupportedModel(
            f"adapters of {name} are not supported with DoRA, other variants of LoRA, or lora_bias; use plain LoRA, "
            "or adapt modules other than experts"
        )


def adopt(model: nn.Module, taken: dict[str, Any], found: FoundBlock, plan: BlockPlan) -> None:
    """Move the adapters of a block's experts, which ``distribute`` has replaced, to the swapped ones."""
    inside = f"{found.name}.{plan.path}".lstrip(".")
    experts: Any = model.get_submodule(inside)
    if (outermost := taken.pop(inside, None)) is not None:
        wrappers = _wrappers(outermost)
        wrappers[-1].base_layer = experts
        for wrapper in wrappers:
            wrapper.__class__, wrapper.num_experts = ParamWrapper, len(experts.local_experts)
            for adapter in list(wrapper.lora_A):
                wrapper.shard(adapter)
        parent, _, child = inside.rpartition(".")
        setattr(model.get_submodule(parent), child, outermost)
    for expert in plan.keys.values() or range(experts.num_experts):
        for name in experts.linears:
            path = plan.formula.name_of(name, expert)
            wrapper = taken.pop(f"{found.name}.{plan.path}.{path}".lstrip("."), None)
            if wrapper is not None:
                _place(experts, name, expert, wrapper)
                wrapper.__class__ = ExpertLinear
                for adapter in list(wrapper.lora_A):
                    wrapper.shard(adapter)
    _follow(experts)


def follow_peft() -> None:
    """Let PEFT adapt the linear layers of experts of swapped blocks, and audit the gradients of its adapters."""
    create, inject = lora_model.dispatch_default, lora_model.LoraModel.inject_adapter

    def dispatch(target: nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> nn.Module | None:
        base: Any = target
        while isinstance(base, _PeftWrapper):
            base = base.base_layer
        if isinstance(base, BlockExperts) and (parameter := kwargs.get("parameter_name")) is not None:
            if parameter not in base.stacked:
                raise _no_target(f"{base.label}.{parameter}")
            return ParamWrapper(target, adapter_name, config=config, **kwargs)
        if isinstance(target, ExpertWeight):
            kwargs.pop("parameter_name", None)
            return ExpertLinear(target, adapter_name, config=config, **kwargs)
        module: nn.Module | None = create(target, adapter_name, config=config, **kwargs)
        return module

    @wraps(inject)
    def inject_adapter(tuner: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        # AdaLoRA has layers of its own.
        with _offered_layers(model) if type(tuner) is lora_model.LoraModel else nullcontext():
            inject(tuner, model, *args, **kwargs)
        audit_without_router(model)

    lora_model.dispatch_default, lora_model.LoraModel.inject_adapter = dispatch, inject_adapter
