"""The example of docs/training.md trains on two ranks and resumes on one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def losses(launcher: list[str], folder: Path) -> dict[int, float]:
    process = subprocess.run(
        [sys.executable, *launcher, "examples/own_loop.py", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr
    assert "saved step" in process.stdout
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", process.stdout)}


def test_the_loss_decreases_on_two_ranks_and_after_resuming_on_one(tmp_path: Path) -> None:
    first, resumed = losses(TORCHRUN, tmp_path), losses([], tmp_path)
    assert first[19] < first[0] - 1
    assert abs(resumed[20] - first[19]) < 0.5
    assert max(resumed.values()) < first[0] - 1
