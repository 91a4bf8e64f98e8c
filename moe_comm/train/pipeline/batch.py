"""Inputs of a pipeline, and the interface of its stage modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_comm.errors import ConfigError, InputError
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.parallel.interleave import StageInput, Steps, TurnParameters


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of this rank, the same on all stages of its pipeline.

    Attributes:
        ids_BS: int64 [B, S] token ids of this rank's context-parallel shard.
        targets_BS: int64 [B, S] targets.
        positions_BS: positions of the tokens; None: 0..S-1.
        documents: boundaries of packed documents, as attention takes them.
        mask_BS: bool, False for padding, which MoE layers skip; None: no padding.
    """

    ids_BS: Tensor
    targets_BS: Tensor
    positions_BS: Tensor | None = None
    documents: Any = None
    mask_BS: Tensor | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of a stage's module. The mask is passed only if there is one."""
        mask = {} if self.mask_BS is None else {"mask": self.mask_BS}
        return {"positions": self.positions_BS, "documents": self.documents, **mask}


class StageModule(Protocol):
    """Interface of a pipeline stage's module, such as ``Transformer``; also an ``nn.Module``."""

    def __call__(self, x: Tensor, *, positions: Tensor | None, documents: Any, mask: Tensor | None = None) -> Tensor:
        """Return x_BSD for token ids [B, S] on the first stage, or x_BSD on other stages."""
        ...

    def forward_in_turns(self, inputs: Sequence[StageInput]) -> tuple[Tensor, ...]:
        """Run interleaved micro-batches, which hides their communication."""
        ...

    def forward_steps(self, inputs: Sequence[StageInput]) -> Steps[tuple[Tensor, ...]]:
        """Run ``forward_in_turns``, but yield where other work can hide transfers in flight."""
        ...

    def moe_layers(self) -> Iterable[MoELayer]:
        """Return the MoE layers."""
        ...

    def losses_in_turns(self, hidden: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return ``loss`` of interleaved micro-batches."""
        ...

    @property
    def turn_parameters(self) -> TurnParameters:
        """Leaves of the parameters that these micro-batches use."""
        ...

    def loss(self, hidden_BSD: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the sum of the token losses, a scalar. Called only on the last stage."""
        ...


@dataclass(frozen=True)
class ActivationShape:
    """Shape and dtype of the activations sent between stages: x_BSD [B, S / sequence_parts, hidden].

    Args:
        hidden: hidden size.
        dtype: dtype of the activations.
        sequence_parts: ranks over which the activations of a sequence are sharded in addition to the token ids
            (sequence parallelism: tp).
    """

    hidden: int
    dtype: torch.dtype
    sequence_parts: int = 1

    def shape(self, ids_BS: Tensor) -> tuple[int, int, int]:
        """Return the shape of the activations of ``ids_BS``."""
        batch, length = ids_BS.shape
        if length % self.sequence_parts:
            raise ConfigError(
                f"sequences of {length} tokens per rank cannot be split evenly over tp = {self.sequence_parts} ranks"
            )
        return batch, length // self.sequence_parts, self.hidden


def check_batches(batches: Sequence[MicroBatch]) -> None:
    """Raise ``InputError`` unless all micro-batches have the same shape, which the buffers between stages require."""
    if not batches:
        raise InputError("a step requires at least one micro-batch; got none")
    shape = tuple(batches[0].ids_BS.shape)
    for index, batch in enumerate(batches):
        if len(shape) != 2 or tuple(batch.ids_BS.shape) != shape or tuple(batch.targets_BS.shape) != shape:
            raise InputError(
                f"all micro-batches must have ids and targets of the same shape [B, S]; micro-batch 0 has ids {shape}, "
                f"micro-batch {index} has ids {tuple(batch.ids_BS.shape)} and targets {tuple(batch.targets_BS.shape)}"
            )
