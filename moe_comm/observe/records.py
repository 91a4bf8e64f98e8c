"""Record files of a run in JSON lines format.

    runs/<name>-<date>/
        metrics.jsonl               rank 0: StepReport of each step (moe_comm.train.metrics)
        ranks/rank-00000.jsonl      each rank: RankStep of each step
        spans/rank-00000.jsonl      each rank: SpanLine of each span of the selected steps
        loads.jsonl                 rank 0: LoadLine of each MoE layer, after step 1 and every ``observe.every`` steps
        placements.jsonl            rank 0: PlacementLine of each decision on the placement of experts
        config.resolved.toml        rank 0: all settings
    attempts.jsonl              Attempt: one per start of the ranks
        faults.jsonl                FaultRecord: detected faults
        injected.jsonl              injected faults (moe_comm.observe.faults)

The last line of a killed rank can be truncated; readers skip it. Readers ignore unknown keys, so that they can read
files of later versions.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from moe_comm.errors import CorruptFile
from moe_comm.runtime.event_layout import Span
from moe_comm.runtime.safe_files import open_to_append, replacing
from moe_comm.runtime.untrusted import MAX_LINE, lines_of, printable_line, read_bounded
from moe_comm.topology.placement import Placement
from moe_comm.topology.rebalance import Decision

RANKS, SPANS = "ranks", "spans"
ATTEMPTS, FAULTS, INJECTED, METRICS = "attempts.jsonl", "faults.jsonl", "injected.jsonl", "metrics.jsonl"
LOADS, PLACEMENTS = "loads.jsonl", "placements.jsonl"
RESOLVED = "config.resolved.toml"
RESULT_BYTES = 4 << 20
"""Maximum size of result.json."""
MAX_RANKS = 1 << 20
"""Upper limit of rank numbers in records. Readers allocate memory for each rank."""


@dataclass(frozen=True)
class RankStep:
    """One step of one rank. Times are in seconds; ``begin_s`` is since 1970.

    Attributes:
        total, compute, communication, data, checkpoint: as in ``moe_comm.train.metrics.StepTimes``.
        waits: exposed seconds by kind of communication ("dispatch", "combine", "collective", "transfer").
        sent: bytes by kind of communication.
        peers: bytes sent to each rank, where the receiver is known.
        rows: rows received by this rank's experts, over all layers.
        links: seconds of a probe from each rank, in steps with probes (``moe_comm.observe.probe``).
    """

    step: int
    rank: int
    host: str
    begin_s: float
    total: float
    compute: float
    communication: float
    data: float
    checkpoint: float
    memory_bytes: int
    waits: dict[str, float] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    peers: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    links: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SpanLine:
    """A span. Times are in ns since 1970 on the wall clock of its host; add ``skew_ns`` for the clock of rank 0's host.

    ``begun_ns`` of a wait is the time when the awaited operation began, if it began well before the wait; else 0.
    """

    rank: int
    kind: str
    name: str
    begin_ns: int
    end_ns: int
    step: int
    micro: int = 0
    layer: str = ""
    group: list[int] = field(default_factory=list)
    call: int = 0
    peer: int = -1
    nbytes: int = 0
    rows: list[int] = field(default_factory=list)
    thread: int = 0
    skew_ns: int = 0
    begun_ns: int = 0

    @classmethod
    def of(cls, span: Span, wall_minus_monotonic_ns: int, skew_ns: int = 0) -> SpanLine:
        """Return the line of ``span``, with device times if available."""
        begin, end = span.device_ns if span.device_ns[1] else (span.begin_ns, span.end_ns)
        shift = wall_minus_monotonic_ns
        begun = span.device_ns[0] if not span.device_ns[1] else 0
        return cls(
            rank=span.rank,
            kind=span.kind.name.lower(),
            name=span.name,
            begin_ns=begin + shift,
            end_ns=end + shift if end else 0,
            step=span.step,
            micro=span.micro,
            layer=span.layer,
            group=list(span.group),
            call=span.call,
            peer=span.peer,
            nbytes=span.nbytes,
            rows=list(span.rows),
            thread=span.thread,
            skew_ns=skew_ns,
            begun_ns=begun + shift if begun else 0,
        )


@dataclass(frozen=True)
class LoadLine:
    """Expert loads of one layer in a step. load: slots of each expert over all ranks, before drops."""

    step: int
    layer: str
    load: list[int]


@dataclass(frozen=True)
class PlacementLine:
    """A decision on the placement of the experts of one layer, after a step.

    Attributes:
        owners: the ranks that hold each expert after the decision; the first is its home.
        world: number of ranks that share the experts.
        version: number of switches since the start of training.
        switched: whether the decision changed the placement.
        reason, ratio_before, ratio_after, saved_s, cost_s: as in ``moe_comm.topology.rebalance.Decision``.
    """

    step: int
    layer: str
    owners: list[list[int]]
    world: int
    version: int = 0
    switched: bool = False
    reason: str = ""
    ratio_before: float = 1.0
    ratio_after: float = 1.0
    saved_s: float = 0.0
    cost_s: float = 0.0

    @classmethod
    def of(cls, step: int, layer: str, decision: Decision, current: Placement) -> PlacementLine:
        """Return the line of a decision; ``current`` is the placement before it."""
        new, values = decision.placement or current, dict(vars(decision))
        switched = values.pop("placement") is not None
        owners = [list(ranks) for ranks in new.owners]
        return cls(step, layer, owners, new.world, new.version, switched, **values)

    @property
    def placement(self) -> Placement:
        """The placement after the decision, with experts in ascending order on each rank.

        Raises:
            ConfigError: the owners are invalid.
        """
        return Placement(tuple(tuple(ranks) for ranks in self.owners), self.world, self.version)


@dataclass(frozen=True)
class Attempt:
    """A start of the ranks. Times are in seconds since 1970.

    Attributes:
        number: number of the attempt, from 0.
        started_s: start of the processes.
        ready_s: beginning of the first step.
        first_step: number of the first step, from 1.
        source: "fresh", "checkpoint" or "peer memory".
        mapping: sizes of the parallel axes.
        last_s: end of the last step of the previous attempt.
        lost_steps: steps of the previous attempt that are repeated.
        lost_s: seconds that these steps took.
        ended: "interrupted", "finished" or "time limit" if the user ended the previous attempt; "" after a fault.
    """

    number: int
    world: int
    started_s: float
    ready_s: float
    first_step: int
    source: str
    mapping: dict[str, int] = field(default_factory=dict)
    hosts: list[str] = field(default_factory=list)
    last_s: float = math.nan
    lost_steps: int = 0
    lost_s: float = 0.0
    ended: str = ""


@dataclass(frozen=True)
class FaultRecord:
    """A detected fault.

    Attributes:
        time_s: seconds since 1970.
        kind: "died", "unreachable", "stuck", "nonfinite", "spike", "corrupt", "slow", "checkpoint" or "error".
        ranks: the faulty ranks.
        action: "restart", "rerun", "skip", "stop" or "none".
        noticed_s: seconds from the last sign of health to the detection.
    """

    time_s: float
    step: int
    kind: str
    ranks: list[int]
    action: str
    what: str = ""
    noticed_s: float = math.nan
    attempt: int = 0


Line = TypeVar("Line", RankStep, SpanLine, LoadLine, PlacementLine, Attempt, FaultRecord)


class LineWriter:
    """Append dataclasses to a file as JSON lines, without buffering. A truncated last line is removed first."""

    def __init__(self, path: Path) -> None:
        self._file = open_lines(path)

    def write(self, line: Any) -> None:
        """Write one line. NaN and infinity become null."""
        self.write_text(to_json(line) + "\n")

    def write_text(self, text: str) -> None:
        """Write complete lines of JSON."""
        # A single write, because other processes may append to the same file.
        self._file.write(text.encode())

    def close(self) -> None:
        self._file.close()


def open_lines(path: Path) -> BinaryIO:
    """Open ``path`` unbuffered for appending lines; create its folder, and remove a truncated last line.

    Raises:
        OSError: it cannot be opened, is a link, or is not a regular file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open_to_append(path)
    size = file.seek(0, os.SEEK_END)
    begin = max(size - MAX_LINE, 0)
    if os.pread(file.fileno(), 1, max(size - 1, 0)) in (b"", b"\n"):
        return file
    tail = os.pread(file.fileno(), MAX_LINE, begin).rpartition(b"\n")
    try:
        json.loads(tail[2])
    except (ValueError, RecursionError):
        file.truncate(begin + len(tail[0]) + len(tail[1]))
    else:  # only the newline is missing
        file.write(b"\n")
    return file


def cut_after(path: Path, done: int) -> None:
    """Remove the lines of steps after ``done`` and a truncated line from a file of lines with a ``step``."""
    if not os.path.lexists(path):
        return
    with replacing(path) as output:
        for line in lines_of(path, follow=False):
            text = line.decode(errors="replace").rstrip("\n")
            if _step_of(text) <= done:
                output.write(f"{text}\n".encode())


def _step_of(line: str) -> float:
    """Return the step of a line; infinity for a truncated line."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return math.inf


def to_json(line: Any) -> str:
    """Return a dataclass or JSON value as one line of JSON; NaN and infinities become null."""
    values = dict(vars(line)) if dataclasses.is_dataclass(line) else line
    try:
        # The common case: all fields are JSON values, which avoids the deep copy of ``asdict``.
        return json.dumps(values, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError):
        values = dataclasses.asdict(line) if dataclasses.is_dataclass(line) and not isinstance(line, type) else line
        return json.dumps(_finite(values), separators=(",", ":"))


def append(path: Path, line: Any) -> None:
    """Append one line to ``path``."""
    writer = LineWriter(path)
    writer.write(line)
    writer.close()


def read_lines(path: Path, kind: type[Line]) -> Iterator[Line]:
    """Yield the lines of a file; none if it does not exist.

    Raises:
        CorruptFile: a line other than a truncated last line is not a JSON object with the fields of ``kind``.
    """
    if not path.exists():
        return
    try:
        for number, raw in enumerate(lines_of(path), 1):
            try:
                if len(raw) == MAX_LINE and not raw.endswith(b"\n"):
                    raise ValueError(f"it is longer than {MAX_LINE} bytes")
                line = parse(json.loads(raw), kind)
            except (ValueError, TypeError, RecursionError) as error:
                if not raw.endswith(b"\n") and len(raw) < MAX_LINE:
                    return
                raise CorruptFile(f"{path}, line {number}: not a {kind.__name__}: {error}") from error
            yield line
    except OSError as error:
        raise CorruptFile(f"{path} cannot be read: {error.strerror or error}") from error


def read_result(run: Path) -> dict[str, Any]:
    """Return the content of ``result.json`` in a run folder; an empty one if it is missing or damaged."""
    try:
        value = json.loads(read_bounded(run / "result.json", RESULT_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def parse(values: Any, kind: type[Line]) -> Line:
    """Convert the JSON value of a line to ``kind``; unknown keys are ignored.

    Raises:
        ValueError: it is not an object, a field is missing, or a field has the wrong type.
    """
    if not isinstance(values, dict):
        raise ValueError("it is not an object")
    types = _TYPES[kind]
    fields = {key: _read(types[key], key, value) for key, value in values.items() if key in types}
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(str(error)) from error


_TYPES = {
    kind: {one.name: one.type for one in dataclasses.fields(kind)}
    for kind in (RankStep, SpanLine, Attempt, FaultRecord, LoadLine, PlacementLine)
}


def read_folder(folder: Path, kind: type[Line]) -> Iterator[Line]:
    """Yield the lines of all ``rank-*.jsonl`` files in ``folder``, in rank order."""
    for path in sorted(folder.glob("rank-*.jsonl")):
        yield from read_lines(path, kind)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _in_range(annotation: str, key: str, value: Any) -> Any:
    if isinstance(value, str):
        # Names are printed, and lone surrogates cannot be encoded.
        return printable_line(value)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{key} is beyond 64 bits")
    if key in ("rank", "world") and not 0 <= value < MAX_RANKS:
        raise ValueError(f"{key} must be at least 0 and below {MAX_RANKS}; got {value}")
    return float(value) if annotation == "float" else value


_SIMPLE: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}


def _read(kind: Any, key: str, value: Any) -> Any:
    """Return ``value`` if it has the annotated type ``kind`` (a string), else raise ``ValueError``."""
    annotation = str(kind)
    if annotation == "float" and value is None:
        return math.nan
    if annotation in _SIMPLE:
        if isinstance(value, bool) != (annotation == "bool") or not isinstance(value, _SIMPLE[annotation]):
            raise ValueError(f"{key} must be {annotation}; got {value!r:.80}")
        return _in_range(annotation, key, value)
    outer = annotation.partition("[")[0]
    if outer == "list" and isinstance(value, list):
        return [_read(annotation[len("list[") : -1], key, entry) for entry in value]
    if outer == "dict" and isinstance(value, dict):
        item = annotation.partition(", ")[2][:-1]
        return {_in_range("str", key, name): _read(item, key, entry) for name, entry in value.items()}
    raise ValueError(f"{key} must be {annotation}; got {value!r:.80}")
