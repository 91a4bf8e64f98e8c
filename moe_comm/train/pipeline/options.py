"""Options of the runners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import nn

from moe_comm.runtime.seconds import seconds_of


class GradientSync(Protocol):
    """Reduces gradients during backward passes; implemented by ``DataParallel``."""

    def begin_backward(self, stage: nn.Module) -> None: ...

    def end_backward(self, stage: nn.Module) -> None: ...

    def wait_weights(self) -> None: ...


@dataclass(frozen=True, eq=False)
class RunnerOptions:
    """How a runner executes the passes of a step.

    Attributes:
        timeout_s: seconds that a stage waits for another one. It must be longer than the slowest step.
        split_backward: False for models that recompute whole layers in backward (``torch.utils.checkpoint``), which a
            split backward would recompute for input gradients and again for weight gradients. The order of the schedule
            is kept, but weight gradients are computed together with input gradients.
        gradients: reduces gradients during the last backward pass of each stage in a step. With a split backward, the
            last pass is one of weight gradients.
        interleave: run two micro-batches at a time (``layers/parallel/interleave.py``), so that the communication of
            one overlaps with the computation of the other. A step then requires an even number of micro-batches. A
            pipeline treats two consecutive ones as one: half of them must fit the schedule, whose bubble is that of
            half as many micro-batches. With "dualpipev", the forward pass of each pair also runs while transfers of its
            backward pass are in flight, except with FSDP. Losses and gradients have the same bits.
    """

    timeout_s: float = 600.0
    split_backward: bool = True
    gradients: GradientSync | None = None
    interleave: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeout_s", seconds_of("timeout_s", self.timeout_s))

    @property
    def turns(self) -> int:
        """Number of micro-batches that run together."""
        return 2 if self.interleave else 1
