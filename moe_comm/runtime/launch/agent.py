"""Torch's elastic agent for ``launch``: it starts ranks, detects failures, ends the other ranks, and restarts all.

With modules to preload, ranks are forked from a server process that has loaded them. This saves each rank the seconds
that importing torch takes, at every start. The server creates no tensors, so it has no threads that a fork would lose.

torch is imported inside ``run_agent``: the command line loads this module for every subcommand.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from moe_comm import errors
from moe_comm.errors import FROM_PEERS, MoeCommError
from moe_comm.runtime.launch.rank_main import ALIVE, ERRORS, JOINED, STOPPING, error_records, rank_main

AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals for which torch's agent installs handlers. If ranks run a function, ``launch`` handles the first two."""
ENDING_S = 5.0
"""Time for the other ranks to end after one has failed. Torch's agent gives 30 s to ranks that do not handle SIGTERM,
including stopped ones."""
LOOK_S = 0.1
"""Seconds between two checks of the ranks' processes."""
ENDED_BY_WATCH = 75
"""Exit code of a rank whose watcher ended it, because its main thread did not leave a wait for a failed rank."""
TORCH_PEER_ERROR = re.compile(
    r"gloo.*(Connection (closed|reset) by peer|Broken pipe)|ncclRemoteError", re.DOTALL | re.IGNORECASE
)
"""Errors of torch's own collectives when a peer has failed, also during initialisation."""
RANK_PREFIX = re.compile(r"rank (\d+): ")
NO_ROOM = re.compile(r"rank (\d+) has no room for its rows")
NOTICED = "Noticed: "
"""Prefix of the line with the detected fault, which the watcher of a rank adds to an error."""


class RankFailed(MoeCommError):
    """A rank ended with an error of another library, or was killed. ``details`` holds its traceback."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class Interrupted(MoeCommError):
    """The launcher received a signal, and its ranks have ended."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


def run_agent(
    entry: Callable[..., Any] | str,
    args: Sequence[Any],
    ranks: int,
    folder: Path,
    restarts: int,
    preload: Sequence[str] = (),
    may_die: Sequence[int] = (),
) -> list[Any]:
    """Run the ranks until they end; see ``launch``.

    The agent ends the ranks at some signals. It kills those that need more than 30 s.

    Args:
        folder: an empty folder for this launch.
        preload: modules to fork the ranks from. If empty, each rank starts a new interpreter.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quiet_agent()
    signals = AGENT_SIGNALS[2:] if callable(entry) else AGENT_SIGNALS
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint=str(folder / "rendezvous"),
        rdzv_configs={"store_type": "file"},
        local_addr="127.0.0.1",
        max_restarts=restarts,
        start_method="forkserver" if preload else "spawn",
        signals_to_handle=",".join(kind.name for kind in signals),
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
    )
    (folder / "rendezvous").touch(mode=0o600)
    for name in (ERRORS, ALIVE, JOINED):
        (folder / name).mkdir()
    if preload:
        multiprocessing.set_forkserver_preload(list(preload))
    environment = dict(os.environ) if preload else {}
    try:
        if callable(entry):
            with _kill_after_failure(folder, may_die), _agent_of(folder, may_die):
                results = elastic_launch(config, rank_main)(environment, entry, tuple(args), str(folder))
        else:
            results = elastic_launch(config, sys.executable)("-m", entry, *args)
    except ChildFailedError as error:
        # Ranks that end because of STOPPING leave no record. The cause is in the records of the previous attempt.
        attempts = [int(path.name) for path in (folder / ERRORS).iterdir()] or [0]
        attempt = max(attempts) if (folder / STOPPING).exists() else restarts
        raise _cause(error.failures, folder / ERRORS / str(attempt)) from None
    except SignalException as error:
        raise Interrupted(int(error.sigval)) from None
    return [results.get(rank) for rank in range(ranks)]


def error_class(kind: str) -> type[Exception]:
    """Return the class of this library with that name, or ``Exception``."""
    cls = getattr(errors, kind, Exception)
    return cls if isinstance(cls, type) and issubclass(cls, Exception) else Exception


def _cause(failures: dict[int, Any], errors_folder: Path) -> MoeCommError:
    """Return the error to raise for a failed run: the earliest cause, not the errors it caused on other ranks."""
    records = {int(path.name): json.loads(path.read_text()) for path in error_records(errors_folder)}
    by_time = sorted(records, key=lambda rank: records[rank]["time"])
    causes = [rank for rank in by_time if not _is_peer_error(records[rank])]
    # The agent ends the remaining ranks with SIGTERM, and some end themselves. Any other end without a record is a
    # cause too.
    unrecorded = sorted(failures.keys() - records.keys())
    killed = [rank for rank in unrecorded if failures[rank].exitcode not in (-signal.SIGTERM, ENDED_BY_WATCH)]
    lines = [line for rank in by_time for line in records[rank]["traceback"].splitlines()]
    noticed = next((NOTICED + line.partition(NOTICED)[2] for line in lines if NOTICED in line), "")
    for rank in (*causes, *killed, *by_time, *sorted(failures)):
        if rank not in records:
            return _from_exit(rank, failures[rank], noticed)
        message = records[rank]["message"]
        prefix, no_room = RANK_PREFIX.match(message), NO_ROOM.match(message)
        original = int(named[1]) if (named := prefix or no_room) else rank
        if original in records and (no_room or (prefix and message[prefix.end() :] == records[original]["message"])):
            rank = original  # the error originated there; this rank has raised a copy of it, or reports it
        return _from_record(rank, records[rank])
    return RankFailed("the ranks failed and left no reason")


def _is_peer_error(record: dict[str, Any]) -> bool:
    """Whether the error only reports that another rank has failed."""
    return issubclass(error_class(record["kind"]), FROM_PEERS) or bool(TORCH_PEER_ERROR.search(record["message"]))


def _from_record(rank: int, record: dict[str, Any]) -> MoeCommError:
    kind = error_class(record["kind"])
    message = record["message"] or record["kind"]
    if issubclass(kind, MoeCommError):
        # The message of an error that was raised on all ranks names the rank already.
        error: MoeCommError = kind(message if RANK_PREFIX.match(message) else f"rank {rank}: {message}")
    else:
        error = RankFailed(f"rank {rank} failed with {record['kind']}: {message}")
    error.details = record["traceback"]
    if frame := record.get("frame"):
        error.add_note(f"at {frame}")
    return error


def _from_exit(rank: int, failure: Any, noticed: str) -> RankFailed:
    """Return the error for a rank without a record. ``noticed`` is the watchers' line; they kill stuck ranks."""
    who = f"rank {rank} (pid {failure.pid})"
    if failure.exitcode == ENDED_BY_WATCH:
        return RankFailed(f"{who} ended itself: a rank that it waited for was lost; the report is in the run's folder")
    if failure.exitcode >= 0:
        suffix = "" if failure.exitcode else " before its function returned"
        return RankFailed(f"{who} ended with exit code {failure.exitcode}{suffix}")
    hint = "; was it out of memory?" if failure.exitcode == -signal.SIGKILL and "stuck" not in noticed else ""
    suffix = f". {noticed}" if noticed else ""
    return RankFailed(f"{who} was killed by {signal.Signals(-failure.exitcode).name}{hint}{suffix}")


def _quiet_agent() -> None:
    """Disable the agent's log, which repeats a rank's failure several times. It is raised as one error instead."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


@contextlib.contextmanager
def _agent_of(folder: Path, may_die: Sequence[int]) -> Iterator[None]:
    """Use ``_agent_class`` as the agent of ``elastic_launch``."""
    from torch.distributed.launcher import api

    before = api.LocalElasticAgent
    api.LocalElasticAgent = _agent_class(folder, may_die)  # type: ignore[misc]
    try:
        yield
    finally:
        api.LocalElasticAgent = before  # type: ignore[misc]


def _others_go_on(folder: Path, may_die: Sequence[int], rank: int) -> bool:
    """Return whether the others go on without a rank. Before it has joined them, they would only wait for it."""
    return rank in may_die and Path(folder, JOINED, str(rank)).exists()


def _agent_class(folder: Path, may_die: Sequence[int]) -> type[Any]:
    """Return torch's agent with two changes.

    It goes on without ranks that may die, while others run. A rank fails if its process ends with code 0 before its
    function has returned: torch waits for the result of such a rank forever.
    """
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import ProcessFailure

    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            context: Any = self._pcontext
            # Read the exit codes first: the next call then receives all results that these ranks have sent.
            codes = [process.exitcode for process in context._pc.processes]
            ended = [rank for rank, code in enumerate(codes) if code == 0]
            dead = {rank for rank, code in enumerate(codes) if code}
            others_go_on = dead and all(_others_go_on(folder, may_die, rank) for rank in dead)
            result = self._without(dead) if others_go_on else super()._monitor_workers(worker_group)
            lost = [rank for rank in ended if rank not in context._return_values]
            if result.state != WorkerState.HEALTHY or not lost:
                return result
            workers = worker_group.workers
            failures = {workers[rank].global_rank: ProcessFailure(rank, workers[rank].id, 0, "") for rank in lost}
            return RunResult(WorkerState.FAILED, failures=failures)

        def _without(self, dead: set[int]) -> RunResult:
            """Return the state of the other ranks. Torch would end them."""
            context: Any = self._pcontext
            results = context._return_values
            results.update({rank: queue.get() for rank, queue in context._ret_vals.items() if not queue.empty()})
            if len(results.keys() | dead) < context.nprocs:
                return RunResult(WorkerState.HEALTHY)
            if not dead & results.keys():  # else they have died while they waited for the event, which would never end
                context._worker_finished_event.set()
                for rank in results:
                    context._pc.processes[rank].join(ENDING_S)
            context.close()
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(dead) | results)

    return Agent


@contextlib.contextmanager
def _kill_after_failure(folder: Path, may_die: Sequence[int]) -> Iterator[None]:
    """Kill the other ranks of an attempt ``ENDING_S`` after one of them has failed, while the agent waits for them.

    may_die: ranks that do not count, once they have joined the others.
    """
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        yield  # the agent kills them, later
        return
    done = threading.Event()
    thread = threading.Thread(target=_run_killer, args=(folder, done, may_die), name="ending ranks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _run_killer(folder: Path, done: threading.Event, may_die: Sequence[int]) -> None:
    alive = folder / ALIVE
    handles: dict[str, int] = {}
    failed: dict[str, float] = {}
    try:
        while not done.wait(LOOK_S):
            present = {path.name for path in alive.iterdir() if not path.name.endswith(".part")}
            for name in handles.keys() - present:
                os.close(handles.pop(name))  # its function has returned
            for name in present - handles.keys():
                try:
                    handles[name] = os.pidfd_open(int((alive / name).read_text()))
                except FileNotFoundError:
                    present.discard(name)  # its function has returned in the meantime
                except OSError:
                    pass  # its process has ended already
            for name in present:
                attempt, _, rank = name.partition(".")
                if name not in handles or connection.wait([handles[name]], 0):
                    if _others_go_on(folder, may_die, int(rank)):
                        continue
                    failed.setdefault(attempt, time.monotonic())
                elif time.monotonic() - failed.get(attempt, time.monotonic()) > ENDING_S:
                    with contextlib.suppress(OSError):
                        signal.pidfd_send_signal(handles[name], signal.SIGKILL)
            running = {name.partition(".")[0] for name in handles if not connection.wait([handles[name]], 0)}
            for name in present:
                if name.partition(".")[0] not in running:  # all ranks of that attempt have ended
                    (alive / name).unlink(missing_ok=True)
    finally:
        for handle in handles.values():
            os.close(handle)
