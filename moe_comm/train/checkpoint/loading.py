"""Loading of local tensors from a checkpoint that any mapping may have saved.

    1. open     every rank reads the JSON and determines missing tensors and needed files
    2. verify   each file is hashed by one of the ranks that need it
    3. read     torch's planner returns the intersections of saved and local boxes; each is copied

After steps 1 and 2, the ranks exchange their errors: all continue, or all raise.

Values are only copied, so they have the same bits on every mapping.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup, checkpoint as dcp
from torch.distributed.checkpoint.planner import ReadItem

from moe_comm.errors import CheckpointError
from moe_comm.train.checkpoint.entries import Entry
from moe_comm.train.checkpoint.exchange import gather_or_raise, run_torch
from moe_comm.train.checkpoint.folder import METADATA
from moe_comm.train.checkpoint.planner import EntryLoader, read_plan
from moe_comm.train.checkpoint.reader import CheckpointReader, first_names
from moe_comm.train.checkpoint.storage import CheckpointStorageReader


@dataclass(frozen=True)
class Loaded:
    """The content of a checkpoint besides its tensors.

    Attributes:
        step: training step after which it was saved.
        state: state shared by all ranks.
        ranks: state of each rank that saved it. Only the same rank of the same mapping can use it.
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
        group: the ranks that load it together (gloo); None for this process only.
        cast: fill a floating-point tensor from one saved in another dtype, rounded as ``Tensor.copy_`` does.
        allow_unused: ignore tensors of the checkpoint that no rank requests, such as optimizer state in an evaluation.

    Raises:
        CheckpointError: on every rank, before any tensor is changed. The checkpoint is incomplete or damaged (the
            message names the file), lacks a tensor, contains one that no rank requests, or one of another shape or
            dtype.
    """
    opened: list[tuple[CheckpointReader, list[ReadItem]]] = []

    def open_and_plan() -> tuple[int, int]:
        reader = CheckpointReader(path)
        items = _plan(reader, entries, cast)
        opened.append((reader, items))
        files = _data_files(reader)
        needed = {reader.location(item.storage_index).file for item in items}
        return _mask(reader.names, entries), _mask(files, needed)

    # 1. open
    requests = gather_or_raise(group, open_and_plan)
    reader, items = opened[0]
    used = reduce(or_, (names for names, _ in requests))
    unused = [name for n, name in enumerate(reader.names) if not used >> n & 1]
    if unused and not allow_unused:
        raise CheckpointError(f"{reader.path} contains tensors that no rank requests: {first_names(unused)}")
    # 2. verify
    to_verify = _to_verify(reader, [files for _, files in requests], 0 if group is None else group.rank())
    gather_or_raise(group, lambda: reader.verify(to_verify))
    # 3. read
    run_torch(
        lambda: dcp.load(
            dict(entries),
            storage_reader=CheckpointStorageReader(reader),
            planner=EntryLoader(entries, items),
            process_group=group,
            no_dist=group is None,
        )
    )
    return Loaded(reader.step, reader.state, reader.ranks)


def _plan(reader: CheckpointReader, entries: Mapping[str, Entry], cast: bool) -> list[ReadItem]:
    missing = sorted(set(entries) - set(reader.tensors))
    if missing:
        raise CheckpointError(f"{reader.path} lacks tensors: {first_names(missing)}")
    items = []
    for name, entry in entries.items():
        shape, dtype, expected = reader.shape(name), reader.dtype(name), entry.tensor.dtype
        if shape != entry.shape:
            raise CheckpointError(f"{name} has shape {shape} in {reader.path}; expected {entry.shape}")
        if dtype != expected and not (cast and dtype.is_floating_point and expected.is_floating_point):
            raise CheckpointError(f"{name} has dtype {dtype} in {reader.path}; expected {expected} (cast is not set)")
        items.extend(read_plan(name, entry, reader.tensors[name]))
    return items


def _data_files(reader: CheckpointReader) -> list[str]:
    return sorted(name for name in reader.files if name != METADATA)


def _mask(names: Sequence[str], selected: Collection[str]) -> int:
    """Return a bit mask of the ``names`` in ``selected``. It is faster to exchange between many ranks than names."""
    return sum(1 << n for n, name in enumerate(names) if name in selected)


def _to_verify(reader: CheckpointReader, needed: Sequence[int], rank: int) -> list[str]:
    """Return the files that ``rank`` hashes. Each file is assigned to one rank that needs it, the largest first."""
    to_verify = []
    num_bytes = [0] * len(needed)  # bytes assigned to each rank
    names = _data_files(reader)
    for n in sorted(range(len(names)), key=lambda n: (-reader.files[names[n]].size, n)):
        candidates = [candidate for candidate, files in enumerate(needed) if files >> n & 1]
        if candidates:
            chosen = min(candidates, key=lambda candidate: (num_bytes[candidate], candidate))
            num_bytes[chosen] += reader.files[names[n]].size
            if chosen == rank:
                to_verify.append(names[n])
    return to_verify
