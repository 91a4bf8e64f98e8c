"""Fault injection: fault specifications, their schedule, and records of injected faults.

    kill:rank=1,step=5                   once, in step 5 (steps count from 1)
    nan_loss:rank=any,probability=0.01   in each step with this probability, on a random rank
    stop:mean_s=60                       on average once in 60 s; rank=any is the default

Random faults depend on the seed, the position in the plan and the step, but not on timing, except for ``mean_s``. The
fault of a step is injected once, even if restarted ranks repeat the step: each injection is written to
``injected.jsonl`` in the run folder and flushed to disk before it happens.
"""

from __future__ import annotations

import bisect
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
from moe_comm.observe.records import ATTEMPTS, FAULTS, INJECTED, Attempt, FaultRecord, read_lines, to_json
from moe_comm.runtime.safe_files import open_to_append, sync_to_disk
from moe_comm.runtime.untrusted import lines_of

WHEN = ("step", "probability", "mean_s")
"""Options that say when a fault happens. Each specification has exactly one of them."""
PLACES = ("start", "forward", "backward", "end")
"""Points of a step: before its batch is read; in an MoE layer between dispatch and experts, in forward or backward;
after the weight update."""
_TIMED, _PLACED = ("seconds", "steps"), ("at", "layer")

KINDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "kill": ("the rank is killed (SIGKILL)", _PLACED),
    "stop": ("the rank is stopped (SIGSTOP)", _PLACED),
    "segv": ("the rank accesses invalid memory (SIGSEGV)", _PLACED),
    "exit": ("the rank exits with exit code 17 and without a message", _PLACED),
    "raise_forward": ("an exception in the forward pass", ("layer",)),
    "raise_backward": ("an exception in the backward pass", ("layer",)),
    "raise_thread": ("an exception in the thread that reads the next batch", ()),
    "hold_gil": ("a thread holds Python's global interpreter lock for `seconds`", ("seconds", *_PLACED)),
    "nan_loss": ("the rank's loss is NaN", ()),
    "nan_grad": ("an element of the rank's gradient is NaN", ()),
    "flip_bit": ("a bit of a row that is sent to the rank's experts flips", ("layer",)),
    "slow_cpu": ("the rank uses CPU time for `seconds` in each of `steps` steps", (*_TIMED, *_PLACED)),
    "slow_sleep": ("the rank sleeps for `seconds` in each of `steps` steps", (*_TIMED, *_PLACED)),
    "slow_link": ("the host's link is limited to `mbit` Mbit/s for `steps` steps", ("mbit", "steps")),
    "full_shm": ("at most `mib` MiB of /dev/shm are allocated for `seconds`", ("mib", "seconds", *_PLACED)),
    "full_disk": ("writing the next checkpoint fails with ENOSPC", ()),
    "checkpoint_truncate": ("a file of the newest checkpoint is truncated", ()),
    "checkpoint_flip": ("a bit of the newest checkpoint flips", ()),
    "checkpoint_missing": ("a file of the newest checkpoint is deleted", ()),
}
"""Description of each kind, and its options in addition to rank and one of ``WHEN``."""
FATAL = frozenset(
    ("kill", "stop", "segv", "exit", "raise_forward", "raise_backward", "raise_thread", "hold_gil", "full_disk")
)
"""Kinds after which the ranks must be restarted."""
DAMAGE = frozenset(("checkpoint_truncate", "checkpoint_flip", "checkpoint_missing"))
"""Kinds that are detected only when restarted ranks resume from the checkpoint."""
WAIT = DAMAGE | {"flip_bit", "full_disk", "nan_grad"}
"""Kinds that require a checkpoint, rows, a save or a gradient. If a step has none, they happen in a later step."""


@dataclass(frozen=True)
class FaultSpec:
    """One entry of a fault plan; see ``parse``. Exactly one of step, probability and mean_s is set.

    Attributes:
        kind: one of ``KINDS``, which also describes seconds, steps, mib and mbit.
        rank: the rank; None: any.
        step: step of the fault, from 1.
        probability: probability per step.
        mean_s: mean seconds between two faults.
        at: one of ``PLACES``.
        layer: index among the rank's MoE layers.
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
        options = {"rank": "any" if self.rank is None else self.rank}
        for option in dataclasses.fields(self)[2:]:
            if (value := getattr(self, option.name)) != option.default:
                options[option.name] = value
        return f"{self.kind}:" + ",".join(f"{key}={value}" for key, value in options.items())


@dataclass(frozen=True)
class Injection:
    """A line of ``injected.jsonl``.

    time_s: seconds since 1970. key: identifies a fault that is injected only once. attempt: number of restarts before
    the fault. fault: the specification. what: details.
    """

    time_s: float
    key: str
    kind: str
    rank: int
    step: int
    attempt: int
    fault: str
    what: str = ""


def parse(text: str) -> FaultSpec:
    """Parse a fault specification "kind:key=value,key=value"."""
    kind, _, options = text.strip().partition(":")
    if kind not in KINDS:
        raise ConfigError(f"fault {text!r}: unknown kind {kind!r}{_suggest(kind, KINDS)}; known: {', '.join(KINDS)}")
    allowed = ("rank", *WHEN, *KINDS[kind][1])
    values: dict[str, Any] = {}
    for part in options.split(",") if options else ():
        key, equals, value = (item.strip() for item in part.partition("="))
        if key not in allowed:
            raise ConfigError(
                f"fault {text!r}: {kind} has no option {key!r}{_suggest(key, allowed)}; it has: {', '.join(allowed)}"
            )
        if not equals or not value or key in values:
            raise ConfigError(f"fault {text!r}: {key} needs one value, as in step=5")
        values[key] = _value(text, key, value)
    schedules = [key for key in WHEN if key in values]
    if len(schedules) != 1:
        got = " and ".join(schedules) or "none"
        raise ConfigError(f"fault {text!r}: set exactly one of step, probability and mean_s; got {got}")
    if kind == "hold_gil":
        values.setdefault("seconds", 3600.0)  # until the rank is killed
    return FaultSpec(kind, **values)


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
    least = _LEAST.get(key, 0)
    in_range = number >= least if key in _LEAST else 0 < number < math.inf
    if not in_range or (key == "probability" and number > 1) or number > 1e9:
        bounds = f"at least {least}" if key in _LEAST else "in (0, 1]" if key == "probability" else "positive"
        raise ConfigError(f"fault {text!r}: {key} must be {bounds}; got {value}")
    return number


def _suggest(word: str, allowed: Sequence[str] | Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(word, list(allowed), n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


@dataclass(frozen=True)
class DueFault:
    """A fault to inject in ``step`` on this rank. key: see ``Injection``."""

    fault: FaultSpec
    step: int
    key: str


@dataclass
class FaultPlan:
    """Schedule of the faults on one rank of ``world``.

    ``fired`` contains the keys of injected faults, including those before a restart.
    """

    faults: tuple[FaultSpec, ...]
    seed: int
    rank: int
    world: int
    attempt: int = 0
    fired: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._next: dict[int, float] = {}
        for fault in self.faults:
            if fault.rank is not None and fault.rank >= self.world:
                raise ConfigError(f"fault {str(fault)!r}: no rank {fault.rank}; there are {self.world} ranks")

    @classmethod
    def of(cls, texts: Sequence[str], seed: int, rank: int, world: int, attempt: int = 0) -> FaultPlan:
        """Return the plan of the specifications ``texts``. Raises ``ConfigError`` if one is invalid."""
        return cls(tuple(parse(text) for text in texts), seed, rank, world, attempt)

    def due(self, step: int, now_s: float, *, thread: bool = False) -> list[DueFault]:
        """Return the faults to inject in ``step`` on this rank.

        Args:
            step: the step, from 1.
            now_s: monotonic time in seconds, for ``mean_s``.
            thread: return only the faults of the thread that reads batches; False: return all others.
        """
        result = []
        for index, fault in enumerate(self.faults):
            if (fault.kind == "raise_thread") != thread:
                continue
            if fault.mean_s is not None:
                result += self._by_time(index, fault, step, now_s)
                continue
            # A fault in ``WAIT`` stays due after its planned step, also if restarted ranks do not repeat that step.
            planned = step if fault.kind not in WAIT or fault.step is None else min(step, fault.step)
            if (key := f"{index}@{planned}") not in self.fired and self._happens(index, fault, planned):
                result.append(DueFault(fault, planned, key))
        return result

    def _happens(self, index: int, fault: FaultSpec, step: int) -> bool:
        chance = random.Random(f"{self.seed} {index} {step}")
        happens = step == fault.step if fault.probability is None else chance.random() < fault.probability
        return happens and self.rank == (chance.randrange(self.world) if fault.rank is None else fault.rank)

    def _by_time(self, index: int, fault: FaultSpec, step: int, now_s: float) -> list[DueFault]:
        """Schedule a ``mean_s`` fault independently on each rank.

        A fault on any rank happens on each with 1 / world of the rate, so that the mean over all ranks is ``mean_s``.
        """
        if fault.mean_s is None or fault.rank not in (None, self.rank):
            return []
        mean_s = fault.mean_s * (self.world if fault.rank is None else 1)
        scheduled = index in self._next
        happens = scheduled and now_s >= self._next[index]
        if happens or not scheduled:
            chance = random.Random(f"{self.seed} {index} {self.rank} {self.attempt} {step}")
            self._next[index] = now_s + chance.expovariate(1 / mean_s)
        return [DueFault(fault, step, f"{index}@{self.attempt}.{step}")] if happens else []


def write_injection(path: Path, injection: Injection) -> None:
    """Append to ``path`` and flush to disk. Several ranks can write to the same file."""
    new = not path.exists()
    with open_to_append(path) as file:
        file.write((to_json(injection) + "\n").encode())
        os.fsync(file.fileno())
    if new:
        sync_to_disk(path.parent)


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "time_s": (int, float),
    "rank": int,
    "step": int,
    "attempt": int,
    **dict.fromkeys(("key", "kind", "fault", "what"), str),
}


def read_injections(path: Path) -> list[Injection]:
    """Return the valid lines of ``path``, sorted by time."""
    names = {field.name for field in dataclasses.fields(Injection)}
    injections = []
    for line in lines_of(path) if path.exists() else ():
        try:
            values = json.loads(line)
            injection = Injection(**{key: value for key, value in values.items() if key in names})
            if all(isinstance(getattr(injection, key), kind) for key, kind in _TYPES.items()):
                injections.append(injection)
        except (ValueError, TypeError, AttributeError, RecursionError):
            continue
    return sorted(injections, key=lambda injection: injection.time_s)


PROGRESS = "progress.jsonl"
"""End time of each step, also of repeated ones; written by rank 0 of runs with fault injection."""


@dataclass(frozen=True)
class FaultOutcome:
    """Detection and recovery of a fault, in seconds after the injection (NaN: never). noticed: the detecting event.

    injected.jsonl    kill, step 5 ──┐ detected: by the first fault record or start of the ranks after it
    faults.jsonl      died         ◀─┤
    attempts.jsonl    start        ◀─┤
    progress.jsonl    step 6 ended ◀─┘ recovered: at the first end of a later step

    The first event between injection and recovery counts as the detection. Faults in quick succession can share events.
    """

    injection: Injection
    noticed: str
    detected_s: float
    recovered_s: float


def fault_outcomes(run: Path) -> list[FaultOutcome]:
    """Return the outcome of each injection of the run in the folder ``run``, sorted by time."""
    events: list[tuple[float, str]] = [
        (record.time_s, f"{record.kind} rank {','.join(map(str, record.ranks))}: {record.action}")
        for record in read_lines(run / FAULTS, FaultRecord)
    ]
    checkpoint_events = [event for event in events if event[1].startswith("checkpoint")]
    attempts = read_lines(run / ATTEMPTS, Attempt)
    events += [(attempt.started_s, f"start {attempt.number}, {attempt.source}") for attempt in attempts]
    events.sort()
    steps = _progress(run / PROGRESS)
    times = [time_s for time_s, _, _ in steps]
    outcomes = []
    for injection in read_injections(run / INJECTED):
        began = injection.time_s
        first_attempt = injection.attempt + (injection.kind in FATAL | DAMAGE)  # the first attempt that can recover
        later_steps = steps[bisect.bisect_right(times, began) :]
        recoveries = (
            time_s for time_s, step, attempt in later_steps if step > injection.step and attempt >= first_attempt
        )
        recovered = next(recoveries, math.inf)
        candidates = checkpoint_events if injection.kind in DAMAGE else events
        event = next((event for event in candidates if began < event[0] <= recovered), None)
        outcomes.append(
            FaultOutcome(
                injection,
                event[1] if event else "",
                event[0] - began if event else math.nan,
                recovered - began if recovered < math.inf else math.nan,
            )
        )
    return outcomes


def summary(outcomes: Sequence[FaultOutcome]) -> dict[str, dict[str, Any]]:
    """Return count, and median, p99 and worst of the seconds, by kind; None if no fault was detected or recovered."""
    kinds = sorted({outcome.injection.kind for outcome in outcomes})
    return {
        kind: {
            "count": len(same := [outcome for outcome in outcomes if outcome.injection.kind == kind]),
            "detected": _quantiles([outcome.detected_s for outcome in same]),
            "recovered": _quantiles([outcome.recovered_s for outcome in same]),
        }
        for kind in kinds
    }


def _quantiles(seconds: Sequence[float]) -> dict[str, float] | None:
    finite = sorted(value for value in seconds if math.isfinite(value))
    if not finite:
        return None
    shares = {"median": 0.5, "p99": 0.99, "worst": 1.0}
    return {name: finite[math.ceil(share * len(finite)) - 1] for name, share in shares.items()}


def next_attempt(run: Path) -> int:
    """Return the number of a new start of the ranks: one more than the largest in recorded injections and steps."""
    attempts = [injection.attempt for injection in read_injections(run / INJECTED)]
    return 1 + max([*attempts, *(attempt for _, _, attempt in _progress(run / PROGRESS))], default=-1)


def _progress(path: Path) -> list[tuple[float, int, int]]:
    """Return (end time, step, attempt) of each step, sorted by time."""
    ends = []
    for line in lines_of(path) if path.exists() else ():
        try:
            values = json.loads(line)
            ends.append((float(values["time_s"]), int(values["step"]), int(values["attempt"])))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
    return sorted(ends)
