"""Copies of experts on other ranks than their homes, whose weights are published once: for inference.

    owners of experts 0..3: (0,) (0, 1) (1,) (1,)

    rank 0    w13 [2, ...]   experts 0 1                        publish    rank 0 ── weights of expert 1 ──▶ rank 1
    rank 1    w13 [2, ...]   experts 2 3 │ slot: copy of 1

A parameter has the experts whose home is this rank. It is a view of the first rows of a stack, whose other rows are the
slots for copies. Executors compute with the stack, so a forward pass copies no weights. Optimizers, state dicts and
norms see the parameter only, and count each expert once.

Experts that are trained have no such copies: ``LentExperts`` lends them for one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_comm.comm.group_setup import channel_of
from moe_comm.comm.sparse_rows import RowTransfer, into, start_rows, transfer_rows
from moe_comm.errors import ConfigError
from moe_comm.kernels.autograd import once_differentiable
from moe_comm.layers.data_parallel.expert_shard import ExpertShards
from moe_comm.topology import Placement
from moe_comm.topology.balance import Lent


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
        resident: number of ``lent`` whose weights were published before the plan.
    """

    lent: tuple[Lent, ...]
    place: tuple[int, ...]
    digest: int
    rows: tuple[int, ...]
    counts: tuple[list[int], list[int], list[int]]
    resident: int = 0

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
        published_bytes: bytes that this rank has sent so far: weights, and the gradients of lent experts.
    """

    def __init__(self, experts: nn.Module, shards: ExpertShards, placement: Placement, label: str = "") -> None:
        self._experts, self._shards, self._label = experts, shards, label
        self._stacks: dict[str, Tensor] = {}  # all slots of each parameter, [S, ...]
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
        self.weights_changed()

    def weights_changed(self) -> None:
        """Publish before the next forward pass. Called on all ranks."""
        self._due = True

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the experts whose home is this rank."""
        return list(self._params().values())

    def parameter(self, name: str) -> nn.Parameter:
        """Return the parameter ``name`` of the module."""
        param: nn.Parameter = getattr(self._experts, name)
        return param

    def stacked(self) -> dict[str, Tensor]:
        """Return all slots of each parameter by name, [slots, ...]."""
        return {name: self._stack(name).data for name in self._params()}

    def publish_if_due(self) -> ConfigError | None:
        """Publish if all ranks know that weights may have changed. Publishing is collective.

        Returns:
            An error if gradients of the experts are needed, or if only this rank knows that its weights have changed.
        """
        stale = self.changed and not self._due
        if self._due:
            self.publish()
        if torch.is_grad_enabled() and self._trained():
            return ConfigError(
                f"experts of layer {self._label!r} have slots for copies on other ranks, which are for inference: run "
                "it under torch.no_grad(). To even the rows of ranks in training, use a placement without slots and "
                "DispatchOptions(balance=Balance()), [placement] balance of the trainer"
            )
        if not stale:
            return None
        return ConfigError(
            f"the weights of the experts of layer {self._label!r} have changed, but not their copies on other ranks. "
            "Call publish_copies() of the layer on every rank after the change. After relocate and load_state_dict, "
            "the next forward pass does so"
        )

    @property
    def changed(self) -> bool:
        """Whether the weights of this rank have changed, and those of its copies on other ranks have not."""
        return self.placement.has_copies and (self._due or self._versions != self._present_versions())

    @property
    def plans_on_device(self) -> bool:
        """Whether calls can lend experts by plans that stay on the device; equal on all ranks."""
        return False

    def prefetch(self) -> None:
        """Start to send weights that the next call will probably need. Collective if there are any."""

    def end_step(self) -> None:
        """The gradients of a step are complete, or its weights have changed. Called on all ranks."""
        self.weights_changed()

    def forget(self) -> None:
        """Begin the next step as a run that resumes does. Called on all ranks."""

    def shard(self, dtype: torch.dtype | None) -> None:
        """FSDP shards the parameters, and gathers them in ``dtype``; None: theirs. Called on all ranks."""
        raise ConfigError(
            f"FSDP cannot shard the experts of {self._label!r}, which have slots for copies on other ranks"
        )

    def take_tally(self) -> Tensor | None:
        """Return counts of lent experts that are on the device; None: there are none."""
        return None

    @torch.no_grad()
    def publish(self) -> int:
        """Send the weights of experts to the ranks that hold copies. Collective.

        Returns:
            Bytes of this rank's experts that other ranks received.
        """
        before = self.published_bytes
        self._start_sending(self._copied, f"publishing the copies of experts of layer {self._label!r}")()
        self._due, self._versions = False, self._present_versions()
        return self.published_bytes - before

    def _start_sending(self, copies: Iterable[tuple[int, int, int]], what: str) -> Callable[[], None]:
        """Start to send weights to slots, given as (expert, rank, slot). Collective. Return a function that waits until
        this rank's slots have their weights; collective."""
        sources, slots = self._buffers()
        transfers = [self._transfer_of(*one) for one in copies]
        sent, finish = start_rows(channel_of(self._shards.group), transfers, sources, into(slots), what)
        self.published_bytes += sent
        return finish

    def _buffers(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the tensors with the experts of this rank, and those with the slots for copies."""
        stacks = [self._stack(name) for name in self._params()]
        return stacks, stacks

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
    def num_slots(self) -> int:
        """Slots of this rank: its experts, and those for copies."""
        return self.placement.slots_per_rank[self._shards.place["ep"]]

    def _params(self) -> dict[str, nn.Parameter]:
        return {name: self.parameter(name) for name in self._shards.shardings}

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: param for name, param in self._params().items() if param.requires_grad}

    def _present_versions(self) -> list[int]:
        return [0 if param.is_inference() else param._version for param in self._params().values()]

    def _stack(self, name: str) -> Tensor:
        """Return the stack of a parameter, after making the parameter a view of it."""
        param = self.parameter(name)
        old, homes = self._stacks.get(name), param.shape[0]
        fits = old is not None and (old.device, old.dtype) == (param.device, param.dtype)
        if old is not None and fits and (not homes or old.data_ptr() == param.data_ptr()):
            return old
        with torch.inference_mode(False), torch.no_grad():
            rows_SX = torch.zeros(self.num_slots, *param.shape[1:], dtype=param.dtype, device=param.device)
            rows_SX[:homes] = param
            if old is not None and old.device.type != "meta":
                rows_SX[homes:] = old[homes:]
            param.data = rows_SX[:homes]
        self._stacks[name] = rows_SX
        return rows_SX
