"""Training with hundreds of injected faults, compared with a run without faults.

    reference   config ─▶ train ─────────────────────────────────▶ losses, parameters ─┐ bit-identical?
    soak        config + faults ─▶ train --restarts ─▶ killed ─▶ ... ▶ the same         ─┘ no leaks?

There is one fault every three steps. Kinds, ranks and positions are random. Checkpoints are written every four steps
and in-memory snapshots every three, so that restarted ranks resume from both.
"""

from __future__ import annotations

import json
import math
import os
import random
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.soak import leak_check
from moe_comm.bench.common import machine
from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.observe.effective import effective_time
from moe_comm.observe.faults import DAMAGE, KINDS, PLACES, fault_outcomes, parse, read_injections, summary
from moe_comm.observe.records import INJECTED, METRICS
from moe_comm.train import config as configuration
from moe_comm.train.checkpoint import CheckpointReader, latest

EVERY, FIRST = 3, 14
"""Steps between two faults, and the step of the first fault."""
CHECKPOINT_EVERY, PEER_EVERY = 4, 3
PERIOD, DISK_IS_NEWER = 12, (4, 5, 8)
"""Numbers of completed steps, modulo PERIOD, at which the newest checkpoint is newer than the in-memory snapshot.
Restarted ranks then read the checkpoint, so damage to it has an effect."""
MARK = "MOE_COMM_SOAK"
"""Environment variable that marks the processes of a soak."""
LEFT_S = 30.0
"""Time for processes and shared memory to disappear after the run."""
POLL_S = 0.5
PROGRESS_S = 10.0
IMPOSSIBLE = ("slow_link",)
"""Requires ranks on several hosts."""
_OPTIONS = {
    "slow_cpu": ("seconds=0.05", "steps=2"),
    "slow_sleep": ("seconds=0.05", "steps=2"),
    "full_shm": ("mib=64", "seconds=0.05"),
}
_PLACED = ("kill", "stop", "segv", "exit", "hold_gil")


@dataclass(frozen=True)
class Soak:
    """Settings of a soak.

    Args:
        folder: folder of the runs. An interrupted soak in this folder resumes.
        faults: number of faults.
        stuck_s: see ``WatchSection``.
        kinds: kinds of faults; empty: all possible kinds.
        settings: additional overrides of the configuration.
    """

    folder: Path
    ranks: int = 4
    faults: int = 1100
    seed: int = 0
    stuck_s: float = 2.0
    kinds: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in KINDS or kind in IMPOSSIBLE]
        if unknown or self.ranks < 1 or self.faults < 1:
            known = ", ".join(kind for kind in KINDS if kind not in IMPOSSIBLE)
            raise ConfigError(
                f"a soak needs at least one rank and fault, and known kinds; got {self.ranks} ranks, {self.faults} "
                f"faults, unknown kinds: {', '.join(unknown) or 'none'}; known: {known}"
            )


def plan(soak: Soak) -> list[str]:
    """Return the faults. Damage to a checkpoint is followed by a kill in the same step, which counts as a fault."""
    rng = random.Random(soak.seed)
    kinds = list(soak.kinds or (kind for kind in KINDS if kind not in IMPOSSIBLE))
    groups: dict[str, list[str]] = {"damage": [], "disk": [], "any": []}
    for kind in kinds:
        groups["damage" if kind in DAMAGE else "disk" if kind == "full_disk" else "any"].append(kind)
    remaining: dict[str, list[str]] = {name: [] for name in groups}

    def draw(group: str) -> str:
        """Return a kind. All kinds of a group are drawn once before a kind is repeated."""
        if not remaining[group]:
            remaining[group] = rng.sample(groups[group], len(groups[group]))
        return remaining[group].pop()

    faults: list[str] = []
    step = FIRST
    while len(faults) < soak.faults:
        rank = rng.randrange(soak.ranks)
        group = "any"
        if (step - 1) % PERIOD in DISK_IS_NEWER and groups["damage"]:
            group = "damage"
        elif step % CHECKPOINT_EVERY == 0 and groups["disk"] and (not groups["any"] or rng.random() < 0.4):
            group = "disk"
        if groups[group]:
            kind = draw(group)
            options = [f"rank={rank}", f"step={step}", *_OPTIONS.get(kind, ())]
            options += [f"at={rng.choice(PLACES)}"] if kind in _PLACED else []
            faults.append(f"{kind}:" + ",".join(options))
            if kind in DAMAGE:
                faults.append(f"kill:rank={rank},step={step}")
        step += EVERY
    return faults[: soak.faults]


def settings_of(soak: Soak, faults: Sequence[str]) -> list[str]:
    """Return the overrides of the configuration ``tiny``. Without ``faults``, they are those of the reference run."""
    last = max((fault.step or 0 for fault in map(parse, plan(soak))), default=0)
    return [
        f"run.name={'soak' if faults else 'reference'}",
        f"run.folder={soak.folder / 'runs'}",
        f"run.steps={last + EVERY + 1}",
        "run.sample_tokens=0",
        "run.eval_batches=1",
        "run.nonfinite=rerun",
        f"run.seed={soak.seed}",
        f"data.cache={soak.folder / 'cache'}",
        "data.seq_len=16",
        "data.batch=8",
        "model.hidden=16",
        "model.kv_heads=2",
        "model.ffn=24",
        "parallel.timeout_s=60",
        f"parallel.ranks={soak.ranks}",
        f"checkpoint.every={CHECKPOINT_EVERY}",
        f"checkpoint.peer_every={PEER_EVERY}",
        "checkpoint.keep=3",
        "checkpoint.background=false",
        "guard.checksums=true",
        f"watch.stuck_s={soak.stuck_s}",
        "watch.start_s=60",
        "observe.every=0",
        f"faults.seed={soak.seed}",
        *soak.settings,
        f"faults.plan={json.dumps(list(faults))}",
    ]


def run(soak: Soak, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Train with and without faults, compare the runs, and return the JSON object.

    Args:
        soak: settings.
        say: receives progress messages.

    Raises:
        ConfigError: the folder contains a soak with different settings.
        MoeCommError: a run ended before its last step. Its output is in the folder.
        KeyboardInterrupt: the user interrupted the soak. Another call with the same folder resumes it.
    """
    soak.folder.mkdir(parents=True, exist_ok=True)
    faults = plan(soak)
    _same_plan(soak, faults)
    started = time.monotonic()
    leaks = leak_check.start()
    token = f"{MARK}={secrets.token_hex(8)}"
    reference = _train(soak, [], token, lambda: leaks.watch(token))
    say(f"reference: {reference.name} is complete after {time.monotonic() - started:.0f} s")
    report_progress = _Progress(soak, len(faults), say)

    def poll() -> None:
        leaks.watch(token)
        report_progress()

    faulty = _train(soak, faults, token, poll)
    left = leaks.left(token, LEFT_S)
    injected = Counter(one.key for one in read_injections(faulty / INJECTED))
    difference = _difference(reference, faulty)
    effective = effective_time(faulty)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": shlex.join(["python", "-m", "benchmarks.soak", *sys.argv[1:]]),
        "machine": machine.machine_info("cpu"),
        "ranks": soak.ranks,
        "seed": soak.seed,
        "steps": len(_losses(reference)),
        "planned": len(faults),
        "faults": len(injected),
        "repeated": sorted(key for key, count in injected.items() if count > 1),
        "identical": not difference,
        "difference": difference,
        "left_behind": left,
        "kinds": summary(fault_outcomes(faulty)),
        "starts": effective.attempts if effective else 0,
        "effective_time_ratio": effective.ratio if effective else math.nan,
        "effective_time": effective.as_dict() if effective else {},
        "seconds": time.monotonic() - started,
    }


def problems(result: dict[str, Any]) -> list[str]:
    """Return the reasons why a soak failed; empty if it passed."""
    reasons = []
    if not result["identical"]:
        reasons.append(f"not bit-identical to a run without faults: {result['difference']}")
    if result["left_behind"]:
        reasons.append(f"left behind: {', '.join(result['left_behind'])}")
    if result["repeated"]:
        reasons.append(f"faults that were injected more than once: {', '.join(result['repeated'])}")
    if result["faults"] < result["planned"]:
        reasons.append(f"only {result['faults']} of {result['planned']} faults were injected")
    return reasons


def table(result: dict[str, Any]) -> str:
    """Return the result as text."""

    def cells(spread: dict[str, float] | None) -> str:
        return " ".join(f"{value:8.2f}" for value in spread.values()) if spread else f"{'-':>26}"

    lines = [f"{'':<22}{'':>6} | {'detected: median, p99, max':>26} | {'recovered: the same, seconds':>26}"]
    lines += [
        f"{kind:<22}{one['count']:>6} | {cells(one['detected'])} | {cells(one['recovered'])}"
        for kind, one in result["kinds"].items()
    ]
    same = "bit-identical to" if result["identical"] else "NOT bit-identical to"
    lines.append(
        f"{result['faults']} faults, {result['starts']} starts of {result['ranks']} ranks, {result['steps']} steps: "
        f"{same} a run without faults; effective time {result['effective_time_ratio']:.1%}"
    )
    return "\n".join(lines)


class _Progress:
    """Reports the number of injected faults every ``PROGRESS_S`` seconds."""

    def __init__(self, soak: Soak, total: int, say: Callable[[str], None]) -> None:
        self._soak, self._total, self._say = soak, total, say
        self._next = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + PROGRESS_S
        folder = _folder(self._soak, "soak")
        injected = read_injections(folder / INJECTED) if folder else []
        steps = len(_losses(folder)) if folder else 0
        last = injected[-1].fault if injected else "none"
        self._say(f"{len(injected)} of {self._total} faults, step {steps}; last: {last}")


def _train(soak: Soak, faults: Sequence[str], token: str, poll: Callable[[], None]) -> Path:
    """Train in separate processes unless the run is finished, and return its folder. Calls ``poll`` regularly."""
    name = "soak" if faults else "reference"
    folder = _folder(soak, name)
    if folder is not None and _status(folder) == "finished":
        return folder
    config = soak.folder / f"{name}.toml"
    config.write_text(configuration.dump(configuration.load("tiny", settings_of(soak, faults))), encoding="utf-8")
    command = [sys.executable, "-m", "moe_comm", "train", str(config), "--restarts", str(10 * len(faults) + 1)]
    command += ["--resume", "auto"] if folder is not None else []
    key, _, value = token.partition("=")
    log = soak.folder / f"{name}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | {key: value})
        try:
            while process.poll() is None:
                poll()
                time.sleep(POLL_S)
        except BaseException:
            # On SIGINT, the run saves a checkpoint and exits.
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    folder = _folder(soak, name)
    if process.returncode or folder is None or _status(folder) != "finished":
        tail = log.read_text(errors="replace").splitlines()[-5:]
        raise MoeCommError(f"the {name} run exited with code {process.returncode}; see {log}: {' / '.join(tail)}")
    return folder


def _folder(soak: Soak, name: str) -> Path | None:
    folders = (soak.folder / "runs").glob(f"{name}-*")
    return max(folders, key=lambda path: (path / "config.resolved.toml").stat().st_mtime_ns, default=None)


def _status(folder: Path) -> str:
    try:
        return str(json.loads((folder / "result.json").read_text())["status"])
    except (OSError, ValueError, KeyError):
        return ""


def _same_plan(soak: Soak, faults: Sequence[str]) -> None:
    path = soak.folder / "plan.json"
    own_plan = {"ranks": soak.ranks, "seed": soak.seed, "settings": list(soak.settings), "faults": list(faults)}
    if path.exists() and json.loads(path.read_text()) != own_plan:
        raise ConfigError(
            f"{soak.folder} contains a soak with different settings; use the same settings or another --folder"
        )
    path.write_text(json.dumps(own_plan, indent=1), encoding="utf-8")


def _losses(run: Path) -> dict[int, Any]:
    """Return the losses by step."""
    losses = {}
    for line in (run / METRICS).read_text().splitlines() if (run / METRICS).exists() else ():
        try:
            values = json.loads(line)
            losses[int(values["step"])] = values["loss"]
        except (ValueError, KeyError, TypeError):
            continue
    return losses


def _difference(reference: Path, faulty: Path) -> str:
    """Return the first difference of the losses or of the final checkpoints, or "" if they are bit-identical."""
    expected, actual = _losses(reference), _losses(faulty)
    for step in sorted(expected.keys() | actual.keys()):
        if expected.get(step) != actual.get(step):
            return f"the loss of step {step} is {actual.get(step)}, without faults {expected.get(step)}"
    paths = [latest(run / "checkpoints") for run in (reference, faulty)]
    if None in paths:
        return "a run has no final checkpoint"
    first, second = (CheckpointReader(path) for path in paths if path is not None)
    if sorted(first.names) != sorted(second.names):
        return "the checkpoints contain different tensors"
    for name in sorted(first.names):
        if not torch.equal(first.read(name).view(torch.uint8), second.read(name).view(torch.uint8)):
            return f"the final values of {name} differ"
    return ""


def commit() -> str:
    """Return the commit of the source tree, or "" if the sources are not in a git repository."""
    here = Path(__file__).parent
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""
