"""The name of this host, as far as sharing memory goes."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path


def host_key() -> str:
    """Equal for two processes exactly when they see the same /dev/shm on the same kernel and name pids alike."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(os.stat("/dev/shm").st_dev))
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError as error:
        parts.append(f"unknown: {error.errno}")
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def host_word() -> int:
    """``host_key`` as a number that fits an int64."""
    return int(host_key(), 16) >> 2
