"""Predictions against published tables: how rows are counted, compared and ranked; and the errors of operators."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.plan_validation import __main__ as command, published, validate as validate_module
from benchmarks.plan_validation.published import OperatorCase, Row, StepCase, Table, tables
from benchmarks.plan_validation.validate import (
    CONSTANTS,
    OutOfMemory,
    ValidationReport,
    mfu,
    predict_operator,
    validate,
)
from moe_comm import cli
from moe_comm.errors import ConfigError
from moe_plan.machine.hardware_table import cluster_named
from moe_plan.model.files import model_named

STEP = StepCase("mixtral-8x7b", 8, 4096, 8, "ep=8", "h100")


def step(seconds: float) -> StepCase:
    """Return a case for which ``stored_prediction`` predicts ``seconds``."""
    return replace(STEP, capacity=seconds)


def stored_prediction(case: StepCase) -> float | OutOfMemory:
    assert case.capacity is not None
    return case.capacity if case.capacity < 100 else OutOfMemory(1e9)


def row(
    system: str,
    case: str,
    value: float | None,
    predicted: float,
    workload: str | None = None,
    fits: str | None = None,
    excluded: str | None = None,
) -> Row:
    return Row(system, case, value, step(predicted), workload or case, fits, excluded)


def checked(*rows: Row, unit: str = "s") -> ValidationReport:
    return validate(stored_prediction, [Table("t", "source", "h100", unit, ("note",), rows)])


def validate_table(name: str) -> ValidationReport:
    return validate(None, [table for table in tables() if table.name == name])


def test_fitted_and_excluded_rows_are_shown_but_do_not_count() -> None:
    report = checked(
        row("a", "one", 10.0, 11.0),
        row("a", "two", 10.0, 13.0),
        row("a", "three", 10.0, 99.0, fits="fused.GROUPED"),
        row("a", "four", 10.0, 50.0, excluded="contradicts itself"),
    )
    assert report.errors() == pytest.approx([0.1, 0.3])
    assert report.median() == pytest.approx(0.2)
    assert report.worst() == pytest.approx(0.3)
    text = report.text()
    assert "contradicts itself" in text
    assert "+890.0%" in text
    assert f"fitted: fused.GROUPED = {CONSTANTS['fused.GROUPED']:g}, on t: a, three" in text


def test_out_of_memory_is_correct_only_if_published() -> None:
    right = checked(row("a", "one", None, 1000.0), row("a", "two", 10.0, 10.0))
    assert right.errors() == [0.0]
    assert "OOM" in right.text()
    for wrong in (row("a", "one", None, 5.0), row("a", "one", 5.0, 1000.0)):
        assert checked(wrong).worst() == math.inf
        assert "wrong" in checked(wrong).text()


def test_systems_are_ranked_within_a_case_and_mappings_within_a_workload() -> None:
    report = checked(
        row("a", "one", 1.0, 1.5, "w"),
        row("b", "one", 2.0, 2.5, "w"),
        row("a", "two", 3.0, 1.0, "w"),
        row("b", "two", None, 1000.0, "w"),
    )
    result = {(ranking.kind, ranking.within): ranking.right for ranking in report.rankings}
    assert result == {
        ("systems", "one"): True,
        ("systems", "two"): True,
        ("mappings", "a, w"): False,
        ("mappings", "b, w"): True,
    }
    assert "wrong ranking of mappings: t, a, w: published one > two; predicted two > one" in report.text()


def test_rankings_start_with_the_highest_value_if_higher_is_better() -> None:
    rows = [row("a", "one", 1.0, 4.0), row("b", "one", 2.0, 2.0), row("c", "one", 4.0, 1.0)]
    report = checked(*rows, unit="times the first")
    assert [item.predicted for item in report.rows] == [1.0, 2.0, 4.0]
    assert report.rankings[0].published == ("c", "b", "a")
    assert report.rankings[0].right


def test_mfu_is_model_flops_over_the_peak() -> None:
    flops = model_named("mixtral-8x7b").model_flops(4096) * 4096 * 8
    assert mfu(STEP, 2.0) == pytest.approx(flops / (2.0 * 8 * 989.4e12))
    report = checked(row("a", "one", 40.0, 2.0), unit="mfu %")
    assert report.rows[0].predicted == pytest.approx(100 * mfu(STEP, 2.0))


def test_rates_are_per_accelerator_and_tflops_count_full_attention() -> None:
    """In 2 s, each of 8 GPUs processes a sequence of 4096, with Megatron's FLOPs formula before March 2025."""
    tokens = checked(row("a", "one", 1.0, 2.0), unit="tokens/s")
    assert tokens.rows[0].predicted == pytest.approx(4096 / 2)
    table = Table("t", "source", "h100", "tflops", ("note",), (row("a", "one", 1.0, 2.0),))
    layers, hidden, vocab, seq = 96, 12288, 51200, 2048
    gpt = replace(table.rows[0], what=replace(step(2.0), model="gpt3-175b", seq_len=seq))
    per_token = 72 * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))
    report = validate(stored_prediction, [replace(table, rows=(gpt,))])
    assert report.rows[0].predicted == pytest.approx(per_token * seq / 2 / 1e12, rel=1e-3)


def test_step_tables_need_predict_step_and_each_case_is_predicted_once() -> None:
    without = {item.table for item in validate().rows}
    assert without == {"flux-dense", "flux-moe-h800", "flux-moe-l20", "parallelkittens"}
    cases: list[StepCase] = []

    def count(case: StepCase) -> float:
        cases.append(case)
        return 10.0

    steps = [table for table in tables() if table.name == "megascale-ablation"]
    report = validate(count, steps)
    assert len(cases) == len(set(cases)) == 4
    assert [item.predicted for item in report.rows] == [1.0] * 4


def test_unknown_constants_are_rejected() -> None:
    with pytest.raises(ConfigError, match="unknown constant 'luck'"):
        checked(row("a", "one", 1.0, 1.0, fits="luck"))


def test_mfu_of_an_operator_is_rejected() -> None:
    table = next(table for table in tables() if table.name == "flux-dense")
    with pytest.raises(ConfigError, match="not valid for operators"):
        validate(None, [replace(table, unit="mfu %")])


def test_errors_without_evaluated_rows_are_nan() -> None:
    assert math.isnan(checked(row("a", "one", 1.0, 1.0, excluded="why")).median())


def test_every_fitted_operator_reproduces_its_row() -> None:
    report = validate()
    fitted = [item for item in report.rows if item.fitted]
    assert {one.name for one in report.constants} < set(CONSTANTS)
    assert len(fitted) == len(report.constants) == 5
    assert max(abs(item.error) for item in fitted) < 0.01


@pytest.mark.parametrize(("table", "median", "worst"), [("flux-dense", 0.08, 0.2), ("parallelkittens", 0.08, 0.22)])
def test_predicted_operators_are_close_to_published_ones(table: str, median: float, worst: float) -> None:
    report = validate_table(table)
    assert report.median() <= median
    assert report.worst() <= worst
    assert all(ranking.right for ranking in report.rankings)


def test_gemms_fused_with_a_scatter_are_within_ten_percent() -> None:
    rows = [item for item in validate_table("parallelkittens").rows if item.system == "GEMM+RS"]
    assert len(rows) == 5
    assert max(abs(item.error) for item in rows) < 0.1


def test_serial_is_the_sum_of_its_parts() -> None:
    whole = OperatorCase("gather product", "serial", 4096, 6144, 12288, 8)
    parts = (replace(whole, pattern="product"), replace(whole, pattern="gather"))
    assert predict_operator(whole, "l20") == pytest.approx(sum(predict_operator(part, "l20") for part in parts))


def test_a_named_machine_can_be_predicted() -> None:
    case = OperatorCase("product scatter", "adds", 32768, 32768, 1024, 8)
    assert predict_operator(case, "h800") > predict_operator(case, "h100") > 0
    assert (
        predict_operator(replace(case, transport="serial"), "h100")
        > cluster_named("h100").reduce_scatter(2 * 32768**2, range(8)).seconds
    )


def test_busier_experts_take_longer() -> None:
    even = OperatorCase("gather experts", "copies", 8192, 2048, 8192, 8, experts=32, top_k=4, ep=2)
    assert predict_operator(replace(even, imbalance=1.5), "h800") > predict_operator(even, "h800")


def test_the_command_prints_rows_and_a_summary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = tuple(table for table in published.tables() if table.name in ("parallelkittens", "flux-dense"))
    monkeypatch.setattr(validate_module, "tables", lambda: chosen)
    out = tmp_path / "validate.json"
    assert cli.run(["--json", str(out)], command.app, command.NAME) == 0
    output = capsys.readouterr().out
    assert all(word in output for word in ("published", "predicted", "error", "median error", "parallelkittens"))
    result = json.loads(out.read_text())
    assert len(result["rows"]) == sum(len(table.rows) for table in chosen) and result["tables"].keys() == {
        table.name for table in chosen
    }
    counted = sorted(abs(row["error"]) for row in result["rows"] if row["counts"])
    assert result["worst_error"] == counted[-1] and result["rows_that_count"] == len(counted)
