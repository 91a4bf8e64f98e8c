"""Measured steps of one attention rank and its expert ranks, for the planner: ``moe_plan.serving.measured``.

attention rank   │ attention  dispatch ......... combine  attention ... │ next step
expert ranks     │                    experts                           │
                   T_a                T_e, and the rest of the waits: T_c, both ways, and the vote
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import nn

from moe_comm.bench.serve.requests import Answer, Interval, covered, expert_times, latencies, union, waits
from moe_comm.bench.serve.settings import ServeBench
from moe_comm.runtime.event_layout import Span
from moe_plan.serving.cost import ServeMapping
from moe_plan.serving.measured import FEWEST, MeasuredCosts, MeasuredStep
from moe_plan.serving.replay import replay

Begun = tuple[float, int, int]
"""When a step began, in seconds of the monotonic clock, its tokens, and those that it reads from the cache."""


@contextmanager
def log_steps(model: nn.Module) -> Iterator[list[Begun]]:
    """Yield the forward passes of continuous batching that have begun."""
    begun: list[Begun] = []

    def note(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        kv_tokens = max(int(one[-1]) for one in kwargs["cu_seq_lens_k"].values())
        begun.append((time.monotonic(), kwargs["input_ids"].shape[1], kv_tokens))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield begun
    finally:
        handle.remove()


def steps_of(
    begun: Sequence[Begun], answers: Sequence[Answer], spans: Sequence[Span], of_experts: Sequence[Sequence[Span]]
) -> list[MeasuredStep]:
    """Return the steps that were followed by another one while there were requests.

    Args:
        spans: of the attention rank.
        of_experts: spans of each expert rank. The slowest rank of a step counts.
    """
    busy = union([(one.arrival_s, one.times_s[-1]) for one in answers])
    waited, computed = union(waits(spans)), [union(expert_times(one)) for one in of_experts]
    steps = []
    for (begin_s, tokens, kv_tokens), (end_s, *_) in pairwise(begun):
        if not any(first <= begin_s and end_s <= last for first, last in busy):
            continue
        window: list[Interval] = [(begin_s, end_s)]
        wait_s = covered(waited, window)
        experts_s = min(wait_s, max(covered(one, window) for one in computed))
        attention_s = end_s - begin_s - wait_s
        steps.append(MeasuredStep(tokens, kv_tokens, attention_s, experts_s, wait_s - experts_s))
    return steps


def predict(
    bench: ServeBench, steps: Sequence[MeasuredStep], config: Any, cache_tokens: int, answers: Sequence[Answer]
) -> dict[str, Any] | None:
    """Return the costs that fit ``steps``, and the latencies of the trace that they predict; None if steps are few.

    answers: the measured ones of the trace.
    """
    if len(steps) < FEWEST:
        return None
    text = config.get_text_config()
    count = getattr(text, "num_local_experts", None) or text.num_experts
    costs = MeasuredCosts.fit(steps, text.num_hidden_layers, count, text.num_experts_per_tok, cache_tokens)
    served = replay(costs, ServeMapping(1, 1, 1, 1), bench.requests(), bench.batch_tokens).summary()
    measured = latencies(answers)
    predicted = {name: served[name] for name in measured}
    errors = {name: predicted[name] / value - 1 for name, value in measured.items()}
    return {"costs": costs.to_dict(), "steps": len(steps), "predicted": predicted, "errors": errors}
