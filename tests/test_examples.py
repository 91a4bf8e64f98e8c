"""Every example runs as its first lines describe. tests/integrations/test_swap_example.py runs the swap,
tests/training_loops/test_own_loop_example.py the loop."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
ELSEWHERE = {"swap_hugging_face.py", "folded_transformer.py", "own_loop.py"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
EXPECTED_OUTPUT = {
    "tensor_parallel.py": ["rank 1 of 2: 2 heads, output and gradients match"],
    "dispatch_only.py": ["rank 0 (shared_memory) holds experts [0, 1]", "rank 1 (shared_memory) holds experts [2, 3]"],
    "own_experts.py": ["rank 0 holds experts [0, 1, 2]", "rank 1 holds experts [3, 4]", "5 experts saved"],
    "cupy_arrays.py": ["12 rows for 4 experts, output (6, 8) as expected"],
    "moe_layer.py": [
        "rank 0 of 2: 4 experts, shared_memory",
        "rank 1 of 2: step 20",
        "2 rank(s), shared_memory: all right",
    ],
}


def run(command: list[str]) -> str:
    """Return the standard output of ``command``, which must succeed."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == EXPECTED_OUTPUT.keys() | ELSEWHERE


@pytest.mark.parametrize("name", EXPECTED_OUTPUT)
def test_example_starts_its_own_ranks(name: str) -> None:
    shown = run([sys.executable, f"examples/{name}"])
    assert all(text in shown for text in EXPECTED_OUTPUT[name]), shown


def test_example_runs_under_torchrun() -> None:
    shown = run([*TORCHRUN, "examples/dispatch_only.py"])
    assert all(text in shown for text in EXPECTED_OUTPUT["dispatch_only.py"]), shown


def test_the_folded_example_has_the_losses_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("folded_transformer")
    _, *expected = example.work(example.ParallelConfig())
    assert len(expected) == 3
    shown = run([sys.executable, "examples/folded_transformer.py"])
    assert [line for line in shown.splitlines() if line.startswith("step")] == expected


@pytest.mark.skipif(importlib.util.find_spec("pydantic") is None, reason="needs the train extra")
def test_the_training_configuration_is_valid_and_for_two_ranks() -> None:
    from moe_comm.train import config

    assert config.load(EXAMPLES / "pydoc.toml").parallel.ranks == 2
