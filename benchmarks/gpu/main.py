"""Check and measure on one NVIDIA GPU, without a network. ``bash benchmarks/gpu.sh`` calls it.

Builds the native core for this GPU, runs a smoke check of about 20 seconds, then kernel tests, measurements, and the
test suites, each with its own deadline. Each result is stored at once as a line of JSON, so a run that is killed keeps
its results. After a failed build nothing else runs. If the smoke check of a family of kernels fails, or a part of it
hangs, the later parts of this family are skipped. Other failures do not stop the later parts.

Needs torch >= 2.11 with CUDA, nvcc, cmake, ninja, pybind11, numpy, typer and rich; for the tests also pytest,
pytest-timeout and hypothesis. Triton, transformers, CuPy and SonicMoE are compared where they are installed. Installs
nothing.
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.cache import restore, store
from benchmarks.gpu.driver import Driver
from benchmarks.gpu.parts import PRESET_S, PRESETS, Part, parts
from benchmarks.gpu.profile import profile_parts
from benchmarks.gpu.sources import ROOT


def probe_device() -> tuple[str, tuple[int, int]] | None:
    """Return name and compute capability of the CUDA device, or None. A separate process frees the device again."""
    code = "import torch; print(torch.cuda.get_device_name(), *torch.cuda.get_device_capability(), sep=chr(10))"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=90)
    except subprocess.TimeoutExpired:
        print("gpu.sh: CUDA did not start within 90 s", file=sys.stderr)
        return None
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    name, major, minor = done.stdout.strip().splitlines()[-3:]
    return name, (int(major), int(minor))


def selected(found: list[Part], only: str) -> list[Part]:
    """Return the parts whose names begin with one of the comma-separated prefixes.

    Raises:
        SystemExit: a prefix matches no part.
    """
    prefixes = [prefix for prefix in only.split(",") if prefix]
    for prefix in prefixes:
        if not any(part.name.startswith(prefix) for part in found):
            names = " ".join(part.name for part in found)
            print(f"gpu.sh: no part begins with {prefix!r}; there are: {names}", file=sys.stderr)
            raise SystemExit(2)
    return [part for part in found if not prefixes or part.name.startswith(tuple(prefixes))]


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return its exit code: 0 passed, 1 a part did not pass, 2 wrong arguments or no device."""
    parser = argparse.ArgumentParser(
        prog="gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "preset", nargs="?", choices=PRESETS, help="parts that answer one question within six minutes; default: all"
    )
    parser.add_argument("--out", type=Path, help="folder of the results; default: under benchmarks/results or build")
    parser.add_argument("--cache", type=Path, help="archive of the native core and of Triton's kernels: unpacked "
                        "before the build if it exists, and replaced at the end")  # fmt: skip
    parser.add_argument("--archive", type=Path, help="archive of the folder; default OUT/results.tar.gz")
    parser.add_argument("--only", default="", help="parts, comma-separated, by the beginning of their names")
    parser.add_argument(
        "--again", action="store_true", help="also run parts whose files have not changed since they passed"
    )
    parser.add_argument("--list", action="store_true", help="print the parts with their limits and commands")
    parser.add_argument("--emulated", action="store_true", help="small sizes and emulated kernels on a CPU, for a test")
    parser.add_argument("--profile", action="store_true", help="compute-sanitizer on the smoke check, ncu on kernels")
    parser.add_argument("--deadline", type=float, help=f"seconds for all parts; {PRESET_S:.0f} by default, 540 for all")
    args = parser.parse_args(arguments)
    device = ("gpu", (9, 0)) if args.emulated or args.list else probe_device()
    if device is None:
        print("gpu.sh: torch sees no CUDA device; --emulated runs on a CPU", file=sys.stderr)
        return 2
    name, capability = device
    slug = re.sub(r"[^a-z0-9-]", "", name.lower().replace(" ", "-"))
    default = ROOT / ("build/gpu-emulated" if args.emulated else f"benchmarks/results/{slug}")
    out = (args.out or default).resolve()
    listed = profile_parts(out) if args.profile else parts(out / "results.jsonl", capability, args.emulated)
    found = selected(listed, args.only or ",".join(PRESETS.get(args.preset, ())))
    if args.list:
        for part in found:
            print(f"{part.name} ({part.limit_s:.0f} s): {shlex.join(part.command)}")
        return 0
    command = shlex.join(["bash", "benchmarks/gpu.sh", *(sys.argv[1:] if arguments is None else arguments)])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # sys.exit lets the driver kill the running part
    deadline_s = args.deadline or (PRESET_S if args.preset else 540.0)
    driver = Driver(out, (args.archive or out / "results.tar.gz").resolve(), deadline_s, command)
    if args.cache is not None:
        restore(args.cache)
    try:
        code = driver.run(found, args.again, listed)
    finally:
        if args.cache is not None:
            store(args.cache)
    print((out / "README.md").read_text() if (out / "README.md").exists() else "nothing was run", flush=True)
    for part in found:
        if (result := driver.outcomes[part.name].result) != "passed":
            print(f"gpu.sh: {part.name}: {result}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
