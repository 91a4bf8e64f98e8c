"""All threads end before the interpreter does, because a thread that takes the GIL later aborts the process."""

from __future__ import annotations

import subprocess
import sys
from string import Template

import pytest

pytest.importorskip("moe_comm._C", reason="the native core is not built")

PROGRAM = """
import atexit, os, threading

def threads():
    tasks = (open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task"))
    return sum("gloo" in name for name in tasks), sum(thread.name == "peer watch" for thread in threading.enumerate())

atexit.register(lambda: print(*threads()))  # registered first, so called last

import torch
import torch.distributed as dist
from moe_comm.dispatch import DispatchOptions
from moe_comm.comm.group_setup import channel_of
from moe_comm.dispatch.types import PeerToPeerOptions
from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher
from moe_comm.runtime.launch import init_ranks
from moe_comm.topology import ExpertPlacement

def work():
    options = DispatchOptions(peer_to_peer=PeerToPeerOptions(heap_bytes=1 << 20, emulate=True))
    with $joining:
        $first
        group = dist.group.WORLD
        channel_of(group)
        dispatcher = PeerToPeerDispatcher(ExpertPlacement.balanced(2, 1), group, 0, options, "cpu")
        sent = dispatcher.dispatch(torch.ones(3, 4), torch.zeros(3, 1, dtype=torch.int64))
        dispatcher.combine(sent.rows_RD, torch.ones(3, 1), sent.handle)
        dispatcher.itself = dispatcher  # a reference cycle: not freed before the interpreter ends
        print(*threads())
        $last

work()
"""
INIT_RANKS = {"joining": 'init_ranks("cpu")', "first": "pass", "last": "pass"}
INIT_PROCESS_GROUP = {
    "joining": "torch.no_grad()",
    "first": 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)',
    "last": "dist.destroy_process_group()",
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
@pytest.mark.parametrize("substitutions", [INIT_RANKS, INIT_PROCESS_GROUP], ids=["init_ranks", "init_process_group"])
def test_threads_of_destroyed_groups_end_before_the_interpreter(substitutions: dict[str, str]) -> None:
    program = Template(PROGRAM).substitute(substitutions)
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    during, after = (line.split() for line in process.stdout.splitlines())
    assert int(during[0]) > 0 and during[1] == "1", "the program must have gloo threads and one peer watch to end"
    assert after == ["0", "0"]
