"""Hosts on one machine: isolation, link rates, cleanup, and ranks on them."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moe_comm.bench.hosts.namespaces import Hosts, burst_bytes, unavailable_reason
from moe_comm.bench.hosts.ranks import measure_links, run_on_hosts
from moe_comm.errors import ConfigError, RoutingError
from moe_comm.runtime.launch import RankFailed
from tests.bench import host_work
from tests.bench.host_work import CASES
from tests.dispatch import cases, workers
from tests.dispatch.workers import Job
from tests.pool import RankPool, with_longer_deadline
from tests.train.common import write_text

GBIT = 0.2
SHAPED = 1.15
"""Tolerated excess over the rate of a link. There is no lower bound because the machine may be busy."""


@pytest.fixture(scope="module")
def require_hosts() -> None:
    """Skip unless namespaces can be created."""
    if problem := unavailable_reason():
        pytest.skip(problem)


@pytest.fixture(scope="module")
def pair(require_hosts: None) -> Iterator[Hosts]:
    """Two hosts with a link between them. Tests must not change them."""
    with Hosts(2, GBIT) as hosts:
        yield hosts


def ended(watched: list[int], within_s: float) -> list[bool]:
    """Return whether the processes of these pidfds have ended, and close the pidfds."""
    has_ended = []
    for pidfd in watched:
        has_ended.append(bool(select.select([pidfd], [], [], within_s)[0]))
        os.close(pidfd)
    return has_ended


def network_of(pid: int) -> int:
    return Path(f"/proc/{pid}/ns/net").stat().st_ino


# --- links ---


def test_a_link_does_not_exceed_its_rate_in_either_direction(pair: Hosts) -> None:
    rates = measure_links(pair, 6 << 20)
    assert len(rates) == 2 and all(0 < rate <= SHAPED * GBIT for rate in rates), rates


def test_a_switch_limits_every_host_to_its_rate(require_hosts: None) -> None:
    with Hosts(3, GBIT) as hosts:
        ring_rates = measure_links(hosts, 2 << 20)
        assert all(0 < rate <= SHAPED * GBIT for rate in ring_rates), ring_rates
        first, *others = measure_links(hosts, 3 << 20, [(1, 0), (2, 0)])
        assert 0 < first <= SHAPED * GBIT and others == [0, 0]


def test_the_bucket_holds_a_packet_and_the_traffic_of_the_timer_latency() -> None:
    assert burst_bytes(0.001) == burst_bytes(1) > 65536 + 45 * 66
    assert burst_bytes(40) == 40e9 / 8 * 250e-6


# --- isolation ---


def test_hosts_share_neither_name_nor_network_nor_shared_memory(pair: Hosts) -> None:
    views = run_on_hosts(host_work.describe_host, ("note",), pair, 1, 120, group=False)
    assert [(one.name, one.address) for one in views] == [(host.name, host.address) for host in pair.hosts]
    assert len({socket.gethostname(), *(one.name for one in views)}) == 3
    assert all(sorted(one.interfaces) == ["link0", "lo"] for one in views)
    assert [one.memory for one in views] == [("note-0",), ("note-1",)]
    assert not Path("/dev/shm/note-0").exists()
    assert [one.ranks for one in views] == [("0", "2", "0", "1", "0"), ("1", "2", "0", "1", "1")]


def test_the_network_of_the_machine_does_not_change(pair: Hosts) -> None:
    before = socket.if_nameindex()
    with Hosts(3, GBIT) as hosts:
        assert socket.if_nameindex() == before
        assert network_of(os.getpid()) not in {network_of(host.pid) for host in hosts.hosts}
    assert socket.if_nameindex() == before


# --- cleanup ---


def test_hosts_are_removed_after_an_exception(require_hosts: None) -> None:
    watched: list[int] = []
    networks: list[int] = []

    def fail() -> None:
        with Hosts(2, GBIT) as hosts:
            # All processes on a host are killed, including those that are not ranks.
            pipe = subprocess.PIPE
            other = subprocess.Popen(hosts.command(1, ["sh", "-c", "echo in; read _"]), stdin=pipe, stdout=pipe)
            assert other.stdout is not None and other.stdout.readline() == b"in\n"
            pids = [*(host.pid for host in hosts.hosts), other.pid]
            watched.extend(map(os.pidfd_open, pids))
            networks.extend(map(network_of, pids[:2]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    # The namespace has no process and no name, so the kernel removes it.
    assert len({*networks, network_of(os.getpid())}) == 3
    assert ended(watched, 0) == [True] * 3


MAKER = """
import os, signal, sys
from moe_comm.bench.hosts import Hosts, run_on_hosts

def hang():
    os.write(1, b"%d\\n" % os.getpid())  # one write call: two ranks write
    signal.pause()

if __name__ == "__main__":
    import maker
    with Hosts(2, 1.0) as hosts:
        for host in hosts.hosts:
            print(host.pid, flush=True)
        run_on_hosts(maker.hang, (), hosts, 1, 240, group=False)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_hosts_and_ranks_are_removed_when_their_creator_is_killed(
    require_hosts: None, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "maker.py").write_text(MAKER)
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    run = subprocess.Popen(
        [sys.executable, "-m", "maker"], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    with run:
        try:
            assert run.stdout is not None
            pids = [int(run.stdout.readline()) for _ in range(4)]
            assert len({network_of(pid) for pid in pids}) == 2
            watched = [os.pidfd_open(pid) for pid in pids]
            os.kill(pids[3], signal.SIGSTOP)  # also a stopped rank must end
        finally:
            run.send_signal(number)
    assert ended(watched, 120) == [True] * 4


# --- ranks ---


@pytest.fixture(scope="module")
def results(pair: Hosts) -> list[host_work.DispatchResult]:
    """Results of two hosts with two ranks each."""
    by_rank: list[host_work.DispatchResult] = run_on_hosts(host_work.dispatch, (), pair, 2, 240)
    return by_rank


def test_ranks_communicate_over_the_link_and_do_not_listen_elsewhere(
    pair: Hosts, results: list[host_work.DispatchResult]
) -> None:
    assert [one.rank for one in results] == [0, 1, 2, 3]
    assert [one.listening for one in results] == [{host.address} for host in pair.hosts for _ in range(2)]


def test_shared_memory_between_hosts_is_not_chosen_and_is_rejected(results: list[host_work.DispatchResult]) -> None:
    keys = [one.key for one in results]
    assert keys[0] == keys[1] != keys[2] == keys[3]
    (auto_backend,) = {one.auto_backend for one in results}
    assert auto_backend not in ("local", "shared_memory")
    assert {one.error for one in results} == {"ConfigError"}


@pytest.mark.parametrize("case", CASES)
def test_two_hosts_of_two_ranks_dispatch_with_the_bits_of_one_rank(
    results: list[host_work.DispatchResult], case: str
) -> None:
    one_rank = workers.run_case(cases.BY_NAME[case], Job("plain"), None, 0, 1)
    for field in ("rows_RD", "y_TD", "x_grad_TD", "weights_grad_TK", "experts_grad"):
        actual = torch.cat([getattr(one.results[case], field) for one in results])
        assert torch.equal(actual, getattr(one_rank, field)), field


@pytest.mark.slow
def test_two_hosts_train_with_the_losses_of_one(pair: Hosts, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("pydantic")
    settings = [*write_text(tmp_path), "run.steps=3", "run.eval_batches=1"]
    with RankPool(2) as pool:
        expected = pool.run(host_work.train_on_rank, [*settings, f"run.folder={tmp_path / 'one'}"], timeout=140)
    actual = run_on_hosts(host_work.train, ([*settings, f"run.folder={tmp_path / 'two'}"],), pair, 1, 140)
    assert len(expected[0]) == 6 and expected[0] == expected[1]
    assert actual == expected


# --- errors ---


def test_the_earliest_cause_is_raised_and_names_rank_and_host(pair: Hosts) -> None:
    with pytest.raises(RoutingError, match=r"rank 1 on host 1 \(10\.77\.0\.2\): expert id 9 of token 3"):
        run_on_hosts(host_work.fail_on_the_last, ("group",), pair, 1, 150)


@pytest.mark.parametrize(
    ("how", "message", "details"),
    [
        ("killed", r"rank 1 on host 1 .* was killed by SIGKILL", ""),
        ("foreign", r"rank 1 on host 1 .* failed with KeyError: 'a key'", "fail_on_the_last"),
        ("hang", r"rank 0 on host 0 .*, rank 1 on host 1 .* did not finish within {limit_s} s", "in fail_on_the_last"),
    ],
)
def test_other_failures_name_rank_and_host(pair: Hosts, how: str, message: str, details: str) -> None:
    def check(limit_s: float) -> None:
        with pytest.raises(RankFailed, match=message.format(limit_s=limit_s)) as raised:
            run_on_hosts(host_work.fail_on_the_last, (how,), pair, 1, limit_s, group=False)
        assert details in raised.value.details

    with_longer_deadline(check, *((4, 60) if how == "hang" else (120,)))


def test_without_root_or_tools_the_error_says_how_to_fix_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(ConfigError, match=r"cannot create 2 hosts: .*requires root; .*1000.*sudo"), Hosts(2, 1):
            pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool in ("ip", "tc") else f"/bin/{tool}")
    with pytest.raises(ConfigError, match=r"ip, tc not found; install iproute2"), Hosts(2, 1):
        pass


@pytest.mark.parametrize(
    ("count", "gbit", "message"),
    [(1, 1.0, "count"), (65, 1.0, "count"), (2, 0.0, "link_gbit"), (2, float("nan"), "nan")],
)
def test_invalid_numbers_are_rejected(count: int, gbit: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Hosts(count, gbit)


def test_functions_that_cannot_be_imported_are_rejected() -> None:
    hosts = Hosts(2, 1)
    with pytest.raises(ConfigError, match="importable"):
        run_on_hosts(lambda: None, (), hosts, 1, 1)
    with pytest.raises(ConfigError, match="ranks_per_host"):
        run_on_hosts(host_work.train, (), hosts, 0, 1)
    with pytest.raises(ConfigError, match="there are no hosts"):
        run_on_hosts(host_work.train, (), hosts, 1, 1)
