"""Interleaved micro-batches: transfers of one micro-batch overlap with the computation of another.

Two micro-batches a and b through layers 0 and 1 (DualPipe, arXiv 2412.19437, section 3.2.1; MegaScale-Infer's ping-pong
pipeline, arXiv 2504.02263). Each yields after its tokens are dispatched, and after its experts:

    computes     a attention 0   b attention 0   a experts 0   b experts 0   a sum, attention 1   b sum, attention 1
    in flight                    a dispatch ══▶  b dispatch ═▶ a combine ══▶ b combine ═════════▶ a dispatch ══════▶

Backward is interleaved as well, b before a: autograd runs operators in reverse order if one backward pass covers all
micro-batches. So gradients are dispatched while another micro-batch's attention is differentiated.

The order depends only on the number of micro-batches and layers, so it is the same on all ranks. If MoE layers do not
overlap, nothing is in flight; the results are the same. ``TurnParameters`` adds gradients of parameters in the order of
the micro-batches, so they have the bits of sequential micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.layers.parallel.recompute import new_forward

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A computation that yields where other work can hide its pending transfers, and returns its result."""


def finish(steps: Steps[T]) -> T:
    """Run ``steps`` to completion."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def take_turns(all_steps: Sequence[Steps[T]]) -> tuple[T, ...]:
    """Run all computations to completion, one step of each in turn, and return their results in order.

    If one raises, the others are closed.
    """
    return finish(in_turns(all_steps))


def in_turns(all_steps: Sequence[Steps[T]]) -> Steps[tuple[T, ...]]:
    """Run ``take_turns``, but yield after each step."""
    results: list[Any] = [None] * len(all_steps)
    running = dict(enumerate(all_steps))
    try:
        while running:
            for index, steps in list(running.items()):
                try:
                    next(steps)
                except StopIteration as end:
                    results[index] = end.value
                    del running[index]
                else:
                    yield
    finally:
        for steps in running.values():
            steps.close()
    return tuple(results)


class BackwardTurns:
    """Runs a forward pass while transfers of a backward pass of other layers are in flight, in the same thread.

    MoE layers call ``advance`` in backward when they have started to send gradients, before they wait for them:

        backward of b    send gradients                 experts of b, return gradients              attention of b
        forward of a                     attention of a                                experts of a
        in flight        gradients of b ══════════════▶ dispatch of a ═══════════════▶ gradients ═▶ combine of a ═▶
    """

    def __init__(self) -> None:
        self._steps: Steps[Any] | None = None
        self._result: tuple[Any, ...] = ()  # result of the completed steps

    def advance(self) -> None:
        """Run the next step of the forward pass, if there is one."""
        steps = self._take()  # dropped if it raises
        if steps is not None:
            try:
                with new_forward():
                    next(steps)
                self._steps = steps
            except StopIteration as end:
                self._result = (end.value,)

    def _take(self) -> Steps[Any] | None:
        steps, self._steps = self._steps, None
        return steps

    def run(self, forward: Steps[T], backward: Callable[[], None]) -> T:
        """Run ``backward``, and ``forward`` inside of it, and return its result. If one raises, ``forward`` is closed.

        Remaining steps of ``forward`` run after ``backward``.

        Raises:
            MoeCommError: ``forward`` raised inside of ``backward``, which caught the error.
        """
        self._steps = forward
        try:
            backward()
            left: Steps[T] | None = self._take()
            if left is not None:
                with new_forward():
                    return finish(left)
            if not self._result:
                raise MoeCommError("the forward pass failed inside of the backward pass, which hid the error")
            result: T = self._result[0]
            return result
        finally:
            forward.close()
            self._steps, self._result = None, ()


class TurnParameters:
    """Additional autograd leaves that share the memory of parameters, for all interleaved micro-batches but the first.

    Sequential micro-batches compute (grad + a) + b. Autograd computes the gradient b first, and would add the sum of
    both to ``grad``, which rounds differently. With a separate leaf, b is kept until a is complete:

        backward          b of layer 1    a of layer 1    b of layer 0    a of layer 0
        leaf.grad         b ────────────▶ None            b ────────────▶ None
        parameter.grad                    (grad + a) + b                  (grad + a) + b
    """

    def __init__(self) -> None:
        self._leaves: dict[nn.Parameter, list[nn.Parameter]] = {}  # of micro-batches 1, 2, ...
        self._adds_in_order = True
        self._task = -1  # autograd's number of the backward pass that adds gradients; -1 if none is running
        self._complete: set[nn.Parameter] = set()  # parameters that got their gradient in that backward pass

    def __deepcopy__(self, memo: dict[int, Any]) -> TurnParameters:
        return TurnParameters()

    def leaves(self) -> list[nn.Parameter]:
        """Return all leaves, whose gradients a split backward pass also computes."""
        return [leaf for leaves in self._leaves.values() for leaf in leaves]

    @contextmanager
    def used(self, turn: int, *modules: nn.Module) -> Iterator[None]:
        """Make ``modules`` use the leaves of micro-batch number ``turn``.

        Raises:
            ConfigError: a parameter is sharded: an FSDP unit inside of a layer gathers its weights for one micro-batch.
        """
        if turn == 0 or not torch.is_grad_enabled():
            yield
            return
        replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        try:
            for part in (part for module in modules for part in module.modules()):
                for name, param in part._parameters.items():
                    if param is not None and param.requires_grad:
                        replaced.append((part._parameters, name, param))
                        part._parameters[name] = self._leaf(param, turn)
            yield
        finally:
            for parameters, name, param in replaced:
                parameters[name] = param

    def steps(self, turn: int, module: nn.Module, steps: Steps[T]) -> Steps[T]:
        """Run ``steps`` of ``module`` for micro-batch number ``turn``."""
        while True:
            with self.used(turn, module):
                try:
                    next(steps)
                except StopIteration as end:
                    result: T = end.value
                    return result
            yield

    @contextmanager
    def assigned(self) -> Iterator[None]:
        """Context of backward passes with ``torch.autograd.grad`` that assign or add to ``grad`` themselves."""
        for leaf in self.leaves():
            leaf.grad = None  # left by a failed backward pass
            if leaf.grad_dtype not in (None, leaf.dtype):  # autograd.grad returns gradients of the parameter's dtype
                leaf.grad = torch.zeros_like(leaf, dtype=leaf.grad_dtype)
        self._adds_in_order = False
        try:
            yield
        finally:
            self._adds_in_order = True
            self._add()

    def _leaf(self, param: nn.Parameter, turn: int) -> nn.Parameter:
        leaves = self._leaves.get(param)
        if leaves is None:
            from torch.distributed.tensor import DTensor  # imported here because it is slow

            if isinstance(param, DTensor):
                raise ConfigError(
                    "FSDP units inside of a layer cannot be interleaved, unless they are gathered with the layer: set "
                    "DataParallelOptions(interleave=True)"
                )
            leaves = self._leaves[param] = []
            param.register_hook(partial(self._before_gradient, param, leaves))
        while len(leaves) < turn:
            leaves.append(nn.Parameter(param.detach()))
            leaves[-1].register_hook(partial(self._before_leaf, param))
        leaf = leaves[turn - 1]
        if leaf.data_ptr() != param.data_ptr() or leaf.dtype != param.dtype:
            leaf.data = param.detach()
        if leaf.grad_dtype != param.grad_dtype:
            leaf.grad_dtype = param.grad_dtype
        return leaf

    def _enter_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        if self._task != -1:  # the last backward pass failed
            for leaf in self.leaves():
                leaf.grad = None
        self._complete.clear()
        self._task = task
        Variable._execution_engine.queue_callback(self._add)

    @torch.no_grad()
    def _before_gradient(self, param: nn.Parameter, leaves: Sequence[nn.Parameter], grad: Tensor | None) -> Any:
        """Before ``grad`` is added to ``param.grad``: add it, and return the gradient of the last leaf instead."""
        if not self._adds_in_order:
            return grad
        self._enter_backward()
        if grad is None:  # a hook must not replace it, so the leaves are added after the backward pass
            return None
        self._complete.add(param)
        for leaf in leaves:
            if leaf.grad is not None:
                if param.grad is None and param.grad_dtype is None:  # FSDP: micro-batches are summed in fp32
                    param.grad, grad = grad.float(), leaf.grad
                elif param.grad is None:
                    grad = grad + leaf.grad
                else:
                    param.grad.add_(grad)
                    grad = leaf.grad
                leaf.grad = None
        return grad

    def _before_leaf(self, param: nn.Parameter, grad: Tensor | None) -> None:
        """Before ``grad`` is added to the gradient of a leaf of ``param``."""
        if not self._adds_in_order:
            return
        self._enter_backward()
        if grad is not None and param in self._complete:  # param.grad may have been reduced already
            raise ConfigError(
                f"the gradient of a parameter {tuple(param.shape)} was complete for the first micro-batch before a "
                "later one: interleaved micro-batches must use shared parameters in the same order"
            )

    @torch.no_grad()
    def _add(self) -> None:
        """Add the gradients of leaves whose parameter got no gradient since."""
        self._task = -1
        self._complete.clear()
        for param, leaves in self._leaves.items():
            for leaf in leaves:
                if leaf.grad is not None:
                    param.grad = leaf.grad if param.grad is None else param.grad.add_(leaf.grad)
                    leaf.grad = None
