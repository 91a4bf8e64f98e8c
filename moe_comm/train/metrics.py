"""What a step measured, and where it is written."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Protocol


@dataclass(frozen=True)
class StepReport:
    """One training step, the same on every rank but for ``seconds``.

    step: from 1. loss: mean over the global batch, nats per byte, before the update.
    balance: load-balancing loss, top-k for perfectly even routers. lr, grad_norm: as used; the norm before clipping.
    tokens: of the global batch. imbalance: for each MoE layer, load of the busiest expert over the mean load.
    stop: why training ends after this step, "" if it goes on.
    """

    step: int
    loss: float
    balance: float
    lr: float
    grad_norm: float
    tokens: int
    seconds: float
    imbalance: tuple[float, ...]
    stop: str = ""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def worst_imbalance(self) -> float:
        return max(self.imbalance)


class MetricsSink(Protocol):
    """Where reports go. Sinks hold no more than one step back, so that a run that is killed leaves its metrics."""

    def write(self, report: StepReport) -> None: ...

    def summary(self, step: int, values: dict[str, float]) -> None:
        """Numbers of the whole run, such as the validation loss."""

    def close(self) -> None: ...


class JsonlSink:
    """One JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("w", encoding="utf-8", buffering=1)

    def write(self, report: StepReport) -> None:
        self._line(asdict(report) | {"tokens_per_s": report.tokens_per_s})

    def summary(self, step: int, values: dict[str, float]) -> None:
        self._line({"step": step, **values})

    def close(self) -> None:
        self._file.close()

    def _line(self, values: dict[str, object]) -> None:
        self._file.write(json.dumps(values) + "\n")


class TensorBoardSink:
    """Event files for TensorBoard, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=10)

    def write(self, report: StepReport) -> None:
        values = {
            "train/loss": report.loss,
            "train/grad_norm": report.grad_norm,
            "train/lr": report.lr,
            "train/tokens_per_s": report.tokens_per_s,
            "router/balance_loss": report.balance,
            "router/imbalance_max": report.worst_imbalance,
        }
        values |= {f"router/imbalance_layer_{i}": value for i, value in enumerate(report.imbalance)}
        self.summary(report.step, values)

    def summary(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
