"""The part of ``moe-comm doctor`` about dispatch: peer access of GPUs, GPU kernels, and the backend of ``auto``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from moe_comm.comm.registered import MIN_NCCL, registration_problem
from moe_comm.dispatch.peer_to_peer.access import BLOCKED, NO_KERNELS, REACHES, problem_of
from moe_comm.dispatch.selection.choice import BackendChoice, GroupFacts, Traffic, choose
from moe_comm.errors import KernelError, MissingDependency, pip_install
from moe_comm.gpu import nvrtc
from moe_comm.gpu.launch import PTX_FROM, compiled_for
from moe_comm.kernels import tensor_cores
from moe_comm.runtime.doctor import DoctorReport
from moe_comm.runtime.launch import available_cores
from moe_comm.runtime.native_core import native_is_built

TRAFFIC = Traffic(top_k=8, hidden=4096, item_bytes=2)
"""Sizes for which the choice of ``auto`` is reported."""
LINKS = {
    "PIX": "PCIe, one switch",
    "PXB": "PCIe, several switches",
    "PHB": "PCIe, over the CPU",
    "NODE": "PCIe, over one CPU's bridges",
    "SYS": "PCIe, from CPU to CPU",
}
"""Names of connections between GPUs in ``nvidia-smi topo -m``. NV18 means 18 NVLinks."""

_SLOWER = "results are the same, but take longer; please report this"
NO_CODE = "none"
"""Reported for a GPU without kernels."""


def examine_gpus(notes: DoctorReport) -> None:
    """Report compilers of device code, peer access of GPUs, torch's symmetric memory, and registration with NCCL."""
    _compilers(notes)
    devices: list[dict[str, Any]] = notes.data["gpus"]
    _peer_access(notes, devices)
    _symmetric_memory(notes, devices)
    _nccl_registration(notes)


def _compilers(notes: DoctorReport) -> None:
    try:
        compiler = nvrtc.find()
    except MissingDependency as error:
        notes.data["nvrtc"] = None
        advice = f"only needed on GPUs without compiled kernels: {pip_install('cu13')}, or cu12"
        notes.add("gpu", "NVRTC", "missing", str(error).split(" (")[0], advice)
    else:
        version = f"{compiler.version[0]}.{compiler.version[1]}"
        folder = nvrtc.cache_folder()
        notes.data["nvrtc"] = {
            "version": version,
            "path": compiler.path,
            "archs": list(compiler.archs),
            "cache": str(folder),
        }
        span = f"sm_{min(compiler.archs)} to sm_{max(compiler.archs)}"
        notes.add("gpu", "NVRTC", "ok", f"{version}, {span}; caches kernels in {folder}")
    cupy = next(filter(None, map(_version, ("cupy-cuda13x", "cupy-cuda12x", "cupy"))), None)
    notes.data["cupy"] = cupy
    if cupy:
        notes.add("gpu", "CuPy", "ok", f"{cupy}; DLPack accepts its arrays")
    else:
        notes.add("gpu", "CuPy", "missing", "not installed", "only needed by code that uses CuPy arrays")
    cuda = (notes.data["native"] or {}).get("cuda")
    archs = cuda["archs"].split(",") if cuda and cuda["archs"] else ()
    sources = {}
    for device in notes.data["gpus"]:
        source, advice = _kernel_source(device["capability"], archs, notes.data["nvrtc"])
        sources[device["index"]] = source
        notes.add("gpu", f"device code, cuda:{device['index']}", "missing" if advice else "ok", source, advice)
    notes.data["device_code"] = sources
    _gemms(notes)


def _gemms(notes: DoctorReport) -> None:
    """Report which kernels compute the grouped GEMMs of each GPU. Those in CUDA C++ run a small problem."""
    notes.data["gemm"] = {}
    for device in notes.data["gpus"]:
        gemm, reason, kernels = tensor_cores.choice(device["index"])
        notes.data["gemm"][device["index"]] = {
            "kernels": "cuda" if gemm else "triton", "in_cuda": sorted(kernels), "why": reason
        }  # fmt: skip
        failed = tensor_cores.FAILED in reason
        where = reason if gemm else f"in Triton: {reason}"
        name = f"grouped GEMM, cuda:{device['index']}"
        notes.add("gpu", name, "note" if failed else "ok", where, _SLOWER if failed else "")


def _kernel_source(capability: str, archs: Sequence[str], compiler: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return where the kernels of a GPU come from, and advice if there are none. ``capability`` is like "9.0"."""
    major, minor = (int(part) for part in capability.split("."))
    if compiled := compiled_for(archs, (major, minor)):
        if compiled != "PTX":
            return f"compiled in for sm_{major}{minor}", ""
        return f"compiled in, from the PTX of sm_{PTX_FROM} by the driver at first use", ""
    if compiler is None:
        return NO_CODE, f"for NVRTC, {pip_install('cu13')}, or cu12; or build with MOE_COMM_CUDA=on"
    try:
        arch = nvrtc.arch_for((major, minor), compiler["archs"])
    except KernelError as error:
        return NO_CODE, str(error)
    return f"by NVRTC for {arch}: at first use, then from disk", ""


def _peer_access(notes: DoctorReport, devices: Sequence[Mapping[str, Any]]) -> None:
    """Report which GPUs can access each other's memory, and over which connection."""
    pairs = [(a["index"], b["index"]) for a in devices for b in devices if a["index"] < b["index"]]
    access_pairs = {(a["index"], peer) for a in devices for peer in a["peers"]}
    blocked_pairs = [(a, b) for a, b in pairs if (a, b) not in access_pairs or (b, a) not in access_pairs]
    links = topology(_topology_text()) if len(devices) > 1 else {}
    if any(index >= len(devices) for pair in links for index in pair):
        links = {}  # only some GPUs are visible, so their indices differ from those of nvidia-smi
    notes.data["peer_access"] = {
        f"{a}-{b}": {"direct": (a, b) not in blocked_pairs, "link": links.get((a, b), "unknown")} for a, b in pairs
    }
    if not pairs:
        notes.add("gpu", "peer access", "missing", "fewer than two GPUs", "not needed with one GPU or on the CPU")
        return
    kinds = sorted({links[pair] for pair in pairs if pair in links})
    link_text = f", over {', '.join(_link_name(kind) for kind in kinds)}" if kinds else ""
    if not blocked_pairs:
        notes.add("gpu", "peer access", "ok", f"all {len(pairs)} pairs{link_text}")
        return
    shown = ", ".join(f"{a}-{b}" for a, b in blocked_pairs[:8]) + (" ..." if len(blocked_pairs) > 8 else "")
    advice = "groups with such a pair use all_to_all over NCCL; a container or VM may disable peer access"
    status = f"{len(blocked_pairs)} of {len(pairs)} pairs without: {shown}{link_text}"
    notes.add("gpu", "peer access", "note", status, advice)


def topology(text: str) -> dict[tuple[int, int], str]:
    """Parse the matrix of ``nvidia-smi topo -m``: name of the connection of each pair of GPUs."""
    links: dict[tuple[int, int], str] = {}
    columns: list[int] = []
    for line in text.splitlines():
        cells = re.sub(r"\x1b\[[\d;]*m", "", line).split()
        if not columns:
            columns = [int(cell[3:]) for cell in cells if re.fullmatch(r"GPU\d+", cell)]
        elif cells and re.fullmatch(r"GPU\d+", cells[0]):
            row = int(cells[0][3:])
            links |= {(row, column): cell for column, cell in zip(columns, cells[1:], strict=False) if column != row}
    return links


def _topology_text() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        return subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _link_name(link: str) -> str:
    return f"{link[2:]} NVLinks" if link.startswith("NV") else LINKS.get(link, link)


def _symmetric_memory(notes: DoctorReport, devices: Sequence[Mapping[str, Any]]) -> None:
    """Report whether torch has symmetric memory here, and whether peer_to_peer can run."""
    installed = importlib.util.find_spec("torch.distributed._symmetric_memory") is not None
    works = installed and len(devices) > 0 and torch.cuda.is_available()
    notes.data["symmetric_memory"] = works
    if works:
        notes.add("gpu", "symmetric memory", "ok", "of torch; peer_to_peer uses it to share blocks")
    else:
        reason = "no GPU that this torch can use" if installed else "this torch has none"
        notes.add("gpu", "symmetric memory", "missing", reason, "needed by peer_to_peer on GPUs only: torch for CUDA")
    blocked_pairs = [pair for pair, access in notes.data["peer_access"].items() if not access["direct"]]
    without_kernels = [index for index, source in notes.data["device_code"].items() if source == NO_CODE]
    advice = ""
    if not works:
        advice = "needs GPUs and torch's symmetric memory"
    elif blocked_pairs:
        advice = f"needs direct access between GPUs, but not {', '.join(blocked_pairs[:8])}; use all_to_all"
    elif without_kernels:
        advice = f"needs kernels for GPUs {without_kernels}; see device code"
    method = "cannot run" if advice else "GPUs of one host, by access to each other's memory"
    notes.data["backends"]["peer_to_peer"] = {"works": not advice, "how": method}
    notes.add("backends", "peer_to_peer", "missing" if advice else "ok", method, advice)


def _nccl_registration(notes: DoctorReport) -> None:
    """Report whether ``hierarchical`` exchanges rows between hosts in memory that is registered with NCCL."""
    problem = registration_problem()
    notes.data["nccl_registration"] = not problem
    if problem:
        advice = f"only needed by hierarchical over NCCL: NCCL {MIN_NCCL[0]}.{MIN_NCCL[1]} or newer"
        notes.add("gpu", "NCCL registration", "missing", problem, advice)
    else:
        notes.add("gpu", "NCCL registration", "ok", "of torch; hierarchical exchanges rows in registered memory")


def report_choices(notes: DoctorReport) -> None:
    """Report which backend ``auto`` takes for one rank per core, and for one rank per GPU."""
    gpus: list[dict[str, Any]] = notes.data["gpus"]
    cases = [("cpu", max(2, available_cores()), "gloo")]
    if gpus and torch.cuda.is_available():
        cases.append(("cuda", len(gpus), "nccl"))
    notes.data["auto"] = {}
    for device, world, transport in cases:
        choice = choose(_facts(notes, device, world, transport), TRAFFIC)
        reasons = {c.backend: c.problem or c.if_asked for c in choice.candidates if c.problem or c.if_asked}
        notes.data["auto"][device] = {"ranks": world, "picked": choice.picked, "not": reasons, "table": str(choice)}
        ranks = f"{world} rank{'s' if world > 1 else ''}"
        notes.add("auto", f"{ranks} on {device}", "ok", f"{choice.picked}: {_explain(choice)}")


def _facts(notes: DoctorReport, device: str, world: int, transport: str) -> GroupFacts:
    """Return the facts of a group with one rank per core or GPU of this machine."""
    facts = GroupFacts(world, 1, native_is_built(), device, transport, host_by_host=True)
    if device != "cuda":
        return facts
    access = []
    for gpu in notes.data["gpus"]:
        without_kernels = notes.data["device_code"][gpu["index"]] == NO_CODE
        access.append(NO_KERNELS if without_kernels else REACHES if len(gpu["peers"]) == world - 1 else BLOCKED)
    return replace(facts, peers=problem_of(range(1, world + 1), access))


def _explain(choice: BackendChoice) -> str:
    """Describe the cheapest usable backend and why cheaper ones cannot be used."""
    usable = sorted((c for c in choice.candidates if not c.problem and not c.if_asked), key=lambda c: c.cost)
    picked = usable[0]
    text = f"cost {picked.cost / 1e3:.0f} per token"
    if len(usable) > 1:
        text += f", against {usable[1].cost / 1e3:.0f} of {usable[1].backend}"
    for other in choice.candidates:
        reason = other.problem or other.if_asked
        if reason and other.cost <= picked.cost and other.backend != "local":
            text += f"; not {other.backend}: {reason}"
    return text


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
