"""Start ranks on this host, or join those that torchrun started.

    launch(work, args, ranks=2)                    torchrun --nproc-per-node 2 script.py
        └─ torchrun's own agent, 2 processes           └─ launch(work, args) in each process
              └─ work(*args)                                 └─ work(*args)
                    with init_ranks() as ranks: ...                with init_ranks() as ranks: ...

Ranks on one host meet through a file and talk over loopback: nothing listens on the machine's other interfaces.
(torch's TCPStore does, even when it is given 127.0.0.1.)

torch is imported inside of functions: the command line loads this module for every subcommand, and torch takes seconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from moe_comm.errors import ConfigError, MoeCommError, PeerError
from moe_comm.runtime import cpu_guard
from moe_comm.runtime.launch.agent import Interrupted, RankFailed, run_agent
from moe_comm.runtime.launch.rank_main import RAISED_AT, RESTARTS_VARIABLE, STOPPING
from moe_comm.runtime.launch.users_frame import shorten

AGENT_STORE_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
STORE_VARIABLE = "MOE_COMM_STORE"
"""Path of the file through which the ranks that ``launch`` started meet."""
MAX_RANKS = 1024
AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""What torch's agent sets handlers for; ours take the first two where ranks run a function."""
SAME_PRESS_S = 1.0
"""A signal this soon after the first is taken for the same one: a terminal and a launcher may both pass it on."""


@dataclass(frozen=True)
class LocalRanks:
    """This process among the ranks.

    device: where its tensors go, "cpu" or "cuda:<local rank>". restarts: how often the ranks were started again
    because one of them failed, or hosts came or went.
    """

    rank: int
    world: int
    local_rank: int
    device: str
    restarts: int = 0


def available_cores() -> int:
    """Cores this process may use: its affinity, capped by the control group's quota; at least 1."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, -(-int(quota) // int(period)))
    return max(cores, 1)


def under_torchrun() -> bool:
    """Whether a launcher (torchrun, or ``launch``) already made this process one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(
    entry: Callable[..., Any] | str,
    args: Sequence[Any] = (),
    ranks: int = 1,
    *,
    restarts: int = 0,
    preload: Sequence[str] = (),
    tracebacks: bool = False,
) -> list[Any]:
    """Run ``entry(*args)`` in ``ranks`` processes on this host, or here if this process already is a rank.

    Args:
        entry: a function at the top level of an importable module, or the name of a module to run as
            ``python -m entry *args``.
        args: picklable arguments (strings for a module).
        ranks: how many; 1 runs a function in this process. Under torchrun its ranks are used as they are.
        restarts: how often all ranks are started again when one fails, as torchrun's ``--max-restarts``. What they
            had done is theirs to find again, from a checkpoint say. What would only fail again is not repeated:
            ``FINAL`` errors of a function. It then runs in a process of its own for one rank too.
        preload: modules that a function needs. Its ranks are then forked from one process that has loaded them, which
            spares every rank, at every start, the seconds that loading takes. They must not use torch, or start
            threads, when they are loaded. Only the first launch of a process chooses them.
        tracebacks: keep the whole traceback of a ``MoeCommError`` in its ``details``. Otherwise the error names only
            the frame of the caller's own code, and its traceback has no frames of installed packages.

    Returns:
        What each rank returned, by rank (None for a module); under torchrun only this rank's.

    Raises:
        ConfigError: ``ranks`` is out of range.
        MoeCommError: a rank raised it; the message names the rank. The earliest cause is raised, not its echoes.
        RankFailed: a rank failed otherwise or was killed.
        Interrupted: SIGINT or SIGTERM came while the ranks ran. It is passed on to ranks that run a function. Where
            all of them take SIGTERM as a request, and end with a result, that is returned and nothing is raised.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise ConfigError(f"ranks must be between 1 and {MAX_RANKS}; got {ranks}")
    cpu_guard.apply()
    if callable(entry) and (under_torchrun() or (ranks == 1 and not restarts)):
        try:
            return [entry(*args)]
        except MoeCommError as error:
            if tracebacks:
                error.details = error.details or traceback.format_exc()
            else:
                shorten(error)
            raise
    try:
        return _launch(entry, args, ranks, restarts, preload)
    except MoeCommError as error:
        if not tracebacks and not isinstance(error, RankFailed):
            error.details = ""
        raise error.with_traceback(None) from None


def _launch(
    entry: Callable[..., Any] | str, args: Sequence[Any], ranks: int, restarts: int, preload: Sequence[str]
) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="moe_comm-launch-") as folder:
        variables = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(available_cores() // ranks, 1))),
            # The agent would share a TCPStore with the ranks, and that listens on every interface.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            STORE_VARIABLE: str(Path(folder) / "ranks"),
        }
        with _environment(variables), _signal_handlers():
            if isinstance(entry, str):
                return run_agent(entry, args, ranks, Path(folder), restarts, AGENT_SIGNALS)
            with _passed_on(Path(folder)) as signals:
                try:
                    results = run_agent(entry, args, ranks, Path(folder), restarts, AGENT_SIGNALS[2:], preload)
                except (RankFailed, PeerError) as error:
                    # What the signal itself did to the ranks.
                    if signals and (isinstance(error, PeerError) or not error.details):
                        raise Interrupted(signals[0]) from None
                    raise
            if signal.SIGINT in signals:
                raise Interrupted(signal.SIGINT)
            return results


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signal_handlers() -> Iterator[None]:
    """Put back what the agent replaces, or a later Ctrl-C in this process would raise the agent's exception."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers, and the agent then leaves them alone
        return
    before = {kind: signal.getsignal(kind) for kind in AGENT_SIGNALS}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@contextlib.contextmanager
def _passed_on(folder: Path) -> Iterator[list[int]]:
    """Pass SIGINT and SIGTERM on to the ranks and go on waiting for them; yields the signals that came.

    Torch's agent would kill ranks that take long to finish what they are doing (30 s after the signal), and those that
    have finished too, which wait for each other. A later signal lets it do so.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    others = {process.pid for process in multiprocessing.active_children()}
    began = 0.0

    def stop(number: int, frame: object) -> None:
        nonlocal began
        began = began or time.monotonic()
        seen.append(number)
        (folder / STOPPING).touch()
        ranks = [process.pid for process in multiprocessing.active_children() if process.pid not in others]
        for pid in ranks:
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        if not ranks or time.monotonic() - began >= SAME_PRESS_S:
            raise SignalException(f"stopped by signal {number}", sigval=signal.Signals(number))

    for kind in AGENT_SIGNALS[:2]:
        signal.signal(kind, stop)
    yield seen


@contextlib.contextmanager
def init_ranks(device: str | None = None, timeout_s: float = 300.0) -> Iterator[LocalRanks]:
    """Join the default process group of ``torch.distributed``, and leave it at the end.

    Args:
        device: "cpu" (gloo) or "cuda" (nccl beside gloo); None takes cuda where every rank of this host has its
            own GPU. A process that is no rank makes a group of its own.
        timeout_s: how long torch's own collectives wait for a rank.

    A group that already exists is used and left alone.

    Raises:
        ConfigError: unknown device, or fewer GPUs than ranks on this host.
        PeerTimeout: under torchrun, a rank did not come.
    """
    import torch
    import torch.distributed as dist

    from moe_comm.runtime.launch import attempt  # loads torch

    cpu_guard.apply()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    restarts = int(os.environ.get(RESTARTS_VARIABLE, "0"))
    kind = _device_kind(device, local_world)
    place = f"cuda:{local_rank}" if kind == "cuda" else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
    if dist.is_initialized():
        yield LocalRanks(dist.get_rank(), dist.get_world_size(), local_rank, place, restarts)
        return
    if local_world == world and Path("/sys/class/net/lo").exists():
        # Gloo would listen on the interface of the host's name; ranks of one host need only loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store: Any = None
    if world == 1:
        store = dist.HashStore()
    elif STORE_VARIABLE in os.environ:
        # Ranks that are started again must not meet what those before them left in the file.
        path = f"{os.environ[STORE_VARIABLE]}.{restarts}"
        store = dist.FileStore(path, world)
    elif os.environ.get(AGENT_STORE_VARIABLE) == "True":
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store, restarts = attempt.join(address, rank, world, timeout_s)
    where: dict[str, Any] = {} if store is None else {"store": store, "rank": rank, "world_size": world}
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **where)
    try:
        yield LocalRanks(rank, world, local_rank, place, restarts)
    except Exception as error:
        vars(error).setdefault(RAISED_AT, time.time_ns())
        raise
    finally:
        dist.destroy_process_group()


def _device_kind(device: str | None, local_world: int) -> str:
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        return "cuda" if gpus >= local_world else "cpu"
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu or cuda; got {device!r}")
    if device == "cuda" and gpus < local_world:
        raise ConfigError(f"device cuda needs one GPU for each of the {local_world} ranks here; torch sees {gpus}")
    return device
