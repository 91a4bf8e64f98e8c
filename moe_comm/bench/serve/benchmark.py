"""``moe-comm bench serve``: requests of a trace, served by transformers' continuous batching.

All contestants serve the same requests and must generate the same greedy tokens. In each round a contestant runs twice:

    all at once     tokens per second, with as many requests as fit the KV cache
    as they arrive  TTFT and TPOT with queueing, and from the spans: idle shares, and rows of the experts

Requests go to the ranks that take some in turn. The first run is not timed, and its tokens are compared.
"""

from __future__ import annotations

import gc
import math
import mmap
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch.distributed import ProcessGroup
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig
from transformers.utils import logging

from moe_comm.bench.common import report
from moe_comm.bench.common.clock import LEAD_NS, gather, sync_group
from moe_comm.bench.common.inputs import WrongAnswer
from moe_comm.bench.common.interleave import rotated
from moe_comm.bench.common.ranks import memory_limit, on_ranks, run_benchmark, say
from moe_comm.bench.serve.calibrate import Begun, log_steps, predict, steps_of
from moe_comm.bench.serve.contestants import (
    HUGGING_FACE,
    ServeContestant,
    build,
    mapped_model,
    model_folder,
    needed_bytes,
    vocabulary,
)
from moe_comm.bench.serve.requests import (
    Answer,
    PromptRequest,
    at_once,
    complete_from,
    idle_share,
    latencies,
    serve,
    since,
    union,
    with_prompts,
)
from moe_comm.bench.serve.settings import FOR_WEIGHTS, PAGE, ServeBench
from moe_comm.runtime.event_layout import Span, region_bytes
from moe_comm.runtime.event_reader import read_header, read_spans
from moe_comm.runtime.events import EVENTS
from moe_plan.serving.measured import MeasuredStep

RECORDS = 1 << 17
"""Spans that are kept, of about 300 decoding steps per second and 100 layers."""
NEAR_TIE = 1e-3
"""Largest gap, in standard deviations, between two logits or experts that may change places by rounding."""


@dataclass
class Served:
    """A run.

    Attributes:
        answers: of all ranks.
        seconds: until the last token.
        spans, begun: of this rank.
        complete_from_s: when the first span began that all ranks have kept; 0 if they have kept all.
    """

    answers: list[Answer]
    seconds: float
    spans: list[Span]
    begun: list[Begun]
    complete_from_s: float


@dataclass
class Measurements:
    """What the runs of a contestant gave, of all ranks."""

    answers: list[Answer] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # tokens per second
    seconds: list[float] = field(default_factory=list)
    idle: dict[str, list[float]] = field(default_factory=dict)
    rows: list[float] = field(default_factory=list)  # mean of a call
    most_rows: int = 0
    steps: list[MeasuredStep] = field(default_factory=list)  # of disaggregation with one attention rank


class Contest:
    """The contestants on this rank.

    Attributes:
        tokens: those of the first contestant, by request; None before it has run.
        near_ties: number of requests with other tokens after near ties, in all runs.
        skipped: why contestants do not run, by name.
        weights: bytes on each rank, by name.
        reference: name of the first contestant.
        mapped: the unswapped model with its weights in a file, if memory is limited.
    """

    def __init__(self, bench: ServeBench, folder: str, files: str = "") -> None:
        logging.set_verbosity_error()
        self.bench, self.folder, self.rank = bench, folder, dist.get_rank()
        trace = bench.requests()
        self.requests = with_prompts(trace, vocabulary(folder), bench.seed)
        self.pages = bench.pages(trace)
        self.contestants, self.skipped = list[ServeContestant](), dict[str, str]()
        self.weights, self.reference = dict[str, list[int]](), ""
        self.measured = {name: Measurements() for name in bench.contestants}
        self.mapped = mapped_model(folder, Path(files, f"rank-{self.rank}")) if files else None
        self.tokens: dict[int, tuple[int, ...]] | None = None
        self.near_ties = 0

    def run_all(self) -> None:
        """Measure all contestants. Collective.

        With limited memory, only one of them is in memory, so they are measured one after the other.
        """
        together = dist.new_group(list(range(self.bench.ranks)))
        names = sorted(self.bench.contestants, key=lambda one: one != HUGGING_FACE)  # the reference first
        for some in [[name] for name in names] if self.bench.memory_mib else [names]:
            for name in some:
                self.build(name, together)
            self.run_rounds()
            self.contestants.clear()
            self.mapped = None
            gc.collect()

    def run_rounds(self) -> None:
        """Measure the contestants that are in memory. Collective."""
        for number in range(self.bench.rounds if self.contestants else 0):
            say(f"round {number + 1} of {self.bench.rounds}")
            for contestant in rotated(self.contestants, number):
                self.measure(contestant)

    def build(self, name: str, together: ProcessGroup) -> None:
        """Load a contestant, if it fits the memory, and compare its tokens. Collective."""
        if self.bench.memory_mib:
            mib = needed_bytes(name, self.bench, self.folder) / 2**20
            if mib > FOR_WEIGHTS * self.bench.memory_mib:
                self.skipped[name] = f"a rank has {mib:,.0f} MiB of weights, more than {FOR_WEIGHTS:.0%} of its memory"
                return
        say(f"loading {name}, and comparing its tokens")
        contestant = build(name, self.bench, self.folder, together, self.mapped)
        gc.collect()
        self.weights[name] = gather(contestant.weight_bytes)
        self.contestants.append(contestant)
        self.reference = self.reference or name
        self.compare(name, self.run(contestant, at_once(self.requests)).answers)

    def run(self, contestant: ServeContestant, requests: Sequence[PromptRequest]) -> Served:
        """Serve ``requests``. Collective."""
        takers, start_s = contestant.takers, 0.0
        header = read_header(EVENTS.region)

        def started() -> float:
            nonlocal start_s
            start_s = (sync_group(time.monotonic_ns()) + LEAD_NS) / 1e9
            time.sleep(max(0.0, start_s - time.monotonic()))
            return start_s

        # Micro-batches divide the cache, and each request must fit a part.
        cache = ContinuousBatchingConfig(
            num_blocks=self.pages * contestant.micro_batches,
            page_size=PAGE,
            max_batch_tokens=self.bench.batch_tokens,
        )
        answers, begun = list[Answer](), list[Begun]()
        with contestant.serving():
            if self.rank in takers:
                own = requests[takers.index(self.rank) :: len(takers)]
                with log_steps(contestant.model) if contestant.calibrates else nullcontext(begun) as begun:
                    answers = serve(contestant.model, own, cache, started)
            else:
                started()
        first, end = (0 if one is None else one.head for one in (header, read_header(EVENTS.region)))
        spans = read_spans(EVENTS.region, RECORDS, first)
        complete_from_s = max(gather(complete_from(spans, end - first, RECORDS)))
        everyone = [one for answers in gather(answers) for one in answers]
        seconds = max(one.times_s[-1] for one in everyone) - start_s
        return Served(everyone, seconds, spans, begun, complete_from_s)

    def compare(self, name: str, answers: Sequence[Answer]) -> None:
        """Raise ``WrongAnswer`` unless the tokens are those of the first contestant. Collective."""
        tokens = {one.index: one.tokens for one in answers}
        if self.tokens is None:
            self.tokens = tokens
            return
        wrong = [index for index, expected in self.tokens.items() if tokens.get(index) != expected]
        if not wrong:
            return
        gaps = [self._gap(index, tokens.get(index, ())) for index in wrong] if self.rank == 0 else []
        (gaps, *_) = gather(gaps)
        self.near_ties += len(wrong)
        if max(gaps) > NEAR_TIE:
            first = wrong[gaps.index(max(gaps))]
            raise WrongAnswer(
                f"{name}: {len(wrong)} of {len(self.requests)} requests have other tokens than with "
                f"{self.reference}; request {first} without a near tie of two tokens or experts (gap "
                f"{max(gaps):.2g} standard deviations). Nothing was timed."
            )

    @torch.no_grad()
    def _gap(self, index: int, tokens: Sequence[int]) -> float:
        """Return the smallest gap until the tokens of a request differ: of its logits there, or of any router."""
        assert self.tokens is not None
        same = 0
        for one, other in zip(self.tokens[index], tokens, strict=False):
            if one != other:
                break
            same += 1
        prompt = self.requests[index].prompt + self.tokens[index][:same]
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        output = model(torch.tensor([prompt], dtype=torch.int64, device="cpu"), output_router_logits=True)
        gaps = [_gap_of(output.logits[0, -1:], 1)]
        for logits_TE in output.get("router_logits") or ():
            gaps.append(_gap_of(logits_TE, model.config.num_experts_per_tok))
        return min(gaps)

    def measure(self, contestant: ServeContestant) -> None:
        """Run a contestant once in both ways. Collective."""
        gc.collect()
        measured = self.measured[contestant.name]
        served = self.run(contestant, at_once(self.requests))
        self.compare(contestant.name, served.answers)
        measured.rates.append(sum(len(one.tokens) for one in served.answers) / served.seconds)
        if contestant.calibrates:
            measured.steps += self._steps(served)
        served = self.run(contestant, self.requests)
        self.compare(contestant.name, served.answers)
        if contestant.calibrates:
            measured.steps += self._steps(served)
        measured.answers += served.answers
        measured.seconds.append(served.seconds)
        rows = [one.rows for one in served.spans if one.rows]
        counts = sum(map(sum, rows)), sum(map(len, rows)), max((max(one) for one in rows), default=0)
        busy = since(union([(one.arrival_s, one.times_s[-1]) for one in served.answers]), served.complete_from_s)
        only_experts = self.rank not in contestant.takers
        # Spans do not tell which micro-batch waits.
        alone = contestant.local or contestant.micro_batches > 1
        idle = None if alone or not busy else idle_share(served.spans, busy, only_experts=only_experts)
        shares: dict[str, list[float]] = {}
        totals = [0, 0]
        for rank, (share, (total, calls, most)) in enumerate(gather((idle, counts))):
            totals = [totals[0] + total, totals[1] + calls]
            measured.most_rows = max(measured.most_rows, most)
            if share is not None:
                pool = "experts" if rank not in contestant.takers else "attention"
                shares.setdefault(pool, []).append(share)
        if totals[1]:
            measured.rows.append(totals[0] / totals[1])
        for pool, values in shares.items():
            measured.idle.setdefault(pool, []).append(sum(values) / len(values))

    def _steps(self, served: Served) -> list[MeasuredStep]:
        """Return the steps of a run. Collective."""
        own, *others = gather(served.spans)
        begun = [one for one in gather(served.begun)[0] if one[0] >= served.complete_from_s]
        return steps_of(begun, served.answers, own, others)


def _gap_of(logits_TE: torch.Tensor, chosen: int) -> float:
    """Return the smallest gap in standard deviations between the last chosen and the first other of each row."""
    highest = logits_TE.float().topk(chosen + 1, dim=1).values
    return float(((highest[:, -2] - highest[:, -1]) / logits_TE.float().std(dim=1)).min())


def run(arguments: tuple[ServeBench, str, str], threads: int) -> dict[str, Any]:
    """Run the benchmark on this rank and return the result, the same on every rank. Collective."""
    bench, folder, files = arguments
    ring = mmap.mmap(-1, region_bytes(RECORDS))
    EVENTS.attach(memoryview(ring), dist.get_rank(), RECORDS)
    contest = Contest(bench, folder, files)
    with memory_limit(bench.memory_mib):
        contest.run_all()
    cores = threads * bench.ranks
    rows = {
        name: _row(contest.measured[name], cores) | {"weight_mib": [one / 2**20 for one in contest.weights[name]]}
        for name in bench.contestants
        if name not in contest.skipped
    }
    requests, plan = contest.requests, None
    for measured in contest.measured.values():
        if measured.steps:
            config = AutoConfig.from_pretrained(folder)
            plan = predict(bench, measured.steps, config, contest.pages * PAGE, measured.answers)
    return {
        "benchmark": "serve",
        "contestants": rows,
        "requests": len(requests),
        "prompt_tokens": sum(len(one.prompt) for one in requests),
        "output_tokens": sum(one.output_tokens for one in requests),
        "near_ties": contest.near_ties,
        "plan": plan,
        "skipped": contest.skipped,
        "kv_tokens": contest.pages * PAGE,
        "settings": bench.to_dict(),
        "threads_per_rank": threads,
    }


def _row(measured: Measurements, cores: int) -> dict[str, Any]:
    tokens_per_s = median(measured.rates)
    return latencies(measured.answers) | {
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_core": tokens_per_s / cores,
        "seconds": median(measured.seconds),
        "idle": {pool: median(values) for pool, values in measured.idle.items()},
        "rows_per_expert": median(measured.rows) if measured.rows else None,
        "most_rows_per_expert": measured.most_rows or None,
    }


def main(bench: ServeBench, json_out: str | None = None) -> dict[str, Any]:
    """Run ``moe-comm bench serve``, see ``run_benchmark``."""
    return run_benchmark(partial(_measure, bench), tables, json_out)


def _measure(bench: ServeBench) -> dict[str, Any] | None:
    with model_folder(bench, bench.requests()) as folder, TemporaryDirectory(prefix="moe_comm-bench-") as files:
        if not bench.memory_mib or HUGGING_FACE not in bench.contestants:
            files = ""
        return on_ranks(run, (bench, folder, files), bench.ranks, "cpu")


def _milliseconds(key: str) -> Any:
    return lambda row: row[key] * 1e3 if math.isfinite(row[key]) else None


_FORMS = (("predicted", ".3g"), ("errors", "+.0%"))
COLUMNS: tuple[report.Column, ...] = (
    ("", "name"),
    ("tokens/s/core", "tokens_per_s_per_core"),
    ("TTFT p50 ms", _milliseconds("ttft_p50_s")),
    ("p99", _milliseconds("ttft_p99_s")),
    ("TPOT p50 ms", _milliseconds("tpot_p50_s")),
    ("p99", _milliseconds("tpot_p99_s")),
    ("idle a/e", lambda row: "/".join(f"{share:.0%}" for share in row["idle"].values()) or "-"),
    ("rows/expert", "rows_per_expert"),
    ("most", lambda row: row["most_rows_per_expert"] or "-"),
    ("weights MiB", lambda row: "+".join(f"{one:.0f}" for one in row["weight_mib"])),
)


def tables(result: dict[str, Any]) -> list[Table]:
    """Return the table of latencies, throughput, idle shares and rows of each contestant."""
    s = result["settings"]
    model = s["model"] or f"{s['layers']} layers, D {s['hidden']}, F {s['ffn']}, E {s['experts']}, K {s['top_k']}"
    memory = f", {s['memory_mib']:g} MiB per rank" if s["memory_mib"] else ""
    heading = f"{s['ranks']} ranks, {model}, float32{memory}; {report.machine(result)}"
    lines = [
        f"{result['requests']} requests, {result['prompt_tokens']:,} tokens of prompts, {result['output_tokens']:,} "
        f"generated, the same by all; trace {s['trace']}, {s['rounds']} rounds",
        "tokens/s: all requests at once; TTFT and TPOT: as they arrive, with queueing",
        "idle: share of the time with requests in dispatch, combine and votes, of attention/expert ranks",
    ]
    if (plan := result["plan"]) is not None:
        names = ("ttft_p50_s", "tpot_p50_s")
        predicted, errors = (" and ".join(f"{plan[of][name]:{form}}" for name in names) for of, form in _FORMS)
        lines.append(
            f"disaggregated, predicted from {plan['steps']} steps: TTFT and TPOT p50 {predicted} s, errors {errors}"
        )
    lines += filter(None, [report.skipped(result)])
    if result["near_ties"]:
        lines.append(f"{result['near_ties']} requests differ after near ties of two tokens or experts")
    rows = ({"name": name} | row for name, row in result["contestants"].items())
    return [report.make_table(heading, COLUMNS, rows, "\n".join(lines))]
