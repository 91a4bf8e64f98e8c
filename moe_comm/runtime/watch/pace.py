"""How long a rank may show no progress: what it is told at the start, and what its own steps have shown."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_comm.errors import ConfigError
from moe_comm.runtime.event_layout import ACTIVE_AT, LONG, RECORDS
from moe_comm.runtime.event_reader import read_open
from moe_comm.runtime.watch.graph import PATIENT_KINDS
from moe_comm.runtime.watch.status_table import Board, Phase

POLL_S = 0.1
EARLY = 0.9
"""Part of ``stuck_s`` after which a rank is taken to be stuck, so that within the whole of it all know."""
PAUSES = 10


@dataclass(frozen=True)
class WatchOptions:
    """stuck_s: seconds within which a stuck rank is noticed. start_s: the same before its first step has ended and
    between steps. end: kill it then, so that the others' waits end. records: spans that each rank's ring holds."""

    stuck_s: float = 5.0
    start_s: float = 300.0
    end: bool = True
    records: int = RECORDS

    def __post_init__(self) -> None:
        for name in ("stuck_s", "start_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a positive number of seconds; got {value}")


class Pace:
    """Of this rank, told to the others on its page of ``board``."""

    def __init__(self, board: Board, options: WatchOptions) -> None:
        self._board, self._options = board, options
        self._own = board.region(board.rank)
        self._phase, self._steps = Phase.STARTING, 0
        self._pause = self._first_pause = self._longest = 0.0
        board.say(self._phase, options.start_s)

    def begin(self) -> None:
        """A step begins: from now on others may lose patience with this rank."""
        self._pause = 0.0
        if self._steps:
            self._phase = Phase.STEP
            self._board.say(self._phase, self.patience_s)

    def end(self) -> None:
        """What comes until the next step may take long."""
        if self._steps:
            self._longest = max(self._longest, self._pause)
        else:
            self._first_pause = self._pause  # kernels are compiled in it: it counts only while there is no other
        self._steps += 1
        self._phase = Phase.BETWEEN
        self._board.say(self._phase, self._options.start_s)

    @property
    def patience_s(self) -> float:
        """How long this rank may show no progress in a step while others wait for it."""
        longest = self._longest if self._steps > 1 else self._first_pause
        return max(EARLY * self._options.stuck_s, PAUSES * longest)

    def look(self, now: int, since: int) -> None:
        """Note the longest time in this step that this rank has shown no progress through its own doing; what was
        before ``since`` does not count. ns."""
        pause = (now - max(LONG.unpack_from(self._own, ACTIVE_AT)[0], since)) / 1e9
        if pause > max(self._pause, 2 * POLL_S) and self._phase != Phase.BETWEEN:
            kinds = {span.kind for span in read_open(self._own) if not span.thread}
            if not any(kind.moves or kind in PATIENT_KINDS for kind in kinds):
                self._pause = pause
