"""``bench serve`` end to end with a tiny model, and what it computes from spans and tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from moe_comm import cli
from moe_comm.bench.common import ranks as bench_ranks
from moe_comm.bench.common.inputs import WrongAnswer
from moe_comm.bench.serve.benchmark import Contest
from moe_comm.bench.serve.contestants import mapped_model, model_folder, needed_bytes
from moe_comm.bench.serve.requests import Answer, complete_from, idle_share, latencies, since, union
from moe_comm.bench.serve.settings import CONTESTANTS, FOR_WEIGHTS, ServeBench
from moe_comm.errors import ConfigError
from moe_comm.runtime.event_layout import Kind, Span
from tests.pool import on_ranks

TINY = {"layers": 1, "hidden": 32, "ffn": 32, "experts": 4, "rounds": 1}
REQUESTS = [(0.0, 5, 3), (0.01, 90, 1), (0.05, 3, 16), (0.05, 4, 2)]


def trace(folder: Path) -> str:
    """Write a trace of a few requests, not in the order of arrival."""
    lines = [dict(zip(("arrival_s", "prompt_tokens", "output_tokens"), one, strict=True)) for one in REQUESTS]
    (folder / "trace.jsonl").write_text("".join(json.dumps(one) + "\n" for one in reversed(lines)))
    return str(folder / "trace.jsonl")


def test_contestants_serve_a_trace_with_the_same_tokens(tmp_path: Path) -> None:
    words = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    out = tmp_path / "out.json"
    assert cli.run(["bench", "serve", *words, "--trace", trace(tmp_path), "--json", str(out)]) == 0
    result: dict[str, Any] = json.loads(out.read_text())
    assert (result["requests"], result["prompt_tokens"], result["output_tokens"]) == (4, 102, 22)
    rows = result["contestants"]
    assert tuple(rows) == CONTESTANTS
    for name, row in rows.items():
        assert 0 < row["ttft_p50_s"] <= row["ttft_p99_s"] < 60 and 0 < row["tpot_p50_s"] <= row["tpot_p99_s"]
        assert row["seconds"] >= 0.05 and row["tokens_per_s"] == 2 * row["tokens_per_s_per_core"] > 0
        pools = {"disaggregated": {"attention", "experts"}, "colocated": {"attention"}}.get(name, set())
        assert set(row["idle"]) == pools and all(0 < share < 1 for share in row["idle"].values())
        # A prompt of 90 tokens with 2 of 4 experts each.
        assert name == "hugging_face" or 0 < row["rows_per_expert"] < 45 <= row["most_rows_per_expert"] <= 102
    plan, measured = result["plan"], rows["disaggregated"]
    assert plan["steps"] >= 12 and plan["costs"]["layers"] == 1 and plan["costs"]["cache_tokens"] == result["kv_tokens"]
    for name, value in plan["predicted"].items():
        assert value > 0 and plan["errors"][name] == pytest.approx(value / measured[name] - 1)
    whole = rows["hugging_face"]["weight_mib"][0]
    attention, experts = rows["disaggregated"]["weight_mib"]
    assert rows["micro_batches"]["weight_mib"] == rows["disaggregated"]["weight_mib"]
    assert rows["replicas"]["weight_mib"] == [whole] * 2 and attention + experts == pytest.approx(whole)
    assert rows["colocated"]["weight_mib"] == [pytest.approx(attention + experts / 2)] * 2


def limits_of_memory() -> set[str]:
    """Return the limits of the ranks that run now, in bytes."""
    root, version, _ = bench_ranks._controller("memory")  # private: no public name tells where cgroups are
    name, limits = ("memory.limit_in_bytes", "memory.max")[version - 1], set()
    for group in root.glob(f"{bench_ranks.CGROUP_PREFIX}*"):
        with suppress(OSError):  # of a rank that has ended
            limits.add((group / name).read_text().strip())
    return limits


def memory_unavailable_reason() -> str:
    """Return why memory cannot be limited here; empty if it can be."""
    try:
        with bench_ranks.memory_limit(1 << 20):
            return ""
    except ConfigError as error:
        return str(error)


REASON = memory_unavailable_reason()


@pytest.mark.skipif(bool(REASON), reason=REASON or "memory can be limited")
def test_ranks_with_limited_memory_serve_the_same_tokens_and_leave_their_cgroups(tmp_path: Path) -> None:
    words = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    words += ["--contestant", "colocated", "--contestant", "hugging_face", "--memory-mib", "512"]
    out, seen, ended = tmp_path / "out.json", set[str](), threading.Event()

    def look() -> None:
        while not ended.wait(0.01):
            seen.update(limits_of_memory())

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            assert cli.run(["bench", "serve", *words, "--trace", trace(tmp_path), "--json", str(out)]) == 0
        finally:
            ended.set()
        looking.result()
    assert str(512 << 20) in seen and not limits_of_memory()
    result = json.loads(out.read_text())
    assert result["skipped"] == {} and result["settings"]["memory_mib"] == 512
    assert set(result["contestants"]) == {"colocated", "hugging_face"}


WRONG = ServeBench(**TINY, trace="poisson:rate=1,count=2,prompt=4,output=3")


@pytest.fixture(scope="module")
def folder() -> Iterator[str]:
    with model_folder(WRONG, WRONG.requests()) as path:
        yield path


@on_ranks(2)
def test_contestants_that_do_not_fit_the_memory_are_skipped(folder: str, rank: int, tmp_path: Path) -> None:
    needed = {name: needed_bytes(name, WRONG, folder) / 2**20 for name in CONTESTANTS}
    assert needed["hugging_face"] == 0 < needed["colocated"] < needed["replicas"]
    # Between the two, with the share that weights may take.
    contest = Contest(replace(WRONG, memory_mib=0.5 * (needed["colocated"] + needed["replicas"]) / FOR_WEIGHTS), folder)
    together, runs = dist.new_group([0, 1]), list[str]()
    for name in CONTESTANTS:
        contest.build(name, together)
        runs += [one.name for one in contest.contestants]
        contest.contestants.clear()
    assert set(contest.skipped) == {name for name in CONTESTANTS if needed[name] > needed["colocated"]}
    assert "replicas" in contest.skipped and "more than 80% of its memory" in contest.skipped["replicas"]
    assert set(runs) == set(contest.weights) == set(CONTESTANTS) - set(contest.skipped)
    assert max(contest.weights["colocated"]) / 2**20 == pytest.approx(needed["colocated"])


@on_ranks(2)
def test_other_tokens_are_a_wrong_answer_unless_two_are_nearly_tied(folder: str) -> None:
    contest = Contest(WRONG, folder)
    contest.reference = "hugging_face"
    answers = [Answer(index, 0.0, (1, 2, 3), ()) for index in range(2)]
    contest.compare("first", answers)
    contest.compare("same", answers)
    assert contest.near_ties == 0
    with pytest.raises(WrongAnswer, match="other: 1 of 2 requests have other tokens than with hugging_face"):
        contest.compare("other", [answers[0], replace(answers[1], tokens=(1, 5, 3))])


def test_a_mapped_model_has_the_weights_of_the_file_and_the_same_logits(folder: str, tmp_path: Path) -> None:
    loaded, mapped = AutoModelForCausalLM.from_pretrained(folder), mapped_model(folder, tmp_path / "weights")
    ids = torch.arange(6).view(1, 6)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, mapped(ids).logits)
        with (tmp_path / "weights").open("r+b") as file:
            file.write(bytes((tmp_path / "weights").stat().st_size))
        assert not mapped(ids).logits.any()


def span(kind: Kind, begin_s: float, end_s: float) -> Span:
    times = int(begin_s * 1e9), int(end_s * 1e9)
    return Span(0, 0, kind, "", "", *times, (0, 0), 0, 0, (), 0, -1, 0, (), 0)


def test_idle_shares_are_of_the_time_with_requests() -> None:
    kinds = (Kind.COLLECTIVE, Kind.DISPATCH, Kind.COMBINE)
    spans = [span(kind, at, at + 1) for kind, at in zip(kinds, (0.0, 2.0, 5.0), strict=True)]
    busy = union([(0.5, 3.0), (2.0, 4.0), (8.0, 8.5)])
    assert busy == [(0.5, 4.0), (8.0, 8.5)]
    # Of 4 s: half a second of a vote, and a dispatch.
    assert idle_share(spans, busy, only_experts=False) == pytest.approx(1.5 / 4)
    # The experts compute from 3 to 5 s, of which one second has requests.
    assert idle_share(spans, busy, only_experts=True) == pytest.approx(3 / 4)
    # If the vote is no longer kept, the time before the dispatch does not count.
    assert complete_from(spans, 3, most=3) == 0.0 and complete_from(spans[1:], 3, most=2) == 2.0
    assert since(busy, 2.0) == [(2.0, 4.0), (8.0, 8.5)] and since(busy, 4.0) == busy[1:]
    assert idle_share(spans[1:], since(busy, 2.0), only_experts=False) == pytest.approx(1 / 2.5)


def test_latencies_count_the_wait_before_the_first_token() -> None:
    answers = [Answer(0, 1.0, (1, 2, 3), (1.5, 2.0, 3.5)), Answer(1, 1.0, (1,), (4.0,))]
    assert latencies(answers) == {"ttft_p50_s": 0.5, "ttft_p99_s": 3.0, "tpot_p50_s": 1.0, "tpot_p99_s": 1.0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"attention": 2},
        {"micro_batches": 5},
        {"contestants": ("vllm",)},
        {"contestants": ("replicas", "replicas")},
        {"experts": 1},
        {"hidden": 40},
        {"ranks": 1},
    ],
)
def test_impossible_settings_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServeBench(**(TINY | wrong))


def test_a_request_must_fit_the_cache() -> None:
    with pytest.raises(ConfigError, match="but the KV cache of a rank 64"):
        ServeBench(kv_tokens=64, trace="poisson:rate=1,count=9,prompt=100").requests()
