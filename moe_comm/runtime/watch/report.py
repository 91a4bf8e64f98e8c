"""The report about a detected fault, as text and as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moe_comm.runtime.event_layout import Kind, Span
from moe_comm.runtime.watch.graph import OpenSpan, RankStatus, Verdict
from moe_comm.runtime.watch.status_table import FAULT_BYTES

LAST_EVENTS = 20
WATCHER = "moe_comm/runtime/watch/"
CUT_MARGIN = 1024
"""Characters by which a report is truncated further than estimated, so that few attempts are needed."""


@dataclass(frozen=True)
class DetectedFault:
    """A fault that the watchers detected. Ranks differ in ``healthy_ns``, ``path``, ``noticed_s`` and ``is_reporter``.

    Attributes:
        kind: "died", "unreachable", "stuck" or "error".
        ranks: the culprits. If "unreachable": the ranks of the host without heartbeats, or of the isolated host.
        summary: one sentence.
        step: training step of the culprit.
        action: "stop" (all ranks end) or "none".
        healthy_ns: time of the culprit's last progress, CLOCK_MONOTONIC of this host.
        report: full text.
        path: report file of this rank.
        noticed_s: seconds from ``healthy_ns`` until all ranks of the host knew; NaN except on the reporter.
        is_reporter: whether this rank has detected the fault. One rank of the run has.
    """

    kind: str
    ranks: tuple[int, ...]
    summary: str
    step: int
    action: str
    healthy_ns: int
    report: str
    path: str = ""
    noticed_s: float = float("nan")
    is_reporter: bool = False


def describe(verdict: Verdict, statuses: Sequence[RankStatus], stacks: Mapping[int, str]) -> str:
    """Return the report without the last events: the culprit, the waits of all ranks, the stacks of the culprits."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    lines = [
        verdict.summary,
        f"{stamp}, step {verdict.step}, {verdict.stalled_s:.2f} s after its last sign of health",
        "",
        "who waits for whom",
    ]
    lines += [f"  {_rank_line(status, verdict)}" for status in sorted(statuses, key=lambda status: status.rank)]
    for rank, text in sorted(stacks.items()):
        lines += ["", f"Python stacks of rank {rank}, its main thread first, innermost call first"]
        lines += [f"  {line}" for line in main_first(text).splitlines()]
    return "\n".join(lines) + "\n"


def main_first(stacks: str) -> str:
    """Return faulthandler's output with the newest thread first and without the threads of the watcher."""
    threads = [stack for stack in stacks.split("\n\n") if WATCHER not in stack]
    return "\n\n".join(reversed(threads))


def last_events(spans: Mapping[int, Iterable[Span]], now_ns: int) -> str:
    """Return the last events of some ranks as text. Times are seconds before ``now_ns``."""
    lines = []
    for rank, events in sorted(spans.items()):
        lines += ["", f"last events of rank {rank} (seconds ago)"]
        for span in events:
            duration = "open" if span.open else f"{(span.end_ns - span.begin_ns) / 1e6:.2f} ms"
            where = f"step {span.step} micro-batch {span.micro}"
            layer = f" {span.layer}" if span.layer else ""
            call = f" call {span.call} of ranks {','.join(map(str, span.group[:16]))}" if span.group else ""
            peer = f" with rank {span.peer}" if span.peer >= 0 else ""
            age_s = (now_ns - span.begin_ns) / 1e9
            kind = span.kind.name.lower()
            lines.append(f"  {age_s:9.3f}  {duration:>12}  {where:<22}  {kind:<10} {span.name!r}{layer}{call}{peer}")
    return "\n".join(lines) + "\n" if lines else ""


def _rank_line(status: RankStatus, verdict: Verdict) -> str:
    targets = verdict.waits_for.get(status.rank, ())
    inside = f" in {status.wait or status.open_spans[-1]}" if status.open_spans else ""
    if verdict.kind == "unreachable" and status.rank in verdict.ranks:
        how = f"cannot be reached, {status.message}" if status.state == "unreachable" else f"is cut off, {status.state}"
        return f"rank {status.rank}  {how}, last{inside or ' between operations'}"
    if status.rank in verdict.ranks:
        after = f", {status.message}" if status.message else ""
        return f"rank {status.rank}  is the culprit: {status.state}{after}, last{inside or ' between operations'}"
    if targets:
        return f"rank {status.rank}  waits for rank {', '.join(map(str, targets))}{inside}"
    if status.state != "alive":
        return f"rank {status.rank}  {status.state} {status.message}".rstrip()
    return f"rank {status.rank}  waits for no rank,{inside or ' between operations'}"


def statuses_to_json(statuses: Sequence[RankStatus]) -> str:
    """Serialize the status of ranks for other hosts."""
    results = []
    for status in statuses:
        values = asdict(status)
        values["calls"] = [[list(group), kind.name, count] for (group, kind), count in status.calls.items()]
        values["open_spans"] = [{**span, "kind": Kind(span["kind"]).name} for span in values["open_spans"]]
        results.append(values)
    return json.dumps(results, separators=(",", ":"))


def statuses_from_json(text: str) -> list[RankStatus]:
    """Parse the output of ``statuses_to_json``."""
    results = []
    for values in json.loads(text):
        values["calls"] = {(tuple(group), Kind[kind]): count for group, kind, count in values["calls"]}
        values["open_spans"] = tuple(
            OpenSpan(**{**span, "kind": Kind[span["kind"]], "group": tuple(span["group"])})
            for span in values["open_spans"]
        )
        results.append(RankStatus(**values))
    return results


def fault_json(values: Mapping[str, Any], most: int = FAULT_BYTES - 1) -> str:
    """Serialize a fault. The report is truncated so that the text has at most ``most`` bytes."""
    report: str = values["report"]
    while True:
        text = json.dumps({**values, "report": report}, separators=(",", ":"))  # ASCII
        if len(text) <= most or not report:
            return text
        report = report[: len(report) * most // len(text) - CUT_MARGIN] if len(report) > CUT_MARGIN else ""
