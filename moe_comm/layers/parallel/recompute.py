"""What backward computes again instead of keeping it from the forward pass.

    none        nothing
    selective   what is cheap: RMSNorm and what it keeps inside, the tensor-parallel gather after it, the rotation of
                normalised heads, SwiGLU, and the router's wide copy of its input. Kept are the outputs of products
                and of attention, and what dispatch moved; so no product is computed twice, and nothing but that
                gather travels twice (MegaScale-MoE's list, arXiv 2505.11432, but for the dispatched rows)
    full        every layer from its input on, whose collectives and dispatch run again in backward

Selective recomputation drops *outputs*, which checkpointing alone does not: the layer after keeps its input. A value
that is made by ``again`` inside ``keeping_less`` is replaced, wherever autograd saves it or a view of it, by the call
that makes it:

    x ──again(norm)──▶ y ──▶ q = y Wqᵀ   autograd would save y     ┐
                       ├──▶ k = y Wkᵀ   the same y                 ├ all save a note "norm of x", computed once
                       └──▶ v = y Wvᵀ   the same y                 ┘ in backward, dropped after the last use

Losses and gradients have the same bits in all three, and routers count their tokens once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from moe_comm.errors import ConfigError

Fn = Callable[..., Tensor]


class _Value:
    """A tensor that can be computed again: ``fn`` of inputs, each kept as it is or computed again itself."""

    def __init__(self, fn: Fn, inputs: list[Tensor | _View], device: str) -> None:
        self._fn, self._inputs, self._device = fn, inputs, device
        self._autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        self._uses = self._left = 0
        self._made: Tensor | None = None

    def will_be_used(self) -> None:
        """Autograd saves it once more."""
        self._uses += 1
        self._left += 1

    def get(self) -> Tensor:
        """The value; it stays until it was asked for as often as it was saved."""
        made = self._made
        if made is None:
            enabled, dtype = self._autocast
            with torch.no_grad(), torch.autocast(self._device, dtype, enabled=enabled):
                made = self._fn(*(x.get() if isinstance(x, _View) else x for x in self._inputs))
        self._left -= 1
        if self._left > 0:
            self._made = made
        else:
            # A backward pass in two parts, or one that is run again, begins anew.
            self._made, self._left = None, self._uses
        return made


@dataclass(frozen=True)
class _View:
    """A view of a value."""

    value: _Value
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def get(self) -> Tensor:
        return self.value.get().as_strided(self.size, self.stride, self.offset)


class _Scope:
    """The values made by ``again`` so far, by the address of their memory, which they hold on to."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[_Value, Tensor]] = {}

    def add(self, fn: Fn, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        address = _address(y)
        whole = y.storage_offset() == 0 and y.untyped_storage().nbytes() == y.numel() * y.element_size()
        if not address or not whole or any(_address(x) == address for x in inputs):
            return  # nothing is saved by computing a view of something else again
        kept: list[Tensor | _View] = []
        for x in inputs:
            found = self._view(x)
            if found is not None:
                found.value.will_be_used()
            kept.append(x.detach() if found is None else found)
        self._values[address] = _Value(fn, kept, y.device.type), y

    def close(self) -> None:
        """Let go of the values, whoever still holds the hooks."""
        self._values.clear()

    def pack(self, x: Tensor) -> Tensor | _View:
        view = self._view(x)
        if view is None:
            return x
        view.value.will_be_used()
        return view

    def _view(self, x: Tensor) -> _View | None:
        found = self._values.get(_address(x))
        if found is None or found[1].dtype != x.dtype:
            return None
        return _View(found[0], tuple(x.shape), x.stride(), int(x.storage_offset()))


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _unpack(x: Tensor | _View) -> Tensor:
    return x.get() if isinstance(x, _View) else x


_active = threading.local()


def again(fn: Fn, *inputs: Tensor) -> Tensor:
    """``fn(*inputs)``; inside ``keeping_less`` autograd keeps the call instead of the result.

    Args:
        fn: gives the same bits for the same inputs. Outside of ``keeping_less`` it is just called. What it saves
            for its own backward stays; use ``again_inside`` where that is much.
    """
    y = fn(*inputs)
    scope: _Scope | None = getattr(_active, "scope", None)
    if scope is not None and y.requires_grad:
        scope.add(fn, inputs, y)
    return y


def again_inside(fn: Fn, *inputs: Tensor) -> Tensor:
    """``again`` for a function of several steps, which are not kept either. It may be a module with parameters."""
    if getattr(_active, "scope", None) is None:
        return fn(*inputs)
    y: Tensor = checkpoint(fn, *inputs, use_reentrant=False, preserve_rng_state=False)
    if y.requires_grad:
        _active.scope.add(fn, inputs, y)
    return y


@contextlib.contextmanager
def keeping_less() -> Iterator[None]:
    """Selective recomputation for the forward pass inside: see the module's text. Scopes do not nest."""
    scope = _Scope()
    try:
        with _inside(scope):
            yield
    finally:
        scope.close()


@contextlib.contextmanager
def _inside(scope: _Scope) -> Iterator[None]:
    _active.scope = scope
    try:
        with torch.autograd.graph.saved_tensors_hooks(scope.pack, _unpack):
            yield
    finally:
        _active.scope = None


def run_layer(recompute: str, fn: Callable[..., Tensor], *args: Any) -> Tensor:
    """``fn(*args)``, a layer's forward pass, with what ``recompute`` says."""
    if recompute == "none" or not torch.is_grad_enabled():
        return fn(*args)
    if recompute == "selective":
        with keeping_less():
            return fn(*args)
    # No dropout anywhere, so the generators' states need not be kept.
    y: Tensor = checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)
    return y


def run_layer_in_steps(recompute: str, steps: Generator[None, None, Tensor]) -> Generator[None, None, Tensor]:
    """``run_layer`` of a layer whose forward pass gives way to other work at every ``yield``.

    A scope of selective recomputation is left at each and entered again after it, so that layers of several
    micro-batches can take turns.

    Raises:
        ConfigError: ``recompute`` is "full", which keeps a layer's input and runs it from there in one go.
    """
    if recompute == "none" or not torch.is_grad_enabled():
        return (yield from steps)
    if recompute != "selective":
        raise ConfigError(
            f'a layer with recompute {recompute!r} cannot take turns with another; set it to "selective" or "none"'
        )
    scope = _Scope()
    try:
        while True:
            with _inside(scope):
                try:
                    next(steps)
                except StopIteration as end:
                    y: Tensor = end.value
                    return y
            yield
    finally:
        scope.close()


class _Seen(TorchDispatchMode):
    """Notes the memory of every tensor that operations read or write."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()
                # By address: views that native code makes of one block are different storages.
                self.storages[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return out


def activation_bytes(forward: Callable[[], Any], besides: Iterable[Tensor] = ()) -> int:
    """Bytes that ``forward`` keeps for backward: the memory alive after it that was not there before.

    Measured, not estimated: every block of memory that an operation touched and that something still holds when
    ``forward`` has returned, its result included.

    Args:
        forward: runs with autograd and returns what holds the graph (the loss, or hidden states).
        besides: tensors that are not counted: parameters, buffers, inputs.
    """
    before = {tensor.untyped_storage().data_ptr() for tensor in besides}
    with _Seen() as seen:
        result = forward()
    alive = {at: size for at, (ref, size) in seen.storages.items() if at not in before and not ref.expired()}
    del result
    return sum(alive.values())
