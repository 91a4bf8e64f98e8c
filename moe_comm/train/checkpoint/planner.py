"""Planning of saves: torch's checkpoint planner for ``Entry``.

Saving takes one round trip to rank 0 (the coordinator), which assigns each box to one of the ranks that hold it:

    rank 0   embed [0..8]  copy  ─▶        embed [0..8]     ─▶ rank 0       replicated: to the rank with the least load
    rank 1   embed [0..8]  copy  ─▶  plan  norm  [0..4]     ─▶ rank 1
    rank 1   w1    [4..8]        ─▶        w1    [4..8]     ─▶ rank 1       its only holder

A plan only depends on names, shapes and mapping. Ranks with the same entries as in the last save send no items. If no
entries have changed, the coordinator only confirms the previous plan.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from moe_comm.errors import CheckpointError
from moe_comm.train.checkpoint.entries import CopiesToCpu, Entry
from moe_comm.train.checkpoint.files import DTYPES
from moe_comm.train.checkpoint.metadata import overlap


class Stager:
    """Copies boxes of entries to buffers, which are reused: new memory costs more than the copy.

    Buffers for tensors on a GPU are page-locked. Tensors that are not in memory are not copied: they are read when they
    are written to the checkpoint.
    """

    def __init__(self) -> None:
        self.copies = CopiesToCpu()
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def stage(self, entries: Mapping[str, Entry], boxes: Sequence[tuple[str, int]]) -> Mapping[tuple[str, int], Tensor]:
        """Return CPU copies of the given boxes (name, index of the box). They are valid until the next call."""
        sources = {
            (name, number): entries[name].local_box(number) for name, number in boxes if entries[name].opener is None
        }
        buffers: dict[tuple[str, int], Tensor] = {}
        for key, source in sources.items():
            buffer = self._buffers.pop(key, None)
            if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda, device="cpu")
            buffers[key] = buffer
        self.copies.copy((buffers[key], source) for key, source in sources.items())
        self._buffers = buffers
        return buffers


UNCHANGED = "as before"
"""``planner_data`` of the plan of a rank that writes the same items as last time."""


class EntryPlanner(DefaultSavePlanner):
    """Plans the saves of one rank, and caches plans between saves.

    Torch's planner can cache plans, too, but in attributes of the class, which all checkpointers of a process would
    share. It assigns replicas to ranks in the order of the items, before it knows what later ranks must write, and its
    errors do not name the ranks. So these parts are replaced.

    ``step``, ``state`` (JSON of this rank), ``problem`` (the reason why this rank cannot take part, sent to all ranks)
    and ``on_staged`` (called when the tensors may change) must be set before each save. After it, ``states`` holds the
    state of each rank on the coordinator.
    """

    def __init__(self, stager: Stager) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.step = 0
        self.state = "{}"
        self.problem: str | None = None
        self.on_staged: Callable[[], object] = lambda: None
        self.states: list[dict[str, Any]] = []
        self._stager = stager
        self._staged: Mapping[tuple[str, int], Tensor] = {}
        self.forget()

    def forget(self) -> None:
        """Clear the cached plans after a failed save: they may differ between ranks."""
        self._signature: object = None
        self._items: list[WriteItem] | None = None
        self._all_items: list[list[WriteItem]] = []
        self._metadata: Metadata | None = None

    def create_local_plan(self) -> SavePlan:
        if self.problem is not None:
            raise CheckpointError(self.problem)
        entries: Mapping[str, Entry] = self.state_dict
        signature = {name: (entry.tensor.dtype, entry.shape, entry.boxes) for name, entry in entries.items()}
        unchanged = signature == self._signature
        self._signature = signature
        items = [] if unchanged else [item for name, entry in entries.items() for item in _write_items(name, entry)]
        return SavePlan(items, planner_data=(self.step, self.state, unchanged))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        steps, states, unchanged = zip(*(plan.planner_data for plan in all_plans), strict=True)
        if len(set(steps)) > 1:
            raise CheckpointError(f"ranks disagree on the step to save: {list(steps)}")
        self.states = [json.loads(state) for state in states]
        if self._metadata is not None and all(unchanged):
            return [SavePlan([], planner_data=UNCHANGED) for _ in all_plans], self._metadata
        previous = self._all_items or [[] for _ in all_plans]
        self._all_items = [
            old if same else plan.items for old, same, plan in zip(previous, unchanged, all_plans, strict=True)
        ]
        plans = [SavePlan(items) for items in assign_writers(self._all_items)]
        plans, self._metadata = create_default_global_save_plan(plans, rewrite_index_hints=False)
        return plans, self._metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if new_plan.planner_data != UNCHANGED or self._items is None:
            # Entries that are stored together follow each other, so that each chunk of a file is read once.
            position = {name: number for number, name in enumerate(self.state_dict)}
            self._items = sorted(new_plan.items, key=lambda item: position[item.index.fqn])
        # Only the boxes that this rank writes are staged, so a replicated tensor is copied on one rank.
        boxes = [(item.index.fqn, item.index.index or 0) for item in self._items]
        self._staged = self._stager.stage(self.state_dict, boxes)
        if len(self._staged) == len(boxes):
            self.on_staged()
        return SavePlan(self._items)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        name, number = write_item.index.fqn, write_item.index.index or 0
        staged = self._staged.get((name, number))
        return self.state_dict[name].local_box(number) if staged is None else staged

    @contextmanager
    def opened(self, write_item: WriteItem) -> Iterator[Tensor]:
        """Yield the values of ``resolve_data``."""
        name, number = write_item.index.fqn, write_item.index.index or 0
        entry: Entry = self.state_dict[name]
        if entry.opener is None:
            yield self._staged[name, number]
        else:
            with entry.opened() as tensor:
                yield tensor[entry.boxes[number].local]


def _write_items(name: str, entry: Entry) -> list[WriteItem]:
    if entry.tensor.dtype not in DTYPES:
        raise CheckpointError(f"{name} has dtype {entry.tensor.dtype}, which checkpoints do not support")
    items = []
    for number, chunk in enumerate(entry.chunks()):
        if math.prod(chunk.sizes) or not math.prod(entry.shape):
            data = TensorWriteData(chunk, TensorProperties(dtype=entry.tensor.dtype), Size(entry.shape))
            items.append(WriteItem(MetadataIndex(name, chunk.offsets, number), WriteItemType.SHARD, tensor_data=data))
    return items


def assign_writers(held: Sequence[Sequence[WriteItem]]) -> list[list[WriteItem]]:
    """Assign each box in ``held`` (items by rank) to one of its holders, with about equal numbers of bytes."""
    holders: dict[tuple[str, Size, Size], dict[int, WriteItem]] = {}
    for rank, items in enumerate(held):
        for item in items:
            chunk = _data(item).chunk
            holders.setdefault((item.index.fqn, chunk.offsets, chunk.sizes), {})[rank] = item
    _check_consistent(holders)
    assigned: list[list[WriteItem]] = [[] for _ in held]
    load = [0] * len(held)  # bytes assigned to each rank
    # First the boxes with a single holder, then the largest.
    sizes = {box: _num_bytes(next(iter(items.values()))) for box, items in holders.items()}
    for box, items_by_rank in sorted(holders.items(), key=lambda pair: (len(pair[1]) > 1, -sizes[pair[0]], pair[0])):
        rank = min(items_by_rank, key=lambda r: (load[r], r))
        load[rank] += sizes[box]
        assigned[rank].append(items_by_rank[rank])
    return assigned


def _check_consistent(holders: Mapping[tuple[str, Size, Size], Mapping[int, WriteItem]]) -> None:
    tensors: dict[str, list[tuple[int, TensorWriteData]]] = {}
    for (name, _, _), items in holders.items():
        kinds = {(_data(item).size, _data(item).properties.dtype): rank for rank, item in items.items()}
        tensors.setdefault(name, []).extend((rank, _data(items[rank])) for rank in kinds.values())
    for name, parts in tensors.items():
        rank, first = parts[0]
        for other, data in parts:
            if (data.size, data.properties.dtype) != (first.size, first.properties.dtype):
                raise CheckpointError(
                    f"ranks disagree on {name}: rank {rank} has {tuple(first.size)} {first.properties.dtype}, "
                    f"rank {other} has {tuple(data.size)} {data.properties.dtype}"
                )
        chunks = [data.chunk for _, data in parts]
        overlapping = overlap(chunks)
        if overlapping is not None:
            a, b = overlapping
            raise CheckpointError(f"parts of {name} overlap without being equal: {_text(a)} and {_text(b)}")
        elements, total = sum(math.prod(chunk.sizes) for chunk in chunks), math.prod(first.size)
        if elements != total:
            raise CheckpointError(f"the ranks have {elements} of the {total} elements of {name} {tuple(first.size)}")


def _text(chunk: ChunkStorageMetadata) -> str:
    return "[" + ", ".join(f"{at}..{at + n}" for at, n in zip(chunk.offsets, chunk.sizes, strict=True)) + "]"


def _num_bytes(item: WriteItem) -> int:
    """Return the bytes of the box. ``WriteItem.tensor_storage_size`` returns those of the whole tensor."""
    return math.prod(_data(item).chunk.sizes) * _data(item).properties.dtype.itemsize


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data
