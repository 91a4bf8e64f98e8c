"""Environment variables that torch's math libraries need on some CPUs. They read them at the first matmul.

``ONEDNN_MAX_CPU_ISA`` disables AMX on virtual machines that advertise it but hide how to configure it. Such a machine
lists ``amx_tile`` among the CPU flags, but its CPUID ends before leaf 0x1D, which describes the tile palettes. oneDNN
then configures palette 0, and the first bf16 matmul of torch fails with SIGILL.

``MKL_CBWR`` makes MKL strict on Intel CPUs, where it otherwise chooses the order of additions of an fp32 product by the
number of rows. (Measured on Sapphire Rapids, MKL 2024.2: with 512 inputs, x @ w.T gives a row other bits for up to 15
rows than for more; with 1024 inputs, x @ w does for up to 160 rows.) A token's result would then depend on how many
tokens its expert has, and so on the number of ranks. In strict mode the bits are the same from 4 rows. On CPUs of other
vendors they are without it.
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
MKL_VARIABLE = "MKL_CBWR"
STRICT_MODES = {"avx512f": "AVX512,STRICT", "avx2": "AVX2,STRICT"}
"""Modes of ``MKL_CBWR`` by CPU flag, the first choice first."""
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


def strict_mode(cpuinfo: str) -> str | None:
    """Return the value of ``MKL_CBWR`` that ``cpuinfo`` (the text of /proc/cpuinfo) needs; None if it needs none."""
    values: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), value)
    if values.get("vendor_id", "").strip() != "GenuineIntel":
        return None
    flags = values.get("flags", "").split()
    return next((mode for flag, mode in STRICT_MODES.items() if flag in flags), None)


def read_cpuinfo() -> str:
    """Return the text of /proc/cpuinfo; "" if it cannot be read."""
    try:
        return CPUINFO.read_text(errors="replace")
    except OSError:
        return ""


def apply(environ: MutableMapping[str, str] | None = None, cpuinfo: str | None = None) -> bool:
    """Set the variables that this machine needs and the user has not set, and print a notice if AMX is disabled.

    Child processes inherit the variables and print nothing. Of ranks that torchrun started, only local rank 0 prints.

    Returns:
        Whether this call has disabled AMX.
    """
    environ = os.environ if environ is None else environ
    cpuinfo = read_cpuinfo() if cpuinfo is None else cpuinfo
    mode = strict_mode(cpuinfo)
    if mode is not None:
        environ.setdefault(MKL_VARIABLE, mode)
    if VARIABLE in environ or "DNNL_MAX_CPU_ISA" in environ:
        return False
    if not has_amx_trap(cpuinfo):
        return False
    environ[VARIABLE] = SAFE_ISA
    if environ.get("LOCAL_RANK", "0") == "0":
        print(NOTICE, file=sys.stderr)
    return True
