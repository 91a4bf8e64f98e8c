"""Requests of a trace that a rank sends to transformers' manager of continuous batching, and when their tokens came."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from moe_comm.errors import MoeCommError
from moe_comm.runtime.event_layout import Kind, Span
from moe_plan.serving.trace import TraceRequest, quantile

POLL_S = 0.2
"""Longest wait for an answer before the arrival of the next request and the manager are looked at."""


@dataclass(frozen=True)
class PromptRequest:
    """A request with its tokens. index: in the trace. arrival_s: since the start of the trace."""

    index: int
    arrival_s: float
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True)
class Answer:
    """The tokens of a request, with times in seconds of the monotonic clock.

    arrival_s: when the request arrived, also if its rank was busy then. times_s: of each token.
    """

    index: int
    arrival_s: float
    tokens: tuple[int, ...]
    times_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        """Seconds from the arrival to the first token."""
        return self.times_s[0] - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds between tokens; NaN if there is one."""
        count = len(self.times_s) - 1
        return (self.times_s[-1] - self.times_s[0]) / count if count else float("nan")


def with_prompts(trace: Sequence[TraceRequest], vocabulary: int, seed: int) -> list[PromptRequest]:
    """Return the requests with random prompts, the same for the same seed."""
    generator, result = torch.Generator().manual_seed(seed), []
    for index, one in enumerate(trace):
        prompt = torch.randint(vocabulary, (one.prompt_tokens,), generator=generator, device="cpu").tolist()
        result.append(PromptRequest(index, one.arrival_s, tuple(prompt), one.output_tokens))
    return result


def at_once(requests: Sequence[PromptRequest]) -> list[PromptRequest]:
    """Return the requests as if they had all arrived at the start."""
    return [replace(one, arrival_s=0.0) for one in requests]


def serve(
    model: Any, requests: Sequence[PromptRequest], cache: ContinuousBatchingConfig, started: Callable[[], float]
) -> list[Answer]:
    """Serve the requests of this rank, in order of arrival.

    Args:
        started: returns the start of the trace on the monotonic clock, after all ranks have called it.

    Raises:
        MoeCommError: a request failed.
    """
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(generation, continuous_batching_config=cache)
    manager.start()
    try:
        while manager.batch_processor is None and manager.is_running():
            time.sleep(1e-3)  # until the KV cache is allocated
        return _serve(manager, requests, started())
    finally:
        with suppress(RuntimeError):
            manager.stop(hard_stop=True)


def _serve(manager: Any, requests: Sequence[PromptRequest], start_s: float) -> list[Answer]:
    waiting, sent, answers = list(reversed(requests)), dict[str, PromptRequest](), list[Answer]()
    while waiting or sent:
        now_s = time.monotonic() - start_s
        while waiting and waiting[-1].arrival_s <= now_s:
            one = waiting.pop()
            name = manager.add_request(
                list(one.prompt), max_new_tokens=one.output_tokens, record_timestamps=True, eos_token_id=-1
            )
            sent[name] = one
        if not manager.is_running() or (not sent and not waiting):
            raise MoeCommError(f"the manager of continuous batching ended: {_reason(manager)}")
        pause_s = min(POLL_S, max(waiting[-1].arrival_s - now_s, 0.0)) if waiting else POLL_S
        result = manager.get_result(timeout=pause_s)
        if result is None:
            continue
        if result.error:
            raise MoeCommError(f"request {result.request_id} failed: {result.error}")
        one = sent.pop(result.request_id)
        times_s = tuple(result.timestamps)
        answers.append(Answer(one.index, start_s + one.arrival_s, tuple(result.generated_tokens), times_s))
    return answers


def _reason(manager: Any) -> object:
    return getattr(getattr(manager, "background_thread_status", None), "fatal_error", None) or "for an unknown reason"


def latencies(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the median and the 99th percentile of TTFT and TPOT, as ``ServedTrace.summary`` names them."""
    values = {
        "ttft": [one.ttft_s for one in answers],
        "tpot": [one.tpot_s for one in answers if len(one.tokens) > 1],
    }
    shares = {"p50": 0.5, "p99": 0.99}
    return {f"{name}_{at}_s": quantile(one, share) for name, one in values.items() for at, share in shares.items()}


Interval = tuple[float, float]


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Return disjoint intervals that cover the same, in order."""
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((begin, end))
    return result


def covered(parts: Sequence[Interval], within: Sequence[Interval]) -> float:
    """Return the seconds of ``within`` that ``parts`` cover. Both are disjoint and in order."""
    total, index = 0.0, 0
    for begin, end in within:
        while index < len(parts) and parts[index][1] <= begin:
            index += 1
        at = index
        while at < len(parts) and parts[at][0] < end:
            total += min(end, parts[at][1]) - max(begin, parts[at][0])
            at += 1
    return total


def complete_from(spans: Sequence[Span], recorded: int, most: int) -> float:
    """Return the time from which on all spans of this rank are known, if only the newest ``most`` are kept.

    recorded: the number of spans of the run.
    """
    return spans[0].begin_ns / 1e9 if recorded > most and spans else 0.0


def since(intervals: Sequence[Interval], start_s: float) -> list[Interval]:
    """Return the parts of ``intervals`` after ``start_s``."""
    return [(max(begin, start_s), end) for begin, end in intervals if end > start_s]


def waits(spans: Sequence[Span]) -> list[Interval]:
    """Return the times in which this rank dispatches, combines or votes, and so mostly waits."""
    return [(one.begin_ns / 1e9, one.end_ns / 1e9) for one in spans if one.end_ns and one.kind.is_communication]


def expert_times(spans: Sequence[Span]) -> list[Interval]:
    """Return the times from the end of each dispatch to its combine."""
    calls = [one for one in spans if one.end_ns and one.kind in (Kind.DISPATCH, Kind.COMBINE)]
    return [
        (before.end_ns / 1e9, after.begin_ns / 1e9)
        for before, after in pairwise(calls)
        if before.kind is Kind.DISPATCH and after.kind is Kind.COMBINE
    ]


def idle_share(spans: Sequence[Span], busy: Sequence[Interval], *, only_experts: bool) -> float:
    """Return the share of the time ``busy`` in which this rank waits; if it has only experts, does not compute them."""
    total = sum(end - begin for begin, end in busy)
    if only_experts:
        return 1 - covered(union(expert_times(spans)), busy) / total
    return covered(union(waits(spans)), busy) / total
