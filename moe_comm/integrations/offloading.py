"""``offload_experts``: move the experts of a swapped model to a file or to host memory."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from moe_comm.errors import ConfigError, UnsupportedModel
from moe_comm.integrations.checkpoint.load import agree_in, groups_of
from moe_comm.integrations.hugging_face.swap import EPExperts, swapped_experts
from moe_comm.integrations.offload.cache import CacheReport, ExpertCache, ExpertOffload, LayerShape
from moe_comm.integrations.offload.streamed import OffloadedLayer
from moe_comm.layers.data_parallel.optimizers import mark_replaced


def offload_experts(model: nn.Module, offload: ExpertOffload) -> Any:
    """Move the experts of this rank to a file or to the host's memory, for inference. Collective.

        model = moe_comm.offload_experts(moe_comm.swap_moe(model), ExpertOffload("4GiB", path="/var/tmp"))
        model = moe_comm.from_pretrained(folder, offload=ExpertOffload("4GiB", path="/var/tmp"))    # never in memory

    Each call of a layer reads the experts that its tokens are routed to, and computes them one after the other, with
    the same bits. Experts that are used often stay in ``offload.budget`` bytes of memory, and those that the next layer
    likely uses are read ahead. A model on "meta" gets its experts from ``load_checkpoint``.

    Args:
        model: a model after ``swap_moe``. Changed in place: the parameters of experts have shapes and dtypes only, and
            cannot be trained, saved or moved.
        offload: memory tier and budget.

    Returns:
        ``model``.

    Raises:
        ConfigError: the model is not swapped or already offloaded, a setting is invalid, or the budget is too small.
        UnsupportedModel: experts have adapters or copies, FSDP2 shards them, or the device executor computes them.
        StoreFull, StoreIOError: the file cannot be created or written. All errors are raised on every rank.
    """
    layers: list[EPExperts] = []
    groups = groups_of(model) if isinstance(model, nn.Module) else []
    fault: Exception | None = None
    cache: ExpertCache | None = None
    try:
        layers = list(swapped_experts(model).values())
        if not layers:
            raise ConfigError(f"{type(model).__name__} has no experts of swap_moe; call moe_comm.swap_moe first")
        cache = ExpertCache([_shape(model, layers, one) for one in layers], offload, _device(layers[0]))
        for number, experts in enumerate(layers):
            _fill(experts, cache, number)
        cache.flush()
    except Exception as error:  # the other ranks wait
        fault = error
    try:
        agree_in(groups, fault, "offload_experts")
    except BaseException:
        if cache is not None:
            cache.close()
        raise
    assert cache is not None
    for number, experts in enumerate(layers):
        for name in experts.layout.parameters:
            old: nn.Parameter = getattr(experts, name)
            new = nn.Parameter(old.detach().to("meta"), requires_grad=False)
            mark_replaced(old, new, f"{experts.label}.{name}", "offload_experts")
            experts.register_parameter(name, new)
        experts.offloaded = OffloadedLayer(cache, number, experts.layout.transposed)
        experts.register_state_dict_pre_hook(partial(_refuse_state, "saved"))
        experts.register_load_state_dict_pre_hook(partial(_refuse_state, "loaded"))
        experts._distribute()
    return model


def offload_report(model: nn.Module) -> CacheReport:
    """Return statistics of the offloaded experts of this rank, since they were offloaded.

    Raises:
        ConfigError: the experts of ``model`` are in memory.
    """
    for experts in swapped_experts(model).values():
        if experts.offloaded is not None:
            return experts.offloaded.cache.statistics()
    raise ConfigError(f"the experts of this {type(model).__name__} are in memory; see offload_experts")


def _shape(model: nn.Module, layers: list[EPExperts], experts: EPExperts) -> LayerShape:
    """Return the shapes of the experts of a layer. Raises as ``offload_experts``."""
    names = experts.layout.parameters
    tensors: dict[str, Tensor] = {name: getattr(experts, name) for name in names}
    if experts.offloaded is not None:
        raise ConfigError(f"the experts of this {type(model).__name__} are already offloaded")
    if experts._modules or experts.copies is not None or experts.dispatcher.options.balance is not None:
        raise UnsupportedModel(f"{experts.label} has adapters or copies of experts, which cannot be offloaded")
    if experts.overlap is not None and experts.overlap.uses_kernels:
        raise UnsupportedModel(
            f"the device executor cannot read offloaded experts, as {experts.label}; use another one"
        )
    if any(type(tensor) is not nn.Parameter for tensor in tensors.values()):
        raise UnsupportedModel(f"the experts of {experts.label} are sharded by FSDP2, and cannot be offloaded")
    shapes = {name: tuple(tensor.shape[1:]) for name, tensor in tensors.items()}
    return LayerShape(len(tensors["down_proj"]), shapes, {name: tensor.dtype for name, tensor in tensors.items()})


def _device(experts: EPExperts) -> torch.device:
    device = experts.down_proj.device
    return torch.get_default_device() if device.type == "meta" else device


@torch.no_grad()
def _fill(experts: EPExperts, cache: ExpertCache, number: int) -> None:
    """Write the values of a layer's experts, if they are in memory."""
    parameters = {name: getattr(experts, name) for name in experts.layout.parameters}
    if any(parameter.is_meta for parameter in parameters.values()):
        return
    for expert in range(len(parameters["down_proj"])):
        with cache.filling(number, expert) as values:
            for name, value in values.items():
                value.copy_(parameters[name][expert : expert + 1])


def _refuse_state(what: str, *_: Any, **__: Any) -> NoReturn:
    raise UnsupportedModel(
        f"offloaded experts cannot be {what} by state dicts: their weights are not in the parameters, but those of the "
        "checkpoint that was loaded; load one with moe_comm.load_checkpoint"
    )
