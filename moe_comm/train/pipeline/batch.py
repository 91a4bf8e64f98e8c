"""What goes into a pipeline, and what its stages must be able to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moe_comm.errors import ConfigError, InputError
from moe_comm.layers.parallel.interleave import StageInput


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch as this rank sees it; the same on every stage of its pipeline.

    ids_BS, targets_BS: int64 [B, S] of this rank's context-parallel part. positions_BS: of the tokens; None: 0..S-1.
    documents: where packed documents begin, as attention takes it.
    """

    ids_BS: Tensor
    targets_BS: Tensor
    positions_BS: Tensor | None = None
    documents: Any = None


class StageModule(Protocol):
    """A part of a model, such as ``Transformer``, of which a pipeline stage is made; also an ``nn.Module``."""

    def __call__(self, x: Tensor, *, positions: Tensor | None, documents: Any) -> Tensor:
        """Token ids [B, S] on the first stage, x_BSD on others, to x_BSD."""
        ...

    def forward_in_turns(self, inputs: Sequence[StageInput]) -> tuple[Tensor, ...]:
        """The same for several micro-batches at once; asked of a whole model alone, and where they are interleaved."""
        ...

    def loss(self, hidden_BSD: Tensor, targets_BS: Tensor) -> Tensor:
        """Scalar sum of the tokens' losses; asked of the last stage alone."""
        ...


@dataclass(frozen=True)
class Activations:
    """What travels between stages: x_BSD [B, S / sequence_parts, hidden].

    sequence_parts: ranks over which a sequence's activations are cut beyond the cut of the ids (sequence
        parallelism: tp).
    """

    hidden: int
    dtype: torch.dtype
    sequence_parts: int = 1

    def shape(self, ids_BS: Tensor) -> tuple[int, int, int]:
        """Of the activations that belong to ``ids_BS``."""
        batch, length = ids_BS.shape
        if length % self.sequence_parts:
            raise ConfigError(
                f"sequences of {length} tokens a rank cannot be cut evenly over tp = {self.sequence_parts} ranks"
            )
        return batch, length // self.sequence_parts, self.hidden


def check_batches(batches: Sequence[MicroBatch]) -> None:
    """Refuse micro-batches of different shapes: buffers between stages are made for one.

    Raises:
        InputError: says which micro-batch differs.
    """
    if not batches:
        raise InputError("a step needs at least one micro-batch; got none")
    shape = tuple(batches[0].ids_BS.shape)
    for place, batch in enumerate(batches):
        if len(shape) != 2 or tuple(batch.ids_BS.shape) != shape or tuple(batch.targets_BS.shape) != shape:
            raise InputError(
                f"every micro-batch needs ids and targets of one shape [B, S]; number 0 has ids {shape}, "
                f"number {place} ids {tuple(batch.ids_BS.shape)} and targets {tuple(batch.targets_BS.shape)}"
            )


def device_of(modules: Sequence[nn.Module], fallback: torch.device) -> torch.device:
    """Where the modules' parameters are; ``fallback`` where they have none."""
    return next((p.device for module in modules for p in module.parameters()), fallback)
