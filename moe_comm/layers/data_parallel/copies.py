"""Copies of experts on other ranks than their homes: published weights, and gradients that are reduced to the home.

    owners of experts 0..3: (0,) (0, 1) (1,) (1,)

    rank 0    w13 [2, ...]   experts 0 1                        publish    rank 0 ── weights of expert 1 ──▶ rank 1
    rank 1    w13 [2, ...]   experts 2 3 │ slot: copy of 1      reduce     rank 0 ◀── its gradient of expert 1 ── rank 1

A parameter has the experts whose home is this rank. It is a view of the first rows of a stack, whose other rows are the
slots for copies. Executors compute with the stack, so a forward pass copies no weights. Optimizers, state dicts and
norms see the parameter only, and count each expert once.

The gradient of an expert is the sum of its owners' gradients in fp32, in the order of the owners, rounded once. It is
the same in each run. Its bits differ from those without copies, because each owner sums the rows that it computed.

With rematerialization (``SharedStacks``), all layers of a rank share one stack, which one layer at a time uses, and
parameters have separate memory. A layer fills the stack before its experts run, in forward and in backward: its own
experts are copied on the rank, and the weights of copies are published again. While no other layer has used the stack
since, it remains filled:

    layer            0        1        2    │    2        1        0    │    0        1        2
    pass             forward                │    backward               │    forward of the next micro-batch
    publishes        yes      yes      yes       no       yes      yes       no       yes      yes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_comm.comm.group_setup import channel_of
from moe_comm.comm.sparse_rows import RowTransfer, transfer_rows
from moe_comm.errors import ConfigError
from moe_comm.kernels.autograd import once_differentiable
from moe_comm.layers.data_parallel.expert_shard import ExpertShards, plain
from moe_comm.layers.data_parallel.optimizers import watch_copies
from moe_comm.topology import Placement


class SharedStacks:
    """Memory that the stacks of several layers share. One layer at a time has its weights there.

    Attributes:
        fills: number of times that a layer has written its weights. The layer that recorded this number last has its
            weights there.
    """

    def __init__(self) -> None:
        self.fills = 0
        self._rows: dict[tuple[Any, ...], Tensor] = {}

    def rows(self, name: str, param: Tensor, slots: int) -> Tensor:
        """Return [slots, ...], the memory for the stacks of all parameters like ``param``."""
        key = name, slots, param.shape[1:], param.dtype, param.device
        if key not in self._rows:
            # Of another dtype or device, before the model was cast.
            self._rows = {other: rows for other, rows in self._rows.items() if other[:3] != key[:3]}
            self._rows[key] = torch.zeros(slots, *param.shape[1:], dtype=param.dtype, device=param.device)
        return self._rows[key]


class _Stacked(torch.autograd.Function):
    """Return the stack of a parameter without a copy. Gradients of copies are not accumulated in a leaf, because a
    split backward pass computes the gradients of module parameters only.
    """

    @staticmethod
    def forward(ctx: Any, param_HX: Tensor, rows_SX: Tensor, copies: ExpertCopies, name: str) -> Tensor:
        ctx.save_for_backward(param_HX)  # backward raises if it has changed
        ctx.copies, ctx.name = copies, name
        return rows_SX.data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SX: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return ctx.copies.take_gradient(ctx.name, grad_SX), None, None, None


class ExpertCopies:
    """The copies of one experts module. All ranks of its expert-parallel group make the same calls.

    Args:
        experts: the module. Its parameters in ``shards`` have the experts whose home is this rank.
        shards: group and shardings of the parameters.
        placement: owners of the experts.

    Attributes:
        unreduced: the gradients of copies have not been added to those of the homes.
        published_bytes: bytes of this rank's experts that other ranks have received so far.
    """

    def __init__(self, experts: nn.Module, shards: ExpertShards, placement: Placement, label: str = "") -> None:
        self._experts, self._shards, self._label = experts, shards, label
        self._stacks: dict[str, Tensor] = {}  # all slots of each parameter, [S, ...]
        self._gradients: dict[str, Tensor] = {}  # gradients of copies, [C, ...]
        self._tasks: dict[str, int] = {}  # autograd's number of the last backward pass
        self._shared: SharedStacks | None = None
        self._fill = 0
        self.published_bytes = 0
        self.set_placement(placement)

    def set_placement(self, placement: Placement) -> None:
        """Use another placement with the same layout, whose copies have not been published."""
        self.placement = placement
        self._transfers = tuple(_transfers(placement, self._shards))
        homes = [homes for homes in placement.homes_per_rank for _ in range(self._shards.sizes["etp"])]
        # Gradients of copies have no rows for homes.
        self._back = tuple(
            replace(one.reversed(), source_row=one.destination_row - homes[one.destination]) for one in self._transfers
        )
        self._versions: list[int] = []
        self.clear()
        self.weights_changed()

    def share(self, stacks: SharedStacks) -> None:
        """Share ``stacks`` with other layers, which use them one at a time. Called on all ranks, between steps."""
        for name in self._stacks:
            param = self.parameter(name)
            param.data = param.detach().clone()
        self._shared, self._fill = stacks, -1
        self._stacks.clear()

    @property
    def rematerialized(self) -> bool:
        """Whether the weights are published in each forward and backward pass, as layers share their stack."""
        return self._shared is not None

    @property
    def published(self) -> bool:
        """Whether this rank's copies have the weights of their homes, in memory that no other layer uses."""
        return self._shared is None and not self._due

    def weights_changed(self) -> None:
        """Publish before the next forward pass. Called on all ranks."""
        self._due = True

    def clear(self) -> None:
        """Drop the gradients of copies."""
        self.unreduced = False
        self._gradients.clear()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the experts whose home is this rank."""
        return list(self._params().values())

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients of copies that have not been added to those of the homes."""
        return list(self._gradients.values())

    def parameter(self, name: str) -> nn.Parameter:
        """Return the parameter ``name`` of the module."""
        param: nn.Parameter = getattr(self._experts, name)
        return param

    def stacked(self) -> dict[str, Tensor]:
        """Return all slots of each parameter by name, [slots, ...]. Differentiable."""
        result = {}
        for name, param in self._params().items():
            rows_SX = self._stack(name)
            if torch.is_grad_enabled() and param.requires_grad:
                result[name] = _Stacked.apply(param, rows_SX, self, name)
            else:
                result[name] = rows_SX.data
        return result

    def take_gradient(self, name: str, grad_SX: Tensor) -> Tensor:
        """Split the gradient of a stack: accumulate the rows of copies, and return the rows of the parameter. Called in
        backward.

        Accumulated gradients of copies are dropped first if the gradient of the parameter was reset: the step was
        discarded.
        """
        param_HX = self.parameter(name)  # not the leaf of an interleaved micro-batch (TurnParameters)
        self.unreduced = True
        watch_copies(param_HX, self.check_reduced)  # deep copies and loads may replace a parameter
        homes, task = param_HX.shape[0], torch._C._current_graph_task_id()
        if param_HX.grad is None and self._tasks.get(name) != task:
            self._gradients.pop(name, None)
        self._tasks[name] = task
        if name in self._gradients:
            self._gradients[name] += grad_SX[homes:]
        else:
            self._gradients[name] = grad_SX[homes:].to(param_HX.grad_dtype or param_HX.dtype, copy=True)
        return grad_SX[:homes]

    def publish_if_due(self, *, later: bool = False) -> ConfigError | None:
        """Publish if all ranks know that weights may have changed, or that another layer uses the stack. Publishing is
        collective.

        Args:
            later: other layers may use a shared stack before the experts run, so ``materialize`` publishes later.

        Returns:
            An error if only this rank knows that its weights have changed; None otherwise.
        """
        if self._due or not self._filled:
            if self._shared is None or (self.placement.has_copies and not later):
                self.publish()
            return None
        if not self.changed:
            return None
        return ConfigError(
            f"the weights of the experts of layer {self._label!r} have changed, but not their copies on other ranks. "
            "Call publish_copies() of the layer on every rank after the change. After sync_gradients and "
            "load_state_dict, the next forward pass does so"
        )

    @property
    def changed(self) -> bool:
        """Whether the weights of this rank have changed, and those of its copies on other ranks have not."""
        if not self.placement.has_copies or not self._filled:  # else the next call publishes on all ranks
            return False
        return self._due or self._versions != self._present_versions()

    def materialize(self, call: Any = None) -> None:
        """Publish if a shared stack does not contain the current weights of this layer. Publishing is collective.

        call: for ``LentExperts`` only.
        """
        if self._shared is not None and (self._due or not self._filled):
            self.publish()

    def materialize_in_backward(self, result: Tensor, call: Any = None) -> None:
        """Call ``materialize`` in backward before the operator that computed ``result`` from the weights."""
        if self._shared is not None and result.requires_grad:
            result.register_hook(lambda _: self.materialize())

    @torch.no_grad()
    def publish(self) -> int:
        """Send the weights of experts to the ranks that hold copies. Collective.

        Returns:
            Bytes of this rank's experts that other ranks received.
        """
        stacks = [self._stack(name) for name in self._params()]
        if self._shared is not None:
            self._shared.fills += 1
            for stack, param in zip(stacks, self._params().values(), strict=True):
                stack[: param.shape[0]] = param

        def receive(one: RowTransfer, rows: Sequence[Tensor]) -> None:
            for stack, row in zip(stacks, rows, strict=True):
                stack[one.destination_row].copy_(row)

        what = f"publishing the copies of experts of layer {self._label!r}"
        transfer_rows(channel_of(self._shards.group), self._transfers, stacks, receive, what)
        self._due, self._fill = False, 0 if self._shared is None else self._shared.fills
        self._versions = self._present_versions()
        return self._count_sent(self._transfers, stacks)

    @property
    def _filled(self) -> bool:
        """Whether the stack has the weights of this layer."""
        shared = self._shared
        return shared is None or (self._fill == shared.fills and all(map(self._fits, self._params())))

    def _fits(self, name: str) -> bool:
        """Return whether the stack of a parameter has its device and dtype."""
        old, param = self._stacks.get(name), self.parameter(name)
        return old is not None and (old.device, old.dtype) == (param.device, param.dtype)

    @property
    def num_slots(self) -> int:
        """Slots of this rank: its experts, and those for copies."""
        return self.placement.slots_per_rank[self._shards.place["ep"]]

    @torch.no_grad()
    def reduce(self) -> int:
        """Add the gradients of copies to those of the parameters of their homes. Collective, once in a step.

        Returns:
            Bytes of gradients that this rank sent.
        """
        if not self.unreduced:
            return 0
        trained = {name: param for name, param in self._params().items() if param.requires_grad}
        copies, grads = [], []
        for name, param in trained.items():
            dtype, shape = param.grad_dtype or param.dtype, (self.num_slots - param.shape[0], *param.shape[1:])
            grad_CX = self._gradients.get(name)
            copies.append(torch.zeros(shape, dtype=dtype, device=param.device) if grad_CX is None else grad_CX)
            if param.grad is None:
                param.grad = torch.zeros_like(param, dtype=dtype)
            grads.append(plain(param.grad))
        sums: list[dict[int, Tensor]] = [{} for _ in grads]

        def receive(one: RowTransfer, rows: Sequence[Tensor]) -> None:
            at = one.destination_row
            for grad, row, of_rows in zip(grads, rows, sums, strict=True):
                wide = torch.promote_types(grad.dtype, torch.float32)
                of_rows.setdefault(at, grad[at].to(wide)).add_(row)  # in place if the gradient is fp32

        what = f"reducing the gradients of copies of layer {self._label!r}"
        transfer_rows(channel_of(self._shards.group), self._back, copies, receive, what)
        for grad, of_rows in zip(grads, sums, strict=True):
            for at, total in of_rows.items():
                if total.dtype != grad.dtype:
                    grad[at].copy_(total)
        self.clear()
        self.weights_changed()
        return self._count(self._back) * _row_bytes(copies)

    def check_reduced(self) -> None:
        """Raise ConfigError if the gradients of copies have not been added to those of the homes."""
        if self.unreduced:
            raise ConfigError(
                f"experts of layer {self._label!r} have copies on other ranks, whose gradients have not been added to "
                "those of the parameters. Call moe_comm.sync_gradients(model) after backward"
            )

    def _params(self) -> dict[str, nn.Parameter]:
        return {name: self.parameter(name) for name in self._shards.shardings}

    def _present_versions(self) -> list[int]:
        return [0 if param.is_inference() else param._version for param in self._params().values()]

    def _count_sent(self, transfers: Sequence[RowTransfer], stacks: Sequence[Tensor]) -> int:
        """Add the bytes that this rank has sent to ``published_bytes``, and return them."""
        sent = self._count(transfers) * _row_bytes(stacks)
        self.published_bytes += sent
        return sent

    def _count(self, transfers: Sequence[RowTransfer]) -> int:
        rank = self._shards.group.rank()
        return sum(one.source == rank for one in transfers)

    def _stack(self, name: str) -> Tensor:
        """Return the stack of a parameter, after making the parameter a view of it if no other layer uses it."""
        param = self.parameter(name)
        old, homes = self._stacks.get(name), param.shape[0]
        owned = self._shared is None and homes > 0  # the parameter is a view
        if old is not None and self._fits(name) and (not owned or old.data_ptr() == param.data_ptr()):
            return old
        with torch.inference_mode(False), torch.no_grad():
            if self._shared is not None:
                rows_SX = self._shared.rows(name, param, self.num_slots)
            else:
                rows_SX = torch.zeros(self.num_slots, *param.shape[1:], dtype=param.dtype, device=param.device)
                rows_SX[:homes] = param
                if old is not None and old.device.type != "meta":
                    rows_SX[homes:] = old[homes:]
                param.data = rows_SX[:homes]
        self._stacks[name] = rows_SX
        return rows_SX


def _transfers(placement: Placement, shards: ExpertShards) -> Iterator[RowTransfer]:
    """Yield the transfers of weights to copies, by expert and in the order of its owners.

    Ranks hold equal slices of an expert if their position on the axis "etp" is equal.
    """
    offsets, etp, part = placement.layout.offsets, shards.sizes["etp"], shards.place["etp"]
    for (home, *ranks), (first, *slots) in zip(placement.owners, placement.slot_ids(), strict=True):
        for rank, slot in zip(ranks, slots, strict=True):
            source, destination = home * etp + part, rank * etp + part
            yield RowTransfer(source, first - offsets[home], destination, slot - offsets[rank])


def _row_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.shape[1:].numel() * tensor.element_size() for tensor in tensors)
