"""Several hosts on one machine: network namespaces with separate shared memory, connected by links of a given rate.

    host 0  10.77.0.1  link0 ═══ veth ═══ link0  10.77.0.2  host 1        two hosts: one cable

    host 0  link0 ═══ port0 ┐
    host 1  link0 ═══ port1 ├ bridge, in a separate namespace             more hosts: a switch
    host 2  link0 ═══ port2 ┘

A host is a process in its own network, UTS and mount namespaces. It has a host name, one interface and its own
/dev/shm, so ranks on different hosts cannot share memory. CPUs, process ids and all other files are shared. Each
direction of each link is shaped separately (``tc qdisc ... tbf``).

Nothing is created in the network of the machine, and nothing outside the namespaces has a name. The process of a host
reads a pipe from its creator. When the pipe closes, by ``Hosts.__exit__`` or because the creator was killed, the
process kills all processes on the host and exits. The kernel then removes namespaces, links and memory, so nothing is
left to clean up.
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
from pathlib import Path
from typing import NamedTuple, Self

from moe_comm.errors import ConfigError

MAX_HOSTS = 64
INTERFACE = "link0"
"""The only interface of a host besides loopback, with the same name on every host."""
NETWORK = "10.77.0"
FIRST_PORT = 29500
SEGMENT_BYTES = 72 << 10
"""Slightly more than the largest packet that a sender passes to the interface (64 KiB of payload and 45 headers).
tbf splits packets that are larger than its bucket, which takes much more CPU time."""
TIMER_S = 250e-6
"""Latency of the timer that releases a packet. A bucket smaller than the traffic in this time lowers the rate."""
QUEUE_MS = 50
"""Length of the queue of a link. It holds the windows of several TCP streams, so that few packets are dropped while the
streams adapt their rates."""
STEP_TIMEOUT_S = 30.0
"""Time limit of each command that creates or removes a host."""

# $1 is the host name, $2 the content of /etc/hosts. The file is removed from /dev/shm and stays available at its mount
# point. `-ef` compares the namespaces, so a process that reused a process id is not killed.
_HOST_SCRIPT = """
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


def unavailable_reason() -> str:
    """Return why this process cannot create hosts and what to do, or "". It tries to create test namespaces."""
    if sys.platform != "linux":
        return f"network namespaces require Linux; this is {sys.platform}"
    if os.geteuid() != 0:
        return f"creating network namespaces requires root; the user id is {os.geteuid()}; run the command with sudo"
    missing = {tool: package for tool, package in _TOOLS.items() if shutil.which(tool) is None}
    if missing:
        packages = " ".join(sorted(set(missing.values())))
        return f"{', '.join(missing)} not found; install {packages} (apt-get install {packages})"
    probe = subprocess.run((*_NAMESPACES, _PROBE), capture_output=True, text=True, timeout=STEP_TIMEOUT_S)
    if probe.returncode:
        message = " ".join(probe.stderr.split())
        return (
            f"root cannot create namespaces with shaped links ({message}); start a container with --privileged "
            "(or --cap-add SYS_ADMIN --cap-add NET_ADMIN); the kernel must support veth and sch_tbf"
        )
    return ""


def burst_bytes(link_gbit: float) -> int:
    """Return the bucket size of tbf, which is the largest burst after a pause.

    A real link has no bursts, so this is the smallest possible size: the larger of ``SEGMENT_BYTES`` and the traffic
    in ``TIMER_S``. For 1 Gbit/s, it is the traffic of 0.6 ms.
    """
    return max(SEGMENT_BYTES, math.ceil(link_gbit * 1e9 / 8 * TIMER_S))


def host_address(index: int) -> str:
    """Return the address of a host."""
    return f"{NETWORK}.{index + 1}"


class InterfaceBytes(NamedTuple):
    """Bytes that the interface of a host has sent and received, including headers."""

    sent: int
    received: int


def interface_bytes() -> InterfaceBytes:
    """Return the byte counters of the interface of this host. Call it on a host.

    Raises:
        ConfigError: this process is not on a host.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return InterfaceBytes(sent=int(numbers.split()[8]), received=int(numbers.split()[0]))
    raise ConfigError(f"this host has no interface {INTERFACE}")


@dataclass(frozen=True)
class Host:
    """A host. ``nsenter --net --uts --mount --target PID`` with its ``pid`` opens a shell on it."""

    index: int
    name: str
    address: str
    pid: int


class Hosts:
    """Context manager that creates hosts and removes them on exit.

    Args:
        count: number of hosts, 2 to 64.
        link_gbit: rate of each link in each direction, in Gbit/s (10^9 bits).

    Raises:
        ConfigError: an argument is out of range. On entry: this process cannot create hosts; see
            ``unavailable_reason``.
    """

    def __init__(self, count: int, link_gbit: float) -> None:
        if not 2 <= count <= MAX_HOSTS:
            raise ConfigError(f"count must be between 2 and {MAX_HOSTS} hosts; got {count}")
        if not 0.001 <= link_gbit <= 1000:
            raise ConfigError(f"link_gbit must be between 0.001 and 1000 Gbit/s; got {link_gbit}")
        self.count, self.link_gbit = count, link_gbit
        self._hosts: tuple[Host, ...] = ()
        self._processes: list[subprocess.Popen[str]] = []
        self._runs = itertools.count()

    def __enter__(self) -> Self:
        if problem := unavailable_reason():
            raise ConfigError(f"cannot create {self.count} hosts: {problem}")
        # The name is only for process lists.
        name = f"moe_comm-{os.getpid()}-{secrets.token_hex(3)}"
        addresses = [(f"{name}-host{index}", host_address(index)) for index in range(self.count)]
        # torch's store looks up addresses of peers in the notation of the second line.
        entries = (f"{address} {name}\n::ffff:{address} {name}" for name, address in addresses)
        table = "\n".join(["127.0.0.1 localhost", "::1 localhost", *entries])
        try:
            self._hosts = tuple(
                Host(index, name, address, self._start(name, table)) for index, (name, address) in enumerate(addresses)
            )
            if self.count == 2:
                one, other = self._hosts
                self._connect(one.pid, INTERFACE, other.pid, INTERFACE)
            else:
                self._connect_to_switch(self._start(f"{name}-switch", table))
            for host in self.hosts:
                _on(host.pid, f"ip address add {host.address}/24 dev {INTERFACE}")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes on the hosts and remove the hosts."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STEP_TIMEOUT_S)
            process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()
        self._processes, self._hosts = [], ()

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts by index. Raises ``ConfigError`` outside the context."""
        if not self._hosts:
            raise ConfigError("there are no hosts; use them inside `with Hosts(...) as hosts:`")
        return self._hosts

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs ``command`` on ``host``. The process executes ``command`` directly."""
        return [*_enter(self.hosts[host].pid), *command]

    def next_port(self) -> int:
        """Return a new port for the store of the ranks, so that sockets of the previous run do not matter."""
        return FIRST_PORT + next(self._runs) % 1000

    def _start(self, name: str, table: str) -> int:
        """Start the process of a host and return its process id."""
        pipe = subprocess.PIPE
        # A new session: only the creator receives Ctrl-C from the terminal.
        process = subprocess.Popen(
            (*_NAMESPACES, _HOST_SCRIPT, "sh", name, table),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        assert process.stdout is not None and process.stderr is not None
        ready, _, _ = select.select([process.stdout], [], [], STEP_TIMEOUT_S)
        if not ready or process.stdout.readline() != "up\n":
            process.kill()
            raise ConfigError(f"host {name} did not start: {' '.join(process.stderr.read().split())}")
        return process.pid

    def _connect(self, one: int, name: str, other: int, other_name: str) -> None:
        """Connect two namespaces by a cable. Each end is shaped for its direction of the traffic."""
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
