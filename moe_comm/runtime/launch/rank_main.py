"""The main function of a process that ``launch`` started, and the files it leaves for the launcher.

An attempt is one start of all ranks; attempt n follows n restarts.

launcher's folder/
    alive/<attempt>.<rank>      the pid of a rank; removed when its function has returned
    errors/<attempt>/<rank>     the error of a rank that failed
    stopping                    exists: ranks that start now end at once
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any

from moe_comm import errors
from moe_comm.errors import FROM_PEERS, ConfigError, InputError, MissingDependency, UnsupportedModel
from moe_comm.runtime.safe_files import replacing

RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
MAX_RESTARTS_VARIABLE = "TORCHELASTIC_MAX_RESTARTS"
STOPPING = "stopping"
"""If this file is in the launcher's folder, new ranks end at once. Torch's agent starts them regardless: its decision
only depends on the number of restarts left."""
ALIVE, ERRORS, JOINED = "alive", "errors", "joined"
"""Folders of a launch with a file for each rank: that runs, has failed, and has joined in ``init_ranks``."""
FINAL = (ConfigError, InputError, UnsupportedModel, MissingDependency)
"""Errors that the user must fix. Restarted ranks would raise them again."""
LINGER_S = 2.0
"""Maximum time for which a failed rank waits for the error records of the others; see ``_linger``."""
AGENT_POLL_S = 0.5
"""Time in which torch's agent detects that a process has ended. It polls every 0.1 s."""
RAISED_AT = "moe_comm_raised_at"
"""Attribute of an exception that left ``init_ranks``: its time in ns, before other ranks could see this one leave."""


def rank_main(environment: Mapping[str, str], entry: Callable[..., Any], args: tuple[Any, ...], folder: str) -> Any:
    """Run ``entry`` in a launched rank, and record its error for the launcher.

    Args:
        environment: variables of the launcher, if the process was forked from one with older variables; else empty.
        folder: the launcher's folder.
    """
    if Path(folder, STOPPING).exists():
        raise SystemExit(1)
    if environment:
        _apply_environment(environment)
        gc.freeze()  # collections then neither visit the preloaded modules nor copy the memory that ranks share
    returned = _end_with_launcher(interrupt=bool(environment))
    attempt, rank = os.environ.get(RESTARTS_VARIABLE, "0"), os.environ["RANK"]
    alive = Path(folder, ALIVE, f"{attempt}.{rank}")
    _write(alive, str(os.getpid()))
    try:
        result = entry(*args)
    except KeyboardInterrupt:
        # Torch would treat the rank as finished, and then wait for its result.
        raise SystemExit(128 + signal.SIGINT) from None
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code:
            raise  # the launcher reports the exit code
        exits = isinstance(error, SystemExit)
        record = {
            "time": vars(error).get(RAISED_AT, time.time_ns()),
            "kind": error_kind(error),
            "message": "the function exited with code 0 instead of returning" if exits else str(error),
            "traceback": "" if exits else traceback.format_exc(),
            "frame": user_frame(error),
        }
        if isinstance(error, FINAL):
            Path(folder, STOPPING).touch()
        errors_folder = Path(folder, ERRORS, attempt)
        errors_folder.mkdir(exist_ok=True)
        _write(errors_folder / rank, json.dumps(record))
        # With restarts left, the cause is not reported, and other ranks must not wait longer for this one.
        restarts = int(attempt) < int(os.environ.get(MAX_RESTARTS_VARIABLE, "0"))
        if not restarts or isinstance(error, (*FROM_PEERS, *FINAL)):
            _linger(errors_folder, alive.parent, attempt)
        # Not re-raised: the agent would print a traceback for every rank. The launcher reports the cause.
        raise SystemExit(1) from None
    alive.unlink(missing_ok=True)
    returned.set()
    return result


def error_kind(error: BaseException) -> str:
    """Return the name of the nearest class of ``error`` in ``moe_comm.errors``, or else that of its class."""
    own = [cls for cls in type(error).__mro__ if cls.__module__ == errors.__name__]
    return (own or [type(error)])[0].__name__


def error_records(errors_folder: Path) -> list[Path]:
    """Return the error records of one attempt. Each file is named by its rank."""
    return [path for path in errors_folder.iterdir() if not path.suffix] if errors_folder.is_dir() else []


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    with replacing(path) as file:
        file.write(text.encode())


def _linger(errors_folder: Path, alive_folder: Path, attempt: str) -> None:
    """Wait, up to ``LINGER_S``, until all ranks that run have recorded their errors.

    The agent stops all ranks as soon as one ends. A rank that failed because of its peer could end before the peer has
    recorded the cause. The agent also needs ``AGENT_POLL_S`` to detect that a peer was killed. If this rank ended
    earlier, the agent might report it as the first failure.
    """
    began = time.monotonic()
    deadline = began + LINGER_S
    while time.monotonic() < deadline:
        reported = {path.name for path in error_records(errors_folder)}
        started = [path for path in alive_folder.glob(f"{attempt}.*") if not path.name.endswith(".part")]
        pending = [path for path in started if path.name.partition(".")[2] not in reported and _is_running(path)]
        world = int(os.environ["WORLD_SIZE"])
        if (
            not pending
            and len(started) >= world
            and (len(reported) >= world or time.monotonic() - began > AGENT_POLL_S)
        ):
            return
        time.sleep(0.02)


def _is_running(alive: Path) -> bool:
    """Whether the process of a rank runs and is not stopped."""
    try:
        state = Path("/proc", alive.read_text(), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZXTt"


def _apply_environment(environment: Mapping[str, str]) -> None:
    """Apply the launcher's variables, except those that torch's agent has set for this rank."""
    agent_set = (name for name in os.environ if name in _RANK_VARIABLES or name.startswith("TORCHELASTIC_"))
    own = {name: os.environ[name] for name in agent_set}
    os.environ.clear()
    os.environ.update({**environment, **own})
    threads = environment.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules and threads.isdecimal() and int(threads):
        # Torch reads the variable when it is loaded, which was before the fork.
        sys.modules["torch"].set_num_threads(int(threads))


_RANK_VARIABLES = {
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
"""Variables that torch's agent sets for each rank, besides TORCHELASTIC_*."""


def _end_with_launcher(interrupt: bool) -> threading.Event:
    """End this process when the launcher has ended and the returned event is set: the rank's function has returned.

    Otherwise torch would wait forever for the launcher to receive the result. ``interrupt`` sends SIGINT when the
    launcher has ended. The kernel does so only for ranks that the launcher started itself, not for forked ones.
    """
    returned = threading.Event()
    parent = multiprocessing.parent_process()
    if parent is None:
        return returned
    sentinel = parent.sentinel

    def watch() -> None:
        with contextlib.suppress(OSError):
            connection.wait([sentinel])
            if interrupt:
                os.kill(os.getpid(), signal.SIGINT)
            returned.wait()
            os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
    return returned


_OURS = tuple(f"{Path(__file__).parents[3] / name}/" for name in ("moe_comm", "moe_plan"))
_INSTALLED = (
    *_OURS,
    *(sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen ",
)


def user_frame(error: BaseException) -> str:
    """Return the innermost frame of user code as ``file, line n, in name: source``, or ""."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_installed(frame.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f"{last.filename}, line {last.lineno}, in {last.name}: {last.line or ''}".rstrip(": ")


def hide_installed_frames(error: BaseException) -> None:
    """Remove the frames of installed packages from the traceback of ``error``, except the outermost one."""
    tb = error.__traceback__
    while tb is not None:
        following: TracebackType | None = tb.tb_next
        while following is not None and _is_installed(following.tb_frame.f_code.co_filename):
            following = following.tb_next
        tb.tb_next = following
        tb = following


def _is_installed(filename: str) -> bool:
    return filename.startswith(_INSTALLED)
