"""Every example runs as its first lines describe. tests/integrations/test_swap_example.py runs the swap."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from moe_comm import ParallelConfig
from tests.pool import RankPool

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
OWN_LOOP = str(EXAMPLES / "own_loop.py")
ELSEWHERE = {"swap_hugging_face.py", "folded_transformer.py", "own_loop.py", "cupy_arrays.py"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
COMMANDS: dict[str, tuple[str, ...]] = {"dispatch_only.py": TORCHRUN}
"""Examples that run as commands, under torchrun. The function of the others runs on a pool of ranks."""
EXPECTED_OUTPUT = {
    "tensor_parallel.py": ["rank 1 of 2: 2 heads, output and gradients match"],
    "dispatch_only.py": ["rank 0 (shared_memory) holds experts [0, 1]", "rank 1 (shared_memory) holds experts [2, 3]"],
    "own_experts.py": ["rank 0 holds experts [0, 1, 2]", "rank 1 holds experts [3, 4]", "5 experts saved"],
    "moe_layer.py": [
        "rank 0 of 2: 4 experts, shared_memory",
        "rank 1 of 2: step 20",
        "2 rank(s), shared_memory: all right",
    ],
}


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == EXPECTED_OUTPUT.keys() | ELSEWHERE


def work(rank: int, world: int, arg: tuple[str, tuple[object, ...]]) -> object:
    name, arguments = arg
    return runpy.run_path(str(EXAMPLES / name))["work"](*arguments)


def run(*arguments: str) -> str:
    """Return the standard output of Python with ``arguments``, which must succeed."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize("name", EXPECTED_OUTPUT)
def test_an_example_with_two_ranks(name: str, pool2: RankPool) -> None:
    shown = run(*COMMANDS[name], f"examples/{name}") if name in COMMANDS else str(pool2.run(work, (name, ())))
    assert all(text in shown for text in EXPECTED_OUTPUT[name]), shown


OTHERS = {name: texts[0] for name, texts in EXPECTED_OUTPUT.items() if name not in COMMANDS}
OTHERS |= {"folded_transformer.py": "step 2", "own_loop.py": "saved step"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shown"), [*OTHERS.items()])
def test_other_examples_run_as_commands(name: str, shown: str, tmp_path: Path) -> None:
    more = (TORCHRUN, (str(tmp_path),)) if name == "own_loop.py" else ((), ())
    assert shown in run(*more[0], f"examples/{name}", *more[1])


def test_the_folded_example_has_the_losses_of_one_process(pool4: RankPool) -> None:
    _, *expected = work(0, 1, ("folded_transformer.py", (ParallelConfig(),)))  # type: ignore[misc]
    assert len(expected) == 3
    first, *_ = pool4.run(work, ("folded_transformer.py", (ParallelConfig(tp=2, dp=2, ep=4),)))
    assert first[1:] == expected


def test_the_example_with_arrays_of_another_library(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "cupy_arrays.py"), run_name="__main__")
    assert "12 rows for 4 experts, output (6, 8) as expected" in capsys.readouterr().out


def own_loop(rank: int, world: int, folder: Path) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(OWN_LOOP)["main"](folder)
    return output.getvalue()


def losses(output: str) -> dict[int, float]:
    assert "saved step" in output
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", output)}


def test_the_loss_of_the_own_loop_decreases_on_two_ranks_and_after_resuming_on_one(
    tmp_path: Path, pool2: RankPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", minversion="5.23", reason="needs the hf extra")
    first = losses(pool2.run(own_loop, tmp_path)[0])
    monkeypatch.setattr(sys, "argv", [OWN_LOOP, str(tmp_path)])
    runpy.run_path(OWN_LOOP, run_name="__main__")
    resumed = losses(capsys.readouterr().out)
    assert first[19] < first[0] - 1
    assert abs(resumed[20] - first[19]) < 0.5
    assert max(resumed.values()) < first[0] - 1


@pytest.mark.skipif(importlib.util.find_spec("pydantic") is None, reason="needs the train extra")
def test_the_training_configuration_is_valid_and_for_two_ranks() -> None:
    from moe_comm.train import config

    assert config.load(EXAMPLES / "pydoc.toml").parallel.ranks == 2
