"""The result of a training run. This module imports no optional package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunResult:
    """Result of a run, identical on all ranks except for ``sample`` and ``signal``. Losses are in nats per token.

    Attributes:
        status: "finished", "interrupted" or "time limit".
        first_loss: training loss of ``first_step``.
        last_loss: mean training loss of the last ``LAST_STEPS`` steps, without those before ``first_step``.
        validation_loss: loss after the last step; None if the run was interrupted.
        unigram_entropy: entropy of the text's unigram distribution.
        sample: generated text; "" on ranks other than 0.
        signal: first signal that asked this process to stop; 0 for none.
        first_step: first step since the last start of the ranks: 1, or the one after the checkpoint of a resumed run.
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
    first_step: int = 1


LAST_STEPS = 10
