"""accelerate for models whose experts differ between ranks: wrapping, clipping and checkpoints.

accelerate saves what rank 0 holds, maps optimizers to parameters by address, and takes one norm for each device mesh.
None of that is right for experts. ``prepare_accelerator`` gives one ``Accelerator`` a subclass that is.

A checkpoint of ``save_state`` has whole models and optimizers in the files and the format that accelerate writes for
one process, so any number of ranks loads it, and so does one process without this library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, load, save
from accelerate.utils.constants import MODEL_NAME, OPTIMIZER_NAME, SAFE_MODEL_NAME
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_comm.errors import CheckpointError, ConfigError, UnsupportedModel
from moe_comm.layers.data_parallel import (
    clip_grad_norm_,
    expert_modules,
    expert_parameters,
    load_optimizer_state_dict,
    load_state_dict,
    optimizer_state_dict,
    prepare_ddp,
    prepare_fsdp,
    state_dict,
)
from moe_comm.layers.parallel.collectives import gather_values
from moe_comm.layers.parallel.names import state_key


def prepare_accelerator(accelerator: Any) -> Any:
    """Make ``accelerator`` right for models whose experts are spread over ranks.

        accelerator = prepare_accelerator(Accelerator(gradient_accumulation_steps=4))
        model, optimizer, data = accelerator.prepare(model, optimizer, data)

    Call it before ``accelerator.prepare``. Other models are handled as before.

    Returns:
        ``accelerator``, changed in place: of a subclass of its class.
    """
    if not isinstance(accelerator, _HandlesExperts):
        cls = type(accelerator)
        accelerator.__class__ = type(cls.__name__, (_HandlesExperts, cls), {"__module__": cls.__module__})
        accelerator.register_save_state_pre_hook(partial(_write, accelerator))
        accelerator.register_load_state_pre_hook(partial(_read, accelerator))
    return accelerator


def is_spread(model: Any) -> bool:
    """Whether ``model`` has experts that differ between ranks."""
    return next(expert_modules(model), None) is not None


def write_on(ranks: bool, write: Callable[[], None], device: torch.device, what: str) -> None:
    """Call ``write`` where ``ranks`` is true. Returns on all ranks when it is done. Collective.

    Raises:
        CheckpointError: writing failed on another rank; that rank raises its own error.
    """
    failure: Exception | None = None
    if ranks:
        try:
            write()
        except Exception as error:
            failure = error
    flag = torch.tensor([failure is not None], device=device)
    failed = bool(gather_values(flag, dist.group.WORLD, f"writing {what}").any())
    if failure is not None:
        raise failure
    if failed:
        raise CheckpointError(f"another rank could not write {what}; its own error says why")


class _HandlesExperts:
    """Comes before ``accelerate.Accelerator`` in the bases of a class."""

    handles_experts = True
    _set_aside: tuple[list[Any], list[Any]] | None = None
    _safe_serialization = True

    def prepare(self: Any, *args: Any, device_placement: Any = None) -> Any:
        models = [arg for arg in args if isinstance(arg, nn.Module) and is_spread(arg)]
        optimizers = [arg for arg in args if isinstance(arg, Optimizer)]
        base = super().prepare  # type: ignore[misc]
        if not models:
            return base(*args, device_placement=device_placement)
        _refuse(self)
        if not self.is_fsdp2:
            for model in models:
                _leave_to_their_ranks(model)
            return base(*args, device_placement=device_placement)
        (model,) = models
        names = _names_of(model, optimizers)
        if not any(gradients.prepared_for_fsdp for _, _, gradients in expert_modules(model)):
            self._shard_experts(model)
        _give(model, optimizers, names)
        prepared = base(*args, device_placement=device_placement)
        # accelerate finds parameters by address, and all parameters without elements have the same one.
        _give(model, optimizers, names)
        return prepared

    def _shard_experts(self: Any, model: nn.Module) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        plugin = self.state.fsdp_plugin
        for _, module, _ in expert_modules(model):
            module.to(self.device)
            for param in module.parameters():
                if self.mixed_precision != "no" and param.requires_grad:
                    param.data = param.data.float()  # as accelerate does for all parameters; it cannot do so later
        prepare_fsdp(
            model,
            reshard_after_forward=plugin.reshard_after_forward,
            mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        )

    def clip_grad_norm_(self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        model = next((model for model in self._models if self.is_fsdp2 and is_spread(model)), None)
        if model is None:
            return super().clip_grad_norm_(given, max_norm, norm_type)  # type: ignore[misc]
        if {id(param) for param in given} != {id(param) for param in model.parameters()}:
            raise ConfigError(
                "under FSDP2 the norm of some parameters of a model with experts is not known; write\n"
                "    accelerator.clip_grad_norm_(model.parameters(), max_norm)"
            )
        self.unscale_gradients()
        return clip_grad_norm_(model, max_norm, norm_type)

    def get_state_dict(self: Any, model: Any, unwrap: bool = True) -> Any:
        """The whole state dict on rank 0 of each expert-parallel group, an empty one on other ranks. Collective."""
        if not is_spread(model):
            return super().get_state_dict(model, unwrap)  # type: ignore[misc]
        return state_dict(model, rank0_only=True, cpu=True)

    def save_state(
        self: Any, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Any:
        self._safe_serialization = safe_serialization
        with _without_models(self):
            return super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)  # type: ignore[misc]

    def load_state(self: Any, input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any) -> None:
        with _without_models(self) as spread:
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)  # type: ignore[misc]
        if spread:
            # accelerate keeps the count of accumulated batches with the random states of a rank. More ranks than saved
            # have none, and would reduce gradients at other batches than the rest.
            steps = gather_values(torch.tensor([self.step], device=self.device), dist.group.WORLD, "resuming")
            self.step = int(steps[0])


def _refuse(accelerator: Any) -> None:
    """Raise on every rank, before anything is changed.

    Raises:
        UnsupportedModel: how the accelerator wraps models is not supported for experts.
        ConfigError: a setting of it would lose experts.
    """
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UnsupportedModel("FSDP 1 cannot leave experts to their ranks; set fsdp_version=2")
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise UnsupportedModel(f"{kind.value} cannot leave experts to their ranks; use DDP or FSDP2")
    config = accelerator.parallelism_config
    if config is not None and (config.tp_enabled or config.cp_enabled or config.sp_enabled):
        raise UnsupportedModel("with experts spread over ranks, accelerate may use data parallelism only: DDP or FSDP2")
    if not accelerator.is_fsdp2:
        return
    plugin = accelerator.state.fsdp_plugin
    if plugin.cpu_ram_efficient_loading:
        raise ConfigError(
            "cpu_ram_efficient_loading copies the experts of rank 0 to all ranks. Write\n"
            "    FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)"
        )
    if type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy":
        raise UnsupportedModel("experts cannot be offloaded to the CPU; set cpu_offload=False")
    if accelerator.scaler is not None:
        raise UnsupportedModel("the loss scale of fp16 would differ between ranks under FSDP2; use bf16")


def _leave_to_their_ranks(model: nn.Module) -> None:
    """Call ``prepare_ddp``, if it was not called for ``model`` itself."""
    if expert_parameters(model).keys() - set(getattr(model, "_ddp_params_and_buffers_to_ignore", [])):
        declared = next(gradients.declared for _, _, gradients in expert_modules(model))
        prepare_ddp(model, grad_reduction=declared)


Names = list[list[list[str]]]
"""Names of parameters, by optimizer and parameter group."""


def _names_of(model: nn.Module, optimizers: Iterable[Any]) -> Names:
    names = {id(param): state_key(name) for name, param in model.named_parameters()}
    try:
        return [[[names[id(p)] for p in group["params"]] for group in optim.param_groups] for optim in optimizers]
    except KeyError:
        raise ConfigError(
            "the optimizer has parameters that the model does not have; build it after swap_moe"
        ) from None


def _give(model: nn.Module, optimizers: Iterable[Any], names: Names) -> None:
    """Make the optimizers hold the parameters that now have these names in ``model``."""
    params = {state_key(name): param for name, param in model.named_parameters()}
    for optimizer, groups in zip(optimizers, names, strict=True):
        for group, named in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [params[name] for name in named]


@contextmanager
def _without_models(accelerator: Any) -> Iterator[bool]:
    """Take models and optimizers from accelerate where experts are spread, for ``_write`` and ``_read``."""
    spread = any(is_spread(model) for model in accelerator._models)
    if not spread:
        yield False
        return
    held = accelerator._models, accelerator._optimizers
    accelerator._set_aside, accelerator._models, accelerator._optimizers = held, [], []
    try:
        yield True
    finally:
        accelerator._models, accelerator._optimizers = held
        accelerator._set_aside = None


def _paths(folder: str, stem: str, suffix: str, count: int) -> list[Path]:
    return [Path(folder) / f"{stem}{f'_{i}' if i else ''}{suffix}" for i in range(count)]


def _write(accelerator: Any, models: Any, weights: Any, folder: str) -> None:
    """Write whole models and optimizers under the names that accelerate gives those of one process."""
    if accelerator._set_aside is None:
        return
    held, optimizers = accelerator._set_aside
    safe = accelerator._safe_serialization
    keep = {"save_on_each_node": accelerator.project_configuration.save_on_each_node}
    stem, suffix = (SAFE_MODEL_NAME, ".safetensors") if safe else (MODEL_NAME, ".bin")
    for model, path in zip(held, _paths(folder, stem, suffix, len(held)), strict=True):
        state = _each_once(state_dict(model, rank0_only=True, cpu=True))
        _save(accelerator, partial(save, state, path, safe_serialization=safe, **keep), path)
    everything = nn.ModuleList(held)
    for optimizer, path in zip(optimizers, _paths(folder, OPTIMIZER_NAME, ".bin", len(optimizers)), strict=True):
        state = optimizer_state_dict(everything, optimizer, rank0_only=True, cpu=True)
        _save(accelerator, partial(save, state, path, **keep), path)


def _save(accelerator: Any, write: Callable[[], None], path: Path) -> None:
    write_on(True, write, accelerator.device, str(path))


def _each_once(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` without the second name of tied weights, which safetensors refuses."""
    seen: set[Any] = set()
    result = {}
    for key, value in state.items():
        same = (value.data_ptr(), value.shape) if isinstance(value, Tensor) and value.numel() else (id(value), key)
        if same not in seen:
            seen.add(same)
            result[key] = value
    return result


def _read(accelerator: Any, models: Any, folder: str) -> None:
    """Each rank reads the files of ``_write`` and takes its part."""
    if accelerator._set_aside is None:
        return
    held, optimizers = accelerator._set_aside
    safe, other = (
        _paths(folder, *named, len(held)) for named in ((SAFE_MODEL_NAME, ".safetensors"), (MODEL_NAME, ".bin"))
    )
    for model, first, second in zip(held, safe, other, strict=True):
        load_whole(model, load_file(first) if first.exists() else load(second, map_location="cpu"))
    everything = nn.ModuleList(held)
    for optimizer, path in zip(optimizers, _paths(folder, OPTIMIZER_NAME, ".bin", len(optimizers)), strict=True):
        load_optimizer_state_dict(everything, optimizer, load(path, map_location="cpu"))


def load_whole(model: nn.Module, state: dict[str, Any]) -> None:
    """Load a whole state dict in which tied weights may have one of their names.

    Raises:
        CheckpointError: parameters are missing, or the state dict has others.
    """
    found = load_state_dict(model, state, strict=False)
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    params = dict(inner.named_parameters(remove_duplicate=False))
    loaded = {id(param) for name, param in params.items() if state_key(name) in state}
    missing = [name for name in found.missing_keys if id(params.get(name)) not in loaded]
    if missing or found.unexpected_keys:
        raise CheckpointError(
            f"the checkpoint is of another model: {len(missing)} names are missing {missing[:3]} and "
            f"{len(found.unexpected_keys)} are not known {found.unexpected_keys[:3]}"
        )
