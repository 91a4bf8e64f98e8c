"""Moves the rows of stacks over experts between ranks, when experts change their rank.

    owners of experts 0..3    0 0 1 1  ─▶  1 0 1 0

    rank 0    w13[0] ──────────────▶ rank 1          slots of rank 0: experts 0 1 ─▶ 1 3
              w13[1] ─▶ slot 0
    rank 1    w13[3] ──────────────▶ rank 0, slot 1  slots of rank 1: experts 2 3 ─▶ 0 2

Only rows of experts that change their rank are sent. Each rank computes the same list of transfers from the boxes of
all ranks, so nothing else is exchanged. Received rows are staged: a failure leaves the tensors unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import Channel
from moe_comm.errors import ConfigError
from moe_comm.layers.parallel.collectives import channel_of, gather_values
from moe_comm.topology import Box, Sharding

Index = tuple[slice, ...]


@dataclass(frozen=True)
class MovedStack:
    """Tensors whose dimension 0 counts experts, all with the same rows: a weight and its optimizer state.

    Attributes:
        tensors: the local tensors, of one shape.
        old, new: boxes of each rank of the group in the full stack, before and after.
        may_send: whether a rank sends to another one; for ranks that hold replicas, each receives from one of them.
    """

    tensors: Sequence[Tensor]
    old: Sequence[Sequence[Box]]
    new: Sequence[Sequence[Box]]
    may_send: Callable[[int, int], bool] = lambda source, destination: True

    @classmethod
    def of(
        cls, tensors: Sequence[Tensor], old: Sharding, new: Sharding, places: Sequence[Mapping[str, int]]
    ) -> MovedStack:
        """Return the stack for ranks at ``places`` on the axes "ep" and "etp", which all hold different rows."""
        sizes = {axis: 1 + max(place[axis] for place in places) for axis in ("ep", "etp")}
        before, after = ([sharding.boxes(place, sizes) for place in places] for sharding in (old, new))
        return cls(tensors, before, after)


def moved_state(name: str, weights: Tensor, state: Mapping[str, object]) -> list[Tensor]:
    """Return the tensors of the optimizer state of an expert parameter that move with ``weights``.

    Scalars, such as a count of steps, stay.

    Args:
        name: name of the parameter, for the error.

    Raises:
        ConfigError: a tensor has another shape than ``weights``, so it is not known which of its rows are of an expert.
    """
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim()}
    for key, value in tensors.items():
        if value.shape != weights.shape:
            raise ConfigError(
                f"the optimizer state {key!r} of {name} has shape {tuple(value.shape)}, but the weights have "
                f"{tuple(weights.shape)}; only state with the shape of the weights can move with experts"
            )
    return list(tensors.values())


@dataclass(frozen=True)
class Transfer:
    """A range of one expert's row that changes its place: ranks, and positions in their local tensors."""

    source: int
    destination: int
    from_index: Index
    to_index: Index


def transfers_of(stack: MovedStack) -> Iterator[Transfer]:
    """Yield the ranges that change their place, ordered by expert, destination and source."""
    old, new = _by_expert(stack.old), _by_expert(stack.new)
    for expert, targets in sorted(new.items()):
        sources = old.get(expert, [])
        if sources == targets:
            continue
        for destination, target in targets:
            for source, origin in sources:
                if not stack.may_send(source, destination):
                    continue
                pair = _intersect(origin, target)
                if pair is not None and (source, pair[0]) != (destination, pair[1]):
                    yield Transfer(source, destination, *pair)


@dataclass(frozen=True)
class Relocation:
    """Staged rows. Nothing has changed until ``apply``.

    Attributes:
        sent_bytes: bytes that this rank sent to other ranks.
    """

    sent_bytes: int
    _rows: Sequence[tuple[Tensor, Index, Tensor]]

    @torch.no_grad()
    def apply(self) -> None:
        """Write the staged rows."""
        for tensor, index, rows in self._rows:
            tensor[index].copy_(rows)


@torch.no_grad()
def stage(stacks: Sequence[MovedStack], group: ProcessGroup | None, rank: int, what: str) -> Relocation:
    """Transfer the rows of ``stacks`` that change their rank, and stage them. Collective over ``group``.

    Args:
        stacks: the same stacks on all ranks, in the same order.
        rank: position of this rank in ``group``, as in the boxes.
        what: description of the transfer, for errors.

    Raises:
        PeerDied, PeerTimeout: a rank died, or did not take part in time. The tensors are unchanged.
    """
    rows: list[tuple[Tensor, Index, Tensor]] = []
    world = len(stacks[0].old) if stacks else 1
    sent: list[list[Tensor]] = [[] for _ in range(world)]
    received: list[list[tuple[Tensor, Index]]] = [[] for _ in range(world)]
    transfers_exist = False
    for stack in stacks:
        for transfer in transfers_of(stack):
            here, there = transfer.source == rank, transfer.destination == rank
            transfers_exist = transfers_exist or transfer.source != transfer.destination
            for tensor in stack.tensors if here or there else ():
                if here and there:
                    rows.append((tensor, transfer.to_index, tensor[transfer.from_index].clone()))
                elif here:
                    sent[transfer.destination].append(_as_bytes(tensor[transfer.from_index]))
                else:
                    received[transfer.source].append((tensor, transfer.to_index))
    if group is None or not transfers_exist:
        return Relocation(0, rows)
    device = stacks[0].tensors[0].device
    sizes_out = [sum(part.numel() for part in parts) for parts in sent]
    sizes_in = [sum(tensor[index].nbytes for tensor, index in parts) for parts in received]
    flat = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *(part for parts in sent for part in parts)])
    # Not the shared channel: it takes another path on a rank whose sizes happen to be equal.
    shared = channel_of(group)
    buffer = Channel(shared.comm, shared.timeout_s).all_to_all(flat, sizes_out, sizes_in, what)
    offset = 0
    for tensor, index in (one for parts in received for one in parts):
        size = tensor[index].nbytes
        # Copied, because the view of a dtype needs an aligned start.
        staged = buffer[offset : offset + size].clone().view(tensor.dtype).view(tensor[index].shape)
        rows.append((tensor, index, staged))
        offset += size
    gather_values(torch.ones(1), group, f"{what}: all ranks have their rows")
    return Relocation(flat.numel(), rows)


def _as_bytes(rows: Tensor) -> Tensor:
    return rows.detach().contiguous().view(-1).view(torch.uint8)


def _by_expert(boxes_by_rank: Sequence[Sequence[Box]]) -> dict[int, list[tuple[int, Box]]]:
    """Return the non-empty boxes of single experts, with their rank."""
    result: dict[int, list[tuple[int, Box]]] = {}
    for rank, boxes in enumerate(boxes_by_rank):
        for box in boxes:
            if any(part.start == part.stop for part in box.full):
                continue
            for expert in range(box.full[0].start, box.full[0].stop):
                local = box.local[0].start + expert - box.full[0].start
                one = Box((slice(local, local + 1), *box.local[1:]), (slice(expert, expert + 1), *box.full[1:]))
                result.setdefault(expert, []).append((rank, one))
    return result


def _intersect(source: Box, target: Box) -> tuple[Index, Index] | None:
    """Return the positions of the common elements in the local tensors of both boxes; None if there are none."""
    from_index, to_index = [], []
    for a_local, a, b_local, b in zip(source.local, source.full, target.local, target.full, strict=True):
        low, high = max(a.start, b.start), min(a.stop, b.stop)
        if low >= high:
            return None
        from_index.append(slice(a_local.start + low - a.start, a_local.start + high - a.start))
        to_index.append(slice(b_local.start + low - b.start, b_local.start + high - b.start))
    return tuple(from_index), tuple(to_index)
