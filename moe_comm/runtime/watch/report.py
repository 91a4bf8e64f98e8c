"""What the ranks of a run are told when something went wrong, in words and as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moe_comm.runtime.event_layout import Kind, Span
from moe_comm.runtime.watch.graph import Doing, Verdict, View
from moe_comm.runtime.watch.status_table import NOTICE_BYTES

LAST_EVENTS = 20
WATCHER = "moe_comm/runtime/watch/"
CUT_MARGIN = 1024


@dataclass(frozen=True)
class Fault:
    """Something that the ranks noticed. It is the same on every rank, but for what is said otherwise.

    kind: "died", "unreachable", "stuck" or "error". ranks: the culprits, and not more than out of reach if
    "unreachable": of the host that is not heard or, as that host itself tells it, of the one that is cut off. what: a
    sentence. action: "stop", the ranks end, or "none".
    healthy_ns: when the culprit last gave a sign of health, and noticed_s: until all ranks of the host where it was
    found out knew; this host's CLOCK_MONOTONIC; NaN but on the rank that speaks for all. report: the text for people.
    path: of this rank's file with it. speaks: whether this rank is the one that speaks for all.
    """

    kind: str
    ranks: tuple[int, ...]
    what: str
    step: int
    action: str
    healthy_ns: int
    report: str
    path: str = ""
    noticed_s: float = float("nan")
    speaks: bool = False


def describe(verdict: Verdict, views: Sequence[View], stacks: Mapping[int, str]) -> str:
    """All but the last events: the culprit, who waits for whom, and what the culprits were doing."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    lines = [verdict.what, f"{stamp}, step {verdict.step}, {verdict.silent_s:.2f} s after its last sign of health", ""]
    lines.append("who waits for whom")
    lines += [f"  {_line(view, verdict)}" for view in sorted(views, key=lambda view: view.rank)]
    for rank, text in sorted(stacks.items()):
        lines += ["", f"Python stacks of rank {rank}, its main thread first, innermost call first"]
        lines += [f"  {line}" for line in main_first(text).splitlines()]
    return "\n".join(lines) + "\n"


def main_first(stacks: str) -> str:
    """What faulthandler wrote, oldest thread first, without the watcher's own."""
    threads = [one for one in stacks.split("\n\n") if WATCHER not in one]
    return "\n\n".join(reversed(threads))


def last_events(spans: Mapping[int, Iterable[Span]], now_ns: int) -> str:
    """The last events of some ranks; times are seconds before now."""
    lines = []
    for rank, found in sorted(spans.items()):
        lines += ["", f"last events of rank {rank} (seconds ago)"]
        for span in found:
            took = "open" if span.open else f"{(span.end_ns - span.begin_ns) / 1e6:.2f} ms"
            where = f"step {span.step} micro-batch {span.micro}"
            layer = f" {span.layer}" if span.layer else ""
            call = f" call {span.call} of ranks {','.join(map(str, span.group[:16]))}" if span.group else ""
            peer = f" with rank {span.peer}" if span.peer >= 0 else ""
            ago = (now_ns - span.begin_ns) / 1e9
            kind = span.kind.name.lower()
            lines.append(f"  {ago:9.3f}  {took:>12}  {where:<22}  {kind:<10} {span.name!r}{layer}{call}{peer}")
    return "\n".join(lines) + "\n" if lines else ""


def _line(view: View, verdict: Verdict) -> str:
    targets = verdict.edges.get(view.rank, ())
    inside = f" in {view.wait or view.description[-1]}" if view.description else ""
    if verdict.kind == "unreachable" and view.rank in verdict.ranks:
        how = f"cannot be reached, {view.words}" if view.fate == "unreachable" else f"is cut off, {view.fate}"
        return f"rank {view.rank}  {how}, last{inside or ' between operations'}"
    if view.rank in verdict.ranks:
        after = f", {view.words}" if view.words else ""
        return f"rank {view.rank}  is the culprit: {view.fate}{after}, last{inside or ' between operations'}"
    if targets:
        return f"rank {view.rank}  waits for rank {', '.join(map(str, targets))}{inside}"
    if view.fate != "alive":
        return f"rank {view.rank}  {view.fate} {view.words}".rstrip()
    return f"rank {view.rank}  waits for nobody,{inside or ' between operations'}"


def views_to_json(views: Sequence[View]) -> str:
    """For hosts to tell each other."""
    found = []
    for view in views:
        values = asdict(view)
        values["calls"] = [[list(group), kind.name, count] for (group, kind), count in view.calls.items()]
        values["doing"] = [{**one, "kind": Kind(one["kind"]).name} for one in values["doing"]]
        found.append(values)
    return json.dumps(found, separators=(",", ":"))


def views_from_json(text: str) -> list[View]:
    """What ``views_to_json`` wrote.

    Raises:
        ValueError, KeyError, TypeError: it is something else.
    """
    found = []
    for values in json.loads(text):
        values["calls"] = {(tuple(group), Kind[kind]): count for group, kind, count in values["calls"]}
        values["doing"] = tuple(
            Doing(**{**one, "kind": Kind[one["kind"]], "group": tuple(one["group"])}) for one in values["doing"]
        )
        found.append(View(**values))
    return found


def notice_text(told: Mapping[str, Any], most: int = NOTICE_BYTES - 1) -> str:
    """A fault and what else is told of it as JSON, whose report is cut to what has room in ``most`` bytes."""
    report: str = told["report"]
    while True:
        text = json.dumps({**told, "report": report}, separators=(",", ":"))  # ASCII
        if len(text) <= most or not report:
            return text
        report = report[: len(report) * most // len(text) - CUT_MARGIN] if len(report) > CUT_MARGIN else ""
