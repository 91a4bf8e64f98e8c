"""The time that a rank may make no progress before the others consider it stuck."""

from __future__ import annotations

from dataclasses import dataclass

from moe_comm.runtime.event_layout import ACTIVE_AT, LONG, RECORDS
from moe_comm.runtime.event_reader import read_open
from moe_comm.runtime.seconds import seconds_of
from moe_comm.runtime.watch.graph import SLOW_KINDS
from moe_comm.runtime.watch.status_table import Phase, StatusTable

POLL_S = 0.1
EARLY = 0.9
"""Fraction of ``stuck_s`` after which a rank is judged stuck. The rest of it is for informing all ranks."""
PAUSES = 10
"""The timeout is at least this multiple of the longest pause measured so far."""


@dataclass(frozen=True)
class WatchOptions:
    """Options of the watcher.

    Args:
        stuck_s: seconds within which a stuck rank is detected during a step.
        start_s: the same before the end of the first step and between steps.
        end: kill a stuck rank, so that the waits of the other ranks end.
        records: number of spans in the event ring of each rank.
    """

    stuck_s: float = 5.0
    start_s: float = 300.0
    end: bool = True
    records: int = RECORDS

    def __post_init__(self) -> None:
        for name in ("stuck_s", "start_s"):
            object.__setattr__(self, name, seconds_of(name, getattr(self, name)))


class ProgressTimeout:
    """The progress timeout of this rank. Each change is published in ``table``."""

    def __init__(self, table: StatusTable, options: WatchOptions) -> None:
        self._table, self._options = table, options
        self._own = table.region(table.rank)
        self._phase, self._steps = Phase.STARTING, 0
        self._pause = self._first_pause = self._longest = 0.0
        table.publish(self._phase, options.start_s)

    def begin(self) -> None:
        """Begin a step. The short timeout applies from the second step on."""
        self._pause = 0.0
        if self._steps:
            self._phase = Phase.STEP
            self._table.publish(self._phase, self.timeout_s)

    def end(self) -> None:
        """End a step. ``start_s`` applies until the next one begins."""
        if self._steps:
            self._longest = max(self._longest, self._pause)
        else:
            self._first_pause = self._pause  # includes compilation, so later steps replace it
        self._steps += 1
        self._phase = Phase.BETWEEN
        self._table.publish(self._phase, self._options.start_s)

    @property
    def timeout_s(self) -> float:
        """Seconds that this rank may make no progress in a step while others wait for it."""
        longest = self._longest if self._steps > 1 else self._first_pause
        return max(EARLY * self._options.stuck_s, PAUSES * longest)

    def measure(self, now: int, since: int) -> None:
        """Update the longest pause of this step that this rank caused itself, without time before ``since``; ns."""
        pause = (now - max(LONG.unpack_from(self._own, ACTIVE_AT)[0], since)) / 1e9
        if pause > max(self._pause, 2 * POLL_S) and self._phase != Phase.BETWEEN:
            kinds = {span.kind for span in read_open(self._own) if not span.thread}
            if not any(kind.is_communication or kind in SLOW_KINDS for kind in kinds):
                self._pause = pause
