"""Functions that ranks on hosts run in tests. Most do not import torch, because every rank is a new process."""

from __future__ import annotations

import json
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moe_comm.errors import RoutingError

if TYPE_CHECKING:
    from tests.dispatch.workers import Result

CASES = (
    "plain",
    "no tokens anywhere",
    "all tokens on the last rank",
    "uneven experts, one rank without",
    "all tokens to one expert",
    "some slots dropped",
    "bfloat16",
    "hidden 1024",
)


@dataclass(frozen=True)
class HostView:
    """Host name, address, interfaces, files in /dev/shm and launcher variables, as a rank sees them."""

    name: str
    address: str
    interfaces: tuple[str, ...]
    memory: tuple[str, ...]
    ranks: tuple[str, ...]


def describe_host(note: str) -> HostView:
    Path("/dev/shm", f"{note}-{os.environ['RANK']}").touch()
    name = socket.gethostname()
    interfaces = tuple(interface for _, interface in socket.if_nameindex())
    ranks = tuple(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"))
    return HostView(name, socket.gethostbyname(name), interfaces, tuple(sorted(os.listdir("/dev/shm"))), ranks)


def listening() -> set[str]:
    """Return the addresses of this host with listening sockets."""
    addresses = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                raw = bytes.fromhex(fields[1].split(":")[0])
                addresses.add(socket.inet_ntoa(raw[::-1]) if len(raw) == 4 else raw.hex())
    return addresses


@dataclass(frozen=True)
class DispatchResult:
    """Result of ``dispatch`` on one rank.

    key: host key. auto_backend: backend that ``auto`` selects. error: type of the error for shared memory.
    listening: listening addresses while all ranks run. results: results of ``CASES``.
    """

    rank: int
    key: str
    auto_backend: str
    error: str
    listening: set[str]
    results: dict[str, Result]


def dispatch() -> DispatchResult:
    """Run in the existing process group."""
    import torch.distributed as dist

    from moe_comm.dispatch import make_dispatcher
    from moe_comm.runtime.groups import host_key
    from moe_comm.runtime.launch import init_ranks
    from tests.dispatch import cases, workers
    from tests.dispatch.workers import Job

    with init_ranks() as ranks:
        group = dist.group.WORLD
        error, _ = workers.caught(lambda: make_dispatcher(8, group, backend="shared_memory"))
        auto_backend = make_dispatcher(8, group).name
        results = {
            case: workers.run_case(cases.BY_NAME[case], Job("auto"), group, ranks.rank, ranks.world) for case in CASES
        }
        listens = listening()
        dist.barrier()
    return DispatchResult(ranks.rank, host_key(), auto_backend, error, listens, results)


def train(settings: list[str]) -> list[float]:
    from moe_comm.train import run

    folder = run("tiny", settings).folder
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines for key in ("loss", "grad_norm") if key in line]


def train_on_rank(rank: int, world: int, settings: list[str]) -> list[float]:
    return train(settings)


def fail_on_the_last(how: str) -> None:
    rank = int(os.environ["RANK"])
    if how == "group":
        if rank:
            raise RoutingError("expert id 9 of token 3")
        import torch.distributed as dist

        dist.barrier()
    elif how == "hang":
        while True:
            signal.pause()  # the signal that requests stacks ends a pause
    elif rank and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif rank:
        raise KeyError("a key")
