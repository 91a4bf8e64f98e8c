"""Start ranks on this host, or join those that torchrun started.

    launch(work, args, ranks=2)                    torchrun --nproc-per-node 2 script.py
        └─ torchrun's own agent, 2 processes           └─ launch(work, args) in each process
              └─ work(*args)                                 └─ work(*args)
                    with init_ranks() as ranks: ...                with init_ranks() as ranks: ...

Ranks of one host rendezvous through a file and communicate over loopback. Nothing listens on other interfaces of the
machine. (Torch's TCPStore does, even if its address is 127.0.0.1.)

torchrun's agent has one key-value store for a whole run, and all attempts of its ranks use it. Torch creates no new
store for a restart, and its keys do not contain the attempt (pytorch issue 167288). So a restarted rank may read the
address of a dead one, connect to it, and fail or hang. The number of restarts does not identify the attempt either:
each host counts its own. Therefore rank 0 creates a name for the attempt, and sends it to the ranks that request it:

    rank r   here/r = nonce ────────▶ rank 0        the answer to a nonce of a dead rank is never read
    rank 0   name/nonce = attempt ──▶ rank r
    rank r   attempt/r = "" ────────▶ rank 0        rank 0 polls until all ranks have set this

The name begins with a number that the store counts. So all ranks know the number of previous attempts, even if agents
count differently (a host was replaced) or not at all (hosts joined or left).

torch is imported inside functions: the command line loads this module for every subcommand, and torch takes seconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_comm.errors import ConfigError, MoeCommError, PeerError, PeerTimeout
from moe_comm.runtime import cpu_guard
from moe_comm.runtime.launch.agent import AGENT_SIGNALS, Interrupted, RankFailed, run_agent
from moe_comm.runtime.launch.rank_main import JOINED, RAISED_AT, RESTARTS_VARIABLE, STOPPING, hide_installed_frames
from moe_comm.runtime.seconds import seconds_of

if TYPE_CHECKING:
    from torch.distributed import Store

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OTHER_LAUNCHERS = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun (Open MPI)": "OMPI_COMM_WORLD_SIZE", "mpiexec": "PMI_SIZE"}
"""Variables with the number of processes that a launcher started, which does not set those of torchrun."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_UNSET = "unset them to start ranks on this host"
AGENT_STORE_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
STORE_VARIABLE = "MOE_COMM_STORE"
"""Variable with the path of the file store of the ranks that ``launch`` started."""
MAX_RANKS = 1024
JOIN_POLL_S = 0.01
"""Seconds between two checks of rank 0 for ranks that join an attempt."""
_joined: set[tuple[str, int]] = set()
"""Addresses of agents whose attempt this process has joined."""
SAME_SIGNAL_S = 1.0
"""A signal this soon after the first one is a duplicate: a terminal and a launcher may both send it."""


@dataclass(frozen=True)
class RankEnvironment:
    """This rank, according to the environment.

    Attributes:
        one_host: all ranks run on this host.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    one_host: bool


def rank_environment() -> RankEnvironment | None:
    """Return the rank that a launcher (torchrun, an operator, or ``launch``) made this process; None: no rank.

    A variable that is empty counts as unset, and so does -1 as LOCAL_RANK.
    """
    given = {name: text for name in _VARIABLES if (text := os.environ.get(name, "").strip())}
    if given.get("LOCAL_RANK") == "-1":  # an old convention of scripts for "not distributed"
        del given["LOCAL_RANK"]
    if not given:
        for launcher, name in _OTHER_LAUNCHERS.items():
            text = os.environ.get(name, "").strip()
            shell = name.startswith("SLURM") and "SLURM_PTY_PORT" in os.environ  # only one of the tasks has a terminal
            if text.isdecimal() and int(text) > 1 and not shell:
                raise ConfigError(
                    f"{launcher} started {text} processes ({name}), but RANK and WORLD_SIZE are not set, so each of "
                    f"them would work alone: start one torchrun per host, set RANK, WORLD_SIZE, LOCAL_RANK, "
                    f"LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process, or unset {name}"
                )
        return None
    shown = ", ".join(f"{name}={text!r}" for name, text in given.items())
    if missing := [name for name in _VARIABLES[:2] if name not in given]:
        raise ConfigError(
            f"the environment has {shown}, but not {' and '.join(missing)}: a rank needs both RANK and WORLD_SIZE; "
            f"set them, or {_UNSET.replace('them', ' and '.join(given))}"
        )
    if wrong := [name for name, text in given.items() if not (text.isascii() and text.isdecimal())]:
        raise ConfigError(f"{' and '.join(wrong)} must be an integer, at least 0; the environment has {shown}")
    values = {name: int(text) for name, text in given.items()}
    rank, world = values["RANK"], values["WORLD_SIZE"]
    if not rank < world:
        raise ConfigError(
            f"RANK must be less than WORLD_SIZE, which is at least 1; the environment has {shown}; correct it, or "
            f"{_UNSET}"
        )
    one_host = values.get("LOCAL_WORLD_SIZE") == world or os.environ.get("MASTER_ADDR") in _LOOPBACK or world == 1
    local_world = values.get("LOCAL_WORLD_SIZE", world if one_host else 1)
    local_rank = values.get("LOCAL_RANK", rank if one_host and local_world == world else 0)
    if "LOCAL_WORLD_SIZE" in values and not local_rank < local_world <= world:
        raise ConfigError(
            f"LOCAL_RANK must be less than LOCAL_WORLD_SIZE, which is at most WORLD_SIZE; the environment has {shown}"
        )
    return RankEnvironment(rank, world, local_rank, local_world, one_host)


def under_torchrun() -> bool:
    """Whether a launcher (torchrun, or ``launch``) started this process as a rank. The variables are not checked."""
    return bool(os.environ.get("RANK") and os.environ.get("WORLD_SIZE"))


def ranks_to_use(requested: int | None, default: int = 1) -> int:
    """Return the number of ranks: ``requested``; if None, that of the launcher of this rank, else ``default``.

    Raises:
        ConfigError: a launcher started this rank with another number of ranks than ``requested``; or as
            ``rank_environment``.
    """
    environment = rank_environment()
    if environment is None:
        return default if requested is None else requested
    if requested is not None and requested != environment.world:
        raise ConfigError(
            f"{requested} rank(s) are requested, but this process is rank {environment.rank} of {environment.world} "
            f"that torchrun or an operator started (RANK={environment.rank}, WORLD_SIZE={environment.world}); pass "
            f"--ranks {environment.world} (parallel.ranks={environment.world}), start {requested}, or unset RANK and "
            f"WORLD_SIZE to start ranks on this host"
        )
    return environment.world


@dataclass(frozen=True)
class LocalRanks:
    """Rank and device of this process.

    Attributes:
        device: "cpu" or "cuda:<local rank>".
        restarts: number of earlier attempts: restarts after a failure, or after hosts joined or left.
    """

    rank: int
    world: int
    local_rank: int
    device: str
    restarts: int = 0


def available_cores() -> int:
    """Return the number of cores for this process: its affinity, limited by the quota of its control group."""
    return within_quota(len(os.sched_getaffinity(0)))


def within_quota(cores: int) -> int:
    """Return ``cores``, limited by the quota of this process's control group, but at least 1."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, -(-int(quota) // int(period)))
    return max(cores, 1)


def launch(
    entry: Callable[..., Any] | str,
    args: Sequence[Any] = (),
    ranks: int | None = None,
    *,
    restarts: int = 0,
    preload: Sequence[str] = (),
    tracebacks: bool = False,
    may_die: Sequence[int] = (),
) -> list[Any]:
    """Run ``entry(*args)`` in ``ranks`` processes on this host, or in this process if it is a rank already.

    Args:
        entry: a function at the top level of an importable module, or the name of a module, which runs as
            ``python -m entry *args``.
        args: picklable arguments; strings for a module.
        ranks: number of processes. With 1, a function runs in this process. Under torchrun, a function runs on its
            ranks, which must be as many. None: the ranks of torchrun, else 1.
        restarts: how often all ranks are restarted when one fails, like torchrun's ``--max-restarts``. The function
            must find its earlier progress itself, for example in a checkpoint. After a ``FINAL`` error of a function,
            which would occur again, ranks are not restarted. With restarts, one rank runs in its own process too.
        preload: modules that a function needs. The ranks are then forked from one process that has loaded them, which
            saves seconds at each start. The modules must not use torch or start threads when they are imported. Only
            the first launch of a process sets them.
        tracebacks: keep the traceback of a ``MoeCommError`` in its ``details``. By default, the error only names the
            frame of the user's code, and its traceback has no frames of installed packages.
        may_die: ranks of a function without which the others go on, however they end after ``init_ranks``.

    Returns:
        The result of each rank, by rank (None for a module, and of a rank that has died). Under torchrun, only that of
        this rank.

    Raises:
        ConfigError: ``ranks`` is out of range, or a function is to run on another number of ranks than torchrun
            started; or the environment is invalid, see ``rank_environment``.
        MoeCommError: a rank raised it; the message names the rank. If several failed, the earliest cause is raised.
        RankFailed: a rank failed with another error or was killed.
        Interrupted: SIGINT or SIGTERM was received while the ranks ran. It is forwarded to ranks that run a function.
            If they all handle SIGTERM and return a result, the result is returned and nothing is raised.
    """
    if ranks is not None and not 1 <= ranks <= MAX_RANKS:
        raise ConfigError(f"ranks must be between 1 and {MAX_RANKS}; got {ranks}")
    ranks = ranks_to_use(ranks) if callable(entry) else ranks or 1
    cpu_guard.apply()
    if callable(entry) and (under_torchrun() or (ranks == 1 and not restarts)):
        try:
            return [entry(*args)]
        except MoeCommError as error:
            if tracebacks:
                error.details = error.details or traceback.format_exc()
            else:
                hide_installed_frames(error)
            raise
    try:
        return _launch(entry, args, ranks, restarts, preload, may_die)
    except MoeCommError as error:
        if not tracebacks and not isinstance(error, RankFailed):
            error.details = ""
        raise error.with_traceback(None) from None


def _launch(
    entry: Callable[..., Any] | str,
    args: Sequence[Any],
    ranks: int,
    restarts: int,
    preload: Sequence[str],
    may_die: Sequence[int],
) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="moe_comm-launch-") as folder:
        variables = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(available_cores() // ranks, 1))),
            # The agent would share a TCPStore with the ranks, which listens on every interface.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            STORE_VARIABLE: str(Path(folder) / "ranks"),
        }
        with _environment(variables), _signal_handlers():
            if isinstance(entry, str):
                return run_agent(entry, args, ranks, Path(folder), restarts)
            with _forward_signals(Path(folder)) as signals:
                try:
                    results = run_agent(entry, args, ranks, Path(folder), restarts, preload, may_die)
                except (RankFailed, PeerError) as error:
                    # The signal itself has ended the ranks.
                    if signals and (isinstance(error, PeerError) or not error.details):
                        raise Interrupted(signals[0]) from None
                    raise
            if signal.SIGINT in signals:
                raise Interrupted(signal.SIGINT)
            return results


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    previous = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that the agent replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers, so the agent does not set them either
        return
    previous = {kind: signal.getsignal(kind) for kind in AGENT_SIGNALS}
    try:
        yield
    finally:
        for kind, handler in previous.items():
            signal.signal(kind, handler)


@contextlib.contextmanager
def _forward_signals(folder: Path) -> Iterator[list[int]]:
    """Forward SIGINT and SIGTERM to the ranks and continue to wait for them. Yields the list of received signals.

    Torch's agent would kill ranks that need more than 30 s, and ranks that have finished and wait for others. A later
    signal makes it do so.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    other_children = {process.pid for process in multiprocessing.active_children()}
    began = 0.0

    def stop(number: int, frame: object) -> None:
        nonlocal began
        began = began or time.monotonic()
        received.append(number)
        (folder / STOPPING).touch()
        ranks = [process.pid for process in multiprocessing.active_children() if process.pid not in other_children]
        for pid in ranks:
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        if not ranks or time.monotonic() - began >= SAME_SIGNAL_S:
            raise SignalException(f"stopped by signal {number}", sigval=signal.Signals(number))

    for kind in AGENT_SIGNALS[:2]:
        signal.signal(kind, stop)
    yield received


@contextlib.contextmanager
def init_ranks(device: str | None = None, timeout_s: float = 300.0) -> Iterator[LocalRanks]:
    """Initialise the default process group of ``torch.distributed``, and destroy it at the end.

    An existing process group is used and not destroyed. A process that is not a rank gets a group of one rank.

    Args:
        device: "cpu" (gloo) or "cuda" (nccl and gloo). None: cuda if each rank of this host has its own GPU.
        timeout_s: timeout of torch's own collectives.

    Raises:
        ConfigError: unknown device, fewer GPUs than ranks on this host, or an invalid timeout or environment.
        PeerTimeout: under torchrun, a rank did not join in time.
    """
    import torch
    import torch.distributed as dist

    cpu_guard.apply()
    timeout_s = seconds_of("timeout_s", timeout_s)
    if dist.is_initialized():  # the variables for a rendezvous are not needed if there is a process group
        local = [os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
        local_rank, local_world = (int(text) if text.isdecimal() else n for n, text in enumerate(local))
        own = RankEnvironment(0, 1, local_rank, local_world, one_host=True)
    else:
        own = rank_environment() or RankEnvironment(0, 1, 0, 1, one_host=True)
    restarts = int(os.environ.get(RESTARTS_VARIABLE, "0"))
    kind = _device_kind(device, own.local_world)
    local_device = f"cuda:{own.local_rank}" if kind == "cuda" else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(own.local_rank)
    if dist.is_initialized():
        yield LocalRanks(dist.get_rank(), dist.get_world_size(), own.local_rank, local_device, restarts)
        return
    rank, world = own.rank, own.world
    if own.one_host and Path("/sys/class/net/lo").exists():
        # Gloo would listen on the interface of the host name. Ranks of one host only need loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store: Any = None
    if world == 1:
        store = dist.HashStore()
    elif STORE_VARIABLE in os.environ:
        # Restarted ranks must not read the entries of the previous attempt.
        path = f"{os.environ[STORE_VARIABLE]}.{restarts}"
        store = dist.FileStore(path, world)
    elif os.environ.get(AGENT_STORE_VARIABLE) == "True":
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store, restarts = _join(address, rank, world, timeout_s)
    elif not os.environ.get("MASTER_ADDR") or not os.environ.get("MASTER_PORT", "").isdecimal():
        raise ConfigError(
            f"this process is rank {rank} of {world} (RANK, WORLD_SIZE): set MASTER_ADDR and MASTER_PORT on all ranks "
            f"to the address and a free port of rank 0, or use torchrun; got {os.environ.get('MASTER_ADDR')!r} and "
            f"{os.environ.get('MASTER_PORT')!r}"
        )
    arguments: dict[str, Any] = {} if store is None else {"store": store, "rank": rank, "world_size": world}
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **arguments)
    if STORE_VARIABLE in os.environ:
        with contextlib.suppress(FileNotFoundError):  # in a process that a rank has started
            Path(os.environ[STORE_VARIABLE]).parent.joinpath(JOINED, str(rank)).touch()
    try:
        yield LocalRanks(rank, world, own.local_rank, local_device, restarts)
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


def _join(agent: tuple[str, int], rank: int, world: int, timeout_s: float) -> tuple[Store, int]:
    """Return ``attempt_store`` of the store at the address and port of torchrun's agent."""
    from torch.distributed import TCPStore

    joined_before = agent in _joined  # a process that initialises its group twice is not a new attempt
    _joined.add(agent)
    store = TCPStore(*agent, is_master=False, timeout=timedelta(seconds=timeout_s))
    return attempt_store(store, rank, world, timeout_s, again=joined_before)


def attempt_store(store: Store, rank: int, world: int, timeout_s: float, *, again: bool = False) -> tuple[Store, int]:
    """Return a store with unused keys, and the number of previous attempts. All ``world`` ranks call it.

    Args:
        again: this attempt has such a store already and needs another one.
    """
    from torch.distributed import PrefixStore

    keys = PrefixStore("moe_comm", store)
    attempt = _assign_name(keys, world, timeout_s, again) if rank == 0 else _receive_name(keys, rank, timeout_s)
    return PrefixStore(f"moe_comm/{attempt}", store), int(attempt.partition("-")[0])


def _assign_name(keys: Store, world: int, timeout_s: float, again: bool) -> str:
    attempt = f"{keys.add('attempts', 0 if again else 1) - 1}-{secrets.token_hex(8)}"
    missing = set(range(1, world))
    end = time.monotonic() + timeout_s
    while missing:
        for rank in sorted(missing):
            if keys.check([f"{attempt}/{rank}"]):
                missing.discard(rank)
            elif keys.check([f"here/{rank}"]):
                keys.set(f"name/{keys.get(f'here/{rank}').decode()}", attempt)
        if missing and time.monotonic() > end:
            names = ", ".join(map(str, sorted(missing)[:8])) + (" ..." if len(missing) > 8 else "")
            raise PeerTimeout(f"rank 0: rank {names} did not join within {timeout_s:g} s of the start of {world} ranks")
        if missing:
            time.sleep(JOIN_POLL_S)
    return attempt


def _receive_name(keys: Store, rank: int, timeout_s: float) -> str:
    nonce = secrets.token_hex(8)
    keys.set(f"here/{rank}", nonce)
    try:
        keys.wait([f"name/{nonce}"], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PeerTimeout(f"rank {rank}: no answer from rank 0 within {timeout_s:g} s of the start: {error}") from error
    attempt = keys.get(f"name/{nonce}").decode()
    keys.set(f"{attempt}/{rank}", "")
    return attempt
