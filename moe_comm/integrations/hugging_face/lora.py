"""PEFT's LoRA of stacked experts (``target_parameters``) that are distributed over ranks.

PEFT wraps the experts module once for each adapted parameter, and adds an expert-sized delta to the parameter during a
forward pass. ``ParamWrapper`` replaces PEFT's class of this name: it passes A and B to the experts instead, which
multiply their rows by them (``kernels/low_rank.py``). Each rank has A and B of its own experts:

    lora_A.weight [rank * E, inputs]     row e * rank + k is of expert e      ─▶ a [E, rank, inputs]
    lora_B.weight [outputs, rank * E]    column k * E + e is of expert e      ─▶ b [E, rank, outputs]

Both are sharded expert parameters as others: gradients, norms, state dicts and optimizer state follow from
``attach_experts``. Initial values are those of one process, because each rank draws A and B of all experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import chain
from typing import Any

import torch
from peft.peft_model import PeftModel
from peft.tuners.lora import layer, model as lora_model
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from moe_comm.errors import ConfigError, UnsupportedModel
from moe_comm.integrations.hugging_face.state import write_adapters
from moe_comm.integrations.hugging_face.swap import EPExperts, unwrapped_name
from moe_comm.kernels.fp8 import GemmDtype
from moe_comm.kernels.low_rank import LowRank
from moe_comm.layers.data_parallel.attach import attach_experts, exclude_from_ddp, expert_modules, gradients_of
from moe_comm.layers.data_parallel.expert_shard import ExpertShards, is_dtensor
from moe_comm.layers.data_parallel.gradients import ExpertGradients, replicated_parameter
from moe_comm.layers.data_parallel.optimizers import mark_replaced
from moe_comm.layers.data_parallel.state import distribute_state
from moe_comm.overlap.options import Overlap
from moe_comm.topology import Placement, Sharding, Split

_INITS = (True, False, "gaussian")
_PeftWrapper: Any = layer.ParamWrapper


class ParamWrapper(_PeftWrapper):  # type: ignore[misc]  # PEFT recognizes it by this name
    """The adapters of one stacked parameter of ``EPExperts``; A and B of this rank's experts."""

    num_experts: int

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        experts: Any = self.get_base_layer()
        if experts.offloaded is not None:
            raise UnsupportedModel(f"{experts.label} is offloaded: its experts cannot have adapters (LoRA)")
        self.refuse(experts)
        refuse_initialization(f"{experts.label}.{self.parameter_name}", config)
        # PEFT initializes A and B of ``num_experts`` experts.
        local, self.num_experts = self.num_experts, experts.num_experts
        try:
            super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        finally:
            self.num_experts = local
        self.shard(adapter_name)

    def refuse(self, experts: Any) -> None:
        """Raise UnsupportedModel unless the parameter of ``experts`` can be adapted. Equal on all ranks."""
        _refuse(experts.label, self.parameter_name, experts.gemm_dtype, experts.overlap, experts.placement)

    @property
    def stack(self) -> str:
        """The parameter of ``EPExperts`` whose product the adapters add to."""
        return self.parameter_name  # type: ignore[no-any-return]

    def shard(self, adapter_name: str) -> None:
        """Keep A and B of this rank's experts, as sharded expert parameters."""
        experts: Any = self.get_base_layer()
        own = gradients_of(experts)
        if own is None:  # one rank
            return
        rank, placement = self.r[adapter_name], experts.placement
        shapes = (rank * experts.num_experts, self.in_features), (self.out_features, rank * experts.num_experts)
        splits = _split_of_a(placement, rank), _split_of_b(placement, rank)
        for key, shape, split in zip(("lora_A", "lora_B"), shapes, splits, strict=True):
            label = f"{experts.label}.{self.parameter_name}.{key}"
            shard_linear(getattr(self, key)[adapter_name], Sharding(shape, (split,), expert=True), own, label)
            gradients_in(getattr(self, key)[adapter_name]).unit = self

    def low_rank(self, adapter_name: str) -> LowRank:
        """Return A and B of an adapter, differentiable."""
        a, b = (weight_of(linears[adapter_name]) for linears in (self.lora_A, self.lora_B))
        rank, experts = self.r[adapter_name], self.num_experts
        return LowRank(
            a.view(experts, rank, self.in_features),
            b.view(self.out_features, rank, experts).permute(2, 1, 0),
            self.scaling[adapter_name],
        )

    def get_delta_weight(self, adapter_name: str, *args: Any, **kwargs: Any) -> Tensor:
        """Return what ``merge`` adds to the parameter of this rank's experts."""
        one, param = self.low_rank(adapter_name), self.get_param()
        layout = "eoi" if self._did_swap_in_out_features else "eio"
        delta = torch.einsum(f"elo,eli->{layout}", one.b_ELO, one.a_ELI) * one.scaling
        return delta.to(param.device, param.dtype)

    @contextmanager
    def _activate_lora(self, active_adapters: Sequence[str]) -> Iterator[None]:
        experts: Any = self.get_base_layer()
        if getattr(experts, "probe", None) is not None:  # its outputs are not those of experts
            yield
            return
        active = [name for name in active_adapters if name in self.lora_A]
        for name in active:
            for linear in (self.lora_A[name], self.lora_B[name]):
                if (gradients := gradients_of(linear)) is not None:
                    gradients.before_forward(linear)
        before = experts.adapters
        experts.adapters = {**before, self.stack: (*before.get(self.stack, ()), *map(self.low_rank, active))}
        try:
            yield
        finally:
            experts.adapters = before


def shard_linear(linear: Any, sharding: Sharding, like: ExpertGradients, label: str) -> None:
    """Keep this rank's part of the weight of ``linear``, as a sharded parameter of the experts of ``like``."""
    shards = ExpertShards(like.shards.group, {"weight": sharding}, like.shards.place, like.shards.sizes)
    full = linear.weight
    linear.weight = nn.Parameter(shards.take("weight", full.detach()).clone(), requires_grad=full.requires_grad)
    mark_replaced(full, linear.weight, label, "swap_moe")
    linear.out_features, linear.in_features = linear.weight.shape
    attach_experts(linear, shards, like.replicated, label)


def audit_without_router(model: nn.Module) -> None:
    """Let optimizer steps compare the gradients of ranks if routers are frozen, by an adapter of another module."""
    sharded = {id(module) for _, module, _ in expert_modules(model)}
    layers = (module for module in model.modules() if isinstance(module, layer.LoraLayer))
    others = (linear for one in layers for linear in one.lora_B.values() if id(linear) not in sharded)
    other: Any = next((linear for linear in others if linear.weight.requires_grad), None)
    for _, _, gradients in expert_modules(model) if other is not None else ():
        router = gradients.replicated() if gradients.unit is not None else None
        if router is not None and not router.requires_grad:
            gradients.replicated = partial(replicated_parameter, other, "weight")


def gradients_in(module: nn.Module) -> ExpertGradients:
    """Return the ``ExpertGradients`` of a module that has them."""
    gradients = gradients_of(module)
    assert gradients is not None
    return gradients


def weight_of(linear: Any) -> Tensor:
    """Return the weight of ``linear``. Whether it requires gradients is equal on all ranks, also without elements."""
    gradients = gradients_of(linear)
    weight: Tensor = linear.weight
    frozen = gradients is not None and gradients.frozen_by_fsdp
    return weight.detach().requires_grad_() if frozen else weight


def _split_of_a(placement: Placement, rank: int) -> Split:
    rows = [[e * rank + k for e in placement.homes_of(ep) for k in range(rank)] for ep in range(placement.world)]
    return _split(0, rows)


def _split_of_b(placement: Placement, rank: int) -> Split:
    experts = placement.num_experts
    columns = [[k * experts + e for k in range(rank) for e in placement.homes_of(ep)] for ep in range(placement.world)]
    return _split(1, columns)


def _split(dim: int, ids: Sequence[Sequence[int]]) -> Split:
    if list(chain(*ids)) == list(range(sum(map(len, ids)))):
        return Split(dim, "ep", sizes=tuple(map(len, ids)))
    return Split(dim, "ep", ids=tuple(map(tuple, ids)))


def refuse_initialization(name: str, config: Any) -> None:
    """Raise ConfigError if the initialization of adapters of ``name`` reads weights, which other ranks may have."""
    if config.init_lora_weights not in _INITS:
        raise ConfigError(
            f"adapters (LoRA) of {name} cannot be initialized by init_lora_weights={config.init_lora_weights!r}; "
            f"supported are {', '.join(map(repr, _INITS))}"
        )


def _refuse(name: str, parameter: str, gemm_dtype: GemmDtype, overlap: Overlap | None, placement: Placement) -> None:
    """Raise UnsupportedModel unless the experts ``name`` can have adapters of ``parameter``. Equal on all ranks."""
    if parameter not in ("gate_up_proj", "down_proj"):
        raise UnsupportedModel(
            f"adapters (LoRA) of {name}.{parameter} are not supported; target gate_up_proj and down_proj"
        )
    refuse_settings(f"{name}.{parameter}", gemm_dtype, overlap, placement)


def refuse_settings(name: str, gemm_dtype: GemmDtype, overlap: Overlap | None, placement: Placement) -> None:
    """Raise UnsupportedModel unless experts with these settings can have adapters of ``name``. Equal on all ranks."""
    what = f"adapters (LoRA) of {name}"
    if placement.has_copies:
        raise UnsupportedModel(f"{what} are not supported with copies of experts; use a placement without copies")
    if gemm_dtype == "fp8":
        raise UnsupportedModel(f'{what} are not supported with expert_gemm_dtype="fp8"; use "same"')
    if overlap is not None and overlap.uses_kernels:
        raise UnsupportedModel(f"{what} are not supported by the device executor; use Overlap(executor='pipelined')")


def peft_wrappers(model: nn.Module, name: str) -> list[Any]:
    """Return PEFT's wrappers of the parameters of the experts module ``name``, from the innermost to the outermost."""
    wrappers = []
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
        wrapper = model.get_submodule(name)
        if type(wrapper) is not _PeftWrapper:
            raise UnsupportedModel(
                f"{name} ({type(wrapper).__name__}) wraps experts; adapters (LoRA) of experts are supported as "
                "target_parameters of PEFT's LoraConfig"
            )
        wrappers.append(wrapper)
    return wrappers


def refuse_wrappers(
    model: nn.Module, name: str, gemm_dtype: GemmDtype, overlap: Overlap | None, placement: Placement
) -> None:
    """Raise UnsupportedModel unless ``adopt`` supports the wrappers of the experts module ``name``."""
    for wrapper in peft_wrappers(model, name):
        _refuse(unwrapped_name(name), wrapper.parameter_name, gemm_dtype, overlap, placement)


def adopt(model: nn.Module, name: str) -> None:
    """Make the wrappers of the experts ``name``, which ``EPExperts`` have replaced, ``ParamWrapper``."""
    num_local = len(model.get_submodule(name).local_experts)  # type: ignore[arg-type]
    for wrapper in peft_wrappers(model, name):
        wrapper.__class__ = ParamWrapper
        wrapper.num_experts = num_local
        for adapter_name in list(wrapper.lora_A):
            wrapper.shard(adapter_name)


def follow_peft() -> None:
    """Make PEFT wrap parameters of ``EPExperts`` by ``ParamWrapper``, and exclude their adapters from DDP.

    PEFT also saves the adapters of all experts, and loads adapters into a model that FSDP2 has sharded.
    """
    check = ModulesToSaveWrapper.check_module
    create, save, load = lora_model.dispatch_default, PeftModel.save_pretrained, PeftModel.load_state_dict
    wrap, add = PeftModel.__init__, PeftModel.add_adapter

    @wraps(wrap)
    def initialize(model: Any, *args: Any, **kwargs: Any) -> None:
        wrap(model, *args, **kwargs)
        exclude_from_ddp(model)

    @wraps(add)
    def add_adapter(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = add(model, *args, **kwargs)
        exclude_from_ddp(model)
        return result

    @wraps(check)
    def check_module(wrapper: Any) -> None:
        for module in wrapper.original_module.modules():
            if isinstance(module, EPExperts) and module.dispatcher.world > 1:
                raise UnsupportedModel(
                    f"modules_to_save cannot contain the experts {module.label}, which are distributed over ranks. "
                    "Adapt them (target_parameters or target_modules), or train the whole model without adapters"
                )
        check(wrapper)

    def dispatch(target: nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> nn.Module | None:
        base: Any = target
        while isinstance(base, _PeftWrapper):
            base = base.base_layer
        if isinstance(base, EPExperts) and kwargs.get("parameter_name") is not None:
            return ParamWrapper(target, adapter_name, config=config, **kwargs)
        module: nn.Module | None = create(target, adapter_name, config=config, **kwargs)
        return module

    @wraps(save)
    def save_pretrained(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        # If the ranks have equal adapters, one of them may call this alone.
        sharded = any(not isinstance(module, EPExperts) for _, module, _ in expert_modules(model))
        sharded = sharded or _sharded_by_fsdp(model)
        if not sharded or kwargs.get("state_dict") is not None:
            save(model, save_directory, *args, **kwargs)
            return
        kwargs.pop("state_dict", None)

        def write(folder: Any, state_dict: Any) -> None:
            save(model, folder, *args, state_dict=state_dict, **kwargs)

        write_adapters(model, save_directory, write)

    @wraps(load)
    def load_state_dict(model: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        swapped = next(expert_modules(model), None) is not None
        state = distribute_state(model, state_dict) if swapped and _sharded_by_fsdp(model) else state_dict
        return load(model, state, *args, **kwargs)

    lora_model.dispatch_default, PeftModel.save_pretrained = dispatch, save_pretrained
    PeftModel.load_state_dict = load_state_dict
    PeftModel.__init__, PeftModel.add_adapter = initialize, add_adapter
    ModulesToSaveWrapper.check_module = check_module


def _sharded_by_fsdp(model: nn.Module) -> bool:
    return any(is_dtensor(parameter) for parameter in model.parameters())
