"""Does diagnosis name the right one? Training with faults on purpose, judged step window by step window.

    steps     1 ── WARM ── │ slow rank 2 │ healthy │ slow rank 0 │ healthy │ ...     PART steps each
    judged                   rank 2?       nobody?   rank 0?       nobody?

Slow ranks sleep or burn processor time in the experts' forward pass, on one host; slow links are slowed by tc on hosts
of their own (``moe_comm.bench.hosts``), which probe each other in every step; hangs are a soak's in which ranks are
stopped, killed or keep Python's lock (``benchmarks.soak``), and the watchers' records say whom they named.
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

from benchmarks.soak.study import Soak, commit
from benchmarks.soak.study import run as run_soak
from moe_comm import train
from moe_comm.bench.common import machine, report
from moe_comm.bench.hosts.namespaces import Hosts, why_not
from moe_comm.bench.hosts.ranks import run_on_hosts
from moe_comm.errors import ConfigError
from moe_comm.observe.diagnose import diagnose
from moe_comm.observe.faults import read_injections
from moe_comm.observe.records import FAULTS, INJECTED, FaultRecord, read_lines
from moe_comm.observe.window import Window, read_window
from moe_comm.runtime.launch import init_ranks, launch

WARM, PART = 20, 10
SLOW_S = (0.05, 0.1, 0.2)
LINK_MBIT, SLOW_MBIT = 1000.0, (20, 50, 100)
HANGS = ("stop", "hold_gil", "kill")
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Cases:
    """How many cases of each kind. ranks: of runs on one host. hosts: with one rank each."""

    slow: int = 80
    links: int = 60
    hangs: int = 60
    ranks: int = 4
    hosts: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.slow, self.links, self.hangs) < 0 or self.ranks < 2 or self.hosts < 3:
            raise ConfigError(f"diagnosis needs at least 2 ranks, 3 hosts and no negative number of cases; got {self}")


@dataclass(frozen=True)
class Case:
    """Steps in which something is on purpose, and who is to be named for it; ``kind`` "" and no ranks for nobody."""

    first: int
    fault: str
    kind: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Judged:
    """named: what diagnosis said first, such as "slow rank 2"; "" for nobody."""

    case: Case
    named: str
    sure: float

    @property
    def right(self) -> bool:
        return self.named == _named(self.case.kind, self.case.ranks)


def slow_ranks(cases: Cases) -> list[Case]:
    """A slow rank, then healthy steps, and so on."""
    chance = random.Random(cases.seed)

    def one(first: int) -> Case:
        rank, kind = chance.randrange(cases.ranks), chance.choice(("slow_sleep", "slow_cpu"))
        fault = f"{kind}:rank={rank},step={first},steps={PART},seconds={chance.choice(SLOW_S)}"
        return Case(first, fault, "slow rank", (rank,))

    return _alternating(cases.slow, one)


def slow_links(cases: Cases) -> list[Case]:
    """What a host sends is slowed, then nothing is, and so on."""
    chance = random.Random(cases.seed + 1)

    def one(first: int) -> Case:
        rank = chance.randrange(cases.hosts)
        fault = f"slow_link:rank={rank},step={first},steps={PART},mbit={chance.choice(SLOW_MBIT)}"
        return Case(first, fault, "slow sender", (rank,))

    return _alternating(cases.links, one)


def judge(window: Window, cases: Sequence[Case]) -> list[Judged]:
    """What diagnosis says of each case's steps. The first step is left out: a fault begins in the middle of it."""
    found = []
    for case in cases:
        named = diagnose(window.between(case.first + 1, case.first + PART - 1))
        best = named[0] if named else None
        found.append(Judged(case, _named(best.kind, best.ranks) if best else "", best.sure if best else 0.0))
    return found


def hangs(run: Path) -> list[Judged]:
    """Whom the watchers named for each hang in the run's folder, in the first record between it and the next."""
    records = sorted(read_lines(run / FAULTS, FaultRecord), key=lambda one: one.time_s)
    found = []
    injected = read_injections(run / INJECTED)
    ends = [*(following.time_s for following in injected[1:]), math.inf]
    for one, end in zip(injected, ends, strict=True):
        case = Case(one.step, one.fault, "hang", (one.rank,))
        after = next((r for r in records if one.time_s <= r.time_s < end and r.kind in ("stuck", "died")), None)
        found.append(Judged(case, _named("hang", tuple(after.ranks)) if after else "", 1.0))
    return found


def run(cases: Cases, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Run all cases; return what ``--json`` writes.

    Raises:
        ConfigError: links are wanted and hosts cannot be made here.
    """
    if cases.links and (reason := why_not()):
        raise ConfigError(f"slow links need hosts of their own: {reason}; or take --links 0")
    judged: dict[str, list[Judged]] = {}
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
            (broken,) = (folder / "hangs" / "runs").glob("soak-*")
            judged["hang"] = hangs(broken)
            say(_line("hang", judged["hang"]))
    return _summary(cases, judged)


def main(cases: Cases, json_out: str | None) -> None:
    """Run, print and write."""
    report.check_writable(json_out)
    found = run(cases, lambda text: print(text, file=sys.stderr if json_out == "-" else sys.stdout, flush=True))
    report.write_json(found, json_out)


def _alternating(number: int, make: Callable[[int], Case]) -> list[Case]:
    found = []
    for index in range(number):
        first = WARM + 1 + 2 * PART * index
        found += [make(first), Case(first + PART, "", "", ())]
    return found


def _settings(folder: Path, plan: Sequence[Case], ranks: int, every: int) -> list[str]:
    return [
        f"run.folder={folder / 'runs'}",
        f"run.steps={plan[-1].first + PART}",
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


def _line(kind: str, judged: Sequence[Judged]) -> str:
    on_purpose = [one for one in judged if one.case.kind]
    healthy = [one for one in judged if not one.case.kind]
    quiet = (
        f"; nobody named in {sum(one.right for one in healthy)} of {len(healthy)} healthy windows" if healthy else ""
    )
    return f"{kind}: {sum(one.right for one in on_purpose)} of {len(on_purpose)} named rightly{quiet}"


def _summary(cases: Cases, judged: dict[str, list[Judged]]) -> dict[str, Any]:
    every = [one for part in judged.values() for one in part]
    on_purpose, healthy = [one for one in every if one.case.kind], [one for one in every if not one.case.kind]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": shlex.join(["python", "-m", "benchmarks.diagnosis", *sys.argv[1:]]),
        "machine": machine.facts("cpu"),
        "ranks": cases.ranks,
        "hosts": cases.hosts,
        "cases": len(on_purpose),
        "right": sum(one.right for one in on_purpose),
        "right_share": sum(one.right for one in on_purpose) / max(len(on_purpose), 1),
        "healthy": len(healthy),
        "quiet": sum(one.right for one in healthy),
        "quiet_share": sum(one.right for one in healthy) / max(len(healthy), 1),
        "kinds": {
            kind: {
                "cases": sum(bool(one.case.kind) for one in part),
                "right": sum(one.right for one in part if one.case.kind),
                "healthy": sum(not one.case.kind for one in part),
                "quiet": sum(one.right for one in part if not one.case.kind),
            }
            for kind, part in judged.items()
        },
        "wrong": [
            {"step": one.case.first, "fault": one.case.fault, "named": one.named, "sure": one.sure}
            for one in every
            if not one.right
        ],
    }
