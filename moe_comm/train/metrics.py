"""What a step measured, and where it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moe_comm.layers.moe.load import LayerLoad, spread
from moe_comm.observe.expert_health import across_layers, kept_layers
from moe_comm.observe.records import LineWriter, LoadLine, cut_after

SERIES = 200
LAYER_METRICS = ("imbalance", "least", "mean", "dead", "dead_share", "diversity", "dropped", "balance")


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

    imbalance: load of the busiest expert over the mean load. least: the same of the one with the fewest slots.
    mean: slots of an average expert. dead: experts without any token. dead_share: of all experts.
    diversity: exp(entropy)/experts of how slots are spread, 1 where routers are perfectly even.
    dropped: fraction of the slots that the capacity dropped. balance: the load-balancing loss, top-k where routers are
    perfectly even (and where it is not computed, 0).
    names: of the layers. slots_LE: [L, E] of each layer, for each expert; left out of what is kept of a step.
    """

    imbalance: tuple[float, ...]
    dead: tuple[int, ...]
    dropped: tuple[float, ...]
    balance: tuple[float, ...]
    least: tuple[float, ...] = ()
    mean: tuple[float, ...] = ()
    dead_share: tuple[float, ...] = ()
    diversity: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    slots_LE: Tensor | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, loads: Mapping[str, LayerLoad], balance: Sequence[float]) -> Load:
        """From what the routers counted, by layer; all have as many experts."""
        if not loads:
            return NO_LOAD
        slots_LE = torch.stack([layer.load_E for layer in loads.values()])
        found = spread(slots_LE, torch.stack([layer.dropped for layer in loads.values()]))
        experts = slots_LE.shape[1]
        return cls(
            imbalance=tuple(found.imbalance),
            dead=tuple(found.dead),
            dropped=tuple(found.drop_rate),
            balance=tuple(balance),
            least=tuple(found.least),
            mean=tuple(found.mean),
            dead_share=tuple(dead / experts for dead in found.dead),
            diversity=tuple(found.diversity),
            names=tuple(loads),
            slots_LE=slots_LE,
        )

    @property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """As numbers; () where they were left out. A large model has 15,000: only what writes them asks for them."""
        return () if self.slots_LE is None else tuple(map(tuple, self.slots_LE.tolist()))

    @property
    def worst_imbalance(self) -> float:
        return max(self.imbalance, default=1.0)

    def metrics(self) -> dict[str, tuple[float, ...]]:
        """Numbers of single layers, by name; those that are known."""
        return {name: values for name in LAYER_METRICS if len(values := getattr(self, name)) == len(self.imbalance)}


@dataclass(frozen=True)
class StepReport:
    """One training step, the same on every rank but for ``times`` and ``memory_bytes``.

    step: from 1. loss: mean over the global batch, nats per token, before the update.
    lr, grad_norm: as used; the norm before clipping. tokens: targets in the global batch.
    mfu: model FLOP/s over the rate of a matrix product measured on these ranks at the start; None if not measured.
    memory_bytes: most that this process held so far: resident on the CPU, allocated on a GPU.
    skipped: why the weights were left as they were, "" if they were updated.
    reruns: times that the step was run again in place, as ``moe_comm.train.resilience.guard`` says.
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
    reruns: int = 0

    @property
    def seconds(self) -> float:
        return self.times.total

    def without_slots(self) -> StepReport:
        """The same but for the loads of single experts, of which a large model has megabytes in a few steps."""
        return replace(self, load=replace(self.load, slots_LE=None))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


NO_LOAD = Load((), (), (), ())


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
        series: most numbers of single layers in a line; where there are more, the worst layers' are kept.
    """

    def __init__(self, path: Path, done: int = 0, series: int = SERIES) -> None:
        cut_after(path, done)
        self._lines = LineWriter(path)
        self._series = series

    def write(self, report: StepReport) -> None:
        values = asdict(replace(report, load=NO_LOAD)) | {"loop_s": report.times.loop}
        metrics = report.load.metrics()
        layers = kept_layers(report.load.imbalance, len(metrics), self._series)
        values["load"] = {"layers": layers} | {name: [one[i] for i in layers] for name, one in metrics.items()}
        values["load_across"] = across_layers(metrics)
        values["tokens_per_s"] = report.tokens_per_s
        self._lines.write(values)

    def summary(self, step: int, values: dict[str, float]) -> None:
        self._lines.write({"step": step, **values})

    def close(self) -> None:
        self._lines.close()


class LoadsSink:
    """The loads of single experts, every few steps: ``moe_comm.observe.records.LoadLine``.

    Args:
        every: steps between those that are written; the first is one of them. done: as for ``JsonlSink``.
    """

    def __init__(self, path: Path, every: int, done: int = 0) -> None:
        cut_after(path, done)
        self._lines = LineWriter(path)
        self._every = every

    def write(self, report: StepReport) -> None:
        if report.step == 1 or report.step % self._every == 0:
            for name, slots in zip(report.load.names, report.load.slots, strict=False):
                self._lines.write(LoadLine(report.step, name, list(slots)))

    def summary(self, step: int, values: dict[str, float]) -> None:
        """Nothing of it belongs here."""

    def close(self) -> None:
        self._lines.close()


class TensorBoardSink:
    """Event files for TensorBoard, in ``folder``. done: as for ``JsonlSink``; what was written later is not shown.
    series: as there; the worst layers may be others in another step."""

    def __init__(self, folder: Path, done: int = 0, series: int = SERIES) -> None:
        # tensorboard takes a second to load, and only rank 0 writes event files.
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=10, purge_step=done + 1 if done else None)
        self._series = series

    def write(self, report: StepReport) -> None:
        times, load = report.times, report.load
        values = {
            "train/loss": report.loss,
            "train/grad_norm": report.grad_norm,
            "train/lr": report.lr,
            "train/tokens_per_s": report.tokens_per_s,
            "train/skipped": float(bool(report.skipped)),
            "train/reruns": float(report.reruns),
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
        metrics = load.metrics()
        for name, (median, worst) in across_layers(metrics).items():
            values |= {f"router/{name}_p50": median, f"router/{name}_p95": worst}
        for i in kept_layers(load.imbalance, len(metrics), self._series):
            values |= {f"router/{name}_layer_{i}": per_layer[i] for name, per_layer in metrics.items()}
        self.summary(report.step, values)

    def summary(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
