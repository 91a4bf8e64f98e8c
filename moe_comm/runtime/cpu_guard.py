"""The environment variable that torch's bf16 matmuls need on some CPUs. oneDNN reads it at the first matmul.

``ONEDNN_MAX_CPU_ISA`` disables AMX on virtual machines that advertise it but hide how to configure it. Such a machine
lists ``amx_tile`` among the CPU flags, but its CPUID ends before leaf 0x1D, which describes the tile palettes. oneDNN
then configures palette 0, and the first bf16 matmul of torch fails with SIGILL.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "ONEDNN_MAX_CPU_ISA"
SAFE_ISA = "AVX512_CORE_BF16"
"""The newest instruction set of oneDNN without AMX."""
TILE_LEAF = 0x1D
CPUINFO = Path("/proc/cpuinfo")

NOTICE = (
    f"moe_comm: this machine advertises AMX but hides CPUID leaf 0x1D, so bf16 matmuls would fail with SIGILL; "
    f"set {VARIABLE}={SAFE_ISA}"
)


def has_amx_trap(cpuinfo: str) -> bool:
    """Whether ``cpuinfo`` (the text of /proc/cpuinfo) lists AMX tiles without the CPUID leaf that describes them."""
    flags: set[str] = set()
    leaves: list[int] = []
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            flags.update(value.split())
        elif key.strip() == "cpuid level" and value.strip().isdigit():
            leaves.append(int(value))
    return "amx_tile" in flags and bool(leaves) and min(leaves) < TILE_LEAF


def read_cpuinfo() -> str:
    """Return the text of /proc/cpuinfo; "" if it cannot be read."""
    try:
        return CPUINFO.read_text(errors="replace")
    except OSError:
        return ""


def apply(environ: MutableMapping[str, str] | None = None, cpuinfo: str | None = None) -> bool:
    """Disable AMX and print a notice if this machine needs it and the user has not set the variable.

    Child processes inherit the variable and print nothing. Of ranks that torchrun started, only local rank 0 prints.

    Returns:
        Whether this call has disabled AMX.
    """
    environ = os.environ if environ is None else environ
    cpuinfo = read_cpuinfo() if cpuinfo is None else cpuinfo
    if VARIABLE in environ or "DNNL_MAX_CPU_ISA" in environ:
        return False
    if not has_amx_trap(cpuinfo):
        return False
    environ[VARIABLE] = SAFE_ISA
    if environ.get("LOCAL_RANK", "0") == "0":
        print(NOTICE, file=sys.stderr)
    return True
