"""What ``moe-comm tune`` measured on this machine, and the file that it is kept in.

One JSON file a machine, in the user's cache directory. A file that cannot be read, of another version or from another
machine, is ignored with a warning: what it would have told is only about speed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from moe_comm.errors import ConfigError
from moe_comm.overlap.cost import Work
from moe_comm.overlap.options import BACKENDS, CHUNKED, SHARED
from moe_comm.runtime.cpu_guard import read_cpuinfo

VERSION = 2
NEAR = 2.0
"""A measurement holds for shapes up to so many times as large or small in each dimension, and links as fast."""
GAIN = 0.02
"""Share of one chunk's time that others must save: less is noise."""
MOST = 4096
"""Chunks, and programs: more are an error in a file."""
T = TypeVar("T")


@dataclass(frozen=True)
class Choice:
    """How to run an operator. programs: of a Triton kernel, those that communicate; 0: as it takes them by itself."""

    backend: str = CHUNKED
    chunks: int = 1
    programs: int = 0

    @property
    def serial(self) -> bool:
        """Whether this is one step after the other."""
        return self.backend == CHUNKED and self.chunks == 1

    def __str__(self) -> str:
        if self.backend == CHUNKED:
            return "1 chunk" if self.chunks == 1 else f"{self.chunks} chunks"
        if self.backend == SHARED:
            return "in place"
        return f"{self.backend}, {self.programs} programs" if self.programs else self.backend


@dataclass(frozen=True)
class Place:
    """Where measurements hold. hosts: that the ranks are on. shared: whether they read each other's memory. threads: of
    each CPU rank. device: cpu, or the GPU's name. bytes_per_s: that reach a rank."""

    hosts: int
    shared: bool
    threads: int
    device: str
    bytes_per_s: float

    def near(self, other: Place) -> bool:
        """Whether what was measured at one holds at the other. Inside a host the link is the machine's."""
        same = replace(self, bytes_per_s=0.0) == replace(other, bytes_per_s=0.0)
        slow, fast = sorted((self.bytes_per_s, other.bytes_per_s))
        return same and (self.hosts == 1 or fast <= NEAR * slow)


@dataclass(frozen=True)
class Tried:
    """A choice, what it took, and what the cost model says that it takes; 0: it says nothing, as of Triton kernels."""

    choice: Choice
    ms: float
    predicted_ms: float

    @property
    def error(self) -> float | None:
        """|predicted / measured - 1|; None without a prediction."""
        return abs(self.predicted_ms / self.ms - 1) if self.predicted_ms else None

    def beats(self, serial: Tried) -> bool:
        """Whether it is enough faster than one step after the other."""
        return self.ms < serial.ms * (1 - GAIN)


@dataclass(frozen=True)
class Measured:
    """One operator of one shape. tried: the first is in one chunk. best: what to do, by its place among them."""

    work: Work
    place: Place
    tried: tuple[Tried, ...]
    best: int

    @property
    def name(self) -> str:
        """Operator and direction."""
        return f"{self.work.operator} {self.work.direction}"

    @property
    def serial(self) -> Tried:
        """In one chunk."""
        return self.tried[0]

    @property
    def chosen(self) -> Tried:
        return self.tried[self.best]

    def among(self, backends: Collection[str]) -> Choice | None:
        """What is best of ``backends``, by ``GAIN`` if serial is one of them; None if none of them was tried."""
        if self.chosen.choice.backend in backends:
            return self.chosen.choice
        allowed = [tried for tried in self.tried if tried.choice.backend in backends]
        best = min(allowed, key=lambda tried: tried.ms, default=None)
        if best is None:
            return None
        return self.serial.choice if self.serial in allowed and not best.beats(self.serial) else best.choice

    def to_json(self) -> dict[str, Any]:
        """What ``from_json`` takes."""
        return {**asdict(self), "work": asdict(self.work) | {"dtype": str(self.work.dtype).removeprefix("torch.")}}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Measured:
        """What ``to_json`` gave.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is not that.
        """
        work = _rebuilt(Work, raw["work"], dtype=getattr(torch, raw["work"]["dtype"]))
        tried = tuple(_rebuilt(Tried, one, choice=_rebuilt(Choice, one["choice"])) for one in raw["tried"])
        found = cls(work, _rebuilt(Place, raw["place"]), tried, int(raw["best"]))
        positive = [v for t in tried for v in (t.ms, t.choice.chunks)] + [found.place.bytes_per_s]
        others = [v for t in tried for v in (t.predicted_ms, t.choice.programs)]
        if not all(0 < value < math.inf for value in positive) or not 0 <= found.best < len(tried):
            raise ValueError("times, rates and chunks must be positive, and one of them the best")
        if not all(0 <= value < math.inf for value in others) or {t.choice.backend for t in tried} - set(BACKENDS):
            raise ValueError("predictions and programs must not be negative, and backends known")
        if any(v > MOST for t in tried for v in (t.choice.chunks, t.choice.programs)):
            raise ValueError(f"more than {MOST} chunks or programs")
        if not isinstance(work.dtype, torch.dtype):
            raise ValueError(f"no dtype: {raw['work']['dtype']!r}")
        return found


def _rebuilt(kind: type[T], raw: Mapping[str, Any], **given: Any) -> T:
    """A dataclass of plain values from what JSON has of it; ``given`` for the other fields."""
    casts: dict[Any, Callable[[Any], Any]] = {"int": int, "float": float, "str": str, "bool": bool}
    plain = {f.name: casts[f.type](raw[f.name]) for f in fields(kind) if f.name not in given}  # type: ignore[arg-type]
    return kind(**plain, **given)


@dataclass(frozen=True)
class Store:
    """What was measured on a machine."""

    measured: tuple[Measured, ...] = ()

    def find(self, work: Work, place: Place, backends: Collection[str] = BACKENDS) -> Choice | None:
        """What was best of ``backends`` for the nearest shape; None if none is near.

        Rows up to which one step after the other won, whatever the shape, are run so however few they are.
        """
        near = self.nearest(work, place)
        if near is not None:
            return near.among(backends)
        return Choice() if CHUNKED in backends and self.falls_back(work, place) else None

    def nearest(self, work: Work, place: Place) -> Measured | None:
        """What was measured of the nearest shape; None if none is near."""
        near = [(_distance(m.work, work, ("rows", "sent", "other")), m) for m in self._alike(work, place)]
        distance, best = min(near, key=lambda pair: pair[0], default=(math.inf, None))
        return best if distance < math.inf else None

    def falls_back(self, work: Work, place: Place) -> bool:
        """Whether so few rows are best run one step after the other."""
        alike = [m for m in self._alike(work, place) if _distance(m.work, work, ("sent", "other")) < math.inf]
        return work.rows <= fallback_rows(alike)

    def _alike(self, work: Work, place: Place) -> list[Measured]:
        return [m for m in self.measured if _kind(m.work) == _kind(work) and m.place.near(place)]

    def merged(self, more: Iterable[Measured]) -> Store:
        """With ``more`` in place of what was measured before in the same place and shape."""
        more = tuple(more)
        new = [(m.work, m.place) for m in more]
        kept = (m for m in self.measured if not any(m.work == work and m.place.near(place) for work, place in new))
        return Store((*kept, *more))


def fallback_rows(measured: Iterable[Measured]) -> int:
    """The most rows up to which, from the fewest on, one step after the other was best; 0 where it never was."""
    found = 0
    for m in sorted(measured, key=lambda m: m.work.rows):
        if not m.chosen.choice.serial:
            break
        found = m.work.rows
    return found


def prediction_error(measured: Sequence[Measured]) -> dict[str, float]:
    """``median`` and ``worst`` of |predicted / measured - 1|; empty without measurements."""
    errors = sorted(tried.error for m in measured for tried in m.tried if tried.error is not None)
    middle = len(errors) // 2
    if not errors:
        return {}
    return {
        "median": errors[middle] if len(errors) % 2 else sum(errors[middle - 1 : middle + 1]) / 2,
        "worst": errors[-1],
    }


def errors_by_operator(measured: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """``prediction_error`` of each operator and direction, by "operator direction"."""
    parts: dict[str, list[Measured]] = {}
    for m in measured:
        parts.setdefault(m.name, []).append(m)
    return {name: prediction_error(part) for name, part in parts.items()}


def _kind(work: Work) -> tuple[Any, ...]:
    return work.operator, work.direction, work.dtype, work.world, work.groups


def _distance(one: Work, other: Work, sizes: Sequence[str]) -> float:
    """Sum of the logarithms of how many times larger the sizes of one are; infinite if one is too far."""
    steps = [abs(math.log2(max(getattr(one, s), 1) / max(getattr(other, s), 1))) for s in sizes]
    return sum(steps) if max(steps) <= math.log2(NEAR) else math.inf


# --- the file ---


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where this user's measurements are kept: ``moe_comm/overlap`` in XDG_CACHE_HOME, or in ~/.cache."""
    base = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "moe_comm" / "overlap"


def machine_name() -> str:
    """Processor, number of them, and torch's version: what measurements depend on beside their ``Place``."""
    lines = read_cpuinfo().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "processor")
    return f"{model}, {os.cpu_count()} cores, torch {'.'.join(torch.__version__.split('.')[:2])}"


def store_path(folder: Path, machine: str | None = None) -> Path:
    """The file of a machine, by default of this one."""
    key = hashlib.sha256((machine or machine_name()).encode()).hexdigest()[:12]
    return folder / f"tuned-{key}.json"


def load_store(folder: Path) -> Store:
    """This machine's measurements; none, with a warning, where the file cannot be used."""
    store, problem = read_store(folder)
    if problem:
        warnings.warn(problem, RuntimeWarning, stacklevel=2)
    return store


def read_store(folder: Path) -> tuple[Store, str]:
    """``load_store`` that returns its warning, or ""."""
    path = store_path(folder)
    try:
        raw = json.loads(path.read_text())
        if raw["version"] != VERSION:
            problem = f"is of version {raw['version']!r}, and this is moe_comm's version {VERSION}"
        elif raw["machine"] != machine_name():
            problem = f"is of another machine ({raw['machine']}; this is {machine_name()})"
        else:
            return Store(tuple(Measured.from_json(one) for one in raw["measured"])), ""
    except FileNotFoundError:
        return Store(), ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        problem = f"cannot be read ({type(error).__name__}: {error})"
    return Store(), f"{path} {problem}; ignored. Run moe-comm tune to measure again"


def save_store(folder: Path, store: Store, facts: Mapping[str, Any] | None = None) -> Path:
    """Write this machine's measurements: all of the file or nothing of it, whoever reads or is killed meanwhile.

    Args:
        facts: what else a person may want to know of the measurement.
    """
    path = store_path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found = {
        "version": VERSION,
        "machine": machine_name(),
        "prediction_error": prediction_error(store.measured),
        "errors_by_operator": errors_by_operator(store.measured),
        "facts": dict(facts or {}),
        "measured": [m.to_json() for m in store.measured],
    }
    file, name = tempfile.mkstemp(dir=folder, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(file, "w") as out:
            out.write(json.dumps(found, indent=1) + "\n")
            out.flush()
            os.fsync(out.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return path
