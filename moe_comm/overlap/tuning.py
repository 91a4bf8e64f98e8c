"""Which backend and how many chunks: what was measured on this machine, else what the cost model predicts.

    choose(work)   ──▶ known for this group and bucket of rows?  ──▶ done, in microseconds
                       │ no: collective, the same on every rank
                       ├─ the group's rates, once for each dtype (``rates.py``)
                       ├─ a measurement that ``moe-comm tune`` stored: same machine, ranks, hosts, threads, dtype, and
                       │  near in shape; between hosts only with a link like this one's
                       ├─ else the cost model (``cost.py``)
                       └─ the first rank's choice is told to all: hosts may have different files

Stored measurements are one JSON file a machine, in the user's cache directory. A file that cannot be read, of another
version or from another machine, is ignored with a warning: what it would have told is only about speed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from moe_comm.dispatch.channel import Channel
from moe_comm.dispatch.handshake import digest
from moe_comm.errors import ConfigError, RankMismatch
from moe_comm.overlap.cost import IN_PLACE, Rates, Work, cheapest
from moe_comm.overlap.rates import measure_rates
from moe_comm.runtime.cpu_guard import read_cpuinfo

VERSION = 1
NEAR = 2.0
"""A measurement holds for shapes up to so many times as large or small in each dimension, and links as fast."""
CHUNKED, SHARED = "chunked", "shared_memory"
TEXT_BYTES = 256
"""Of a choice as ranks tell it to each other."""
T = TypeVar("T")


@dataclass(frozen=True)
class Choice:
    """How to run an operator."""

    backend: str = CHUNKED
    chunks: int = 1

    def __str__(self) -> str:
        chunks = "1 chunk" if self.chunks == 1 else f"{self.chunks} chunks"
        return {CHUNKED: chunks, SHARED: "in place"}.get(self.backend, f"{self.backend}, {chunks}")


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
    """A choice, what it took, and what the cost model says that it takes."""

    choice: Choice
    ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        """|predicted / measured - 1|."""
        return abs(self.predicted_ms / self.ms - 1)


@dataclass(frozen=True)
class Measured:
    """One operator of one shape. tried: the first is in one chunk. best: what to do, by its place among them."""

    work: Work
    place: Place
    tried: tuple[Tried, ...]
    best: int

    @property
    def serial(self) -> Tried:
        """In one chunk."""
        return self.tried[0]

    @property
    def chosen(self) -> Tried:
        return self.tried[self.best]

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
        tried = tuple(
            _rebuilt(
                Tried,
                one,
                choice=_rebuilt(
                    Choice,
                    one["choice"],
                ),
            )
            for one in raw["tried"]
        )
        found = cls(work, _rebuilt(Place, raw["place"]), tried, int(raw["best"]))
        positive = [v for t in tried for v in (t.ms, t.predicted_ms, t.choice.chunks)] + [found.place.bytes_per_s]
        if not all(0 < value < math.inf for value in positive) or not 0 <= found.best < len(tried):
            raise ValueError("times, rates and chunks must be positive, and one of them the best")
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

    def find(self, work: Work, place: Place) -> Choice | None:
        """What was best for the nearest shape; None if none is near.

        Rows up to which one step after the other won, whatever the shape, are run so however few they are.
        """
        same = [m for m in self.measured if _kind(m.work) == _kind(work) and m.place.near(place)]
        near = [(_distance(m.work, work, ("rows", "sent", "other")), m) for m in same]
        distance, best = min(near, key=lambda pair: pair[0], default=(math.inf, None))
        if best is not None and distance < math.inf:
            return best.chosen.choice
        alike = [m for m in same if _distance(m.work, work, ("sent", "other")) < math.inf]
        return Choice() if work.rows <= fallback_rows(alike) else None

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
        if m.chosen.choice.chunks > 1:
            break
        found = m.work.rows
    return found


def prediction_error(measured: Sequence[Measured]) -> dict[str, float]:
    """``median`` and ``worst`` of |predicted / measured - 1|; empty without measurements."""
    errors = sorted(tried.error for m in measured for tried in m.tried)
    middle = len(errors) // 2
    if not errors:
        return {}
    return {
        "median": errors[middle] if len(errors) % 2 else sum(errors[middle - 1 : middle + 1]) / 2,
        "worst": errors[-1],
    }


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
    path = store_path(folder)
    try:
        raw = json.loads(path.read_text())
        if raw["version"] != VERSION:
            problem = f"is of version {raw['version']!r}, and this is moe_comm's version {VERSION}"
        elif raw["machine"] != machine_name():
            problem = f"is of another machine ({raw['machine']}; this is {machine_name()})"
        else:
            return Store(tuple(Measured.from_json(one) for one in raw["measured"]))
    except FileNotFoundError:
        return Store()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        problem = f"cannot be read ({type(error).__name__}: {error})"
    warnings.warn(f"{path} {problem}; ignored. Run moe-comm tune to measure again", RuntimeWarning, stacklevel=2)
    return Store()


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


# --- the choice ---


@dataclass
class _Known:
    """Of one group: rates by (dtype, device type), and what was chosen."""

    rates: dict[tuple[torch.dtype, str], Rates] = field(default_factory=dict)
    chosen: dict[tuple[Work, str], Choice] = field(default_factory=dict)


class _State:
    """Of this process, as process groups are."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.store: Store | None = None
        self.known: weakref.WeakKeyDictionary[Channel, _Known] = weakref.WeakKeyDictionary()


_state = _State()


def configure_tuning(folder: Path | None = None) -> None:
    """Take measurements from ``folder`` (None: ``cache_folder()``) from now on, and forget what was chosen before.

    On every rank, or on none; folders may differ.
    """
    _state.folder, _state.store = folder, None
    _state.known.clear()


def choose(work: Work, channel: Channel, device: torch.device) -> Choice:
    """How to run ``work`` over ``channel``: the same on every rank. Collective on a shape's first call.

    Raises:
        RankMismatch: ranks ask about different work.
    """
    known = _state.known.get(channel)
    if known is None:
        known = _state.known[channel] = _Known()
    bucket = work.bucket()
    choice = known.chosen.get((bucket, device.type))
    if choice is None:
        choice = known.chosen[bucket, device.type] = _agreed(bucket, channel, known, device)
    return choice


def rates_of(channel: Channel, dtype: torch.dtype, device: torch.device) -> Rates:
    """The group's rates, measured on the first call, which is collective."""
    known = _state.known.setdefault(channel, _Known())
    if (dtype, device.type) not in known.rates:
        known.rates[dtype, device.type] = measure_rates(channel, dtype, device)
    return known.rates[dtype, device.type]


def place_of(channel: Channel, rates: Rates, device: torch.device) -> Place:
    """Where this rank's measurements hold."""
    hosts = len({process.host for process in channel.peers.processes}) if channel.peers is not None else 1
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Place(hosts, rates.shared, torch.get_num_threads() if device.type == "cpu" else 0, name, rates.bytes_per_s)


def as_run(chunks: int, work: Work, rates: Rates) -> Choice:
    """``chunks`` with the name of the backend that they mean here."""
    in_place = chunks > 1 and rates.shared and work.operator in IN_PLACE
    return Choice(SHARED if in_place else CHUNKED, chunks)


def _agreed(work: Work, channel: Channel, known: _Known, device: torch.device) -> Choice:
    """The first rank's choice."""
    rates = rates_of(channel, work.dtype, device)
    choice = Choice(CHUNKED, 1)
    if channel.rank == 0:  # the others' is not heard
        if _state.store is None:
            _state.store = load_store(_state.folder or cache_folder())
        found = _state.store.find(work, place_of(channel, rates, device))
        choice = found or as_run(cheapest(work, rates), work, rates)
    raw = json.dumps(asdict(choice)).encode().ljust(TEXT_BYTES)
    said = torch.tensor([digest(work), *raw])
    told = channel.all_gather(said.to(channel.control_device), f"choosing chunks for {work}").cpu()
    odd = [rank for rank, asked in enumerate(told[:, 0].tolist()) if asked != said[0]]
    if odd:
        raise RankMismatch(f"rank {channel.rank} chooses chunks for {work}, and ranks {odd} for something else")
    return Choice(**json.loads(bytes(told[0, 1:].tolist())))
