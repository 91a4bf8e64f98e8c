"""The processor time of a rank is limited by a cgroup."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_comm.bench.common.processor_quota import processor_quota, unavailable_reason
from moe_comm.bench.placement.settings import PlacementBench
from moe_comm.errors import ConfigError

REASON = unavailable_reason()
needs_quota = pytest.mark.skipif(bool(REASON), reason=REASON or "processor time can be limited")
PERIOD_S = 0.005
"""Period of a quota of 0.2 cores; a process may use the quota of one more period than it has lasted."""
KILLED = """
import os, signal
from moe_comm.bench.common.processor_quota import processor_quota
with processor_quota(0.5):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def own_cgroups() -> str:
    return Path("/proc/self/cgroup").read_text()


@needs_quota
def test_a_process_uses_no_more_than_its_quota_and_then_leaves_the_cgroup() -> None:
    before = own_cgroups()
    with processor_quota(0.2):
        assert own_cgroups() != before
        start, used = time.perf_counter(), time.process_time()
        while (wall := time.perf_counter() - start) < 0.2:
            pass
        used = time.process_time() - used
    assert used <= 0.2 * (wall + 2 * PERIOD_S)
    assert own_cgroups() == before


@needs_quota
def test_the_cgroup_of_a_killed_rank_is_removed_by_the_next_one() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert process.wait() == -9
    left = f"moe_comm-rank-{process.pid}"
    with processor_quota(0.5):
        assert not list(Path("/sys/fs/cgroup").glob(f"*/{left}")) and not Path("/sys/fs/cgroup", left).exists()


def test_ranks_cannot_have_more_than_all_cores() -> None:
    with pytest.raises(ConfigError, match=r"cores_per_rank must be from 0.01 to .*; got 65"):
        PlacementBench(ranks=4, cores_per_rank=65)
