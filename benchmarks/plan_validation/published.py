"""Published measurements to compare predictions with: ``published/*.json``, validated strictly.

    {"format": "moe_comm published", "version": 1, "name": "flux-dense", "source": "...", "machine": "l20",
     "unit": "ms", "better": "lower", "notes": [...],
     "rows": [{"system": "flux", "case": "AG+GEMM", "value": 5.9, ...}]}

A row describes either one operator (``operator``) or a training step (``step``). Its value is a number in the unit of
the table, or "OOM". ``fits`` names the constant that is fitted to the row, at most once per system. ``excluded`` is the
reason why the row is not evaluated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.shape import Recompute
from moe_comm.topology.parallel import ShardingMode
from moe_plan.model.mapping import Dispatcher, OverlapMode

FOLDER = Path(__file__).parent / "published"
MAX_BYTES = 2**20
"""Largest size of a file."""
Pattern = Literal[
    "product",
    "gather",
    "scatter",
    "gather product",
    "product scatter",
    "gather experts",
    "experts scatter",
]
UNITS = {
    "ms": "lower",
    "s": "lower",
    "mfu %": "higher",
    "tokens/s": "higher",
    "tflops": "higher",
    "times the first": "higher",
}
"""Units and which values are better. "tokens/s" and "tflops" are per accelerator. "tflops" counts attention without the
causal mask, as Megatron did until March 2025."""

Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class OperatorCase:
    """A GEMM on each of ``ranks`` ranks of a host, and the transfer before or after it.

    Attributes:
        m: rows of the GEMM of one rank; with experts, tokens of all ranks.
        n, k: sizes of the GEMM of one rank, for one expert.
        ep: number of groups of ranks over which the experts are distributed.
        imbalance: rows of the busiest group over the mean.
        transport: "none" transfers nothing, "serial" is a separate collective, for others see ``machine.fused``.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    pattern: Pattern
    transport: Literal["none", "serial", "copies", "stores", "adds", "units"]
    m: Count
    n: Count
    k: Count
    ranks: Count
    dtype: str = "bf16"
    experts: Count = 1
    top_k: Count = 1
    ep: Count = 1
    imbalance: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0

    def __post_init__(self) -> None:
        if self.experts % self.ep or self.ranks % self.ep or self.top_k > self.experts:
            raise ConfigError(
                f"experts and ranks must be multiples of ep, and top_k at most experts; got {self.experts} experts, "
                f"top_k {self.top_k}, {self.ranks} ranks, ep {self.ep}"
            )


@dataclass(frozen=True)
class StepCase:
    """A training step.

    Attributes:
        mapping: degrees for ``Mapping.parse``. Without "vpp", the number of virtual stages is unknown.
        machine: name of the machine, from the table.
        coupled: expert parallelism is inside data parallelism.
        free: degrees that the source does not state. The fastest values are used.
        capacity: slots of an expert over its mean load.
        micro_batch, recompute: None: the source does not state them.
        dispatcher: "auto": the fastest dispatcher.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    model: Text
    gpus: Count
    seq_len: Count
    global_batch: Count
    mapping: str
    machine: Text
    coupled: bool = False
    free: tuple[str, ...] = ()
    sharding: ShardingMode = "zero1"
    overlap: OverlapMode = "none"
    capacity: Annotated[float, Field(allow_inf_nan=False)] | None = None
    dtype: str = "bf16"
    micro_batch: Count | None = None
    recompute: Recompute | None = None
    dispatcher: Dispatcher | Literal["auto"] = "all_to_all"


@dataclass(frozen=True)
class Row:
    """One published number.

    Attributes:
        value: number in the unit of the table. None: out of memory.
        workload: rows with the same system and workload are different mappings, which are ranked. Default: the case.
        fits: name of the constant that is fitted to this row.
        excluded: reason why the row is not evaluated.
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
    """Rows of one source on one machine. ``unit`` is one of ``UNITS``."""

    name: str
    source: str
    machine: str
    unit: str
    notes: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def lower_is_better(self) -> bool:
        return UNITS[self.unit] == "lower"


class _FileRow(BaseModel):
    model_config = ConfigDict(extra="forbid")

    system: Text
    case: Text
    value: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["OOM"]
    workload: Text | None = None
    fits: Text | None = None
    excluded: Text | None = None
    operator: OperatorCase | None = None
    step: StepCase | None = None

    def row(self) -> Row:
        what = self.operator or self.step
        if what is None or (self.operator and self.step):
            raise ConfigError(f"{self.system}, {self.case} needs either operator or step")
        value = None if self.value == "OOM" else self.value
        return Row(self.system, self.case, value, what, self.workload or self.case, self.fits, self.excluded)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Literal["moe_comm published"]
    version: Literal[1]
    name: Text
    source: Text
    machine: Text
    unit: str
    better: str
    notes: Annotated[tuple[Text, ...], Field(min_length=1)]
    rows: Annotated[tuple[_FileRow, ...], Field(min_length=1)]

    def table(self) -> Table:
        if UNITS.get(self.unit) != self.better:
            raise ConfigError(f"unit and better must be a pair of {UNITS}; got {self.unit!r} and {self.better!r}")
        rows = tuple(row.row() for row in self.rows)
        cases: set[tuple[str, str]] = set()
        fitted: set[str] = set()
        for row in rows:
            if (row.system, row.case) in cases:
                raise ConfigError(f"{row.system}, {row.case} appears twice")
            cases.add((row.system, row.case))
            if row.fits is not None:
                if row.system in fitted or row.excluded is not None or row.value is None:
                    raise ConfigError(
                        f"at most one row of {row.system} may have fits; it must not be excluded or out of memory"
                    )
                fitted.add(row.system)
        return Table(self.name, self.source, self.machine, self.unit, self.notes, rows)


@cache
def tables() -> tuple[Table, ...]:
    """Return all tables in ``published/``, sorted by file name."""
    return tuple(load(path) for path in sorted(FOLDER.glob("*.json")))


def load(path: Path | str) -> Table:
    """Read a table from its file. Raises ``ConfigError`` with the path and the reason."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ConfigError(f"{path} is longer than {MAX_BYTES} bytes")
        data = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    return from_json(data, path.name)


def from_json(data: Any, where: str = "table") -> Table:
    """Return the table of a JSON object. Raises ``ConfigError`` with ``where`` and the reason."""
    try:
        # Strict validation accepts lists as tuples and objects as dataclasses only in JSON text.
        return _File.model_validate_json(json.dumps(_with_machine(data)), strict=True).table()
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigError(f"{where}: {problems}") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _with_machine(data: Any) -> Any:
    """Add the machine of the table to its steps, which must not have a machine."""
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list):
        return data
    rows = []
    for row in data["rows"]:
        if isinstance(row, dict) and isinstance(row.get("step"), dict):
            if "machine" in row["step"]:
                raise ConfigError("step must not have the key 'machine'; set it in the table")
            row = row | {"step": row["step"] | {"machine": data.get("machine")}}
        rows.append(row)
    return data | {"rows": rows}
