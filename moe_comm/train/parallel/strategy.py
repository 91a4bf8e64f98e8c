"""Data parallelism: one interface over plain replication, ZeRO-1 and FSDP2.

Every gradient is a plain sum over the ranks that hold the parameter (the loss is already divided by the step's global
number of tokens), so no strategy divides by anything and experts need no scale of their own.

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
from moe_comm.train.parallel.compress import Traffic, Wire
from moe_comm.train.parallel.fsdp import Sharded, fits
from moe_comm.train.parallel.owned import Held, Owned, hold
from moe_comm.train.parallel.replicate import Replicated
from moe_comm.train.parallel.zero import Dealt

Strategy = Literal["replicate", "zero1", "fsdp"]


@dataclass(frozen=True)
class DataParallelOptions:
    """How data-parallel ranks share the work of one parameter.

    strategy: what they keep of the same weights: all ("replicate"), all but optimizer state and masters ("zero1"), or
        its share of everything ("fsdp"). On one rank without a process group all are the same.
    dtype: in which parameters compute, with fp32 masters and gradients; None: each in its own.
    full_precision: parameters (by name, * for any text) that compute in fp32 whatever ``dtype`` says.
    compress: gradients travel as bf16 and are added in fp32; see ``compress``.
    bucket_bytes: gradients travel together up to this size.
    reshard_after_forward: FSDP frees a block's gathered weights after its forward pass, and gathers them again. Not
        done under pipeline parallelism.
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


class Part(Protocol):
    """Some of the parameters, all kept in one way."""

    @property
    def owned(self) -> list[Owned]: ...

    def zero_grad(self) -> None: ...

    def reduce(self) -> None: ...

    def publish(self) -> None: ...


class DataParallel:
    """The trained parameters of one rank: what its optimizer updates, and how gradients and new weights travel.

    Make it after the weights are initialised, on every rank alike; collective.

    Args:
        modules: this rank's pipeline stages. Parameter names are those of the whole model.
        shardings: of parameters by name; one that is missing is dense and replicated.
        tied: names of the copies of one parameter that lie on the first and the last pipeline stage (a tied
            embedding and output layer). Their gradients are added up, and norms count the first stage's alone.

    Raises:
        ConfigError: a parameter's shape contradicts its sharding, or FSDP cannot spread it.
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
        self._wire = Wire(options.compress, options.bucket_bytes)
        held = [self._computing(item) for item in hold(stages, shardings, mesh)]
        self._parts = self._make(stages, held)
        names = [item.name for item in held]
        found = {owned.name: owned for part in self._parts for owned in part.owned}
        counted = next((name for name in names if name in self.tied), None) if mesh.place["pp"] == 0 else None
        self._owned = [replace(found[name], counted=name not in self.tied or name == counted) for name in names]

    @property
    def traffic(self) -> Traffic:
        """Bytes sent so far (those of FSDP's own collectives are not in it, except compressed gradients)."""
        return self._wire.traffic

    def owned(self) -> list[Owned]:
        """What this rank's optimizer updates, in the same order on every rank of the stage."""
        return list(self._owned)

    def zero_grad(self) -> None:
        """Forget all gradients; before the first backward pass of a step."""
        for part in self._parts:
            part.zero_grad()

    def reduce(self) -> None:
        """Sum gradients over ranks into ``grad`` of what each rank owns; absent ones count as zero. Collective."""
        for part in self._parts:
            part.reduce()
        self._add_tied()

    def publish(self) -> None:
        """Bring the new values of what ranks own into the model's parameters. Collective; also after a load."""
        for part in self._parts:
            part.publish()

    def _make(self, stages: list[nn.Module], held: list[Held]) -> list[Part]:
        options = self.options
        if options.strategy == "zero1":
            spread = [item for item in held if Dealt.fits(item, self.mesh)]
        elif options.strategy == "fsdp" and dist.is_initialized():
            spread = [item for item in held if fits(item)]
        else:
            spread = []
        chosen = set(spread)
        rest = [item for item in held if item not in chosen]
        parts: list[Part] = []
        if spread and options.strategy == "zero1":
            parts.append(Dealt(spread, self.mesh, self._wire))
        elif spread:
            ignored = {item.param for item in rest}
            # Zero-bubble schedules look for a stage's weights between forward and backward, and silently leave out
            # the gradients of those that FSDP has put away; other schedules would gather them for each micro-batch.
            reshard = options.reshard_after_forward and self.mesh.size("pp") == 1
            parts.append(Sharded(stages, spread, ignored, self.mesh, self._wire, reshard))
        parts.append(Replicated(rest, self.mesh, self._wire))
        return parts

    def _computing(self, held: Held) -> Held:
        options = self.options
        if options.dtype is None or held.param.dtype == torch.float64:
            return held
        kept = any(fnmatchcase(held.name, pattern) for pattern in options.full_precision)
        return replace(held, dtype=torch.float32 if kept else options.dtype)

    def _add_tied(self) -> None:
        """Add up the gradients of a parameter's copies: on this rank (schedules shaped like a V), or at both ends."""
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
