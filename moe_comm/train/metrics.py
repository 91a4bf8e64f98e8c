"""Metrics of a training step, and the sinks that write them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_comm.layers.moe.expert_parallel import LENT_COUNTS
from moe_comm.layers.moe.load import LayerLoad, load_statistics
from moe_comm.observe.records import LineWriter, LoadLine, PlacementLine, cut_after
from moe_comm.runtime.safe_files import make_folders
from moe_comm.train.feed import LengthLoads
from moe_comm.train.offload.resident import OffloadReport
from moe_comm.train.parallel.parameters import WeightsReport

SERIES = 200
"""Default maximum number of per-layer values that a sink writes for a step: a dashboard cannot show 61 layers with 256
experts each, so metrics are written for the worst layers only, and their quantiles over all layers always."""
LENT_METRICS = ("rows_fixed", "rows_lent", "lent_experts", "resident_share", "copied_bytes")
LAYER_METRICS = ("imbalance", "least", "mean", "dead", "dead_share", "diversity", "dropped", "balance", *LENT_METRICS)
LOW_IS_BAD = frozenset({"least", "diversity"})
"""Metrics for which low values are bad."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step on this rank by activity; they add up to ``total``.

    Attributes:
        compute: forward, backward and optimizer, excluding ``communication``.
        communication: exposed time of dispatch, combine and collectives. Overlapped communication is not included.
        data: waiting for the batch.
        checkpoint: waiting for the copy of the state, and the save after the previous step.
        loop: everything else, the overhead of the training loop.
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
class ExpertLoad:
    """Expert load of a step, one value for each MoE layer in order. A slot is one of a token's top-k assignments.

    Attributes:
        imbalance: maximum load over mean load.
        dead: number of experts without tokens.
        dropped: fraction of slots that the capacity dropped.
        balance: load-balancing loss; top-k for a perfectly even router, 0 if it is not computed.
        least: minimum load over mean load.
        mean: mean slots per expert.
        dead_share: fraction of experts without tokens.
        diversity: exp(entropy) of the load distribution over the number of experts; 1 for a perfectly even router.
        rows_fixed: rows of the busiest rank over the mean, if each expert had been computed at its home. This and the
            next two are () unless experts are lent to other ranks.
        rows_lent: the same as computed.
        lent_experts: experts that were lent, mean over the calls of the layer.
        resident_share: share of them whose weights were on the rank before the call, sent while other modules computed.
            () if there were none.
        copied_bytes: bytes that all ranks sent: weights and gradients of lent experts. ()
            if none can.
        names: names of the layers.
        slots_LE: [L, E] slots of each expert. Not part of stored reports.
    """

    imbalance: tuple[float, ...]
    dead: tuple[int, ...]
    dropped: tuple[float, ...]
    balance: tuple[float, ...]
    least: tuple[float, ...] = ()
    mean: tuple[float, ...] = ()
    dead_share: tuple[float, ...] = ()
    diversity: tuple[float, ...] = ()
    rows_fixed: tuple[float, ...] = ()
    rows_lent: tuple[float, ...] = ()
    lent_experts: tuple[float, ...] = ()
    resident_share: tuple[float, ...] = ()
    copied_bytes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    slots_LE: Tensor | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, loads: Mapping[str, LayerLoad], balance: Sequence[float]) -> ExpertLoad:
        """Return the metrics of the routers' ``loads`` by layer name. All layers have the same number of experts."""
        if not loads:
            return NO_LOAD
        slots_LE = torch.stack([layer.load_E for layer in loads.values()])
        stats = load_statistics(slots_LE, torch.stack([layer.dropped for layer in loads.values()]))
        experts = slots_LE.shape[1]
        return cls(
            imbalance=tuple(stats.imbalance),
            dead=tuple(stats.dead),
            dropped=tuple(stats.drop_rate),
            balance=tuple(balance),
            least=tuple(stats.least),
            mean=tuple(stats.mean),
            dead_share=tuple(dead / experts for dead in stats.dead),
            diversity=tuple(stats.diversity),
            **_lent_metrics([dict(zip(LENT_COUNTS, one.lent.tolist(), strict=True)) for one in loads.values()]),
            names=tuple(loads),
            slots_LE=slots_LE,
        )

    @property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """``slots_LE`` as tuples; () if it was removed. A large model has 15,000 values."""
        return () if self.slots_LE is None else tuple(map(tuple, self.slots_LE.tolist()))

    @property
    def worst_imbalance(self) -> float:
        return max(self.imbalance, default=1.0)

    def metrics(self) -> dict[str, tuple[float, ...]]:
        """Return the available per-layer metrics by name."""
        return {name: values for name in LAYER_METRICS if len(values := getattr(self, name)) == len(self.imbalance)}


def _lent_metrics(layers: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """Return ``LENT_METRICS`` of ``LENT_COUNTS`` by layer; those that no layer has are left out."""
    found: dict[str, Any] = {}
    if any(one["bytes"] for one in layers):
        found["copied_bytes"] = tuple(one["bytes"] for one in layers)
    if any(one["calls"] for one in layers):
        found["rows_fixed"] = tuple(one["fixed"] / one["rows"] if one["rows"] else 1.0 for one in layers)
        found["rows_lent"] = tuple(one["busiest"] / one["rows"] if one["rows"] else 1.0 for one in layers)
        found["lent_experts"] = tuple(one["experts"] / max(one["calls"], 1) for one in layers)
    if any(one["resident"] for one in layers):
        found["resident_share"] = tuple(one["resident"] / max(one["experts"], 1) for one in layers)
    return found


@dataclass(frozen=True)
class PlacementReport:
    """Decisions on the placement of experts after a step, and the switch that follows from them.

    Attributes:
        decisions: one for each MoE layer. Not part of stored reports.
        version: largest version of a layer's placement.
        layers: names of the layers that switched; the remaining attributes refer to them.
        moved_bytes: bytes that all ranks sent.
        ratio_before, ratio_after: rows of the busiest rank over the mean in the window of loads, with the old and the
            new placement; mean of these layers.
        saved_s, cost_s: predicted seconds, of all these layers together.
        seconds: measured seconds on this rank.
    """

    decisions: tuple[PlacementLine, ...]
    version: int
    layers: tuple[str, ...]
    moved_bytes: int
    ratio_before: float
    ratio_after: float
    saved_s: float
    cost_s: float
    seconds: float

    @classmethod
    def of(cls, decisions: Sequence[PlacementLine], moved_bytes: int, seconds: float) -> PlacementReport:
        """Return the report of ``decisions`` that were carried out."""
        switches = [line for line in decisions if line.switched]
        return cls(
            decisions=tuple(decisions),
            version=max(line.version for line in decisions),
            layers=tuple(line.layer for line in switches),
            moved_bytes=moved_bytes,
            ratio_before=sum(line.ratio_before for line in switches) / max(len(switches), 1),
            ratio_after=sum(line.ratio_after for line in switches) / max(len(switches), 1),
            saved_s=sum(line.saved_s for line in switches),
            cost_s=sum(line.cost_s for line in switches),
            seconds=seconds,
        )

    def __str__(self) -> str:
        return (
            f"experts of {len(self.layers)} layers moved ({self.moved_bytes:,} bytes in {self.seconds:.2g} s, version "
            f"{self.version}): the busiest rank falls from {self.ratio_before:.2f} to {self.ratio_after:.2f} times the "
            "mean rows"
        )


@dataclass(frozen=True)
class StepReport:
    """Metrics of one training step, identical on all ranks except for ``times``, ``memory_bytes``, ``offload``,
    ``activations`` and ``weights``.

    Attributes:
        step: number of the step, from 1.
        loss: mean loss over the global batch before the update, in nats per token.
        grad_norm: global gradient norm before clipping.
        tokens: targets in the global batch.
        memory_bytes: peak memory of this process: resident on the CPU, allocated on a GPU.
        mfu: model FLOP/s over the matrix-product rate measured at the start of the run; None if not measured.
        skipped: reason why the weights were not updated; "" if they were.
        stop: reason why training ends after this step; "" if it continues.
        reruns: number of reruns of the step, see ``moe_comm.train.resilience.guard``.
        placement: decisions on the placement of experts after the step; None without any.
        offload: transfers of offloaded state of this rank in the last update; None if it is in memory.
        activations: transfers of offloaded activations of this rank in the last pass; None if they are in memory.
        weights: bytes of offloaded weights that this rank copied in the step, and in a validation before it; None if
            they are on the device.
        lengths: work of the ranks of dp and cp, if lengths are balanced.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    times: StepTimes
    load: ExpertLoad
    memory_bytes: int
    mfu: float | None = None
    skipped: str = ""
    stop: str = ""
    reruns: int = 0
    placement: PlacementReport | None = None
    offload: OffloadReport | None = None
    activations: OffloadReport | None = None
    weights: WeightsReport | None = None
    lengths: LengthLoads | None = None

    @property
    def seconds(self) -> float:
        return self.times.total

    def without_slots(self) -> StepReport:
        """Return the report without values of single experts, which take megabytes in a large model."""
        placement = None if self.placement is None else replace(self.placement, decisions=())
        return replace(self, load=replace(self.load, slots_LE=None), placement=placement)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


NO_LOAD = ExpertLoad((), (), (), ())


class MetricsSink:
    """Destination of reports. A sink buffers at most one step, so that a killed run leaves its metrics.

    ``NonblockingSink`` buffers more while a sink does not respond.
    """

    def write(self, report: StepReport) -> None:
        """Write the metrics of a step."""

    def summary(self, step: int, values: dict[str, float]) -> None:
        """Write metrics that do not belong to a training step, such as the validation loss."""

    def close(self) -> None:
        """End the sink."""


class _LineSink(MetricsSink):
    def __init__(self, path: Path, done: int) -> None:
        cut_after(path, done)
        self._lines = LineWriter(path)

    def close(self) -> None:
        self._lines.close()


class JsonlSink(_LineSink):
    """Write one JSON object per line. NaN and infinity (the norm of a skipped step) become null.

    Args:
        done: completed steps when the run resumes. Lines of later steps are removed, so that each step is written once.
        series: maximum number of per-layer values in a line. Beyond it, only the worst layers are written.
    """

    def __init__(self, path: Path, done: int = 0, series: int = SERIES) -> None:
        super().__init__(path, done)
        self._series = series

    def write(self, report: StepReport) -> None:
        values = asdict(replace(report.without_slots(), load=NO_LOAD)) | {"loop_s": report.times.loop}
        placement = values.pop("placement")
        if placement is not None and placement["layers"]:
            values["placement"] = {name: value for name, value in placement.items() if name != "decisions"}
        for name, tier in (("offload", report.offload), ("activations", report.activations)):
            values[name] = None if tier is None else values[name] | {"overlap": tier.overlap}
        metrics = report.load.metrics()
        layers = layers_to_write(report.load.imbalance, len(metrics), self._series)
        values["load"] = {"layers": layers} | {name: [series[i] for i in layers] for name, series in metrics.items()}
        values["load_across"] = across_layers(metrics)
        values["tokens_per_s"] = report.tokens_per_s
        self._lines.write(values)

    def summary(self, step: int, values: dict[str, float]) -> None:
        self._lines.write({"step": step, **values})


class LoadsSink(_LineSink):
    """Write per-expert loads (``moe_comm.observe.records.LoadLine``) after step 1 and after every ``every`` steps."""

    def __init__(self, path: Path, every: int, done: int = 0) -> None:
        super().__init__(path, done)
        self._every = every

    def write(self, report: StepReport) -> None:
        if report.step == 1 or report.step % self._every == 0:
            for name, slots in zip(report.load.names, report.load.slots, strict=False):
                self._lines.write(LoadLine(report.step, name, list(slots)))


class PlacementsSink(_LineSink):
    """Write decisions on the placement of experts (``moe_comm.observe.records.PlacementLine``)."""

    def write(self, report: StepReport) -> None:
        for line in () if report.placement is None else report.placement.decisions:
            self._lines.write(line)


class TensorBoardSink(MetricsSink):
    """Write TensorBoard event files to ``folder``. ``done`` and ``series`` as for ``JsonlSink``; events of steps after
    ``done`` are hidden. The worst layers can differ from step to step."""

    def __init__(self, folder: Path, done: int = 0, series: int = SERIES) -> None:
        # tensorboard takes a second to import, and only rank 0 writes event files.
        from torch.utils.tensorboard.writer import SummaryWriter

        make_folders(folder.parent, folder.name)  # never write event files into a folder that is a link
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
        for name, tier in (("offload", report.offload), ("activations", report.activations)):
            if tier is not None:
                values |= {f"{name}/waited_s": tier.waited_s, f"{name}/overlap": tier.overlap}
        if report.weights is not None:
            values |= {f"weights/{name}_gib": value / 2**30 for name, value in asdict(report.weights).items()}
        metrics = load.metrics()
        for name, (median, worst) in across_layers(metrics).items():
            values |= {f"router/{name}_p50": median, f"router/{name}_p95": worst}
        for i in layers_to_write(load.imbalance, len(metrics), self._series):
            values |= {f"router/{name}_layer_{i}": per_layer[i] for name, per_layer in metrics.items()}
        self.summary(report.step, values)

    def summary(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def layers_to_write(imbalance: Sequence[float], metrics: int, most: int) -> tuple[int, ...]:
    """Return the layers whose metrics are written, in model order: at most ``most`` values of ``metrics`` per layer.

    If not all layers fit, the layers with the highest imbalance are chosen.
    """
    layers = len(imbalance)
    if layers * metrics <= most:
        return tuple(range(layers))
    worst = sorted(range(layers), key=lambda layer: (-imbalance[layer], layer))
    return tuple(sorted(worst[: most // max(metrics, 1)]))


def across_layers(values: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """Return the median and the 95th percentile (5th where low values are bad) over layers of each metric."""
    return {
        name: (quantile(layer_values, 0.5), quantile(layer_values, 0.05 if name in LOW_IS_BAD else 0.95))
        for name, layer_values in values.items()
        if len(layer_values)
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Return the ``share`` quantile of ``values``, with linear interpolation."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (position - below) * (ordered[above] - ordered[below]))
