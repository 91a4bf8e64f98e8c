"""Description of the machine: CPU, cores, instruction set, versions and memory."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

VERSIONS = ("moe_comm", "torch", "numpy", "transformers", "mpich", "mpi4py", "torchtitan")


def machine_info(device: str) -> dict[str, Any]:
    """Return CPU, cores, instruction set, memory, versions and time, for the result of a benchmark."""
    info: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": _isa(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions(VERSIONS),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if device == "cuda":
        info["gpu"] = torch.cuda.get_device_name()
    return info


def _isa() -> str:
    """Return the instruction set of the native core, or that of torch if the native core is not built."""
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


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages ``names`` that are installed."""
    info = {}
    for name in names:
        try:
            info[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return info


def peak_rss_mib() -> float:
    """Return the peak resident memory of this process in MiB, including shared pages.

    It is read from /proc because ``getrusage`` of a child process starts with the peak of its parent.
    """
    return _status_kib("VmHWM") / 1024


def rss_mib() -> float:
    """Return the resident memory of this process in MiB, including shared pages."""
    return _status_kib("VmRSS") / 1024


def reset_peak_rss() -> bool:
    """Reset the peak of resident memory. Return False if the system does not permit it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}; memory can be measured on Linux only (this is {sys.platform})")
