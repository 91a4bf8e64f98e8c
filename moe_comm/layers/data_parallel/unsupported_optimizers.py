"""Reject optimizers whose steps are wrong for experts that differ between ranks.

kind                                                 what a step would do to experts
partitions or averages parameters over ranks         overwrite them with those of another rank
statistics of a tensor: norms, preconditioners       give results that depend on the number of ranks

An optimizer of torch does not state its kind, so it is recognized by its class name and the names of its base classes,
and preconditioners of unknown classes by their shapes after the first step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

from torch import Tensor
from torch.optim import swa_utils
from torch.optim.optimizer import Optimizer

from moe_comm.errors import ConfigError
from moe_comm.lazy import after_import

_ACROSS_RANKS = re.compile("zeroredundancyoptimizer|postlocalsgdoptimizer|oss|distributedfused(adam|lamb)")
"""Names of classes that give each rank some of the parameters, or average them."""
_PER_TENSOR = re.compile(
    "(fused|nv|pytorch|paged|distributed|scalable)*"
    "(adafactor|adai|adalomo|adammini|adamp|amos|apollo|came|dadapt|dion|fromage|galore|kfac|kron|lamb|lambc|larc|lars|"
    "lbfgs|muon|muonwithaux|nero|normuon|novograd|prodigy|psgd|scion|sgdp|shampoo|sm3|soap|stableadamw)"
    "(sgd|adam|adamw|lion|grad|8bit|32bit|schedulefree|bigvision)*"
)
"""Names of classes whose steps depend on a statistic of the whole tensor, or of all tensors of this rank."""
_ADVICE = (
    "Train experts with an optimizer that works element by element (AdamW, Adam, SGD, Lion): give it "
    "moe_comm.layers.data_parallel.expert_parameters(model).values(), and the other parameters to this one"
)


def refuse_kind(optimizer: Optimizer) -> None:
    """Raise ConfigError if the class of ``optimizer``, which has expert parameters, is known to be unsupported."""
    for kind in type(optimizer).__mro__:
        name = kind.__name__.lower().replace("_", "")
        if _ACROSS_RANKS.fullmatch(name):
            raise _across_ranks(f"{kind.__name__} divides")
        if _PER_TENSOR.fullmatch(name):
            raise ConfigError(
                f"{type(optimizer).__name__} computes statistics of whole tensors, but this rank has only some of the "
                f"experts of a stacked parameter: results would depend on the number of ranks. {_ADVICE}"
            )


def refuse_preconditioners(optimizer: Optimizer, experts: Iterable[Tensor]) -> None:
    """Raise ConfigError if the state of a parameter in ``experts`` has a matrix that mixes experts, as Shampoo's."""
    for param in experts:
        for value in _tensors(optimizer.state.get(param, {})):
            if value.dim() == 2 and value.shape[0] == value.shape[1] and value.shape[0] in param.shape != value.shape:
                raise ConfigError(
                    f"the state of {type(optimizer).__name__} for experts {tuple(param.shape)} has a preconditioner "
                    f"{tuple(value.shape)} of this rank's experts: results depend on the number of ranks. {_ADVICE}"
                )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _across_ranks(what: str) -> ConfigError:
    return ConfigError(
        f"{what} parameters over ranks as if all ranks had the same, but each rank has different experts, "
        f"which would be lost. {_ADVICE}. prepare_fsdp divides the state of replicated parameters and of experts"
    )


def guard_averages(is_expert: Callable[[Tensor], bool]) -> None:
    """Let torch's averagers of parameters raise for parameters of which ``is_expert`` returns True.

    ``AveragedModel`` raises only if it is a copy of the model before its experts were replaced.
    """

    def before_average(_: Any, params: Iterable[Any]) -> tuple[Any, ...]:
        params = list(params)
        members = (one for item in params for one in (item["params"] if isinstance(item, dict) else (item,)))
        if any(map(is_expert, members)):
            raise _across_ranks("a model averager averages")
        return (params,)

    def before_update(averaged: Any, model: Any) -> tuple[Any, ...]:
        for mine, param in zip(averaged.module.parameters(), model.parameters(), strict=False):
            if is_expert(param) and mine.shape != param.shape:
                raise ConfigError(
                    f"this {type(averaged).__name__} has parameters {tuple(mine.shape)}, but experts of the model "
                    f"{tuple(param.shape)}: it was built before swap_moe. Build it after swap_moe"
                )
        return (model,)

    def guard_averagers() -> None:
        from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager

        for kind in (averagers.PeriodicModelAverager, hierarchical_model_averager.HierarchicalModelAverager):
            _guard(kind, "average_parameters", before_average)

    _guard(swa_utils.AveragedModel, "update_parameters", before_update)
    after_import(["torch.distributed.algorithms.model_averaging.averagers"], guard_averagers)


def _guard(kind: Any, name: str, check: Callable[..., tuple[Any, ...]]) -> None:
    original = getattr(kind, name)

    @wraps(original)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *check(self, *args, **kwargs))

    setattr(kind, name, guarded)
