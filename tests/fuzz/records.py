"""Targets for the record files of a training run and their readers, and for event regions: shared memory into which a
rank records spans. A rank may be killed in the middle of a write."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

from moe_comm.errors import CorruptFile, InputError
from moe_comm.observe import records
from moe_comm.observe.diagnose import culprits
from moe_comm.observe.effective import effective_time
from moe_comm.observe.report import write_report
from moe_comm.observe.trace import write_trace
from moe_comm.runtime.event_layout import Kind, region_bytes
from moe_comm.runtime.event_reader import read_calls, read_header, read_open, read_spans
from moe_comm.runtime.events import EventRecorder
from tests.fuzz.rooms import READ, folder, refused
from tests.support.synthetic import SyntheticRun, write_run

_RECORDS = 16
MANY = 100_000


@functools.cache
def _original() -> Path:
    """Return the folder of a small synthetic run with every kind of record."""
    path = folder() / "run"
    write_run(path, SyntheticRun(ranks=4, steps=8, span_steps=(2, 4)))
    return path


def _run_with(name: str, content: bytes, read: Callable[[Path], object]) -> str:
    """Call ``read`` on a copy of the run in which the file ``name`` has ``content``."""
    run = folder() / "changed"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(_original(), run)
    (run / name).write_bytes(content)
    try:
        read(run)
    except (CorruptFile, InputError) as error:
        return refused(error)
    return READ


def _first(kind: str) -> Path:
    return sorted((_original() / kind).glob("rank-*.jsonl"))[0]


def rank_steps(content: bytes) -> str:
    return _run_with(f"{records.RANKS}/{_first(records.RANKS).name}", content, culprits)


def spans(content: bytes) -> str:
    out = folder() / "run.perfetto-trace"
    return _run_with(f"{records.SPANS}/{_first(records.SPANS).name}", content, lambda run: write_trace(run, out))


def metrics(content: bytes) -> str:
    return _run_with(records.METRICS, content, effective_time)


def attempts(content: bytes) -> str:
    return _run_with(records.ATTEMPTS, content, effective_time)


def report(content: bytes) -> str:
    """Read the metrics as the HTML report does."""
    return _run_with(records.METRICS, content, lambda run: write_report([run], folder() / "report.html"))


def events(content: bytes) -> str:
    """Read a region of the correct length with any content."""
    region = bytearray(content[: region_bytes(_RECORDS)])
    region += bytes(region_bytes(_RECORDS) - len(region))
    view = memoryview(region)
    read_header(view)
    for span in (*read_spans(view), *read_open(view)):
        assert isinstance(span.kind, Kind) and len(span.rows) <= MANY and len(span.group) <= MANY
    read_calls(view)
    return READ


def seeds_of(kind: str) -> Callable[[], list[bytes]]:
    """Return a function that reads the file of the original run that a target changes."""
    return lambda: [(_first(kind) if kind in (records.RANKS, records.SPANS) else _original() / kind).read_bytes()]


def event_seeds() -> list[bytes]:
    recorder = EventRecorder(_RECORDS)
    group = recorder.group(range(4))
    for step in range(6):
        recorder.begin_step(step)
        with recorder.span(Kind.DISPATCH, "dispatch", layer="layers.0", group=group, nbytes=64) as span:
            span.put_rows([3, 0, 5], 64)
            with recorder.span(Kind.MARK, "here"):
                pass
    recorder.span(Kind.COLLECTIVE, "sum", group=group).__enter__()
    return [bytes(recorder.region)]
