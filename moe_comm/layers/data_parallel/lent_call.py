"""A call that lends experts (``lending.py``): what its experts compute with, and memory for their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_comm.comm.shared_channel import SharedChannel
from moe_comm.comm.sparse_rows import aligned_bytes, new_block
from moe_comm.kernels.expert_mlp import ExpertMLP, Gradients
from moe_comm.layers.data_parallel.copies import Values
from moe_comm.layers.data_parallel.lent_adapters import Adapters
from moe_comm.runtime.memory import warm_rows

Orient = Callable[[Values], Sequence[Tensor | None]]
"""Returns the tensors of an ``ExpertMLP`` for those of parameters; None for missing ones."""


class LentGradients:
    """The gradients of the experts of a call, in fp32 or a wider dtype. Allocated when backward asks for them.

    Args:
        params: the trained parameters, of one dtype.
        slots: number of experts in the stacks: this rank's, and those lent to it whose weights have been sent.
        others: number of experts whose weights are read in place. None: ranks do not read weights in place.
        channel: where gradients of ``others`` are shared, if there is room.

    Attributes:
        stacks: [slots, ...] by name of the parameter.
        others: [others, ...] by name; {} if weights are not read in place.
        memory: the shared memory that has ``others``; None: elsewhere.
    """

    def __init__(self, params: Values, slots: int, others: int | None, channel: SharedChannel) -> None:
        self._params, self._slots, self._count, self._channel = params, slots, others, channel
        self.stacks: dict[str, Tensor] = {}
        self.others: dict[str, Tensor] = {}
        self.memory: Tensor | None = None

    def release(self) -> None:
        """Release the memory."""
        self.stacks, self.others, self.memory = {}, {}, None

    def outputs(self, orient: Orient) -> tuple[Gradients, Gradients]:
        """Return ``stacks`` and ``others`` as the experts write them. orient: returns views."""
        if not self.stacks:
            self._allocate()
        return orient(self.stacks), orient(self.others)

    def _allocate(self) -> None:
        shapes = {name: param.shape[1:] for name, param in self._params.items()}
        param = next(iter(self._params.values()))
        wide, device = torch.promote_types(param.dtype, torch.float32), param.device
        for name, shape in shapes.items():
            self.stacks[name] = warm_rows(self._slots, shape.numel(), wide, device).view(self._slots, *shape)
        if (count := self._count) is None:
            return
        width = sum(shape.numel() for shape in shapes.values())
        stride = aligned_bytes(width * wide.itemsize)
        if count and (block := new_block(self._channel, count * stride)) is not None:
            bytes_, self.memory = block
            rows_NX = bytes_.view(wide).view(count, -1)[:, :width]
        else:
            rows_NX = torch.empty(count, width, dtype=wide, device=device)
        parts = rows_NX.split([shape.numel() for shape in shapes.values()], 1)
        self.others = {
            name: part.unflatten(1, shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }


@dataclass(eq=False, slots=True)
class LentCall:
    """A call with its plan, and what its experts compute with.

    Attributes:
        plan: the plan, a ``CallPlan`` or one on the device.
        slots: slots with rows on this rank, or empty ones before them: its experts, then those that are lent to it.
        values: the parameters, or their stacks. They enter the autograd graph before the dispatch, also if ``lends`` is
            False: interleaved calls get their gradients in the order of the calls, whichever of them lend.
        others: for each lent expert whose weights are not in ``values``, [1, ...] by name of the parameter: they are
            read in place, or in slots beside parameters that FSDP shards.
        gradients: of all these experts; None without a backward pass.
        slots_TK: ids of slots for the dispatch; None: they follow from the plan on the CPU.
        lends: whether experts are lent, or the CPU does not know.
        adapters: of the experts in the slots; {} if no expert is lent.
        receive_adapters: receives those of lent experts. Collective; called once, before the experts run.
        enter: sets ``values``, ``others``, ``gradients`` and ``lends`` when the experts run; None: they are set.
    """

    plan: Any
    slots: int
    values: Values = field(default_factory=dict)
    others: Sequence[Values] = ()
    gradients: LentGradients | None = None
    slots_TK: Tensor | None = None
    lends: bool = True
    adapters: Adapters = field(default_factory=dict)
    receive_adapters: Callable[[], None] = lambda: None
    enter: Callable[[LentCall], None] | None = None

    def entered(self) -> Values:
        """Return ``values``. Call it where the parameters are complete. Collective if ``enter`` is set."""
        if self.enter is not None:
            enter, self.enter = self.enter, None
            enter(self)
        return self.values

    def experts(self, mlp: ExpertMLP, weights: Orient, gradients: Orient, b2_columns: slice | None = None) -> ExpertMLP:
        """Return ``mlp``, which has the tensors of ``values``, with the other experts, and outputs for gradients.

        Args:
            weights, gradients: as ``mlp`` needs them. Gradients are views.
            b2_columns: columns of the last bias that the parameter has; None: all.
        """
        if not self.lends:
            return mlp
        others = tuple(tuple(weights(one)) for one in self.others)
        wide = None if self.gradients is None else partial(self.gradients.outputs, gradients)
        return replace(mlp, others=others, wide=wide, b2_columns=b2_columns)
