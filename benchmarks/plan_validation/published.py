"""Published measurements that predictions are held against: ``published/*.json``, read with every key checked.

    {"format": "moe_comm published", "version": 1, "name": "flux-dense", "source": "...", "machine": "l20",
     "unit": "ms", "better": "lower", "notes": [...],
     "rows": [{"system": "flux", "case": "AG+GEMM", "value": 5.9, ...}]}

A row describes either one operator (``operator``) or a whole training step (``step``). Its value is a number in the
table's unit, or "OOM". ``fits`` names the constant that was fitted on it, at most once for each system; ``excluded``
says why it does not count.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from moe_comm.errors import ConfigError
from moe_comm.plan.model.mapping import Dispatcher, Overlap

FORMAT, VERSION = "moe_comm published", 1
FOLDER = Path(__file__).parent / "published"
LONGEST = 2**20
"""Bytes: a longer file is not a table."""
PATTERNS = (
    "product",
    "gather",
    "scatter",
    "gather product",
    "product scatter",
    "gather experts",
    "experts scatter",
)
TRANSPORTS = ("none", "serial", "copies", "stores", "adds", "units")
UNITS = {
    "ms": "lower",
    "s": "lower",
    "mfu %": "higher",
    "tokens/s": "higher",
    "tflops": "higher",
    "times the first": "higher",
}
"""And which way is better. "tokens/s", "tflops": of each accelerator; the latter counts attention in full, as Megatron
did until March 2025."""

T = TypeVar("T")


@dataclass(frozen=True)
class OperatorCase:
    """A product on each of ``ranks`` ranks of a host, and the transfer before or after it.

    m: rows of one rank's product; with experts, tokens of all ranks together. n, k: of one rank's product, for one
    expert. ep: groups of ranks that share the experts out; imbalance: rows of the busiest of them over the mean.
    transport: "none" moves nothing, "serial" is a collective beside the product, others: see ``machine.fused``.
    """

    pattern: str
    transport: str
    m: int
    n: int
    k: int
    ranks: int
    dtype: str = "bf16"
    experts: int = 1
    top_k: int = 1
    ep: int = 1
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        _one_of("pattern", self.pattern, PATTERNS)
        _one_of("transport", self.transport, TRANSPORTS)
        for name in ("m", "n", "k", "ranks", "experts", "top_k", "ep"):
            _count(name, getattr(self, name))
        if self.imbalance < 1:
            raise ConfigError(f"imbalance is at least 1, got {self.imbalance}")
        if self.experts % self.ep or self.ranks % self.ep or self.top_k > self.experts:
            raise ConfigError(
                f"{self.experts} experts, top {self.top_k}, on {self.ranks} ranks do not fit ep {self.ep}"
            )


@dataclass(frozen=True)
class StepCase:
    """A training step. machine: from the table.

    mapping: degrees as ``Mapping.parse`` reads them; free: those that the source does not tell, of which the best
    counts. coupled: expert parallelism lies inside data parallelism. capacity: slots of an expert over its mean load.
    micro_batch, recompute: None: the source does not tell; nor does it the virtual stages, if the mapping has no vpp.
    dispatcher: "auto": the system takes the fastest.
    """

    model: str
    gpus: int
    seq_len: int
    global_batch: int
    mapping: str
    machine: str
    coupled: bool = False
    free: tuple[str, ...] = ()
    sharding: str = "zero1"
    overlap: str = "none"
    capacity: float | None = None
    dtype: str = "bf16"
    micro_batch: int | None = None
    recompute: str | None = None
    dispatcher: str = "all_to_all"

    def __post_init__(self) -> None:
        for name in ("gpus", "seq_len", "global_batch"):
            _count(name, getattr(self, name))
        if self.micro_batch is not None:
            _count("micro_batch", self.micro_batch)
        if self.recompute is not None:
            _one_of("recompute", self.recompute, ("none", "selective", "full"))
        _one_of("sharding", self.sharding, ("replicate", "zero1", "fsdp"))
        _one_of("overlap", self.overlap, get_args(Overlap))
        _one_of("dispatcher", self.dispatcher, ("auto", *get_args(Dispatcher)))


@dataclass(frozen=True)
class Row:
    """One published number. value: in the table's unit, None: it ran out of memory.

    workload: rows of one workload and system are mappings that a choice is made among; as a rule the case itself.
    """

    system: str
    case: str
    value: float | None
    what: OperatorCase | StepCase
    workload: str
    fits: str | None = None
    excluded: str | None = None


@dataclass(frozen=True)
class Table:
    """Rows of one source on one machine. unit: one of ``UNITS``."""

    name: str
    source: str
    machine: str
    unit: str
    notes: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def lower_is_better(self) -> bool:
        return UNITS[self.unit] == "lower"


@cache
def tables() -> tuple[Table, ...]:
    """All tables in ``published/``, by name."""
    return tuple(load(path) for path in sorted(FOLDER.glob("*.json")))


def load(path: Path | str) -> Table:
    """A table from its file. Raises ConfigError that names the file and what is wrong in it."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            text = file.read(LONGEST + 1)
        if len(text) > LONGEST:
            raise ConfigError(f"{path}: longer than {LONGEST} bytes, not a table of published numbers")
        data = json.loads(text, parse_constant=_no_constant)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    return from_json(data, path.name)


def from_json(data: Any, where: str = "table") -> Table:
    """The table that ``data`` describes. Raises ConfigError that starts with ``where``."""
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise ConfigError(f'{where}: expected an object with "format": "{FORMAT}" and "version": {VERSION}')
    wanted = {"name": str, "source": str, "machine": str, "unit": str, "better": str, "notes": list, "rows": list}
    _keys(data, {"format", "version", *wanted}, {"format", "version", *wanted}, where)
    for key, kind in wanted.items():
        if not isinstance(data[key], kind) or not data[key]:
            raise ConfigError(f"{where}: {key} must be a {kind.__name__} that is not empty, got {data[key]!r:.80}")
    if UNITS.get(data["unit"]) != data["better"]:
        raise ConfigError(f"{where}: unit and better must be a pair of {UNITS}; got {data['unit']}, {data['better']}")
    if not all(isinstance(note, str) for note in data["notes"]):
        raise ConfigError(f"{where}: notes must be texts")
    rows = tuple(_row(row, data["machine"], f"{where}: row {i}") for i, row in enumerate(data["rows"]))
    seen: set[tuple[str, str]] = set()
    fitted: set[str] = set()
    for row in rows:
        if (row.system, row.case) in seen:
            raise ConfigError(f"{where}: {row.system}, {row.case} is there twice")
        seen.add((row.system, row.case))
        if row.fits is not None:
            if row.system in fitted or row.excluded is not None or row.value is None:
                raise ConfigError(f"{where}: at most one row of {row.system} may be fitted, one that counts and ran")
            fitted.add(row.system)
    return Table(data["name"], data["source"], data["machine"], data["unit"], tuple(data["notes"]), rows)


def _row(data: Any, machine: str, where: str) -> Row:
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected an object, got {data!r:.80}")
    _keys(data, {"system", "case", "value"}, {f.name for f in fields(Row)} - {"what"} | {"operator", "step"}, where)
    for key in ("system", "case", "workload", "fits", "excluded"):
        if key in data and (not isinstance(data[key], str) or not data[key]):
            raise ConfigError(f"{where}: {key} must be a text, got {data[key]!r:.80}")
    value = data["value"]
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    if not number and value != "OOM":
        raise ConfigError(f'{where}: value must be a number above 0 or "OOM", got {value!r:.80}')
    if ("operator" in data) == ("step" in data):
        raise ConfigError(f"{where}: needs either operator or step")
    workload: str = data["workload"] if "workload" in data else data["case"]
    what: OperatorCase | StepCase
    if "operator" in data:
        what = _made(OperatorCase, data["operator"], where)
    else:
        what = _made(StepCase, data["step"], where, {"machine": machine})
    return Row(
        system=data["system"],
        case=data["case"],
        value=float(value) if number else None,
        what=what,
        workload=workload,
        fits=data.get("fits"),
        excluded=data.get("excluded"),
    )


def _made(cls: type[T], data: Any, where: str, more: Mapping[str, Any] | None = None) -> T:
    """The dataclass from an object with its fields; types are checked."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected an object for {cls.__name__}, got {data!r:.80}")
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    needed = {name for name, field in known.items() if field.default is MISSING} - set(more or ())
    _keys(data, needed, set(known) - set(more or ()), where)
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in data.items():
        kind, given = hints[key], value
        if kind == tuple[str, ...]:
            fine = isinstance(value, list) and all(isinstance(item, str) for item in value)
            given = tuple(value) if fine else value
        elif kind in (float, float | None):
            fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            fine = fine or (value is None and kind is not float)
        else:
            fine = type(value) in (get_args(kind) or (kind,))
        if not fine:
            raise ConfigError(f"{where}: {key} must be {kind}, got {value!r:.80}")
        values[key] = given
    try:
        return cls(**values, **(more or {}))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _keys(data: dict[str, Any], needed: set[str], known: set[str], where: str) -> None:
    if missing := sorted(needed - set(data)):
        raise ConfigError(f"{where}: lacks {missing[0]!r}")
    if unknown := sorted(set(data) - known):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r:.80}; expected {', '.join(sorted(known))}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}; got {value!r}")


def _count(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}")


def _no_constant(text: str) -> float:
    raise ConfigError(f"{text} is not a number that a table can hold")
