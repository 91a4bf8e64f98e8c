"""Traces of real ranks record when asynchronous calls start, and a replay reproduces the step."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
import torch.distributed as dist

from moe_comm.comm.channel import AT_ONCE_S, Channel
from moe_comm.comm.group_setup import communicator_of
from moe_comm.observe.records import SpanLine
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.event_reader import read_spans
from moe_comm.runtime.events import EVENTS
from moe_plan.whatif.analysis import what_if
from moe_plan.whatif.run_trace import make_run_trace
from tests.pool import RankPool


def busy(seconds: float) -> None:
    """Occupy the core for ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def work(rank: int, world: int, offset_s: float) -> list[SpanLine]:
    """Run a step with an asynchronous all-gather, which rank 1 starts ``offset_s`` after rank 0. Return its spans."""
    assert dist.group.WORLD is not None
    channel = Channel(communicator_of(dist.group.WORLD), 60.0)  # the channel that ranks on several hosts use
    channel.all_reduce(torch.ones(4), "a start together")
    EVENTS.begin_step(1)
    with EVENTS.span(Kind.STEP, "step"):
        with EVENTS.span(Kind.COMPUTE, "attention"):
            busy(offset_s * rank)
        pending = channel.start_all_gather(torch.full((4,), float(rank)), "gather early")
        with EVENTS.span(Kind.COMPUTE, "experts"):
            busy(10 * AT_ONCE_S)
        assert pending()[1].tolist() == [1.0] * 4
        channel.all_reduce(torch.ones(4), "sum")
    return [replace(SpanLine.of(span, 0), rank=rank) for span in read_spans(EVENTS.region) if span.step == 1]


def test_the_span_of_an_asynchronous_call_records_its_start(pool2: RankPool) -> None:
    """The span of a wait for an asynchronous call records when the call started."""
    ranks = pool2.run(work, 0.02, timeout=60)
    for spans in ranks:
        (early,) = (span for span in spans if span.name == "gather early")
        (experts,) = (span for span in spans if span.name == "experts")
        (attention,) = (span for span in spans if span.name == "attention")
        assert attention.end_ns <= early.begun_ns <= experts.begin_ns < early.begin_ns
        assert not any(span.begun_ns for span in spans if span.name in ("attention", "experts", "step"))
    trace = make_run_trace([span for spans in ranks for span in spans], 2, {"dp": 2})
    assert what_if(trace.graph).replay_error < 1e-6
    edges = {
        (int(source), int(target)) for source, target in zip(trace.graph.before_D, trace.graph.after_D, strict=True)
    }
    table = trace.graph.table
    names = [(table.names[table.name_N[index]], int(table.rank_N[index])) for index in range(len(table))]
    dependencies = {(names[source][1], names[target]) for source, target in edges}
    assert (1, ("gather early", 0)) in dependencies and (0, ("gather early", 1)) in dependencies
