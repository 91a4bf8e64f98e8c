"""Data parallelism: one interface for replication, ZeRO-1 and FSDP2.

Gradients are plain sums over the ranks that store the parameter, because the loss is divided by the global number of
tokens of the step. No strategy divides gradients, and experts need no separate scale.

    data_parallel = DataParallel(modules, shardings, mesh, DataParallelOptions("zero1"))
    optimizer = make_optimizer(data_parallel.owned(), mesh, ...)
    each step:   zero_grad
                 forward and backward of each micro-batch      (a ``Runner`` tells FSDP which is the last)
                 reduce, clip_, optimizer.step, publish
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, Protocol, get_args

import torch
import torch.distributed as dist
from torch import nn

from moe_comm.errors import ConfigError
from moe_comm.layers.parallel.collectives import sum_values
from moe_comm.topology import ParallelMesh, Sharding
from moe_comm.train.parallel.compress import GradientReducer, GradientTraffic
from moe_comm.train.parallel.fsdp import FSDPParameters, fits
from moe_comm.train.parallel.parameters import LocalParameter, OwnedParameter, local_parameters
from moe_comm.train.parallel.replicate import ReplicatedParameters
from moe_comm.train.parallel.zero import ZeroParameters

Strategy = Literal["replicate", "zero1", "fsdp"]


@dataclass(frozen=True)
class DataParallelOptions:
    """Options of data parallelism.

    Args:
        strategy: "replicate" (no sharding), "zero1" (shard optimizer state and master weights) or "fsdp" (shard
            everything). Without a process group all strategies are equivalent.
        dtype: compute dtype of parameters, with fp32 masters and gradients. None: keep the dtype of each parameter.
        full_precision: name patterns (with ``*``) of parameters that always compute in fp32.
        compress: send gradients as bf16 and sum them in fp32; see ``moe_comm.train.parallel.compress``.
        bucket_bytes: maximum size of a gradient bucket.
        reshard_after_forward: FSDP frees the gathered weights of a block after forward, and gathers them again for
            backward. Ignored with pipeline parallelism.
    """

    strategy: Strategy = "replicate"
    dtype: torch.dtype | None = None
    full_precision: tuple[str, ...] = ()
    compress: bool = False
    bucket_bytes: int = 64 << 20
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            raise ConfigError(f"strategy must be one of {', '.join(get_args(Strategy))}; got {self.strategy!r}")
        if self.dtype not in (None, torch.float32, torch.bfloat16):
            raise ConfigError(f"parameters compute in float32 or bfloat16; got {self.dtype}")
        if self.bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes must be positive; got {self.bucket_bytes}")


class ParameterGroup(Protocol):
    """Parameters with the same strategy."""

    @property
    def owned(self) -> list[OwnedParameter]: ...

    def zero_grad(self) -> None: ...

    def reduce(self) -> None: ...

    def publish(self) -> None: ...


class DataParallel:
    """Gradient reduction and sharding of the trained parameters of one rank.

    Construct it on all ranks after the weights are initialized. Collective.

    Args:
        modules: this rank's pipeline stages, with the parameter names of the whole model.
        shardings: shardings by parameter name; a missing parameter is dense and replicated.
        mesh: the parallel mesh.
        options: strategy and dtypes.
        tied: names of the copies of a tied embedding and output layer on the first and last pipeline stage. Their
            gradients are summed, and norms count only the first copy.

    Raises:
        ConfigError: a parameter's shape contradicts its sharding, or FSDP cannot shard it.
    """

    def __init__(
        self,
        modules: nn.Module | Sequence[nn.Module],
        shardings: Mapping[str, Sharding],
        mesh: ParallelMesh,
        options: DataParallelOptions = DataParallelOptions(),
        tied: Sequence[str] = (),
    ) -> None:
        stages = [modules] if isinstance(modules, nn.Module) else list(modules)
        self.mesh, self.options, self.tied = mesh, options, frozenset(tied)
        self._reducer = GradientReducer(options.compress, options.bucket_bytes)
        trained = [self._with_compute_dtype(item) for item in local_parameters(stages, shardings, mesh)]
        self._groups = self._make_groups(stages, trained)
        names = [item.name for item in trained]
        by_name = {owned.name: owned for group in self._groups for owned in group.owned}
        counted = next((name for name in names if name in self.tied), None) if mesh.place["pp"] == 0 else None
        self._owned = [replace(by_name[name], counted=name not in self.tied or name == counted) for name in names]

    @property
    def traffic(self) -> GradientTraffic:
        """Bytes sent so far. FSDP's collectives are not included, except for compressed gradients."""
        return self._reducer.traffic

    def owned(self) -> list[OwnedParameter]:
        """Return the shards that this rank's optimizer updates, in the same order on all ranks of the stage."""
        return list(self._owned)

    def zero_grad(self) -> None:
        """Reset all gradients. Call it before the first backward pass of a step."""
        for group in self._groups:
            group.zero_grad()

    def reduce(self) -> None:
        """Reduce gradients over ranks into the ``grad`` of the owned shards; missing ones count as zero. Collective."""
        for group in self._groups:
            group.reduce()
        self._sum_tied()

    def publish(self) -> None:
        """Update the model's parameters from the owned shards, after a step or a load. Collective."""
        for group in self._groups:
            group.publish()

    def _make_groups(self, stages: list[nn.Module], trained: list[LocalParameter]) -> list[ParameterGroup]:
        options = self.options
        if options.strategy == "zero1":
            sharded = [item for item in trained if ZeroParameters.fits(item, self.mesh)]
        elif options.strategy == "fsdp" and dist.is_initialized():
            sharded = [item for item in trained if fits(item)]
        else:
            sharded = []
        sharded_set = set(sharded)
        replicated = [item for item in trained if item not in sharded_set]
        groups: list[ParameterGroup] = []
        if sharded and options.strategy == "zero1":
            groups.append(ZeroParameters(sharded, self.mesh, self._reducer))
        elif sharded:
            ignored = {item.param for item in replicated}
            # Zero-bubble schedules look up a stage's weights between forward and backward, and silently omit the
            # gradients of resharded ones. Other schedules would gather the weights for each micro-batch.
            reshard = options.reshard_after_forward and self.mesh.size("pp") == 1
            groups.append(FSDPParameters(stages, sharded, ignored, self.mesh, self._reducer, reshard))
        groups.append(ReplicatedParameters(replicated, self.mesh, self._reducer))
        return groups

    def _with_compute_dtype(self, trained: LocalParameter) -> LocalParameter:
        options = self.options
        if options.dtype is None or trained.param.dtype == torch.float64:
            return trained
        full_precision = any(fnmatchcase(trained.name, pattern) for pattern in options.full_precision)
        return replace(trained, dtype=torch.float32 if full_precision else options.dtype)

    def _sum_tied(self) -> None:
        """Sum the gradients of tied copies: on this rank (V-shaped schedules), or on the first and last stage."""
        copies = [owned for owned in self._owned if owned.name in self.tied]
        if not copies:
            return
        grads = [owned.value.grad for owned in copies]
        total = grads[0]
        assert total is not None
        for grad in grads[1:]:
            assert grad is not None
            total = total + grad
        if len(copies) == 1 and self.mesh.tied_group is not None:
            total = sum_values(total, self.mesh.tied_group)
        for owned in copies:
            owned.value.grad = total.clone() if len(copies) > 1 else total
