"""The files in which a run says what happened to it, beside ``metrics.jsonl``: one JSON object a line.

    runs/<name>-<date>/
        metrics.jsonl               rank 0: StepReport of every step (moe_comm.train.metrics)
        ranks/rank-00000.jsonl      every rank: RankStep, one a step
        spans/rank-00000.jsonl      every rank: SpanLine, those of the steps that are written out, and of faults
        loads.jsonl                 rank 0: LoadLine of every MoE layer, every ``observe.every`` steps and at the first
        attempts.jsonl              Attempt: one a start of the ranks
        faults.jsonl                FaultRecord: what was noticed
        injected.jsonl              what was done on purpose (moe_comm.observe.faults)

Lines are whole or, the last one of a rank that was killed, cut off; readers leave a cut line out. Unknown keys are
left out too, so that files of a later version can be read.
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

RANKS, SPANS = "ranks", "spans"
ATTEMPTS, FAULTS, INJECTED, METRICS = "attempts.jsonl", "faults.jsonl", "injected.jsonl", "metrics.jsonl"
LOADS = "loads.jsonl"
MAX_LINE = 16 << 20
MAX_RANKS = 1 << 20
"""More than any run has: readers make room for every rank that a line names."""


@dataclass(frozen=True)
class RankStep:
    """One step of one rank. Times in seconds, parts of ``total`` as in ``StepTimes``; begin_s since 1970.

    waits: seconds by kind of what moves data ("dispatch", "combine", "collective", "transfer"), all of it exposed.
    sent: bytes by the same kinds. peers: bytes sent to single ranks, where that is known. rows: that came to this
    rank's experts, over all layers. links: seconds that a probe of fixed size took from single ranks, in the steps that
    have one (``moe_comm.observe.probe``).
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
    """A span; times on its host's wall clock, ns since 1970; ``skew_ns`` added gives those of rank 0's host.

    begun_ns: of a wait, when what it waits for was begun, if that was well before; else 0.
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
        """``span`` with its device's times where there are any."""
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
    """What one layer's router chose in a step. load: slots of each expert, before any drop, over all ranks."""

    step: int
    layer: str
    load: list[int]


@dataclass(frozen=True)
class Attempt:
    """A start of the ranks. number: from 0. source: "fresh", "checkpoint" or "peer memory". first_step: to be done,
    from 1. started_s: of the processes; ready_s: when the first step began. Seconds since 1970.

    Of the attempt before this one: last_s: when its last step ended. lost_steps: that it had done and are done again;
    lost_s: seconds they had taken. ended: "interrupted" by Ctrl-C, "finished" or "time limit" where the user ended it:
    the time until this one is no fault's.
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
    """Something that went wrong, as it was noticed. time_s: since 1970. ranks: the culprits.

    kind: "died", "unreachable", "stuck", "nonfinite", "spike", "corrupt", "slow", "checkpoint", "error". action: what
    was done: "restart", "rerun", "skip", "stop", "none". noticed_s: seconds from the last sign of health to the notice.
    """

    time_s: float
    step: int
    kind: str
    ranks: list[int]
    action: str
    what: str = ""
    noticed_s: float = math.nan
    attempt: int = 0


Line = TypeVar("Line", RankStep, SpanLine, LoadLine, Attempt, FaultRecord)


class LineWriter:
    """Appends dataclasses to a file, a line each, visible to others at once. A line that was cut off, at the end of a
    file that is there already, is taken out."""

    def __init__(self, path: Path) -> None:
        self._file = open_to_append(path)

    def write(self, line: Any) -> None:
        """What is no number becomes null."""
        self.write_text(to_json(line) + "\n")

    def write_text(self, text: str) -> None:
        """Lines of JSON, each with its end."""
        # In one piece: another process may append to the same file.
        self._file.write(text.encode())

    def close(self) -> None:
        self._file.close()


def open_to_append(path: Path) -> BinaryIO:
    """``path``, unbuffered, to write whole lines behind whole ones; the folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file: BinaryIO = path.open("ab", buffering=0)
    with path.open("rb") as before:
        size = before.seek(0, os.SEEK_END)
        begin = max(size - MAX_LINE, 0)
        before.seek(max(size - 1, 0))
        if before.read(1) in (b"", b"\n"):
            return file
        before.seek(begin)
        tail = before.read().rpartition(b"\n")
    try:
        json.loads(tail[2])
    except (ValueError, RecursionError):
        file.truncate(begin + len(tail[0]) + len(tail[1]))
    else:  # but for its end it is whole
        file.write(b"\n")
    return file


def cut_after(path: Path, done: int) -> None:
    """Take the lines of steps after ``done``, and one that was cut off, out of a file of lines with a ``step``."""
    if not path.exists():
        return
    fresh = path.with_suffix(".partial")
    with (
        path.open(encoding="utf-8", errors="replace", newline="\n") as lines,
        fresh.open("w", encoding="utf-8", newline="\n") as kept,
    ):
        kept.writelines(line.rstrip("\n") + "\n" for line in lines if _step_of(line) <= done)
    os.replace(fresh, path)


def _step_of(line: str) -> float:
    """The step of a line; infinite for one that was cut off when its process was killed."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return math.inf


def to_json(line: Any) -> str:
    """A dataclass, or what JSON has, on one line; NaN and infinities as null."""
    values = dict(vars(line)) if dataclasses.is_dataclass(line) else line
    try:
        # A step's line is written in every step: fields hold what JSON has, which needs no copy made first.
        return json.dumps(values, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError):
        values = dataclasses.asdict(line) if dataclasses.is_dataclass(line) and not isinstance(line, type) else line
        return json.dumps(_finite(values), separators=(",", ":"))


def append(path: Path, line: Any) -> None:
    """A single line at the end of ``path``."""
    writer = LineWriter(path)
    writer.write(line)
    writer.close()


def read_lines(path: Path, kind: type[Line]) -> Iterator[Line]:
    """The lines of a file; none if it is not there.

    Raises:
        CorruptFile: a line other than the last is no JSON object with the fields of ``kind``.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE + 1):
            number += 1
            whole = raw.endswith(b"\n")
            try:
                if len(raw) > MAX_LINE:
                    raise ValueError(f"it is longer than {MAX_LINE} bytes")
                line = parse(json.loads(raw), kind)
            except (ValueError, TypeError, RecursionError) as error:
                if not whole:
                    return
                raise CorruptFile(f"{path}, line {number}: not a {kind.__name__}: {error}") from error
            yield line


def parse(values: Any, kind: type[Line]) -> Line:
    """What a line's JSON says, as ``kind``; unknown keys are left out.

    Raises:
        ValueError: it is no object, lacks a field, or has one of the wrong type.
    """
    if not isinstance(values, dict):
        raise ValueError("it is no object")
    types = _TYPES[kind]
    known = {key: _read(types[key], key, value) for key, value in values.items() if key in types}
    try:
        return kind(**known)
    except TypeError as error:
        raise ValueError(str(error)) from error


_TYPES = {
    kind: {one.name: one.type for one in dataclasses.fields(kind)}
    for kind in (RankStep, SpanLine, Attempt, FaultRecord, LoadLine)
}


def read_folder(folder: Path, kind: type[Line]) -> Iterator[Line]:
    """The lines of every ``rank-*.jsonl`` in ``folder``, rank after rank."""
    for path in sorted(folder.glob("rank-*.jsonl")):
        yield from read_lines(path, kind)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def _in_range(text: str, key: str, value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()  # half of a pair could not be written again
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{key} is beyond 64 bits")
    if key in ("rank", "world") and not 0 <= value < MAX_RANKS:
        raise ValueError(f"{key} must be at least 0 and below {MAX_RANKS}; got {value}")
    return float(value) if text == "float" else value


_SIMPLE: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}


def _read(kind: Any, key: str, value: Any) -> Any:
    """``value`` if it is of the annotated type (a string here), else a ``ValueError``."""
    text = str(kind)
    if text == "float" and value is None:
        return math.nan
    if text in _SIMPLE:
        if isinstance(value, bool) or not isinstance(value, _SIMPLE[text]):
            raise ValueError(f"{key} must be {text}; got {value!r:.80}")
        return _in_range(text, key, value)
    outer, _, inner = text.rstrip("]").partition("[")
    if outer == "list" and isinstance(value, list):
        return [_read(inner, key, one) for one in value]
    if outer == "dict" and isinstance(value, dict):
        item = text.partition(", ")[2][:-1]
        return {_in_range("str", key, name): _read(item, key, one) for name, one in value.items()}
    raise ValueError(f"{key} must be {text}; got {value!r:.80}")
