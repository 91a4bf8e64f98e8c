"""Compiles csrc/cuda by nvcc for GPUs that are not there, and says what each kernel takes of one.

    python -m benchmarks.cuda_resources --json cuda-resources.json [--targets sm_80 sm_90a sm_100a] [--csrc csrc]

Needs nvcc, and no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_comm.errors import KernelError, MissingDependency
from moe_comm.gpu import nvrtc

TARGETS = ("sm_80", "sm_90a", "sm_100a")
"""A100; H100 and H200; B200."""
DEADLINE_S = 600
_KERNEL = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'(.*?)Used (\d+) registers([^\n]*)", re.DOTALL)
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def find_nvcc() -> str:
    """Path of nvcc.

    Raises:
        MissingDependency: there is none on PATH.
    """
    found = shutil.which("nvcc")
    if found is None:
        raise MissingDependency("nvcc is not on PATH; install the CUDA toolkit, or put its bin folder there")
    return found


def nvcc_version() -> str:
    """Of the compiler that ``resources`` uses: "13.0.88"."""
    said = subprocess.run([find_nvcc(), "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    return next((word[1:] for word in said.split() if re.fullmatch(r"V\d[\d.]*", word)), "unknown")


def resources(
    target: str, files: Mapping[str, str] | None = None, source: str = nvrtc.SOURCE
) -> Iterator[dict[str, Any]]:
    """A row for each kernel of ``source``: registers a thread; bytes spilled (stored, loaded), of stack, and of static
    shared memory.

    Args:
        target: ``sm_90a``.
        files: by path below csrc; those in the native core if not given.

    Raises:
        KernelError: nvcc refuses.
        MissingDependency: no nvcc.
    """
    nvcc = find_nvcc()
    given = nvrtc.needed(source, files if files is not None else nvrtc.carried_sources())
    with tempfile.TemporaryDirectory() as folder:
        for name, text in given.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        command = [nvcc, "-cubin", f"-gencode=arch={target.replace('sm_', 'compute_')},code={target}", *nvrtc.OPTIONS]
        command += ["-Xptxas=-v", f"-I{folder}", "-o", str(Path(folder, "kernels.cubin")), str(Path(folder, source))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise KernelError(f"nvcc refuses {source} for {target}:\n{done.stderr.strip()[-4000:]}")
    for found in _KERNEL.finditer(done.stdout + done.stderr):
        name, compiled_for, between, registers, rest = found.groups()
        stack = _STACK.search(between)
        shared = re.search(r"(\d+) bytes smem", rest)
        frame, stores, loads = map(int, stack.groups()) if stack else (0, 0, 0)
        yield {
            "kernel": name.removeprefix("p2p_"),
            "target": compiled_for,
            "registers": int(registers),
            "spill_bytes": stores + loads,
            "stack_bytes": frame,
            "shared_bytes": int(shared[1]) if shared else 0,
        }


def read_tree(csrc: Path) -> dict[str, str]:
    """The files below a checkout's csrc."""
    return {str(path.relative_to(csrc)): path.read_text() for path in csrc.rglob("*") if path.suffix in (".h", ".cu")}


def table(targets: Iterable[str], files: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What is written down: the compiler and the rows."""
    rows = [row for target in targets for row in resources(target, files)]
    return {"nvcc": nvcc_version(), "results": rows}


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the table; without it, to the terminal")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    parser.add_argument("--csrc", type=Path, help="a checkout's folder; without it, what the native core carries")
    options = parser.parse_args(arguments)
    found = table(options.targets, read_tree(options.csrc) if options.csrc else None)
    text = json.dumps(found, indent=1) + "\n"
    if options.json is None:
        sys.stdout.write(text)
    else:
        options.json.write_text(text)


if __name__ == "__main__":
    main()
