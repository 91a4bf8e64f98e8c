"""What a step measured, and where it is written."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Protocol


@dataclass(frozen=True)
class StepTimes:
    """Where a step's seconds went on this rank. They add up to ``total``.

    compute: forward, backward and optimizer, without ``communication`` in them: dispatch, combine and collectives, all
    of it exposed (what overlaps with compute is not in it). data: waiting for the batch. checkpoint: waiting for the
    copy of the state, and the save after the step before. loop: all the rest, this library's own overhead.
    """

    total: float
    compute: float
    communication: float
    data: float
    checkpoint: float

    @property
    def loop(self) -> float:
        return self.total - self.compute - self.communication - self.data - self.checkpoint


@dataclass(frozen=True)
class Load:
    """How the tokens of a step were spread over the experts, for each MoE layer in order.

    imbalance: load of the busiest expert over the mean load. dead: experts without any token. dropped: fraction of the
    slots that the capacity dropped. balance: the load-balancing loss, top-k where routers are perfectly even (and where
    it is not computed, 0).
    """

    imbalance: tuple[float, ...]
    dead: tuple[int, ...]
    dropped: tuple[float, ...]
    balance: tuple[float, ...]

    @property
    def worst_imbalance(self) -> float:
        return max(self.imbalance, default=1.0)


@dataclass(frozen=True)
class StepReport:
    """One training step, the same on every rank but for ``times`` and ``memory_bytes``.

    step: from 1. loss: mean over the global batch, nats per token, before the update.
    lr, grad_norm: as used; the norm before clipping. tokens: targets in the global batch.
    mfu: model FLOP/s over the rate of a matrix product measured on these ranks at the start; None if not measured.
    memory_bytes: most that this process held so far: resident on the CPU, allocated on a GPU.
    skipped: why the weights were left as they were, "" if they were updated.
    stop: why training ends after this step, "" if it goes on.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    times: StepTimes
    load: Load
    memory_bytes: int
    mfu: float | None = None
    skipped: str = ""
    stop: str = ""

    @property
    def seconds(self) -> float:
        return self.times.total

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class MetricsSink(Protocol):
    """Where reports go. Sinks hold no more than one step back, so that a run that is killed leaves its metrics."""

    def write(self, report: StepReport) -> None: ...

    def summary(self, step: int, values: dict[str, float]) -> None:
        """Numbers of the whole run, such as the validation loss."""

    def close(self) -> None: ...


class JsonlSink:
    """One JSON object a line; what is no number (the norm of a skipped step) is null.

    Args:
        done: steps after which the run goes on. Lines of later steps, from before it was killed, are taken out, so
            that the file has every step once.
    """

    def __init__(self, path: Path, done: int = 0) -> None:
        if path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= done]
            fresh = path.with_suffix(".partial")
            fresh.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            os.replace(fresh, path)
        self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)

    def write(self, report: StepReport) -> None:
        values = asdict(report) | {"tokens_per_s": report.tokens_per_s, "loop_s": report.times.loop}
        self._line(values | {key: None for key in ("loss", "grad_norm") if not math.isfinite(values[key])})

    def summary(self, step: int, values: dict[str, float]) -> None:
        self._line({"step": step, **values})

    def close(self) -> None:
        self._file.close()

    def _line(self, values: dict[str, object]) -> None:
        self._file.write(json.dumps(values) + "\n")


def _step_of(line: str) -> float:
    """The step of a line; infinite for one that was cut off when its process was killed."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


class TensorBoardSink:
    """Event files for TensorBoard, in ``folder``. done: as for ``JsonlSink``; what was written later is not shown."""

    def __init__(self, folder: Path, done: int = 0) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=10, purge_step=done + 1 if done else None)

    def write(self, report: StepReport) -> None:
        times, load = report.times, report.load
        values = {
            "train/loss": report.loss,
            "train/grad_norm": report.grad_norm,
            "train/lr": report.lr,
            "train/tokens_per_s": report.tokens_per_s,
            "train/skipped": float(bool(report.skipped)),
            "time/step_s": times.total,
            "time/compute": times.compute / times.total,
            "time/communication": times.communication / times.total,
            "time/data": times.data / times.total,
            "time/checkpoint": times.checkpoint / times.total,
            "time/loop": times.loop / times.total,
            "memory/gib": report.memory_bytes / 2**30,
            "router/imbalance_max": load.worst_imbalance,
            "router/dead_experts": float(sum(load.dead)),
        }
        if report.mfu is not None:
            values["train/mfu"] = report.mfu
        for name, per_layer in (("imbalance", load.imbalance), ("dropped", load.dropped), ("balance", load.balance)):
            values |= {f"router/{name}_layer_{i}": value for i, value in enumerate(per_layer)}
        self.summary(report.step, values)

    def summary(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
