"""Who writes what, and who reads what: torch's checkpoint planners over ``Entry``.

Saving, one round trip to rank 0 (the coordinator), which gives each box to one of the ranks that hold it:

    rank 0   embed [0..8]  copy  ─▶        embed [0..8]     ─▶ rank 0       replicated: to the rank with least to write
    rank 1   embed [0..8]  copy  ─▶  plan  norm  [0..4]     ─▶ rank 1
    rank 1   w1    [4..8]        ─▶        w1    [4..8]     ─▶ rank 1       its only holder

A plan depends on names, shapes and mapping only: ranks whose part has not changed since the last save send nothing, and
where none has, the coordinator answers "as before".
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from moe_comm.errors import CheckpointError
from moe_comm.train.checkpoint.entries import Entry
from moe_comm.train.checkpoint.files import DTYPES
from moe_comm.train.checkpoint.metadata import overlap
from moe_comm.train.checkpoint.staging import Stager

AS_BEFORE = "as before"
"""``planner_data`` of the plan of a rank that is to write what it wrote last time."""


@dataclass(frozen=True)
class RankPlan:
    """What a rank tells the coordinator beside its items. unchanged: its items are those of the last save."""

    step: int
    state: str
    unchanged: bool


@dataclass(frozen=True)
class Request:
    """One save of this rank. state: JSON of its own. problem: why it cannot take part, for every rank to hear."""

    step: int
    state: str = "{}"
    problem: str | None = None


class EntryPlanner(SavePlanner):
    """Plans the saves of one rank; kept from save to save for what it remembers.

    ``request`` and ``on_staged`` (called when the tensors may change) are set before each save. After it, on the
    coordinator, ``states`` holds what each rank gave of its own.
    """

    def __init__(self, stager: Stager) -> None:
        self.request = Request(0)
        self.on_staged: Callable[[], object] = lambda: None
        self.states: list[dict[str, Any]] = []
        self._stager = stager
        self._entries: Mapping[str, Entry] = {}
        self._staged: Mapping[tuple[str, int], Tensor] = {}
        self.forget()

    def forget(self) -> None:
        """After a save that failed: ranks may remember different things."""
        self._signature: object = None
        self._mine: SavePlan | None = None
        self._all: list[list[WriteItem]] = []
        self._metadata: Metadata | None = None

    def set_up_planner(
        self,
        state_dict: Mapping[str, Entry],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._entries = state_dict

    def create_local_plan(self) -> SavePlan:
        if self.request.problem is not None:
            raise CheckpointError(self.request.problem)
        signature = {name: entry.signature() for name, entry in self._entries.items()}
        unchanged = signature == self._signature
        self._signature = signature
        items = [] if unchanged else [item for name, entry in self._entries.items() for item in _items(name, entry)]
        return SavePlan(items, planner_data=RankPlan(self.request.step, self.request.state, unchanged))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        owns: list[RankPlan] = [plan.planner_data for plan in all_plans]
        steps = {own.step for own in owns}
        if len(steps) > 1:
            raise CheckpointError(f"ranks disagree on the step to save: {[own.step for own in owns]}")
        self.states = [json.loads(own.state) for own in owns]
        if self._metadata is not None and all(own.unchanged for own in owns):
            return [SavePlan([], planner_data=AS_BEFORE) for _ in all_plans], self._metadata
        kept = self._all or [[] for _ in all_plans]
        self._all = [old if own.unchanged else plan.items for old, own, plan in zip(kept, owns, all_plans, strict=True)]
        given = share_out(self._all)
        self._metadata = describe(given)
        return [SavePlan(items) for items in given], self._metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if new_plan.planner_data != AS_BEFORE or self._mine is None:
            self._mine = new_plan
        # Only what this rank is to write is copied: a copy of a replicated tensor is staged on one rank.
        wanted = [(item.index.fqn, item.index.index or 0) for item in self._mine.items]
        self._staged = self._stager.stage(self._entries, wanted)
        self.on_staged()
        return replace(self._mine, planner_data=None)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._staged[write_item.index.fqn, write_item.index.index or 0]


def _items(name: str, entry: Entry) -> list[WriteItem]:
    if entry.tensor.dtype not in DTYPES:
        raise CheckpointError(f"{name} has dtype {entry.tensor.dtype}, which a checkpoint does not hold")
    items = []
    for number, chunk in enumerate(entry.chunks()):
        if math.prod(chunk.sizes) or not math.prod(entry.shape):
            data = TensorWriteData(chunk, TensorProperties(dtype=entry.tensor.dtype), Size(entry.shape))
            items.append(WriteItem(MetadataIndex(name, chunk.offsets, number), WriteItemType.SHARD, tensor_data=data))
    return items


def share_out(held: Sequence[Sequence[WriteItem]]) -> list[list[WriteItem]]:
    """Give every box that some ranks hold (``held`` by rank) to one of them, so that all write about as much.

    Raises:
        CheckpointError: ranks disagree on a tensor's shape or dtype, a part of one is held by no rank, or parts
            overlap without being equal.
    """
    holders: dict[tuple[str, Size, Size], dict[int, WriteItem]] = {}
    for rank, items in enumerate(held):
        for item in items:
            chunk = _data(item).chunk
            holders.setdefault((item.index.fqn, chunk.offsets, chunk.sizes), {})[rank] = item
    _check(holders)
    given: list[list[WriteItem]] = [[] for _ in held]
    load = [0] * len(held)
    # First what only one rank can write, then the largest.
    order = sorted(holders.items(), key=lambda one: (len(one[1]) > 1, -_bytes(next(iter(one[1].values()))), one[0]))
    for _, items_by_rank in order:
        rank = min(items_by_rank, key=lambda r: (load[r], r))
        load[rank] += _bytes(items_by_rank[rank])
        given[rank].append(items_by_rank[rank])
    return given


def describe(given: Sequence[Sequence[WriteItem]]) -> Metadata:
    """torch's description of the tensors whose boxes were given out."""
    metadata = Metadata({})
    for item in (item for items in given for item in items):
        data = _data(item)
        fresh = TensorStorageMetadata(TensorProperties(dtype=data.properties.dtype), data.size, [])
        tensor = metadata.state_dict_metadata.setdefault(item.index.fqn, fresh)
        assert isinstance(tensor, TensorStorageMetadata)
        tensor.chunks.append(data.chunk)
    return metadata


def _check(holders: Mapping[tuple[str, Size, Size], Mapping[int, WriteItem]]) -> None:
    tensors: dict[str, list[tuple[int, TensorWriteData]]] = {}
    for (name, _, _), items in holders.items():
        kinds = {(_data(item).size, _data(item).properties.dtype): rank for rank, item in items.items()}
        tensors.setdefault(name, []).extend((rank, _data(items[rank])) for rank in kinds.values())
    for name, pieces in tensors.items():
        rank, first = pieces[0]
        for other, data in pieces:
            if (data.size, data.properties.dtype) != (first.size, first.properties.dtype):
                raise CheckpointError(
                    f"ranks disagree on {name}: rank {rank} has {tuple(first.size)} {first.properties.dtype}, "
                    f"rank {other} has {tuple(data.size)} {data.properties.dtype}"
                )
        chunks = [data.chunk for _, data in pieces]
        both = overlap(chunks)
        if both is not None:
            a, b = both
            raise CheckpointError(f"parts of {name} overlap without being equal: {_text(a)} and {_text(b)}")
        found, whole = sum(math.prod(chunk.sizes) for chunk in chunks), math.prod(first.size)
        if found != whole:
            raise CheckpointError(f"of {name} {tuple(first.size)} the ranks hold {found} of {whole} elements")


def _text(chunk: ChunkStorageMetadata) -> str:
    return "[" + ", ".join(f"{at}..{at + n}" for at, n in zip(chunk.offsets, chunk.sizes, strict=True)) + "]"


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


def _bytes(item: WriteItem) -> int:
    return math.prod(_data(item).chunk.sizes) * _data(item).properties.dtype.itemsize


class EntryLoader(LoadPlanner):
    """Fills the local tensors of entries by a plan that was made before."""

    def __init__(self, entries: Mapping[str, Entry], items: list[ReadItem]) -> None:
        self._entries = entries
        self._items = items

    def set_up_planner(self, *_: object, **__: object) -> None:
        pass

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(self._items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is no tensor")  # never planned: we save tensors only

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        piece = self._entries[read_item.dest_index.fqn].piece(read_item.dest_index.index or 0)
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            piece = piece.narrow(dim, offset, length)
        return piece

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def read_plan(name: str, entry: Entry, saved: TensorStorageMetadata) -> list[ReadItem]:
    """What to read of a saved tensor to fill ``entry``.

    Raises:
        CheckpointError: the checkpoint does not hold all of it.
    """
    items: list[ReadItem] = create_read_items_for_chunk_list(name, saved, entry.chunks())
    found = sum(math.prod(item.lengths) for item in items)
    if found != entry.tensor.numel():
        raise CheckpointError(f"the checkpoint holds {found} of the {entry.tensor.numel()} elements wanted of {name}")
    return items
