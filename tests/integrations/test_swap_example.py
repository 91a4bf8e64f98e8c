"""The example in the documentation runs and matches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_swap_example_prints_that_logits_match_on_every_rank(ranks: int) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    process = subprocess.run(
        [sys.executable, *launcher, "examples/swap_hugging_face.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: holds {100 // ranks}% of the experts' weights" in process.stdout
        assert f"rank {rank} of {ranks}: logits match" in process.stdout
