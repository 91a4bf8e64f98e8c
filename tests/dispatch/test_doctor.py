"""The doctor reports peer access, the source of kernels, and the choice of ``auto`` with its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_comm.dispatch.selection import doctor
from moe_comm.dispatch.selection.choice import choose
from moe_comm.errors import MissingDependency
from moe_comm.gpu import nvrtc
from moe_comm.kernels import tensor_cores
from moe_comm.runtime.doctor import DoctorFinding, DoctorReport

TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0
GPU1\tNV18\t X \tPHB\tSYS\t0-47\t0
GPU2\tSYS\tPHB\t X \tSYS\t48-95\t1
NIC0\tPIX\tSYS\tSYS\t X

Legend:
  X    = Self
"""


def gpu_facts(index: int, peers: list[int], capability: str = "9.0") -> dict[str, Any]:
    return {"index": index, "name": "H", "capability": capability, "memory_bytes": 1, "peers": peers}


def examine(
    devices: list[dict[str, Any]], archs: str = "sm_80,sm_90a"
) -> tuple[DoctorReport, dict[str, DoctorFinding]]:
    notes = DoctorReport()
    notes.data |= {"gpus": devices, "native": {"cuda": {"archs": archs} if archs else None}, "backends": {}}
    doctor.examine_gpus(notes)
    return notes, {finding.name: finding for finding in notes.findings}


def test_the_link_matrix_of_nvidia_smi_is_parsed() -> None:
    assert doctor.topology(TOPOLOGY) == {
        (0, 1): "NV18",
        (1, 0): "NV18",
        (0, 2): "SYS",
        (2, 0): "SYS",
        (1, 2): "PHB",
        (2, 1): "PHB",
    }
    assert doctor.topology("No devices were found") == {}


@pytest.mark.parametrize(("problem", "status"), [("", "ok"), ("NCCL 2.18.1 is older than 2.19", "missing")])
def test_registration_with_nccl_is_reported(monkeypatch: pytest.MonkeyPatch, problem: str, status: str) -> None:
    monkeypatch.setattr(doctor, "registration_problem", lambda: problem)
    notes, findings = examine([gpu_facts(0, [])])
    assert findings["NCCL registration"].status == status and problem in findings["NCCL registration"].value
    assert notes.data["nccl_registration"] == (not problem)


def test_gpus_with_access_to_each_other_are_reported_with_their_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_topology_text", lambda: TOPOLOGY)
    notes, findings = examine([gpu_facts(0, [1]), gpu_facts(1, [0])])
    assert notes.data["peer_access"] == {"0-1": {"direct": True, "link": "unknown"}}, "GPU2 is not visible"
    notes, findings = examine([gpu_facts(0, [1, 2]), gpu_facts(1, [0, 2]), gpu_facts(2, [0, 1])])
    assert findings["peer access"].status == "ok"
    assert "18 NVLinks" in findings["peer access"].value
    assert notes.data["peer_access"]["0-1"] == {"direct": True, "link": "NV18"}


def test_a_pair_of_gpus_without_access_is_named_and_excludes_peer_to_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_topology_text", lambda: "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    notes, findings = examine([gpu_facts(0, [1]), gpu_facts(1, [0, 2]), gpu_facts(2, [1])])
    assert findings["peer access"].status == "note"
    assert "1 of 3 pairs without: 0-2" in findings["peer access"].value
    assert "all_to_all" in findings["peer access"].advice
    assert notes.data["backends"]["peer_to_peer"]["works"] is False
    assert "0-2" in findings["peer_to_peer"].advice
    notes, findings = examine([gpu_facts(0, [1]), gpu_facts(1, [0])])
    assert findings["symmetric memory"].status == findings["peer_to_peer"].status == "ok"


@pytest.mark.parametrize(
    ("capability", "archs", "compiler", "source", "advised"),
    [
        ("9.0", ("sm_80", "sm_90a"), None, "compiled in for sm_90", False),
        ("8.9", ("sm_80", "sm_90a"), None, "compiled in, from the PTX of sm_80", False),
        ("9.0", (), (80, 90, 100), "by NVRTC for sm_90a", False),
        ("12.9", (), (80, 90, 120), "by NVRTC for compute_120", False),
        ("9.0", (), None, "none", True),
        ("7.0", ("sm_80",), (80, 90), "none", True),
    ],
)
def test_the_report_names_the_source_of_a_gpus_kernels(
    capability: str, archs: tuple[str, ...], compiler: tuple[int, ...] | None, source: str, advised: bool
) -> None:
    reported, advice = doctor._kernel_source(capability, archs, None if compiler is None else {"archs": compiler})
    assert reported.startswith(source)
    assert bool(advice) is advised


def test_the_report_says_which_kernels_compute_grouped_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = tensor_cores.FAILED
    answers = [
        tensor_cores.Choice(object(), "checked", frozenset({"weights"})),  # type: ignore[arg-type]
        tensor_cores.Choice(None, "this GPU is sm_80"),
        tensor_cores.Choice(None, f"{failed}do not run"),
        tensor_cores.Choice(object(), f"others; {failed}give wrong results: rows", frozenset({"weights"})),  # type: ignore[arg-type]
    ]
    monkeypatch.setattr(tensor_cores, "choice", lambda index: answers[index])
    notes, findings = examine([gpu_facts(i, []) for i in range(4)])
    lines = [findings[f"grouped GEMM, cuda:{i}"] for i in range(4)]
    assert [line.status for line in lines] == ["ok", "ok", "note", "note"]
    assert [line.value for line in lines] == [
        "checked", "in Triton: this GPU is sm_80", f"in Triton: {failed}do not run", answers[3].reason
    ]  # fmt: skip
    assert [notes.data["gemm"][i]["kernels"] for i in range(4)] == ["cuda", "triton", "triton", "cuda"]
    assert notes.data["gemm"][0]["in_cuda"] == ["weights"]


def test_missing_compilers_and_gpus_are_reported_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_missing() -> None:
        raise MissingDependency("no NVRTC was found (nowhere)")

    monkeypatch.setattr(nvrtc, "find", raise_missing)
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    notes, findings = examine([], archs="")
    assert {name for name, finding in findings.items() if finding.status == "missing"} == findings.keys()
    names = {"NVRTC", "CuPy", "peer access", "symmetric memory", "peer_to_peer", "NCCL registration"}
    assert findings.keys() == names and notes.data["nccl_registration"] is False
    assert all(finding.advice for finding in findings.values())
    assert notes.data["nvrtc"] is None and notes.data["cupy"] is None and notes.data["symmetric_memory"] is False


@pytest.mark.parametrize("gpus", [0, 4])
def test_the_reported_choice_equals_the_choice_of_auto(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    devices = [gpu_facts(i, [j for j in range(gpus) if j != i]) for i in range(gpus)]
    notes, _ = examine(devices)
    doctor.report_choices(notes)
    assert list(notes.data["auto"]) == ["cpu", "cuda"][: 1 + bool(gpus)]
    for device, choice in notes.data["auto"].items():
        transport = "nccl" if device == "cuda" else "gloo"
        facts = doctor._facts(notes, device, choice["ranks"], transport)
        assert choice["picked"] == choose(facts, doctor.TRAFFIC).picked
        line = next(finding for finding in notes.findings if finding.name.endswith(f"on {device}"))
        assert line.value.startswith(choice["picked"])
        assert choice["picked"] not in choice["not"]


def test_the_report_says_why_gpus_without_access_do_not_use_peer_to_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    choices = {}
    for name, devices in {
        "apart": [gpu_facts(0, []), gpu_facts(1, [])],
        "joined": [gpu_facts(0, [1]), gpu_facts(1, [0])],
    }.items():
        notes, _ = examine(devices)
        doctor.report_choices(notes)
        choices[name] = notes.data["auto"]["cuda"]
    assert choices["joined"]["picked"] == "peer_to_peer"
    assert choices["apart"]["picked"] != "peer_to_peer"
    assert "cannot reach" in choices["apart"]["not"]["peer_to_peer"]
