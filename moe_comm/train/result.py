"""What a run returns; free of optional packages, so that the command line can name the type."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunResult:
    """How a run ended, the same on every rank but for ``sample``, which rank 0 alone has, and ``signal``.

    folder: what the run left behind. status: "finished", "interrupted" or "time limit". steps: done.
    first_loss, last_loss: training loss of the first step, and the mean over the last ``LAST_STEPS`` steps.
    validation_loss: after the last step; None where the run was interrupted. unigram_entropy: of the text.
    All in nats per token. signal: the first that asked this process to stop; 0: none.
    """

    folder: Path
    status: str
    steps: int
    first_loss: float
    last_loss: float
    validation_loss: float | None
    unigram_entropy: float
    seconds: float
    sample: str = ""
    signal: int = 0


LAST_STEPS = 10
