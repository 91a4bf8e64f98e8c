"""Fill local tensors from a checkpoint that any mapping may have saved.

    1. open     every rank reads the JSON, finds what it lacks and which files it needs     exchanged: all or none go on
    2. verify   every file is hashed by one of the ranks that need it                       exchanged: all or none go on
    3. read     torch's planner gives the boxes where what is saved and what is wanted meet; each is copied

Numbers are copied, never computed, so they are the same bits on every mapping.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.planner import ReadItem

from moe_comm.errors import CheckpointError
from moe_comm.train.checkpoint.entries import Entry
from moe_comm.train.checkpoint.exchange import agree, run_torch
from moe_comm.train.checkpoint.folder import METADATA
from moe_comm.train.checkpoint.planner import EntryLoader, read_plan
from moe_comm.train.checkpoint.reader import CheckpointReader, few
from moe_comm.train.checkpoint.storage import Reader


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds beside its tensors.

    step: after which it was taken. state: what all ranks shared. ranks: what each rank that saved it gave of its own;
    of use to the same rank of the same mapping only.
    """

    step: int
    state: dict[str, Any]
    ranks: tuple[dict[str, Any], ...]


def load(
    path: str | Path,
    entries: Mapping[str, Entry],
    group: ProcessGroup | None = None,
    *,
    cast: bool = False,
    allow_unused: bool = False,
) -> Loaded:
    """Fill the tensors of ``entries`` from the checkpoint at ``path``. Collective over ``group``.

    Args:
        group: the ranks that load it together (gloo); None for this process alone.
        cast: fill a floating-point tensor from one saved in another dtype, rounded as ``Tensor.copy_`` does.
        allow_unused: the checkpoint may hold tensors that no rank wants, such as optimizer state for an evaluation.

    Raises:
        CheckpointError: on every rank, before any tensor is changed: the checkpoint is incomplete or damaged (names the
            file), lacks a tensor, holds one that no rank wants, or one of another shape or dtype.
    """
    opened: list[tuple[CheckpointReader, list[ReadItem]]] = []

    def start() -> tuple[int, int]:
        reader = CheckpointReader(path)
        items = _plan(reader, entries, cast)
        opened.append((reader, items))
        files = _data_files(reader)
        needed = {reader.place(item.storage_index).file for item in items}
        return _mask(reader.names, entries), _mask(files, needed)

    wanted = agree(group, start)
    reader, items = opened[0]
    used = reduce(or_, (names for names, _ in wanted))
    unused = [name for n, name in enumerate(reader.names) if not used >> n & 1]
    if unused and not allow_unused:
        raise CheckpointError(f"{reader.path} holds tensors that no rank wants: {few(unused)}")
    mine = _to_verify(reader, [files for _, files in wanted], 0 if group is None else group.rank())
    agree(group, lambda: reader.verify(mine))
    run_torch(
        lambda: dcp.load(
            dict(entries),
            storage_reader=Reader(reader),
            planner=EntryLoader(entries, items),
            process_group=group,
            no_dist=group is None,
        )
    )
    return Loaded(reader.step, reader.state, reader.ranks)


def _plan(reader: CheckpointReader, entries: Mapping[str, Entry], cast: bool) -> list[ReadItem]:
    missing = sorted(set(entries) - set(reader.tensors))
    if missing:
        raise CheckpointError(f"{reader.path} lacks tensors that are wanted: {few(missing)}")
    items = []
    for name, entry in entries.items():
        shape, dtype, wanted = reader.shape(name), reader.dtype(name), entry.tensor.dtype
        if shape != entry.shape:
            raise CheckpointError(f"{name} has shape {shape} in {reader.path}; wanted is {entry.shape}")
        if dtype != wanted and not (cast and dtype.is_floating_point and wanted.is_floating_point):
            raise CheckpointError(f"{name} has dtype {dtype} in {reader.path}; wanted is {wanted}, without a cast")
        items.extend(read_plan(name, entry, reader.tensors[name]))
    return items


def _data_files(reader: CheckpointReader) -> list[str]:
    return sorted(name for name in reader.files if name != METADATA)


def _mask(names: Sequence[str], some: Collection[str]) -> int:
    """Which of ``names`` are in ``some``, a bit each: names take long to exchange between many ranks."""
    return sum(1 << n for n, name in enumerate(names) if name in some)


def _to_verify(reader: CheckpointReader, needed: Sequence[int], rank: int) -> list[str]:
    """The files that ``rank`` is to hash: each file goes to one of the ranks that need it, the largest first."""
    mine = []
    load = [0] * len(needed)
    names = _data_files(reader)
    for n in sorted(range(len(names)), key=lambda n: (-reader.files[names[n]].size, n)):
        takers = [taker for taker, files in enumerate(needed) if files >> n & 1]
        if takers:
            taker = min(takers, key=lambda one: (load[one], one))
            load[taker] += reader.files[names[n]].size
            if taker == rank:
                mine.append(names[n])
    return mine
