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

``SavedActivations`` stores what remains outside of the device's memory, such as the layer's input with "full". It may
also store a recomputed value, if that costs less than computing it again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_comm.errors import ConfigError

Fn = Callable[..., Tensor]
T = TypeVar("T")


class SavedActivations(Protocol):
    """Stores tensors that autograd saves; see ``Saving``."""

    def keep(self, x: Tensor) -> Fn | None:
        """Store ``x`` and return a function that returns it as often as it is called; None: leave it in memory."""

    def prefers(self, layer: str, number: int, seconds: float, nbytes: int) -> bool:
        """Return whether to store recomputed value ``number`` of a layer, which takes ``seconds`` to compute."""


@dataclass(frozen=True, eq=False)
class Saving:
    """Where a call of a layer saves tensors. in_use: tensors that are in memory anyway, such as parameters."""

    store: SavedActivations
    layer: str
    in_use: Callable[[], Iterable[Tensor]]


class _Shared:
    """A value that several saved references read. fetch: returns it."""

    def __init__(self, fetch: Callable[[], Tensor]) -> None:
        self._fetch = fetch
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
            value = self._fetch()
        self._uses_left -= 1
        if self._uses_left > 0:
            self._value = value
        else:
            # Reset for a split or repeated backward pass.
            self._value, self._uses_left = None, self._uses
        return value


class _RecomputedValue(_Shared):
    """A value that is computed by ``fn`` when backward needs it, from inputs that are stored or recomputed.

    number: its position among those of a call of the layer. seconds: duration of its computation; None: it cannot be
    stored instead, because its computation is collective.
    """

    def __init__(self, fn: Fn, inputs: list[_Saved], device: str, number: int, seconds: float | None) -> None:
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        # A bound method would be a cycle, which keeps the inputs until a garbage collection.
        super().__init__(partial(_compute, fn, inputs, device, autocast))
        self.number, self.seconds = number, seconds

    def store(self, fetch: Callable[[], Tensor]) -> None:
        """Read the value from ``fetch`` instead of computing it."""
        self._fetch, self.seconds = fetch, None


def _compute(fn: Fn, inputs: list[_Saved], device: str, autocast: tuple[bool, torch.dtype]) -> Tensor:
    enabled, dtype = autocast
    with torch.no_grad(), torch.autocast(device, dtype, enabled=enabled):
        return fn(*map(_unpack, inputs))


@dataclass(frozen=True)
class _RecomputedView:
    """A view of a recomputed value."""

    value: _RecomputedValue
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def get(self) -> Tensor:
        return self.value.get().as_strided(self.size, self.stride, self.offset)


_Saved = Tensor | _RecomputedView | _Shared
"""What autograd saves in place of a tensor."""


class _Scope:
    """The values computed by ``recomputed`` so far, by the address of their memory, which the scope keeps alive.

    With ``saving``, other tensors are stored. Each is stored once, however often autograd saves it, and stays in memory
    until the end of the scope.
    """

    def __init__(self, recomputes: bool, saving: Saving | None) -> None:
        self.recomputes, self.saving = recomputes, saving
        self._keeping_s = 0.0
        self._values: dict[int, tuple[_RecomputedValue, Tensor]] = {}
        self._stored: dict[tuple[Any, ...], tuple[_Shared | None, Tensor]] = {}

    def add(self, fn: Fn, inputs: tuple[Tensor, ...], y: Tensor, seconds: float | None) -> None:
        address = _address(y)
        full = y.storage_offset() == 0 and y.untyped_storage().nbytes() == y.numel() * y.element_size()
        if not address or not full or any(_address(x) == address for x in inputs):
            return  # a view or an alias of an input needs no memory of its own
        sources = [x.detach() if (packed := self.pack(x)) is x else packed for x in inputs]
        self._values[address] = _RecomputedValue(fn, sources, y.device.type, len(self._values), seconds), y

    def clock(self) -> float:
        """Return the seconds since any point in time, without those in which tensors were stored."""
        return time.perf_counter() - self._keeping_s

    def close(self) -> None:
        """Release the values, even if hooks still reference the scope."""
        self._values.clear()
        self._stored.clear()

    def pack(self, x: Tensor) -> _Saved:
        """Return a view of the recomputed value whose memory ``x`` uses, a stored tensor, or ``x`` itself."""
        value, y = self._values.get(_address(x), (None, x))
        if value is None or y.dtype != x.dtype:
            return x if self.saving is None else self._store(x, self.saving)
        saving = self.saving
        if saving is not None and value.seconds is not None:
            if saving.store.prefers(saving.layer, value.number, value.seconds, y.nbytes):
                fetch = self._keep(y, saving)
                if fetch is not None:
                    value.store(fetch)
            value.seconds = None  # decided
        value.add_use()
        return _RecomputedView(value, tuple(x.shape), x.stride(), int(x.storage_offset()))

    def _store(self, x: Tensor, saving: Saving) -> _Saved:
        address = _address(x)
        key = address, x.storage_offset(), x.shape, x.stride(), x.dtype, x._version
        shared, _ = self._stored.get(key, (None, None))
        if key not in self._stored:
            # FSDP gathers the parameters of some modules only when these run.
            in_use = any(address == _address(tensor) for tensor in saving.in_use())
            fetch = None if in_use else self._keep(x, saving)
            shared = None if fetch is None else _Shared(fetch)
            self._stored[key] = shared, x
        if shared is None:
            return x
        shared.add_use()
        return shared

    def _keep(self, x: Tensor, saving: Saving) -> Fn | None:
        began = time.perf_counter()
        try:
            return saving.store.keep(x)
        finally:
            self._keeping_s += time.perf_counter() - began


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _unpack(x: _Saved) -> Tensor:
    return x if isinstance(x, Tensor) else x.get()


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


def recomputed(fn: Fn, *inputs: Tensor, collective: bool = False) -> Tensor:
    """Return ``fn(*inputs)``; inside ``selective_recompute``, autograd saves the call instead of the result.

    Args:
        fn: a deterministic function. Tensors that it saves for its own backward are stored; use ``recomputed_block`` if
            these are large.
        collective: ``fn`` communicates, so all ranks must compute it again.
    """
    scope: _Scope | None = getattr(_active, "scope", None)
    if scope is None:
        return fn(*inputs)
    began = scope.clock()
    y = fn(*inputs)
    if y.requires_grad:
        # A GPU is not done yet.
        seconds = None if collective or y.device.type != "cpu" else scope.clock() - began
        scope.add(fn, inputs, y, seconds)
    return y


def recomputed_block(fn: Fn, *inputs: Tensor) -> Tensor:
    """Run ``recomputed`` for a function or module of several operators, and drop their intermediate tensors as well."""
    scope: _Scope | None = getattr(_active, "scope", None)
    if scope is None:
        return fn(*inputs)
    began = scope.clock()
    y: Tensor = checkpoint(fn, *inputs, use_reentrant=False, preserve_rng_state=False)
    if y.requires_grad:
        scope.add(fn, inputs, y, scope.clock() - began if y.device.type == "cpu" else None)
    return y


@contextlib.contextmanager
def selective_recompute() -> Iterator[None]:
    """Apply selective recomputation to the forward pass inside the context. Contexts do not nest."""
    with _scope("selective", None):
        yield


@contextlib.contextmanager
def _scope(recompute: str, saving: Saving | None) -> Iterator[_Scope]:
    """Context of a new scope, which is closed at the end."""
    scope = _Scope(recompute == "selective", saving)
    try:
        with _enter_scope(scope):
            yield scope
    finally:
        scope.close()


@contextlib.contextmanager
def _enter_scope(scope: _Scope) -> Iterator[None]:
    _active.scope = scope if scope.recomputes else None
    try:
        with torch.autograd.graph.saved_tensors_hooks(scope.pack, _unpack):
            yield
    finally:
        _active.scope = None


def run_layer(recompute: str, fn: Callable[..., T], *args: Any, saving: Saving | None = None) -> T:
    """Run ``fn(*args)``, a layer's forward pass, with recomputation mode ``recompute``.

    Args:
        saving: stores the tensors that autograd saves; None: they stay in memory.
    """
    if not torch.is_grad_enabled() or (recompute == "none" and saving is None):
        return fn(*args)
    if recompute != "full":
        with _scope(recompute, saving):
            return fn(*args)
    with contextlib.nullcontext() if saving is None else _scope(recompute, saving):
        # Layers have no dropout, so the states of random generators are not needed.
        y: T = checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)
        return y


def run_layer_in_steps(
    recompute: str, steps: Generator[None, None, Tensor], saving: Saving | None = None
) -> Generator[None, None, Tensor]:
    """Run ``run_layer`` for a layer whose forward pass yields to other work.

    The scope of selective recomputation is left at each ``yield``, so that layers of several micro-batches can
    alternate.

    Raises:
        ConfigError: ``recompute`` is "full", which needs an uninterrupted forward pass.
    """
    if not torch.is_grad_enabled() or (recompute == "none" and saving is None):
        return (yield from steps)
    if recompute == "full":
        raise ConfigError(
            f'a layer with recompute {recompute!r} cannot be interleaved; set recompute to "selective" or "none"'
        )
    scope = _Scope(recompute == "selective", saving)
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
