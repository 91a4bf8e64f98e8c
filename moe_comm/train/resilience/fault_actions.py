"""The actions of injected faults on this process, its host, and files."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from moe_comm.errors import ConfigError
from moe_comm.observe.faults import FaultSpec
from moe_comm.train.checkpoint.folder import COMPLETE, MANIFEST, METADATA, complete_checkpoints

EXIT_CODE = 17
LINK = "link0"
"""Network interface of a host that ``moe_comm.bench.hosts`` simulates with a network namespace."""
COMMAND_TIMEOUT_S = 10.0


def execute(fault: FaultSpec) -> None:
    """Execute a fault. Returns if the rank survives it."""
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "segv":
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
            ctypes.string_at(0)
        case "exit":
            os._exit(EXIT_CODE)
        case "hold_gil":
            thread = threading.Thread(target=_hold_gil, args=(fault.seconds,), name="holds the GIL", daemon=True)
            thread.start()
            thread.join()
        case "slow_cpu":
            end = time.monotonic() + fault.seconds
            while time.monotonic() < end:
                sum(range(1000))
        case "slow_sleep":
            time.sleep(fault.seconds)
        case "full_shm":
            _fill("/dev/shm", fault.mib << 20, fault.seconds)


def _hold_gil(seconds: float) -> None:
    """Wait in C without releasing the interpreter's lock."""
    end = time.monotonic() + seconds
    library = ctypes.PyDLL(None)
    while (remaining := end - time.monotonic()) > 0:
        library.poll(None, 0, min(int(remaining * 1000) + 1, 1 << 30))


def _fill(folder: str, max_bytes: int, seconds: float) -> None:
    """Allocate the free space of ``folder``, at most ``max_bytes``, in an anonymous file for ``seconds``."""
    space = os.statvfs(folder)
    size = min(space.f_bavail * space.f_frsize, max_bytes)
    with tempfile.TemporaryFile(dir=folder) as file:
        with contextlib.suppress(OSError):  # another process has used the space
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
        time.sleep(seconds)


def choose_file(checkpoints: Path, kind: str, rng: random.Random) -> Path | None:
    """Return a file of the newest complete checkpoint that ``kind`` can damage, or None.

    The marker of completeness is never returned: without it, the checkpoint would be ignored.
    """
    newest = complete_checkpoints(checkpoints, lenient=True)[-1:]
    if not newest or newest[0].path.is_symlink():  # a link may lead to a checkpoint of another run
        return None
    folder = newest[0].path
    names = sorted(folder.glob("rank-*"))
    if kind != "checkpoint_missing":
        names += [folder / METADATA, folder / MANIFEST]
    existing = [path for path in names if path.exists() and path.name != COMPLETE]
    return rng.choice(existing) if existing else None


def damage(path: Path, kind: str, rng: random.Random) -> None:
    """Truncate ``path`` or flip a bit in it, at a random offset, or delete it."""
    if kind == "checkpoint_missing":
        path.unlink()
        return
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        offset = rng.randrange(os.fstat(handle).st_size)
        if kind == "checkpoint_truncate":
            os.ftruncate(handle, offset)
        else:
            os.pwrite(handle, bytes([os.pread(handle, 1, offset)[0] ^ 1 << rng.randrange(8)]), offset)
    finally:
        os.close(handle)


def check_link() -> str:
    """Check that this rank's host has its own network link with a rate limit (a token bucket filter).

    Raises:
        ConfigError: it does not; the message says what to do.
    """
    problem = ""
    if os.path.exists("/proc/1/ns/net") and _same_network():
        problem = "this rank is in the network namespace of the machine"
    elif LINK not in {name for _, name in socket.if_nameindex()}:
        problem = f"this rank's host has no interface {LINK}"
    elif shutil.which("tc") is None:
        problem = "tc is not installed (package iproute2)"
    else:
        with contextlib.suppress(ConfigError):
            _shape()
            return ""
        problem = f"the link of this host is not shaped, or tc may not be run by user id {os.geteuid()}"
    raise ConfigError(f"slow_link: {problem}; it needs ranks on hosts of moe_comm.bench.hosts (run_on_hosts), as root")


def slow_link(mbit: float) -> Callable[[], None]:
    """Limit this host's link to ``mbit`` Mbit/s. Returns a function that restores its rate."""
    original = _shape()
    _tc("replace", {**original, "rate": f"{mbit}mbit"})
    return lambda: _tc("replace", original)


def link_shape() -> str:
    """Return the shaping of this host's link as JSON, for ``shape_link``."""
    return json.dumps(_shape())


def shape_link(shape: str) -> None:
    """Shape this host's link. ``shape`` is a result of ``link_shape``."""
    _tc("replace", json.loads(shape))


def _same_network() -> bool:
    with contextlib.suppress(OSError):
        return os.stat("/proc/1/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino
    return True


def _shape() -> dict[str, str]:
    """Return rate, burst and latency of the link's token bucket filter (tbf), as tc prints them."""
    words = _run("qdisc", "show", "dev", LINK).split()
    shape: dict[str, str] = {key: words[words.index(key) + 1] for key in ("rate", "burst", "lat") if key in words}
    if "tbf" not in words or len(shape) != 3:
        raise ConfigError(f"{LINK} is not shaped by tbf: {' '.join(words)}")
    return shape


def _tc(verb: str, shape: dict[str, str]) -> None:
    rate, burst, latency = shape["rate"], shape["burst"], shape["lat"]
    _run("qdisc", verb, "dev", LINK, "root", "tbf", "rate", rate, "burst", burst, "latency", latency)


def _run(*arguments: str) -> str:
    result = subprocess.run(("tc", *arguments), capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if result.returncode:
        raise ConfigError(f"tc {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout
