"""Torch's elastic agent as ``launch`` uses it: it starts ranks, sees one fail, ends the others, and starts all again.

With modules to load beforehand, ranks are forked from a server process that has loaded them: torch and the rest take
seconds of each rank's processor time, at every restart. The server has made no tensor, so it runs no threads that a
fork would lose.

torch is imported inside of ``run_agent``: the command line loads this module for every subcommand.
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
from moe_comm.runtime.launch.rank_main import ALIVE, ERRORS, STOPPING, rank_main, recorded

ENDING_S = 5.0
"""What the other ranks get to end by themselves, after one has failed. Torch's agent gives 30 s to those that do not
answer SIGTERM, stopped ones among them."""
LOOK_S = 0.1
ENDED_BY_WATCH = 75
"""Exit code of a rank that ended itself because its main thread did not come out of a wait for a culprit."""
TORCH_ECHO = re.compile(
    r"gloo.*(Connection (closed|reset) by peer|Broken pipe)|ncclRemoteError", re.DOTALL | re.IGNORECASE
)
"""What torch's own collectives say of a rank that is gone; also where it goes while the others still join."""
OF_A_RANK = re.compile(r"rank (\d+): ")
NOTICED = "Noticed: "
"""What ranks that watch each other add to an error begins with it, and goes on to the end of the line."""


class RankFailed(MoeCommError):
    """A rank ended with an error that is not one of ours, or was killed. ``details`` holds its traceback."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class Interrupted(MoeCommError):
    """The launcher was told to stop by a signal, and its ranks have ended."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


def run_agent(
    entry: Callable[..., Any] | str,
    args: Sequence[Any],
    ranks: int,
    folder: Path,
    restarts: int,
    signals: Sequence[signal.Signals],
    preload: Sequence[str] = (),
) -> list[Any]:
    """Run the ranks to their end; see ``launch``.

    Args:
        folder: empty, of this launch alone.
        signals: what the agent itself answers by ending the ranks; it kills those that take more than 30 s.
        preload: modules to fork the ranks from; none: each starts a fresh interpreter.

    Raises:
        MoeCommError: as ``launch``.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quiet_agent()
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
    for name in (ERRORS, ALIVE):
        (folder / name).mkdir()
    if preload:
        multiprocessing.set_forkserver_preload(list(preload))
    environment = dict(os.environ) if preload else {}
    try:
        if callable(entry):
            with _ended_in_time(folder / ALIVE):
                results = elastic_launch(config, rank_main)(environment, entry, tuple(args), str(folder))
        else:
            results = elastic_launch(config, sys.executable)("-m", entry, *args)
    except ChildFailedError as error:
        # Ranks that are started again only to end leave no record: what those before them left is the cause.
        attempts = [int(path.name) for path in (folder / ERRORS).iterdir()] or [0]
        attempt = max(attempts) if (folder / STOPPING).exists() else restarts
        raise _cause(error.failures, folder / ERRORS / str(attempt)) from None
    except SignalException as error:
        raise Interrupted(int(error.sigval)) from None
    return [results.get(rank) for rank in range(ranks)]


def class_of(kind: str) -> type[Exception]:
    """The class of ours with that name; plain ``Exception`` for anything else."""
    found = getattr(errors, kind, Exception)
    return found if isinstance(found, type) and issubclass(found, Exception) else Exception


def _cause(failures: dict[int, Any], errors_folder: Path) -> MoeCommError:
    """The error to raise for a failed run: the earliest cause rather than what it did to the other ranks."""
    records = {int(path.name): json.loads(path.read_text()) for path in recorded(errors_folder)}
    by_time = sorted(records, key=lambda rank: records[rank]["time"])
    causes = [rank for rank in by_time if not _is_echo(records[rank])]
    # The agent ends the remaining ranks with SIGTERM, and some end themselves; any other end without a record is a
    # cause too.
    unrecorded = sorted(failures.keys() - records.keys())
    silent = [rank for rank in unrecorded if failures[rank].exitcode not in (-signal.SIGTERM, ENDED_BY_WATCH)]
    lines = [line for rank in by_time for line in records[rank]["traceback"].splitlines()]
    noticed = next((NOTICED + line.partition(NOTICED)[2] for line in lines if NOTICED in line), "")
    for rank in (*causes, *silent, *by_time, *sorted(failures)):
        if rank not in records:
            return _from_exit(rank, failures[rank], noticed)
        found = OF_A_RANK.match(records[rank]["message"])
        first = int(found[1]) if found else rank
        if found and first in records and records[rank]["message"][found.end() :] == records[first]["message"]:
            rank = first  # where it was raised, and not where it was told of
        return _from_record(rank, records[rank])
    return RankFailed("the ranks failed and left no reason")


def _is_echo(record: dict[str, Any]) -> bool:
    """Whether the error says only that another rank is gone or has raised, in our words or in torch's."""
    return issubclass(class_of(record["kind"]), FROM_PEERS) or bool(TORCH_ECHO.search(record["message"]))


def _from_record(rank: int, record: dict[str, Any]) -> MoeCommError:
    kind = class_of(record["kind"])
    message = record["message"] or record["kind"]
    if issubclass(kind, MoeCommError):
        # An error that another rank has found names that rank already.
        error: MoeCommError = kind(message if OF_A_RANK.match(message) else f"rank {rank}: {message}")
    else:
        error = RankFailed(f"rank {rank} failed with {record['kind']}: {message}")
    error.details = record["traceback"]
    if frame := record.get("frame"):
        error.add_note(f"at {frame}")
    return error


def _from_exit(rank: int, failure: Any, noticed: str) -> RankFailed:
    """noticed: what the ranks had found out; one that was stuck was killed by them."""
    who = f"rank {rank} (pid {failure.pid})"
    if failure.exitcode == ENDED_BY_WATCH:
        return RankFailed(f"{who} ended itself: a rank that it waited for was lost; the report is in the run's folder")
    if failure.exitcode >= 0:
        return RankFailed(f"{who} ended with exit code {failure.exitcode}")
    hint = "; was it out of memory?" if failure.exitcode == -signal.SIGKILL and "stuck" not in noticed else ""
    told = f". {noticed}" if noticed else ""
    return RankFailed(f"{who} was killed by {signal.Signals(-failure.exitcode).name}{hint}{told}")


def _quiet_agent() -> None:
    """The agent logs a rank's failure several times over; what it knows is raised as one error instead."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


@contextlib.contextmanager
def _ended_in_time(alive: Path) -> Iterator[None]:
    """Kill the other ranks of an attempt ``ENDING_S`` after one of them has failed, while the agent waits for them."""
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        yield  # the agent does it, later
        return
    over = threading.Event()
    thread = threading.Thread(target=_end_in_time, args=(alive, over), name="ending ranks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _end_in_time(alive: Path, over: threading.Event) -> None:
    handles: dict[str, int] = {}
    failed: dict[str, float] = {}
    try:
        while not over.wait(LOOK_S):
            present = {path.name for path in alive.iterdir() if not path.name.endswith(".part")}
            for name in handles.keys() - present:
                os.close(handles.pop(name))  # its function has returned
            for name in present - handles.keys():
                try:
                    handles[name] = os.pidfd_open(int((alive / name).read_text()))
                except FileNotFoundError:
                    present.discard(name)  # its function has returned since
                except OSError:
                    pass  # its process has ended before it was looked at
            for name in present:
                attempt = name.partition(".")[0]
                if name not in handles or connection.wait([handles[name]], 0):
                    failed.setdefault(attempt, time.monotonic())
                elif time.monotonic() - failed.get(attempt, time.monotonic()) > ENDING_S:
                    with contextlib.suppress(OSError):
                        signal.pidfd_send_signal(handles[name], signal.SIGKILL)
            running = {name.partition(".")[0] for name in handles if not connection.wait([handles[name]], 0)}
            for name in present:
                if name.partition(".")[0] not in running:  # an attempt that is over
                    (alive / name).unlink(missing_ok=True)
    finally:
        for handle in handles.values():
            os.close(handle)
