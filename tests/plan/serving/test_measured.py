"""Costs of steps that were measured: the fit, and predictions from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_comm import cli
from moe_comm.errors import ConfigError
from moe_comm.runtime.untrusted import parse_object
from moe_plan.serving.cost import ServeMapping
from moe_plan.serving.measured import MeasuredCosts, MeasuredStep
from moe_plan.serving.replay import replay
from moe_plan.serving.trace import SyntheticTrace

ATTENTION, EXPERTS, TRANSFER = (8e-3, 6e-5, 4e-6, 5e-8), (2e-3, 3e-5, 7e-3), (1e-4, 1e-5)
COSTS = MeasuredCosts(ATTENTION, EXPERTS, TRANSFER, 4, 16, 2, 4096)
ONE = ServeMapping(1, 1, 1, 1)


def measured_step(tokens: int, kv_tokens: int) -> MeasuredStep:
    times = COSTS.step(ONE, tokens, kv_tokens)
    layers = (4 * times.attention_s, 4 * times.experts_s, 8 * times.transfer_s)
    return MeasuredStep(tokens, kv_tokens, *layers)


STEPS = [measured_step(tokens, 40 * tokens + 7 * (tokens % 5)) for tokens in (1, 2, 3, 5, 8, 13, 40, 90, 200, 500)]


def test_a_fit_finds_the_costs_of_steps_without_noise() -> None:
    found = MeasuredCosts.fit(STEPS, 4, 16, 2, 4096)
    for one in ("attention", "experts", "transfer"):
        assert getattr(found, one) == pytest.approx(getattr(COSTS, one), rel=1e-6)
    assert MeasuredCosts.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_a_fit_of_steps_that_vary_is_their_mean() -> None:
    times = [
        (share * one.attention_s, share * one.experts_s, share * one.transfer_s)
        for share in (0.6, 1.4)
        for one in STEPS
    ]
    steps = [MeasuredStep(one.tokens, one.kv_tokens, *of) for one, of in zip(2 * STEPS, times, strict=True)]
    found = MeasuredCosts.fit(steps, 4, 16, 2, 4096)
    for one in STEPS:
        assert found.step(ONE, one.tokens, one.kv_tokens).step_s == pytest.approx(
            COSTS.step(ONE, one.tokens, one.kv_tokens).step_s, rel=0.01
        )


def test_a_step_is_the_sum_of_its_parts_with_one_micro_batch_only() -> None:
    times, two = COSTS.step(ONE, 8, 400), COSTS.step(ServeMapping(1, 1, 1, 2), 8, 400)
    attention_s = 8e-3 + 8 * 6e-5 + 400 * 4e-6 + 8 * 400 * 5e-8
    experts_s = 2e-3 + 8 * 3e-5 + 7e-3 * (1 - (14 / 16) ** 8)
    assert times.step_s == pytest.approx(attention_s + experts_s + 1e-4 + 8e-5)
    assert times.step_s < two.step_s < 2 * times.step_s
    # Two attention nodes send twice the rows.
    assert COSTS.step(ServeMapping(1, 1, 2, 1), 8, 400).experts_s == COSTS.step(ONE, 16, 0).experts_s


def test_coefficients_are_not_negative() -> None:
    steps = [MeasuredStep(tokens, 0, 1 - tokens / 1000, 1.0, 1.0) for tokens in range(1, 20)]
    found = MeasuredCosts.fit(steps, 1, 4, 2, 100)
    assert min(*found.attention, *found.experts, *found.transfer) >= 0
    assert found.attention[0] == pytest.approx(0.99, abs=0.01)


def test_few_steps_and_other_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 8 steps; got 3"):
        MeasuredCosts.fit(STEPS[:3], 4, 16, 2, 4096)
    for wrong in ({"attention": [1.0]}, {"layers": 0}, {"experts": [-1.0, 0, 0]}, {"transfer": None}, {"chosen": 17}):
        with pytest.raises(ConfigError, match="no measured costs"):
            MeasuredCosts.from_dict(COSTS.to_dict() | wrong)


def test_the_command_predicts_a_trace_from_a_result_of_bench_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out, text = tmp_path / "serve.json", tmp_path / "plan.json", "poisson:rate=5,count=20,prompt=20,output=9"
    file.write_text(json.dumps({"plan": {"costs": COSTS.to_dict()}, "settings": {"batch_tokens": 512}}))
    assert cli.run(["plan", "--serve", text, "--measured", str(file), "--ttft", "0.02", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["predicted"]
    trace = SyntheticTrace.parse(text.removeprefix("poisson:")).requests()
    expected = replay(COSTS, ONE, trace, 512).summary()
    assert rows[0] == {"n_a": 1, "m": 1, "keeps_bounds": False} | expected and expected["ttft_p99_s"] > 0.02
    assert len(rows) == 16 and "missed" in capsys.readouterr().out
    infinite = '{"plan": {"costs": {}}, "settings": {"batch_tokens": 1e999}}'
    for wrong in ("{}", "[" * 100_000, infinite, infinite.replace("1e999", "Infinity")):
        file.write_text(wrong)
        assert cli.run(["plan", "--serve", text, "--measured", str(file)]) == 2
        assert "no result of bench serve" in capsys.readouterr().err
    one_token = tmp_path / "trace.jsonl"
    one_token.write_text(json.dumps({"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 1}))
    file.write_text(json.dumps({"plan": {"costs": COSTS.to_dict()}, "settings": {"batch_tokens": 512}}))
    assert cli.run(["plan", "--serve", str(one_token), "--measured", str(file), "--json", str(out)]) == 0
    assert parse_object(out.read_text())["predicted"][0]["tpot_p50_s"] is None
