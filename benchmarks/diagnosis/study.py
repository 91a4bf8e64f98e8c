"""Accuracy of the diagnosis in training with injected faults, by windows of steps.

    steps       1 ── WARM ── │ slow rank 2 │ healthy │ slow rank 0 │ healthy │ ...     WINDOW steps each
    expected                   rank 2        none      rank 0        none

Slow ranks sleep or use CPU time in the forward pass of the experts, on one host. Slow links are shaped by tc between
network namespaces (``moe_comm.bench.hosts``), which probe each other in each step. For hangs, a soak
(``benchmarks.soak``, a training run with injected faults) stops or kills ranks or holds Python's GIL. The records of
the watchers, which detect dead and hanging ranks, are evaluated.
"""

from __future__ import annotations

import json
import math
import random
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.soak.study import Soak, commit, run as run_soak
from moe_comm import train
from moe_comm.bench.common import machine, report
from moe_comm.bench.hosts.namespaces import Hosts, unavailable_reason
from moe_comm.bench.hosts.ranks import run_on_hosts
from moe_comm.errors import ConfigError
from moe_comm.observe.diagnose import diagnose
from moe_comm.observe.faults import read_injections
from moe_comm.observe.records import FAULTS, INJECTED, FaultRecord, read_lines
from moe_comm.observe.window import Window, read_window
from moe_comm.runtime.launch import init_ranks, launch

WARM, WINDOW = 20, 10
SLOW_S = (0.05, 0.1, 0.2)
LINK_MBIT, SLOW_MBIT = 1000.0, (20, 50, 100)
HANGS = ("stop", "hold_gil", "kill")
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class DiagnosisStudy:
    """Number of cases of each kind. ``ranks``: ranks of runs on one host. ``hosts``: hosts with one rank each."""

    slow: int = 80
    links: int = 60
    hangs: int = 60
    ranks: int = 4
    hosts: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.slow, self.links, self.hangs) < 0 or self.ranks < 2 or self.hosts < 3:
            raise ConfigError(
                f"diagnosis needs at least 2 ranks and 3 hosts, and cases must not be negative; got {self}"
            )


@dataclass(frozen=True)
class DiagnosisCase:
    """A window of steps with a fault, and the expected diagnosis. Healthy windows have ``kind`` "" and no ranks."""

    first: int
    fault: str
    kind: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class JudgedCase:
    """A case and its diagnosis. ``named`` is the first finding, such as "slow rank 2", or "" for none; ``sure`` is its
    confidence."""

    case: DiagnosisCase
    named: str
    sure: float

    @property
    def right(self) -> bool:
        return self.named == _named(self.case.kind, self.case.ranks)


def slow_ranks(cases: DiagnosisStudy) -> list[DiagnosisCase]:
    """Return alternating windows with a slow rank and healthy windows."""
    rng = random.Random(cases.seed)

    def one(first: int) -> DiagnosisCase:
        rank, kind = rng.randrange(cases.ranks), rng.choice(("slow_sleep", "slow_cpu"))
        fault = f"{kind}:rank={rank},step={first},steps={WINDOW},seconds={rng.choice(SLOW_S)}"
        return DiagnosisCase(first, fault, "slow rank", (rank,))

    return _alternating(cases.slow, one)


def slow_links(cases: DiagnosisStudy) -> list[DiagnosisCase]:
    """Return alternating windows with a slow outgoing link of a host and healthy windows."""
    rng = random.Random(cases.seed + 1)

    def one(first: int) -> DiagnosisCase:
        rank = rng.randrange(cases.hosts)
        fault = f"slow_link:rank={rank},step={first},steps={WINDOW},mbit={rng.choice(SLOW_MBIT)}"
        return DiagnosisCase(first, fault, "slow sender", (rank,))

    return _alternating(cases.links, one)


def judge(window: Window, cases: Sequence[DiagnosisCase]) -> list[JudgedCase]:
    """Diagnose the window of each case without its first step, because the fault begins in the middle of that step."""
    judged = []
    for case in cases:
        findings = diagnose(window.between(case.first + 1, case.first + WINDOW - 1))
        best = findings[0] if findings else None
        judged.append(JudgedCase(case, _named(best.kind, best.ranks) if best else "", best.sure if best else 0.0))
    return judged


def hangs(run: Path) -> list[JudgedCase]:
    """Return the ranks that the watchers named for each hang, in the first record between it and the next hang."""
    records = sorted(read_lines(run / FAULTS, FaultRecord), key=lambda one: one.time_s)
    judged = []
    injected = read_injections(run / INJECTED)
    ends = [*(following.time_s for following in injected[1:]), math.inf]
    for one, end in zip(injected, ends, strict=True):
        case = DiagnosisCase(one.step, one.fault, "hang", (one.rank,))
        after = next((r for r in records if one.time_s <= r.time_s < end and r.kind in ("stuck", "died")), None)
        judged.append(JudgedCase(case, _named("hang", tuple(after.ranks)) if after else "", 1.0))
    return judged


def run(cases: DiagnosisStudy, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Run all cases and return the JSON object.

    Raises:
        ConfigError: ``cases.links`` is not 0 and the hosts cannot be created.
    """
    if cases.links and (reason := unavailable_reason()):
        raise ConfigError(f"slow links require several hosts: {reason}; or use --links 0")
    judged: dict[str, list[JudgedCase]] = {}
    with tempfile.TemporaryDirectory(prefix="moe_comm-diagnosis-") as name:
        folder = Path(name)
        if cases.slow:
            plan = slow_ranks(cases)
            settings = _settings(folder / "slow", plan, cases.ranks, every=0)
            runs = launch(_train, (settings,), cases.ranks)
            judged["slow rank"] = judge(read_window(Path(runs[0])), plan)
            say(_line("slow rank", judged["slow rank"]))
        if cases.links:
            plan = slow_links(cases)
            settings = _settings(folder / "links", plan, cases.hosts, every=1)
            with Hosts(cases.hosts, LINK_MBIT / 1000) as hosts:
                runs = run_on_hosts(_train, (settings,), hosts, 1, TIMEOUT_S)
            judged["slow link"] = judge(read_window(Path(runs[0])), plan)
            say(_line("slow link", judged["slow link"]))
        if cases.hangs:
            soak = Soak(folder / "hangs", cases.ranks, cases.hangs, cases.seed, kinds=HANGS)
            run_soak(soak, say)
            (faulty_run,) = (folder / "hangs" / "runs").glob("soak-*")
            judged["hang"] = hangs(faulty_run)
            say(_line("hang", judged["hang"]))
    return _summary(cases, judged)


def main(cases: DiagnosisStudy, json_out: str | None) -> None:
    """Run the study, print the results and write JSON."""
    report.check_writable(json_out)
    result = run(cases, lambda text: print(text, file=sys.stderr if json_out == "-" else sys.stdout, flush=True))
    report.write_json(result, json_out)


def _alternating(number: int, make: Callable[[int], DiagnosisCase]) -> list[DiagnosisCase]:
    starts = [WARM + 1 + 2 * WINDOW * index for index in range(number)]
    return [case for first in starts for case in (make(first), DiagnosisCase(first + WINDOW, "", "", ()))]


def _settings(folder: Path, plan: Sequence[DiagnosisCase], ranks: int, every: int) -> list[str]:
    return [
        f"run.folder={folder / 'runs'}",
        f"run.steps={plan[-1].first + WINDOW}",
        "run.sample_tokens=0",
        "run.eval_batches=1",
        f"data.cache={folder / 'cache'}",
        "data.batch=12",
        "data.seq_len=64",
        f"parallel.ranks={ranks}",
        "parallel.timeout_s=120",
        "model.experts=12",
        f"observe.every={every}",
        f"faults.plan={json.dumps([case.fault for case in plan if case.fault])}",
    ]


def _train(settings: list[str]) -> str:
    with init_ranks(None, 120.0):
        return str(train.run("tiny", settings).folder)


def _named(kind: str, ranks: Sequence[int]) -> str:
    return f"{kind} {', '.join(map(str, ranks))}" if kind else ""


def _line(kind: str, judged: Sequence[JudgedCase]) -> str:
    faulty = [one for one in judged if one.case.kind]
    healthy = [one for one in judged if not one.case.kind]
    quiet = f"; no finding in {sum(one.right for one in healthy)} of {len(healthy)} healthy windows" if healthy else ""
    return f"{kind}: {sum(one.right for one in faulty)} of {len(faulty)} correct{quiet}"


def _summary(cases: DiagnosisStudy, judged: dict[str, list[JudgedCase]]) -> dict[str, Any]:
    judged_cases = [one for group in judged.values() for one in group]
    faulty, healthy = [one for one in judged_cases if one.case.kind], [one for one in judged_cases if not one.case.kind]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": shlex.join(["python", "-m", "benchmarks.diagnosis", *sys.argv[1:]]),
        "machine": machine.machine_info("cpu"),
        "ranks": cases.ranks,
        "hosts": cases.hosts,
        "cases": len(faulty),
        "right": sum(one.right for one in faulty),
        "right_share": sum(one.right for one in faulty) / max(len(faulty), 1),
        "healthy": len(healthy),
        "quiet": sum(one.right for one in healthy),
        "quiet_share": sum(one.right for one in healthy) / max(len(healthy), 1),
        "kinds": {
            kind: {
                "cases": sum(bool(one.case.kind) for one in group),
                "right": sum(one.right for one in group if one.case.kind),
                "healthy": sum(not one.case.kind for one in group),
                "quiet": sum(one.right for one in group if not one.case.kind),
            }
            for kind, group in judged.items()
        },
        "wrong": [
            {"step": one.case.first, "fault": one.case.fault, "named": one.named, "sure": one.sure}
            for one in judged_cases
            if not one.right
        ],
    }
