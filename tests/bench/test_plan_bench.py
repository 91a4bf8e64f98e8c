"""``bench plan``: measured steps, and the arithmetic of errors and regrets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_comm.bench.plan import benchmark as plan_bench
from moe_comm.bench.plan.benchmark import MeasuredStep, main, measure, predict
from moe_comm.bench.plan.settings import CASES, PlanBench, PlanCase
from moe_comm.errors import ConfigError
from moe_plan.machine.collectives import Link
from moe_plan.machine.hardware import Accelerator, Cluster, GemmTile

TINY = PlanBench(
    hidden=32,
    layers=2,
    heads=2,
    kv_heads=2,
    experts=4,
    top_k=2,
    ffn=32,
    vocab=300,
    seq_len=16,
    batch=4,
    warmup=1,
    steps=2,
    cases=(PlanCase(2, "dp=2,ep=2", 2), PlanCase(2, "pp=2,ep=1", 1)),
)
CORE = Accelerator("core", {"fp32": 60e9}, {"fp32": 1.0}, 4 << 30, 20e9, 1, (GemmTile(8, 8),))
MEMORY = Link("memory", 2e9, 1e-5, 1.0)


def cluster(ranks: int) -> Cluster:
    return Cluster(CORE, ranks, ranks, MEMORY, MEMORY)


def test_interleaved_mappings_train_the_same_model(tmp_path: Path) -> None:
    folded, piped = measure(TINY, TINY.cases, tmp_path)
    assert len(folded.losses) == len(piped.losses) == TINY.warmup + TINY.steps
    assert folded.losses == pytest.approx(piped.losses, rel=1e-3)  # auxiliary losses are over a micro-batch
    assert [sum(layer) for layer in folded.loads] == [TINY.tokens * TINY.top_k] * TINY.layers
    for one in (folded, piped):
        assert 0 < one.fastest <= one.seconds and one.processor > 0 and one.communication >= 0


def test_imbalance_affects_a_prediction_only_with_expert_parallelism() -> None:
    even, uneven = [[256] * 8] * 4, [[1024, 1024, 0, 0, 0, 0, 0, 0]] * 4
    replicated, expert_parallel = PlanCase(2, "dp=2,ep=1"), PlanCase(2, "dp=2,ep=2")
    bench = PlanBench()
    assert (
        predict(bench, replicated, cluster(2), uneven).seconds == predict(bench, replicated, cluster(2), even).seconds
    )
    assert (
        predict(bench, expert_parallel, cluster(2), uneven).seconds
        > 1.2 * predict(bench, expert_parallel, cluster(2), even).seconds
    )


def test_every_mapping_is_valid_for_the_model_and_batch() -> None:
    bench = PlanBench()
    for case in CASES:
        assert predict(bench, case, replace(cluster(case.ranks), host_size=case.ranks // case.hosts), []).seconds > 0
        assert f"parallel.pp={case.parsed().parallel.pp}" in bench.overrides(case)
    assert {case.ranks for case in CASES} == {2, 4, 8} and any(case.hosts > 1 for case in CASES)


def test_errors_and_regret_follow_from_the_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {"dp2 ep2 mb2": 0.5, "pp2 mb1": 0.4}
    predicted = {"dp2 ep2 mb2": 0.3, "pp2 mb1": 0.5}

    def steps(bench: PlanBench, cases: Any, folder: Path) -> list[MeasuredStep]:
        return [MeasuredStep(measured[str(case)], 0.1, (1.0,), ((1, 1, 1, 1),), 0.0, 0.1) for case in cases]

    def predict_fixed_times(bench: PlanBench, case: PlanCase, where: Cluster, slots: Any) -> Any:
        return replace(predict(bench, case, where, slots), seconds=predicted[str(case)])

    monkeypatch.setattr(plan_bench, "measure", steps)
    monkeypatch.setattr(plan_bench, "calibrate", lambda ranks, **options: cluster(ranks))
    monkeypatch.setattr(plan_bench, "predict", predict_fixed_times)
    main(TINY, str(tmp_path / "plan.json"))
    result = json.loads((tmp_path / "plan.json").read_text())
    (group,) = result["groups"]
    assert [row["mapping"] for row in group["mappings"]] == ["pp2 mb1", "dp2 ep2 mb2"]
    assert [row["error"] for row in group["mappings"]] == pytest.approx([0.25, -0.4])
    assert (group["best"], group["pick"]) == ("pp2 mb1", "dp2 ep2 mb2")
    assert group["regret"] == pytest.approx(0.25) == result["worst_regret"]
    assert result["median_error"] == pytest.approx(0.325) and result["worst_error"] == pytest.approx(0.4)
    assert (result["within"], result["mappings"]) == (0, 2)
    output = capsys.readouterr().out
    assert "selects dp2 ep2 mb2: its step is 25.0% longer than the fastest" in output and "+25.0%" in output


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PlanCase(3, "dp=3,ep=3", hosts=2), "must be a multiple of hosts"),
        (lambda: PlanBench(cases=(PlanCase(2, "tp=4"),)), "4"),
        (lambda: PlanBench(steps=0), "steps must be at least 1"),
        (lambda: PlanBench(cases=()), "must not be empty"),
    ],
)
def test_impossible_settings_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
