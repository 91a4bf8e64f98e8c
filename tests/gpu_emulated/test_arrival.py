"""When the flags of tiles rise while ``push`` sends rows: evenly, if it sends them by expert."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from moe_comm.overlap.tuning.device_cost import STEPS, ready_shares as predicted

SOURCES = Path(__file__).parents[2] / "csrc"
COMPILER = shutil.which("c++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
LARGE, SMALL = (4096, 256, 8, 8), (1024, 64, 4, 4)
"""Tokens, experts, top-k, ranks."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert COMPILER is not None
    path = tmp_path_factory.mktemp("arrival") / "arrival"
    command = [COMPILER, "-std=c++17", "-O1", "-w", f"-I{SOURCES}", str(SOURCES / "tests/arrival/main.cpp")]
    subprocess.run([*command, "-o", str(path)], check=True, timeout=100)
    return path


def ready_shares(
    program: Path, case: tuple[int, int, int, int], blocks: int, by_expert: bool
) -> npt.NDArray[np.float64]:
    """Return the share of the rows that are written when each tile is complete, ascending, one number for each row."""
    command = [str(program), *map(str, (*case, blocks, int(by_expert)))]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout
    _, _, rows, at = np.array([line.split() for line in output.splitlines()], dtype=float).T
    assert rows.sum() == case[0] * case[2]
    return np.sort(np.repeat(at, rows.astype(int)))


@pytest.mark.parametrize("case", [LARGE, SMALL], ids=["4096 tokens", "1024 tokens"])
def test_tiles_are_complete_in_proportion_to_the_rows_that_are_written(
    program: Path, case: tuple[int, int, int, int]
) -> None:
    for blocks in (8, 16):
        ready = ready_shares(program, case, blocks, by_expert=True)
        late = ready - (np.arange(len(ready)) + 1) / len(ready)
        groups = 1.5 * 128 * blocks / len(ready)  # each block sends about 128 rows between two fences
        assert ready[0] <= groups and late.max() <= groups, (ready[0], late.max())
        assert 0.45 <= np.median(ready) <= 0.5 + groups
        assert ready[-1] <= 1.1, "all blocks send about as many rows"


def test_the_cost_model_has_the_arrival_curve_of_push(program: Path) -> None:
    tokens, _, top_k, _ = LARGE
    for blocks in (8, 16):
        ready = ready_shares(program, LARGE, blocks, by_expert=True).clip(max=1.0)
        simulated = np.quantile(ready, (np.arange(STEPS) + 1) / STEPS)
        shares = predicted(tokens * top_k, blocks)
        assert abs(simulated - shares).max() < 0.07
        assert shares[0] < 0.1 and simulated[0] < 0.1, "the first flag"


def test_by_token_no_tile_is_complete_before_nearly_all_rows_are_written(program: Path) -> None:
    ready = ready_shares(program, LARGE, 8, by_expert=False)
    assert ready[0] > 0.9 and np.median(ready) > 0.98
    ready = ready_shares(program, LARGE, 8, by_expert=True)
    assert ready[0] < 0.05 and np.median(ready) < 0.53
