"""What a rank does once something was noticed: it tells people, ends the culprit, and comes out of its own wait."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_comm.runtime.event_layout import ACTIVE_AT, LONG
from moe_comm.runtime.event_reader import read_open
from moe_comm.runtime.launch.agent import ENDED_BY_WATCH
from moe_comm.runtime.watch.pace import WatchOptions
from moe_comm.runtime.watch.report import Fault
from moe_comm.runtime.watch.status_table import Board, Phase

ACKNOWLEDGE_S = 1.0
WRITE_S = 0.5
"""What reports get to be written before a culprit is ended: a disk that does not answer must not save it."""
OUT_S = 5.0


class Notices:
    """This rank's, as they come on ``board``.

    on_fault: called with each, on a thread of its own. leads: whether this rank speaks for its host now.
    fault: the newest. over: the ranks are to end. told: one was written down and passed on. seen: number of the last
    that this rank has taken.
    """

    def __init__(
        self,
        board: Board,
        options: WatchOptions,
        folder: Path,
        on_fault: Sequence[Callable[[Fault], None]],
        leads: Callable[[], bool],
    ) -> None:
        self.fault: Fault | None = None
        self.over = False
        self.told = threading.Event()
        self._board, self._options, self._leads = board, options, leads
        self._folder, self._on_fault = folder, tuple(on_fault)
        self.seen = self._over_ns = self._gone_ns = 0
        self._writer: threading.Thread | None = None

    @property
    def new(self) -> int:
        """Number of one that this rank has not taken yet; 0: none."""
        return self._board.sequence if self._board.sequence > self.seen else 0

    def take(self, number: int) -> None:
        """This rank learns of the newest one."""
        board = self._board
        board.acknowledge(number)
        self.seen = number
        told: dict[str, Any] = json.loads(board.notice())
        speaker, victims = told.pop("speaker"), told.pop("victims")
        path = self._folder / f"rank-{board.rank:05d}-step{told['step']}.txt"
        told |= {"ranks": tuple(told["ranks"]), "path": str(path), "noticed_s": math.nan}
        fault = Fault(**{**told, "speaks": speaker == board.rank})
        self.fault = fault
        self.over, self._over_ns = fault.action == "stop", time.monotonic_ns()
        if fault.speaks:
            noticed = (self._all_know(number, fault) - fault.healthy_ns) / 1e9
            self.fault = fault = replace(fault, noticed_s=noticed)
        arguments = (fault, self._writer)
        self._writer = threading.Thread(target=self._write, args=arguments, name="moe_comm-watch-report", daemon=True)
        self._writer.start()
        self._writer.join(WRITE_S)
        here = [rank for rank in victims if rank in board.here]
        if here and self._ends(here, speaker):
            self._all_know(number, fault)
            for rank in here:
                board.kill(rank)

    def come_out(self, now: int) -> None:
        """End this process if its main thread still waits for a rank that will not come."""
        board = self._board
        page = board.page(board.rank)
        if page.phase >= Phase.LEFT or self._culprit_ends(now):
            return
        own = board.region(board.rank)
        silent = (now - max(LONG.unpack_from(own, ACTIVE_AT)[0], self._over_ns, self._gone_ns)) / 1e9
        waits = any(span.kind.moves for span in read_open(own) if not span.thread) if silent > OUT_S else False
        if silent > (OUT_S if waits else max(OUT_S, page.patience_s)):
            reason = self.fault.what if self.fault is not None else "another rank is gone"
            print(f"rank {board.rank} ends itself after waiting {silent:.1f} s in vain: {reason}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(ENDED_BY_WATCH)

    def close(self, seconds: float) -> None:
        """Wait so long for what is being written."""
        if self._writer is not None:
            self._writer.join(seconds)

    def _culprit_ends(self, now: int) -> bool:
        """Whether a rank that left with an error is still on its way out: it may write what it can of a checkpoint, to
        which this rank's threads add their part, and why it failed. Its end lets the others go."""
        if self.fault is None or self.fault.kind != "error" or now - self._over_ns > self._options.start_s * 1e9:
            return False
        ended = all(self._board.ended(rank) for rank in self.fault.ranks)
        self._gone_ns = self._gone_ns if ended else now
        return not ended

    def _write(self, fault: Fault, before: threading.Thread | None) -> None:
        """Tell people, after what was told ``before``."""
        if before is not None:
            before.join()
        with contextlib.suppress(OSError):  # a full disk must not keep anyone from ending
            self._folder.mkdir(parents=True, exist_ok=True)
            with Path(fault.path).open("a", encoding="utf-8") as file:
                file.write(fault.report)
        if fault.speaks:
            said = f"{fault.what} (noticed after {fault.noticed_s:.2f} s); report: {fault.path}"
            print(said, file=sys.stderr, flush=True)
        for call in self._on_fault:
            try:
                call(fault)
            except Exception:
                print(f"rank {self._board.rank}: {traceback.format_exc()}", file=sys.stderr)
        self.told.set()

    def _ends(self, victims: Sequence[int], speaker: int) -> bool:
        """Whether this rank is the one to end ``victims``: the speaker, or who speaks for a host without it."""
        return self._board.rank == speaker if speaker in self._board.here else self._leads()

    def _all_know(self, number: int, fault: Fault) -> int:
        """When the last of this host's ranks that can came to know of a notice; waits for them a moment."""
        board = self._board
        end = time.monotonic() + ACKNOWLEDGE_S
        latest = time.monotonic_ns()
        waiting = [rank for rank in board.here if rank not in fault.ranks and rank != board.rank]
        while waiting and time.monotonic() < end:
            for rank in list(waiting):
                page = board.page(rank)
                if page.acknowledged >= number:
                    latest = max(latest, page.ack_ns)
                if page.acknowledged >= number or page.phase == Phase.LEFT or board.ended(rank):
                    waiting.remove(rank)
            if waiting:
                board.wait(0.01)
        return latest
