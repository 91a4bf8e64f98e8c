"""Calls of layers in the graphs of ``torch.compile``: one operator for a forward pass, and one for its backward pass.

    graph      y, call = moe_comm::layer(x, weights, ...)      gradients = moe_comm::layer_backward(grad_y, call, ...)
    inside     the eager layer, with autograd ── its graph ──▶ torch.autograd.grad

So collectives and row counts, which a compiler cannot trace, run as without ``torch.compile``, with the same bits. The
first operator keeps the autograd graph of the eager layer as long as the memory of the tensor ``call`` exists, which
the compiled graph saves for backward. Activation checkpointing does not save it and runs the operator again.

Hooks of parameters run in the backward pass of the compiled graph, and not in that of the operator. The compiler may
reuse the memory of inputs after the operator, so tokens are copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moe_comm.errors import InputError
from moe_comm.layers.data_parallel.attach import gradients_of
from moe_comm.layers.moe.expert_parallel import ExpertParallel, layer_with

_GRAPHS: dict[int, tuple[Tensor, list[Tensor]]] = {}
"""Calls whose backward pass has not run, by the value of ``call``: the output, and what needs a gradient."""
_numbers = count(1)
_places = count()
# dtypes are names, because torch 2.11 gives an operator the elements of ScalarType[] as numbers.
_SCHEMA_BACKWARD = (
    "(Tensor grad, Tensor call, SymInt[] sizes, int[] dims, str[] dtypes, Tensor[] parameters) -> Tensor[]"
)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _place() -> int:
    """Return another number for each call in a graph, because compilers merge equal calls of an operator."""
    return next(_places)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_exporting() -> bool:
    """Return ``torch.compiler.is_exporting()``, which is True in all that torch 2.11 traces."""
    return torch.compiler.is_exporting()


def call_layer(
    layer: ExpertParallel, inputs: Sequence[Tensor | None], dtype: torch.dtype, unused: nn.Module | None = None
) -> Tensor:
    """Return the output of ``layer._eager(*inputs)``, in the shape of the first input; while a compiler traces.

    Args:
        dtype: of the output.
        unused: module of the layer whose parameters get no gradients.
    """
    if _is_exporting():
        raise InputError("an exported program cannot hold a layer with experts: it would refer to this process's layer")
    first = inputs[0]
    assert first is not None
    parameters, kind, autocast = list(layer.parameters()), first.device.type, None
    if torch.is_autocast_enabled(kind):
        autocast = torch.get_autocast_dtype(kind)
    present, given = [t is not None for t in inputs], [t for t in inputs if t is not None]
    needs = [t.requires_grad and torch.is_grad_enabled() for t in (*given, *parameters)]
    if unused is not None:
        without = list(unused.parameters())
        needs[len(given) :] = [
            need and all(p is not u for u in without) for p, need in zip(parameters, needs[len(given) :], strict=True)
        ]
    y, _ = torch.ops.moe_comm.layer(given, present, parameters, layer.compiled_id, needs, dtype, autocast, _place())
    return y  # type: ignore[no-any-return]


@torch.library.custom_op("moe_comm::layer", mutates_args=())
def _layer(
    inputs: Sequence[Tensor],
    present: Sequence[bool],
    parameters: Sequence[Tensor],
    layer: Tensor,
    needs: Sequence[bool],
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    place: int,
) -> tuple[Tensor, Tensor]:
    module, given = layer_with(int(layer)), []
    own, records = list(module.parameters()), any(needs)
    if [p.data_ptr() for p in own] != [p.data_ptr() for p in parameters]:
        fault = InputError(
            f"the compiled graph replaces parameters of layer {module.label!r}, as torch.func.functional_call does; "
            "call the layer with its own parameters, or without torch.compile"
        )
        module.dispatcher.abort(fault, label=module.label)
        raise fault
    number = np.array([next(_numbers)])
    with _with_autograd():
        for t, need in zip(inputs, needs, strict=False):
            given.append((t.detach().clone() if records else t.detach()).requires_grad_(need))
        cast: AbstractContextManager[Any] = nullcontext()
        if autocast is not None:
            cast = torch.autocast(given[0].device.type, autocast)
        with cast, torch.set_grad_enabled(records):
            arguments = iter(given)
            if (gradients := gradients_of(module)) is not None:
                gradients.before_forward(module)  # the hook of the module, which the compiler does not trace
            y = module._eager(*[next(arguments) if one else None for one in present])
        result = y.detach().contiguous()
        if any(t.untyped_storage().data_ptr() == result.untyped_storage().data_ptr() for t in (*given, *own)):
            result = result.clone()
    if result.dtype != dtype or result.shape != given[0].shape:
        raise InputError(
            f"layer {module.label!r} returned {result.dtype} {tuple(result.shape)}, and the compiler expects {dtype} "
            f"{tuple(given[0].shape)}"
        )
    if y.requires_grad:
        _GRAPHS[int(number[0])] = y, [t for t, need in zip((*given, *own), needs, strict=True) if need]
        weakref.finalize(number, _GRAPHS.pop, int(number[0]), None)
    return result, torch.from_numpy(number)


@_layer.register_fake
def _(
    inputs: Sequence[Tensor], present: Any, parameters: Any, layer: Any, needs: Any, dtype: torch.dtype, *_: Any
) -> Any:
    first = inputs[0]
    return torch.empty(first.shape, dtype=dtype, device=first.device), torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.custom_op("moe_comm::layer_backward", mutates_args=(), schema=_SCHEMA_BACKWARD)
def _layer_backward(
    grad: Tensor,
    call: Tensor,
    sizes: Sequence[int],
    dims: Sequence[int],
    dtypes: Sequence[str],
    parameters: Sequence[Tensor],
) -> list[Tensor]:
    if int(call) not in _GRAPHS:
        raise InputError(
            "the autograd graph of a compiled layer is gone. Hooks of saved tensors that copy, such as save_on_cpu, "
            "do not work around a compiled model: use them without torch.compile"
        )
    y, wanted = _GRAPHS[int(call)]
    keep = torch._C._autograd._get_current_graph_task_keep_graph()
    with _with_autograd(), _without_hooks(wanted):
        grads = torch.autograd.grad(y, wanted, grad.contiguous(), retain_graph=keep, allow_unused=True)
    if not keep:
        del _GRAPHS[int(call)]
    empty = _empty_gradients(grad, sizes, dims, dtypes, parameters)
    return [_like(expected, given) for expected, given in zip(empty, grads, strict=True)]


def _empty_gradients(
    grad: Tensor,
    sizes: Sequence[int],
    dims: Sequence[int],
    dtypes: Sequence[str],
    parameters: Sequence[Tensor],
) -> list[Tensor]:
    """Return tensors like the gradients: of inputs with ``sizes``, one after the other, and of parameters."""
    first, empty = 0, []
    for dim, dtype in zip(dims, dtypes, strict=True):
        empty.append(torch.empty(tuple(sizes[first : first + dim]), dtype=getattr(torch, dtype), device=grad.device))
        first += dim
    return [*empty, *map(torch.empty_like, parameters)]


@_layer_backward.register_fake
def _(grad: Tensor, call: Tensor, *expected: Any) -> list[Tensor]:
    return _empty_gradients(grad, *expected)


def _like(expected: Tensor, grad: Tensor | None) -> Tensor:
    """Return a gradient with the strides that the compiler expects."""
    if grad is None:
        return expected.zero_()
    return grad if grad.stride() == expected.stride() else expected.copy_(grad)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    given, _, parameters, _, needs, *_ = inputs
    ctx.needs, ctx.num_inputs = needs, len(given)
    wanted = [t for t, need in zip(given, needs, strict=False) if need]
    ctx.shapes, ctx.dtypes = [t.shape for t in wanted], [str(t.dtype).removeprefix("torch.") for t in wanted]
    trained = [p for p, need in zip(parameters, needs[len(given) :], strict=True) if need]
    ctx.save_for_backward(output[1], *trained)  # not the inputs, whose memory the layer does not need


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    call, *parameters = ctx.saved_tensors
    sizes, dims = [size for shape in ctx.shapes for size in shape], [len(shape) for shape in ctx.shapes]
    grads = iter(torch.ops.moe_comm.layer_backward(grad, call, sizes, dims, ctx.dtypes, parameters))
    each = [next(grads) if need else None for need in ctx.needs]
    return each[: ctx.num_inputs], None, each[ctx.num_inputs :], None, None, None, None, None


_layer.register_autograd(_backward, setup_context=_setup)


@contextmanager
def _without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Return a context in which hooks of leaf tensors do not run."""
    hooks = [t._backward_hooks for t in tensors if t._backward_hooks]
    kept = [dict(one) for one in hooks]
    for one in hooks:
        one.clear()
    try:
        yield
    finally:
        for one, again in zip(hooks, kept, strict=True):
            one.update(again)


def _with_autograd() -> AbstractContextManager[Any]:
    """Return a context in which autograd records, as outside of operators."""
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), _usually_excluded())


def _usually_excluded() -> Any:
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    return excluded


_AUTOGRAD_KEYS = tuple(
    key for name, key in vars(torch._C.DispatchKey).items() if name.startswith("Autograd") or name == "ADInplaceOrView"
)
