"""Compile csrc/cuda with nvcc and list the resources of each kernel. Requires nvcc, but no GPU.

python -m benchmarks.cuda_resources --json cuda-resources.json [--targets sm_80 sm_90a sm_100a] [--csrc csrc]
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_comm.errors import KernelError, MissingDependency
from moe_comm.gpu import gemm, nvrtc

TARGETS = ("sm_80", "sm_90a", "sm_100a")
"""A100; H100 and H200; B200."""
DEADLINE_S = 600
_KERNEL = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'(.*?)Used (\d+) registers([^\n]*)", re.DOTALL)
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def find_nvcc() -> str:
    """Return the path of nvcc, or raise ``MissingDependency``."""
    path = shutil.which("nvcc")
    if path is None:
        raise MissingDependency("nvcc is not on PATH; install the CUDA toolkit and add its bin folder to PATH")
    return path


def nvcc_version() -> str:
    """Return the version of nvcc, such as "13.0.88"."""
    output = subprocess.run([find_nvcc(), "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    return next((word[1:] for word in output.split() if re.fullmatch(r"V\d[\d.]*", word)), "unknown")


def resources(
    target: str, files: Mapping[str, str] | None = None, source: str = nvrtc.SOURCE
) -> Iterator[dict[str, Any]]:
    """Yield a row for each kernel of ``source``: registers per thread, and bytes of spills, stack and shared memory.

    Args:
        target: architecture, such as ``sm_90a``.
        files: sources by path below csrc. None: the sources in the native core.
        source: file to compile.

    Raises:
        KernelError: nvcc failed.
        MissingDependency: nvcc is not installed.
    """
    nvcc = find_nvcc()
    needed = nvrtc.needed(source, files if files is not None else nvrtc.carried_sources())
    with tempfile.TemporaryDirectory() as folder:
        for name, text in needed.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        command = [nvcc, "-cubin", f"-gencode=arch={target.replace('sm_', 'compute_')},code={target}", *nvrtc.OPTIONS]
        command += ["-Xptxas=-v", f"-I{folder}", "-o", str(Path(folder, "kernels.cubin")), str(Path(folder, source))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise KernelError(f"nvcc failed to compile {source} for {target}:\n{done.stderr.strip()[-4000:]}")
    for match in _KERNEL.finditer(done.stdout + done.stderr):
        name, compiled_for, between, registers, rest = match.groups()
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
    """Return the sources below the csrc folder of a checkout."""
    return {str(path.relative_to(csrc)): path.read_text() for path in csrc.rglob("*") if path.suffix in (".h", ".cu")}


def table(targets: Sequence[str], files: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the JSON object: the compiler version and the rows. The GEMMs exist for one target."""
    rows = [row for target in targets for row in resources(target, files)]
    if gemm.ARCH in targets:
        rows += resources(gemm.ARCH, files, gemm.SOURCE)
    return {"nvcc": nvcc_version(), "results": rows}


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="output file; default: standard output")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    parser.add_argument("--csrc", type=Path, help="csrc folder of a checkout; default: the sources in the native core")
    options = parser.parse_args(arguments)
    result = table(options.targets, read_tree(options.csrc) if options.csrc else None)
    text = json.dumps(result, indent=1) + "\n"
    if options.json is None:
        sys.stdout.write(text)
    else:
        options.json.write_text(text)


if __name__ == "__main__":
    main()
