"""Measurements of ``moe-comm tune``, and the file that stores them.

There is one JSON file for each machine, in the user's cache directory. A file that cannot be read, or that has another
version or belongs to another machine, is ignored with a warning, because it affects speed only.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from moe_comm.overlap.options import BACKENDS, CHUNKED, SHARED
from moe_comm.overlap.tuning.cost import OperatorWork
from moe_comm.overlap.tuning.device_cost import DeviceRates
from moe_comm.runtime.cpu_guard import read_cpuinfo
from moe_comm.runtime.safe_files import write_file
from moe_comm.runtime.untrusted import read_bounded, shown

VERSION = 2
NEAR = 2.0
"""A measurement is used for shapes and link rates within this factor in each dimension."""
GAIN = 0.02
"""Minimum saving compared with one chunk, as a fraction of its time; less is noise."""
MAX_COUNT = 4096
"""Maximum number of chunks and of programs in a valid file."""
T = TypeVar("T")


@dataclass(frozen=True)
class OverlapChoice:
    """How to run an operator.

    programs: number of programs of a Triton kernel that communicate; 0: the kernel's default.
    """

    backend: str = CHUNKED
    chunks: int = 1
    programs: int = 0

    @property
    def serial(self) -> bool:
        """Whether nothing overlaps: one chunk."""
        return self.backend == CHUNKED and self.chunks == 1

    def __str__(self) -> str:
        if self.backend == CHUNKED:
            return "1 chunk" if self.chunks == 1 else f"{self.chunks} chunks"
        if self.backend == SHARED:
            return "in place"
        return f"{self.backend}, {self.programs} programs" if self.programs else self.backend


@dataclass(frozen=True)
class TuningEnvironment:
    """The environment that a measurement is valid for.

    hosts: number of hosts of the ranks. shared: whether ranks read each other's memory. threads: of each CPU rank.
    device: "cpu" or the name of the GPU. bytes_per_s: received by a rank.
    """

    hosts: int
    shared: bool
    threads: int
    device: str
    bytes_per_s: float

    def near(self, other: TuningEnvironment) -> bool:
        """Return whether measurements of one are valid for the other. The link rate matters between hosts only."""
        same = replace(self, bytes_per_s=0.0) == replace(other, bytes_per_s=0.0)
        slow, fast = sorted((self.bytes_per_s, other.bytes_per_s))
        return same and (self.hosts == 1 or fast <= NEAR * slow)


@dataclass(frozen=True)
class Trial:
    """A measured choice. predicted_ms: prediction of the cost model; 0 for Triton kernels, which it does not cover."""

    choice: OverlapChoice
    ms: float
    predicted_ms: float

    @property
    def error(self) -> float | None:
        """|predicted / measured - 1|; None without a prediction."""
        return abs(self.predicted_ms / self.ms - 1) if self.predicted_ms else None

    def beats(self, serial: Trial) -> bool:
        """Return whether it is faster than ``serial`` by at least ``GAIN``."""
        return self.ms < serial.ms * (1 - GAIN)


@dataclass(frozen=True)
class Measurement:
    """Measurements of one operator and shape. tried: the first has one chunk. best: index of the choice to use."""

    work: OperatorWork
    place: TuningEnvironment
    tried: tuple[Trial, ...]
    best: int

    @property
    def name(self) -> str:
        """Operator and direction."""
        return f"{self.work.operator} {self.work.direction}"

    @property
    def serial(self) -> Trial:
        """The measurement with one chunk."""
        return self.tried[0]

    @property
    def chosen(self) -> Trial:
        return self.tried[self.best]

    def among(self, backends: Collection[str]) -> OverlapChoice | None:
        """Return the fastest choice of ``backends``; None if none was measured.

        If serial execution is allowed, another choice must be faster by at least ``GAIN``.
        """
        if self.chosen.choice.backend in backends:
            return self.chosen.choice
        allowed = [trial for trial in self.tried if trial.choice.backend in backends]
        best = min(allowed, key=lambda trial: trial.ms, default=None)
        if best is None:
            return None
        return self.serial.choice if self.serial in allowed and not best.beats(self.serial) else best.choice

    def to_json(self) -> dict[str, Any]:
        """Return the argument of ``from_json``."""
        return {**asdict(self), "work": asdict(self.work) | {"dtype": str(self.work.dtype).removeprefix("torch.")}}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Measurement:
        """Return the measurement that ``to_json`` converted.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: ``raw`` has another structure or invalid values.
        """
        work = _rebuilt(OperatorWork, {"beside": 0} | dict(raw["work"]), dtype=getattr(torch, raw["work"]["dtype"]))
        tried = tuple(_rebuilt(Trial, trial, choice=_rebuilt(OverlapChoice, trial["choice"])) for trial in raw["tried"])
        measurement = cls(work, _rebuilt(TuningEnvironment, raw["place"]), tried, int(raw["best"]))
        positive = [v for t in tried for v in (t.ms, t.choice.chunks)] + [measurement.place.bytes_per_s]
        others = [v for t in tried for v in (t.predicted_ms, t.choice.programs)]
        if not all(0 < value < math.inf for value in positive) or not 0 <= measurement.best < len(tried):
            raise ValueError("times, rates and chunks must be positive, and best must be an index of tried")
        if not all(0 <= value < math.inf for value in others) or {t.choice.backend for t in tried} - set(BACKENDS):
            raise ValueError("predictions and programs must not be negative, and backends must be known")
        if any(v > MAX_COUNT for t in tried for v in (t.choice.chunks, t.choice.programs)):
            raise ValueError(f"more than {MAX_COUNT} chunks or programs")
        if not isinstance(work.dtype, torch.dtype):
            raise ValueError(f"unknown dtype {raw['work']['dtype']!r}")
        return measurement


def _rebuilt(kind: type[T], raw: Mapping[str, Any], **fields_: Any) -> T:
    """Return a dataclass from the plain values in ``raw`` and the other fields in ``fields_``."""
    casts: dict[Any, Callable[[Any], Any]] = {"int": int, "float": float, "str": str, "bool": bool}
    plain = {f.name: casts[f.type](raw[f.name]) for f in fields(kind) if f.name not in fields_}  # type: ignore[arg-type]
    return kind(**plain, **fields_)


@dataclass(frozen=True)
class TuningStore:
    """The measurements of a machine. device_rates: for the device executor, by name of the GPU."""

    measured: tuple[Measurement, ...] = ()
    device_rates: Mapping[str, DeviceRates] = field(default_factory=dict)

    def find(
        self, work: OperatorWork, place: TuningEnvironment, backends: Collection[str] = BACKENDS
    ) -> OverlapChoice | None:
        """Return the fastest choice of ``backends`` for the nearest measured shape; None if no shape is near.

        Without a near shape, fewer rows than the fallback threshold run serially.
        """
        near = self.nearest(work, place)
        if near is not None:
            return near.among(backends)
        return OverlapChoice() if CHUNKED in backends and self.falls_back(work, place) else None

    def nearest(self, work: OperatorWork, place: TuningEnvironment) -> Measurement | None:
        """Return the measurement of the nearest shape; None if none is near."""
        near = [(_distance(m.work, work, ("rows", "sent", "other")), m) for m in self._comparable(work, place)]
        distance, best = min(near, key=lambda pair: pair[0], default=(math.inf, None))
        return best if distance < math.inf else None

    def falls_back(self, work: OperatorWork, place: TuningEnvironment) -> bool:
        """Return whether ``work`` has so few rows that serial execution is fastest (``fallback_rows``)."""
        comparable = [m for m in self._comparable(work, place) if _distance(m.work, work, ("sent", "other")) < math.inf]
        return work.rows <= fallback_rows(comparable)

    def _comparable(self, work: OperatorWork, place: TuningEnvironment) -> list[Measurement]:
        return [m for m in self.measured if _kind(m.work) == _kind(work) and m.place.near(place)]

    def merged(self, more: Iterable[Measurement]) -> TuningStore:
        """Return a store with ``more``, which replaces earlier measurements of the same work and environment."""
        more = tuple(more)
        new = [(m.work, m.place) for m in more]
        other = (m for m in self.measured if not any(m.work == work and m.place.near(place) for work, place in new))
        return TuningStore((*other, *more), self.device_rates)


def fallback_rows(measured: Iterable[Measurement]) -> int:
    """Return the largest number of rows up to which, from the fewest on, serial execution was fastest; 0 if it never
    was."""
    rows = 0
    for m in sorted(measured, key=lambda m: m.work.rows):
        if not m.chosen.choice.serial:
            break
        rows = m.work.rows
    return rows


def prediction_error(measured: Sequence[Measurement]) -> dict[str, float]:
    """Return ``median`` and ``worst`` of |predicted / measured - 1|; empty without predictions."""
    errors = [trial.error for m in measured for trial in m.tried if trial.error is not None]
    return {"median": median(errors), "worst": max(errors)} if errors else {}


def errors_by_operator(measured: Sequence[Measurement]) -> dict[str, dict[str, float]]:
    """Return ``prediction_error`` by "operator direction"."""
    by_name: dict[str, list[Measurement]] = {}
    for m in measured:
        by_name.setdefault(m.name, []).append(m)
    return {name: prediction_error(group) for name, group in by_name.items()}


def _kind(work: OperatorWork) -> tuple[Any, ...]:
    return work.operator, work.direction, work.dtype, work.world, work.groups


def _distance(one: OperatorWork, other: OperatorWork, sizes: Sequence[str]) -> float:
    """Return the sum of |log2| of the ratios of the sizes; infinite if a ratio is larger than ``NEAR``."""
    steps = [abs(math.log2(max(getattr(one, s), 1) / max(getattr(other, s), 1))) for s in sizes]
    return sum(steps) if max(steps) <= math.log2(NEAR) else math.inf


# --- the file ---


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of this user's measurements: ``moe_comm/overlap`` in XDG_CACHE_HOME or ~/.cache."""
    base = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "moe_comm" / "overlap"


def machine_name() -> str:
    """Return processor, number of cores and torch version: what measurements depend on besides the environment."""
    lines = read_cpuinfo().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "processor")
    return f"{model}, {os.cpu_count()} cores, torch {'.'.join(torch.__version__.split('.')[:2])}"


STORE_BYTES = 64 << 20
"""Maximum size of the file."""


def store_path(folder: Path, machine: str | None = None) -> Path:
    """Return the file of a machine; by default of this machine."""
    key = hashlib.sha256((machine or machine_name()).encode()).hexdigest()[:12]
    return folder / f"tuned-{key}.json"


def load_store(folder: Path) -> TuningStore:
    """Return this machine's measurements. If the file cannot be used, warn and return none."""
    store, problem = read_store(folder)
    if problem:
        warnings.warn(problem, RuntimeWarning, stacklevel=2)
    return store


def read_store(folder: Path) -> tuple[TuningStore, str]:
    """Return this machine's measurements and, if the file cannot be used, a warning; else ""."""
    path = store_path(folder)
    try:
        raw = json.loads(read_bounded(path, STORE_BYTES))
        if raw["version"] != VERSION:
            problem = f"has version {shown(raw['version'])}; expected {VERSION}"
        elif raw["machine"] != machine_name():
            problem = f"belongs to another machine ({shown(raw['machine'])}; this is {machine_name()})"
        else:
            rates = {str(name): _rebuilt(DeviceRates, of) for name, of in raw.get("device_rates", {}).items()}
            return TuningStore(tuple(Measurement.from_json(entry) for entry in raw["measured"]), rates), ""
    except FileNotFoundError:
        return TuningStore(), ""
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        problem = f"cannot be read ({type(error).__name__}: {shown(str(error))})"
    return TuningStore(), f"{path} {problem}; ignored. Run moe-comm tune to measure again"


def save_store(folder: Path, store: TuningStore, facts: Mapping[str, Any] | None = None) -> Path:
    """Write this machine's measurements atomically.

    Args:
        store: The measurements.
        facts: Additional information for readers of the file.
    """
    path = store_path(folder)
    content = {
        "version": VERSION,
        "machine": machine_name(),
        "prediction_error": prediction_error(store.measured),
        "errors_by_operator": errors_by_operator(store.measured),
        "facts": dict(facts or {}),
        "measured": [m.to_json() for m in store.measured],
        "device_rates": {name: asdict(rates) for name, rates in store.device_rates.items()},
    }
    write_file(path, json.dumps(content, indent=1) + "\n", sync=True)
    return path
