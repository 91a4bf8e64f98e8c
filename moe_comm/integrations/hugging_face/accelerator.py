"""accelerate for models whose experts differ between ranks: wrapping, clipping and checkpoints.

accelerate saves the model of rank 0, maps optimizers to parameters by address, and computes one norm for each device
mesh. These are wrong for experts. ``prepare_accelerator`` replaces the class of an ``Accelerator`` by a subclass that
handles experts.

A checkpoint of ``save_state`` contains full models and optimizers in the files and formats that accelerate writes for
one process. Any number of ranks can load it, and so can one process without this library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, load, save
from accelerate.utils.constants import MODEL_NAME, OPTIMIZER_NAME, SAFE_MODEL_NAME
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_comm.comm.group_setup import agree_on_written
from moe_comm.errors import CheckpointError, ConfigError, UnsupportedModel
from moe_comm.integrations.checkpoint.load import load_checkpoint
from moe_comm.integrations.checkpoint.optimizer import load_optimizer, save_optimizer
from moe_comm.integrations.checkpoint.save import Settings, is_shared, write_checkpoint
from moe_comm.layers.data_parallel import (
    clip_grad_norm_,
    expert_modules,
    expert_parameters,
    load_state_dict,
    optimizer_state_dict,
    prepare_ddp,
    prepare_fsdp,
    state_dict,
)
from moe_comm.layers.parallel.collectives import gather_values
from moe_comm.layers.parallel.module import state_key


def prepare_accelerator(accelerator: Any) -> Any:
    """Add support for models whose experts differ between ranks to an ``Accelerator``.

        accelerator = prepare_accelerator(Accelerator(gradient_accumulation_steps=4))
        model, optimizer, data = accelerator.prepare(model, optimizer, data)

    Call it before ``accelerator.prepare``. The handling of other models does not change.

    Args:
        accelerator: an ``accelerate.Accelerator``. Changed in place: its class is replaced by a subclass.

    Returns:
        ``accelerator``.
    """
    if not isinstance(accelerator, _HandlesExperts):
        with_mixin(accelerator, _HandlesExperts)
        accelerator.register_save_state_pre_hook(partial(_write, accelerator))
        accelerator.register_load_state_pre_hook(partial(_read, accelerator))
    return accelerator


def with_mixin(instance: Any, mixin: type) -> Any:
    """Return ``instance``, whose class is replaced by a subclass that inherits from ``mixin`` first."""
    cls = type(instance)
    if not issubclass(cls, mixin):
        instance.__class__ = type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})
    return instance


def has_distributed_experts(model: Any) -> bool:
    """Return whether ``model`` has experts that differ between ranks."""
    return next(expert_modules(model), None) is not None


def write_on(writes: bool, write: Callable[[], None], target: str) -> None:
    """Call ``write`` on the ranks where ``writes`` is true, and wait for it on all ranks. Collective.

    Raises:
        CheckpointError: writing failed on another rank. If that rank raised an error of this library, its class is
            raised instead. That rank raises its original exception.
    """
    outcome: str | Exception = ""
    if writes:
        try:
            write()
        except Exception as error:
            outcome = error
    agree_on_written(dist.group.WORLD, outcome, target, CheckpointError)


class _HandlesExperts:
    """Mixin for ``accelerate.Accelerator``."""

    handles_experts = True
    _hidden: tuple[list[Any], list[Any]] | None = None
    _safe_serialization = True

    def prepare(self: Any, *args: Any, device_placement: Any = None) -> Any:
        models = [arg for arg in args if isinstance(arg, nn.Module) and has_distributed_experts(arg)]
        optimizers = [arg for arg in args if isinstance(arg, Optimizer)]
        base = super().prepare  # type: ignore[misc]
        if not models:
            return base(*args, device_placement=device_placement)
        _check_settings(self)
        if not self.is_fsdp2:
            for model in models:
                _prepare_ddp(model)
            return base(*args, device_placement=device_placement)
        (model,) = models
        names = _names_of(model, optimizers)
        if not any(gradients.prepared_for_fsdp for _, _, gradients in expert_modules(model)):
            self._shard_experts(model)
        _assign_parameters(model, optimizers, names)
        prepared = base(*args, device_placement=device_placement)
        # accelerate identifies parameters by address, and all empty parameters have the same address.
        _assign_parameters(model, optimizers, names)
        return prepared

    def _shard_experts(self: Any, model: nn.Module) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        plugin = self.state.fsdp_plugin
        for _, module, _ in expert_modules(model):
            module.to(self.device)
            for param in module.parameters():
                if self.mixed_precision != "no" and param.requires_grad:
                    param.data = param.data.float()  # accelerate cannot do this after the experts are sharded
        prepare_fsdp(
            model,
            reshard_after_forward=plugin.reshard_after_forward,
            mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        )

    def clip_grad_norm_(self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        model = next((model for model in self._models if self.is_fsdp2 and has_distributed_experts(model)), None)
        if model is None:
            return super().clip_grad_norm_(params, max_norm, norm_type)  # type: ignore[misc]
        if {id(param) for param in params} != {id(param) for param in model.parameters()}:
            raise ConfigError(
                "under FSDP2, gradients of a model with experts can only be clipped for all parameters; write\n"
                "    accelerator.clip_grad_norm_(model.parameters(), max_norm)"
            )
        self.unscale_gradients()
        return clip_grad_norm_(model, max_norm, norm_type)

    def get_state_dict(self: Any, model: Any, unwrap: bool = True) -> Any:
        """Return the full state dict on the ranks that save it, and {} on other ranks. Collective.

        They are rank 0 of each expert-parallel group; with ``save_on_each_node`` all ranks.
        """
        if not has_distributed_experts(model):
            return super().get_state_dict(model, unwrap)  # type: ignore[misc]
        return state_dict(model, rank0_only=not self.project_configuration.save_on_each_node, cpu=True)

    def save_model(
        self: Any, model: Any, save_directory: Any, max_shard_size: Any = "10GB", safe_serialization: bool = True
    ) -> None:
        """Write the full state dict; each rank writes its part, if it is written as safetensors. Collective."""
        if safe_serialization and has_distributed_experts(model) and not _gathers(self, save_directory):
            _write_parts(model, Path(save_directory) / f"{SAFE_MODEL_NAME}.safetensors", max_shard_size)
        else:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)  # type: ignore[misc]

    def save_state(
        self: Any, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Any:
        self._safe_serialization = safe_serialization
        with _without_models(self):
            return super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)  # type: ignore[misc]

    def load_state(self: Any, input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any) -> None:
        with _without_models(self) as has_experts:
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)  # type: ignore[misc]
        if has_experts:
            # accelerate saves the number of accumulated batches in the random state of each rank. New ranks have no
            # such state and would reduce gradients at different batches, so all ranks use the number of rank 0.
            steps = gather_values(
                torch.tensor([self.step], dtype=torch.int64, device=self.device), dist.group.WORLD, "resuming"
            )
            self.step = int(steps[0])


def _check_settings(accelerator: Any) -> None:
    """Raise ``UnsupportedModel`` or ``ConfigError`` if a setting of the accelerator is wrong for experts."""
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UnsupportedModel("FSDP 1 does not support experts that differ between ranks; set fsdp_version=2")
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise UnsupportedModel(f"{kind.value} does not support experts that differ between ranks; use DDP or FSDP2")
    config = accelerator.parallelism_config
    if config is not None and (config.tp_enabled or config.cp_enabled or config.sp_enabled):
        raise UnsupportedModel(
            "for experts that differ between ranks, accelerate must use data parallelism only: DDP or FSDP2"
        )
    if not accelerator.is_fsdp2:
        return
    plugin = accelerator.state.fsdp_plugin
    if plugin.cpu_ram_efficient_loading:
        raise ConfigError(
            "cpu_ram_efficient_loading would copy the experts of rank 0 to all ranks. Write\n"
            "    FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)"
        )
    if type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy":
        raise UnsupportedModel("experts cannot be offloaded to the CPU; set cpu_offload=False")
    if accelerator.scaler is not None:
        raise UnsupportedModel("the loss scale of fp16 would differ between ranks under FSDP2; use bf16")


def _prepare_ddp(model: nn.Module) -> None:
    """Call ``prepare_ddp`` unless it was already called for ``model``."""
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


def _assign_parameters(model: nn.Module, optimizers: Iterable[Any], names: Names) -> None:
    """Set the parameters of the optimizers to the current parameters of ``model`` with these names."""
    params = {state_key(name): param for name, param in model.named_parameters()}
    for optimizer, groups in zip(optimizers, names, strict=True):
        for group, group_names in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [params[name] for name in group_names]


@contextmanager
def _without_models(accelerator: Any) -> Iterator[bool]:
    """Hide models and optimizers from accelerate if any experts differ between ranks, for ``_write`` and ``_read``."""
    if not any(has_distributed_experts(model) for model in accelerator._models):
        yield False
        return
    hidden = accelerator._models, accelerator._optimizers
    accelerator._hidden, accelerator._models, accelerator._optimizers = hidden, [], []
    try:
        yield True
    finally:
        accelerator._models, accelerator._optimizers = hidden
        accelerator._hidden = None


def _paths(folder: str, stem: str, suffix: str, count: int) -> list[Path]:
    return [Path(folder) / f"{stem}{f'_{i}' if i else ''}{suffix}" for i in range(count)]


def _write(accelerator: Any, models: Any, weights: Any, folder: str) -> None:
    """Write full models and optimizers to the files that accelerate writes for one process."""
    if accelerator._hidden is None:
        return
    modules, optimizers = accelerator._hidden
    safe, gathers = accelerator._safe_serialization, _gathers(accelerator, folder)
    each_node = accelerator.project_configuration.save_on_each_node
    save_file = partial(save, save_on_each_node=each_node)
    stem, suffix = (SAFE_MODEL_NAME, ".safetensors") if safe else (MODEL_NAME, ".bin")
    for model, path in zip(modules, _paths(folder, stem, suffix, len(modules)), strict=True):
        if safe and not gathers:
            _write_parts(model, path)
            continue
        state = _without_duplicates(state_dict(model, rank0_only=not each_node, cpu=True))
        write_on(True, partial(save_file, state, path, safe_serialization=safe), str(path))
    all_models = nn.ModuleList(modules)
    for optimizer, path in zip(optimizers, _paths(folder, OPTIMIZER_NAME, ".bin", len(optimizers)), strict=True):
        if not gathers:
            save_optimizer(all_models, optimizer, path, dist.group.WORLD)
            continue
        state = optimizer_state_dict(all_models, optimizer, rank0_only=not each_node, cpu=True)
        write_on(True, partial(save_file, state, path), str(path))


def _gathers(accelerator: Any, folder: str) -> bool:
    """Return whether ranks gather what they write to ``folder``, because they do not share files. Collective."""
    on_each_node: bool = accelerator.project_configuration.save_on_each_node
    return on_each_node or not is_shared(Path(folder), dist.group.WORLD)


def _write_parts(model: Any, path: Path, max_shard_size: int | str = sys.maxsize) -> None:
    """Write the state dict of ``model`` as safetensors, each rank its part. Collective."""
    settings = Settings(max_shard_size, single=path.name, hub_layout=False, state_only=True)
    write_checkpoint(model, path.parent, dist.group.WORLD, settings)


def _without_duplicates(state: dict[str, Any]) -> dict[str, Any]:
    """Remove the second name of tied weights, which safetensors rejects."""
    unique: dict[Any, tuple[str, Any]] = {}
    for key, value in state.items():
        storage = (value.data_ptr(), value.shape) if isinstance(value, Tensor) and value.numel() else (id(value), key)
        unique.setdefault(storage, (key, value))
    return dict(unique.values())


def _read(accelerator: Any, models: Any, folder: str) -> None:
    """Read the files of ``_write`` on each rank and load the local shards."""
    if accelerator._hidden is None:
        return
    modules, optimizers = accelerator._hidden
    safe_paths, pickle_paths = (
        _paths(folder, *name, len(modules)) for name in ((SAFE_MODEL_NAME, ".safetensors"), (MODEL_NAME, ".bin"))
    )
    for model, safe_path, pickle_path in zip(modules, safe_paths, pickle_paths, strict=True):
        if pickle_path.exists() and not safe_path.exists():
            _load_full(model, load(pickle_path, map_location="cpu"))
        else:
            load_checkpoint(model, safe_path)
    all_models = nn.ModuleList(modules)
    for optimizer, path in zip(optimizers, _paths(folder, OPTIMIZER_NAME, ".bin", len(optimizers)), strict=True):
        load_optimizer(all_models, optimizer, path, dist.group.WORLD)


def _load_full(model: nn.Module, state: dict[str, Any]) -> None:
    """Load a full state dict. It needs only one of the names of tied weights.

    Raises:
        CheckpointError: parameters are missing, or the state dict has unknown names.
    """
    result = load_state_dict(model, state, strict=False)
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    params = dict(inner.named_parameters(remove_duplicate=False))
    loaded = {id(param) for name, param in params.items() if state_key(name) in state}
    missing = [name for name in result.missing_keys if id(params.get(name)) not in loaded]
    if missing or result.unexpected_keys:
        raise CheckpointError(
            f"the checkpoint does not match the model: {len(missing)} names are missing {missing[:3]} and "
            f"{len(result.unexpected_keys)} are unknown {result.unexpected_keys[:3]}"
        )
