"""What runs inside a process that ``launch`` started: the rank's function, and what it leaves for the launcher to read.

launcher's folder/
    alive/<attempt>.<rank>      the process id of a rank; gone when its function has returned
    errors/<attempt>/<rank>     why a rank failed
    stopping                    ranks that start from now on end at once
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import connection
from pathlib import Path
from typing import Any

from moe_comm.errors import FROM_PEERS, ConfigError, InputError, MissingDependency, UnsupportedModel
from moe_comm.runtime.launch.users_frame import users_frame

RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
MOST_RESTARTS_VARIABLE = "TORCHELASTIC_MAX_RESTARTS"
STOPPING = "stopping"
"""File in the launcher's folder that tells ranks which start from now on to end at once. Torch's agent cannot be told
not to start them: it asks how many restarts are left, not why."""
ALIVE, ERRORS = "alive", "errors"
FINAL = (ConfigError, InputError, UnsupportedModel, MissingDependency)
"""What the user has to mend; ranks that are started again would meet it again."""
LINGER_S = 2.0
SEEN_S = 0.5
"""Within this, torch's agent has seen that a process has ended: it looks every 0.1 s."""
RAISED_AT = "moe_comm_raised_at"
"""Attribute of an exception that left ``init_ranks``: when, before leaving the group let the peers notice; ns."""


def rank_main(environment: Mapping[str, str], entry: Callable[..., Any], args: tuple[Any, ...], folder: str) -> Any:
    """Body of a launched rank: run ``entry`` and leave a record of what went wrong for the launcher to report.

    Args:
        environment: the launcher's variables, where the process was forked from one that may have older ones; else {}.
    """
    if Path(folder, STOPPING).exists():
        raise SystemExit(1)
    if environment:
        _take_over(environment)
    returned = _end_with_launcher(tell=bool(environment))
    attempt, rank = os.environ.get(RESTARTS_VARIABLE, "0"), os.environ["RANK"]
    alive = Path(folder, ALIVE, f"{attempt}.{rank}")
    _write(alive, str(os.getpid()))
    try:
        result = entry(*args)
    except KeyboardInterrupt:
        # Torch would let the rank end as if it were done, and then wait for its result.
        raise SystemExit(128 + signal.SIGINT) from None
    except SystemExit as error:
        if not error.code:
            alive.unlink(missing_ok=True)
        raise
    except Exception as error:
        record = {
            "time": vars(error).get(RAISED_AT, time.time_ns()),
            "kind": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
            "frame": users_frame(error),
        }
        if isinstance(error, FINAL):
            Path(folder, STOPPING).touch()
        errors_folder = Path(folder, ERRORS, attempt)
        errors_folder.mkdir(exist_ok=True)
        _write(errors_folder / rank, json.dumps(record))
        # Where ranks are started again nobody asks for the cause, and who waits for this rank must not wait longer.
        again = int(attempt) < int(os.environ.get(MOST_RESTARTS_VARIABLE, "0"))
        if not again or isinstance(error, (*FROM_PEERS, *FINAL)):
            _linger(errors_folder, alive.parent, attempt)
        # Not re-raised: the agent would print a traceback for every rank; the launcher speaks for all.
        raise SystemExit(1) from None
    alive.unlink(missing_ok=True)
    returned.set()
    return result


def recorded(errors_folder: Path) -> list[Path]:
    """The records of one attempt's ranks, each named by its rank."""
    return [path for path in errors_folder.iterdir() if not path.suffix] if errors_folder.is_dir() else []


def _write(path: Path, text: str) -> None:
    """All of it or nothing, for who reads it."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.rename(path)


def _linger(errors_folder: Path, alive_folder: Path, attempt: str) -> None:
    """Let ranks that failed at the same time say why: the agent stops all others as soon as it sees one end, and an
    echo (a peer that finds its connection closed) can end before its cause has written its record. Ranks that have
    ended or were stopped will say no more; of those that ended, the agent learns a moment later how. If this one were
    gone too by then, the agent might take it for the first."""
    began = time.monotonic()
    deadline = began + LINGER_S
    while time.monotonic() < deadline:
        said = {path.name for path in recorded(errors_folder)}
        others = (path for path in alive_folder.glob(f"{attempt}.*") if not path.name.endswith(".part"))
        silent = [path for path in others if path.name.partition(".")[2] not in said and _can_speak(path)]
        came = sum(1 for path in alive_folder.glob(f"{attempt}.*") if not path.name.endswith(".part"))
        world = int(os.environ["WORLD_SIZE"])
        if not silent and came >= world and (len(said) >= world or time.monotonic() - began > SEEN_S):
            return
        time.sleep(0.02)


def _can_speak(alive: Path) -> bool:
    """Whether the rank is a process that runs."""
    try:
        state = Path("/proc", alive.read_text(), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZXTt"


def _take_over(environment: Mapping[str, str]) -> None:
    """The launcher's variables, but for those that torch's agent has just set for this rank."""
    own = {name: value for name, value in os.environ.items() if name in _OF_RANK or name.startswith("TORCHELASTIC_")}
    os.environ.clear()
    os.environ.update({**environment, **own})
    threads = environment.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules and threads.isdecimal() and int(threads):
        # Read when torch was loaded, before this process was forked.
        sys.modules["torch"].set_num_threads(int(threads))


_OF_RANK = {
    "LOCAL_RANK",
    "RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}
"""What torch's agent tells each rank, beside what begins with TORCHELASTIC_."""


def _end_with_launcher(tell: bool) -> threading.Event:
    """Do not outlive the launcher, but for what the rank's function still does; to be set when that has returned: torch
    would then wait for the launcher to take the result.

    tell: send this process SIGINT when the launcher is gone. Ranks that it starts itself are told so by the kernel,
    which looks at the process that a rank was forked from.
    """
    returned = threading.Event()
    parent = multiprocessing.parent_process()
    if parent is None:
        return returned
    sentinel = parent.sentinel

    def watch() -> None:
        with contextlib.suppress(OSError):
            connection.wait([sentinel])
            if tell:
                os.kill(os.getpid(), signal.SIGINT)
            returned.wait()
            os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
    return returned
