"""Examination of this machine: the body of ``moe-comm doctor``. It changes nothing.

torch, the native core and rich are imported inside functions: a missing one is a finding.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from moe_comm.errors import MissingDependency, StaleCore, pip_install
from moe_comm.runtime import cpu_guard
from moe_comm.runtime.launch import available_cores
from moe_comm.runtime.native_core import native
from moe_comm.runtime.untrusted import make_console

Status = Literal["ok", "note", "missing", "broken"]
"""``note``: works, with a remark. ``missing``: optional and absent. ``broken``: moe_comm cannot work."""

CHILD_DEADLINE_S = 120
MIN_TORCH = (2, 11)
SHM_COMFORT_BYTES = 1 << 30
EXTRAS = {
    "hf": ("transformers", "safetensors", "tokenizers"),
    "train": ("tensorboard",),
    "observe": ("plotly", "perfetto"),
    "bench": ("pytest_benchmark", "mpi4py", "plotly"),
}
BF16_TEST = (
    "import torch; torch.set_num_threads(1); a = torch.ones(128, 128, dtype=torch.bfloat16); "
    "assert float((a @ a)[0, 0]) == 128"
)


@dataclass(frozen=True)
class DoctorFinding:
    """One line of the report. ``advice`` says what to do; "" if nothing."""

    topic: str
    name: str
    status: Status
    value: str
    advice: str = ""


@dataclass
class DoctorReport:
    """All findings, and in ``data`` the same facts for programs."""

    findings: list[DoctorFinding] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def add(self, topic: str, name: str, status: Status, value: str, advice: str = "") -> None:
        """Add a finding."""
        self.findings.append(DoctorFinding(topic, name, status, value, advice))

    def add_optional(self, topic: str, name: str, value: str | None, missing: str, advice: str) -> None:
        """Add a finding "ok" with ``value``; or "missing" with ``missing`` and ``advice`` if there is no value."""
        self.add(topic, name, *(("ok", value) if value else ("missing", missing, advice)))

    @property
    def healthy(self) -> bool:
        """Whether nothing that moe_comm requires is broken."""
        return all(finding.status != "broken" for finding in self.findings)

    def to_json(self) -> str:
        """Return a JSON object with ``healthy``, ``findings`` and the facts."""
        values = {"healthy": self.healthy, "findings": [asdict(f) for f in self.findings], **self.data}
        return json.dumps(values, indent=2)


def examine(more: Iterable[Callable[[DoctorReport], None]] = ()) -> DoctorReport:
    """Examine the machine. Takes some seconds, most of them in a child process that tries a bf16 matmul.

    Args:
        more: examinations of other packages; called last, if torch is installed.
    """
    report = DoctorReport()
    _software(report)
    _cpu(report)
    _bf16(report)
    _memory(report)
    _build_tools(report)
    core = _native_core(report)
    if report.data["torch"] is not None:
        _gpus(report)
        _backends(report, core)
        for examination in more:
            examination(report)
    topics = list(dict.fromkeys(finding.topic for finding in report.findings))
    report.findings.sort(key=lambda finding: topics.index(finding.topic))
    return report


def _software(report: DoctorReport) -> None:
    report.data["python"] = platform.python_version()
    report.add("software", "Python", "ok", f"{platform.python_version()} ({sys.executable})")
    torch_version = _version("torch")
    report.data["torch"] = torch_version
    advice = f"pip install 'torch>={_dotted(MIN_TORCH)}'"
    if torch_version is None:
        report.add("software", "torch", "broken", "not installed", advice)
    elif _numbers(torch_version) < MIN_TORCH:
        report.add("software", "torch", "broken", f"{torch_version} is too old", advice)
    else:
        report.add("software", "torch", "ok", torch_version)
    report.data["extras"] = {}
    for extra, modules in EXTRAS.items():
        absent = [name for name in modules if importlib.util.find_spec(name) is None]
        report.data["extras"][extra] = not absent
        missing, advice = f"without {', '.join(absent)}", pip_install(extra)
        report.add_optional("software", f"extra [{extra}]", None if absent else "installed", missing, advice)


def _cpu(report: DoctorReport) -> None:
    cores, machine_cores = available_cores(), os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS")
    report.data["cpu"] = {
        "arch": platform.machine(),
        "cores": cores,
        "machine_cores": machine_cores,
        "threads": threads,
    }
    shown = f"{cores} of {machine_cores}" if cores != machine_cores else str(cores)
    report.add("cpu", "cores", "ok", f"{shown} ({platform.machine()})")
    if threads is None:
        report.add("cpu", "threads per rank", "ok", "cores / ranks, set at launch")
    elif not threads.isdigit():
        report.add("cpu", "threads per rank", "note", f"OMP_NUM_THREADS={threads}", "set it to one whole number")
    elif int(threads) > cores:
        advice = f"unset it, or set at most {cores}: more threads than cores make ranks many times slower"
        report.add("cpu", "threads per rank", "note", f"OMP_NUM_THREADS={threads}", advice)
    else:
        report.add("cpu", "threads per rank", "ok", f"OMP_NUM_THREADS={threads}")
    pidfd = _has_pidfd()
    report.data["pidfd"] = pidfd
    if pidfd:
        report.add("cpu", "pidfd", "ok", "the kernel reports a dead rank at once")
    else:
        report.add("cpu", "pidfd", "note", "not available; ranks check each other's pids instead")


def _bf16(report: DoctorReport) -> None:
    """Try a bf16 matmul in a child process, which dies where AMX is advertised but not usable."""
    trap = cpu_guard.has_amx_trap(cpu_guard.read_cpuinfo())
    guarded = {cpu_guard.VARIABLE: os.environ.get(cpu_guard.VARIABLE, cpu_guard.SAFE_ISA)}
    plain = _try_bf16({})
    result = plain if plain == "ok" else _try_bf16(guarded)
    report.data["bf16"] = {"unguarded": plain, "guarded": result, "amx_trap": trap}
    setting = f"{cpu_guard.VARIABLE}={cpu_guard.SAFE_ISA}"
    if plain == "ok":
        report.add("cpu", "bf16 matmul", "ok", "works")
    elif result == "ok":
        advice = f"moe_comm sets {setting} here" if trap else ""
        advice = advice or f"export {setting} before starting Python"
        report.add("cpu", "bf16 matmul", "note", f"{plain}; works with {setting}", advice)
    else:
        report.add("cpu", "bf16 matmul", "broken", result, "train and run in float32 on this machine")


def _try_bf16(extra: dict[str, str]) -> str:
    env = {k: v for k, v in os.environ.items() if k not in (cpu_guard.VARIABLE, "DNNL_MAX_CPU_ISA")} | extra
    command = [sys.executable, "-c", BF16_TEST]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=CHILD_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"did not finish within {CHILD_DEADLINE_S} s"
    if done.returncode == 0:
        return "ok"
    if done.returncode < 0:
        return f"died with {signal.Signals(-done.returncode).name}"
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"failed: {last}"


def _memory(report: DoctorReport) -> None:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError as error:
        report.data["shm"] = None
        advice = "mount a tmpfs at /dev/shm; until then backend all_to_all works"
        report.add("memory", "/dev/shm", "missing", error.strerror or str(error), advice)
        return
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    writable = os.access("/dev/shm", os.W_OK)
    report.data["shm"] = {"bytes": size, "free_bytes": free, "writable": writable}
    shown = f"{_bytes(free)} free of {_bytes(size)}"
    if not writable:
        advice = "make it writable; until then backend all_to_all works"
        report.add("memory", "/dev/shm", "missing", "not writable", advice)
    elif free < SHM_COMFORT_BYTES:
        advice = "enlarge it (mount -o remount,size=8G /dev/shm, or --shm-size for a container) for larger batches"
        report.add("memory", "/dev/shm", "note", shown, advice)
    else:
        report.add("memory", "/dev/shm", "ok", shown)


def _build_tools(report: DoctorReport) -> None:
    names = filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))
    compiler = next(filter(None, map(shutil.which, names)), None)
    report.data["compiler"] = _first_line([compiler, "--version"]) if compiler else None
    advice = "only needed to build from source; on Debian: apt-get install g++"
    report.add_optional("build", "C++ compiler", report.data["compiler"], "none found", advice)
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    report.data["python_headers"] = headers
    if not headers:
        advice = "only needed to build from source; on Debian: apt-get install python3-dev"
        report.add("build", "Python headers", "missing", "no Python.h", advice)
    nvcc = shutil.which("nvcc")
    release = next((w for w in _output([nvcc, "--version"]).split() if w.startswith("V")), "") if nvcc else ""
    report.data["nvcc"] = release.removeprefix("V") or None
    advice = "only needed to compile CUDA code; install the CUDA toolkit"
    report.add_optional("build", "nvcc", nvcc and f"{release.removeprefix('V')} ({nvcc})", "none found", advice)


def _native_core(report: DoctorReport) -> Any:
    report.data["native"] = None
    try:
        core = native()
    except MissingDependency as error:
        advice = "plain torch replaces it, is slower, and gives a row other bits in other batches; to build it: "
        advice += "pip install ., or make build in a checkout"
        report.add("native core", "moe_comm._C", "missing", str(error), advice)
        return None
    except StaleCore as error:
        report.add("native core", "moe_comm._C", "broken", str(error), "make build, or pip install . again")
        return None
    probe = core.cuda_probe()
    cuda = None if probe is None else json.loads(probe)
    report.data["native"] = {"isa": core.isa(), "isas": list(core.isas()), "cuda": cuda}
    others = ", ".join(name for name in core.isas() if name != core.isa())
    report.add("native core", "vector code", "ok", core.isa() + (f" (also available: {others})" if others else ""))
    if cuda is None:
        advice = "not needed if NVRTC is installed; else rebuild with MOE_COMM_CUDA=on where nvcc is installed"
        report.add("native core", "CUDA part", "missing", "not compiled in", advice)
    else:
        runtime, driver = _cuda_version(cuda["runtime_version"]), _cuda_version(cuda["driver_version"])
        report.add("native core", "CUDA part", "ok", f"runtime {runtime}, {cuda['archs']}; driver {driver or 'none'}")
    return core


def _gpus(report: DoctorReport) -> None:
    cuda = (report.data["native"] or {}).get("cuda")
    devices = cuda["devices"] if cuda else _torch_gpus()
    nccl = _nccl()
    report.data["gpus"], report.data["nccl"] = devices, nccl
    if not devices:
        driver = cuda is None or cuda["driver_version"] > 0
        value = "none" if driver else "none (no driver)"
        if cuda and driver and cuda["error"]:
            value = f"none ({cuda['error']})"
        report.add("gpu", "devices", "missing", value, "the CPU backends need none")
    for device in devices:
        peers = ", ".join(str(p) for p in device["peers"]) or "no other device"
        value = (
            f"{device['name']}, capability {device['capability']}, {_bytes(device['memory_bytes'])}, reaches {peers}"
        )
        if device.get("error"):
            advice = "rebuild on this machine, or update the driver"
            report.add("gpu", f"cuda:{device['index']}", "note", f"{value}; our kernel: {device['error']}", advice)
        else:
            report.add("gpu", f"cuda:{device['index']}", "ok", value)
    advice = "only needed on GPUs: install a CUDA build of torch"
    report.add_optional("gpu", "NCCL", nccl, "not in this torch", advice)


def _torch_gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    devices = []
    for index in range(count):
        props = torch.cuda.get_device_properties(index)
        peers = [p for p in range(count) if p != index and torch.cuda.can_device_access_peer(index, p)]
        capability = f"{props.major}.{props.minor}"
        facts = {"index": index, "name": props.name, "capability": capability, "memory_bytes": props.total_memory}
        devices.append(facts | {"peers": peers})
    return devices


def _nccl() -> str | None:
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_nccl_available():
        return None
    try:
        return _dotted(torch.cuda.nccl.version())
    except (AttributeError, RuntimeError):
        return "present"


def _backends(report: DoctorReport, native: Any) -> None:
    """Report which dispatchers can run here, and over which transports."""
    import torch
    import torch.distributed as dist

    gpus = len(report.data["gpus"]) if torch.cuda.is_available() else 0
    shm = report.data["shm"] is not None and report.data["shm"]["writable"]
    transports = ["gloo"] if dist.is_available() and dist.is_gloo_available() else []
    if gpus and report.data["nccl"]:
        transports.append("nccl")
    links = " or ".join(transports)
    shared = native is not None and shm
    needs_gloo = "needs a torch with torch.distributed and gloo"
    backends = {
        "local": (True, "one rank, any device", ""),
        "shared_memory": (shared, "CPU ranks of this host", "needs the native core and a writable /dev/shm"),
        "all_to_all": (bool(transports), f"any ranks, over {links}", needs_gloo),
        "all_gather": (bool(transports), f"any ranks, over {links}", needs_gloo),
        "hierarchical": (bool(transports), f"ranks of several hosts, over {links}", needs_gloo),
    }
    report.data["backends"] = {}
    for name, (works, how, advice) in backends.items():
        report.data["backends"][name] = {"works": works, "how": how if works else "cannot run"}
        report.add_optional("backends", name, how if works else None, "cannot run", advice)


def show(report: DoctorReport) -> None:
    """Print the report as a table, followed by all advice."""
    from rich.markup import escape
    from rich.table import Table

    colours = {"ok": "green", "note": "yellow", "missing": "cyan", "broken": "bold red"}
    console = make_console(soft_wrap=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(4):
        table.add_column(overflow="fold")
    previous = ""
    for finding in report.findings:
        topic = finding.topic if finding.topic != previous else ""
        previous = finding.topic
        status = f"[{colours[finding.status]}]{finding.status}[/]"
        table.add_row(f"[bold]{topic}[/]", escape(finding.name), status, escape(finding.value))
    console.print(table)
    advice = [finding for finding in report.findings if finding.advice]
    if advice:
        console.print("\n[bold]What to do[/]")
    for finding in advice:
        console.print(f"  {escape(finding.name)}: {escape(finding.advice)}", highlight=False)
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


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _first_line(command: list[str]) -> str:
    return (_output(command).splitlines() or ["does not answer --version"])[0]
