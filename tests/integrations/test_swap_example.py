"""The example in the documentation runs and matches."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from tests.pool import RankPool

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "swap_hugging_face.py")


def assert_matches(output: str, ranks: int) -> None:
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: holds {100 // ranks}% of the experts' weights" in output
        assert f"rank {rank} of {ranks}: logits match" in output


def test_swap_example_prints_that_logits_match(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", [EXAMPLE])
    runpy.run_path(EXAMPLE, run_name="__main__")
    assert_matches(capsys.readouterr().out, 1)


def printed(rank: int, world: int, folder: Path) -> str:
    with redirect_stdout(StringIO()) as output:
        runpy.run_path(EXAMPLE)["main"](folder)
    return output.getvalue()


def test_logits_match_on_every_rank(pool2: RankPool, tmp_path: Path) -> None:
    folder = runpy.run_path(EXAMPLE)["small_mixtral"](tmp_path)
    assert_matches("".join(pool2.run(printed, folder)), 2)


@pytest.mark.slow
def test_swap_example_runs_under_torchrun() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", EXAMPLE],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    assert_matches(process.stdout, 2)
