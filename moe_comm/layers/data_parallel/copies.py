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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_comm.comm.group_setup import channel_of
from moe_comm.comm.sparse_rows import RowTransfer, into, transfer_rows
from moe_comm.errors import ConfigError
from moe_comm.kernels.autograd import once_differentiable
from moe_comm.layers.data_parallel.expert_shard import ExpertShards, plain
from moe_comm.layers.data_parallel.optimizers import watch_copies
from moe_comm.topology import Placement
from moe_comm.topology.balance import Lent


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


class _Entered(torch.autograd.Function):
    """Return tensors that experts compute with in place of parameters. Backward passes their gradients to ``take``,
    None for those that experts have written elsewhere. It returns those of the parameters. They are not accumulated in
    leaves, because a split backward pass computes the gradients of module parameters only.
    """

    @staticmethod
    def forward(ctx: Any, take: Callable[[list[Any]], list[Tensor]], values: list[Tensor], *params: Tensor) -> Any:
        ctx.save_for_backward(*params)  # backward raises if one has changed
        ctx.set_materialize_grads(False)
        ctx.take = take
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return None, None, *ctx.take([None if grad is None else grad.contiguous() for grad in grads])


def entered(
    values: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    take: Callable[[list[str], list[Any]], list[Tensor]],
) -> dict[str, Tensor]:
    """Return ``values``, those of ``params`` in the autograd graph. ``take``: see ``_Entered``; with names."""
    if not params:
        return dict(values)
    inside = _Entered.apply(partial(take, list(params)), [values[name] for name in params], *params.values())
    return {**values, **dict(zip(params, inside, strict=True))}


Values = Mapping[str, Tensor]
"""Tensors by name of a parameter."""


@dataclass(frozen=True, eq=False, slots=True)
class CallPlan:
    """The plan of one call; equal on all ranks except ``counts``.

    Attributes:
        lent: (expert, rank, rows).
        place: position of each of ``lent`` among the slots for copies of its rank.
        digest: hash of ``lent``; 0 if it is empty.
        rows: rows of each rank.
        counts: rows of each expert, and of them those of the ranks before this one, and of this rank.
    """

    lent: tuple[Lent, ...]
    place: tuple[int, ...]
    digest: int
    rows: tuple[int, ...]
    counts: tuple[list[int], list[int], list[int]]

    def of_rank(self, rank: int) -> dict[int, int]:
        """Return the experts that are lent to ``rank``, by place."""
        places = zip(self.place, self.lent, strict=True)
        return {place: one.expert for place, one in places if one.rank == rank}

    def first_row(self, expert: int, rank: int) -> int:
        """Return the number of rows of ``expert`` that its owners before ``rank`` compute; 0 for its home."""
        ranks = {one.rank: one.rows for one in self.lent if one.expert == expert}
        if rank not in ranks:
            return 0
        return self.counts[0][expert] - sum(rows for other, rows in ranks.items() if other >= rank)


class ExpertCopies:
    """The copies of one experts module. All ranks of its expert-parallel group make the same calls.

    Args:
        experts: the module. Its parameters in ``shards`` have the experts whose home is this rank.
        shards: group and shardings of the parameters.
        placement: owners of the experts.

    Attributes:
        unreduced: the gradients of copies have not been added to those of the homes.
        published_bytes: bytes that this rank has sent so far: weights, and the gradients of lent experts.
        lends: whether each call plans its copies, and gradients are complete after backward.
    """

    lends = False

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
        held = [placement.experts_of(rank) for rank in range(placement.world)]
        self._row = [held[home].index(expert) for expert, home in enumerate(placement.homes)]
        self._copied = [
            (expert, rank, held[rank].index(expert))
            for expert, ranks in enumerate(placement.owners)
            for rank in ranks[1:]
        ]
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
        trained = self._trained() if torch.is_grad_enabled() else {}
        return entered({name: self._stack(name).data for name in self._params()}, trained, self.take_gradients)

    def take_gradients(self, names: Sequence[str], grads: Sequence[Tensor]) -> list[Tensor]:
        """Accumulate the rows of copies of the gradients of stacks, and return those of the parameters. Called in
        backward.

        Accumulated gradients of copies are dropped first if the gradient of the parameter was reset: the step was
        discarded.
        """
        self.unreduced, task, own = True, torch._C._current_graph_task_id(), list[Tensor]()
        for name, grad_SX in zip(names, grads, strict=True):
            param_HX = self.parameter(name)  # not the leaf of an interleaved micro-batch (TurnParameters)
            watch_copies(param_HX, self.check_reduced)  # deep copies and loads may replace a parameter
            homes = param_HX.shape[0]
            if param_HX.grad is None and self._tasks.get(name) != task:
                self._gradients.pop(name, None)
            self._tasks[name] = task
            if name in self._gradients:
                self._gradients[name] += grad_SX[homes:]
            else:
                self._gradients[name] = grad_SX[homes:].to(param_HX.grad_dtype or param_HX.dtype, copy=True)
            own.append(grad_SX[:homes])
        return own

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

    @property
    def plans_on_device(self) -> bool:
        """Whether calls can lend experts by plans that stay on the device; equal on all ranks."""
        return False

    def begin(self, ids_TK: Tensor | None) -> Any:
        """Return the ``LentCall`` of the next call; None: the placement has all copies."""
        return None

    def take_tally(self) -> Tensor | None:
        """Return counts of lent experts that are on the device; None: there are none."""
        return None

    def materialize(self, plan: CallPlan | None = None) -> None:
        """Publish if a shared stack does not contain the current weights of this layer. Publishing is collective."""
        if self._shared is not None and (self._due or not self._filled):
            self.publish()

    def materialize_in_backward(self, result: Tensor, plan: CallPlan | None = None) -> None:
        """Call ``materialize`` in backward before the operator that computed ``result`` from the weights."""
        if result.requires_grad and (self._shared is not None or plan is not None):
            result.register_hook(lambda _: self.materialize(plan))

    @torch.no_grad()
    def publish(self) -> int:
        """Send the weights of experts to the ranks that hold copies. Collective.

        Returns:
            Bytes of this rank's experts that other ranks received.
        """
        if self._shared is not None:
            self._shared.fills += 1
            for name, param in self._params().items():
                self._stack(name)[: param.shape[0]] = param
        sent = self._send(self._copied, f"publishing the copies of experts of layer {self._label!r}")
        self._due, self._fill = False, 0 if self._shared is None else self._shared.fills
        self._versions = self._present_versions()
        return sent

    @torch.no_grad()
    def _send(self, copies: Iterable[tuple[int, int, int]], what: str) -> int:
        """Send weights to slots, given as (expert, rank, slot). Collective. Return the bytes that this rank sent."""
        stacks = [self._stack(name) for name in self._params()]
        transfers = [self._transfer_of(*one) for one in copies]
        sent = transfer_rows(channel_of(self._shards.group), transfers, stacks, into(stacks), what)
        self.published_bytes += sent
        return sent

    @torch.no_grad()
    def _add(
        self,
        copies: Iterable[tuple[int, int, int]],
        partials: Sequence[Tensor],
        grads: Sequence[Tensor],
        what: str,
        memory: Tensor | None = None,
    ) -> int:
        """Add the gradients of copies, given as (expert, rank, row of ``partials``), to those of the homes in this
        order. Collective.

        Args:
            partials: gradients of experts of other ranks, [N, ...] for each parameter.
            grads: of the parameters. Changed in place: sums are fp32, or of a wider dtype, and are rounded once.
            memory: see ``transfer_rows``.

        Returns:
            Bytes that this rank sent.
        """
        sums: dict[int, list[Tensor]] = {}

        def receive(one: RowTransfer, rows: Sequence[Tensor]) -> None:
            at = one.destination_row
            if at not in sums:
                sums[at] = [grad[at].to(torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
            for total, row in zip(sums[at], rows, strict=True):
                total += row

        transfers = [self._transfer_of(*one).reversed() for one in copies]
        sent = transfer_rows(channel_of(self._shards.group), transfers, partials, receive, what, memory)
        for at, totals in sums.items():
            for grad, total in zip(grads, totals, strict=True):
                if total.dtype != grad.dtype:
                    grad[at] = total
        return sent

    def _transfer_of(self, expert: int, rank: int, row: int) -> RowTransfer:
        """Return the transfer of an expert to ``row`` of ``rank``. Ranks hold equal slices of an expert if their
        position on the axis "etp" is equal."""
        etp, part = self._shards.sizes["etp"], self._shards.place["etp"]
        return RowTransfer(self.placement.homes[expert] * etp + part, self._row[expert], rank * etp + part, row)

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
        if not self._gradients:
            return 0
        names, grads = [name for name in self._params() if name in self._gradients], list[Tensor]()
        for param in map(self.parameter, names):
            if param.grad is None:
                param.grad = torch.zeros_like(param, dtype=param.grad_dtype or param.dtype)
            grads.append(plain(param.grad))
        homes = self.placement.homes_per_rank  # the first row of ``_gradients`` is that of the slot after the homes
        copies = [(expert, rank, slot - homes[rank]) for expert, rank, slot in self._copied]
        partials, what = [self._gradients[name] for name in names], f"copies of experts of layer {self._label!r}"
        sent = self._add(copies, partials, grads, f"reducing the gradients of {what}")
        self.clear()
        self.weights_changed()
        return sent

    def check_reduced(self) -> None:
        """Raise ConfigError if the gradients of copies have not been added to those of the homes."""
        if self.unreduced:
            raise ConfigError(
                f"experts of layer {self._label!r} have copies on other ranks, whose gradients have not been added to "
                "those of the parameters. Call moe_comm.sync_gradients(model) after backward"
            )

    def _params(self) -> dict[str, nn.Parameter]:
        return {name: self.parameter(name) for name in self._shards.shardings}

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: param for name, param in self._params().items() if param.requires_grad}

    def _present_versions(self) -> list[int]:
        return [0 if param.is_inference() else param._version for param in self._params().values()]

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
