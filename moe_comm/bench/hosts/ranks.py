"""Ranks on several hosts of one machine: started, joined by gloo over the links, ended in time, and what they return.

    launcher ──pid──▶ rank 0 on host 0 ─┐ TCPStore on host 0's address, gloo over link0
             ──pid──▶ rank 1 on host 1 ─┘

The launcher enters a host and becomes the rank's Python (``nsenter``), so ranks are its own children, and jobs and
answers are in files without a name: whatever the hosts' file systems look like, both sides see them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from moe_comm.bench.hosts.namespaces import INTERFACE, Hosts, host_address
from moe_comm.errors import FROM_PEERS, ConfigError, MoeCommError
from moe_comm.runtime import cpu_guard
from moe_comm.runtime.launch import (
    AGENT_STORE_VARIABLE,
    MAX_RANKS,
    RESTARTS_VARIABLE,
    STORE_VARIABLE,
    RankFailed,
    available_cores,
    class_of,
)

GRACE_S = 5.0
"""What the other ranks get to say what happened to them, after one has failed."""
MEASURE_PORT = 29499
_OTHER_LAUNCHERS = (STORE_VARIABLE, AGENT_STORE_VARIABLE, RESTARTS_VARIABLE)
_BOOT = "import sys; sys.path[:] = {path!r}; from moe_comm.bench.hosts.ranks import _rank_main; _rank_main({files!r})"


@dataclass(frozen=True)
class _Job:
    """What a rank is told. store: the address and port where the ranks meet; None: they make no process group.
    launcher: its process id."""

    module: str
    name: str
    args: bytes
    rank: int
    world: int
    launcher: int
    folder: str
    store: tuple[str, int] | None
    timeout_s: float


@dataclass
class _Rank:
    """The launcher's view of a rank. The files have no names, so nothing is left of them and no host hides them."""

    process: subprocess.Popen[bytes]
    pidfd: int
    answer: int
    stacks: int

    def stack_text(self) -> str:
        """What the rank's faulthandler has written so far."""
        return os.pread(self.stacks, os.fstat(self.stacks).st_size, 0).decode(errors="replace")


def run_on_hosts(
    function: Callable[..., Any],
    args: Sequence[Any],
    hosts: Hosts,
    ranks_per_host: int,
    timeout_s: float,
    *,
    group: bool = True,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``function(*args)`` in ``ranks_per_host`` fresh processes on every host.

    The ranks are numbered host by host and see what torchrun would set (RANK, LOCAL_RANK, GROUP_RANK, ...). The default
    process group (gloo over the links) is there when the function begins; ``init_ranks`` takes it as it is. Its store
    listens on the first host's address alone.

    Args:
        function: at the top level of an importable module (not of the script that is being run).
        args: picklable, and so is what the function returns.
        timeout_s: until every rank's Python stacks are taken and all ranks are killed.
        group: False makes no process group, and does not import torch.
        environment: variables of the ranks beside this process's own.

    Returns:
        What each rank returned, by rank.

    Raises:
        ConfigError: ``function`` or ``ranks_per_host`` cannot be used.
        MoeCommError: a rank raised it; the message names the rank. The earliest cause is raised, not its echoes.
        RankFailed: a rank failed otherwise, was killed, or did not end in time; ``details`` has traceback or stacks.
    """
    world = hosts.count * ranks_per_host
    if not 1 <= ranks_per_host <= MAX_RANKS // hosts.count:
        raise ConfigError(f"ranks_per_host must be 1 to {MAX_RANKS // hosts.count}; got {ranks_per_host}")
    if function.__module__ == "__main__" or "<" in function.__qualname__:
        raise ConfigError(f"{function.__qualname__} must be at the top level of an importable module")
    cpu_guard.apply()
    address, port = hosts.hosts[0].address, hosts.next_port()
    job = _Job(
        module=function.__module__,
        name=function.__qualname__,
        args=pickle.dumps(tuple(args)),
        rank=0,
        world=world,
        launcher=os.getpid(),
        folder=os.getcwd(),
        store=(address, port) if group else None,
        timeout_s=timeout_s,
    )
    variables = {name: value for name, value in os.environ.items() if name not in _OTHER_LAUNCHERS}
    variables |= {**_variables(world, address, port), **(environment or {})}
    with contextlib.ExitStack() as stack:
        ranks: list[_Rank] = []
        stack.callback(_end, ranks)
        for rank in range(world):
            ranks.append(_start(hosts, rank, ranks_per_host, job, variables, stack))
        late = _wait(ranks, timeout_s)
        return _results(hosts, ranks, ranks_per_host, late, timeout_s)


def _variables(world: int, address: str, port: int) -> dict[str, str]:
    threads = os.environ.get("OMP_NUM_THREADS", str(max(available_cores() // world, 1)))
    return {
        "OMP_NUM_THREADS": threads,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
    }


def _start(
    hosts: Hosts, rank: int, per_host: int, job: _Job, variables: Mapping[str, str], stack: contextlib.ExitStack
) -> _Rank:
    files = []
    for what in ("job", "answer", "stacks"):
        files.append(os.memfd_create(f"moe_comm-{what}-{rank}", 0))
        stack.callback(os.close, files[-1])
    _write(files[0], pickle.dumps({**vars(job), "rank": rank}))
    host, local = divmod(rank, per_host)
    own = {"RANK": rank, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_host, "GROUP_RANK": host}
    path = [os.path.abspath(entry) for entry in sys.path]  # a rank begins in another folder
    process = subprocess.Popen(
        hosts.command(host, [sys.executable, "-c", _BOOT.format(path=path, files=tuple(files))]),
        stdin=subprocess.DEVNULL,
        env={**variables, **{name: str(value) for name, value in own.items()}},
        pass_fds=files,
        start_new_session=True,
    )
    try:
        pidfd = os.pidfd_open(process.pid)
    except BaseException:
        process.kill()
        raise
    stack.callback(os.close, pidfd)
    return _Rank(process, pidfd, files[1], files[2])


def _wait(ranks: Sequence[_Rank], timeout_s: float) -> dict[int, str]:
    """Wait for all ranks; the stacks of those that did not end in time, by rank."""
    poll = select.poll()
    running = {rank.pidfd: index for index, rank in enumerate(ranks)}
    for pidfd in running:
        poll.register(pidfd, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    failed = False
    while running and (left := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(left * 1000):
            poll.unregister(pidfd)
            if ranks[running.pop(pidfd)].process.wait() and not failed:
                failed, deadline = True, min(deadline, time.monotonic() + GRACE_S)
    # The first rank stays until all have answered, and is not late if it has.
    return _stacks({index: ranks[index] for index in running.values() if not _read(ranks[index].answer)})


def _stacks(ranks: dict[int, _Rank]) -> dict[int, str]:
    """Ask ``ranks`` for their Python stacks and take what comes within two seconds."""
    for rank in ranks.values():
        rank.process.send_signal(signal.SIGUSR1)
    end = time.monotonic() + 2
    while time.monotonic() < end and not all(rank.stack_text() for rank in ranks.values()):
        time.sleep(0.02)
    if ranks:
        time.sleep(0.1)  # they are being written; nothing but the message depends on it
    return {index: rank.stack_text() for index, rank in ranks.items()}


def _end(ranks: Sequence[_Rank]) -> None:
    """Kill the ranks that are left, and what they started."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()


def _results(hosts: Hosts, ranks: Sequence[_Rank], per_host: int, late: dict[int, str], timeout_s: float) -> list[Any]:
    """What the ranks returned, or the error to raise: the earliest cause rather than what it did to the others."""
    found = {index: _read(rank.answer) for index, rank in enumerate(ranks) if index not in late}
    answers = {index: pickle.loads(raw) for index, raw in found.items() if raw}
    faults = {index: answer[1] for index, answer in answers.items() if not answer[0]}
    by_time = sorted(faults, key=lambda index: faults[index].time_ns)
    causes = [index for index in by_time if not issubclass(class_of(faults[index].kind), FROM_PEERS)]
    silent = [index for index in range(len(ranks)) if index not in answers and index not in late]

    def who(index: int) -> str:
        return f"rank {index} on host {index // per_host} ({hosts.hosts[index // per_host].address})"

    for index in (*causes, *silent, *by_time):
        if index in faults:
            raise faults[index].error(who(index))
        code = ranks[index].process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise RankFailed(f"{who(index)} {how}, without a result")
    if late:
        names = ", ".join(who(index) for index in sorted(late))
        shown = "\n".join(f"--- {who(i)}\n{late[i] or '(no stacks: stopped, or not up yet)'}" for i in sorted(late))
        raise RankFailed(f"{names}: not done within {timeout_s:g} s, and killed", shown)
    return [answers[index][1] for index in range(len(ranks))]


@dataclass(frozen=True)
class _Fault:
    """What a rank raised, in plain values: an exception of somebody else's may not come through pickle."""

    kind: str
    message: str
    details: str
    time_ns: int

    def error(self, who: str) -> MoeCommError:
        kind = class_of(self.kind)
        if issubclass(kind, MoeCommError):
            return kind(f"{who}: {self.message}")
        return RankFailed(f"{who} failed with {self.kind}: {self.message}", self.details)


# --- in a rank ---


def _rank_main(files: tuple[int, int, int]) -> NoReturn:
    """Body of a rank: read the job, run it, leave the answer, end without waiting for anybody."""
    job_file, answer_file, stacks_file = files
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
    job = _Job(**pickle.loads(_read(job_file)))
    if os.getppid() != job.launcher:  # it was killed before this process was on the host, and killed with it
        os._exit(1)
    ended = 0
    try:
        os.chdir(job.folder)  # entering a mount namespace led to its root
        function: Any = importlib.import_module(job.module)
        for part in job.name.split("."):
            function = getattr(function, part)
        with _process_group(job):
            _write(answer_file, pickle.dumps((True, function(*pickle.loads(job.args)))))
    except BaseException as error:
        ended = 1
        fault = _Fault(type(error).__name__, str(error), traceback.format_exc(), time.time_ns())
        _write(answer_file, pickle.dumps((False, fault)))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(ended)  # destructors of process groups may wait for ranks that have gone


def _write(file: int, data: bytes) -> None:
    """Put ``data`` in place of what is there. The first byte says that all of it is: a rank may be killed meanwhile."""
    os.ftruncate(file, 0)
    with os.fdopen(file, "wb", closefd=False) as out:
        out.seek(0)
        out.write(b"-" + data)
    os.pwrite(file, b"+", 0)


def _read(file: int) -> bytes:
    """What ``_write`` put there; b"" if it did not, or did not finish."""
    found = os.pread(file, os.fstat(file).st_size, 0)
    return found[1:] if found[:1] == b"+" else b""


@contextlib.contextmanager
def _process_group(job: _Job) -> Iterator[None]:
    """The default process group, unless the job wants none. The first rank, which keeps the store, leaves last: gloo
    looks up its peers there whenever a new pair of ranks first talks."""
    if job.store is None:
        yield
        return
    import torch.distributed as dist  # here because jobs without a group do not wait for torch to load

    wait = timedelta(seconds=job.timeout_s)
    address, port = job.store
    listener: dict[str, Any] = {}
    if job.rank == 0:
        # Bound here, because TCPStore by itself listens on every interface.
        bound = socket.create_server((address, port), backlog=job.world)
        listener = {"is_master": True, "master_listen_fd": bound.detach()}
    store = dist.TCPStore(address, port, job.world, timeout=wait, wait_for_workers=False, **listener)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world, timeout=wait)
    yield  # a rank that fails waits for nobody: its error must be known before the others' deadlines
    with contextlib.suppress(RuntimeError):
        store.set(f"done/{job.rank}", "")
        if job.rank == 0:
            store.wait([f"done/{rank}" for rank in range(job.world)], wait)


# --- what a link carries ---


def measure_links(
    hosts: Hosts, num_bytes: int, flows: Sequence[tuple[int, int]] | None = None, timeout_s: float = 60.0
) -> list[float]:
    """Gbit/s of payload that reach each host over TCP while all flows run at once; 0 where none goes.

    Below ``link_gbit`` by the packets' headers (4%); ``burst_bytes`` / ``num_bytes`` is how much it may be above.

    Args:
        num_bytes: of each flow.
        flows: (from, to) host; from each to the next if not given.
    """
    ring = [(host, (host + 1) % hosts.count) for host in range(hosts.count)]
    return run_on_hosts(_measure, (flows or ring, num_bytes), hosts, 1, timeout_s, group=False)


def _measure(flows: Sequence[tuple[int, int]], num_bytes: int) -> float:
    here = int(os.environ["RANK"])
    pending = sum(to == here for _, to in flows)
    senders = [threading.Thread(target=_send, args=(to, num_bytes)) for source, to in flows if source == here]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server((host_address(here), MEASURE_PORT), backlog=len(flows)))
        for sender in senders:
            sender.start()
            stack.callback(sender.join)
        connections = [stack.enter_context(server.accept()[0]) for _ in range(pending)]
        began = time.perf_counter()
        for connection in connections:
            connection.send(b"!")  # nothing is on its way before the clock runs: a slow start makes no link look fast
        room, total = bytearray(1 << 20), 0
        poll = {connection.fileno(): connection for connection in connections}
        while poll:
            for file in select.select(list(poll), [], [])[0]:
                got = poll[file].recv_into(room)
                total += got
                if not got:
                    del poll[file]
        seconds = time.perf_counter() - began
    if total != pending * num_bytes:
        raise RankFailed(f"{pending} flows of {num_bytes} bytes, and {total} bytes came")
    return total * 8e-9 / seconds


def _send(to: int, num_bytes: int) -> None:
    with _connection(host_address(to), MEASURE_PORT) as connection:
        connection.recv(1)
        connection.sendall(bytes(num_bytes))


def _connection(address: str, port: int) -> socket.socket:
    """To a server that may not be up yet; the run's deadline ends the wait."""
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            time.sleep(0.01)
