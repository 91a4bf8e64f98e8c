"""What this machine offers and lacks: the body of ``moe-comm doctor``. Looks, and changes nothing.

torch, the native core and rich are imported inside of functions: that one of them is missing is a finding.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from moe_comm.runtime import cpu_guard
from moe_comm.runtime.launch import available_cores

Status = Literal["ok", "note", "missing", "broken"]
"""``note``: works, but worth knowing. ``missing``: optional and absent. ``broken``: moe_comm cannot do its work."""

CHILD_DEADLINE_S = 120
MIN_TORCH = (2, 11)
SHM_COMFORT_BYTES = 1 << 30
EXTRAS = {
    "hf": ("transformers", "safetensors", "tokenizers"),
    "train": ("pydantic", "tensorboard"),
    "observe": ("plotly", "perfetto"),
    "bench": ("pytest_benchmark", "mpi4py", "plotly"),
}
BF16_TEST = (
    "import torch; torch.set_num_threads(1); a = torch.ones(128, 128, dtype=torch.bfloat16); "
    "assert float((a @ a)[0, 0]) == 128"
)


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``advice``: what to do about it, empty if nothing."""

    topic: str
    name: str
    status: Status
    value: str
    advice: str = ""


@dataclass(frozen=True)
class Report:
    """All findings, and under ``data`` the same facts as plain values for programs."""

    findings: tuple[Finding, ...]
    data: dict[str, Any]

    @property
    def healthy(self) -> bool:
        """Nothing that moe_comm cannot do without is broken."""
        return all(finding.status != "broken" for finding in self.findings)

    def to_json(self) -> str:
        """One JSON object: ``healthy``, ``findings`` and the facts."""
        whole = {"healthy": self.healthy, "findings": [asdict(f) for f in self.findings], **self.data}
        return json.dumps(whole, indent=2)


class Notes:
    """Findings as they are made, and the same facts as plain values."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.data: dict[str, Any] = {}

    def add(self, topic: str, name: str, status: Status, value: str, advice: str = "") -> None:
        """One more line of the report."""
        self.findings.append(Finding(topic, name, status, value, advice))


def examine(more: Iterable[Callable[[Notes], None]] = ()) -> Report:
    """Look at everything; takes some seconds, most of them in the child process that tries a bf16 matmul.

    Args:
        more: what higher floors look at; called in the end, if there is torch.
    """
    notes = Notes()
    _software(notes)
    _cpu(notes)
    _bf16(notes)
    _memory(notes)
    _build_tools(notes)
    native = _native_core(notes)
    if notes.data["torch"] is not None:
        _gpus(notes)
        _backends(notes, native)
        for look in more:
            look(notes)
    topics = list(dict.fromkeys(finding.topic for finding in notes.findings))
    return Report(tuple(sorted(notes.findings, key=lambda finding: topics.index(finding.topic))), notes.data)


def _software(notes: Notes) -> None:
    notes.data["python"] = platform.python_version()
    notes.add("software", "Python", "ok", f"{platform.python_version()} ({sys.executable})")
    torch_version = _version("torch")
    notes.data["torch"] = torch_version
    if torch_version is None:
        notes.add("software", "torch", "broken", "not installed", f"pip install 'torch>={_dotted(MIN_TORCH)}'")
    elif _numbers(torch_version) < MIN_TORCH:
        advice = f"pip install 'torch>={_dotted(MIN_TORCH)}'"
        notes.add("software", "torch", "broken", f"{torch_version} is too old", advice)
    else:
        notes.add("software", "torch", "ok", torch_version)
    notes.data["extras"] = {}
    for extra, modules in EXTRAS.items():
        absent = [name for name in modules if importlib.util.find_spec(name) is None]
        notes.data["extras"][extra] = not absent
        if absent:
            notes.add("software", f"extra [{extra}]", "missing", f"without {', '.join(absent)}", _pip(extra))
        else:
            notes.add("software", f"extra [{extra}]", "ok", "installed")


def _cpu(notes: Notes) -> None:
    cores, machine_cores = available_cores(), os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS")
    notes.data["cpu"] = {"arch": platform.machine(), "cores": cores, "machine_cores": machine_cores, "threads": threads}
    shown = f"{cores} of {machine_cores}" if cores != machine_cores else str(cores)
    notes.add("cpu", "cores", "ok", f"{shown} ({platform.machine()})")
    if threads is None:
        notes.add("cpu", "threads per rank", "ok", "cores / ranks, set at launch")
    elif not threads.isdigit():
        notes.add("cpu", "threads per rank", "note", f"OMP_NUM_THREADS={threads}", "set it to one whole number")
    elif int(threads) > cores:
        advice = f"unset it, or set at most {cores}: more threads than cores slows ranks many times over"
        notes.add("cpu", "threads per rank", "note", f"OMP_NUM_THREADS={threads}", advice)
    else:
        notes.add("cpu", "threads per rank", "ok", f"OMP_NUM_THREADS={threads}")
    pidfd = _has_pidfd()
    notes.data["pidfd"] = pidfd
    if pidfd:
        notes.add("cpu", "pidfd", "ok", "a dead rank is noticed by the kernel's word")
    else:
        notes.add("cpu", "pidfd", "note", "not available; ranks look at each other's pids instead")


def _bf16(notes: Notes) -> None:
    """Try a bf16 matmul in a child: where AMX is advertised but hidden, it is the process that dies."""
    trap = cpu_guard.has_amx_trap(cpu_guard.read_cpuinfo())
    guarded = {cpu_guard.VARIABLE: os.environ.get(cpu_guard.VARIABLE, cpu_guard.SAFE_ISA)}
    plain = _try_bf16({})
    result = plain if plain == "ok" else _try_bf16(guarded)
    notes.data["bf16"] = {"unguarded": plain, "guarded": result, "amx_trap": trap}
    setting = f"{cpu_guard.VARIABLE}={cpu_guard.SAFE_ISA}"
    if plain == "ok":
        notes.add("cpu", "bf16 matmul", "ok", "works as it is")
    elif result == "ok":
        advice = f"moe_comm sets {setting} here" if trap else ""
        advice = advice or f"export {setting} before starting Python"
        notes.add("cpu", "bf16 matmul", "note", f"{plain}; works with {setting}", advice)
    else:
        notes.add("cpu", "bf16 matmul", "broken", result, "train and run in float32 on this machine")


def _try_bf16(extra: dict[str, str]) -> str:
    env = {k: v for k, v in os.environ.items() if k not in (cpu_guard.VARIABLE, "DNNL_MAX_CPU_ISA")} | extra
    command = [sys.executable, "-c", BF16_TEST]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=CHILD_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {CHILD_DEADLINE_S} s"
    if done.returncode == 0:
        return "ok"
    if done.returncode < 0:
        return f"died with {signal.Signals(-done.returncode).name}"
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"failed: {last}"


def _memory(notes: Notes) -> None:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError as error:
        notes.data["shm"] = None
        advice = "mount a tmpfs at /dev/shm; until then backend all_to_all works"
        notes.add("memory", "/dev/shm", "missing", error.strerror or str(error), advice)
        return
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    writable = os.access("/dev/shm", os.W_OK)
    notes.data["shm"] = {"bytes": size, "free_bytes": free, "writable": writable}
    shown = f"{_bytes(free)} free of {_bytes(size)}"
    if not writable:
        notes.add(
            "memory", "/dev/shm", "missing", "not writable", "make it writable; until then backend all_to_all works"
        )
    elif free < SHM_COMFORT_BYTES:
        advice = "enlarge it (mount -o remount,size=8G /dev/shm, or --shm-size for a container) for larger batches"
        notes.add("memory", "/dev/shm", "note", shown, advice)
    else:
        notes.add("memory", "/dev/shm", "ok", shown)


def _build_tools(notes: Notes) -> None:
    compiler = next(
        filter(None, (shutil.which(c) for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c)), None
    )
    notes.data["compiler"] = _first_line([compiler, "--version"]) if compiler else None
    if compiler:
        notes.add("build", "C++ compiler", "ok", notes.data["compiler"])
    else:
        advice = "only needed to build from source; on Debian: apt-get install g++"
        notes.add("build", "C++ compiler", "missing", "none found", advice)
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    notes.data["python_headers"] = headers
    if not headers:
        advice = "only needed to build from source; on Debian: apt-get install python3-dev"
        notes.add("build", "Python headers", "missing", "no Python.h", advice)
    nvcc = shutil.which("nvcc")
    release = next((w for w in _output([nvcc, "--version"]).split() if w.startswith("V")), "") if nvcc else ""
    notes.data["nvcc"] = release.removeprefix("V") or None
    if nvcc:
        notes.add("build", "nvcc", "ok", f"{release.removeprefix('V')} ({nvcc})")
    else:
        notes.add(
            "build", "nvcc", "missing", "none found", "only needed to compile CUDA code; install the CUDA toolkit"
        )


def _native_core(notes: Notes) -> Any:
    try:
        from moe_comm import _C  # may not be built
    except ImportError as error:
        notes.data["native"] = None
        advice = "plain torch does its work, more slowly; build it: pip install ., or make build in a checkout"
        notes.add("native core", "moe_comm._C", "missing", str(error), advice)
        return None
    found = _C.cuda_probe()
    cuda = None if found is None else json.loads(found)
    notes.data["native"] = {"isa": _C.isa(), "isas": list(_C.isas()), "cuda": cuda}
    others = ", ".join(name for name in _C.isas() if name != _C.isa())
    notes.add("native core", "vector code", "ok", _C.isa() + (f" (also here: {others})" if others else ""))
    if cuda is None:
        advice = "none needed where NVRTC is found; else rebuild with MOE_COMM_CUDA=on where nvcc is installed"
        notes.add("native core", "CUDA part", "missing", "not compiled in", advice)
    else:
        runtime, driver = _cuda_version(cuda["runtime_version"]), _cuda_version(cuda["driver_version"])
        notes.add("native core", "CUDA part", "ok", f"runtime {runtime}, {cuda['archs']}; driver {driver or 'none'}")
    return _C


def _gpus(notes: Notes) -> None:
    cuda = (notes.data["native"] or {}).get("cuda")
    devices = cuda["devices"] if cuda else _torch_gpus()
    nccl = _nccl()
    notes.data["gpus"], notes.data["nccl"] = devices, nccl
    if not devices:
        driver = cuda is None or cuda["driver_version"] > 0
        why = "none" if driver else "none (no driver)"
        if cuda and driver and cuda["error"]:
            why = f"none ({cuda['error']})"
        notes.add("gpu", "devices", "missing", why, "the CPU backends need none")
    for device in devices:
        peers = ", ".join(str(p) for p in device["peers"]) or "no other device"
        value = (
            f"{device['name']}, capability {device['capability']}, {_bytes(device['memory_bytes'])}, reaches {peers}"
        )
        if device.get("error"):
            advice = "rebuild on this machine, or update the driver"
            notes.add("gpu", f"cuda:{device['index']}", "note", f"{value}; our kernel: {device['error']}", advice)
        else:
            notes.add("gpu", f"cuda:{device['index']}", "ok", value)
    if nccl:
        notes.add("gpu", "NCCL", "ok", nccl)
    else:
        notes.add("gpu", "NCCL", "missing", "this torch has none", "needed on GPUs only: install a CUDA build of torch")


def _torch_gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    found = []
    for index in range(count):
        props = torch.cuda.get_device_properties(index)
        peers = [p for p in range(count) if p != index and torch.cuda.can_device_access_peer(index, p)]
        capability = f"{props.major}.{props.minor}"
        facts = {"index": index, "name": props.name, "capability": capability, "memory_bytes": props.total_memory}
        found.append(facts | {"peers": peers})
    return found


def _nccl() -> str | None:
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_nccl_available():
        return None
    try:
        return _dotted(torch.cuda.nccl.version())
    except (AttributeError, RuntimeError):
        return "present"


def _backends(notes: Notes, native: Any) -> None:
    """Which dispatchers can run here, and on what."""
    import torch
    import torch.distributed as dist

    gpus = len(notes.data["gpus"]) if torch.cuda.is_available() else 0
    shm = notes.data["shm"] is not None and notes.data["shm"]["writable"]
    transports = [name for name, there in (("gloo", dist.is_available() and dist.is_gloo_available()),) if there]
    if gpus and notes.data["nccl"]:
        transports.append("nccl")
    can: dict[str, tuple[bool, str, str]] = {
        "local": (True, "one rank, any device", ""),
        "shared_memory": (
            native is not None and shm,
            "CPU ranks of this host, without copies" if native is not None and shm else "cannot run",
            "" if native is not None and shm else "needs the native core and a writable /dev/shm",
        ),
    }
    over = f"any ranks, over {' or '.join(transports)}" if transports else "cannot run"
    for name in ("all_to_all", "all_gather"):
        can[name] = (bool(transports), over, "" if transports else "needs a torch with torch.distributed and gloo")
    works, _, advice = can["all_to_all"]
    can["hierarchical"] = (works, f"ranks of several hosts, over {' or '.join(transports)}" if works else over, advice)
    notes.data["backends"] = {name: {"works": works, "how": how} for name, (works, how, _) in can.items()}
    for name, (works, how, advice) in can.items():
        notes.add("backends", name, "ok" if works else "missing", how, advice)


def show(report: Report) -> None:
    """Print the report as a table, and after it what to do."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours = {"ok": "green", "note": "yellow", "missing": "cyan", "broken": "bold red"}
    console = Console(soft_wrap=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(4):
        table.add_column(overflow="fold")
    previous = ""
    for f in report.findings:
        topic = f.topic if f.topic != previous else ""
        previous = f.topic
        table.add_row(f"[bold]{topic}[/]", escape(f.name), f"[{colours[f.status]}]{f.status}[/]", escape(f.value))
    console.print(table)
    advice = [f for f in report.findings if f.advice]
    if advice:
        console.print("\n[bold]What to do[/]")
    for f in advice:
        console.print(f"  {escape(f.name)}: {escape(f.advice)}", highlight=False)
    console.print("\nmoe_comm can work here." if report.healthy else "\n[bold red]moe_comm cannot work here yet.[/]")


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)


def _dotted(numbers: Iterable[int]) -> str:
    return ".".join(str(n) for n in numbers)


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def _pip(extra: str) -> str:
    return f"pip install 'moe_comm[{extra}]'"


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _first_line(command: list[str]) -> str:
    return (_output(command).splitlines() or ["does not answer --version"])[0]
