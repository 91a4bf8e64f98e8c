"""Keep oneDNN away from AMX where a virtual machine advertises it but hides how to set it up.

Such a machine lists ``amx_tile`` among the CPU's flags while CPUID ends below leaf 0x1D, which describes the tile
palettes. oneDNN then configures palette 0, and the first bf16 matmul of torch dies with SIGILL. oneDNN reads
``ONEDNN_MAX_CPU_ISA`` once, at its first use, so the setting must be there before torch's first matmul.
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
    f"moe_comm: this machine advertises AMX but hides CPUID leaf 0x1D, so bf16 matmuls would die with SIGILL; "
    f"set {VARIABLE}={SAFE_ISA}"
)


def has_amx_trap(cpuinfo: str) -> bool:
    """Whether ``cpuinfo`` (the text of /proc/cpuinfo) shows tiles without the CPUID leaf that describes them."""
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
    """The text of /proc/cpuinfo; empty where there is none."""
    try:
        return CPUINFO.read_text(errors="replace")
    except OSError:
        return ""


def apply(environ: MutableMapping[str, str] | None = None, cpuinfo: str | None = None) -> bool:
    """Set ``ONEDNN_MAX_CPU_ISA`` if this machine needs it and the user did not set it; say so once on stderr.

    Child processes inherit the setting, so ranks started by this process stay silent; of ranks that torchrun
    started, the first of a host speaks.

    Returns:
        whether it was set by this call.
    """
    environ = os.environ if environ is None else environ
    if VARIABLE in environ or "DNNL_MAX_CPU_ISA" in environ:
        return False
    if not has_amx_trap(read_cpuinfo() if cpuinfo is None else cpuinfo):
        return False
    environ[VARIABLE] = SAFE_ISA
    if environ.get("LOCAL_RANK", "0") == "0":
        print(NOTICE, file=sys.stderr)
    return True
