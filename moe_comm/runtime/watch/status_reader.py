"""The status of the ranks of this host: their entries in the status table, their events, and their processes."""

from __future__ import annotations

from pathlib import Path

from moe_comm.runtime.event_layout import ACTIVE_AT, LONG, Span
from moe_comm.runtime.event_reader import read_calls, read_header, read_open
from moe_comm.runtime.watch.graph import OpenSpan, RankState, RankStatus
from moe_comm.runtime.watch.status_table import Phase, StatusTable

STARVED_S = 1.0
"""The run delay of a main thread is measured once it has made no progress for this long."""
_BY_PHASE: dict[Phase, RankState] = {Phase.LEFT: "left", Phase.FAILED: "failed", Phase.CAUGHT: "caught"}


class StatusReader:
    """Reads the status of the ranks in ``table``; see ``RankStatus`` for ``stopped_s`` and ``start_s``.

    Time before ``since_ns`` does not count as stalled. Set it again when this process itself did not run. ``starved_s``
    is the run delay that the last ``stalled_s`` has subtracted, by rank.
    """

    def __init__(self, table: StatusTable, stopped_s: float, start_s: float, since_ns: int) -> None:
        self.since_ns = since_ns
        self.starved_s: dict[int, float] = {}
        self._table, self._stopped_s, self._start_s = table, stopped_s, start_s
        self._delays: dict[int, tuple[int, int]] = {}

    def stalled_s(self, rank: int, now: int) -> float:
        """Return the seconds since the main thread of a rank last began or ended a span.

        The time that the thread was ready to run but got no core is subtracted: a rank on a busy machine is not stuck.
        """
        active = int(LONG.unpack_from(self._table.region(rank), ACTIVE_AT)[0])
        stalled = max(now - max(active, self.since_ns), 0) / 1e9
        self.starved_s[rank] = 0.0
        if stalled < STARVED_S:
            return stalled
        delay = run_delay_ns(self._table.members[rank].pid)
        last_active, first_delay = self._delays.get(rank, (0, 0))
        if last_active != active:
            self._delays[rank] = (active, delay)
            return stalled
        self.starved_s[rank] = min(max(delay - first_delay, 0) / 1e9, stalled)
        return stalled - self.starved_s[rank]

    def status(self, rank: int, now: int) -> RankStatus:
        """Return the status of a rank of this host at time ``now``, ns."""
        table, member = self._table, self._table.members[rank]
        region, entry = table.region(rank), table.entry(rank)
        header = read_header(region)
        stalled = self.stalled_s(rank, now)
        heartbeat_age = 0.0 if header is None else max(now - max(header.heartbeat_ns, self.since_ns), 0) / 1e9
        state: RankState = _BY_PHASE.get(entry.phase, "alive")
        if state == "alive":
            letter = table.letter(rank) if heartbeat_age > 0.2 or stalled >= entry.timeout_s else ""
            if table.ended(rank):
                state = "ended"
            elif letter in ("T", "t"):
                state = "stopped" if letter == "T" else "traced"
        return RankStatus(
            rank=rank,
            state=state,
            stalled_s=stalled,
            heartbeat_age_s=heartbeat_age,
            timeout_s=entry.timeout_s,
            stopped_s=self._stopped_s,
            start_s=self._start_s,
            step=0 if header is None else header.step,
            open_spans=tuple(open_span(span, now) for span in read_open(region) if not span.thread),
            calls=read_calls(region),
            left_s=(now - entry.left_ns) / 1e9 if entry.left_ns else 0.0,
            message=entry.message,
            host=member.label,
            pid=member.pid,
        )


def open_span(span: Span, now: int) -> OpenSpan:
    """Return a span with its age at time ``now``, ns."""
    age = (now - span.begin_ns) / 1e9
    return OpenSpan(span.kind, span.name, age, span.layer, span.step, span.micro, span.group, span.call, span.peer)


def run_delay_ns(pid: int) -> int:
    """Return how long the main thread of a process was ready but did not run; 0 if the kernel does not report it."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
