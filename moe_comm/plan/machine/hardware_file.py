"""A cluster's description in a JSON file: written by a calibration or by hand, read with every key checked.

    {"format": "moe_comm hardware", "version": 1, "cluster": {"accelerator": {...}, "gpus": 8, ...}}

with the fields of ``moe_comm.plan.machine.hardware.Cluster`` and of its parts. Fields with defaults may be left out.
Missing and unknown fields raise errors that name the field.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from moe_comm.errors import ConfigError
from moe_comm.plan.machine.collectives import Link
from moe_comm.plan.machine.hardware import Accelerator, Cluster, Pod, Tile

FORMAT, VERSION = "moe_comm hardware", 1
LONGEST = 2**20
"""Bytes: a longer file is not a description."""
LEAST, MOST = 1e-30, 1e24
"""As little as calibrations make of a latency that they do not see, and a million times what any machine does a second:
between them no sum of a step overflows."""

T = TypeVar("T")
_MADE_OF: dict[tuple[type, str], type] = {
    (Cluster, "accelerator"): Accelerator,
    (Cluster, "inside"): Link,
    (Cluster, "between"): Link,
    (Cluster, "across"): Link,
    (Cluster, "pods"): Pod,
    (Pod, "link"): Link,
    (Accelerator, "tiles"): Tile,
}
_LISTS = {(Cluster, "pods"), (Accelerator, "tiles")}
_RATES = {(Accelerator, "flops"), (Accelerator, "efficiency")}
_TEXTS = {(Accelerator, "name"), (Link, "name")}
_FLAGS = {(Cluster, "direct")}


def to_json(cluster: Cluster) -> dict[str, Any]:
    """What ``save`` writes. ``from_json`` makes an equal cluster of it."""
    return {"format": FORMAT, "version": VERSION, "cluster": asdict(cluster)}


def from_json(data: Any, where: str = "hardware") -> Cluster:
    """The cluster that ``to_json`` wrote. Raises ConfigError that names the key, and starts with ``where``."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigError(f'{where}: not a description of hardware: expected an object with "format": "{FORMAT}"')
    if data.get("version") != VERSION:
        raise ConfigError(f"{where}: version {data.get('version')!r} is not known; this library reads {VERSION}")
    if unknown := sorted(set(data) - {"format", "version", "cluster"}):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; expected format, version, cluster")
    return _made(Cluster, data.get("cluster"), f"{where}: cluster")


def save(cluster: Cluster, path: Path | str) -> None:
    """Write the description; a file that is there is replaced as a whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(to_json(cluster), file, indent=2, allow_nan=False)
            file.write("\n")
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load(path: Path | str) -> Cluster:
    """Read a description. Raises ConfigError for a file that is not there, not JSON, or not a description."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            text = file.read(LONGEST + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the description of hardware: {error.strerror or error}") from error
    if len(text) > LONGEST:
        raise ConfigError(f"{path}: longer than {LONGEST:,} bytes: not a description of hardware")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    return from_json(data, str(path))


def _made(kind: type[T], data: Any, where: str) -> T:
    """A dataclass of its fields' JSON. Ranges are checked by the class itself; here, keys and types."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected an object, got {type(data).__name__}")
    known = {entry.name: entry for entry in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(data) - set(known)):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; expected {', '.join(known)}")
    if missing := [name for name, entry in known.items() if name not in data and entry.default is MISSING]:
        raise ConfigError(f"{where}: {missing[0]!r} is missing")
    values: dict[str, Any] = {}
    for name, value in data.items():
        place = f"{where}.{name}"
        part = _MADE_OF.get((kind, name))
        if part is None:
            values[name] = _plain(kind, name, value, place)
        elif (kind, name) in _LISTS:
            if not isinstance(value, list):
                raise ConfigError(f"{place}: expected a list, got {type(value).__name__}")
            values[name] = tuple(_made(part, item, f"{place}[{i}]") for i, item in enumerate(value))
        else:
            optional = value is None and known[name].default is None
            values[name] = None if optional else _made(part, value, place)
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _plain(kind: type, name: str, value: Any, place: str) -> Any:
    """A number, a text, a truth value, or numbers by dtype: what the field must have."""
    if (kind, name) in _TEXTS:
        if not isinstance(value, str) or not value or not value.isprintable():
            raise ConfigError(f"{place}: expected a text of one line, got {value!r}")
        return value
    if (kind, name) in _FLAGS:
        if not isinstance(value, bool):
            raise ConfigError(f"{place}: expected true or false, got {value!r}")
        return value
    if (kind, name) in _RATES:
        if not isinstance(value, dict):
            raise ConfigError(f"{place}: expected numbers by dtype, got {type(value).__name__}")
        return {dtype: _number(rate, f"{place}.{dtype}") for dtype, rate in value.items()}
    return _number(value, place)


def _number(value: Any, place: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{place}: expected a number, got {value!r}")
    if value and not LEAST <= abs(value) <= MOST:
        raise ConfigError(f"{place}: expected a number that hardware has, from {LEAST:g} to {MOST:g}, or 0")
    return value
