"""Compiles all Triton kernels ahead of time, without a GPU, and prints the resources that they need.

    python -m benchmarks.triton_resources --json triton-resources.json [--targets 80 90 100] [--only NAME...]

This needs only Triton: its wheel includes the assemblers (also for sm_100) and the tool that reads cubins.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.triton_specs import KERNELS, TARGETS, KernelSpec
from moe_comm.errors import ConfigError
from moe_comm.kernels.triton.launch import INTERPRETING
from moe_comm.runtime.safe_files import write_file

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def compiled(spec: KernelSpec, target: int) -> Any:
    """Compile ``spec`` for sm_``target`` and return Triton's kernel, whose ``asm["cubin"]`` has the bytes.

    Raises:
        ConfigError: Triton interprets kernels in this process, or the spec does not match the kernel's arguments.
    """
    if INTERPRETING:
        raise ConfigError("kernels cannot be compiled with TRITON_INTERPRET=1; unset it before triton is imported")
    names = spec.kernel.arg_names
    missing = [name for name in names if name not in spec.types and name not in spec.constants]
    unknown = [name for name in (*spec.types, *spec.constants) if name not in names]
    if missing or unknown:
        raise ConfigError(f"{spec.name}: the spec lacks the arguments {missing}, and has unknown arguments {unknown}")
    source = ASTSource(
        spec.kernel,
        signature={name: spec.types.get(name, "constexpr") for name in names},
        constexprs=dict(spec.constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in spec.aligned if name in spec.types},
    )
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, **spec.options}
    options["launch_cooperative_grid"] = spec.cooperative
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def resources(kernel: Any) -> dict[str, int]:
    """Return the resources of a compiled kernel: registers per thread, bytes of shared memory, bytes of stack (register
    spills), threads, bytes of the cubin."""
    cubin = kernel.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True)
    usage = _USAGE.search(output.stdout + output.stderr)
    if usage is None:
        raise RuntimeError(f"cuobjdump printed no register usage: {output.stdout} {output.stderr}")
    registers, stack, _, local = map(int, usage.groups())
    return {
        "registers": registers,
        "shared_bytes": kernel.metadata.shared,
        "stack_bytes": stack + local,
        "threads": kernel.metadata.num_warps * 32,
        "cubin_bytes": len(cubin),
    }


def table(specs: Iterable[KernelSpec], targets: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yield one row for each kernel and target."""
    for spec in specs:
        for target in (target for target in targets if target in spec.targets):
            yield {"kernel": spec.name, "target": f"sm_{target}", **resources(compiled(spec, target))}


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the table; default: the terminal")
    parser.add_argument("--targets", type=int, nargs="+", default=list(TARGETS), help="compute capabilities: 90 is 9.0")
    parser.add_argument("--only", nargs="+", default=[""], help="compile only kernels whose name contains one of these")
    options = parser.parse_args(arguments)
    rows = list(table([spec for spec in KERNELS if any(part in spec.name for part in options.only)], options.targets))
    text = json.dumps({"triton": triton.__version__, "results": rows}, indent=1) + "\n"
    if options.json is None:
        sys.stdout.write(text)
    else:
        write_file(options.json, text)


if __name__ == "__main__":
    main()
