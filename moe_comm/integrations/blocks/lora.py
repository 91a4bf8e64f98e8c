"""PEFT's LoRA of the linear layers of single experts (``target_modules``), in blocks with distributed experts.

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
from moe_comm.integrations.blocks.block import BlockExperts, BlockPlan, child_of
from moe_comm.integrations.blocks.find import FoundBlock
from moe_comm.integrations.hugging_face.lora import (
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


class ExpertLinear(_PeftLinear):  # type: ignore[misc]
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

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        for name in check_adapters_to_merge(self, adapter_names):
            if name in self.lora_A:
                self._add(name, 1, safe_merge)
                self.merged_adapters.append(name)

    def unmerge(self) -> None:
        while self.merged_adapters:
            name = self.merged_adapters.pop()
            if name in self.lora_A:
                self._add(name, -1)

    def _add(self, name: str, sign: int, check: bool = False) -> None:
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
    if len(pieces) == 1 and pieces[0].rows == slice(0, b_ELO.shape[2]) and pieces[0].index == (slice(0, None, 1),):
        return b_ELO
    columns = [
        b_ELO[:, :, piece.index[0]]
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
    blocks = [module for module in model.modules() if isinstance(module, BlockExperts) and module.linears]
    for experts in blocks:
        for expert in experts.plan.keys.values() or range(experts.num_experts):  # in the order of the original
            for name in experts.linears:
                _place(experts, name, expert)
    try:
        yield
    finally:
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
    """Context in which linear layers have no adapters, so that blocks are recognised. Yields the adapters by name.

    Those that remain in the dictionary are put back.
    """
    found = [(name, module) for name, module in model.named_modules() if type(module) is _PeftLinear]
    taken = {name: module for name, module in found if isinstance(module.base_layer, nn.Linear)}
    for name, wrapper in taken.items():
        setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], wrapper.base_layer)
    try:
        yield taken
    finally:
        for name, wrapper in taken.items():
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], wrapper)


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
        refuse_kind(name, taken[name].lora_variant or any(taken[name].lora_bias.values()))
        trained = any(param.requires_grad for param in taken[name].base_layer.parameters())
        if plan.formula.transposed or trained or not name.startswith(inside):
            raise UnsupportedModel(
                f"adapters (LoRA) of {name} are not supported: the layer is not one of an expert in {inside}, or its "
                "weight is transposed, or it has parameters that require gradients"
            )


def refuse_kind(name: str, special: Any) -> None:
    """Raise UnsupportedModel if the adapters of a layer are not plain LoRA."""
    if special:
        raise UnsupportedModel(
            f"adapters of {name} are not supported with DoRA, other variants of LoRA, or lora_bias; use plain LoRA, "
            "or adapt modules other than experts"
        )


def adopt(model: nn.Module, taken: dict[str, Any], found: FoundBlock, plan: BlockPlan) -> None:
    """Move the adapters of a block's experts, which ``distribute`` has replaced, to the swapped ones."""
    experts: Any = model.get_submodule(f"{found.name}.{plan.path}".lstrip("."))
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
