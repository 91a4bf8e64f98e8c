"""What this process can see of the ranks of its host: their pages, their events, and what the kernel says of them."""

from __future__ import annotations

from pathlib import Path

from moe_comm.runtime.event_layout import ACTIVE_AT, LONG, Span
from moe_comm.runtime.event_reader import read_calls, read_open, read_state
from moe_comm.runtime.watch.graph import Doing, Fate, View
from moe_comm.runtime.watch.status_table import Board, Phase

STARVED_S = 1.0
"""From so long a silence on, the time counts that a rank's main thread would have run had it been let."""
_BY_PHASE: dict[Phase, Fate] = {Phase.LEFT: "left", Phase.FAILED: "failed", Phase.CAUGHT: "caught"}


class Viewer:
    """Looks at the ranks of ``board``.

    stopped_s, start_s: as in ``View``. since_ns: nothing that was before counts as silence; to be set anew when this
    process was itself not run for a while. starved_s: what ``silent_s`` has last left out, by rank.
    """

    def __init__(self, board: Board, stopped_s: float, start_s: float, since_ns: int) -> None:
        self.since_ns = since_ns
        self.starved_s: dict[int, float] = {}
        self._board, self._stopped_s, self._start_s = board, stopped_s, start_s
        self._starved: dict[int, tuple[int, int]] = {}

    def silent_s(self, rank: int, now: int) -> float:
        """Since a rank's main thread last began or ended something, without the time that it was ready to run and
        found no core: a machine that is too busy makes nobody stuck."""
        active = int(LONG.unpack_from(self._board.region(rank), ACTIVE_AT)[0])
        silent = max(now - max(active, self.since_ns), 0) / 1e9
        self.starved_s[rank] = 0.0
        if silent < STARVED_S:
            return silent
        delay = run_delay_ns(self._board.members[rank].pid)
        seen, before = self._starved.get(rank, (0, 0))
        if seen != active:
            self._starved[rank] = (active, delay)
            return silent
        self.starved_s[rank] = min(max(delay - before, 0) / 1e9, silent)
        return silent - self.starved_s[rank]

    def view(self, rank: int, now: int) -> View:
        """All that is known of a rank."""
        board, member = self._board, self._board.members[rank]
        region, page = board.region(rank), board.page(rank)
        state = read_state(region)
        silent = self.silent_s(rank, now)
        unbeaten = 0.0 if state is None else max(now - max(state.beat_ns, self.since_ns), 0) / 1e9
        fate: Fate = _BY_PHASE.get(page.phase, "alive")
        if fate == "alive":
            letter = board.letter(rank) if unbeaten > 0.2 or silent >= page.patience_s else ""
            fate = "ended" if board.ended(rank) else "stopped" if letter == "T" else "traced" if letter == "t" else fate
        return View(
            rank=rank,
            fate=fate,
            silent_s=silent,
            unbeaten_s=unbeaten,
            patience_s=page.patience_s,
            stopped_s=self._stopped_s,
            start_s=self._start_s,
            step=0 if state is None else state.step,
            description=tuple(description(span, now) for span in read_open(region) if not span.thread),
            calls=read_calls(region),
            left_s=(now - page.left_ns) / 1e9 if page.left_ns else 0.0,
            words=page.words,
            host=member.label,
            pid=member.pid,
        )


def description(span: Span, now: int) -> Doing:
    """A span as it is told."""
    age = (now - span.begin_ns) / 1e9
    return Doing(span.kind, span.name, age, span.layer, span.step, span.micro, span.group, span.call, span.peer)


def run_delay_ns(pid: int) -> int:
    """How long a process's main thread has been ready to run without running; 0 where the kernel does not say."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
