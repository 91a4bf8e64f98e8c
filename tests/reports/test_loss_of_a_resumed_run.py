"""The first loss of a resumed run is named after its step."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_comm.train import RunResult


@pytest.mark.parametrize(("first_step", "label"), [(1, "loss, first step"), (41, "loss, step 41 (resumed)")])
def test_the_summary_names_the_step_of_the_first_loss(first_step: int, label: str) -> None:
    pytest.importorskip("pydantic", reason="needs the train extra")
    from moe_comm.train.data.batches import Statistics
    from moe_comm.train.loop.job import summary_text

    statistics = Statistics(3.0, 2.0, 100, 1, 90, 10)
    result = RunResult(Path("runs/a"), "finished", 60, 4.25, 3.5, None, 3.0, 12.0, first_step=first_step)
    (line,) = (line for line in summary_text(result, statistics).splitlines() if "4.25" in line)
    assert line.split("  ")[1] == label
