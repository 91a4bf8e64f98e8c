"""Programs: several launches and their buffers, which are recorded once and then repeated without their checks.

    first call of a shape    run the body: operators check inputs, choose tiles, allocate, and launch
    second call              run the body, and record its launches: grids, numbers, and the buffer of each address
    later calls              allocate the results and one workspace for all other buffers, and launch in one native call

A launch of an operator takes most of its time in checks and look-ups, which have the same results for inputs of the
same shapes, strides, dtypes and alignment. A program is only repeated if its body did nothing but launch kernels and
allocate.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_comm.gpu.record import BufferIndex, new_record
from moe_comm.kernels.recording import Number, recorded
from moe_comm.kernels.tensor_cores import current_stream
from moe_comm.kernels.triton import launch as launches
from moe_comm.kernels.triton.launch import Matrix

if TYPE_CHECKING:
    from moe_comm import _C

Results = tuple[Any, ...]
"""Tensors, or None."""
ALIGNMENT = 512
"""Alignment of buffers in a workspace, that of torch's allocator."""
MAX_SHAPES = 1024
"""Maximum number of shapes that a program remembers."""
_HARMLESS = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "view", "_unsafe_view",
                 "as_strided", "slice", "select", "detach", "alias", "t", "transpose", "expand", "unsqueeze", "squeeze")
)  # fmt: skip
"""Operators that change no value."""


class _OtherOperators(TorchDispatchMode):
    """Finds operators that a repetition would leave out."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or func._schema.name not in _HARMLESS
        return func(*args, **(kwargs or {}))


class _Plan(NamedTuple):
    """Recorded launches. outputs: shape, dtype and strides (None: contiguous) of each result, or None. workspace: bytes
    of all other buffers. record: takes the addresses of inputs, results and the workspace, and then the numbers of the
    call."""

    record: _C.GpuRecord
    outputs: list[tuple[tuple[int, ...], torch.dtype, tuple[int, ...] | None] | None]
    workspace: int

    def run(self, inputs: tuple[Tensor | None, ...], numbers: tuple[int, ...]) -> Results:
        """Allocate and launch."""
        device = inputs[0].device  # type: ignore[union-attr]
        bases, results = [], []
        for t in inputs:  # loops: comprehensions are functions of their own
            bases.append(0 if t is None else t.data_ptr())
        for output in self.outputs:
            result = None
            if output is not None:
                shape, dtype, strides = output
                if strides is None:
                    result = torch.empty(shape, dtype=dtype, device=device)
                else:
                    result = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            results.append(result)
            bases.append(0 if result is None else result.data_ptr())
        workspace = torch.empty(self.workspace, dtype=torch.uint8, device=device) if self.workspace else None
        bases.append(0 if workspace is None else workspace.data_ptr())
        bases += numbers
        self.record.run(bases, current_stream(device))
        return tuple(results)


class Program:
    """A function that launches kernels. Inputs and results are tensors; results are dense, in any order of
    dimensions, and not views.

    Args:
        body: takes the inputs, hashable constants, and then numbers, and returns the results. The values of constants
            must determine, together with the inputs' shapes, strides and dtypes, all that the body does, except for
            launches with a ``Number``.
    """

    def __init__(self, body: Callable[..., Results]) -> None:
        self._body = body
        self._plans: dict[Any, _Plan | bool] = {}

    def __call__(
        self, operators: int, inputs: tuple[Tensor | None, ...], *constants: Any, numbers: tuple[int, ...] = ()
    ) -> Results:
        """Run the body on ``inputs``.

        Args:
            operators: Number of operators that kernels of the body compute. If another number is recorded, the body
                is not repeated.
            inputs: The first one is not None.
            numbers: Those of this call, at most 63 bits each.
        """
        key: list[Any] = [constants]
        for t in inputs:
            if t is None:
                key.append(None)
                continue
            if t.data_ptr() & 15:
                return self._body(*inputs, *constants, *numbers)
            key += (t.shape, t.stride(), t.dtype, t.device)
        if not launches.repeats(inputs[0].device):  # type: ignore[union-attr]
            return self._body(*inputs, *constants, *numbers)
        found = self._plans.get(shape := tuple(key))
        if type(found) is _Plan:
            return found.run(inputs, numbers)
        if found is False:
            return self._body(*inputs, *constants, *numbers)
        if found is None:
            if len(self._plans) >= MAX_SHAPES:
                self._plans.pop(next(iter(tuple(self._plans))), None)  # the oldest
            self._plans[shape] = True  # record the next call
            return self._body(*inputs, *constants, *numbers)
        results, plan = _record(self._body, inputs, (*constants, *numbers), operators)
        self._plans[shape] = False if plan is None else plan
        return results


def _record(
    body: Callable[..., Results], inputs: tuple[Tensor | None, ...], constants: tuple[Any, ...], operators: int
) -> tuple[Results, _Plan | None]:
    with recorded() as steps, _OtherOperators() as others:
        results = body(*inputs, *constants)
    bounds = [None if t is None else _bounds(t) for t in (*inputs, *results)]
    used = sorted(bound for bound in bounds if bound is not None)
    separate = all(before[1] <= after[0] for before, after in pairwise(used)) and all(a < b for a, b in used)
    whole = all(
        t is None or (_is_dense(t) and t.untyped_storage().nbytes() == t.numel() * t.element_size()) for t in results
    )
    if sum(step.operators for step in steps) != operators:
        return results, None
    if others.found or not separate or not whole:
        return results, None
    workspace_at: dict[int, int] = {}
    size = 0
    buffers: list[tuple[int, int]] = []

    def index_of(t: Tensor) -> BufferIndex:
        nonlocal size
        address, storage = t.data_ptr(), t.untyped_storage()
        for base, bound in enumerate(bounds):
            if bound is not None and bound[0] <= address < bound[1]:
                place = base, address - bound[0]
                break
        else:
            first = storage.data_ptr()
            if first not in workspace_at:
                workspace_at[first] = size
                size += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
            place = len(bounds), workspace_at[first] + address - first
        return index_at(place)

    def index_at(place: tuple[int, int]) -> BufferIndex:
        if place not in buffers:
            buffers.append(place)
        return BufferIndex(buffers.index(place))

    def recorded_arg(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return index_of(arg)
        if type(arg) is Number:
            return index_at((len(bounds) + 1 + arg.which, arg.added))
        return arg._replace(tensor=index_of(arg.tensor)) if type(arg) is Matrix else arg

    arguments = [[recorded_arg(arg) for arg in step.args] for step in steps]
    record = new_record(inputs[0].device.index, buffers)  # type: ignore[union-attr]
    for step, args in zip(steps, arguments, strict=True):
        if step.add is None or not step.add(record, step.grid, args):
            return results, None
    outputs = [
        None if t is None else (tuple(t.shape), t.dtype, None if t.is_contiguous() else t.stride()) for t in results
    ]
    return results, _Plan(record, outputs, size)


def _is_dense(t: Tensor) -> bool:
    """Return whether a tensor is contiguous after a permutation, as gradients of transposed weights are."""
    order = sorted(range(t.dim()), key=t.stride, reverse=True)
    return t.permute(order).is_contiguous()


def _bounds(t: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor, and the one behind its last element."""
    elements = (
        1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    )
    return t.data_ptr(), t.data_ptr() + elements * t.element_size()
