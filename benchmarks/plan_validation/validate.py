"""Predictions held against published tables: every row, its error, what was fitted, and whether rankings are right.

    report = validate(predict_step)
    print(report.text())

Operators are predicted here, from a machine's description and ``moe_comm.plan.machine.fused``; whole steps by the
function that is given. Rows that a constant was fitted on and rows that are excluded are shown but do not count.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.plan_validation.published import OperatorCase, Row, StepCase, Table, tables
from moe_comm.errors import ConfigError
from moe_comm.plan.machine import fused
from moe_comm.plan.machine.fused import Product, Transport
from moe_comm.plan.machine.hardware import Cluster, item_bytes
from moe_comm.plan.machine.hardware_table import H100, PCIE_4, cluster_named
from moe_comm.plan.model.files import model_named
from moe_comm.plan.model.load import DROPLESS
from moe_comm.plan.step.weights import SLOW_RING


@dataclass(frozen=True)
class OutOfMemory:
    """What a step's prediction is where no mapping fits. missing_bytes: on the worst rank."""

    missing_bytes: float = 0.0


PredictStep = Callable[[StepCase], "float | OutOfMemory"]

CONSTANTS: dict[str, float] = {
    "h100.efficiency.bf16": H100.efficiency["bf16"],
    "l20.inside.reach": PCIE_4.reach,
    "l20.inside.one_sided": PCIE_4.one_sided,
    "fused.ADDS.reach": fused.ADDS.reach,
    "fused.GROUPED": fused.GROUPED,
    "h100.sustained": H100.sustained,
    "weights.SLOW_RING": SLOW_RING,
    "load.DROPLESS": DROPLESS,
}
"""Those that rows' ``fits`` name, each fitted on that one row."""


@dataclass(frozen=True)
class Checked:
    """A row and its prediction, in the table's unit; None: out of memory."""

    table: str
    system: str
    case: str
    workload: str
    unit: str
    published: float | None
    predicted: float | None
    fitted: bool
    excluded: str | None

    @property
    def error(self) -> float:
        """Predicted over published, less 1; 0 if both ran out of memory, infinite if one did."""
        if self.published is None or self.predicted is None:
            return 0.0 if self.published is self.predicted else math.inf
        return self.predicted / self.published - 1

    @property
    def counts(self) -> bool:
        return not self.fitted and self.excluded is None

    @property
    def status(self) -> str:
        return "fitted" if self.fitted else f"excluded: {self.excluded}" if self.excluded else ""


@dataclass(frozen=True)
class Ranking:
    """Systems of one case, or mappings of one system and workload, the best first."""

    table: str
    kind: str
    within: str
    published: tuple[str, ...]
    predicted: tuple[str, ...]

    @property
    def right(self) -> bool:
        return self.published == self.predicted


@dataclass(frozen=True)
class Constant:
    """A fitted one and the row it comes from."""

    name: str
    value: float
    table: str
    system: str
    case: str


@dataclass(frozen=True)
class Report:
    """What ``validate`` finds."""

    rows: tuple[Checked, ...]
    rankings: tuple[Ranking, ...]
    constants: tuple[Constant, ...]

    def errors(self, table: str | None = None) -> list[float]:
        """Absolute errors of the rows that count, of one table or of all; rows in which both ran out are left out."""
        return [
            abs(row.error)
            for row in self.rows
            if row.counts and table in (None, row.table) and not (row.published is None and row.predicted is None)
        ]

    def median(self, table: str | None = None) -> float:
        """Median absolute error, NaN if no row counts."""
        found = self.errors(table)
        return statistics.median(found) if found else math.nan

    def worst(self, table: str | None = None) -> float:
        """Greatest absolute error, NaN if no row counts."""
        return max(self.errors(table), default=math.nan)

    def text(self) -> str:
        """The report as plain text: a line for each row, then each table's summary, rankings and constants."""
        head = ("table", "system", "case", "published", "predicted", "error", "unit", "")
        lines = [
            (
                row.table,
                row.system,
                row.case,
                _number(row.published),
                _number(row.predicted),
                f"{row.error:+.1%}" if math.isfinite(row.error) else "wrong",
                row.unit,
                row.status,
            )
            for row in self.rows
        ]
        out = _aligned([head, *lines])
        names = list(dict.fromkeys(row.table for row in self.rows))
        summary = [("table", "rows that count", "median error", "worst", "rankings right")]
        for name in [*names, None]:
            found = [ranking for ranking in self.rankings if name in (None, ranking.table)]
            summary.append(
                (
                    name or "all",
                    str(len(self.errors(name))),
                    f"{self.median(name):.1%}",
                    f"{self.worst(name):.1%}",
                    f"{sum(ranking.right for ranking in found)} of {len(found)}",
                )
            )
        out += ["", *_aligned(summary)]
        for ranking in self.rankings:
            if not ranking.right:
                out.append(
                    f"wrong ranking of {ranking.kind}: {ranking.table}, {ranking.within}: published "
                    f"{' > '.join(ranking.published)}; predicted {' > '.join(ranking.predicted)}"
                )
        out += [""] + [
            f"fitted: {one.name} = {one.value:g}, on {one.table}: {one.system}, {one.case}" for one in self.constants
        ]
        return "\n".join(out)


def validate(predict_step: PredictStep | None = None, chosen: Iterable[Table] | None = None) -> Report:
    """Predict every row.

    Args:
        predict_step: seconds of a step, or ``OutOfMemory``. Without it, tables of steps are left out.
        chosen: tables; None: all in ``published/``.

    Raises:
        ConfigError: a row names a constant, machine or model that is not known.
    """
    rows: list[Checked] = []
    rankings: list[Ranking] = []
    constants: list[Constant] = []
    for table in tables() if chosen is None else chosen:
        if predict_step is None and any(isinstance(row.what, StepCase) for row in table.rows):
            continue
        found = _checked(table, predict_step)
        rows += found
        rankings += _rankings(found, table.lower_is_better)
        for row in table.rows:
            if row.fits is not None:
                if row.fits not in CONSTANTS:
                    raise ConfigError(
                        f"table {table.name}: no constant {row.fits!r}; fitted ones are {', '.join(CONSTANTS)}"
                    )
                constants.append(Constant(row.fits, CONSTANTS[row.fits], table.name, row.system, row.case))
    return Report(tuple(rows), tuple(rankings), tuple(constants))


def predict_operator(case: OperatorCase, machine: str) -> float:
    """Seconds of an operator on one host of a named machine."""
    cluster = cluster_named(machine, case.ranks)
    span = cluster.span(range(case.ranks))
    size = item_bytes(case.dtype)
    if "experts" in case.pattern:
        return _experts(case, cluster, size)
    product = Product(case.m, case.n, case.k, case.dtype)
    alone = product.seconds(cluster.accelerator)
    if case.pattern == "product":
        return alone
    if "gather" in case.pattern:
        moved = cluster.all_gather_s(case.m * case.k * size, span)
    else:
        moved = cluster.reduce_scatter_s(case.m * case.n * size, span)
    if "product" not in case.pattern:
        return moved
    if case.transport in ("none", "serial"):
        return alone + moved
    build = fused.gather_product if case.pattern == "gather product" else fused.product_scatter
    return build(cluster, span, product, _transport(case)).seconds


def _experts(case: OperatorCase, cluster: Cluster, size: int) -> float:
    """An MoE layer's half: all tokens gathered and multiplied by their experts; or the way back, summed by token."""
    span, gpu = cluster.span(range(case.ranks)), cluster.accelerator
    local = case.experts // case.ep
    each = case.m * case.top_k / case.experts * case.imbalance
    product = Product(each, case.n, case.k, case.dtype, local, gathered=True)
    ahead = case.pattern == "gather experts"
    num_bytes = case.m * (case.k if ahead else case.n) * size
    if case.transport in ("none", "serial"):
        # A kernel for each expert, with a pass over its result; rows are put in order before or summed after.
        one = gpu.gemm_seconds(each, case.n, case.k, case.dtype) + gpu.launch_s
        one += gpu.memory_seconds(2 * each * case.n * size)
        ordered = case.m * case.top_k * (case.k if ahead else case.n) * size
        rest = cluster.all_gather_s(num_bytes, span) if ahead else cluster.reduce_scatter_s(num_bytes, span)
        return local * one + 2 * gpu.launch_s + gpu.memory_seconds(4 * ordered) + rest
    if ahead:
        return fused.dispatch_product(cluster, span, product, num_bytes, "gather", _transport(case)).seconds
    return fused.product_combine(cluster, span, product, num_bytes, "scatter", _transport(case)).seconds


def _transport(case: OperatorCase) -> Transport:
    return fused.TRANSPORTS[case.transport]


def _checked(table: Table, predict_step: PredictStep | None) -> list[Checked]:
    seconds: dict[StepCase, float | OutOfMemory] = {}

    def step(case: StepCase) -> float | None:
        if predict_step is None:
            raise ConfigError(f"table {table.name} is of training steps: it needs a function that predicts them")
        if case not in seconds:
            seconds[case] = predict_step(case)
        taken = seconds[case]
        return None if isinstance(taken, OutOfMemory) else taken

    def predicted(row: Row) -> float | None:
        case = row.what
        if isinstance(case, OperatorCase):
            taken: float | None = predict_operator(case, table.machine)
        else:
            taken = step(case)
        if taken is None:
            return None
        if table.unit == "ms":
            return 1e3 * taken
        if table.unit == "s":
            return taken
        if not isinstance(case, StepCase):
            raise ConfigError(f"table {table.name}: {table.unit} is not a unit of operators")
        if table.unit == "mfu %":
            return 100 * mfu(case, taken)
        if table.unit == "tokens/s":
            return tokens_per_s(case, taken)
        if table.unit == "tflops":
            return tokens_per_s(case, taken) * model_named(case.model).model_flops(case.seq_len, causal=False) / 1e12
        first = table.rows[0].what
        base = step(first) if isinstance(first, StepCase) else None
        return None if base is None else base / taken

    return [
        Checked(
            table.name,
            row.system,
            row.case,
            row.workload,
            table.unit,
            row.value,
            predicted(row),
            row.fits is not None,
            row.excluded,
        )
        for row in table.rows
    ]


def mfu(case: StepCase, seconds: float) -> float:
    """Share of the accelerators' peak that a step of so many seconds reaches."""
    accelerator = cluster_named(case.machine).accelerator
    flops = model_named(case.model).model_flops(case.seq_len) * case.seq_len * case.global_batch
    return flops / (seconds * case.gpus * accelerator.peak(case.dtype))


def tokens_per_s(case: StepCase, seconds: float) -> float:
    """Of each accelerator, in a step of so many seconds."""
    return case.seq_len * case.global_batch / (seconds * case.gpus)


def _rankings(rows: Sequence[Checked], lower_is_better: bool) -> list[Ranking]:
    """Of systems within each case, and of cases within each workload of a system. Excluded rows are not compared."""
    groups: dict[tuple[str, str], list[tuple[str, Checked]]] = {}
    for row in rows:
        if row.excluded is None:
            groups.setdefault(("systems", row.case), []).append((row.system, row))
            if row.workload != row.case:
                groups.setdefault(("mappings", f"{row.system}, {row.workload}"), []).append((row.case, row))

    def order(members: list[tuple[str, Checked]], which: str) -> tuple[str, ...]:
        def key(member: tuple[str, Checked]) -> float:
            value: float | None = getattr(member[1], which)
            if value is None:
                return math.inf
            return value if lower_is_better else -value

        return tuple(name for name, _ in sorted(members, key=key))

    return [
        Ranking(members[0][1].table, kind, within, order(members, "published"), order(members, "predicted"))
        for (kind, within), members in groups.items()
        if len(members) > 1
    ]


def _number(value: float | None) -> str:
    return "OOM" if value is None else f"{value:.4g}"


def _aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
