"""Start ranks on several hosts of one machine, with a gloo process group over the links, and return their results.

    launcher ──pid──▶ rank 0 on host 0 ─┐ TCPStore on host 0's address, gloo over link0
             ──pid──▶ rank 1 on host 1 ─┘

``nsenter`` executes the Python process of a rank on its host, so ranks are children of the launcher. Jobs and results
are passed in inherited memory files without a name, which do not depend on the file systems of the hosts.
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
    error_class,
)
from moe_comm.runtime.launch.rank_main import error_kind
from moe_comm.runtime.seconds import seconds_of

GRACE_S = 5.0
"""Time for the other ranks to report their errors after one rank failed."""
MEASURE_PORT = 29499
_OTHER_LAUNCHERS = (STORE_VARIABLE, AGENT_STORE_VARIABLE, RESTARTS_VARIABLE)
"""Environment variables of ``moe_comm.runtime.launch`` and torchrun that these ranks must not inherit."""
_BOOT = "import sys; sys.path[:] = {path!r}; from moe_comm.bench.hosts.ranks import _rank_main; _rank_main({files!r})"


@dataclass(frozen=True)
class _Job:
    """The job of a rank.

    Attributes:
        launcher: process id of the launcher.
        store: address and port of the store. None: no process group.
    """

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
    """A rank, as the launcher sees it. ``answer`` (result or error) and ``stacks`` are descriptors of memory files."""

    process: subprocess.Popen[bytes]
    pidfd: int
    answer: int
    stacks: int

    def stack_text(self) -> str:
        """Return the Python stacks that the rank has written."""
        return os.pread(self.stacks, os.fstat(self.stacks).st_size, 0).decode(errors="replace")


def run_on_hosts(
    function: Callable[..., Any],
    args: Sequence[Any],
    hosts: Hosts,
    ranks_per_host: int,
    timeout_s: float,
    *,
    group: bool = True,
) -> list[Any]:
    """Run ``function(*args)`` in ``ranks_per_host`` new processes on every host.

    Ranks are numbered host by host and have the environment variables of torchrun (RANK, LOCAL_RANK, GROUP_RANK, ...).
    The default process group (gloo over the links) exists when the function is called, and ``init_ranks`` uses it. Its
    store listens only on the address of the first host.

    Args:
        function: function at the top level of an importable module, not of the main script.
        args: picklable arguments. The result must be picklable too.
        hosts: the hosts.
        ranks_per_host: number of ranks on each host.
        timeout_s: time limit in seconds. Then the Python stacks of all ranks are recorded and the ranks are killed.
        group: False creates no process group and does not import torch.

    Returns:
        The results by rank.

    Raises:
        ConfigError: ``function`` or ``ranks_per_host`` is invalid.
        MoeCommError: a rank raised it. The message names the rank. If several ranks failed, the earliest cause is
            raised, not the errors that it caused on other ranks.
        RankFailed: a rank raised another exception, was killed, or exceeded the time limit. ``details`` has the
            traceback or the stacks.
    """
    world = hosts.count * ranks_per_host
    if not 1 <= ranks_per_host <= MAX_RANKS // hosts.count:
        raise ConfigError(f"ranks_per_host must be between 1 and {MAX_RANKS // hosts.count}; got {ranks_per_host}")
    if function.__module__ == "__main__" or "<" in function.__qualname__:
        raise ConfigError(f"{function.__qualname__} must be at the top level of an importable module")
    cpu_guard.apply()
    timeout_s = seconds_of("timeout_s", timeout_s)
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
    variables |= _variables(world, address, port)
    with contextlib.ExitStack() as stack:
        ranks: list[_Rank] = []
        stack.callback(_end, ranks)
        for rank in range(world):
            ranks.append(_start(hosts, rank, ranks_per_host, job, variables, stack))
        timed_out = _wait(ranks, timeout_s)
        return _results(hosts, ranks, ranks_per_host, timed_out, timeout_s)


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
    rank_variables = {"RANK": rank, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_host, "GROUP_RANK": host}
    path = [os.path.abspath(entry) for entry in sys.path]  # the working directory of a rank differs
    process = subprocess.Popen(
        hosts.command(host, [sys.executable, "-c", _BOOT.format(path=path, files=tuple(files))]),
        stdin=subprocess.DEVNULL,
        env={**variables, **{name: str(value) for name, value in rank_variables.items()}},
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
    """Wait for all ranks. Return the stacks of those that exceeded the time limit, by rank."""
    poll = select.poll()
    running = {rank.pidfd: index for index, rank in enumerate(ranks)}
    for pidfd in running:
        poll.register(pidfd, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    failed = False
    while running and (left := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(min(left, 3600) * 1000):
            poll.unregister(pidfd)
            rank = ranks[running.pop(pidfd)]
            if (rank.process.wait() or not _read(rank.answer)) and not failed:  # a rank may end with code 0 too
                failed, deadline = True, min(deadline, time.monotonic() + GRACE_S)
    # Rank 0 waits for all other ranks after its answer, so a rank with an answer has not timed out.
    return _stacks({index: ranks[index] for index in running.values() if not _read(ranks[index].answer)})


def _stacks(ranks: dict[int, _Rank]) -> dict[int, str]:
    """Request the Python stacks of ``ranks`` and return what they write within two seconds."""
    for rank in ranks.values():
        rank.process.send_signal(signal.SIGUSR1)
    end = time.monotonic() + 2
    while time.monotonic() < end and not all(rank.stack_text() for rank in ranks.values()):
        time.sleep(0.02)
    if ranks:
        time.sleep(0.1)  # the stacks may be incomplete
    return {index: rank.stack_text() for index, rank in ranks.items()}


def _end(ranks: Sequence[_Rank]) -> None:
    """Kill the remaining ranks and their child processes."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()


def _results(
    hosts: Hosts, ranks: Sequence[_Rank], per_host: int, timed_out: dict[int, str], timeout_s: float
) -> list[Any]:
    """Return the results of the ranks, or raise the earliest error that was not caused by another rank."""
    raw_answers = {index: _read(rank.answer) for index, rank in enumerate(ranks) if index not in timed_out}
    answers = {index: pickle.loads(raw) for index, raw in raw_answers.items() if raw}
    faults = {index: answer[1] for index, answer in answers.items() if not answer[0]}
    by_time = sorted(faults, key=lambda index: faults[index].time_ns)
    causes = [index for index in by_time if not issubclass(error_class(faults[index].kind), FROM_PEERS)]
    silent = [index for index in range(len(ranks)) if index not in answers and index not in timed_out]

    def title(index: int) -> str:
        return f"rank {index} on host {index // per_host} ({hosts.hosts[index // per_host].address})"

    for index in (*causes, *silent, *by_time):
        if index in faults:
            raise faults[index].error(title(index))
        code = ranks[index].process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        raise RankFailed(f"{title(index)} {how}, without a result")
    if timed_out:
        names = ", ".join(title(index) for index in sorted(timed_out))
        stacks = "\n".join(
            f"--- {title(index)}\n{text or '(no stacks: stopped or not started)'}"
            for index, text in sorted(timed_out.items())
        )
        raise RankFailed(f"{names} did not finish within {timeout_s:g} s and was killed", stacks)
    return [answers[index][1] for index in range(len(ranks))]


@dataclass(frozen=True)
class _Fault:
    """An exception of a rank as plain values, because exceptions of other libraries may not be picklable."""

    kind: str
    message: str
    details: str
    time_ns: int

    def error(self, title: str) -> MoeCommError:
        kind = error_class(self.kind)
        if issubclass(kind, MoeCommError):
            return kind(f"{title}: {self.message}")
        return RankFailed(f"{title} failed with {self.kind}: {self.message}", self.details)


# --- in a rank ---


def _rank_main(files: tuple[int, int, int]) -> NoReturn:
    """Run a rank: read the job, call the function, write the answer, exit without destructors."""
    job_file, answer_file, stacks_file = files
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
    job = _Job(**pickle.loads(_read(job_file)))
    if os.getppid() != job.launcher:  # the launcher was killed before this process entered the host
        os._exit(1)
    code = 0
    try:
        os.chdir(job.folder)  # nsenter changes to the root folder
        function: Any = importlib.import_module(job.module)
        for part in job.name.split("."):
            function = getattr(function, part)
        with _process_group(job):
            _write(answer_file, pickle.dumps((True, function(*pickle.loads(job.args)))))
    except BaseException as error:
        code = 1
        fault = _Fault(error_kind(error), str(error), traceback.format_exc(), time.time_ns())
        _write(answer_file, pickle.dumps((False, fault)))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # destructors of process groups may wait for ranks that exited


def _write(file: int, data: bytes) -> None:
    """Replace the content of ``file``. The first byte is "+" only when ``data`` is complete."""
    os.ftruncate(file, 0)
    with os.fdopen(file, "wb", closefd=False) as out:
        out.seek(0)
        out.write(b"-" + data)
    os.pwrite(file, b"+", 0)


def _read(file: int) -> bytes:
    """Return the data that ``_write`` wrote, or b"" if it is missing or incomplete."""
    content = os.pread(file, os.fstat(file).st_size, 0)
    return content[1:] if content[:1] == b"+" else b""


@contextlib.contextmanager
def _process_group(job: _Job) -> Iterator[None]:
    """Create the default process group, unless ``job.store`` is None.

    Rank 0, which has the store, exits last, because gloo looks up peers in the store when two ranks first communicate.
    """
    if job.store is None:
        yield
        return
    import torch.distributed as dist  # jobs without a group do not load torch

    wait = timedelta(seconds=job.timeout_s)
    address, port = job.store
    listener: dict[str, Any] = {}
    if job.rank == 0:
        # Without master_listen_fd, TCPStore listens on every interface.
        server = socket.create_server((address, port), backlog=job.world)
        listener = {"is_master": True, "master_listen_fd": server.detach()}
    store = dist.TCPStore(address, port, job.world, timeout=wait, wait_for_workers=False, **listener)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world, timeout=wait)
    yield  # a rank that fails does not wait, so that its error is reported before the timeouts of the other ranks
    with contextlib.suppress(RuntimeError):
        store.set(f"done/{job.rank}", "")
        if job.rank == 0:
            store.wait([f"done/{rank}" for rank in range(job.world)], wait)


# --- link rates ---


def measure_links(
    hosts: Hosts, num_bytes: int, flows: Sequence[tuple[int, int]] | None = None, timeout_s: float = 60.0
) -> list[float]:
    """Measure the rate at which each host receives over TCP while all flows run at once, in Gbit/s.

    Packet headers reduce the rate by about 4%. The initial burst raises it by at most ``burst_bytes`` / ``num_bytes``.

    Args:
        num_bytes: bytes of each flow.
        flows: (from, to) hosts. None: from each host to the next.

    Returns:
        The rates by host; 0 for hosts without incoming flows.
    """
    ring = [(host, (host + 1) % hosts.count) for host in range(hosts.count)]
    return run_on_hosts(_measure, (flows or ring, num_bytes), hosts, 1, timeout_s, group=False)


def _measure(flows: Sequence[tuple[int, int]], num_bytes: int) -> float:
    this_host = int(os.environ["RANK"])
    pending = sum(to == this_host for _, to in flows)
    senders = [threading.Thread(target=_send, args=(to, num_bytes)) for source, to in flows if source == this_host]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server((host_address(this_host), MEASURE_PORT), backlog=len(flows)))
        for sender in senders:
            sender.start()
            stack.callback(sender.join)
        connections = [stack.enter_context(server.accept()[0]) for _ in range(pending)]
        start = time.perf_counter()
        for connection in connections:
            connection.send(b"!")  # start the flow: no bytes are in flight before the time is taken
        buffer, total = bytearray(1 << 20), 0
        poll = {connection.fileno(): connection for connection in connections}
        while poll:
            for file in select.select(list(poll), [], [])[0]:
                received = poll[file].recv_into(buffer)
                total += received
                if not received:
                    del poll[file]
        seconds = time.perf_counter() - start
    if total != pending * num_bytes:
        raise RankFailed(f"received {total} bytes of {pending} flows of {num_bytes} bytes")
    return total * 8e-9 / seconds


def _send(to: int, num_bytes: int) -> None:
    with _connection(host_address(to), MEASURE_PORT) as connection:
        connection.recv(1)
        connection.sendall(bytes(num_bytes))


def _connection(address: str, port: int) -> socket.socket:
    """Connect to a server, with retries until it listens."""
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            time.sleep(0.01)
