"""Read the traces published with the study of stragglers (arXiv 2505.05713), with strict checks.

A trace is a Parquet file with a row for each operation of each worker in some sampled steps:

    dp_rank, stage, rank    the worker: its data-parallel and pipeline coordinates, and its number
    step, optype            step and type of the operation; ``OPERATIONS`` are the types
    start_ts, duration      seconds
    seq_id                  index among the worker's operations of this type in the step, in order of begin
    mc, gmc, mb_id          model chunk of the worker, model chunk of the model, and micro-batch; -1 for none

The dependencies are those of the paper's section 3:

    params-all-gather ─▶ forward-recv ─▶ forward-compute ─▶ forward-send            one stream for computation, one
    backward-recv ─▶ backward-compute ─▶ backward-send                              each for sends and receives
    last backward ─▶ gc ─▶ layernorm grads ─▶ embedding grads ─▶ grads-reduce-scatter ─▶ clip ─▶ optimizer

These form collectives: a send and its receive, a stage's data-parallel ranks, the two stages of the embedding, and all
ranks in clipping.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_comm.errors import ConfigError, CorruptFile, MissingDependency, pip_install
from moe_comm.runtime.untrusted import open_regular, shown
from moe_plan.arrays import Ints
from moe_plan.whatif.trace_table import MOST_OPERATIONS, TraceGraph, TraceTable

FORWARD, BACKWARD = "forward-compute", "backward-compute"
GATHER, SCATTER, SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
COLLECT, NORMS, EMBEDDING = "gc", "layernorm-grads-all-reduce", "embedding-grads-all-reduce"
CLIP, UPDATE = "optimizer-clip-main-grad", "optimizer"
TRANSFERS = ("forward-send", "forward-recv", "backward-send", "backward-recv")
COMPUTE = (FORWARD, BACKWARD, COLLECT, UPDATE)
OPERATIONS = (*COMPUTE, *TRANSFERS, GATHER, SCATTER, SEPARATE, NORMS, EMBEDDING, CLIP)

# Streams of a worker, and the order of operations after the last backward pass on their stream.
_STREAMS = {FORWARD: 0, BACKWARD: 0, **{name: 1 + at for at, name in enumerate(TRANSFERS)}, GATHER: 5, SCATTER: 5}
_TAIL = (COLLECT, NORMS, EMBEDDING, SEPARATE, CLIP, UPDATE)
_TAIL_STREAM = 6
_PER_WORKER = 7
_SAME_S = 5e-5
"""Upper bound of the clock differences between workers, in seconds."""
_COLUMNS = ("dp_rank", "stage", "rank", "step", "start_ts", "duration", "seq_id", "mc", "gmc", "mb_id")
_INTS = tuple(name for name in _COLUMNS if name not in ("start_ts", "duration"))
MOST_WORKERS = 1 << 20
MOST_EQUAL_ROWS = 1 << 16
"""Number of rows that a file of any size may have."""
MOST_ROW_BYTES = 1 << 10
"""Maximum size of a row in a file without compression."""


@dataclass(frozen=True)
class StragglerTrace:
    """A trace as read. table: has coordinates "dp" and "pp". sequence_N, model_chunk_N: ``seq_id`` and ``gmc``."""

    table: TraceTable
    sequence_N: Ints
    model_chunk_N: Ints


def read_straggler_trace(path: Path) -> StragglerTrace:
    """Read a trace of up to ``MOST_OPERATIONS`` rows. It takes about 130 bytes of memory per row.

    Raises:
        ConfigError: the file does not exist or is not a Parquet file.
        CorruptFile: a column is missing or has a wrong type, a value is out of range, a type of operation is unknown,
            or a worker has no operations in a step.
        MissingDependency: pyarrow is not installed.
    """
    columns, names, name_N = _read(path)
    begin_N, seconds_N = columns["start_ts"], columns["duration"]
    with np.errstate(over="ignore", invalid="ignore"):
        finite = np.isfinite(begin_N + seconds_N).all()
    if not (finite and (seconds_N >= 0).all()):
        raise CorruptFile(f"{path}: start_ts and duration must be finite, and duration must not be negative")
    for name in ("dp_rank", "stage", "rank", "seq_id"):
        low, high = columns[name].min(), columns[name].max()
        if low < 0 or high >= MOST_WORKERS:
            raise CorruptFile(f"{path}: {name} must be from 0 to below {MOST_WORKERS}; got {low} to {high}")
    table = TraceTable(
        names,
        name_N,
        columns["step"],
        columns["mb_id"],
        columns["mc"],
        columns["rank"],
        begin_N,
        begin_N + seconds_N,
        ~np.isin(np.array(names), COMPUTE)[name_N],
        np.zeros(len(name_N), dtype=np.int64),
        {"dp": columns["dp_rank"], "pp": columns["stage"]},
    )
    _check_workers(table, path)
    return StragglerTrace(table, columns["seq_id"], columns["gmc"])


def _read(path: Path) -> tuple[dict[str, Any], tuple[str, ...], Ints]:
    """Return the columns of numbers, the sorted types of operations, and the type of each operation."""
    try:
        import pyarrow.parquet as parquet  # in the optional extra "data"
    except ImportError as error:
        raise MissingDependency(f"{path} needs pyarrow; install with: {pip_install('data')}") from error
    with contextlib.ExitStack() as stack:
        try:
            source = stack.enter_context(os.fdopen(open_regular(path), "rb"))
            # As a dictionary, a name takes memory once and not in each row.
            file = stack.enter_context(parquet.ParquetFile(source, read_dictionary=["optype"]))
        except FileNotFoundError:
            raise ConfigError(f"{path} is not a file; expected a Parquet file of operations") from None
        except Exception as error:  # pyarrow raises several types of errors, which are not all public
            raise ConfigError(f"cannot read {path} as a Parquet file: {error}") from error
        _check_sizes(path, file, os.fstat(source.fileno()).st_size)
        try:
            result = file.read(columns=[*_COLUMNS, "optype"])
            columns = {name: result[name].to_numpy() for name in _COLUMNS}
            kinds = result["optype"].unify_dictionaries().combine_chunks()
            listed = kinds.dictionary.to_pylist()
        except Exception as error:
            raise CorruptFile(f"{path}: cannot read its columns: {error}") from error
    if unknown := sorted({shown(name, 40) for name in listed if name not in OPERATIONS}):
        raise CorruptFile(f"{path}: unknown operations {', '.join(unknown)[:200]}; known: {', '.join(OPERATIONS)}")
    if kinds.null_count:
        raise CorruptFile(f"{path}: optype must be text")
    # The dictionary may have a name twice, or one that no row has.
    name_N = np.asarray(kinds.indices.to_numpy(), dtype=np.int64)
    used = {listed[index] for index in np.unique(name_N)}
    names = tuple(sorted(used))
    name_N = np.array([names.index(name) if name in used else -1 for name in listed])[name_N]
    for name, values in columns.items():
        kinds = "iu" if name in _INTS else "f"
        if values.dtype.kind not in kinds:
            raise CorruptFile(f"{path}: {name} must hold {'integers' if kinds == 'iu' else 'floating-point numbers'}")
        columns[name] = values.astype(np.int64 if name in _INTS else np.float64)
    return columns, names, name_N


def _check_sizes(path: Path, file: Any, size: int) -> None:
    """Check the description of a Parquet file of ``size`` bytes before memory is allocated for its columns.

    Equal values take almost no space in a file, so a few kilobytes could hold any number of rows. The times of a real
    trace differ: its rows take at least 8 bytes.

    Raises:
        CorruptFile: it has too many rows for its size, too large values, or lacks a column or has one of another type.
    """
    import pyarrow

    rows = file.metadata.num_rows
    if not 0 < rows <= min(MOST_OPERATIONS, max(size, MOST_EQUAL_ROWS)):
        raise CorruptFile(f"{path} has {rows} operations in {size} bytes; expected 1 to {MOST_OPERATIONS}")
    schema = file.schema_arrow
    if missing := [name for name in (*_COLUMNS, "optype") if name not in schema.names]:
        raise CorruptFile(f"{path} lacks the columns {', '.join(missing)}")
    for name in _COLUMNS:
        kind = schema.field(name).type
        if not (pyarrow.types.is_integer(kind) if name in _INTS else pyarrow.types.is_floating(kind)):
            raise CorruptFile(
                f"{path}: {name} must hold {'integers' if name in _INTS else 'floating-point numbers'}; it has {kind}"
            )
    kind = schema.field("optype").type
    text = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if not (pyarrow.types.is_string(text) or pyarrow.types.is_large_string(text)):
        raise CorruptFile(f"{path}: unknown operations: optype must be text; it has {kind}")
    groups = range(file.metadata.num_row_groups)
    decoded = sum(file.metadata.row_group(group).total_byte_size for group in groups)
    if decoded > rows * MOST_ROW_BYTES + (1 << 20):
        raise CorruptFile(f"{path}: its {rows} operations take {decoded} bytes; expected at most {MOST_ROW_BYTES} each")


def _check_workers(table: TraceTable, path: Path) -> None:
    dp_N, pp_N = table.coordinates["dp"], table.coordinates["pp"]
    workers = (int(dp_N.max()) + 1) * (int(pp_N.max()) + 1)
    _, step_N = np.unique(table.step_N, return_inverse=True)
    count = len(np.unique((step_N * (dp_N.max() + 1) + dp_N) * (pp_N.max() + 1) + pp_N))
    if count != workers * len(table.steps):
        raise CorruptFile(
            f"{path} has {count} pairs of worker and step; expected {workers} workers (data-parallel times pipeline "
            f"ranks) in each of {len(table.steps)} steps"
        )


def straggler_graph(trace: StragglerTrace) -> TraceGraph:
    """Build the graph of dependencies.

    Raises:
        CorruptFile: sends and receives do not match, or a group's ranks have different operations.
    """
    order = _stream_order(trace)
    table = trace.table.take(order)
    sequence_N, model_chunk_N = trace.sequence_N[order], trace.model_chunk_N[order]
    worker_N = _workers(table)
    stream_N = worker_N * _PER_WORKER + _streams(table)
    graph = _Builder(table, sequence_N, model_chunk_N)
    first = np.flatnonzero(np.diff(worker_N, prepend=-1))
    for begin, end in zip(first, np.append(first[1:], len(table)), strict=True):
        graph.add_worker(int(begin), int(end))
    return TraceGraph.make(
        table,
        stream_N,
        graph.collectives(),
        np.array(graph.before, dtype=np.int64),
        np.array(graph.after, dtype=np.int64),
        table.name_N,
    )


def _workers(table: TraceTable) -> Ints:
    """Return the number of each operation's step and worker, [N]."""
    dp, pp = (int(table.coordinates[name].max()) + 1 for name in ("dp", "pp"))
    _, step_N = np.unique(table.step_N, return_inverse=True)
    return np.asarray((step_N * dp + table.coordinates["dp"]) * pp + table.coordinates["pp"], dtype=np.int64)


def _streams(table: TraceTable) -> Ints:
    of_name = np.array([_STREAMS.get(name, _TAIL_STREAM) for name in table.names])
    return np.asarray(of_name[table.name_N])


def _stream_order(trace: StragglerTrace) -> Ints:
    """Return indices in order of step, worker and stream, and in order of execution within a stream."""
    table = trace.table
    tail = np.array([_TAIL.index(name) if name in _TAIL else -1 for name in table.names])[table.name_N]
    return np.lexsort(
        (table.name_N, trace.sequence_N, np.where(tail < 0, table.begin_N, 0.0), tail, _streams(table), _workers(table))
    )


class _Builder:
    """Collects edges and collectives, by step and worker."""

    def __init__(self, table: TraceTable, sequence_N: Ints, model_chunk_N: Ints) -> None:
        self.before: list[int] = []
        self.after: list[int] = []
        self._table = table
        self._sequence_N, self._model_chunk_N = sequence_N, model_chunk_N
        self._pp = int(table.coordinates["pp"].max()) + 1
        self._dp = int(table.coordinates["dp"].max()) + 1
        chunks = int(table.chunk_N.max()) + 1
        self._last_chunk = max(self._pp * chunks - 1, 0)
        self._overlapped = SEPARATE in table.names
        self._collectives: dict[tuple[object, ...], list[int]] = defaultdict(list)

    def add_worker(self, begin: int, end: int) -> None:
        """Add the operations from index ``begin`` to before ``end``, all of one worker in one step."""
        table = self._table
        names = [table.names[at] for at in table.name_N[begin:end]]
        by_name: dict[str, list[int]] = defaultdict(list)
        for operation, name in enumerate(names, begin):
            by_name[name].append(operation)
        compute = sorted(by_name[FORWARD] + by_name[BACKWARD])
        step, dp, pp = (int(of[begin]) for of in (table.step_N, table.coordinates["dp"], table.coordinates["pp"]))
        for direction, passes in (("forward", by_name[FORWARD]), ("backward", by_name[BACKWARD])):
            for verb in ("send", "recv"):
                self._transfers(direction, verb, by_name[f"{direction}-{verb}"], passes, (step, dp, pp))
        self._prefetch(by_name, compute)
        self._gathers(by_name)
        self._tail(by_name, compute)
        for name in (GATHER, SCATTER, SEPARATE):
            for number, operation in enumerate(by_name[name]):
                self._collectives[step, name, pp, number].append(operation)
        for operation in by_name[EMBEDDING]:
            self._collectives[step, EMBEDDING, dp].append(operation)
        for operation in by_name[CLIP]:
            self._collectives[step, CLIP].append(operation)

    def collectives(self) -> Ints:
        """Return the collective of each operation, [N], -1 for none.

        Raises:
            CorruptFile: a collective has a wrong number of operations.
        """
        collective_N = np.full(len(self._table), -1)
        expected = {GATHER: self._dp, SCATTER: self._dp, SEPARATE: self._dp, CLIP: self._dp * self._pp, EMBEDDING: 2}
        expected[EMBEDDING] = min(self._pp, 2)
        for number, (key, operations) in enumerate(self._collectives.items()):
            count = expected.get(str(key[1]), 2)
            if len(operations) != count:
                raise CorruptFile(
                    f"step {key[0]}: expected {count} operations in the collective {key[1]}, {key[2:]}; the trace has "
                    f"{len(operations)}"
                )
            collective_N[operations] = number
        return collective_N

    def _edge(self, before: int, after: int) -> None:
        self.before.append(before)
        self.after.append(after)

    def _transfers(
        self, direction: str, verb: str, operations: list[int], passes: list[int], worker: tuple[int, int, int]
    ) -> None:
        """Connect receives with the next pass, and sends with the previous pass. A send and its receive start together.

        ``worker``: step, data-parallel rank and stage.
        """
        table, (step, dp, pp) = self._table, worker
        # The profiler also records transfers that were not executed: late receives and early sends.
        if passes and verb == "recv":
            latest = table.begin_N[passes].max() + _SAME_S
            executed = [operation for operation in operations if table.begin_N[operation] <= latest]
        else:
            earliest = table.end_N[passes].min() - _SAME_S if passes else 0.0
            executed = [operation for operation in operations if passes and table.end_N[operation] >= earliest]
        skipped = len(passes) - len(executed)
        if executed and skipped not in (0, 1):
            raise CorruptFile(
                f"step {step}, data-parallel rank {dp}, stage {pp}: {len(executed)} {direction}-{verb} for "
                f"{len(passes)} passes"
            )
        first = skipped if verb == "recv" else 0
        stage_step = 1 if (direction == "forward") == (verb == "send") else -1
        number = 0
        for operation, pass_index in zip(executed, range(first, len(passes)), strict=False):
            if verb == "send":
                self._edge(passes[pass_index], operation)
            else:
                self._edge(operation, passes[pass_index])
                if pass_index:
                    self._edge(passes[pass_index - 1], operation)
            other = int(self._model_chunk_N[passes[pass_index]]) + stage_step
            if 0 <= other <= self._last_chunk:  # otherwise the transfer has no peer and was not executed
                sender = pp if verb == "send" else (pp + stage_step) % self._pp
                self._collectives[step, direction, dp, sender, number].append(operation)
                number += 1

    def _prefetch(self, by_name: dict[str, list[int]], compute: list[int]) -> None:
        """Let the first receive of gradients depend on the pass before the forward pass that it overlaps with."""
        if by_name[BACKWARD] and by_name["backward-recv"]:
            at = compute.index(by_name[BACKWARD][0])
            if at >= 2:
                self._edge(compute[at - 2], by_name["backward-recv"][0])

    def _gathers(self, by_name: dict[str, list[int]]) -> None:
        """Let the first forward pass of each model chunk depend on the gather of its parameters."""
        chunk_N = self._table.chunk_N
        for chunk, gather in {int(chunk_N[operation]): operation for operation in by_name[GATHER]}.items():
            use = next((operation for operation in by_name[FORWARD] if chunk in (int(chunk_N[operation]), -1)), None)
            if use is not None:
                self._edge(gather, use)

    def _tail(self, by_name: dict[str, list[int]], compute: list[int]) -> None:
        """Connect the operations after the last pass. Their stream orders the rest."""
        chain = [by_name[name][0] for name in _TAIL if by_name[name]]
        scatters = by_name[SCATTER]
        if compute and chain:
            self._edge(compute[-1], chain[0])
        if not scatters:
            return
        if self._overlapped:
            chunk_N = self._table.chunk_N
            for chunk, operation in {int(chunk_N[scatter]): scatter for scatter in reversed(scatters)}.items():
                passes = [at for at in by_name[BACKWARD] if chunk in (int(chunk_N[at]), -1)]
                if passes:
                    self._edge(passes[-1], operation)
            if by_name[NORMS]:
                self._edge(scatters[-1], by_name[NORMS][0])
            return
        early = [by_name[name][0] for name in (COLLECT, NORMS, EMBEDDING) if by_name[name]]
        if early or compute:
            self._edge(early[-1] if early else compute[-1], scatters[0])
        late = [by_name[name][0] for name in (CLIP, UPDATE) if by_name[name]]
        if late:
            self._edge(scatters[-1], late[0])
