"""``moe-comm bench train``: whole training steps against other loops that train the same model on the same ranks.

All contestants start from the same weights and take the same batches. They are built side by side in the same
processes, and in every round each takes one step, so that what else the machine does hits all alike. The losses are
compared at every step: a contestant that trains something else would be no competitor.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.bench.common import machine, report
from moe_comm.bench.common.case import WrongAnswer
from moe_comm.bench.common.clock import Clock, summarise, sync_alone, sync_group
from moe_comm.bench.common.ranks import all_cores, cores_of_group, on_ranks
from moe_comm.bench.train.contestant import AloneMesh, Setting, TrainContestant
from moe_comm.bench.train.ours import OneProcess, Ours
from moe_comm.bench.train.peers import PEERS
from moe_comm.bench.train.settings import LR, RIVALS, TrainBench
from moe_comm.integrations.hugging_face.architecture import to_hugging_face
from moe_comm.integrations.hugging_face.weights import write_folder
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.plan.model.shape import ModelShape
from moe_comm.runtime.gemm import gemm_flops
from moe_comm.train import config as configuration
from moe_comm.train.loop.build import architecture_of, build_stages
from moe_comm.train.loop.job import open_corpus
from moe_comm.train.metrics import StepTimes
from moe_comm.train.ranks import Ranks

KINDS: dict[str, type[TrainContestant]] = {Ours.name: Ours, OneProcess.name: OneProcess} | PEERS
FIRST_STEP, LATER_STEPS = 1e-3, 1e-2
"""Relative differences allowed between the losses of ours and of another contestant: before any update, and after."""
PARTS = ("compute", "communication", "data", "checkpoint", "loop")


def wanted(bench: TrainBench) -> tuple[list[str], dict[str, str]]:
    """Names of the contestants that can run, ours first, and why the others cannot."""
    reasons = {name: KINDS[name].why_not(bench) for name in (Ours.name, *bench.peers)}
    return (
        [name for name, reason in reasons.items() if reason is None],
        {name: reason for name, reason in reasons.items() if reason is not None},
    )


class _Turn:
    """One contestant, where it is to run."""

    def __init__(self, kind: type[TrainContestant], setting: Setting, cores: set[int]) -> None:
        self.kind, self.setting, self.cores = kind, setting, cores
        self.losses: list[float] = []
        self._made: TrainContestant | None = None
        with self.place():
            if self.here:
                self._made = kind(setting)

    @property
    def here(self) -> bool:
        """Whether this rank takes part."""
        return self.setting.ranks.is_first or not self.kind.alone

    @property
    def contestant(self) -> TrainContestant:
        assert self._made is not None
        return self._made

    def place(self) -> contextlib.AbstractContextManager[None]:
        """Alone: all cores for the rank that runs it."""
        return all_cores(self.cores) if self.kind.alone and self.here else contextlib.nullcontext()

    def take(self, clock: Clock, step: int) -> None:
        """One step, measured, and its loss. Collective."""
        with self.place():
            if self.here:
                self.contestant.prepare(step)
            clock.measure(self.kind.name, ("step", (lambda: self.contestant.step(step)) if self.here else _nothing))
        share = torch.tensor(self.contestant.loss() if self.here else 0.0, dtype=torch.float64)
        self.losses.append(float(self.setting.ranks.sum(share.view(1))))

    def close(self) -> None:
        if self.here:
            self.contestant.close()


def _nothing() -> None:
    return None


def run(bench: TrainBench, threads: int = 1) -> dict[str, Any]:
    """One rank's part; collective over the default process group. Returns the same result on every rank.

    Raises:
        WrongAnswer: contestants disagree about the loss.
    """
    names, skipped = wanted(bench)
    ranks = Ranks.make()
    with contextlib.ExitStack() as stack:
        setting = _setting(bench, ranks, stack)
        cores = cores_of_group()
        turns = []
        for name in names:
            turns.append(_Turn(KINDS[name], setting, cores))
            stack.callback(turns[-1].close)
            ranks.barrier()
        clock = Clock(sync_group if bench.ranks > 1 else sync_alone)
        # Small shapes are for tests of this code; there a large product would only cost time.
        flops = ModelShape.of(setting.architecture).model_flops(bench.seq_len)
        size = None if flops * bench.tokens > 1e9 else 64
        rates: list[float] = []
        gc.collect()
        gc.disable()
        stack.callback(gc.enable)
        for step in range(bench.warmup + bench.steps):
            if step == bench.warmup:
                clock.clear()
                rates.clear()
            shift = step % len(turns)
            for turn in turns[shift:] + turns[:shift]:
                gc.collect()
                turn.take(clock, step)
            ranks.barrier()
            rates.append(gemm_flops(size=size))
            _check(turns)
        ours = turns[0].contestant
        assert isinstance(ours, Ours)
        split = _split([found.times for found in ours.reports[bench.warmup :]])
        everyone: list[Any] = [None] * bench.ranks
        dist.all_gather_object(everyone, (dict(clock.times), median(rates), split))
    stats = summarise([times for times, _, _ in everyone])
    peak = sum(rate for _, rate, _ in everyone)
    rows = {name: _row(bench, stats[name, "step"], flops, peak) for name in names}
    for turn in turns[1:]:
        row = rows[turn.kind.name]
        row["speedup"] = row["step_ms"] / rows[Ours.name]["step_ms"]
        row["loss_rel_diff"] = _difference(turn, turns[0])
        if turn.kind.note:
            row["note"] = turn.kind.note
    mine = rows.pop(Ours.name)
    speedups = {name: row["speedup"] for name, row in rows.items()}
    best = min((name for name in rows if name in RIVALS), key=speedups.__getitem__, default=None)
    return {
        "benchmark": "train",
        **mine,
        "speedup": None if best is None else speedups[best],
        "best_peer": best,
        "speedup_over_all": min(speedups.values(), default=None),
        "peers": rows,
        "step": _mean([split for _, _, split in everyone]),
        "losses": turns[0].losses,
        "flops_per_token": flops,
        "gemm_gflops": peak * 1e-9,
        "skipped": skipped,
        "settings": bench.to_dict() | {"lr": LR},
        "threads_per_rank": threads,
    }


def _setting(bench: TrainBench, ranks: Ranks, stack: contextlib.ExitStack) -> Setting:
    """The text, and a folder with the first weights, made by the first rank."""
    own = stack.enter_context(tempfile.TemporaryDirectory(prefix="moe_comm-bench-")) if ranks.is_first else ""
    folder = Path(ranks.text_from_first(own))
    config = configuration.load(None, [*bench.overrides, f"data.cache={folder}"])
    corpus = open_corpus(config, ranks)
    architecture = architecture_of(config, corpus.vocab_size)
    setting = Setting(bench, config, architecture, corpus, ranks, folder / "weights")
    if ranks.is_first:
        (model,) = build_stages(config, architecture, AloneMesh())
        initialize(model, bench.seed)
        hf_config = to_hugging_face(architecture, "qwen3_moe")
        hf_config.dtype = "float32"
        write_folder(setting.weights, architecture, "qwen3_moe", hf_config, model.state_dict().items())
        model.close()
    ranks.barrier()
    return setting


def _check(turns: list[_Turn]) -> None:
    """The last step's losses against ours; the same on every rank."""
    first = len(turns[0].losses) == 1
    allowed = FIRST_STEP if first else LATER_STEPS
    for turn in turns[1:]:
        loss, mine = turn.losses[-1], turns[0].losses[-1]
        if not abs(loss - mine) <= allowed * abs(mine):
            raise WrongAnswer(
                f"{turn.kind.name}: the loss of step {len(turn.losses)} is {loss:.6g} but ours is {mine:.6g} (allowed "
                f"{allowed:g} of it), so it trains something else. Please report this with the settings."
            )


def _difference(turn: _Turn, ours: _Turn) -> float:
    """Largest relative difference of a step's loss."""
    return max(abs(a - b) / abs(b) for a, b in zip(turn.losses, ours.losses, strict=True))


def _row(bench: TrainBench, stats: dict[str, float], flops: float, peak: float) -> dict[str, Any]:
    tokens_per_s = bench.tokens / stats["median_ms"] * 1e3
    return {
        "tokens_per_s": tokens_per_s,
        "mfu": tokens_per_s * flops / peak,
        "step_ms": stats["median_ms"],
        "step_min_ms": stats["min_ms"],
        "step_p90_ms": stats["p90_ms"],
    }


def _split(times: list[StepTimes]) -> dict[str, Any]:
    """Medians over the steps, seconds, and fractions of a step."""
    seconds: dict[str, float] = {part: median(getattr(t, part) for t in times) for part in PARTS}
    fractions: dict[str, Any] = {part: median(getattr(t, part) / t.total for t in times) for part in PARTS}
    return fractions | {"seconds": seconds | {"total": median(t.total for t in times)}}


def _mean(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Over the ranks."""
    found: dict[str, Any] = {part: fmean(one[part] for one in ranks) for part in PARTS}
    found["seconds"] = {part: fmean(one["seconds"][part] for one in ranks) for part in (*PARTS, "total")}
    return found


def main(bench: TrainBench, json_out: str | None = None) -> dict[str, Any]:
    """Measure, print a table, write JSON; the body of ``moe-comm bench train``.

    Starts the ranks, or takes part in those that torchrun started; then only rank 0 prints.

    Args:
        json_out: file for the JSON object; ``-`` is standard output.
    """
    report.check_writable(json_out)
    facts = machine.facts("cpu")
    found = on_ranks(run, bench, bench.ranks, "cpu")
    if found is None:
        return {}
    found["machine"] = facts
    report.write_json(found, json_out)
    report.show(report.train_tables(found), json_out)
    return found
