"""JSON files that describe a cluster. A calibration writes them, or users do.

    {"format": "moe_comm hardware", "version": 1, "cluster": {"accelerator": {...}, "gpus": 8, ...}}

The keys are the fields of ``moe_plan.machine.hardware.Cluster`` and of its members. Fields with defaults are
optional. A missing or unknown field raises an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from moe_comm.errors import ConfigError
from moe_comm.runtime.safe_files import write_file
from moe_comm.runtime.untrusted import read_bounded
from moe_plan.machine.hardware import Cluster

FORMAT, VERSION = "moe_comm hardware", 1
LONGEST = 2**20
"""Largest accepted file, in bytes."""
LEAST, MOST = 1e-30, 1e24
"""Range of accepted numbers. Calibrations write the lower bound for latencies below their resolution. The upper bound
is a million times the rates of existing machines. No sum over a step overflows in this range."""

T = TypeVar("T")


def to_json(cluster: Cluster) -> dict[str, Any]:
    """Return the JSON object that ``save`` writes. ``from_json`` restores an equal cluster."""
    return {"format": FORMAT, "version": VERSION, "cluster": asdict(cluster)}


def from_json(data: Any, where: str = "hardware") -> Cluster:
    """Return the cluster that ``to_json`` described. Raises ConfigError with ``where`` and the name of the key."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigError(f'{where}: not a hardware description: expected an object with "format": "{FORMAT}"')
    if data.get("version") != VERSION:
        raise ConfigError(f"{where}: unknown version {data.get('version')!r}; this library reads {VERSION}")
    if unknown := sorted(set(data) - {"format", "version", "cluster"}):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; expected format, version, cluster")
    return _parse(Cluster, data.get("cluster"), f"{where}: cluster")


def save(cluster: Cluster, path: Path | str) -> None:
    """Write the description atomically. Raises ConfigError if ``load`` would refuse it."""
    text = json.dumps(to_json(cluster), indent=2, allow_nan=False) + "\n"
    from_json(json.loads(text), str(path))
    write_file(Path(path), text)


def load(path: Path | str) -> Cluster:
    """Read a description. Raises ConfigError if the file is unreadable, not JSON, or not a hardware description."""
    path = Path(path)
    try:
        text = read_bounded(path, LONGEST)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the hardware description: {error.strerror or error}") from error
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    return from_json(data, str(path))


def _parse(kind: type[T], data: Any, where: str) -> T:
    """Build a dataclass from JSON. This checks keys and types; the class itself checks ranges."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected an object, got {type(data).__name__}")
    known = {entry.name: entry for entry in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(data) - set(known)):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; expected {', '.join(known)}")
    if missing := [name for name, entry in known.items() if name not in data and entry.default is MISSING]:
        raise ConfigError(f"{where}: {missing[0]!r} is missing")
    types = get_type_hints(kind)
    values = {name: _parse_value(types[name], value, f"{where}.{name}") for name, value in data.items()}
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _parse_value(kind: Any, value: Any, key: str) -> Any:
    """Return a field of type ``kind`` from JSON."""
    if is_dataclass(kind):
        return _parse(kind, value, key)  # type: ignore[arg-type]
    if get_origin(kind) is UnionType:
        return None if value is None else _parse_value(get_args(kind)[0], value, key)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{key}: expected a list, got {type(value).__name__}")
        return tuple(_parse_value(get_args(kind)[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    if get_origin(kind) is Mapping:
        if not isinstance(value, dict):
            raise ConfigError(f"{key}: expected numbers by dtype, got {type(value).__name__}")
        return {dtype: _number(rate, f"{key}.{dtype}") for dtype, rate in value.items()}
    if kind is str and not (isinstance(value, str) and value and value.isprintable()):
        raise ConfigError(f"{key}: expected a printable string, got {value!r}")
    if kind is bool and not isinstance(value, bool):
        raise ConfigError(f"{key}: expected true or false, got {value!r}")
    return value if kind in (str, bool) else _number(value, key)


def _number(value: Any, key: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key}: expected a number, got {value!r}")
    if value and not LEAST <= abs(value) <= MOST:
        raise ConfigError(f"{key}: expected a number that hardware has, from {LEAST:g} to {MOST:g}, or 0")
    return value
