"""Traces, and their replay on a planned instance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_comm import cli
from moe_comm.errors import ConfigError
from moe_plan.machine.hardware_table import cluster_named
from moe_plan.model.named_models import MODELS
from moe_plan.serving.cost import ServeMapping, ServeModel
from moe_plan.serving.replay import instances, replay
from moe_plan.serving.trace import SyntheticTrace, TraceRequest, quantile, read_trace, trace_lines

MODEL = ServeModel(MODELS["mixtral-8x22b"], cluster_named("h20"), cluster_named("l40s"))
MAPPING = ServeMapping(4, 1, 1, 2)


def step_s(tokens: int, kv_tokens: float, mapping: ServeMapping = MAPPING) -> float:
    return MODEL.step(mapping, tokens, kv_tokens).step_s


def test_a_request_alone_takes_its_prompt_and_its_steps() -> None:
    served = replay(MODEL, MAPPING, [TraceRequest(5.0, 100, 3)])
    steps = [step_s(100, 100), step_s(1, 101), step_s(1, 102)]
    assert served.ttft_s == (pytest.approx(steps[0]),)
    assert served.tpot_s == (pytest.approx((steps[1] + steps[2]) / 2),)
    assert served.seconds == pytest.approx(5.0 + sum(steps))


def test_a_request_that_arrives_during_a_step_waits_for_its_end() -> None:
    first, second = TraceRequest(0.0, 4000, 2), TraceRequest(0.001, 10, 1)
    served = replay(MODEL, MAPPING, [first, second])
    start = step_s(4000, 4000)
    # both are in one iteration, each in a micro-batch of its own; half of the 11 tokens, rounded up
    assert served.ttft_s[1] == pytest.approx(start - 0.001 + step_s(6, (4001 + 10) / 2))


def test_requests_beyond_the_cache_wait_and_are_preempted() -> None:
    mapping = ServeMapping(1, 1, 1, 2)
    room = MODEL.kv_tokens(mapping.tp_a)
    size = room // 4
    served = replay(MODEL, mapping, [TraceRequest(0.0, size, size // 100) for _ in range(5)], most_tokens=room)
    assert served.preempted >= 1
    assert len(served.ttft_s) == 5 and max(served.ttft_s) > 2 * min(served.ttft_s)
    with pytest.raises(ConfigError, match="KV cache of a node"):
        replay(MODEL, mapping, [TraceRequest(0.0, room, 1)])


def test_more_instances_keep_bounds_that_one_does_not() -> None:
    trace = SyntheticTrace(rate=200, count=300, prompt=400, output=40).requests()
    alone = replay(MODEL, MAPPING, trace).summary()
    bound = alone["ttft_p99_s"] / 2
    count, served = instances(MODEL, MAPPING, trace, bound, 1.0)
    assert count > 1 and served.summary()["ttft_p99_s"] <= bound
    assert replay(MODEL, MAPPING, trace[:: count - 1]).summary()["ttft_p99_s"] > bound
    with pytest.raises(ConfigError, match="no number of instances"):
        instances(MODEL, MAPPING, trace, 1e-6, 1.0)


def test_every_request_counts_for_the_number_of_instances() -> None:
    trace = [TraceRequest(0.0, 10, 2), TraceRequest(100.0, 4000, 2), TraceRequest(200.0, 10, 2)]
    with pytest.raises(ConfigError, match="no number of instances"):  # the second request alone takes longer
        instances(MODEL, MAPPING, trace, step_s(4000, 4000) / 2, 1.0)
    trace = SyntheticTrace(rate=200, count=60, prompt=400, output=40).requests()
    bound = replay(MODEL, MAPPING, trace).summary()["ttft_p99_s"] / 2
    count, slowest = instances(MODEL, MAPPING, trace, bound, 1.0)
    each = [replay(MODEL, MAPPING, trace[first::count]).summary()["ttft_p99_s"] for first in range(count)]
    assert count > 1 and max(each) == slowest.summary()["ttft_p99_s"] <= bound


def test_synthetic_traces_have_their_rate_and_long_tails() -> None:
    trace = SyntheticTrace(rate=10, count=2000, prompt=500, output=100, seed=3).requests()
    assert trace == SyntheticTrace(rate=10, count=2000, prompt=500, output=100, seed=3).requests()
    assert trace[-1].arrival_s == pytest.approx(200, rel=0.1)
    lengths = sorted(one.prompt_tokens for one in trace)
    assert lengths[1000] == pytest.approx(500, rel=0.1) and lengths[-20] > 4 * lengths[1000]


def test_traces_are_read_as_they_are_written(tmp_path: Path) -> None:
    trace = SyntheticTrace.parse("rate=4,count=20,seed=1").requests()
    file = tmp_path / "trace.jsonl"
    file.write_text(trace_lines(trace))
    assert read_trace(str(file)) == trace == read_trace("poisson:rate=4,count=20,seed=1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no requests"),
        ("{}", "line 1: not a request"),
        ("[1]", "line 1: not a request"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens"),
        ('{"arrival_s": NaN, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s"),
        ('{"arrival_s": 0, "prompt_tokens": 1e9, "output_tokens": 1}', "line 1"),
    ],
)
def test_invalid_traces_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(str(file))


@pytest.mark.parametrize("text", ["", "rate=1", "rate=x,count=1", "rate=1,count=1,size=2", "rate=0,count=1", "rate"])
def test_invalid_synthetic_traces_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_trace(f"poisson:{text}")


def test_quantiles_are_values_of_the_sample() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile(values, 1.0)) == (50, 99, 100)


COMMAND = ("plan", "--model", "dbrx", "--hardware", "h20", "--expert-hardware", "l40s")


def test_the_command_prints_and_writes_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    trace = "poisson:rate=20,count=100,prompt=200,output=20"
    assert cli.run([*COMMAND, "--serve", trace, "--ttft", "2", "--top", "2", "--json", str(out)]) == 0
    result, text = json.loads(out.read_text()), capsys.readouterr().out
    assert [plan["m"] in (1, 2, 3, 4) for plan in result["plans"]] == [True, True]
    assert result["plans"][0]["tokens_per_s_per_price"] >= result["plans"][1]["tokens_per_s_per_price"]
    assert result["latency"]["ttft_p99_s"] <= 2 and result["latency"]["tpot_p99_s"] <= 0.15
    assert f"needs {result['instances']} instance(s)" in text and "all on h20" in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--serve", "poisson:rate=1,count=1", "--gpus", "8"], "--serve cannot be combined with --gpus"),
        (["--serve", "poisson:rate=1,count=1", "--price", "h20=0"], "--price must be NAME=X"),
        (["--serve", "poisson:rate=1"], "expected poisson:"),
        (["--serve", "no/such.jsonl"], "no/such.jsonl"),
        ([], "--expert-hardware, --price and --measured apply to --serve"),
        *(
            (["--serve", "poisson:rate=1,count=1", *option], "--serve cannot be combined with")
            for option in (
                ["--page", "page.html"],
                ["--config", "train.toml"],
                ["--trace", "step.json"],
                ["--slow", "0=2"],
                ["--loads", "run"],
                ["--placement", "relocate"],
                ["--coupled"],
                ["--overlap", "all"],
                ["--dispatcher", "all_gather"],
                ["--ranks", "4"],
            )
        ),
        (["--serve", "poisson:rate=1,count=1", "--measured", "no.json"], "--measured cannot be combined with --model"),
    ],
)
def test_invalid_requests_are_one_line(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*COMMAND, *more]) == 2
    assert message in capsys.readouterr().err
