"""Records of ranks during training: matching calls, bytes and rows, and consistent lines."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from moe_comm.observe.records import RANKS, SPANS, RankStep, SpanLine, read_folder
from moe_comm.runtime.events import EVENTS
from moe_comm.train import run
from moe_comm.train.loop.recording import clock_skew
from moe_comm.train.ranks import Ranks
from tests.pool import RankPool
from tests.train.common import write_text

RECORDING = ("observe.every=2", "run.steps=4", "watch.enabled=false")
OPS = ("dispatch", "combine", "combine backward", "dispatch backward")


def moves_rows(span: SpanLine) -> bool:
    """Return whether the span is a complete dispatch or combine, not a collective inside of one or a wait."""
    return span.kind in ("dispatch", "combine") and bool(span.call)


def trained(rank: int, world: int, settings: Sequence[str]) -> Path:
    folder = run(None, settings).folder
    assert EVENTS.device is None
    return folder


def train(pool: RankPool, tmp_path: Path, *settings: str) -> tuple[list[RankStep], list[SpanLine]]:
    folder = pool.run(trained, [*write_text(tmp_path), *RECORDING, *settings], timeout=120)[0]
    return list(read_folder(folder / RANKS, RankStep)), list(read_folder(folder / SPANS, SpanLine))


def calls(spans: Sequence[SpanLine]) -> dict[tuple[str, tuple[int, ...], int], dict[int, tuple[str, str, int, int]]]:
    """Return the spans of all ranks by call; fail if a rank has two calls with the same number."""
    by_call: dict[tuple[str, tuple[int, ...], int], dict[int, tuple[str, str, int, int]]] = defaultdict(dict)
    for span in spans:
        if span.call:
            call = by_call[span.kind, tuple(span.group), span.call]
            assert span.rank not in call
            call[span.rank] = (span.name, span.layer, span.step, span.micro)
    return by_call


SETTINGS = {
    "shared memory": (),
    "in chunks, interleaved": ("parallel.backend=all_to_all", "parallel.overlap_chunks=2", "parallel.interleave=true"),
    "fsdp": ("parallel.sharding=fsdp", "parallel.backend=all_to_all"),
    "tensor parallel, recomputing": ("parallel.tp=2", "model.recompute=full"),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_ranks_number_the_calls_of_a_group_equally(pool2: RankPool, tmp_path: Path, settings: tuple[str, ...]) -> None:
    steps, spans = train(pool2, tmp_path, *settings)
    assert {span.step for span in spans} == {2, 4}
    by_call = calls(spans)
    assert any(kind == "dispatch" for kind, _, _ in by_call) and any(kind == "collective" for kind, _, _ in by_call)
    for call, ranks in by_call.items():
        assert ranks.keys() == set(call[1]) == {0, 1}, call
        assert ranks[0] == ranks[1], call
    for rank in (0, 1):
        rank_spans = [span for span in spans if span.rank == rank and span.step == 2]
        counted = {name: sum(span.name == name and moves_rows(span) for span in rank_spans) for name in OPS}
        forward = 8 if "model.recompute=full" in settings else 4  # 2 layers, 2 micro-batches
        assert counted["dispatch"] == forward and counted["combine"] == forward
        assert counted["combine backward"] == counted["dispatch backward"] == 4
        (step_span,) = [span for span in rank_spans if span.kind == "step"]
        inside = [span for span in rank_spans if not span.thread and span.kind not in ("checkpoint", "step")]
        assert all(step_span.begin_ns <= span.begin_ns <= span.end_ns <= step_span.end_ns for span in inside)
        assert {span.layer for span in rank_spans if span.name == "dispatch" and span.layer} == {
            "layers.0.moe",
            "layers.1.moe",
        }
    for line in steps:
        assert line.waits.keys() == {"dispatch", "combine", "collective"} and min(line.waits.values()) > 0
        assert line.rows > 0 and line.sent["dispatch"] > 0 and line.sent["combine"] > 0
        assert line.peers == {str(1 - line.rank): sum(line.sent.values())}
    assert [(line.rank, line.step) for line in steps] == [(rank, step) for rank in (0, 1) for step in range(1, 5)]


def test_bytes_and_rows_equal_the_dispatched_ones(pool2: RankPool, tmp_path: Path) -> None:
    for backend in ("shared_memory", "all_to_all"):
        (tmp_path / backend).mkdir()
        _, spans = train(pool2, tmp_path / backend, f"parallel.backend={backend}")
        row = 16 * 4
        by_call = defaultdict(list)
        for span in spans:
            if moves_rows(span):
                by_call[span.name, span.call].append(span)
        for (name, _), ranks in by_call.items():
            if name == "dispatch":
                slots = 2 * 8 * 16 // 2  # top-k times the tokens of a micro-batch
                rows = sum(sum(span.rows) for span in ranks)
                # The last step's records include validation, whose last sequence has padding, which is not dispatched.
                assert rows == slots or (ranks[0].step == 4 and 0 < rows < slots and rows % 2 == 0)
                assert all(span.nbytes % row == 0 and span.nbytes <= slots // 2 * row for span in ranks)
        for first, second in (("dispatch", "dispatch backward"), ("combine", "combine backward")):
            sent, returned = (
                {
                    r: [s.nbytes for s in spans if s.name == name and s.rank == r and moves_rows(s) and s.step == 2]
                    for r in (0, 1)
                }
                for name in (first, second)
            )
            if backend == "shared_memory" and second == "combine backward":  # tokens travel with the gradients
                returned = {r: [nbytes // 2 for nbytes in sizes] for r, sizes in returned.items()}
            # Bytes that one rank sends are returned by the other.
            assert sorted(sent[0]) == sorted(returned[1]) and sorted(sent[1]) == sorted(returned[0])


def test_pipeline_stages_record_sends_and_receives(pool2: RankPool, tmp_path: Path) -> None:
    interleaved = ("parallel.overlap_chunks=2", "parallel.interleave=true")
    for schedule, settings in (("1f1b", ()), ("zbv", ()), ("dualpipev", interleaved)):
        (tmp_path / schedule).mkdir()
        micros = range(0, 8, 2) if settings else range(4)  # the first of two; validation sends each
        numbers = (f"data.micro_batches={micros.stop}", "data.batch=8", "model.layers=4")
        steps, spans = train(
            pool2, tmp_path / schedule, "parallel.pp=2", f"parallel.schedule={schedule}", *numbers, *settings
        )
        moved: dict[str, set[tuple[int, int, str, str, int, int]]] = {"send": set(), "receive": set()}
        for span in spans:
            verb, _, what = span.name.partition(" ")
            if span.kind == "transfer" and verb in moved:
                ends = (span.rank, span.peer) if verb == "send" else (span.peer, span.rank)
                moved[verb].add((span.step, span.micro, span.layer, what, *ends))
        sends, receives = moved["send"], moved["receive"]
        assert receives and receives <= sends, receives - sends
        assert {micro for _, micro, _, what, _, _ in sends if what == "activations"} == set(range(micros.stop))
        assert {micro for _, micro, _, what, _, _ in sends if what == "gradients"} == set(micros)
        # Each receive must have its own span, also if a stage requests several receives before its next pass.
        assert len(receives) == len(sends)
        passes = [span for span in spans if span.kind == "compute" and span.layer.startswith("stage ")]
        assert {span.name for span in passes} >= {"forward", "backward", "loss"}
        paired = [
            (inner.layer != outer.layer, inner.micro != outer.micro)
            for inner, outer in product(passes, passes)
            if (inner.name, outer.name, inner.rank) == ("forward", "backward", outer.rank)
            and outer.begin_ns <= inner.begin_ns < inner.end_ns <= outer.end_ns
        ]
        assert bool(paired) == bool(settings) and all(map(all, paired))
        assert all(line.waits["transfer"] > 0 for line in steps)
        assert all(line.peers.keys() == {str(1 - line.rank)} for line in steps)


def skewed(rank: int, world: int, hosts: list[str]) -> tuple[int, int]:
    ahead_ns = {0: 0, 1: 5_000_000_000}[rank]
    return clock_skew(Ranks.make(), hosts, lambda: time.time_ns() + ahead_ns)


def test_the_clock_offset_of_two_hosts_is_within_its_error(pool2: RankPool) -> None:
    (first, _), (skew, error) = pool2.run(skewed, ["a", "b"], timeout=60)
    assert first == 0 and abs(skew + 5_000_000_000) <= error < 10**9
    assert pool2.run(skewed, ["a", "a"], timeout=60) == [(0, 0), (0, 0)]


def test_nothing_is_recorded_if_disabled(pool2: RankPool, tmp_path: Path) -> None:
    folder = pool2.run(trained, [*write_text(tmp_path), *RECORDING, "observe.events=false"], timeout=120)[0]
    assert not (folder / RANKS).exists() and not (folder / SPANS).exists()


def fails(rank: int, world: int, settings: Sequence[str]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011  any exception
        run(None, settings)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_run_that_fails_leaves_each_ranks_last_spans(pool2: RankPool, tmp_path: Path) -> None:
    errors = pool2.run(fails, [*write_text(tmp_path), *RECORDING, "optimizer.lr=1e30", "optimizer.clip=0"], timeout=120)
    dumps = sorted((tmp_path / "runs").glob("*/dumps/step-*/rank-*.jsonl"))
    assert [path.name for path in dumps] == ["rank-00000.jsonl", "rank-00001.jsonl"]
    for path, reason in zip(dumps, errors, strict=True):
        lines = list(read_folder(path.parent, SpanLine))
        assert [line.name for line in lines if line.kind == "mark"].count(reason) >= 1
        assert any(line.name == "dispatch" for line in lines)
