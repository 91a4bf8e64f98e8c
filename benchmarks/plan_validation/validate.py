"""Compare predictions with published tables: errors, fitted constants and rankings.

    report = validate(predict_step)
    print(report.text())

Operators are predicted with ``moe_plan.machine.fused``, steps by the ``predict_step`` argument. Fitted and
excluded rows are listed but not evaluated.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.plan_validation import operators
from benchmarks.plan_validation.published import OperatorCase, Row, StepCase, Table, tables
from moe_comm.errors import ConfigError
from moe_plan.machine import fused
from moe_plan.machine.fused import Gemm, Transport
from moe_plan.machine.hardware import Cluster, item_bytes
from moe_plan.machine.hardware_table import H100, PCIE_4, cluster_named
from moe_plan.model.files import model_named
from moe_plan.model.load import DROPLESS
from moe_plan.step.weights import SLOW_RING


@dataclass(frozen=True)
class OutOfMemory:
    """Prediction of a step if no mapping fits into memory. ``missing_bytes`` is for the rank with the most."""

    missing_bytes: float = 0.0


PredictStep = Callable[[StepCase], "float | OutOfMemory"]

CONSTANTS: dict[str, float] = {
    "h100.efficiency.bf16": H100.efficiency["bf16"],
    "l20.inside.reach": PCIE_4.reach,
    "l20.inside.one_sided": PCIE_4.one_sided,
    "fused.ADDS.reach": operators.ADDS.reach,
    "fused.GROUPED": fused.GROUPED,
    "h100.sustained": H100.sustained,
    "weights.SLOW_RING": SLOW_RING,
    "load.DROPLESS": DROPLESS,
}
"""Constants that the ``fits`` of rows name. Each is fitted to one row."""


@dataclass(frozen=True)
class CheckedRow:
    """A row and its prediction, in the unit of the table. None: out of memory."""

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
        """Predicted over published, minus 1; 0 if both are out of memory, infinite if one is."""
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
    """Ranking of the systems of a case, or of the mappings of a system and workload, best first."""

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
    """A fitted constant and its row."""

    name: str
    value: float
    table: str
    system: str
    case: str


@dataclass(frozen=True)
class ValidationReport:
    """Result of ``validate``."""

    rows: tuple[CheckedRow, ...]
    rankings: tuple[Ranking, ...]
    constants: tuple[Constant, ...]

    def errors(self, table: str | None = None) -> list[float]:
        """Return the absolute errors of the evaluated rows of one table or of all, except rows with OOM in both."""
        return [
            abs(row.error)
            for row in self.rows
            if row.counts and table in (None, row.table) and not (row.published is None and row.predicted is None)
        ]

    def median(self, table: str | None = None) -> float:
        """Return the median absolute error, NaN without evaluated rows."""
        errors = self.errors(table)
        return statistics.median(errors) if errors else math.nan

    def worst(self, table: str | None = None) -> float:
        """Return the largest absolute error, NaN without evaluated rows."""
        return max(self.errors(table), default=math.nan)

    def text(self) -> str:
        """Return the report as text: all rows, the summary of each table, wrong rankings and constants."""
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
            rankings = [ranking for ranking in self.rankings if name in (None, ranking.table)]
            summary.append(
                (
                    name or "all",
                    str(len(self.errors(name))),
                    f"{self.median(name):.1%}",
                    f"{self.worst(name):.1%}",
                    f"{sum(ranking.right for ranking in rankings)} of {len(rankings)}",
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


def validate(predict_step: PredictStep | None = None, chosen: Iterable[Table] | None = None) -> ValidationReport:
    """Predict every row.

    Args:
        predict_step: returns the seconds of a step, or ``OutOfMemory``. None: tables of steps are skipped.
        chosen: tables. None: all tables in ``published/``.

    Raises:
        ConfigError: a row names an unknown constant, machine or model.
    """
    rows: list[CheckedRow] = []
    rankings: list[Ranking] = []
    constants: list[Constant] = []
    for table in tables() if chosen is None else chosen:
        if predict_step is None and any(isinstance(row.what, StepCase) for row in table.rows):
            continue
        checked = _checked(table, predict_step)
        rows += checked
        rankings += _rankings(checked, table.lower_is_better)
        for row in table.rows:
            if row.fits is not None:
                if row.fits not in CONSTANTS:
                    raise ConfigError(
                        f"table {table.name}: unknown constant {row.fits!r}; known: {', '.join(CONSTANTS)}"
                    )
                constants.append(Constant(row.fits, CONSTANTS[row.fits], table.name, row.system, row.case))
    return ValidationReport(tuple(rows), tuple(rankings), tuple(constants))


def predict_operator(case: OperatorCase, machine: str) -> float:
    """Return the predicted seconds of an operator on one host of a named machine."""
    cluster = cluster_named(machine, case.ranks)
    span = cluster.span(range(case.ranks))
    size = item_bytes(case.dtype)
    if "experts" in case.pattern:
        return _experts(case, cluster, size)
    product = Gemm(case.m, case.n, case.k, case.dtype)
    alone = product.seconds(cluster.accelerator)
    if case.pattern == "product":
        return alone
    if "gather" in case.pattern:
        moved = cluster.all_gather(case.m * case.k * size, span).seconds
    else:
        moved = cluster.reduce_scatter(case.m * case.n * size, span).seconds
    if "product" not in case.pattern:
        return moved
    if case.transport in ("none", "serial"):
        return alone + moved
    build = operators.gather_gemm if case.pattern == "gather product" else operators.gemm_scatter
    return build(cluster, span, product, _transport(case)).seconds


def _experts(case: OperatorCase, cluster: Cluster, size: int) -> float:
    """Return the seconds of one half of an MoE layer: all-gather and expert GEMM, or expert GEMM and reduce-scatter."""
    span, gpu = cluster.span(range(case.ranks)), cluster.accelerator
    local = case.experts // case.ep
    each = case.m * case.top_k / case.experts * case.imbalance
    product = Gemm(each, case.n, case.k, case.dtype, local, gathered=True)
    is_dispatch = case.pattern == "gather experts"
    num_bytes = case.m * (case.k if is_dispatch else case.n) * size
    if case.transport in ("none", "serial"):
        # One kernel per expert with a pass over its result. Rows are permuted before the GEMMs or summed after them.
        per_expert_s = gpu.gemm_seconds(each, case.n, case.k, case.dtype) + gpu.launch_s
        per_expert_s += gpu.memory_seconds(2 * each * case.n * size)
        ordered = case.m * case.top_k * (case.k if is_dispatch else case.n) * size
        collective = cluster.all_gather if is_dispatch else cluster.reduce_scatter
        transfer_s = collective(num_bytes, span).seconds
        return local * per_expert_s + 2 * gpu.launch_s + gpu.memory_seconds(4 * ordered) + transfer_s
    if is_dispatch:
        return operators.dispatch_gemm(cluster, span, product, num_bytes, "gather", _transport(case)).seconds
    return operators.gemm_combine(cluster, span, product, num_bytes, "scatter", _transport(case)).seconds


def _transport(case: OperatorCase) -> Transport:
    return operators.TRANSPORTS[case.transport]


def _checked(table: Table, predict_step: PredictStep | None) -> list[CheckedRow]:
    seconds: dict[StepCase, float | OutOfMemory] = {}

    def step(case: StepCase) -> float | None:
        if predict_step is None:
            raise ConfigError(f"table {table.name} has training steps; pass predict_step")
        if case not in seconds:
            seconds[case] = predict_step(case)
        prediction = seconds[case]
        return None if isinstance(prediction, OutOfMemory) else prediction

    def predicted(row: Row) -> float | None:
        case = row.what
        if isinstance(case, OperatorCase):
            step_s: float | None = predict_operator(case, table.machine)
        else:
            step_s = step(case)
        if step_s is None:
            return None
        if table.unit == "ms":
            return 1e3 * step_s
        if table.unit == "s":
            return step_s
        if not isinstance(case, StepCase):
            raise ConfigError(f"table {table.name}: the unit {table.unit} is not valid for operators")
        if table.unit == "mfu %":
            return 100 * mfu(case, step_s)
        if table.unit == "tokens/s":
            return tokens_per_s(case, step_s)
        if table.unit == "tflops":
            return tokens_per_s(case, step_s) * model_named(case.model).model_flops(case.seq_len, causal=False) / 1e12
        first = table.rows[0].what
        base = step(first) if isinstance(first, StepCase) else None
        return None if base is None else base / step_s

    return [
        CheckedRow(
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
    """Return the model FLOPs utilization of a step of ``seconds``."""
    accelerator = cluster_named(case.machine).accelerator
    flops = model_named(case.model).model_flops(case.seq_len) * case.seq_len * case.global_batch
    return flops / (seconds * case.gpus * accelerator.peak(case.dtype))


def tokens_per_s(case: StepCase, seconds: float) -> float:
    """Return the tokens/s per accelerator of a step of ``seconds``."""
    return case.seq_len * case.global_batch / (seconds * case.gpus)


def _rankings(rows: Sequence[CheckedRow], lower_is_better: bool) -> list[Ranking]:
    """Rank systems within each case, and cases within each workload of a system, without excluded rows."""
    groups: dict[tuple[str, str], list[tuple[str, CheckedRow]]] = {}
    for row in rows:
        if row.excluded is None:
            groups.setdefault(("systems", row.case), []).append((row.system, row))
            if row.workload != row.case:
                groups.setdefault(("mappings", f"{row.system}, {row.workload}"), []).append((row.case, row))

    def order(members: list[tuple[str, CheckedRow]], which: str) -> tuple[str, ...]:
        def key(member: tuple[str, CheckedRow]) -> float:
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
