"""Progress output of training: a bar on a terminal, lines elsewhere, nothing on ranks other than 0."""

from __future__ import annotations

import sys
import time

from moe_comm.runtime.untrusted import printable
from moe_comm.train.metrics import StepReport


class Progress:
    """Output of a run. This base class prints nothing; ranks other than 0 use it."""

    def start(self, steps: int) -> None:
        """Start a run of ``steps`` steps."""

    def update(self, report: StepReport) -> None:
        """Show the metrics of a step."""

    def close(self) -> None:
        """End the output."""

    def log(self, text: str) -> None:
        """Print ``text`` verbatim, above the bar."""


class _Throughput:
    """Tokens per second and remaining time from a moving average; the slow first step is excluded."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seconds: float | None = None

    def update(self, report: StepReport) -> tuple[float, float]:
        """Return (tokens per second, remaining seconds)."""
        seconds = report.seconds
        if report.step > 2 and self.seconds is not None:
            seconds = 0.95 * self.seconds + 0.05 * seconds
        self.seconds = seconds
        return report.tokens / seconds, seconds * (self.steps - report.step)


class BarProgress(Progress):
    """A live bar with step, loss, tokens per second, load imbalance and remaining time."""

    def __init__(self) -> None:
        # Imported here because only rank 0 on a terminal shows a bar.
        from rich.progress import BarColumn, Progress, TextColumn

        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            refresh_per_second=4,
        )

    def start(self, steps: int) -> None:
        self._throughput = _Throughput(steps)
        self._task = self._bar.add_task("train", total=steps, numbers="starting")
        self._bar.start()

    def update(self, report: StepReport) -> None:
        self._bar.update(self._task, completed=report.step, numbers=_numbers(report, *self._throughput.update(report)))

    def close(self) -> None:
        self._bar.stop()

    def log(self, text: str) -> None:
        self._bar.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


class LineProgress(Progress):
    """A line for the first and last step and after every ``every`` steps."""

    def __init__(self, every: int) -> None:
        self._every = every

    def start(self, steps: int) -> None:
        self._throughput = _Throughput(steps)

    def update(self, report: StepReport) -> None:
        numbers = _numbers(report, *self._throughput.update(report))
        if report.step == 1 or report.step % self._every == 0 or report.step == self._throughput.steps:
            self.log(f"step {report.step}/{self._throughput.steps}  {numbers}")

    def log(self, text: str) -> None:
        print(printable(text), flush=True)


def make_progress(first: bool, every: int) -> Progress:
    """Return a bar if rank 0 writes to a terminal, lines if it does not, and no output on other ranks."""
    if not first:
        return Progress()
    return BarProgress() if sys.stdout.isatty() else LineProgress(every)


def _numbers(report: StepReport, tokens_per_s: float, seconds_left: float) -> str:
    remaining = time.strftime("%H:%M:%S" if seconds_left >= 3600 else "%M:%S", time.gmtime(seconds_left))
    weights = report.weights
    waits = [tier.waited_s for tier in (report.offload, report.activations) if tier is not None]
    return (
        f"loss {report.loss:.3f}  {tokens_per_s:,.0f} tokens/s  "
        f"{'' if report.mfu is None else f'MFU {report.mfu:.0%}  '}"
        f"{f'offload waits {sum(waits) / report.seconds:.0%}  ' if waits else ''}"
        f"{'' if weights is None else f'weights copied {(weights.read + weights.written) / 2**30:.3g} GiB  '}"
        f"load imbalance {report.load.worst_imbalance:.2f}  {remaining} left"
    )
