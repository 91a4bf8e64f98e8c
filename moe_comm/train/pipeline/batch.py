"""Inputs of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm.errors import ConfigError, InputError


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


@dataclass(frozen=True)
class ActivationShape:
    """Shape and dtype of the activations sent between stages: x_BSD [B, S / sequence_parts, hidden].

    Args:
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


def check_batches(batches: Sequence[MicroBatch], same_shape: bool = True) -> None:
    """Raise ``InputError`` unless the micro-batches have ids and targets of one shape [B, S].

    Args:
        same_shape: the shape must also be the same for all micro-batches, as the buffers between stages require.
    """
    if not batches:
        raise InputError("a step requires at least one micro-batch; got none")
    shape = tuple(batches[0].ids_BS.shape)
    for index, batch in enumerate(batches):
        shape = shape if same_shape else tuple(batch.ids_BS.shape)
        if len(shape) != 2 or tuple(batch.ids_BS.shape) != shape or tuple(batch.targets_BS.shape) != shape:
            raise InputError(
                f"all micro-batches must have ids and targets of the same shape [B, S]; micro-batch 0 has ids {shape}, "
                f"micro-batch {index} has ids {tuple(batch.ids_BS.shape)} and targets {tuple(batch.targets_BS.shape)}"
            )
