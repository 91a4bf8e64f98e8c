"""``bash benchmarks/gpu.sh --profile``: compute-sanitizer on the smoke check, and ``ncu`` on the three longest kernels.

Run it after a run without ``--profile``, because the kernels are taken from its results. If a tool is missing or does
not support the device, only its own part fails.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from benchmarks.gpu.parts import Part
from benchmarks.gpu.record import read
from benchmarks.gpu.report import longest_kernels

DEFAULT_KERNELS = ("push", "sum", "meet")
"""Kernels to profile if there are no results."""


def short_name(kernel: str) -> str:
    """Return the function name of a demangled kernel, such as ``push`` of ``void moe_comm::push<...>(...)``."""
    found = re.search(r"(\w+)\s*(?:<.*)?\(", kernel)
    return found.group(1) if found else kernel


def profile_parts(out: Path) -> list[Part]:
    """Return the parts. Their output is in NAME.log, and the reports of ncu in ``out``."""
    python = sys.executable
    smoke = (python, "-m", "benchmarks.gpu.smoke", "--limit", "100")
    kernels = [short_name(name) for name in longest_kernels(read(out / "results.jsonl"))] or DEFAULT_KERNELS
    case = ("movement", "dispatch", "--tokens", "4096", "--iterations", "1", "--warmup", "1", "--limit", "100")
    once = (python, "-m", f"benchmarks.gpu.{case[0]}", *case[1:], "--only", "dispatch, 4096 tokens, peer_to_peer")
    parts = [
        Part(f"sanitize-{tool}", 120, ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *smoke))
        for tool in ("memcheck", "racecheck")
    ]
    for kernel in dict.fromkeys(kernels):
        options = (
            "--set",
            "full",
            "--clock-control",
            "none",
            "--kernel-name",
            f"regex:{kernel}",
            "--launch-count",
            "2",
        )
        file = str(out / f"ncu-{kernel}")
        parts.append(Part(f"ncu-{kernel}", 120, ("ncu", *options, "-f", "-o", file, "--page", "details", *once)))
    return parts
