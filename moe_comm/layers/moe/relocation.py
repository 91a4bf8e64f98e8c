"""Moves the rows of stacks over experts between ranks, when experts change their rank.

    owners of experts 0..3    0 0 1 1  ─▶  1 0 1 0

    rank 0    w13[0] ──────────────▶ rank 1          slots of rank 0: experts 0 1 ─▶ 1 3
              w13[1] ─▶ slot 0
    rank 1    w13[3] ──────────────▶ rank 0, slot 1  slots of rank 1: experts 2 3 ─▶ 0 2

Only rows of experts that change their rank are sent. Each rank computes the same list of transfers from the boxes of
all ranks, so nothing else is exchanged. Each rank packs the rows that move into one block. CPU ranks of one host
read the blocks of their peers in shared memory; other ranks send them with one all-to-all. A failure leaves the tensors
unchanged: they are written after all ranks have their rows, or restored from the rank's own block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.agree import compare
from moe_comm.comm.channel import Channel
from moe_comm.comm.shared_channel import SharedChannel
from moe_comm.comm.sparse_rows import Read, SharedBlocks, aligned_bytes, share_blocks, start_blocks
from moe_comm.errors import ConfigError
from moe_comm.layers.data_parallel.expert_shard import plain
from moe_comm.layers.data_parallel.gradients import managed_by_fsdp
from moe_comm.layers.moe.expert_parallel import ExpertParallel
from moe_comm.layers.moe.experts import Experts
from moe_comm.layers.parallel.collectives import channel_of
from moe_comm.runtime.memory import warm_rows
from moe_comm.topology import Box, Placement

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


def moved_state(name: str, weights: Tensor, state: Mapping[str, object]) -> list[Tensor]:
    """Return the tensors of the optimizer state of an expert parameter that move with ``weights``.

    Scalars, such as a count of steps, stay.

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
class _Range:
    """A range of one expert's row of a tensor that moves: ranks, positions in their local tensors, and bytes.

    start: position in the block that the source packs.
    """

    source: int
    destination: int
    from_index: Index
    to_index: Index
    tensor: Tensor
    start: int = 0

    @property
    def size(self) -> int:
        elements: int = math.prod(part.stop - part.start for part in self.from_index)
        return elements * self.tensor.element_size()


def _ranges_of(stack: MovedStack) -> Iterator[_Range]:
    """Yield the ranges that move, ordered by expert, destination and source."""
    old, new = _by_expert(stack.old), _by_expert(stack.new)
    for expert, targets in sorted(new.items()):
        sources = old.get(expert, [])
        for (destination, target), (source, origin) in product(targets, sources if sources != targets else ()):
            pair = _intersect(origin, target) if stack.may_send(source, destination) else None
            if pair is not None and (source, pair[0]) != (destination, pair[1]):
                yield from (_Range(source, destination, *pair, tensor) for tensor in stack.tensors)


class RowMoves:
    """All ranges that move in one call of ``run``.

    Args:
        stacks: one or more, the same on all ranks, in the same order. Each rank has as many rows before as after.
        rank: position of this rank in the group, as in the boxes.

    Attributes:
        going, coming: ranges that this rank sends, and that it receives; both have those that move within the rank.
        sizes: [source][destination], bytes that move. Equal on all ranks.
    """

    def __init__(self, stacks: Sequence[MovedStack], rank: int) -> None:
        world, self._like = len(stacks[0].old), stacks[0].tensors[0]
        self.rank, self.sizes = rank, [[0] * world for _ in range(world)]
        ranges = []
        moved = (one for stack in stacks for one in _ranges_of(stack))
        for one in sorted(moved, key=lambda one: (one.source, one.destination)):
            sizes = self.sizes[one.source]
            ranges.append(replace(one, start=sum(sizes)))
            sizes[one.destination] += aligned_bytes(one.size)
        self.going = [one for one in ranges if one.source == rank]
        self.coming = [one for one in ranges if one.destination == rank]

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to other ranks."""
        return sum(one.size for one in self.going if one.destination != self.rank)

    @torch.no_grad()
    def run(self, group: ProcessGroup | None, what: str) -> None:
        """Move the rows. Collective over ``group``.

        Args:
            what: description of the transfer, for errors.

        Raises:
            PeerDied, PeerTimeout: a rank died, or did not take part in time. The tensors are unchanged.
        """
        if group is None or not any(size for a, of in enumerate(self.sizes) for b, size in enumerate(of) if a != b):
            block = warm_rows(1, sum(self.sizes[self.rank]), torch.uint8, self._like.device).view(-1)
            self.pack(block)
            self.apply(lambda source, first, size: block[first : first + size])
            return
        channel = channel_of(group)
        if channel.uses_shared_memory(self._like) and _through_memory(self, channel, what):
            return

        def use(read: Read) -> None:
            ready = torch.ones(1, device=channel.control_device, dtype=torch.float32)
            Channel(channel.comm, channel.timeout_s).all_gather(ready, f"{what}: all ranks have their rows")
            self.apply(read)

        start_blocks(channel, self._like.device, (self.sizes, self.pack, use), what)()

    def pack(self, block: Tensor) -> None:
        """Copy what moves from this rank into its block."""
        for one in self.going:
            rows = one.tensor[one.from_index]
            block[one.start : one.start + one.size].view(rows.dtype).view(rows.shape).copy_(rows)

    def apply(self, read: Read) -> None:
        """Write all ranges to their new positions."""
        for one in self.coming:
            _unpack(one, one.to_index, read)

    def undo(self, read: Read) -> None:
        """Undo ``apply``, also one that raised, from this rank's block: a rank keeps its number of rows, so rows that
        others overwrite have moved."""
        for one in self.going:
            _unpack(one, one.from_index, read)


def _unpack(one: _Range, index: Index, read: Read) -> None:
    """Copy a range from the block of its source to ``index`` of the tensor."""
    rows = one.tensor[index]
    rows.copy_(read(one.source, one.start, one.size).view(rows.dtype).view(rows.shape))


def _through_memory(moves: RowMoves, channel: SharedChannel, what: str) -> bool:
    """Send through shared memory, with two copies. Return False on every rank if a rank has no room."""
    reads: list[Read] = []

    def use(read: Read) -> None:
        reads.append(read)
        moves.apply(read)

    try:
        blocks = SharedBlocks(sum(moves.sizes[moves.rank]), sum(map(sum, moves.sizes)), moves.pack, use)
        return share_blocks(channel, blocks, what)
    except BaseException:
        for read in reads:
            moves.undo(read)
        raise


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


def stacks_to_move(
    layer: ExpertParallel,
    experts: Experts,
    placement: Placement,
    check: Callable[[Placement], None],
    state: Mapping[Any, Mapping[str, Any]],
) -> list[MovedStack]:
    """Return the weights of the layer's ``experts``, each with the tensors of ``state`` that move with it. Collective.

    check: raises ConfigError if ``placement`` does not fit the layer.

    Raises:
        ConfigError, RankMismatch: ``placement`` is invalid, or it or the tensors differ between ranks; on all ranks.
    """
    fault: ConfigError | None = None
    moved: dict[str, list[Tensor]] = {}
    try:
        check(placement)
        for name, param in experts.named_parameters():
            moved[name] = [param.data, *map(plain, moved_state(name, param, state.get(param, {})))]
        if any(managed_by_fsdp(param) for param in experts.parameters()):
            raise ConfigError(f"FSDP shards the experts of layer {layer.label!r}, which cannot be relocated")
    except ConfigError as error:
        fault = error
    dispatcher = layer.dispatcher
    if dispatcher.group is not None and dispatcher.world > 1:
        same = {
            "new placement of experts": placement.digest,
            "present placement": layer.placement.digest,
            "layer": layer.label,
            "weights and optimizer state": str([(name, [t.dtype for t in parts]) for name, parts in moved.items()]),
        }
        compare(channel_of(dispatcher.group), "a relocation of experts", same, fault=fault)
    elif fault is not None:
        raise fault
    places = [{"ep": at // layer.sizes["etp"], "etp": at % layer.sizes["etp"]} for at in range(dispatcher.world)]
    stacks = []
    for name, tensors in moved.items():
        shardings = (experts.shardings_over(one)[name] for one in (layer.placement, placement))
        old, new = ([sharding.boxes(place, layer.sizes) for place in places] for sharding in shardings)
        stacks.append(MovedStack(tensors, old, new))
    return stacks
