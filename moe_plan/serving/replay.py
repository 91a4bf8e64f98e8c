"""Replay of a trace, iteration by iteration (APEX, 2411.17651), on a planned instance.

Each iteration decodes one token of every running request, and computes the prompts of requests that were admitted:
in order of arrival, as far as the KV cache and the tokens of an iteration allow. If the cache is full, the request that
was admitted last is preempted: it waits again, and its tokens are computed again. Requests are spread evenly over the
micro-batches of the nodes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_comm.errors import ConfigError
from moe_plan.serving.cost import ServeMapping, StepTimes
from moe_plan.serving.trace import TraceRequest, quantile

MOST_TOKENS = 8192
"""Default of the tokens of an iteration of a node."""
MOST_INSTANCES = 4096


@dataclass
class _Running:
    request: TraceRequest
    made: int = 0
    cached: int = 0
    first_s: float = math.nan

    @property
    def missing(self) -> int:
        """Tokens to compute: the prompt, and after a preemption the tokens so far; else the newest."""
        return self.request.prompt_tokens + self.made - self.cached


@dataclass(frozen=True)
class ServedTrace:
    """Latencies in seconds, with queueing. ttft_s: to the first token. tpot_s: mean between the tokens of a request.

    seconds: until the last token. preempted: number of preemptions. busy: mean requests in an iteration.
    """

    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    seconds: float
    tokens: int
    preempted: int
    busy: float

    def summary(self) -> dict[str, float]:
        """Return the median and the 99th percentile of the latencies, and tokens per second."""
        values = {"ttft": self.ttft_s, "tpot": self.tpot_s}
        shares = {"p50": 0.5, "p99": 0.99}
        result = {
            f"{name}_{at}_s": quantile(one, share) for name, one in values.items() for at, share in shares.items()
        }
        return result | {"tokens_per_s": self.tokens / self.seconds, "preempted": self.preempted, "requests": self.busy}


class StepCosts(Protocol):
    """Costs of steps: ``ServeModel``, or measured ones."""

    def kv_tokens(self, tp_a: int) -> int: ...

    def step(self, mapping: ServeMapping, tokens: float, kv_tokens: float) -> StepTimes: ...


def replay(
    model: StepCosts, mapping: ServeMapping, trace: Sequence[TraceRequest], most_tokens: int = MOST_TOKENS
) -> ServedTrace:
    """Return the latencies of ``trace`` on one instance. ``most_tokens``: of an iteration of an attention node.

    Raises:
        ConfigError: a request does not fit the KV cache.
    """
    slots = mapping.n_a * mapping.m
    room = mapping.n_a * model.kv_tokens(mapping.tp_a)
    longest = max(one.prompt_tokens + one.output_tokens for one in trace)
    if longest > room // mapping.n_a:
        raise ConfigError(f"a request has {longest:,} tokens, but the KV cache of a node {room // mapping.n_a:,}")
    waiting, running, coming = deque[_Running](), list[_Running](), deque(trace)
    ttft, tpot = list[float](), list[float]()
    now, preempted, steps, total = 0.0, 0, 0, 0
    while coming or waiting or running:
        if not waiting and not running:
            now = max(now, coming[0].arrival_s)
        while coming and coming[0].arrival_s <= now:
            waiting.append(_Running(coming.popleft()))
        # Room for the newest tokens of all: the last admitted wait again.
        used = sum(one.cached + one.missing for one in running)
        while used > room:
            last = running.pop()
            used -= last.cached + last.missing
            last.cached, preempted = 0, preempted + 1
            waiting.appendleft(last)
        tokens = sum(one.missing for one in running)
        while waiting:
            size = waiting[0].missing
            if used + size > room or (running and tokens + size > most_tokens * mapping.n_a):
                break
            used, tokens = used + size, tokens + size
            running.append(waiting.popleft())
        share = math.ceil(len(running) / slots) / len(running)  # of the fullest micro-batch
        now += model.step(mapping, math.ceil(tokens * share), used * share).step_s
        steps, total = steps + 1, total + len(running)
        for one in running:
            one.cached += one.missing
            one.made += 1
            if one.made == 1:
                one.first_s = now
                ttft.append(now - one.request.arrival_s)
            if one.made == one.request.output_tokens and one.made > 1:
                tpot.append((now - one.first_s) / (one.made - 1))
        running = [one for one in running if one.made < one.request.output_tokens]
    tokens_made = sum(one.output_tokens for one in trace)
    return ServedTrace(tuple(ttft), tuple(tpot), now, tokens_made, preempted, total / steps)


def instances(
    model: StepCosts, mapping: ServeMapping, trace: Sequence[TraceRequest], ttft_s: float, tpot_s: float
) -> tuple[int, ServedTrace]:
    """Return the smallest number of instances whose 99th percentiles keep both bounds, and the slowest's latencies.

    Requests go to the instances in turn. The slowest instance is that with the highest time to the first token.

    Raises:
        ConfigError: not even one request per instance keeps them.
    """

    def keeps(count: int) -> ServedTrace | None:
        slowest, longest = None, -1.0
        for first in range(count):
            served = replay(model, mapping, trace[first::count])
            times = served.summary()
            # NaN: no request has two tokens
            if times["ttft_p99_s"] > ttft_s or times["tpot_p99_s"] > tpot_s:
                return None
            if times["ttft_p99_s"] > longest:
                slowest, longest = served, times["ttft_p99_s"]
        return slowest

    count, lowest, found = 1, 0, keeps(1)
    most = min(len(trace), MOST_INSTANCES)
    while found is None:
        if count >= most:
            raise ConfigError(
                f"no number of instances keeps a TTFT of {ttft_s:g} s and a TPOT of {tpot_s:g} s (99th percentiles): "
                "a prompt alone takes longer, or prompts delay the tokens of other requests"
            )
        lowest, count = count, min(2 * count, most)
        found = keeps(count)
    while count - lowest > 1:
        middle = (count + lowest) // 2
        if (served := keeps(middle)) is None:
            lowest = middle
        else:
            count, found = middle, served
    return count, found
