"""``moe-comm parity``: the same training on one process and on every mapping, step by step.

One small MoE, fp32, same seed, same text, the same micro-batches: losses, gradient norms and final weights must be
those of one process. With SGD as well as AdamW, because Adam divides a wrong gradient scale away.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_comm.bench.parity_cases import CASES, Case
from moe_comm.errors import ConfigError
from moe_comm.runtime.launch import init_ranks, launch
from moe_comm.topology import Box, FoldedMesh
from moe_comm.train import config as configuration
from moe_comm.train.build import architecture_of, build
from moe_comm.train.config import TrainConfig
from moe_comm.train.feed import CorpusFeed
from moe_comm.train.job import open_corpus
from moe_comm.train.ranks import Ranks
from moe_comm.train.trainer import Trainer

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
LR = {"sgd": 0.3, "adamw": 3e-3, "lamb": 1e-2, "muon": 1e-2}
Parts = dict[str, tuple[tuple[int, ...], list[tuple[Box, Tensor]]]]


@dataclass(frozen=True)
class ParityRow:
    """One mapping against one process; differences are the largest of all steps, relative to one process's value.

    param_rel_diff: largest difference of an element over the largest element of its tensor, the worst tensor's.
    """

    mapping: str
    ranks: int
    mode: str
    optimizer: str
    loss_rel_diff: float
    grad_norm_rel_diff: float
    param_rel_diff: float
    dropped: float
    ok: bool | None


@dataclass(frozen=True)
class _Trained:
    """What one rank knows after training: the same numbers everywhere, and its own parts of the weights."""

    losses: list[float]
    grad_norms: list[float]
    dropped: float
    parts: Parts


def main(
    json_out: str | None = None,
    *,
    steps: int = 20,
    names: Sequence[str] = (),
    optimizers: Sequence[str] = OPTIMIZERS,
    settings: Sequence[str] = (),
) -> bool:
    """Run, print the table as it grows, write JSON; returns whether every mapping that promises parity has it."""
    from rich.console import Console

    console = Console(file=sys.stderr if json_out == "-" else None, highlight=False, soft_wrap=True)
    rows = []
    console.print(_line(("mapping", "mode", "optimizer", "loss", "grad norm", "weights", "")))
    for row in compare(chosen(names), optimizers, steps, settings):
        rows.append(row)
        verdict = {True: "ok", False: "DIFFERS", None: "no parity promised"}[row.ok]
        differences = (row.loss_rel_diff, row.grad_norm_rel_diff, row.param_rel_diff)
        console.print(_line((row.mapping, row.mode, row.optimizer, *(f"{d:.1e}" for d in differences), verdict)))
    ok = all(row.ok is not False for row in rows)
    promised = [row for row in rows if row.ok is not None]
    if promised:
        worst = max(row.loss_rel_diff for row in promised)
        console.print(
            f"largest loss difference {worst:.1e} (target {TARGET:.0e}) over {len(promised)} runs, {steps} steps"
        )
    if json_out is not None:
        found = {"target": TARGET, "steps": steps, "ok": ok, "mappings": [asdict(row) for row in rows]}
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
    """Train every case with every optimizer, and one process for each mode; one row a case and optimizer.

    Args:
        settings: dotted keys for all runs alike, after the common ones.
    """
    with tempfile.TemporaryDirectory(prefix="moe_comm-parity-") as folder:
        common = [*COMMON, f"run.steps={steps}", f"data.cache={folder}", *settings]
        references: dict[tuple[str, str], tuple[_Trained, dict[str, Tensor]]] = {}
        for optimizer in optimizers:
            for mode in dict.fromkeys(case.mode for case in cases):
                alone = Case("one process", 1, ("parallel.ep=1",), mode)
                trained = _launch([(alone, optimizer)], common, 1)[0]
                references[mode, optimizer] = trained[0], _assemble(trained)
        for ranks in sorted({case.ranks for case in cases}):
            jobs = [(case, optimizer) for case in cases if case.ranks == ranks for optimizer in optimizers]
            for (case, optimizer), trained in zip(jobs, _launch(jobs, common, ranks), strict=True):
                yield _row(case, optimizer, trained, *references[case.mode, optimizer])


def _launch(jobs: Sequence[tuple[Case, str]], common: Sequence[str], ranks: int) -> list[list[_Trained]]:
    """For each job what each rank came to."""
    by_rank = launch(_rank, (list(jobs), list(common)), ranks)
    return [[trained[job] for trained in by_rank] for job in range(len(jobs))]


def _rank(jobs: list[tuple[Case, str]], common: list[str]) -> list[_Trained]:
    with init_ranks("cpu"):
        found = []
        for case, optimizer in jobs:
            overrides = [*common, *case.overrides, f"optimizer.kind={optimizer}", f"optimizer.lr={LR[optimizer]}"]
            found.append(train(configuration.load(None, overrides)))
        return found


def train(config: TrainConfig) -> _Trained:
    """Train without a run folder; what this rank ends up with. Collective."""
    ranks = Ranks.make()
    mesh = FoldedMesh(config.parallel.mapping(ranks.world))
    corpus = open_corpus(config, ranks)
    machinery = build(config, architecture_of(config, corpus.vocab_size), mesh)
    feed = CorpusFeed(corpus, mesh, config.parallel.context, config.data.micro_batches, config.run.steps)
    with contextlib.ExitStack() as stack:
        stack.enter_context(feed)
        for stage in machinery.stages:
            stack.callback(stage.close)  # type: ignore[arg-type]
        stack.callback(machinery.runner.close)
        trainer = Trainer(config, machinery, feed, ranks)
        trainer.fit()
        parts: Parts = {}
        for owned in machinery.data_parallel.owned():
            value = owned.value.detach()
            pieces = [(replace(box), value[box.local].clone()) for box in owned.boxes(mesh)]
            parts[owned.name] = owned.sharding.shape, pieces
    dropped = [rate for report in trainer.reports for rate in report.load.dropped]
    return _Trained(
        [report.loss for report in trainer.reports],
        [report.grad_norm for report in trainer.reports],
        sum(dropped) / max(len(dropped), 1),
        parts,
    )


def _assemble(ranks: Sequence[_Trained]) -> dict[str, Tensor]:
    """The whole weights, from every rank's parts; what no rank has stays NaN."""
    whole: dict[str, Tensor] = {}
    for trained in ranks:
        for name, (shape, pieces) in trained.parts.items():
            tensor = whole.setdefault(name, torch.full(shape, torch.nan))
            for box, piece in pieces:
                tensor[box.whole] = piece
    return whole


def _row(
    case: Case, optimizer: str, trained: list[_Trained], alone: _Trained, expected: dict[str, Tensor]
) -> ParityRow:
    weights = _assemble(trained)
    missing = [name for name, tensor in weights.items() if tensor.isnan().any()]
    if missing:
        raise ConfigError(f"{case.name}: no rank owns all of {', '.join(missing[:3])}, or it is NaN")
    if weights.keys() != expected.keys():
        raise ConfigError(f"{case.name}: weights {sorted(weights.keys() ^ expected.keys())} are on one side only")
    loss = _largest(trained[0].losses, alone.losses)
    return ParityRow(
        mapping=case.name,
        ranks=case.ranks,
        mode=case.mode,
        optimizer=optimizer,
        loss_rel_diff=loss,
        grad_norm_rel_diff=_largest(trained[0].grad_norms, alone.grad_norms),
        param_rel_diff=max(
            float((weights[name] - tensor).abs().max() / tensor.abs().max()) for name, tensor in expected.items()
        ),
        dropped=trained[0].dropped,
        ok=loss <= TARGET if case.has_parity else None,
    )


def _largest(found: Sequence[float], expected: Sequence[float]) -> float:
    """NaN if any of them is: Python's ``max`` would pass over it."""
    differences = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def _line(cells: Sequence[Any]) -> str:
    widths = (38, 17, 10, 9, 10, 9)
    *padded, last = cells
    return " ".join([*(str(cell).ljust(width) for cell, width in zip(padded, widths, strict=True)), str(last)])
