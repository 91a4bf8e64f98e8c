"""``bench placement`` end to end with tiny sizes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from moe_comm import cli
from moe_comm.bench.common.ranks import processor_quota
from moe_comm.bench.hosts.namespaces import unavailable_reason
from moe_comm.bench.placement.settings import PlacementBench, eplb, eplb_replicas, rows_of_replicas
from moe_comm.errors import ConfigError
from moe_comm.topology.placement import Placement
from moe_comm.topology.rebalance import busiest_rows, moved_homes

TINY = {
    "ranks": 2,
    "tokens": 256,
    "hidden": 32,
    "ffn": 512,
    "experts": 8,
    "top_k": 2,
    "every": 3,
    "window": 3,
    "warmup": 3,
}

PERIOD_S = 0.005
"""Period of a quota of 0.2 cores; a process may use the quota of one more period than it has lasted."""


def quota_unavailable_reason() -> str:
    """Return why CPU time cannot be limited here; empty if it can be."""
    try:
        with processor_quota(1.0):
            return ""
    except ConfigError as error:
        return str(error)


REASON = quota_unavailable_reason()
needs_quota = pytest.mark.skipif(bool(REASON), reason=REASON or "CPU time can be limited")


def run(out: Path, **changed: Any) -> dict[str, Any]:
    options = TINY | {"steps": 8, "zipf": 1.5, "threshold": 0.0} | changed
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert cli.run(["bench", "placement", *words, "--json", str(out)]) == 0
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_bits_stay_equal_and_peers_move_more_than_decisions(tmp_path: Path) -> None:
    result = run(tmp_path / "out.json", drift=3, balance=1.0)
    lending = result["contestants"].pop("balance")
    assert 1.0 <= lending["busiest_over_mean"] < 1.05 and lending["published_bytes"] > 0 == lending["switches"]
    assert result["bits_equal"] and result["checked_steps"] == 5  # first, last, and after each of three decisions
    assert [one["step"] for one in result["decisions"]] == [3, 6, 9]
    assert set(result["contestants"]) == {"fixed", "relocate"} and set(result["peers"]) == {"eplb", "eplb_copies"}
    fixed, ours, packed, replicas = (result["contestants"] | result["peers"]).values()
    assert 1 <= replicas["busiest_over_mean"] < fixed["busiest_over_mean"]
    assert fixed["speedup"] == 1.0 and fixed["moved_bytes"] == fixed["switches"] == 0
    assert ours["switches"] == sum(one["switched"] for one in result["decisions"])
    assert result["switches"] == ours["switches"] and packed["switches"] == 3
    assert fixed["published_bytes"] == ours["published_bytes"] == 0
    expert_bytes = 4 * 3 * TINY["hidden"] * TINY["ffn"]
    for row in (ours, packed):
        assert row["moved_bytes"] == row["moved_experts"] * expert_bytes
    assert result["busiest_over_mean"] == {"before": fixed["busiest_over_mean"], "after": ours["busiest_over_mean"]}
    assert packed["busiest_over_mean"] < fixed["busiest_over_mean"] or ours["switches"] == 0


@pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason() or "hosts can be created")
@pytest.mark.slow
def test_experts_move_between_hosts(tmp_path: Path) -> None:
    result = run(tmp_path / "out.json", hosts=2, link_gbit=0.1, slots=0)
    assert result["bits_equal"] and len(result["link_gbit_measured"]) == 2 == result["settings"]["hosts"]
    assert 0.05 < max(result["link_gbit_measured"]) < 0.2
    assert result["peers"]["eplb"]["switches"] == 3
    with pytest.raises(ConfigError, match="ranks must be divisible by hosts; got 4 ranks, 3 hosts"):
        PlacementBench(ranks=4, hosts=3)


def cgroups() -> str:
    return Path("/proc/self/cgroup").read_text()


@needs_quota
def test_a_process_uses_no_more_than_its_quota_and_then_leaves_the_cgroup() -> None:
    before = cgroups()
    with processor_quota(0.2):
        assert cgroups() != before
        start, used = time.perf_counter(), time.process_time()
        while (wall := time.perf_counter() - start) < 0.2:
            pass
        used = time.process_time() - used
    assert used <= 0.2 * (wall + 2 * PERIOD_S)
    assert cgroups() == before


@needs_quota
def test_the_cgroup_of_a_killed_rank_is_removed_by_the_next_one() -> None:
    if not (pid := os.fork()):
        with processor_quota(0.5):
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    left = f"moe_comm-rank-{pid}"
    with processor_quota(0.5):
        assert not list(Path("/sys/fs/cgroup").glob(f"*/{left}")) and not Path("/sys/fs/cgroup", left).exists()


@needs_quota
def test_ranks_have_their_own_processor_time(tmp_path: Path) -> None:
    result = run(tmp_path / "out.json", cores_per_rank=0.4, slots=0)
    assert result["bits_equal"] and result["settings"]["cores_per_rank"] == 0.4


def test_uniform_routing_does_not_switch(tmp_path: Path) -> None:
    result = run(tmp_path / "out.json", zipf=0, threshold=0.05, slots=0)
    assert set(result["contestants"]) == {"fixed", "relocate"}
    assert result["switches"] == result["moved_bytes"] == 0
    assert result["busiest_over_mean"]["before"] == result["busiest_over_mean"]["after"]


def test_routing_is_seeded_distinct_and_drifts() -> None:
    bench = PlacementBench(ranks=4, tokens=4000, experts=16, top_k=4, zipf=1.0, drift=10)
    ids = bench.ids(0, 1)
    assert ids.equal(bench.ids(0, 1)) and not ids.equal(bench.ids(0, 2))
    assert all(len(set(token)) == 4 for token in ids.tolist())
    assert bench.popularity(0) == bench.popularity(9) != bench.popularity(10)
    assert sorted(bench.popularity(100)) == sorted(bench.popularity(0))
    loads, weights = bench.loads(0), bench.popularity(0)
    assert sum(loads) == 4 * 4000 * 4
    assert sorted(range(16), key=lambda one: loads[one])[-1] == weights.index(max(weights))
    uniform = PlacementBench(ranks=4, tokens=4000, experts=16, top_k=4, zipf=0.0).loads(0)
    assert max(uniform) < 1.1 * min(uniform)
    hot = PlacementBench(ranks=4, tokens=4000, experts=16, top_k=3, hot=0.8)
    loads = hot.loads(0)
    assert all(len(set(token)) == 3 for token in hot.ids(0, 1).tolist())
    assert abs(sum(loads[:4]) / sum(loads) - 0.8) < 0.01
    assert max(loads[:4]) < 1.1 * min(loads[:4]) and max(loads[4:]) < 1.1 * min(loads[4:])


def test_eplb_packs_evenly_and_ignores_the_placement_before() -> None:
    loads = [8, 7, 6, 5, 4, 3, 2, 1]
    first = Placement.contiguous(8, 2)
    packed = eplb(loads, first)
    assert packed.slots_per_rank == (4, 4) and busiest_rows(loads, packed) == 18
    assert len(moved_homes(first, packed)) == 4 and packed.version == 1


def test_eplb_replicates_the_experts_with_the_most_rows_per_replica() -> None:
    loads = [120, 50, 40, 30]
    packed = eplb_replicas(loads, 2, 1)  # expert 0 has both spare slots: 60 rows per replica, then 40
    assert packed == [[1, 0, 3], [0, 0, 2]] and rows_of_replicas(loads, packed) == [120, 120]
    assert eplb_replicas([6, 1], 2, 1) == [[0, 0], [0, 1]]  # twice on one rank
    assert rows_of_replicas([6, 1], [[0, 0], [0, 1]]) == [4, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"ranks": 1},
        {"ranks": 3},
        {"zipf": -1.0},
        {"every": 0},
        {"threshold": 1.0},
        {"slots": 5},
        {"slots": -1},
        {"hot": 1.5},
        {"hot": 0.5, "experts": 4, "slots": 0},
        {"window": 4},
        {"cores_per_rank": 65},
    ],
)
def test_impossible_settings_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PlacementBench(**(TINY | wrong))
