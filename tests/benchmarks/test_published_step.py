"""Predictions are close to published step times, and published out-of-memory cases are predicted."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from benchmarks.plan_validation.published import StepCase, tables
from benchmarks.plan_validation.published_step import choice, predict_step
from benchmarks.plan_validation.validate import CONSTANTS, OutOfMemory, ValidationReport, validate
from moe_comm.errors import ConfigError

FIRST_TABLES = (
    "flux-dense",
    "flux-moe-h800",
    "flux-moe-l20",
    "folding",
    "megascale",
    "megascale-ablation",
    "parallelkittens",
)
"""Tables that were used to build the cost model. Constants are fitted only to rows of these tables."""
MIXTRAL = StepCase("mixtral-8x7b", 32, 4096, 128, "tp=2,ep=8", "h100", capacity=1.0)


@pytest.fixture(scope="module")
def report() -> ValidationReport:
    return validate(predict_step)


def test_every_row_of_every_table_is_predicted(report: ValidationReport) -> None:
    assert len(report.rows) == sum(len(table.rows) for table in tables())
    assert {one.name for one in report.constants} == set(CONSTANTS)
    assert "folding" in report.text()


def test_exactly_the_published_out_of_memory_rows_are_predicted(report: ValidationReport) -> None:
    for row in report.rows:
        assert (row.published is None) == (row.predicted is None), row


def test_every_fitted_step_reproduces_its_row(report: ValidationReport) -> None:
    fitted = [row for row in report.rows if row.fitted]
    assert len(fitted) == len(CONSTANTS)
    assert max(abs(row.error) for row in fitted) < 0.01


@pytest.mark.parametrize(
    ("table", "median", "limit", "max_outliers"),
    [
        ("folding", 0.085, 0.2, 1),
        ("megascale", 0.12, 0.2, 0),
        ("megascale-ablation", 0.21, 0.22, 0),
        ("nemo-dense", 0.06, 0.2, 0),
        ("nemo-grok", 0.13, 0.2, 0),
        ("bridge-h100", 0.18, 0.65, 0),
        ("automodel", 0.05, 0.15, 0),
        ("torchtitan-a100", 0.05, 0.15, 0),
        ("llm-foundry-a100", 0.06, 0.15, 0),
        ("llm-foundry-h100", 0.15, 0.35, 0),
        ("megatron-weak", 0.2, 0.35, 0),
    ],
)
def test_predicted_steps_are_close_to_published_ones(
    report: ValidationReport, table: str, median: float, limit: float, max_outliers: int
) -> None:
    errors = sorted(report.errors(table))
    assert report.median(table) <= median
    assert sum(error > limit for error in errors) <= max_outliers, errors


def test_the_median_error_of_the_first_tables_is_below_eight_percent(
    report: ValidationReport,
) -> None:
    errors = [error for table in FIRST_TABLES for error in report.errors(table)]
    assert len(errors) == 48 and statistics.median(errors) <= 0.08


def test_constants_are_fitted_to_the_first_tables_only() -> None:
    assert {table.name for table in tables() if any(row.fits for row in table.rows)} <= set(FIRST_TABLES)


def test_folding_has_the_highest_predicted_mfu_and_more_overlap_is_faster(report: ValidationReport) -> None:
    by_system: dict[str, dict[str, float]] = {}
    for row in report.rows:
        if row.table in ("folding", "megascale-ablation") and row.predicted is not None:
            by_system.setdefault(row.system, {})[row.case] = row.predicted
    for case, mfu in by_system["Folding"].items():
        assert all(mfu > mfus.get(case, 0.0) for name, mfus in by_system.items() if name != "Folding")
    ablation = [by_system[name]["240 GPUs"] for name in by_system if "SP+EP" in name]
    assert ablation == sorted(ablation) and len(set(ablation)) == 3


def test_unknown_settings_are_the_fastest_that_fit() -> None:
    pinned = choice(MIXTRAL)
    free = choice(replace(MIXTRAL, mapping="", free=("tp", "ep")))
    assert not isinstance(pinned, OutOfMemory) and not isinstance(free, OutOfMemory)
    assert free[1] <= pinned[1]
    assert predict_step(MIXTRAL) == pinned[1]
    assert pinned[0].parallel.tp == 2 and pinned[0].parallel.ep == 8


def test_stated_settings_are_used_even_if_they_do_not_fit() -> None:
    case = replace(MIXTRAL, mapping="pp=4,vpp=2,ep=8", global_batch=240, micro_batch=3, recompute="none")
    pinned = choice(case)
    assert not isinstance(pinned, OutOfMemory)
    assert (pinned[0].virtual, pinned[0].micro_batch, pinned[0].recompute) == (2, 3, "none")
    one_gpu = replace(case, gpus=1, mapping="", global_batch=3)
    assert not isinstance(choice(one_gpu), OutOfMemory)
    assert isinstance(choice(replace(one_gpu, recompute=None)), OutOfMemory)


def test_the_dispatcher_auto_is_the_fastest_dispatcher() -> None:
    case = StepCase("qwen3-30b-a3b", 32, 4096, 128, "pp=2,ep=16", "h100", capacity=1.0)
    choices = {name: choice(replace(case, dispatcher=name)) for name in ("all_to_all", "hierarchical", "auto")}
    dispatchers = {name: best[0].dispatcher for name, best in choices.items() if not isinstance(best, OutOfMemory)}
    assert dispatchers == {"all_to_all": "all_to_all", "hierarchical": "hierarchical", "auto": "hierarchical"}
    assert predict_step(replace(case, dispatcher="auto")) < predict_step(case)  # type: ignore[operator]


def test_missing_memory_is_reported() -> None:
    predicted = predict_step(replace(MIXTRAL, gpus=4, mapping="", global_batch=4))
    assert isinstance(predicted, OutOfMemory) and predicted.missing_bytes > 0


def test_invalid_mappings_are_errors() -> None:
    with pytest.raises(ConfigError, match="no mapping"):
        predict_step(replace(MIXTRAL, mapping="tp=64"))
