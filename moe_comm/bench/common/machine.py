"""What a number depends on: cores, vector unit, versions, memory."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

VERSIONS = ("moe_comm", "torch", "numpy", "transformers", "mpich", "mpi4py", "torchtitan")


def facts(device: str) -> dict[str, Any]:
    """CPU, cores, vector unit, memory, versions and time of day, for the result."""
    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": _isa(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": _versions(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _isa() -> str:
    """The vector unit that the native core uses; torch's where it is not built."""
    try:
        # Imported here because the native core may not be built.
        from moe_comm import _C as native  # type: ignore[attr-defined,unused-ignore]
    except ImportError:
        return str(torch.backends.cpu.get_cpu_capability())
    return str(native.isa())


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def peak_rss_mib() -> float:
    """Most memory this process ever had resident, shared pages included; MiB.

    From /proc, not ``getrusage``: there a child starts with its parent's peak.
    """
    return _status_kib("VmHWM") / 1024


def rss_mib() -> float:
    """Memory resident now, shared pages included; MiB."""
    return _status_kib("VmRSS") / 1024


def reset_peak_rss() -> bool:
    """Start the high-water mark anew; False where the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}; memory is measured on Linux only (this is {sys.platform})")
