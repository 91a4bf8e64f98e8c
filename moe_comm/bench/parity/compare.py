"""``moe-comm parity``: the same training on one process and on every mapping, step by step.

One small MoE, fp32, same seed, same text, the same micro-batches: losses, gradient norms and final weights must be
those of one process, and ranks that hold the same weights must hold the same bits. With SGD as well as AdamW, because
Adam divides a wrong gradient scale away.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from moe_comm.bench.parity.cases import CASES, Case
from moe_comm.bench.parity.training import Ended, assemble, train
from moe_comm.errors import ConfigError
from moe_comm.runtime.launch import init_ranks, launch
from moe_comm.train import config as configuration

JOBS_PER_PROCESS = 6
"""Every run makes process groups, which gloo's threads serve until the process ends: after dozens of runs they, not
training, would keep the cores busy."""
LOADED = ("torch", "moe_comm.bench.parity_train")
TARGET = 1e-5
OPTIMIZERS = ("sgd", "adamw")
COMMON = (
    "data.source=pydoc",
    "data.seq_len=64",
    "data.batch=16",
    "data.micro_batches=4",
    "model.hidden=64",
    "model.layers=4",
    "model.heads=8",
    "model.kv_heads=4",
    "model.experts=8",
    "model.top_k=2",
    "model.ffn=64",
    "model.z_loss=0.001",
    "optimizer.warmup=2",
    "optimizer.clip=0",  # clipping would hide a wrong scale of all gradients alike
)
_EPS = "optimizer.eps=1e-6"
SETTINGS = {
    "sgd": ("optimizer.lr=0.1",),
    "adamw": ("optimizer.lr=1e-3", _EPS),
    "lamb": ("optimizer.lr=1e-2", _EPS),
    "muon": ("optimizer.lr=1e-2", _EPS),
}
"""By optimizer. Rates at which training is calm: at three times SGD's, gradient norms jump about, and rounding grows a
thousandfold in a few steps. And an eps above the rounding of a gradient: by less, Adam divides rounding by itself, and
elements whose gradient is zero but for rounding move by the whole rate, in one direction or the other."""


@dataclass(frozen=True)
class Limits:
    """The largest relative differences with which a mapping still counts as equal to one process."""

    loss: float
    grad_norm: float
    params: float


_ADAPTIVE = Limits(TARGET, 1e-4, 5e-3)
LIMITS = {"sgd": Limits(TARGET, 1e-5, 1e-5), "adamw": _ADAPTIVE, "lamb": _ADAPTIVE, "muon": _ADAPTIVE}
"""SGD adds up gradients, so norms and weights are as close as losses: in 20 steps on two ranks losses differed by 9e-8,
norms by 1.4e-6, weights by 1.1e-6. AdamW divides by the gradient's own size, so that one of rounding's size still moves
a weight by up to lr in every step: weights differed by 6e-6 as a rule, by 4e-4 in runs where losses differed by 3e-6
(which looks like a token that went to another expert of equal score), and by 1.1e-3 with capacity limits (7.5e-6)."""


@dataclass(frozen=True)
class ParityRow:
    """One mapping against one process; differences are the largest of all steps, relative to one process's value.

    param_rel_diff: largest difference of an element over the largest element of its tensor, the worst tensor's.
    replica_diff: the same between the ranks that hold a copy of the same weights; 0: the same values.
    dropped: mean share of slots over steps and layers.
    ok: whether all differences are within the limits; None: no parity is promised.
    """

    mapping: str
    ranks: int
    mode: str
    optimizer: str
    loss_rel_diff: float
    grad_norm_rel_diff: float
    param_rel_diff: float
    replica_diff: float
    dropped: float
    ok: bool | None

    def beyond(self) -> list[str]:
        """Which differences are above their limits; a NaN is. Copies must not differ at all."""
        limits = LIMITS[self.optimizer]
        within = {
            "loss": self.loss_rel_diff <= limits.loss,
            "grad norm": self.grad_norm_rel_diff <= limits.grad_norm,
            "weights": self.param_rel_diff <= limits.params,
            "copies": self.replica_diff == 0,
        }
        return [name for name, fits in within.items() if not fits]


def main(
    json_out: str | None = None,
    *,
    steps: int = 20,
    names: Sequence[str] = (),
    optimizers: Sequence[str] = OPTIMIZERS,
    settings: Sequence[str] = (),
) -> bool:
    """Run, print the table as it grows, write JSON; returns whether every mapping that promises parity has it."""
    console = Console(file=sys.stderr if json_out == "-" else None, highlight=False, soft_wrap=True)
    rows = []
    console.print(_line(("mapping", "mode", "optimizer", "loss", "grad norm", "weights", "copies", "")))
    for row in compare(chosen(names), optimizers, steps, settings):
        rows.append(row)
        verdict = {True: "ok", None: "no parity promised"}.get(row.ok) or f"DIFFERS: {', '.join(row.beyond())}"
        differences = (row.loss_rel_diff, row.grad_norm_rel_diff, row.param_rel_diff, row.replica_diff)
        console.print(_line((row.mapping, row.mode, row.optimizer, *(f"{d:.1e}" for d in differences), verdict)))
    ok = all(row.ok is not False for row in rows)
    promised = [row for row in rows if row.ok is not None]
    if promised:
        worst = max(row.loss_rel_diff for row in promised)
        console.print(
            f"largest loss difference {worst:.1e} (target {TARGET:.0e}) over {len(promised)} runs, {steps} steps"
        )
    if json_out is not None:
        limits = {optimizer: asdict(LIMITS[optimizer]) for optimizer in optimizers}
        found = {"target": TARGET, "limits": limits, "steps": steps, "ok": ok}
        found["mappings"] = [asdict(row) for row in rows]
        text = json.dumps(found, indent=2) + "\n"
        if json_out == "-":
            print(text, end="")
        else:
            Path(json_out).write_text(text, encoding="utf-8")
    return ok


def chosen(names: Sequence[str]) -> list[Case]:
    """The cases called ``names``; all if there are none.

    Raises:
        ConfigError: an unknown name.
    """
    known = {case.name: case for case in CASES}
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown mapping {name!r}; known: {'; '.join(known)}")
    return [known[name] for name in names] if names else list(CASES)


def compare(
    cases: Sequence[Case], optimizers: Sequence[str] = OPTIMIZERS, steps: int = 20, settings: Sequence[str] = ()
) -> Iterable[ParityRow]:
    """Train every case with every optimizer, and one process for each mode and model; one row a case and optimizer.

    Args:
        settings: dotted keys for all runs alike, after the common ones.
    """
    with tempfile.TemporaryDirectory(prefix="moe_comm-parity-") as folder:
        common = [*COMMON, f"run.steps={steps}", f"data.cache={folder}"]
        references: dict[tuple[str, tuple[str, ...], str], Ended] = {}
        for optimizer in optimizers:
            for mode, model in dict.fromkeys((case.mode, case.model) for case in cases):
                alone = Case("one process", 1, ("parallel.ep=1",), mode, model)
                references[mode, model, optimizer] = _launch([(alone, optimizer)], common, settings, 1)[0][0]
        for ranks in sorted({case.ranks for case in cases}):
            jobs = [(case, optimizer) for case in cases if case.ranks == ranks for optimizer in optimizers]
            for first in range(0, len(jobs), JOBS_PER_PROCESS):
                some = jobs[first : first + JOBS_PER_PROCESS]
                for (case, optimizer), trained in zip(some, _launch(some, common, settings, ranks), strict=True):
                    yield _row(case, optimizer, trained, references[case.mode, case.model, optimizer])


def _launch(
    jobs: Sequence[tuple[Case, str]], common: Sequence[str], settings: Sequence[str], ranks: int
) -> list[list[Ended]]:
    """For each job what each rank came to."""
    by_rank = launch(_rank, (list(jobs), list(common), list(settings)), ranks, preload=LOADED)
    return [[trained[job] for trained in by_rank] for job in range(len(jobs))]


def _rank(jobs: list[tuple[Case, str]], common: list[str], settings: list[str]) -> list[Ended]:
    with init_ranks("cpu"):
        found = []
        for case, optimizer in jobs:
            usual = [*common, f"optimizer.kind={optimizer}", *SETTINGS[optimizer]]
            found.append(train(configuration.load(None, [*usual, *settings, *case.overrides])))
        return found


def _row(case: Case, optimizer: str, ended: list[Ended], alone: Ended) -> ParityRow:
    weights, weights_apart = assemble([rank.parts for rank in ended])
    _, copies_apart = assemble([rank.copies for rank in ended])
    expected, _ = assemble([alone.parts])
    missing = [name for name, tensor in weights.items() if tensor.isnan().any()]
    if missing:
        raise ConfigError(f"{case.name}: no rank owns all of {', '.join(missing[:3])}, or it is NaN")
    if weights.keys() != expected.keys():
        raise ConfigError(f"{case.name}: weights {sorted(weights.keys() ^ expected.keys())} are on one side only")
    row = ParityRow(
        mapping=case.name,
        ranks=case.ranks,
        mode=case.mode,
        optimizer=optimizer,
        loss_rel_diff=_relative(ended[0].losses, alone.losses),
        grad_norm_rel_diff=_relative(ended[0].grad_norms, alone.grad_norms),
        param_rel_diff=_largest(_distance(weights[name], tensor) for name, tensor in expected.items()),
        replica_diff=_largest([*weights_apart.values(), *copies_apart.values()]),
        dropped=ended[0].dropped,
        ok=None,
    )
    return replace(row, ok=not row.beyond()) if case.has_parity else row


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _relative(found: Sequence[float], expected: Sequence[float]) -> float:
    return _largest(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def _largest(values: Iterable[float]) -> float:
    """NaN if any of them is: Python's ``max`` would pass over it."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


def _line(cells: Sequence[Any]) -> str:
    widths = (38, 17, 10, 9, 10, 9, 9)
    *padded, last = cells
    return " ".join([*(str(cell).ljust(width) for cell, width in zip(padded, widths, strict=True)), str(last)])
