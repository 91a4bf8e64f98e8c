"""A training run through hundreds of faults, which must end with the bits of one without any.

    reference   config ─▶ train ─────────────────────────────────▶ losses, parameters ─┐ identical?
    soak        config + faults ─▶ train --restarts ─▶ killed ─▶ ... ▶ the same         ─┘ nothing left behind?

One fault every three steps; kinds, ranks and places are drawn by the seed. Checkpoints are taken every four steps and
copies in memory every three, so that ranks which are started again go on from either.
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

from benchmarks.soak import left_over
from moe_comm.bench.common import machine
from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.observe.effective import effective_time
from moe_comm.observe.faults import DAMAGE, KINDS, PLACES, parse, read_injections
from moe_comm.observe.records import INJECTED, METRICS
from moe_comm.observe.survival import answers, summary
from moe_comm.train import config as configuration
from moe_comm.train.checkpoint import CheckpointReader, latest

EVERY, FIRST = 3, 14
CHECKPOINT_EVERY, PEER_EVERY = 4, 3
PERIOD, DISK_IS_NEWER = 12, (4, 5, 8)
"""After so many steps, modulo the period, the newest checkpoint is newer than what is in memory: what harms it is met
by ranks that are then started again."""
MARK = "MOE_COMM_SOAK"
"""Environment variable by which every process of a soak is known."""
LEFT_S = 30.0
"""What processes and shared memory get to go away after the run."""
LOOK_S = 0.5
TOLD_S = 10.0
IMPOSSIBLE = ("slow_link",)
"""Needs ranks on hosts of their own."""
_OPTIONS = {
    "slow_cpu": ("seconds=0.05", "steps=2"),
    "slow_sleep": ("seconds=0.05", "steps=2"),
    "full_shm": ("mib=64", "seconds=0.05"),
}
_PLACED = ("kill", "stop", "segv", "exit", "hold_gil")


@dataclass(frozen=True)
class Soak:
    """faults: how many. folder: where everything goes; a run that was interrupted there goes on. stuck_s: see
    ``WatchSection``. kinds: of faults; () is all that can be had. settings: more overrides of the configuration."""

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
                f"a soak needs ranks, faults and known kinds; got {self.ranks}, {self.faults}, {', '.join(unknown)}; "
                f"known: {known}"
            )


def plan(soak: Soak) -> list[str]:
    """The faults. Damage to a checkpoint is followed by a kill in the same step, which is a fault too."""
    chance = random.Random(soak.seed)
    kinds = list(soak.kinds or (kind for kind in KINDS if kind not in IMPOSSIBLE))
    groups: dict[str, list[str]] = {"damage": [], "disk": [], "any": []}
    for kind in kinds:
        groups["damage" if kind in DAMAGE else "disk" if kind == "full_disk" else "any"].append(kind)
    waiting: dict[str, list[str]] = {name: [] for name in groups}

    def draw(group: str) -> str:
        """Each kind once before any comes again."""
        if not waiting[group]:
            waiting[group] = chance.sample(groups[group], len(groups[group]))
        return waiting[group].pop()

    found: list[str] = []
    step = FIRST
    while len(found) < soak.faults:
        rank = chance.randrange(soak.ranks)
        group = "any"
        if (step - 1) % PERIOD in DISK_IS_NEWER and groups["damage"]:
            group = "damage"
        elif step % CHECKPOINT_EVERY == 0 and groups["disk"] and (not groups["any"] or chance.random() < 0.4):
            group = "disk"
        if groups[group]:
            kind = draw(group)
            options = [f"rank={rank}", f"step={step}", *_OPTIONS.get(kind, ())]
            options += [f"at={chance.choice(PLACES)}"] if kind in _PLACED else []
            found.append(f"{kind}:" + ",".join(options))
            if kind in DAMAGE:
                found.append(f"kill:rank={rank},step={step}")
        step += EVERY
    return found[: soak.faults]


def settings_of(soak: Soak, faults: Sequence[str]) -> list[str]:
    """Overrides of ``tiny``; without ``faults`` those of the reference."""
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
    """Train with and without faults, and compare; what OUT holds.

    Args:
        say: told how far it is.

    Raises:
        ConfigError: the folder holds a soak with other settings.
        MoeCommError: a run ended before its last step; its output is in the folder.
        KeyboardInterrupt: another call with the same folder goes on.
    """
    soak.folder.mkdir(parents=True, exist_ok=True)
    faults = plan(soak)
    _same_plan(soak, faults)
    began = time.monotonic()
    before = left_over.look()
    token = f"{MARK}={secrets.token_hex(8)}"
    reference = _train(soak, [], token, lambda: before.watch(token))
    say(f"reference: {reference.name} is complete after {time.monotonic() - began:.0f} s")
    told = _Progress(soak, len(faults), say)

    def look() -> None:
        before.watch(token)
        told()

    broken = _train(soak, faults, token, look)
    left = before.left(token, LEFT_S)
    happened = Counter(one.key for one in read_injections(broken / INJECTED))
    difference = _difference(reference, broken)
    effective = effective_time(broken)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": shlex.join(["python", "-m", "benchmarks.soak", *sys.argv[1:]]),
        "machine": machine.facts("cpu"),
        "ranks": soak.ranks,
        "seed": soak.seed,
        "steps": len(_losses(reference)),
        "planned": len(faults),
        "faults": len(happened),
        "repeated": sorted(key for key, count in happened.items() if count > 1),
        "identical": not difference,
        "difference": difference,
        "left_behind": left,
        "kinds": summary(answers(broken)),
        "starts": effective.attempts if effective else 0,
        "effective_time_ratio": effective.ratio if effective else math.nan,
        "effective_time": effective.as_dict() if effective else {},
        "seconds": time.monotonic() - began,
    }


def problems(found: dict[str, Any]) -> list[str]:
    """What keeps a soak from being passed."""
    said = []
    if not found["identical"]:
        said.append(f"not the bits of a run without faults: {found['difference']}")
    if found["left_behind"]:
        said.append(f"left behind: {', '.join(found['left_behind'])}")
    if found["repeated"]:
        said.append(f"faults that happened more than once: {', '.join(found['repeated'])}")
    if found["faults"] < found["planned"]:
        said.append(f"only {found['faults']} of {found['planned']} faults happened")
    return said


def table(found: dict[str, Any]) -> str:
    """What was found, to be read."""

    def shown(spread: dict[str, float] | None) -> str:
        return " ".join(f"{value:8.2f}" for value in spread.values()) if spread else f"{'-':>26}"

    lines = [f"{'':<22}{'':>6} | {'noticed: median, p99, worst':>26} | {'recovered: the same, seconds':>26}"]
    lines += [
        f"{kind:<22}{one['count']:>6} | {shown(one['detected'])} | {shown(one['recovered'])}"
        for kind, one in found["kinds"].items()
    ]
    same = "the same bits as" if found["identical"] else "NOT the bits of"
    lines.append(
        f"{found['faults']} faults, {found['starts']} starts of {found['ranks']} ranks, {found['steps']} steps: {same} "
        f"a run without faults; effective time {found['effective_time_ratio']:.1%}"
    )
    return "\n".join(lines)


class _Progress:
    """Says how many faults are survived, now and then."""

    def __init__(self, soak: Soak, total: int, say: Callable[[str], None]) -> None:
        self._soak, self._total, self._say = soak, total, say
        self._next = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + TOLD_S
        folder = _folder(self._soak, "soak")
        injected = read_injections(folder / INJECTED) if folder else []
        steps = len(_losses(folder)) if folder else 0
        last = injected[-1].fault if injected else "none"
        self._say(f"{len(injected)} of {self._total} faults, step {steps}; last: {last}")


def _train(soak: Soak, faults: Sequence[str], token: str, look: Callable[[], None]) -> Path:
    """Train to the end in processes of their own, unless that has been done; returns the run's folder."""
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
                look()
                time.sleep(LOOK_S)
        except BaseException:
            # Ctrl-C has reached it too; it saves and ends.
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    folder = _folder(soak, name)
    if process.returncode or folder is None or _status(folder) != "finished":
        tail = log.read_text(errors="replace").splitlines()[-5:]
        raise MoeCommError(f"the {name} run ended with exit code {process.returncode}; see {log}: {' / '.join(tail)}")
    return folder


def _folder(soak: Soak, name: str) -> Path | None:
    found = list((soak.folder / "runs").glob(f"{name}-*"))
    return max(found, key=lambda path: (path / "config.resolved.toml").stat().st_mtime_ns) if found else None


def _status(folder: Path) -> str:
    try:
        return str(json.loads((folder / "result.json").read_text())["status"])
    except (OSError, ValueError, KeyError):
        return ""


def _same_plan(soak: Soak, faults: Sequence[str]) -> None:
    path = soak.folder / "plan.json"
    wanted = {"ranks": soak.ranks, "seed": soak.seed, "settings": list(soak.settings), "faults": list(faults)}
    if path.exists() and json.loads(path.read_text()) != wanted:
        raise ConfigError(f"{soak.folder} holds a soak with other settings; give the same ones, or another --folder")
    path.write_text(json.dumps(wanted, indent=1), encoding="utf-8")


def _losses(run: Path) -> dict[int, Any]:
    """By step."""
    found = {}
    for line in (run / METRICS).read_text().splitlines() if (run / METRICS).exists() else ():
        try:
            values = json.loads(line)
            found[int(values["step"])] = values["loss"]
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _difference(reference: Path, broken: Path) -> str:
    """Where the runs differ in a bit of a loss or of the final state; "" where they do not."""
    losses, theirs = _losses(reference), _losses(broken)
    for step in sorted(losses.keys() | theirs.keys()):
        if losses.get(step) != theirs.get(step):
            return f"the loss of step {step} is {theirs.get(step)}, without faults {losses.get(step)}"
    paths = [latest(run / "checkpoints") for run in (reference, broken)]
    if None in paths:
        return "a run has no checkpoint of its end"
    first, second = (CheckpointReader(path) for path in paths if path is not None)
    if sorted(first.names) != sorted(second.names):
        return "the checkpoints hold other tensors"
    for name in sorted(first.names):
        if not torch.equal(first.read(name).view(torch.uint8), second.read(name).view(torch.uint8)):
            return f"{name} has other bits at the end"
    return ""


def commit() -> str:
    """The commit of the source tree that this runs from; "" outside of one."""
    here = Path(__file__).parent
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""
