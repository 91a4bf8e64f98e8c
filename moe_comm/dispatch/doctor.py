"""What ``moe-comm doctor`` says of GPUs that work together, of device code, and of what ``auto`` takes."""

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

from moe_comm.dispatch.choice import Choice, GroupFacts, Traffic, choose
from moe_comm.dispatch.peer_to_peer.access import BLOCKED, NO_KERNELS, REACHES, problem_of
from moe_comm.errors import KernelError, MissingDependency
from moe_comm.gpu import nvrtc
from moe_comm.gpu.launch import PTX_FROM, compiled_for
from moe_comm.runtime.doctor import Notes
from moe_comm.runtime.launch import available_cores
from moe_comm.runtime.memory import native_is_built

TRAFFIC = Traffic(top_k=8, hidden=4096, item_bytes=2)
"""For which the choice is shown."""
LINKS = {
    "PIX": "PCIe, one switch",
    "PXB": "PCIe, several switches",
    "PHB": "PCIe, over the CPU",
    "NODE": "PCIe, over one CPU's bridges",
    "SYS": "PCIe, from CPU to CPU",
}
"""What ``nvidia-smi topo -m`` calls the ways between GPUs; NV18 are 18 NVLinks."""

NO_CODE = "none"


def look_at_gpus(notes: Notes) -> None:
    """Who compiles device code, how GPUs reach each other, and torch's symmetric memory."""
    _compilers(notes)
    devices: list[dict[str, Any]] = notes.data["gpus"]
    _peer_access(notes, devices)
    _symmetric_memory(notes, devices)


def _compilers(notes: Notes) -> None:
    try:
        found = nvrtc.find()
    except MissingDependency as error:
        notes.data["nvrtc"] = None
        advice = "only needed on GPUs that the native core has no code for: pip install 'moe_comm[cu13]', or [cu12]"
        notes.add("gpu", "NVRTC", "missing", str(error).split(" (")[0], advice)
    else:
        version = f"{found.version[0]}.{found.version[1]}"
        folder = nvrtc.cache_folder()
        notes.data["nvrtc"] = {"version": version, "path": found.path, "archs": list(found.archs), "cache": str(folder)}
        span = f"sm_{min(found.archs)} to sm_{max(found.archs)}"
        notes.add("gpu", "NVRTC", "ok", f"{version}, {span}; keeps kernels in {folder}")
    cupy = next(filter(None, map(_version, ("cupy-cuda13x", "cupy-cuda12x", "cupy"))), None)
    notes.data["cupy"] = cupy
    if cupy:
        notes.add("gpu", "CuPy", "ok", f"{cupy}; its arrays can be given through DLPack")
    else:
        notes.add("gpu", "CuPy", "missing", "not installed", "only needed by code that uses CuPy arrays")
    archs = _compiled_in(notes)
    roads = {}
    for device in notes.data["gpus"]:
        road, advice = _road(device["capability"], archs, notes.data["nvrtc"])
        roads[device["index"]] = road
        notes.add("gpu", f"device code, cuda:{device['index']}", "missing" if advice else "ok", road, advice)
    notes.data["device_code"] = roads


def _compiled_in(notes: Notes) -> tuple[str, ...]:
    """What nvcc has compiled the native core's kernels for."""
    cuda = (notes.data["native"] or {}).get("cuda")
    return tuple(cuda["archs"].split(",")) if cuda and cuda["archs"] else ()


def _road(capability: str, archs: Sequence[str], compiler: Mapping[str, Any] | None) -> tuple[str, str]:
    """Where a GPU's kernels come from, and advice if from nowhere. capability: "9.0"."""
    major, minor = (int(part) for part in capability.split("."))
    if found := compiled_for(archs, (major, minor)):
        if found != "PTX":
            return f"compiled in for sm_{major}{minor}", ""
        return f"compiled in, from the PTX of sm_{PTX_FROM} by the driver at first use", ""
    if compiler is None:
        return NO_CODE, "pip install 'moe_comm[cu13]' (or [cu12]) for NVRTC, or build with MOE_COMM_CUDA=on"
    try:
        arch = nvrtc.arch_for((major, minor), compiler["archs"])
    except KernelError as error:
        return NO_CODE, str(error)
    return f"by NVRTC for {arch}: at first use, then from disk", ""


def _peer_access(notes: Notes, devices: Sequence[Mapping[str, Any]]) -> None:
    """Which GPUs address each other's memory, and over what."""
    pairs = [(a["index"], b["index"]) for a in devices for b in devices if a["index"] < b["index"]]
    reached = {(a["index"], peer) for a in devices for peer in a["peers"]}
    apart = [(a, b) for a, b in pairs if (a, b) not in reached or (b, a) not in reached]
    links = topology(_topology_text()) if len(devices) > 1 else {}
    if any(index >= len(devices) for pair in links for index in pair):
        links = {}  # not all GPUs are visible here, so theirs are other numbers
    notes.data["peer_access"] = {
        f"{a}-{b}": {"direct": (a, b) not in apart, "link": links.get((a, b), "unknown")} for a, b in pairs
    }
    if not pairs:
        notes.add("gpu", "peer access", "missing", "fewer than two GPUs", "one GPU, or the CPU, needs none")
        return
    kinds = sorted({links[pair] for pair in pairs if pair in links})
    over = f", over {', '.join(_words(kind) for kind in kinds)}" if kinds else ""
    if not apart:
        notes.add("gpu", "peer access", "ok", f"all {len(pairs)} pairs{over}")
        return
    shown = ", ".join(f"{a}-{b}" for a, b in apart[:8]) + (" ..." if len(apart) > 8 else "")
    advice = "groups with such a pair use all_to_all over NCCL; in a container or VM, peer access may be switched off"
    notes.add("gpu", "peer access", "note", f"{len(apart)} of {len(pairs)} pairs without: {shown}{over}", advice)


def topology(text: str) -> dict[tuple[int, int], str]:
    """The matrix of ``nvidia-smi topo -m``: pairs of GPUs to the name of the way between them."""
    found: dict[tuple[int, int], str] = {}
    columns: list[int] = []
    for line in text.splitlines():
        cells = re.sub(r"\x1b\[[\d;]*m", "", line).split()
        if not columns:
            columns = [int(cell[3:]) for cell in cells if re.fullmatch(r"GPU\d+", cell)]
        elif cells and re.fullmatch(r"GPU\d+", cells[0]):
            row = int(cells[0][3:])
            found |= {(row, column): cell for column, cell in zip(columns, cells[1:], strict=False) if column != row}
    return found


def _topology_text() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        return subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _words(link: str) -> str:
    return f"{link[2:]} NVLinks" if link.startswith("NV") else LINKS.get(link, link)


def _symmetric_memory(notes: Notes, devices: Sequence[Mapping[str, Any]]) -> None:
    """Whether torch has it here, and so whether peer_to_peer can run."""
    gpus = len(devices)
    there = importlib.util.find_spec("torch.distributed._symmetric_memory") is not None
    works = there and gpus > 0 and torch.cuda.is_available()
    notes.data["symmetric_memory"] = works
    if works:
        notes.add("gpu", "symmetric memory", "ok", "torch's; peer_to_peer shares its blocks by it")
    else:
        why = "no GPU that this torch can use" if there else "this torch has none"
        notes.add("gpu", "symmetric memory", "missing", why, "needed by peer_to_peer on GPUs only: torch for CUDA")
    apart = [pair for pair, found in notes.data["peer_access"].items() if not found["direct"]]
    uncoded = [index for index, road in notes.data["device_code"].items() if road == NO_CODE]
    advice = ""
    if not works:
        advice = "needs GPUs and torch's symmetric memory"
    elif apart:
        advice = f"needs direct access between GPUs: not {', '.join(apart[:8])}; use all_to_all there"
    elif uncoded:
        advice = f"needs kernels for GPUs {uncoded}; see device code"
    how = "cannot run" if advice else "GPUs of one host, straight into each other's memory"
    notes.data["backends"]["peer_to_peer"] = {"works": not advice, "how": how}
    notes.add("backends", "peer_to_peer", "missing" if advice else "ok", how, advice)


def show_choices(notes: Notes) -> None:
    """Which dispatcher ``auto`` takes for as many ranks as this machine has cores or GPUs, and why."""
    gpus: list[dict[str, Any]] = notes.data["gpus"]
    cases = [("cpu", max(2, available_cores()), "gloo")]
    if gpus and torch.cuda.is_available():
        cases.append(("cuda", len(gpus), "nccl"))
    notes.data["auto"] = {}
    for device, world, transport in cases:
        choice = choose(_facts(notes, device, world, transport), TRAFFIC)
        refused = {c.backend: c.problem or c.if_asked for c in choice.candidates if c.problem or c.if_asked}
        notes.data["auto"][device] = {"ranks": world, "picked": choice.picked, "not": refused, "table": str(choice)}
        ranks = f"{world} rank{'s' if world > 1 else ''}"
        notes.add("auto", f"{ranks} on {device}", "ok", f"{choice.picked}: {_why(choice)}")


def _facts(notes: Notes, device: str, world: int, transport: str) -> GroupFacts:
    """As ranks would find them, a GPU each."""
    facts = GroupFacts(world, 1, native_is_built(), device, transport, host_by_host=True)
    if device != "cuda":
        return facts
    access = []
    for gpu in notes.data["gpus"]:
        uncoded = notes.data["device_code"][gpu["index"]] == NO_CODE
        access.append(NO_KERNELS if uncoded else REACHES if len(gpu["peers"]) == world - 1 else BLOCKED)
    return replace(facts, peers=problem_of(range(1, world + 1), access))


def _why(choice: Choice) -> str:
    """The cheapest of how many, and what kept out those that would move less."""
    usable = sorted((c for c in choice.candidates if not c.problem and not c.if_asked), key=lambda c: c.cost)
    picked = usable[0]
    text = f"cost {picked.cost / 1e3:.0f} a token"
    if len(usable) > 1:
        text += f", against {usable[1].cost / 1e3:.0f} of {usable[1].backend}"
    for other in choice.candidates:
        refused = other.problem or other.if_asked
        if refused and other.cost <= picked.cost and other.backend != "local":
            text += f"; not {other.backend}: {refused}"
    return text


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
