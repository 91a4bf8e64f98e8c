"""JSON output of ``python -m benchmarks.plan_validation --json``; docs/reference/cli.md describes the keys."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from benchmarks.plan_validation.validate import ValidationReport


def validation(report: ValidationReport) -> dict[str, Any]:
    """Return rows, rankings, constants and summaries by table.

    ``error`` is predicted over published, minus 1. It is null if only one of the two is out of memory.
    """
    names = list(dict.fromkeys(row.table for row in report.rows))
    rows = [
        {
            "table": row.table,
            "system": row.system,
            "case": row.case,
            "unit": row.unit,
            "published": row.published,
            "predicted": row.predicted,
            "error": row.error if math.isfinite(row.error) else None,
            "counts": row.counts,
            "status": row.status,
        }
        for row in report.rows
    ]
    return {
        **_summary(report, None),
        "tables": {name: _summary(report, name) for name in names},
        "rows": rows,
        "rankings": [asdict(one) | {"right": one.right} for one in report.rankings],
        "constants": [asdict(one) for one in report.constants],
    }


def _summary(report: ValidationReport, table: str | None) -> dict[str, Any]:
    rankings = [one for one in report.rankings if table in (None, one.table)]
    errors = {"median_error": report.median(table), "worst_error": report.worst(table)}
    return {
        **{name: value if math.isfinite(value) else None for name, value in errors.items()},
        "rows_that_count": len(report.errors(table)),
        "rankings_right": sum(one.right for one in rankings),
        "rankings_of": len(rankings),
    }
