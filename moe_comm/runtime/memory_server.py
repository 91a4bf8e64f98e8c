"""A small process that outlives the ranks of a host and keeps memory for those that are started in their place.

    launcher or torchrun's agent
        ├─ ranks, attempt 0 ──┐ ask for memory by name,
        ├─ ranks, attempt 1 ──┤ get a file descriptor over the socket, and map it:
        ┊                     ▼ the server itself never looks into it
        └ ─ ─ watched by ─ ─ memory server: socket (abstract, this user only), {name: memfd}

Nothing of it has a name in a file system: memory and socket are gone with the process. That ends as soon as the
launcher has ended or has removed its folder, when the ranks say that the run is over, and where for ``idle_s`` seconds
no rank was connected.

Run as a script by ``moe_comm.runtime.persistent_memory``, isolated and with nothing imported but the standard library:
it starts in 20 ms and takes no more memory than it keeps.
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
"""Most that one request or answer has."""
LOOK_S = 0.25
"""Seconds between two looks at the launcher's folder."""
MAX_CLIENTS = 4096


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since the machine did: tells it from a later one of the same number.

    Raises:
        OSError: there is no such process.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name, which is in brackets, may hold anything.
        return int(file.read().rpartition(b")")[2].split()[19])


def peer_user(connection: socket.socket) -> int:
    """The user at the other end of a unix socket."""
    size = struct.calcsize("3i")
    credentials = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(credentials[1])


class MemoryServer:
    """Answers requests: JSON objects with a key ``do``, a message each.

    hello               {"token": ...}            differs from server to server
    list                {"sizes": {name: bytes}}
    get, name, size     {"size": bytes} and the descriptor. size 0: what there is, or {"error": ...}; else made, empty,
                        unless it is there in that size
    retain, names       drops all others
    end                 the server ends
    """

    def __init__(self, name: str, owner: int, ticks: int, folder: str, idle_s: float) -> None:
        """Raises OSError where the name is taken, or the owner has ended."""
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.bind(f"\0{name}")
        self._owner, self._pid, self._ticks = _hold(owner), owner, ticks
        if not self._owner_runs():
            raise ProcessLookupError(f"process {owner} has ended, or is another one by now")
        self._server.listen(128)
        self._server.setblocking(False)
        self._folder, self._idle_s = folder, idle_s
        self._token = os.urandom(8).hex()
        self._memory: dict[str, int] = {}
        self._clients: set[socket.socket] = set()
        self._ended = False

    def serve(self) -> None:
        """Until there is a reason to end."""
        selector = selectors.DefaultSelector()
        if self._owner >= 0:
            selector.register(self._owner, selectors.EVENT_READ)  # readable once the process has ended
        selector.register(self._server, selectors.EVENT_READ)
        seen = time.monotonic()
        while not self._ended and (not self._folder or os.path.isdir(self._folder)):
            if self._clients:
                seen = time.monotonic()
            elif time.monotonic() - seen > self._idle_s:
                return
            if self._owner < 0 and not self._owner_runs():
                return
            for key, _ in selector.select(LOOK_S):
                if key.fileobj == self._owner:
                    return
                if key.fileobj is self._server:
                    self._accept(selector)
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(selector, key.fileobj)

    def _owner_runs(self) -> bool:
        try:
            return start_ticks(self._pid) == self._ticks
        except OSError:
            return False

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):  # whoever came has gone again
            client, _ = self._server.accept()
            if peer_user(client) != os.getuid() or len(self._clients) >= MAX_CLIENTS:
                client.close()
                return
            client.settimeout(1.0)  # for an answer to one who does not read
            self._clients.add(client)
            selector.register(client, selectors.EVENT_READ)

    def _hear(self, selector: selectors.BaseSelector, client: socket.socket) -> None:
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
            asked = json.loads(request)
            do = asked["do"]
            if do == "hello":
                return {"token": self._token}, []
            if do == "list":
                return {"sizes": {name: os.fstat(handle).st_size for name, handle in self._memory.items()}}, []
            if do == "get":
                handle = self._get(str(asked["name"]), int(asked["size"]))
                return {"size": os.fstat(handle).st_size}, [handle]
            if do == "retain":
                for name in self._memory.keys() - set(asked["names"]):
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
        if handle is not None and size <= os.fstat(handle).st_size:  # what is in it may be the only whole copy
            return handle
        if not size:
            raise KeyError(f"nothing is kept as {name!r}")
        if handle is not None:
            os.close(self._memory.pop(name))
        fresh = os.memfd_create("moe_comm-kept", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fresh, size)
        except OSError:
            os.close(fresh)
            raise
        self._memory[name] = fresh
        return fresh


def _hold(pid: int) -> int:
    """A descriptor of a process; -1 where there is no such thing: some Pythons and sandboxes lack it.

    Raises:
        OSError: it has ended.
    """
    try:
        return os.pidfd_open(pid)
    except AttributeError:
        return -1
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):
            return -1
        raise


def main(arguments: list[str]) -> int:
    """name, process id and start of the launcher, its folder ("" for none), seconds without a client."""
    name, owner, ticks, folder, idle_s = arguments
    # Ctrl-C goes to all processes of a terminal: the launcher decides when it is over.
    for kind in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(kind, signal.SIG_IGN)
    try:
        server = MemoryServer(name, int(owner), int(ticks), folder, float(idle_s))
    except OSError:
        return 1  # another rank was faster, or nobody is left to keep anything for
    server.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
