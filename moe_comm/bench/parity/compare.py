"""``moe-comm parity``: compare training on every mapping with training in one process.

The model is a small fp32 MoE with the same seed, text and micro-batches. Losses, gradient norms and final weights must
match those of one process, and replicas of a weight must be bit-identical. Both SGD and AdamW are used, because AdamW
hides a wrong scale of the gradients.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from torch import Tensor

from moe_comm.bench.common import report
from moe_comm.bench.common.ranks import launch_ranks
from moe_comm.bench.hosts import unavailable_reason
from moe_comm.bench.parity.cases import CASES, ParityCase
from moe_comm.bench.parity.training import TrainingResult, assemble, train
from moe_comm.errors import ConfigError
from moe_comm.runtime.launch import init_ranks, ranks_to_use
from moe_comm.train import config as configuration

JOBS_PER_PROCESS = 6
"""Training runs per process. Each run creates process groups, whose gloo threads run until the process exits."""
PRELOAD = ("torch", "moe_comm.bench.parity.training")
TARGET = 1e-5
LINK_GBIT, TIMEOUT_S = 10.0, 900.0
"""Rate of the links between hosts, and time limit of the ranks on them."""
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
    "optimizer.clip=0",  # clipping would hide a wrong scale of the gradients
)
_EPS = "optimizer.eps=1e-6"
SETTINGS = {
    "sgd": ("optimizer.lr=0.1",),
    "adamw": ("optimizer.lr=1e-3", _EPS),
    "lamb": ("optimizer.lr=1e-2", _EPS),
    "muon": ("optimizer.lr=1e-2", _EPS),
}
"""Overrides by optimizer. Training must be stable: at three times the learning rate of SGD, rounding errors grow by a
factor of 1000 in a few steps. eps must exceed the rounding error of a gradient. Otherwise AdamW moves elements whose
gradient is zero up to rounding by the full learning rate."""


@dataclass(frozen=True)
class ParityLimits:
    """Largest allowed relative differences from one process."""

    loss: float
    grad_norm: float
    params: float


_ADAPTIVE = ParityLimits(TARGET, 1e-4, 5e-3)
LIMITS = {"sgd": ParityLimits(TARGET, 1e-5, 1e-5), "adamw": _ADAPTIVE, "lamb": _ADAPTIVE, "muon": _ADAPTIVE}
"""With SGD, in 20 steps on two ranks, losses differed by 9e-8, norms by 1.4e-6 and weights by 1.1e-6. AdamW divides by
the magnitude of the gradient, so a gradient as small as its rounding error moves a weight by up to lr in each step.
Weights typically differed by 6e-6. They differed by 4e-4 in runs whose losses differed by 3e-6 (probably a token with
two equal scores), and by 1.1e-3 with capacity limits (losses: 7.5e-6)."""


@dataclass(frozen=True)
class ParityRow:
    """Comparison of one mapping with one process. Differences are the maximum over the steps, relative to one process.

    Attributes:
        param_rel_diff: largest difference of an element over the largest element of its tensor.
        replica_diff: the same between replicas of a weight; must be 0.
        dropped: mean fraction of dropped slots over steps and layers.
        ok: whether all differences are within the limits. None: the case has no parity.
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

    def exceeded(self) -> list[str]:
        """Return the names of the differences that are above their limits or NaN."""
        limits = LIMITS[self.optimizer]
        within = {
            "loss": self.loss_rel_diff <= limits.loss,
            "grad norm": self.grad_norm_rel_diff <= limits.grad_norm,
            "weights": self.param_rel_diff <= limits.params,
            "copies": self.replica_diff == 0,
        }
        return [name for name, is_within in within.items() if not is_within]


def main(
    json_out: str | None = None,
    *,
    steps: int = 20,
    names: Sequence[str] = (),
    optimizers: Sequence[str] = OPTIMIZERS,
    settings: Sequence[str] = (),
) -> bool:
    """Run ``moe-comm parity``: compare all mappings, print the table row by row, write JSON.

    Args:
        names: names of the mappings; empty: all.
        optimizers: optimizers, from ``SETTINGS``.
        settings: overrides of all runs.

    Returns:
        Whether every mapping with parity is within its limits.
    """
    console = Console(file=sys.stderr if json_out == "-" else None, highlight=False, soft_wrap=True)
    rows = []
    console.print(_line(("mapping", "mode", "optimizer", "loss", "grad norm", "weights", "copies", "")))
    cases = chosen(names)
    reason = unavailable_reason() if any(case.hosts > 1 for case in cases) else ""
    skipped = {case.name: reason for case in cases if reason and case.hosts > 1}
    for row in compare([case for case in cases if case.name not in skipped], optimizers, steps, settings):
        rows.append(row)
        verdict = {True: "ok", None: "no parity"}.get(row.ok) or f"DIFFERS: {', '.join(row.exceeded())}"
        differences = (row.loss_rel_diff, row.grad_norm_rel_diff, row.param_rel_diff, row.replica_diff)
        console.print(_line((row.mapping, row.mode, row.optimizer, *(f"{d:.1e}" for d in differences), verdict)))
    for name in skipped:
        console.print(f"{name}: skipped, {reason}")
    ok = all(row.ok is not False for row in rows)
    with_parity = [row for row in rows if row.ok is not None]
    if with_parity:
        worst = max(row.loss_rel_diff for row in with_parity)
        console.print(
            f"largest loss difference {worst:.1e} (target {TARGET:.0e}) over {len(with_parity)} runs, {steps} steps"
        )
    limits = {optimizer: asdict(LIMITS[optimizer]) for optimizer in optimizers}
    result: dict[str, Any] = {"target": TARGET, "limits": limits, "steps": steps, "ok": ok}
    report.write_json(result | {"mappings": [asdict(row) for row in rows], "skipped": skipped}, json_out)
    return ok


def chosen(names: Sequence[str]) -> list[ParityCase]:
    """Return the cases with these names, or all cases if ``names`` is empty. Raises ``ConfigError`` if unknown."""
    by_name = {case.name: case for case in CASES}
    for name in names:
        if name not in by_name:
            raise ConfigError(f"unknown mapping {name!r}; known: {'; '.join(by_name)}")
    return [by_name[name] for name in names] if names else list(CASES)


def compare(
    cases: Sequence[ParityCase], optimizers: Sequence[str] = OPTIMIZERS, steps: int = 20, settings: Sequence[str] = ()
) -> Iterable[ParityRow]:
    """Train all cases with all optimizers and compare each with one process. ``settings`` are overrides of all runs."""
    for case in cases:
        if case.hosts == 1:
            ranks_to_use(case.ranks)  # raises before the first training run
    with tempfile.TemporaryDirectory(prefix="moe_comm-parity-") as folder:
        common = [*COMMON, f"run.steps={steps}", f"data.cache={folder}"]
        references: dict[tuple[str, tuple[str, ...], str], TrainingResult] = {}
        keys = dict.fromkeys((case.mode, case.common) for case in cases)
        one_process = [ParityCase("one process", 1, ("parallel.ep=1",), *key) for key in keys]
        for case, optimizer, results in _train(one_process, optimizers, common, settings, 1):
            references[case.mode, case.common, optimizer] = results[0]
        for ranks, hosts in sorted({(case.ranks, case.hosts) for case in cases}):
            same = [case for case in cases if (case.ranks, case.hosts) == (ranks, hosts)]
            for case, optimizer, results in _train(same, optimizers, common, settings, ranks, hosts):
                yield _row(case, optimizer, results, references[case.mode, case.common, optimizer])


def _train(
    cases: Sequence[ParityCase],
    optimizers: Sequence[str],
    common: Sequence[str],
    settings: Sequence[str],
    ranks: int,
    hosts: int = 1,
) -> Iterator[tuple[ParityCase, str, list[TrainingResult]]]:
    """Train each case with each optimizer, ``JOBS_PER_PROCESS`` runs in the same processes. Yield results by rank."""
    jobs = [(case, optimizer) for case in cases for optimizer in optimizers]
    for first in range(0, len(jobs), JOBS_PER_PROCESS):
        batch = jobs[first : first + JOBS_PER_PROCESS]
        arguments = (batch, list(common), list(settings))
        by_rank = launch_ranks(_rank, arguments, ranks, hosts, LINK_GBIT, TIMEOUT_S, PRELOAD)
        for (case, optimizer), *results in zip(batch, *by_rank, strict=True):
            yield case, optimizer, results


def _rank(jobs: list[tuple[ParityCase, str]], common: list[str], settings: list[str]) -> list[TrainingResult]:
    with init_ranks("cpu"):
        results = []
        for case, optimizer in jobs:
            defaults = [*common, f"optimizer.kind={optimizer}", *SETTINGS[optimizer]]
            results.append(train(configuration.load(None, [*defaults, *settings, *case.overrides])))
        return results


def _row(case: ParityCase, optimizer: str, results: list[TrainingResult], reference: TrainingResult) -> ParityRow:
    weights, weight_differences = assemble([rank.parts for rank in results])
    _, copy_differences = assemble([rank.copies for rank in results])
    expected, _ = assemble([reference.parts])
    missing = [name for name, tensor in weights.items() if tensor.isnan().any()]
    if missing:
        raise ConfigError(f"{case.name}: {', '.join(missing[:3])} contain NaN or elements that no rank owns")
    if weights.keys() != expected.keys():
        raise ConfigError(
            f"{case.name}: weights {sorted(weights.keys() ^ expected.keys())} are in the mapping or in one process only"
        )
    row = ParityRow(
        mapping=case.name,
        ranks=case.ranks,
        mode=case.mode,
        optimizer=optimizer,
        loss_rel_diff=_relative(results[0].losses, reference.losses),
        grad_norm_rel_diff=_relative(results[0].grad_norms, reference.grad_norms),
        param_rel_diff=_largest(_distance(weights[name], tensor) for name, tensor in expected.items()),
        replica_diff=_largest([*weight_differences.values(), *copy_differences.values()]),
        dropped=results[0].dropped,
        ok=None,
    )
    return replace(row, ok=not row.exceeded()) if case.has_parity else row


def _distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def _relative(actual: Sequence[float], expected: Sequence[float]) -> float:
    return _largest(abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True))


def _largest(values: Iterable[float]) -> float:
    """Return the maximum, or NaN if any value is NaN, which Python's ``max`` ignores."""
    numbers = list(values)
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def _line(cells: Sequence[Any]) -> str:
    widths = (38, 17, 10, 9, 10, 9, 9)
    *padded, last = cells
    return " ".join([*(str(cell).ljust(width) for cell, width in zip(padded, widths, strict=True)), str(last)])
