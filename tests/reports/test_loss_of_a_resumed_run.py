"""The first loss of a resumed run is named after its step."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_comm.train import RunResult


@pytest.mark.parametrize(
    ("first_step", "label", "last"),
    [
        (1, "loss, first step", "loss, last 10 steps"),
        (41, "loss, step 41 (resumed)", "loss, last 10 steps"),
        (58, "loss, step 58 (resumed)", "loss, last 3 steps"),
    ],
)
def test_the_summary_names_the_steps_of_the_first_and_the_last_loss(first_step: int, label: str, last: str) -> None:
    pytest.importorskip("pydantic", reason="needs the train extra")
    from moe_comm.train.data.batches import Statistics
    from moe_comm.train.loop.job import summary_text

    statistics = Statistics(3.0, 2.0, 100, 1, 90, 10)
    result = RunResult(Path("runs/a"), "finished", 60, 4.25, 3.5, None, 3.0, 12.0, first_step=first_step)
    for loss, wanted in (("4.25", label), ("3.5", last)):
        (line,) = (line for line in summary_text(result, statistics).splitlines() if loss in line)
        assert line.split("  ")[1] == wanted
