"""Read a run folder of any size as arrays for a report.

Missing files and invalid lines are not errors, because reports of failed runs are the most useful. ``Run.notes`` lists
them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from moe_comm.errors import ConfigError
from moe_comm.observe import records
from moe_comm.observe.faults import Injection
from moe_comm.observe.records import Attempt, FaultRecord, LoadLine, PlacementLine, RankStep
from moe_comm.observe.report.lines import RankLines, all_lines, number, object_of, read_ranks, spread_lines
from moe_comm.runtime.untrusted import parse_toml, printable_line, read_bounded
from moe_comm.topology import ParallelConfig

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_METRICS, MOST_EVENTS = 50_000, 5000
MOST_LAYER_STEPS, MOST_LAYERS, MOST_LOADS = 600, 512, 400_000
SMALL_FILE = 4 << 20
PARTS = ("compute", "communication", "data", "checkpoint", "loop")
CURVES = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "total", *PARTS, "memory_bytes")
_BYTES = ("read", "written", "stored")
_TRANSFERS = ("update_s", "waited_s", "busy_s", *_BYTES, "peak")
TIERS = {"offload": _TRANSFERS, "activations": _TRANSFERS, "weights": _BYTES}
"""Objects in metrics.jsonl with the transfers of offloaded state, activations and weights, and their values."""
OFFLOAD = tuple(f"{tier}_{name}" for tier, names in TIERS.items() for name in names)
"""Curves of their values."""
LENGTHS = ("static_most", "static_least", "balanced_most", "balanced_least")
"""Work of the slowest and the idlest rank relative to the mean, as curves with the prefix ``lengths_``."""
ALL_CURVES = (*CURVES, *OFFLOAD, *(f"lengths_{name}" for name in LENGTHS))
LENT = ("rows_fixed", "rows_lent", "lent_experts", "resident_share", "copied_bytes")
HEALTH = ("imbalance", "least", "mean", "dead", "dead_share", "diversity", "dropped", "balance", *LENT)
Record = TypeVar("Record", PlacementLine, RankStep, LoadLine, Attempt, FaultRecord)


@dataclass(frozen=True)
class Curves:
    """Metrics of rank 0. Missing values are NaN.

    Attributes:
        steps_S: [S] steps.
        values: [S] values of each of ``CURVES``.
        skipped: skipped steps and reasons.
        validation: steps after which the validation loss was computed, and the loss.
        layer_steps_N: [N] steps with per-layer metrics.
        layers: [N, L] values of each of ``HEALTH``.
        across: [N, 2] median and 95th percentile over layers of each of ``HEALTH``.
    """

    steps_S: Floats
    values: Mapping[str, Floats]
    skipped: tuple[tuple[int, str], ...] = ()
    validation: tuple[tuple[int, float], ...] = ()
    layer_steps_N: Floats = field(default_factory=lambda: np.zeros(0))
    layers: Mapping[str, Floats] = field(default_factory=dict)
    across: Mapping[str, Floats] = field(default_factory=dict)


@dataclass(frozen=True)
class Loads:
    """Expert loads. steps: [T] steps. names: [L] layers. slots_TLE: slots of each expert; NaN if missing."""

    steps: tuple[int, ...]
    names: tuple[str, ...]
    slots_TLE: Floats


@dataclass(frozen=True)
class Run:
    """All data of a run. notes: missing files and invalid lines. ended_s: end in seconds since 1970; NaN if unknown."""

    path: Path
    name: str
    status: str
    curves: Curves
    loads: Loads
    placements: tuple[PlacementLine, ...]
    ranks: RankLines
    attempts: tuple[Attempt, ...]
    faults: tuple[FaultRecord, ...]
    injected: tuple[Injection, ...]
    mapping: ParallelConfig | None
    notes: tuple[str, ...]
    ended_s: float = math.nan


def read_run(path: Path) -> Run:
    """Read the available files of the run folder ``path``."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; pass a run folder, such as runs/train-20260101-120000")
    names = (records.METRICS, records.RANKS, records.LOADS, records.ATTEMPTS, records.FAULTS, records.RESOLVED)
    if not any((path / name).exists() for name in names):
        raise ConfigError(f"{path} is not a run folder: it has none of {', '.join(names)}")
    notes: list[str] = []
    curves = _curves(path, notes)
    loads = _loads(path, notes)
    lines = read_ranks(path, notes)
    placements = tuple(_event_records(path / records.PLACEMENTS, PlacementLine, notes, optional=True))
    attempts = tuple(_event_records(path / records.ATTEMPTS, Attempt, notes))
    faults = tuple(_event_records(path / records.FAULTS, FaultRecord, notes, optional=True))
    injected = tuple(_injections(path / records.INJECTED, notes))
    result = _small_file(path / "result.json", json.loads, notes)
    config = _small_file(path / records.RESOLVED, parse_toml, notes)
    status = result.get("status")
    return Run(
        path=path,
        name=printable_line(path.resolve().name),
        status=printable_line(status) if isinstance(status, str) else "running or killed",
        curves=curves,
        loads=loads,
        placements=placements,
        ranks=lines,
        attempts=attempts,
        faults=faults,
        injected=injected,
        mapping=_mapping(attempts, config, lines),
        notes=tuple(notes),
        ended_s=number(result.get("ended_s")),
    )


def _json_objects(path: Path, most: int, notes: list[str], optional: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file of JSON lines; note the number of invalid lines."""
    if not path.exists():
        if not optional:
            notes.append(f"{path.name} is missing")
        return
    bad = 0
    try:
        for raw in spread_lines(path, most):
            value = object_of(raw)
            if value is None:
                bad += 1
            else:
                yield value
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror or error}")
    if bad:
        notes.append(f"{path.name}: skipped {bad} invalid line(s)")


def _event_records(path: Path, kind: type[Record], notes: list[str], optional: bool = False) -> Iterator[Record]:
    bad = 0
    for value in _json_objects(path, MOST_EVENTS, notes, optional):
        try:
            yield records.parse(value, kind)
        except ValueError:
            bad += 1
    if bad:
        notes.append(f"{path.name}: skipped {bad} line(s) that are not a {kind.__name__}")


def _injections(path: Path, notes: list[str]) -> Iterator[Injection]:
    """Yield the injected faults; invalid fields are replaced by -1 or truncated."""
    for value in _json_objects(path, MOST_EVENTS, notes, optional=True):
        integers = (value.get(name) for name in ("rank", "step", "attempt"))
        rank, step, attempt = (item if isinstance(item, int) and abs(item) < 2**53 else -1 for item in integers)
        texts = {name: str(value.get(name, ""))[:1000] for name in ("key", "kind", "fault", "what")}
        yield Injection(time_s=number(value.get("time_s")), rank=rank, step=step, attempt=attempt, **texts)


def _small_file(path: Path, read: Callable[[bytes], Any], notes: list[str]) -> dict[str, Any]:
    try:
        value = read(read_bounded(path, SMALL_FILE))
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {type(error).__name__}")
        return {}
    return value if isinstance(value, dict) else {}


def _curves(path: Path, notes: list[str]) -> Curves:
    lines: dict[float, list[float]] = {}
    skipped: dict[int, str] = {}
    validation: dict[int, float] = {}
    layers: dict[float, dict[str, Any]] = {}
    stride, count = 1, 0
    for value in _json_objects(path / records.METRICS, MOST_METRICS, notes):
        step = number(value.get("step"))
        if not 0 <= step < 2**53:
            continue
        if math.isfinite(loss := number(value.get("validation/loss"))) and len(validation) < MOST_EVENTS:
            validation[int(step)] = loss
        if "loss" not in value:
            continue
        times = value.get("times")
        flat = (times if isinstance(times, dict) else {}) | value
        flat["loop"] = value.get("loop_s")
        if "total" not in flat:
            flat["total"] = value.get("seconds")
        for tier in TIERS:
            if isinstance(values := value.get(tier), dict):
                flat |= {f"{tier}_{name}": one for name, one in values.items()}
        if isinstance(lengths := value.get("lengths"), dict):
            for name, loads in lengths.items():
                if isinstance(loads, list) and loads:
                    work = [number(load) for load in loads]
                    flat |= {f"lengths_{name}_most": max(work), f"lengths_{name}_least": min(work)}
        lines[step] = [number(flat.get(name)) for name in ALL_CURVES]
        if isinstance(why := value.get("skipped"), str) and why and len(skipped) < MOST_EVENTS:
            skipped[int(step)] = why
        if isinstance(load := value.get("load"), dict):
            if count % stride == 0:
                layers[step] = load | {"across": value.get("load_across")}
            count += 1
            if len(layers) > 2 * MOST_LAYER_STEPS:
                layers = dict(list(layers.items())[::2])
                stride *= 2
    steps = sorted(lines)
    table = np.array([lines[step] for step in steps]).reshape(len(steps), len(ALL_CURVES))
    return Curves(
        np.array(steps, dtype=np.float64),
        {name: table[:, i] for i, name in enumerate(ALL_CURVES)},
        tuple(sorted(skipped.items())),
        tuple(sorted(validation.items())),
        *_layers(layers),
    )


def _layers(loads: Mapping[float, Mapping[str, Any]]) -> tuple[Floats, dict[str, Floats], dict[str, Floats]]:
    steps = sorted(loads)
    places: dict[float, list[int]] = {}
    for step in steps:
        listed = loads[step].get("layers")
        if not isinstance(listed, list):
            listed = list(range(max([len(item) for item in loads[step].values() if isinstance(item, list)], default=0)))
        places[step] = [layer if isinstance(layer, int) and 0 <= layer < MOST_LAYERS else -1 for layer in listed]
    count = 1 + max([max(layers_of_step, default=-1) for layers_of_step in places.values()], default=-1)
    layers = {name: np.full((len(steps), count), np.nan) for name in HEALTH}
    across = {name: np.full((len(steps), 2), np.nan) for name in HEALTH}
    for row, step in enumerate(steps):
        for name in HEALTH:
            values = loads[step].get(name)
            for layer, value in zip(places[step], values if isinstance(values, list) else [], strict=False):
                if layer >= 0:
                    layers[name][row, layer] = number(value)
            across_values = loads[step].get("across")
            pair = across_values.get(name) if isinstance(across_values, dict) else None
            if isinstance(pair, list) and len(pair) == 2:
                across[name][row] = [number(item) for item in pair]
            elif np.isfinite(layers[name][row]).any():
                percentile = 5 if name in ("least", "diversity") else 95
                across[name][row] = np.nanpercentile(layers[name][row], [50, percentile])
    return np.array(steps, dtype=np.float64), layers, across


_STEP = re.compile(rb'^\{"step":\s*(\d{1,15}),')


def _loads(path: Path, notes: list[str]) -> Loads:
    """Read evenly sampled complete steps with at most about ``MOST_LOADS`` numbers."""
    none = Loads((), (), np.zeros((0, 0, 0)))
    file = path / records.LOADS
    if not file.exists():
        notes.append(f"{file.name} is missing: no per-expert loads")
        return none
    try:
        # The first pass only parses the step, which is cheap; the second pass reads the lines of the chosen steps.
        steps = sorted({int(match[1]) for raw in all_lines(file) if (match := _STEP.match(raw))})
        loads: dict[tuple[int, str], list[int]] = {}
        names: dict[str, None] = {}
        bad = 0
        per_step = _slots_per_step(file)
        max_steps = max(MOST_LOADS // max(per_step, 1), 1)
        chosen = {steps[i] for i in np.linspace(0, len(steps) - 1, min(max_steps, len(steps))).astype(int)}
        for raw in all_lines(file):
            match = _STEP.match(raw)
            if match and int(match[1]) not in chosen:
                continue
            try:
                line = records.parse(object_of(raw) or {}, LoadLine)
            except ValueError:
                bad += 1
                continue
            if line.step in chosen and (line.layer in names or len(names) < MOST_LAYERS):
                names[line.layer] = None
                loads[line.step, line.layer] = line.load
    except OSError as error:
        notes.append(f"{file.name} cannot be read: {error.strerror or error}")
        return none
    if bad:
        notes.append(f"{file.name}: skipped {bad} invalid line(s)")
    experts = max((len(load) for load in loads.values()), default=0)
    steps_read = sorted({step for step, _ in loads})
    if len(steps_read) * len(names) * experts > 16 * MOST_LOADS:
        notes.append(f"{file.name}: layers have {experts} experts, too many to draw")
        return none
    slots = np.full((len(steps_read), len(names), experts), np.nan)
    row, column = {step: i for i, step in enumerate(steps_read)}, {name: i for i, name in enumerate(names)}
    for (step, name), load in loads.items():
        slots[row[step], column[name], : len(load)] = [number(slot_count) for slot_count in load]
    return Loads(tuple(steps_read), tuple(names), slots)


def _slots_per_step(file: Path) -> int:
    """Return the number of values in the first complete step of a file of loads."""
    first, count = None, 0
    for raw in all_lines(file):
        match = _STEP.match(raw)
        if first is None and match:
            first = match[1]
        if match and match[1] != first:
            break
        count += raw.rpartition(b"[")[2].count(b",") + 1
    return count


def _mapping(attempts: tuple[Attempt, ...], config: Mapping[str, Any], lines: RankLines) -> ParallelConfig | None:
    """Return the mapping of the last attempt, or of the configuration if there is none."""
    configured = config.get("parallel")
    degrees: Mapping[str, Any] = attempts[-1].mapping if attempts and attempts[-1].mapping else {}
    world = attempts[-1].world if attempts else len(lines.ranks)
    if not degrees and isinstance(configured, dict):
        degrees = configured
    try:
        chosen = {
            name: int(degrees[name]) for name in ("tp", "cp", "pp", "ep", "etp") if isinstance(degrees.get(name), int)
        }
        return ParallelConfig.of(world, **chosen) if world > 0 else None
    except ConfigError:
        return None
