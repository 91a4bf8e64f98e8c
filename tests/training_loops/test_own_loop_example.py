"""The example of docs/training.md trains on two ranks and resumes on one."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "own_loop.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def losses(output: str) -> dict[int, float]:
    assert "saved step" in output
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", output)}


def test_the_loss_decreases_on_two_ranks_and_after_resuming_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process = subprocess.run(
        [sys.executable, *TORCHRUN, EXAMPLE, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr
    monkeypatch.setattr(sys, "argv", [EXAMPLE, str(tmp_path)])
    runpy.run_path(EXAMPLE, run_name="__main__")
    first, resumed = losses(process.stdout), losses(capsys.readouterr().out)
    assert first[19] < first[0] - 1
    assert abs(resumed[20] - first[19]) < 0.5
    assert max(resumed.values()) < first[0] - 1
