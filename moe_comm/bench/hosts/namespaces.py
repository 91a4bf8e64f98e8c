"""Several hosts on one machine: separate networks, names and shared memory, joined by links of a given rate.

    host 0  10.77.0.1  link0 ═══ veth ═══ link0  10.77.0.2  host 1        two hosts: one cable

    host 0  link0 ═══ port0 ┐
    host 1  link0 ═══ port1 ├ bridge, in a namespace of its own           more hosts: a switch
    host 2  link0 ═══ port2 ┘

A host is a process that sits in a network, a UTS and a mount namespace of its own: it has a name, one interface, and
its own /dev/shm, so that ranks on two hosts share memory no more than ranks on two machines do. Processors, process
ids and all other files are shared. Both directions of every link are shaped (``tc qdisc ... tbf``), each by itself.

Nothing is made in the machine's own network and nothing has a name outside these namespaces: they live as long as a
process sits in them. The process that keeps a host reads a pipe from its maker; when that closes, whether by
``Hosts.__exit__`` or because the maker was killed, it kills whatever runs on the host and ends, and the kernel takes
down namespaces, links and memory. So there is nothing that a later run would have to sweep.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import secrets
import select
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from moe_comm.errors import ConfigError

MAX_HOSTS = 64
INTERFACE = "link0"
"""A host's only interface beside loopback; it has the same name on every host."""
NETWORK = "10.77.0"
FIRST_PORT = 29500
SEGMENT_BYTES = 72 << 10
"""A little more than the largest packet (64 KiB of payload and the headers of its 45 pieces) that a sender hands to the
interface. tbf lets a packet pass whole if its bucket holds it, and else cuts it up: many times the work."""
TIMER_S = 250e-6
"""How late the timer that lets the next packet go may fire; a bucket smaller than this much traffic loses rate."""
QUEUE_MS = 50
"""What may wait in front of a link, as in a switch: enough for the windows of some TCP streams, so that few packets are
lost while they find their rate."""
STEP_TIMEOUT_S = 30.0
"""For each command that makes or ends a host."""

# $1 is the name, $2 all names and addresses: ranks look up their own. The file is gone from /dev/shm at once, and stays
# where it is mounted. `-ef` compares the namespaces themselves, so a process id that was used again is never hit.
_KEEPER = """
set -e
echo "$1" > /proc/sys/kernel/hostname
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
if [ -e /etc/hosts ]; then
    echo "$2" > /dev/shm/hosts
    mount --bind /dev/shm/hosts /etc/hosts
    rm /dev/shm/hosts
fi
ip link set lo up
echo up
while read -r _; do :; done
left=yes
while [ "$left" ]; do
    left=
    for p in /proc/[0-9]*; do
        if [ "$p" != "/proc/$$" ] && [ "$p/ns/net" -ef "/proc/$$/ns/net" ]; then
            left=yes
            kill -9 "${p#/proc/}" || :
        fi
    done
    [ -z "$left" ] || sleep 0.02
done 2>/dev/null
"""
_PROBE = """
ip link add name end0 type veth peer name end1 && tc qdisc add dev end0 root tbf rate 1mbit burst 10kb latency 50ms &&
mount -t tmpfs tmpfs /dev/shm
"""
_NAMESPACES = ("unshare", "--net", "--uts", "--mount", "sh", "-c")
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "util-linux"}


def why_not() -> str:
    """Why this process cannot make hosts, and what to do about it; "" if it can. Tries in namespaces of its own."""
    if sys.platform != "linux":
        return f"hosts are made of Linux's network namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return f"making network namespaces needs root, and this process has user id {os.geteuid()}; run it with sudo"
    missing = {tool: package for tool, package in _TOOLS.items() if shutil.which(tool) is None}
    if missing:
        packages = " ".join(sorted(set(missing.values())))
        return f"{', '.join(missing)} not found; install {packages} (apt-get install {packages})"
    tried = subprocess.run((*_NAMESPACES, _PROBE), capture_output=True, text=True, timeout=STEP_TIMEOUT_S)
    if tried.returncode:
        said = " ".join(tried.stderr.split())
        return (
            f"root may not make namespaces with shaped links here ({said}); in a container, start it with --privileged "
            "(or --cap-add SYS_ADMIN --cap-add NET_ADMIN), and the kernel needs veth and sch_tbf"
        )
    return ""


def burst_bytes(link_gbit: float) -> int:
    """Size of tbf's bucket, the most that passes at once after a pause.

    As small as it can be, for a real link lets nothing pass at once, and no smaller than either of ``SEGMENT_BYTES``
    and ``TIMER_S`` at this rate: 0.6 ms of a link of 1 Gbit/s.
    """
    return max(SEGMENT_BYTES, math.ceil(link_gbit * 1e9 / 8 * TIMER_S))


def host_address(index: int) -> str:
    """Of a host, on the links."""
    return f"{NETWORK}.{index + 1}"


@dataclass(frozen=True)
class Host:
    """pid: of the process that keeps it; ``nsenter --net --uts --mount --target PID`` opens a shell on the host."""

    index: int
    name: str
    address: str
    pid: int


class Hosts:
    """``count`` hosts whose links carry ``link_gbit`` Gbit/s (10^9 bits) in each direction; a context manager.

    Raises, when entered:
        ConfigError: this process may not make hosts, or ip or tc is missing; the message says what to do.
    """

    def __init__(self, count: int, link_gbit: float) -> None:
        if not 2 <= count <= MAX_HOSTS:
            raise ConfigError(f"count must be between 2 and {MAX_HOSTS} hosts; got {count}")
        if not 0.001 <= link_gbit <= 1000:
            raise ConfigError(f"link_gbit must be between 0.001 and 1000 Gbit/s; got {link_gbit}")
        self.count, self.link_gbit = count, link_gbit
        self._hosts: tuple[Host, ...] = ()
        self._keepers: list[subprocess.Popen[str]] = []
        self._runs = itertools.count()

    def __enter__(self) -> Self:
        if problem := why_not():
            raise ConfigError(f"cannot make {self.count} hosts: {problem}")
        cable = self.count == 2
        # Not for finding it again, only for people who look at a list of processes.
        name = f"moe_comm-{os.getpid()}-{secrets.token_hex(3)}"
        places = [(f"{name}-host{index}", host_address(index)) for index in range(self.count)]
        # The second line of each host is for torch's store, which looks up who calls in that notation.
        entries = (f"{address} {name}\n::ffff:{address} {name}" for name, address in places)
        table = "\n".join(["127.0.0.1 localhost", "::1 localhost", *entries])
        try:
            self._hosts = tuple(
                Host(index, name, address, self._keep(name, table)) for index, (name, address) in enumerate(places)
            )
            if cable:
                one, other = self._hosts
                self._connect(one.pid, INTERFACE, other.pid, INTERFACE)
            else:
                self._connect_to_switch(self._keep(f"{name}-switch", table))
            for host in self.hosts:
                _on(host.pid, f"ip address add {host.address}/24 dev {INTERFACE}")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what runs on the hosts and take them down."""
        for keeper in self._keepers:
            assert keeper.stdin is not None and keeper.stdout is not None and keeper.stderr is not None
            keeper.stdin.close()
        for keeper in self._keepers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                keeper.wait(STEP_TIMEOUT_S)
            keeper.kill()
            keeper.wait()
            for pipe in (keeper.stdout, keeper.stderr):
                assert pipe is not None
                pipe.close()
        self._keepers, self._hosts = [], ()

    @property
    def hosts(self) -> tuple[Host, ...]:
        """By index.

        Raises:
            ConfigError: they are not up.
        """
        if not self._hosts:
            raise ConfigError("the hosts are not up; use them inside `with Hosts(...) as hosts:`")
        return self._hosts

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """``command`` as it is to be run on ``host``. It becomes the command's own process: no child of another."""
        return [*_enter(self.hosts[host].pid), *command]

    def next_port(self) -> int:
        """For the ranks' store, another one every time: nobody waits for sockets of the run before."""
        return FIRST_PORT + next(self._runs) % 1000

    def _keep(self, name: str, table: str) -> int:
        """Start the process that keeps a host; its id."""
        pipe = subprocess.PIPE
        # In a session of its own: a Ctrl-C at the terminal is the maker's to handle.
        keeper = subprocess.Popen(
            (*_NAMESPACES, _KEEPER, "sh", name, table),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        )
        self._keepers.append(keeper)
        assert keeper.stdout is not None and keeper.stderr is not None
        ready, _, _ = select.select([keeper.stdout], [], [], STEP_TIMEOUT_S)
        if not ready or keeper.stdout.readline() != "up\n":
            keeper.kill()
            raise ConfigError(f"host {name} did not come up: {' '.join(keeper.stderr.read().split())}")
        return keeper.pid

    def _connect(self, one: int, name: str, other: int, other_name: str) -> None:
        """A cable between two namespaces, each end shaped: what leaves one end is the other direction's traffic."""
        _on(one, f"ip link add name {name} type veth peer name {other_name} netns {other}")
        for pid, interface in ((one, name), (other, other_name)):
            shape = f"rate {round(self.link_gbit * 1e9)}bit burst {burst_bytes(self.link_gbit)} latency {QUEUE_MS}ms"
            _on(pid, f"tc qdisc add dev {interface} root tbf {shape}")
            _on(pid, f"ip link set {interface} up")

    def _connect_to_switch(self, switch: int) -> None:
        _on(switch, "ip link add name bridge type bridge")
        for host in self.hosts:
            self._connect(host.pid, INTERFACE, switch, port := f"port{host.index}")
            _on(switch, f"ip link set {port} master bridge")
        _on(switch, "ip link set bridge up")


def _enter(pid: int) -> list[str]:
    return ["nsenter", "--target", str(pid), "--net", "--uts", "--mount", "--"]


def _on(pid: int, command: str) -> None:
    """Run one ip or tc command in the namespaces of ``pid``."""
    done = subprocess.run([*_enter(pid), *command.split()], capture_output=True, text=True, timeout=STEP_TIMEOUT_S)
    if done.returncode:
        raise ConfigError(f"`{command}` failed: {' '.join(done.stderr.split())}")
