"""Faults on purpose: which, where and when; and what a run writes down of them.

    kill:rank=1,step=5                   once, at step 5 (steps count from 1, as in reports)
    nan_loss:rank=any,probability=0.01   at each step with this chance, on a rank drawn by chance
    stop:mean_s=60                       on average once in 60 s; rank=any is the default

Chance goes by the seed, the fault's place in the plan and the step, so that it does not depend on timing; only
``mean_s`` goes by the clock. A fault of a step happens once, however often ranks are started again and repeat the step:
each is written to ``injected.jsonl`` in the run's folder, and is on the disk, before it happens.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_comm.errors import ConfigError
from moe_comm.observe.records import to_json

WHEN = ("step", "probability", "mean_s")
PLACES = ("start", "forward", "backward", "end")
"""Of a step: before its batch is read; in an MoE layer, between the arrival of rows and their experts; there in the
backward pass; after the weights have changed."""
_TIMED, _PLACED = ("seconds", "steps"), ("at", "layer")

KINDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "kill": ("the rank kills itself (SIGKILL)", _PLACED),
    "stop": ("the rank is stopped (SIGSTOP)", _PLACED),
    "segv": ("the rank reads where there is no memory (SIGSEGV)", _PLACED),
    "exit": ("the rank ends at once, with exit code 17 and without a word", _PLACED),
    "raise_forward": ("an exception in the forward pass", ("layer",)),
    "raise_backward": ("an exception in the backward pass", ("layer",)),
    "raise_thread": ("an exception in the thread that reads the next batch", ()),
    "hold_gil": ("a thread takes Python's lock and keeps it for so many seconds", ("seconds", *_PLACED)),
    "nan_loss": ("the rank's loss is NaN", ()),
    "nan_grad": ("an element of the rank's gradient is NaN", ()),
    "flip_bit": ("a bit of a row flips on its way to the rank's experts", ("layer",)),
    "slow_cpu": ("the rank burns processor time, so many seconds in each of so many steps", (*_TIMED, *_PLACED)),
    "slow_sleep": ("the rank sleeps, so many seconds in each of so many steps", (*_TIMED, *_PLACED)),
    "slow_link": ("the host's link carries mbit Mbit/s for so many steps", ("mbit", "steps")),
    "full_shm": ("at most mib MiB of /dev/shm are taken for so many seconds", ("mib", "seconds", *_PLACED)),
    "full_disk": ("the next checkpoint's bytes find no space left (ENOSPC)", ()),
    "checkpoint_truncate": ("a file of the newest checkpoint is cut off", ()),
    "checkpoint_flip": ("a bit of the newest checkpoint flips", ()),
    "checkpoint_missing": ("a file of the newest checkpoint is gone", ()),
}
"""What each does, and the options that it takes beside rank and one of ``WHEN``."""
FATAL = frozenset(
    ("kill", "stop", "segv", "exit", "raise_forward", "raise_backward", "raise_thread", "hold_gil", "full_disk")
)
"""After these the ranks have to be started again."""
DAMAGE = frozenset(("checkpoint_truncate", "checkpoint_flip", "checkpoint_missing"))
"""Only noticed when ranks that are started again want to go on from the checkpoint."""
WAIT = DAMAGE | {"flip_bit", "full_disk", "nan_grad"}
"""Need an occasion: a checkpoint, rows, a save, a gradient. Where their step has none, they are due in later ones."""


@dataclass(frozen=True)
class Fault:
    """One line of a plan; see ``parse``.

    rank: None is any. step, probability, mean_s: one of them is given. at: one of ``PLACES``. layer: index of an MoE
    layer among those of the rank. seconds, steps: how long; see ``KINDS``. mib: of shared memory. mbit: rate of a link.
    """

    kind: str
    rank: int | None = None
    step: int | None = None
    probability: float | None = None
    mean_s: float | None = None
    at: str = "forward"
    layer: int = 0
    seconds: float = 0.1
    steps: int = 1
    mib: int = 64
    mbit: float = 100.0

    def __str__(self) -> str:
        options = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)[1:]}
        given = {one.name: one.default for one in dataclasses.fields(self)[1:]}
        shown = {"rank": "any" if self.rank is None else self.rank}
        shown |= {key: value for key, value in options.items() if key != "rank" and value != given[key]}
        return f"{self.kind}:" + ",".join(f"{key}={value}" for key, value in shown.items())


@dataclass(frozen=True)
class Injection:
    """A line of ``injected.jsonl``: ``fault`` happened on ``rank`` in ``step``. time_s: since 1970. key: names what
    happens only once. attempt: how often the ranks had been started again."""

    time_s: float
    key: str
    kind: str
    rank: int
    step: int
    attempt: int
    fault: str
    what: str = ""


def parse(text: str) -> Fault:
    """The fault that ``text`` describes: "kind:key=value,key=value".

    Raises:
        ConfigError: it describes none; the message has the kinds or options there are, and what was probably meant.
    """
    kind, _, rest = text.strip().partition(":")
    if kind not in KINDS:
        raise ConfigError(f"fault {text!r}: unknown kind {kind!r}{_meant(kind, KINDS)}; known: {', '.join(KINDS)}")
    known = ("rank", *WHEN, *KINDS[kind][1])
    values: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in known:
            raise ConfigError(
                f"fault {text!r}: {kind} has no option {key!r}{_meant(key, known)}; it has: {', '.join(known)}"
            )
        if not equals or not value or key in values:
            raise ConfigError(f"fault {text!r}: {key} needs one value, as in {key}={_EXAMPLES[key]}")
        values[key] = _value(text, key, value)
    given = [key for key in WHEN if key in values]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        raise ConfigError(f"fault {text!r}: say when, by one of step, probability and mean_s; got {got}")
    if kind == "hold_gil":
        values.setdefault("seconds", 3600.0)  # for good: until somebody kills the rank
    return Fault(kind, **values)


_EXAMPLES = {
    "rank": "1",
    "step": "5",
    "probability": "0.01",
    "mean_s": "60",
    "at": "backward",
    "layer": "0",
    "seconds": "0.5",
    "steps": "3",
    "mib": "64",
    "mbit": "100",
}
_LEAST = {"rank": 0, "step": 1, "layer": 0, "steps": 1, "mib": 1}


def _value(text: str, key: str, value: str) -> Any:
    if key == "at":
        if value not in PLACES:
            raise ConfigError(f"fault {text!r}: at must be one of {', '.join(PLACES)}; got {value!r}")
        return value
    if key == "rank" and value == "any":
        return None
    try:
        number: float = int(value) if key in _LEAST else float(value)
    except ValueError:
        kind = "a whole number" if key in _LEAST else "a number"
        raise ConfigError(f"fault {text!r}: {key} must be {kind}{' or any' * (key == 'rank')}; got {value!r}") from None
    low = _LEAST.get(key, 0)
    good = number >= low if key in _LEAST else 0 < number < math.inf
    if not good or (key == "probability" and number > 1) or number > 1e9:
        bounds = f"at least {low}" if key in _LEAST else "in (0, 1]" if key == "probability" else "positive"
        raise ConfigError(f"fault {text!r}: {key} must be {bounds}; got {value}")
    return number


def _meant(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(word, list(known), n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


@dataclass(frozen=True)
class Due:
    """A fault that is to happen in ``step`` on this rank. key: see ``Injection``."""

    fault: Fault
    step: int
    key: str


@dataclass
class Plan:
    """When which fault is due on one rank of ``world``. ``fired``: keys of what has happened, in earlier starts too."""

    faults: tuple[Fault, ...]
    seed: int
    rank: int
    world: int
    attempt: int = 0
    fired: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._next: dict[int, float] = {}
        for fault in self.faults:
            if fault.rank is not None and fault.rank >= self.world:
                raise ConfigError(f"fault {str(fault)!r}: there is no rank {fault.rank} among {self.world}")

    @classmethod
    def of(cls, texts: Sequence[str], seed: int, rank: int, world: int, attempt: int = 0) -> Plan:
        """Of a run's settings.

        Raises:
            ConfigError: as ``parse``, or a fault is for a rank that does not exist.
        """
        return cls(tuple(parse(text) for text in texts), seed, rank, world, attempt)

    def due(self, step: int, now_s: float, *, thread: bool = False) -> list[Due]:
        """What is to happen in ``step`` on this rank.

        Args:
            now_s: of a clock that only goes forward, for ``mean_s``.
            thread: only what happens in the thread that reads batches, which asks for itself; else all but that.
        """
        found = []
        for index, fault in enumerate(self.faults):
            if (fault.kind == "raise_thread") != thread:
                continue
            if fault.mean_s is not None:
                found += self._by_time(index, fault, step, now_s)
                continue
            # Also where ranks that were started again do not repeat the step that it was planned for.
            planned = step if fault.kind not in WAIT or fault.step is None else min(step, fault.step)
            if (key := f"{index}@{planned}") not in self.fired and self._hits(index, fault, planned):
                found.append(Due(fault, planned, key))
        return found

    def _hits(self, index: int, fault: Fault, step: int) -> bool:
        chance = random.Random(f"{self.seed} {index} {step}")
        happens = step == fault.step if fault.probability is None else chance.random() < fault.probability
        return happens and self.rank == (chance.randrange(self.world) if fault.rank is None else fault.rank)

    def _by_time(self, index: int, fault: Fault, step: int, now_s: float) -> list[Due]:
        """Each rank has a clock of its own: many rare faults are as one that is not so rare."""
        if fault.mean_s is None or fault.rank not in (None, self.rank):
            return []
        mean_s = fault.mean_s * (self.world if fault.rank is None else 1)
        again = index in self._next
        happens = again and now_s >= self._next[index]
        if happens or not again:
            chance = random.Random(f"{self.seed} {index} {self.rank} {self.attempt} {step}")
            self._next[index] = now_s + chance.expovariate(1 / mean_s)
        return [Due(fault, step, f"{index}@{self.attempt}.{step}")] if happens else []


def write_injection(path: Path, injection: Injection) -> None:
    """Append to ``path``; on the disk when this returns. Ranks may write to one file at once."""
    new = not path.exists()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.write(handle, (to_json(injection) + "\n").encode())
        os.fsync(handle)
    finally:
        os.close(handle)
    if new:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "time_s": (int, float),
    "rank": int,
    "step": int,
    "attempt": int,
    **dict.fromkeys(("key", "kind", "fault", "what"), str),
}


def read_injections(path: Path) -> list[Injection]:
    """The lines of ``path``, in order of time; a line that was cut off or is none of ours is left out."""
    names = {one.name for one in dataclasses.fields(Injection)}
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            values = json.loads(line)
            one = Injection(**{key: value for key, value in values.items() if key in names})
            if all(isinstance(getattr(one, key), kind) for key, kind in _TYPES.items()):
                found.append(one)
        except (ValueError, TypeError, AttributeError, RecursionError):
            continue
    return sorted(found, key=lambda one: one.time_s)
