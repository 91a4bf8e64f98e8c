"""What the user sees while training: a bar on a terminal, plain lines elsewhere, nothing on ranks other than 0."""

from __future__ import annotations

import sys
import time
from typing import Protocol

from moe_comm.train.metrics import StepReport


class Progress(Protocol):
    """Shows a run of ``steps`` steps."""

    def start(self, steps: int) -> None: ...

    def update(self, report: StepReport) -> None: ...

    def close(self) -> None: ...

    def say(self, text: str) -> None:
        """Print ``text`` above the bar, exactly as it is."""


class Silent:
    """For ranks other than 0, and for callers that show things themselves."""

    def start(self, steps: int) -> None:
        pass

    def update(self, report: StepReport) -> None:
        pass

    def close(self) -> None:
        pass

    def say(self, text: str) -> None:
        pass


class _Pace:
    """Tokens a second and time left, from the mean over the last steps; the slow first step is left out."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seconds: float | None = None

    def update(self, report: StepReport) -> tuple[float, float]:
        """(tokens a second, seconds left)."""
        seconds = report.seconds
        if report.step > 2 and self.seconds is not None:
            seconds = 0.95 * self.seconds + 0.05 * seconds
        self.seconds = seconds
        return report.tokens / seconds, seconds * (self.steps - report.step)


class Bar:
    """A live bar: step, loss, tokens a second, load imbalance, time left."""

    def __init__(self) -> None:
        # Only rank 0 on a terminal draws a bar.
        from rich.progress import BarColumn, Progress, TextColumn

        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            refresh_per_second=4,
        )

    def start(self, steps: int) -> None:
        self._pace = _Pace(steps)
        self._task = self._bar.add_task("train", total=steps, numbers="starting")
        self._bar.start()

    def update(self, report: StepReport) -> None:
        self._bar.update(self._task, completed=report.step, numbers=_numbers(report, *self._pace.update(report)))

    def close(self) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)


class Lines:
    """A line every ``every`` steps, and for the first and the last."""

    def __init__(self, every: int) -> None:
        self._every = every

    def start(self, steps: int) -> None:
        self._pace = _Pace(steps)

    def update(self, report: StepReport) -> None:
        numbers = _numbers(report, *self._pace.update(report))
        if report.step == 1 or report.step % self._every == 0 or report.step == self._pace.steps:
            self.say(f"step {report.step}/{self._pace.steps}  {numbers}")

    def close(self) -> None:
        pass

    def say(self, text: str) -> None:
        print(text, flush=True)


def make_progress(first: bool, every: int) -> Progress:
    """A bar where rank 0 writes to a terminal, lines where it does not, silence on other ranks."""
    if not first:
        return Silent()
    return Bar() if sys.stdout.isatty() else Lines(every)


def _numbers(report: StepReport, tokens_per_s: float, seconds_left: float) -> str:
    left = time.strftime("%H:%M:%S" if seconds_left >= 3600 else "%M:%S", time.gmtime(seconds_left))
    return (
        f"loss {report.loss:.3f}  {tokens_per_s:,.0f} tokens/s  "
        f"{'' if report.mfu is None else f'MFU {report.mfu:.0%}  '}"
        f"load imbalance {report.load.worst_imbalance:.2f}  {left} left"
    )
