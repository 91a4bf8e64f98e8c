"""Ranks that watch each other: who died, who is stuck, and who only waits for them.

    with watching(WatchOptions(), "runs/mine/faults") as watch:     # collective
        for step in range(1, steps + 1):
            with watch.step(step):
                ...                                                 # EVENTS spans say what waits for whom

A thread in every rank says that the process lives and looks at the others of its host: at the end of a process, at
once; at one that is stopped, whose interpreter's lock is held, or whose main thread shows no progress while others wait
for it, when its patience has passed. Hosts look at each other through the process group's store. Then every rank writes
the same report to a file: who waited for whom, in which operation, layer, micro-batch and step, the Python stacks of
the culprits, and everyone's last events.

Patience is ``stuck_s``, or ten times the longest pause that the rank has made in a step so far, if that is more; before
its first step has ended and between steps, where ranks compile, evaluate, save and export, it is ``start_s``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store  # no public way to it

from moe_comm.errors import FROM_PEERS, HeapError, MissingDependency, PeerError
from moe_comm.runtime.event_layout import ACTIVE_AT, BEAT_AT, LONG
from moe_comm.runtime.event_reader import read_spans
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.launch.agent import NOTICED
from moe_comm.runtime.memory import native_is_built
from moe_comm.runtime.watch.graph import View, analyse, cut_off
from moe_comm.runtime.watch.hosts import HostBeats
from moe_comm.runtime.watch.notice import Notices
from moe_comm.runtime.watch.pace import EARLY, POLL_S, Pace, WatchOptions
from moe_comm.runtime.watch.report import LAST_EVENTS, Fault, describe, last_events, notice_text
from moe_comm.runtime.watch.status_table import Board, Phase, Texts, group_texts
from moe_comm.runtime.watch.views import Viewer, description

LOOK_S = 0.2
FRESH_S = 1.0
"""A rank whose watcher has not run for longer does not speak for its host."""
AWAY_S = 1.0
"""A watcher that was itself not run for so long has no right to judge what was before."""
STACKS_S = 0.3
SETTLE_S = 2.0
_LOST = re.compile(
    "closed by peer|reset by peer|read error|write error|broken pipe|connection|gloo|nccl", re.IGNORECASE
)


class Watcher:
    """This rank's watcher; a context manager. ``meet`` makes it.

    on_fault: called on every rank, on a thread of the watcher's, when something was noticed; a culprit is ended when
    those of one rank have returned, or half a second later.
    """

    def __init__(
        self,
        board: Board,
        options: WatchOptions,
        folder: Path,
        on_fault: Sequence[Callable[[Fault], None]] = (),
        store: PrefixStore | None = None,
    ) -> None:
        self.board, self.options = board, options
        self._since = self._turned = time.monotonic_ns()
        self._reported: dict[int, tuple[str, int]] = {}
        self._look_ns = 0
        self._done = False
        self._hosts: HostBeats | None = None
        self._remote_seen: dict[int, str] = {}
        self._suspected_ns = 0
        self._viewer = Viewer(board, EARLY * options.stuck_s, options.start_s, self._since)
        self._own = board.region(board.rank)
        EVENTS.attach(self._own, board.rank, board.records)
        LONG.pack_into(self._own, BEAT_AT, self._turned)  # or others would take it for one that cannot speak
        self._pace = Pace(board, options)
        self._notices = Notices(board, options, folder, on_fault, self._leads)
        if store is not None:
            number = next(n for n, ranks in enumerate(board.hosts) if board.rank in ranks)
            members = [View(member.rank, host=member.label, pid=member.pid) for member in board.members]
            self._hosts = HostBeats(store, number, board.hosts, self._views, self._leads, options.stuck_s, members)
        self._thread = threading.Thread(target=self._run, name="moe_comm-watch", daemon=True)

    @classmethod
    def meet(
        cls,
        options: WatchOptions,
        folder: str | Path,
        on_fault: Sequence[Callable[[Fault], None]] = (),
        *,
        texts: Texts = group_texts,
        host: str | None = None,
    ) -> Self:
        """Set up on all ranks of the default process group, and start. Collective.

        Args:
            folder: where reports go; made when there is one.
            host: which ranks share a board; None: those that see each other's processes.

        Raises:
            HeapError: on every rank, where some rank cannot share memory with its neighbours.
            MissingDependency: on every rank, where some rank has no native core, which records what ranks look at.
        """
        built = texts("built" if native_is_built() else "")
        if not all(built):
            raise MissingDependency(
                f"rank {built.index('')} has no native core (moe_comm._C), which watching needs; "
                "run `pip install -e .` there"
            )
        board = Board.meet(dist.get_rank(), texts, records=options.records, host=host)
        store: PrefixStore | None = None
        answer = ""
        if len(board.hosts) > 1:
            session = texts(os.urandom(8).hex())[0]
            try:
                store = PrefixStore(f"moe_comm/watch/{session}", _own_store())
                for number, ranks in enumerate(board.hosts):
                    if board.rank == ranks[0]:
                        HostBeats.announce(store, number)
            except (RuntimeError, OSError) as error:  # told below: until then the others wait for this rank
                answer = f"rank {board.rank} cannot use the store of the process group: {error}"[:200]
        watcher = cls(board, options, Path(folder), on_fault, store)
        # Nobody looks before all record on their boards.
        if problems := [text for text in texts(answer) if text]:
            board.close()
            raise HeapError(problems[0])
        watcher.start()
        return watcher

    @property
    def fault(self) -> Fault | None:
        """What was noticed last."""
        return self._notices.fault

    @property
    def patience_s(self) -> float:
        """How long this rank may show no progress in a step while others wait for it."""
        return self._pace.patience_s

    def start(self) -> None:
        EVENTS.enabled = True  # what a rank does not record, others cannot see
        self._since = self._viewer.since_ns = time.monotonic_ns()
        self._thread.start()
        if self._hosts is not None:
            self._hosts.start()

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around a training step, whichever the loop."""
        self.begin_step(step)
        EVENTS.at(step)
        yield
        self.end_step()

    def begin_step(self, step: int) -> None:
        """From now on others may lose patience with this rank."""
        self._pace.begin()

    def end_step(self) -> None:
        """What comes until the next step may take long."""
        self._pace.end()

    def close(self, error: BaseException | None = None) -> None:
        """Leave. With an error that another rank has given this one, wait a moment for the report about it."""
        if self._done:
            return
        if isinstance(error, Exception):
            words = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            if _is_from_peers(error):
                self.board.leave(Phase.CAUGHT, f"in {self._last_wait()} {words}")
                self.board.wake()
                self._notices.told.wait(SETTLE_S)
            else:
                self.board.leave(Phase.FAILED, words)
        else:
            self.board.leave(Phase.LEFT)
        self._done = True
        self.board.wake()
        self._thread.join(SETTLE_S)
        self._notices.close(SETTLE_S)
        if self.board.page(self.board.rank).phase == Phase.CAUGHT:
            self.board.leave(Phase.LEFT)
        if self._hosts is not None:
            self._hosts.close()
        if not self._thread.is_alive():
            self.board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._done:
            return
        self.close(error)
        if self.fault is None or not isinstance(error, Exception):
            return
        hint = f"{NOTICED}{self.fault.what}; report: {self.fault.path}"
        if isinstance(error, PeerError) and len(error.args) == 1:
            error.args = (f"{error.args[0]} {hint}",)
        else:
            error.add_note(hint)

    # --- the thread ---

    def _run(self) -> None:
        failures = 0
        while not self._done and failures < 3:
            self.board.wait(POLL_S)
            try:
                self._turn(time.monotonic_ns())
            except Exception:
                failures += 1
                print(f"rank {self.board.rank}: watching failed\n{traceback.format_exc()}", file=sys.stderr)
        if failures:
            self.board.leave(Phase.LEFT)

    def _turn(self, now: int) -> None:
        if now - self._turned > AWAY_S * 1e9:
            self._since = self._viewer.since_ns = now
        self._turned = now
        LONG.pack_into(self._own, BEAT_AT, now)
        self._pace.look(now, self._since)
        if self._hosts is not None:
            self._hear(self._hosts)
        if number := self._notices.new:
            self._notices.take(number)
        elif not self._notices.over and now >= self._look_ns and self._leads():
            if self._is_odd(now):
                self._look_ns = now + int(LOOK_S * 1e9)
                self._judge(now)
            else:
                self._suspected_ns = 0
        if self._notices.over and self.options.end:
            self._notices.come_out(now)

    def _is_odd(self, now: int) -> bool:
        """A quick look whether there may be something to judge."""
        if self._hosts is not None and self._hosts.is_odd():
            return True
        for rank in self.board.here:
            page = self.board.page(rank)
            if page.phase in (Phase.LEFT, Phase.CAUGHT):
                continue
            beat = LONG.unpack_from(self.board.region(rank), BEAT_AT)[0]
            silent = self._viewer.silent_s(rank, now)
            unbeaten = now - max(beat, self._since)
            patience = min(page.patience_s, self.options.stuck_s * EARLY if unbeaten > FRESH_S * 1e9 else math.inf)
            if self.board.ended(rank) or page.phase == Phase.FAILED or silent >= patience:
                return True
        return False

    def _leads(self) -> bool:
        """Whether this rank speaks for its host: the first one that can."""
        for rank in self.board.here:
            if rank == self.board.rank:
                return True
            beat = LONG.unpack_from(self.board.region(rank), BEAT_AT)[0]
            fresh = time.monotonic_ns() - beat < FRESH_S * 1e9
            if fresh and not self.board.ended(rank) and self.board.page(rank).phase not in (Phase.LEFT, Phase.FAILED):
                return False
        return False

    def _views(self) -> list[View]:
        """All ranks of this host."""
        return [self._viewer.view(rank, time.monotonic_ns()) for rank in self.board.here]

    def _judge(self, now: int) -> None:
        """As the one that speaks for this host: who is to blame, if anybody; tell all."""
        views = self._views()
        if self._hosts is not None:
            views += self._hosts.others()
        verdict = analyse(views)
        if verdict is None and self._hosts is not None and (mute_s := self._hosts.mute_s) >= self._hosts.cut_s:
            verdict = cut_off(views, self.board.here, mute_s, self._hosts.cut_s)
        if verdict is None:
            self._suspected_ns = 0
            return
        here = [rank for rank in verdict.ranks if rank in self.board.here]
        if not here:  # its own host speaks first, if it can
            self._suspected_ns = self._suspected_ns or now
            if now - self._suspected_ns < FRESH_S * 1e9:
                return
        else:
            self._suspected_ns = 0
        active = dict.fromkeys(verdict.ranks, (verdict.kind, -verdict.step))  # of other hosts no more is known
        active |= {rank: (verdict.kind, LONG.unpack_from(self.board.region(rank), ACTIVE_AT)[0]) for rank in here}
        if all(self._reported.get(rank) == state for rank, state in active.items()):
            return
        end = self.options.end and verdict.kind == "stuck"
        end = end and not any(view.fate == "left" for view in views if view.rank in verdict.ranks)
        stops = end or verdict.kind in ("died", "error") or (verdict.kind == "unreachable" and self.options.end)
        stacks = {}
        if verdict.kind == "stuck":
            stacks = {rank: self.board.stacks(rank, STACKS_S, resume=end) for rank in here}
        # Of ranks that wait for each other, one is enough to let the others go.
        ring = all(rank in verdict.edges for rank in verdict.ranks)
        victims = verdict.ranks[:1] if ring else verdict.ranks
        starved = self._viewer.starved_s.get(verdict.ranks[0], 0.0) if verdict.kind == "stuck" else 0.0
        fault = Fault(
            kind=verdict.kind,
            ranks=verdict.ranks,
            what=verdict.what,
            step=verdict.step,
            action="stop" if stops else "none",
            healthy_ns=now - int((verdict.silent_s + starved) * 1e9),
            report=describe(verdict, views, stacks) + self._own_events(now),
        )
        if self._tell(fault, victims if end else ()):
            self._reported |= active

    def _tell(self, fault: Fault, victims: Sequence[int]) -> bool:
        """False if another rank of this host was faster: two that just came to may both take themselves for the one
        that speaks."""
        notice = notice_text(asdict(fault) | {"speaker": self.board.rank, "victims": list(victims)})
        number = self.board.post(notice, self._notices.seen)
        if not number:
            return False
        if self._hosts is not None:
            self._hosts.tell(notice)
        self._notices.take(number)
        self.board.wake()
        return True

    def _hear(self, hosts: HostBeats) -> None:
        """Pass on what another host has told, unless this one knows already."""
        for number, notice in hosts.notices().items():
            if self._remote_seen.get(number) == notice or not self._leads():
                continue
            told = json.loads(notice)
            known = self._notices.over or (self.fault is not None and tuple(told["ranks"]) == self.fault.ranks)
            if not known:
                more = {"report": told["report"] + self._own_events(time.monotonic_ns()), "healthy_ns": 0}
                if not self.board.post(notice_text(told | more), self._notices.seen):
                    return  # there is one to take first
            self._remote_seen[number] = notice
            self._reported |= dict.fromkeys(told["ranks"], (told["kind"], -told["step"]))
            if not known:
                return  # likewise

    def _last_wait(self) -> str:
        """What this rank's main thread was in when another rank's end let it go."""
        now = time.monotonic_ns()
        spans = [span for span in read_spans(self._own, LAST_EVENTS) if span.kind.moves and not span.thread]
        return f"{description(spans[-1], now)}:" if spans else ""

    def _own_events(self, now: int) -> str:
        """The last events of all ranks of this host."""
        return last_events({rank: read_spans(self.board.region(rank), LAST_EVENTS) for rank in self.board.here}, now)


def _is_from_peers(error: Exception) -> bool:
    """Whether another rank has caused it; what a rank's own connections raise is not of torch's types."""
    torchs = type(error) is RuntimeError or isinstance(error, DistError)
    return isinstance(error, FROM_PEERS) or (torchs and _LOST.search(str(error)) is not None)


def _own_store() -> Store:
    """A connection of its own to the store of the default process group: calls on one wait for each other."""
    store: Any = _get_default_store()
    found: Store = store.clone() if hasattr(store, "clone") else store
    return found


def watching(
    options: WatchOptions | None = None,
    folder: str | Path = "faults",
    on_fault: Sequence[Callable[[Fault], None]] = (),
) -> Watcher:
    """Watch the ranks of the default process group: ``with watching(...) as watch``. Collective.

    Raises:
        HeapError: on every rank, where some rank cannot share memory with its neighbours.
    """
    return Watcher.meet(options or WatchOptions(), folder, on_fault)
