"""Activation recomputation: tensors that backward computes again instead of storing them in the forward pass.

    mode        recomputed in backward
    none        nothing
    selective   cheap operators: RMSNorm and its internals, the tensor-parallel gather after it, the rotation of
                normalized heads, SwiGLU, and the router's fp32 copy of its input. Outputs of GEMMs, attention and
                dispatch are stored. So no GEMM is repeated, and no communication except that gather (the list of
                MegaScale-MoE, arXiv 2505.11432, except for the dispatched rows)
    full        each layer from its input, including its collectives and dispatch

Checkpointing alone cannot drop the *output* of an operator, because the next operator saves it as its input. Inside
``selective_recompute``, a value computed by ``recomputed`` is replaced by the call that computes it, wherever autograd
saves the value or a view of it:

    x ──recomputed(norm)──▶ y ──▶ q = y Wqᵀ   autograd would save y  ┐
                            ├──▶ k = y Wkᵀ   the same y              ├ all save a reference to "norm of x", which is
                            └──▶ v = y Wvᵀ   the same y              ┘ computed once in backward, and freed after use

Losses and gradients have the same bits in all three modes, and routers count their tokens once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_comm.errors import ConfigError

Fn = Callable[..., Tensor]
T = TypeVar("T")


class _RecomputedValue:
    """A value that is computed by ``fn`` when backward needs it, from inputs that are stored or recomputed."""

    def __init__(self, fn: Fn, inputs: list[Tensor | _RecomputedView], device: str) -> None:
        self._fn, self._inputs, self._device = fn, inputs, device
        self._autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        self._uses = self._uses_left = 0
        self._value: Tensor | None = None

    def add_use(self) -> None:
        """Count one more tensor that autograd saves as a reference to this value."""
        self._uses += 1
        self._uses_left += 1

    def get(self) -> Tensor:
        """Return the value. It is freed when each saved reference has read it once."""
        value = self._value
        if value is None:
            enabled, dtype = self._autocast
            with torch.no_grad(), torch.autocast(self._device, dtype, enabled=enabled):
                value = self._fn(*(x.get() if isinstance(x, _RecomputedView) else x for x in self._inputs))
        self._uses_left -= 1
        if self._uses_left > 0:
            self._value = value
        else:
            # Reset for a split or repeated backward pass.
            self._value, self._uses_left = None, self._uses
        return value


@dataclass(frozen=True)
class _RecomputedView:
    """A view of a recomputed value."""

    value: _RecomputedValue
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def get(self) -> Tensor:
        return self.value.get().as_strided(self.size, self.stride, self.offset)


class _Scope:
    """The values computed by ``recomputed`` so far, by the address of their memory, which the scope keeps alive."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[_RecomputedValue, Tensor]] = {}

    def add(self, fn: Fn, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        address = _address(y)
        full = y.storage_offset() == 0 and y.untyped_storage().nbytes() == y.numel() * y.element_size()
        if not address or not full or any(_address(x) == address for x in inputs):
            return  # a view or an alias of an input needs no memory of its own
        sources: list[Tensor | _RecomputedView] = []
        for x in inputs:
            packed = self.pack(x)
            sources.append(x.detach() if packed is x else packed)
        self._values[address] = _RecomputedValue(fn, sources, y.device.type), y

    def close(self) -> None:
        """Release the values, even if hooks still reference the scope."""
        self._values.clear()

    def pack(self, x: Tensor) -> Tensor | _RecomputedView:
        """Return a view of the recomputed value whose memory ``x`` uses, or ``x`` itself."""
        value, y = self._values.get(_address(x), (None, x))
        if value is None or y.dtype != x.dtype:
            return x
        value.add_use()
        return _RecomputedView(value, tuple(x.shape), x.stride(), int(x.storage_offset()))


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _unpack(x: Tensor | _RecomputedView) -> Tensor:
    return x.get() if isinstance(x, _RecomputedView) else x


_active = threading.local()


def recomputing() -> bool:
    """Return whether a forward pass is a recomputation by activation checkpointing.

    This is so if a backward pass is running, except inside ``new_forward``.
    """
    return torch._C._current_graph_task_id() != -1 and not getattr(_active, "new_forward", False)


@contextlib.contextmanager
def new_forward() -> Iterator[None]:
    """Context of the forward pass of another micro-batch inside a backward pass."""
    _active.new_forward = True
    try:
        with torch.enable_grad():  # off in a backward pass
            yield
    finally:
        _active.new_forward = False


def recomputed(fn: Fn, *inputs: Tensor) -> Tensor:
    """Return ``fn(*inputs)``; inside ``selective_recompute``, autograd saves the call instead of the result.

    Args:
        fn: a deterministic function. Tensors that it saves for its own backward are stored; use ``recomputed_block`` if
            these are large.
    """
    y = fn(*inputs)
    scope: _Scope | None = getattr(_active, "scope", None)
    if scope is not None and y.requires_grad:
        scope.add(fn, inputs, y)
    return y


def recomputed_block(fn: Fn, *inputs: Tensor) -> Tensor:
    """Run ``recomputed`` for a function or module of several operators, and drop their intermediate tensors as well."""
    if getattr(_active, "scope", None) is None:
        return fn(*inputs)
    y: Tensor = checkpoint(fn, *inputs, use_reentrant=False, preserve_rng_state=False)
    if y.requires_grad:
        _active.scope.add(fn, inputs, y)
    return y


@contextlib.contextmanager
def selective_recompute() -> Iterator[None]:
    """Apply selective recomputation to the forward pass inside the context. Contexts do not nest."""
    scope = _Scope()
    try:
        with _enter_scope(scope):
            yield
    finally:
        scope.close()


@contextlib.contextmanager
def _enter_scope(scope: _Scope) -> Iterator[None]:
    _active.scope = scope
    try:
        with torch.autograd.graph.saved_tensors_hooks(scope.pack, _unpack):
            yield
    finally:
        _active.scope = None


def run_layer(recompute: str, fn: Callable[..., T], *args: Any) -> T:
    """Run ``fn(*args)``, a layer's forward pass, with recomputation mode ``recompute``."""
    if recompute == "none" or not torch.is_grad_enabled():
        return fn(*args)
    if recompute == "selective":
        with selective_recompute():
            return fn(*args)
    # Layers have no dropout, so the states of random generators are not needed.
    y: T = checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)
    return y


def run_layer_in_steps(recompute: str, steps: Generator[None, None, Tensor]) -> Generator[None, None, Tensor]:
    """Run ``run_layer`` for a layer whose forward pass yields to other work.

    The scope of selective recomputation is left at each ``yield``, so that layers of several micro-batches can
    alternate.

    Raises:
        ConfigError: ``recompute`` is "full", which needs an uninterrupted forward pass.
    """
    if recompute == "none" or not torch.is_grad_enabled():
        return (yield from steps)
    if recompute != "selective":
        raise ConfigError(
            f'a layer with recompute {recompute!r} cannot be interleaved; set recompute to "selective" or "none"'
        )
    scope = _Scope()
    try:
        while True:
            with _enter_scope(scope):
                try:
                    next(steps)
                except StopIteration as end:
                    y: Tensor = end.value
                    return y
            yield
    finally:
        scope.close()
