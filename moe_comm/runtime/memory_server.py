"""A small process that outlives the ranks of a host and holds memory for restarted ranks.

    launcher or torchrun's agent
        ├─ ranks, attempt 0 ──┐ request memory by name,
        ├─ ranks, attempt 1 ──┤ receive a file descriptor over the socket, and map it:
        ┊                     ▼ the server itself never reads the memory
        └ ─ ─ watched by ─ ─ memory server: socket (abstract, this user only), {name: memfd}

Memory and socket have no name in a file system, so they end with the process. It ends when the launcher has ended or
has removed its folder, when the ranks request it at the end of a run, and when no rank was connected for ``idle_s``.

``moe_comm.runtime.persistent_memory`` runs it as an isolated script that only imports the standard library. It starts
in 20 ms and needs little memory of its own.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from typing import Any

MESSAGE_BYTES = 1 << 20
"""Maximum size of a request or an answer."""
LOOK_S = 0.25
"""Seconds between two checks of the launcher's folder."""
MAX_CLIENTS = 4096


def start_ticks(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot. It distinguishes processes with equal pids."""
    # Read the main thread, which starts with its process: under qemu, /proc/PID/stat of the reader has another time.
    with open(f"/proc/{pid}/task/{pid}/stat", "rb") as file:
        # The process name in parentheses may contain any character.
        return int(file.read().rpartition(b")")[2].split()[19])


def peer_user(connection: socket.socket) -> int:
    """Return the user id at the other end of a unix socket."""
    size = struct.calcsize("3i")
    credentials = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(credentials[1])


class MemoryServer:
    """Answers requests: JSON objects with a key ``do``, one per message.

    hello               {"token": ...}            id of this server
    list                {"sizes": {name: bytes}}
    get, name, size     {"size": bytes} and the descriptor. size 0: existing memory, or {"error": ...}. Otherwise new
                        memory, unless there is memory of at least that size
    retain, names       frees all others
    end                 the server ends
    """

    def __init__(self, name: str, pid: int, ticks: int, folder: str, idle_s: float) -> None:
        """Raises OSError if the name is taken, or the launcher has ended."""
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.bind(f"\0{name}")
        self._launcher, self._pid, self._ticks = _open_pidfd(pid), pid, ticks
        if not self._launcher_runs():
            raise ProcessLookupError(f"process {pid} has ended, or its pid was reused")
        self._server.listen(128)
        self._server.setblocking(False)
        self._folder, self._idle_s = folder, idle_s
        self._token = os.urandom(8).hex()
        self._memory: dict[str, int] = {}
        self._clients: set[socket.socket] = set()
        self._ended = False

    def serve(self) -> None:
        """Answer requests until the server has to end."""
        selector = selectors.DefaultSelector()
        if self._launcher >= 0:
            selector.register(self._launcher, selectors.EVENT_READ)  # readable once the process has ended
        selector.register(self._server, selectors.EVENT_READ)
        connected_s = time.monotonic()
        while not self._ended and (not self._folder or os.path.isdir(self._folder)):
            if self._clients:
                connected_s = time.monotonic()
            elif time.monotonic() - connected_s > self._idle_s:
                return
            if self._launcher < 0 and not self._launcher_runs():
                return
            for key, _ in selector.select(LOOK_S):
                if key.fileobj == self._launcher:
                    return
                if key.fileobj is self._server:
                    self._accept(selector)
                elif isinstance(key.fileobj, socket.socket):
                    self._answer_client(selector, key.fileobj)

    def _launcher_runs(self) -> bool:
        try:
            return start_ticks(self._pid) == self._ticks
        except OSError:
            return False

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):  # the client has disconnected
            client, _ = self._server.accept()
            if peer_user(client) != os.getuid() or len(self._clients) >= MAX_CLIENTS:
                client.close()
                return
            client.settimeout(1.0)  # limits the time to send to a client that does not read
            self._clients.add(client)
            selector.register(client, selectors.EVENT_READ)

    def _answer_client(self, selector: selectors.BaseSelector, client: socket.socket) -> None:
        try:
            if request := client.recv(MESSAGE_BYTES):
                answer, handles = self._answer(request)
                socket.send_fds(client, [json.dumps(answer).encode()], handles)
                return
        except OSError:
            pass
        selector.unregister(client)
        self._clients.discard(client)
        client.close()

    def _answer(self, request: bytes) -> tuple[dict[str, Any], list[int]]:
        try:
            message = json.loads(request)
            do = message["do"]
            if do == "hello":
                return {"token": self._token}, []
            if do == "list":
                return {"sizes": {name: os.fstat(handle).st_size for name, handle in self._memory.items()}}, []
            if do == "get":
                handle = self._get(str(message["name"]), int(message["size"]))
                return {"size": os.fstat(handle).st_size}, [handle]
            if do == "retain":
                for name in self._memory.keys() - set(message["names"]):
                    os.close(self._memory.pop(name))
                return {}, []
            if do == "end":
                self._ended = True
                return {}, []
        except (ValueError, KeyError, TypeError, OSError, AttributeError, RecursionError) as error:
            return {"error": f"{type(error).__name__}: {error}"}, []
        return {"error": f"unknown request {str(do)[:80]!r}"}, []

    def _get(self, name: str, size: int) -> int:
        handle = self._memory.get(name)
        if handle is not None and size <= os.fstat(handle).st_size:  # it may hold the only complete replica
            return handle
        if not size:
            raise KeyError(f"there is no memory with the name {name!r}")
        if handle is not None:
            os.close(self._memory.pop(name))
        fresh = os.memfd_create("moe_comm-snapshot", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fresh, size)
        except OSError:
            os.close(fresh)
            raise
        self._memory[name] = fresh
        return fresh


def _open_pidfd(pid: int) -> int:
    """Return a pidfd of a process; -1 if they are not supported. Raises OSError if the process has ended."""
    try:
        return os.pidfd_open(pid)
    except AttributeError:
        return -1
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):
            return -1
        raise


def main(arguments: list[str]) -> int:
    """Run a server. Arguments: name, pid and start ticks of the launcher, its folder or "", idle time in seconds."""
    name, pid, ticks, folder, idle_s = arguments
    # Ctrl-C is sent to all processes of a terminal. The launcher decides when the run ends.
    for kind in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(kind, signal.SIG_IGN)
    try:
        server = MemoryServer(name, int(pid), int(ticks), folder, float(idle_s))
    except OSError:
        return 1  # another rank has started one, or the launcher has ended
    server.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
