"""Report what the processes of a launch expose to other users: listening sockets, and the modes of their files.

As a script, it starts two ranks (``local``) or is a rank of torchrun. Rank 0 prints the reports of all ranks as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_comm import make_dispatcher
from moe_comm.runtime.launch import STORE_VARIABLE, init_ranks, launch
from moe_comm.train.checkpoint import Checkpointer, Entry

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 as /proc/net shows them."""
LISTENING = "0A"


def tree(root: int) -> list[int]:
    """Return a process and all its descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # ended meanwhile
            continue
    pids = [root]
    for pid in pids:
        pids += [child for child, parent in parents.items() if parent == pid]
    return pids


def listening(pids: list[int]) -> set[str]:
    """Return the hexadecimal addresses of the TCP listeners and UDP sockets of these processes."""
    open_files = set()
    for pid in pids:
        for handle in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                open_files.add(os.readlink(handle))
            except OSError:
                continue
    addresses = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in open_files and (fields[3] == LISTENING or table.startswith("udp")):
                addresses.add(fields[1].partition(":")[0])
    return addresses


def modes(folder: Path) -> dict[str, int]:
    """Return the permissions of a folder and its files."""
    return {str(path.relative_to(folder)): path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}


def work(root: int, folder: str) -> dict[str, Any]:
    """Create everything that opens sockets: groups, dispatchers and a checkpointer. Return the report of each rank."""
    with init_ranks("cpu") as ranks:
        group = dist.new_group()
        for backend in ("all_to_all", "shared_memory"):
            dispatcher = make_dispatcher(4, group, backend=backend)
            dispatcher.dispatch(torch.ones(3, 8), torch.tensor([[0], [1], [3]]))
        with Checkpointer(folder) as checkpointer:
            checkpointer.save(1, {"a": Entry.whole(torch.ones(2))})
            checkpointer.wait()
            dist.barrier()
            store = os.environ.get(STORE_VARIABLE)
            report = {
                "ranks": sorted(listening([os.getpid()])),
                "tree": sorted(listening(tree(root))) if root else [],
                "processes": len(tree(root)) if root else 0,
                "modes": modes(Path(store).parent) if store else {},
            }
            dist.barrier()
        reports: list[dict[str, Any]] = [{}] * ranks.world
        dist.all_gather_object(reports, report)
        return {"seen": reports}


def main() -> None:
    if sys.argv[1] == "local":
        print(json.dumps(launch(work, (os.getpid(), sys.argv[2]), ranks=2)[0]))
        return
    reports = work(0, sys.argv[2])
    if os.environ["RANK"] == "0":
        print(json.dumps(reports))


if __name__ == "__main__":
    main()
