"""The GEMMs of csrc/cuda/gemm, in a model of Hopper's instructions on a CPU, have the results of float64, and
ThreadSanitizer finds no access to memory that their barriers do not order."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "csrc"
COMPILER = shutil.which("c++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
THREAD = ("-fsanitize=thread", "-g")
WRONG_RESULTS = {
    "strides of MN-major tiles": (
        "weights.h",
        "descriptor(bt + i * 2048, kGradBox)",
        "descriptor(bt + i * 2048, 4096)",
    ),
    "rows of the next expert": ("weights.h", "if (live % 16 != 0)", "if (false)"),
    "arrivals of a barrier": ("rows.h", "barrier_init(empty + s * 8, 8);", "barrier_init(empty + s * 8, 9);"),
}
"""Changes of the kernels that the model must find: file, text, new text."""
RACES = {
    "stage read after its release": ("rows.h", "products_wait<1>();", ""),
    "stage loaded before its release": ("rows.h", "barrier_wait(empty + ring.stage * 8, ring.phase ^ 1);", ""),
    "rows read before they are loaded": ("rows.h", "        barrier_wait(full + ring.stage * 8, ring.phase);", ""),
    "buffer overwritten before its store": ("rows.h", "if (lane_ == 0) wait_stores_read<kBuffers - 1>();", ""),
    "buffer stored before it is written": ("rows.h", "fence_async();\n      __syncwarp();", "fence_async();"),
    "rows read before they are zero": ("weights.h", "        fence_async();\n        group_sync(group);", ""),
    "sums added before they are loaded": ("weights.h", "barrier_wait(loaded_ + ring_.stage * 8, ring_.phase);", ""),
}
"""Orders whose absence ThreadSanitizer must find."""


def result(
    sources: Path, folder: Path, *options: str, seed: int = 1, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    assert COMPILER is not None
    files = [str(sources / "tests/gemm/main.cpp"), str(sources / "cuda/gemm/launch.cpp")]
    program = str(folder / "gemm_model")
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-DMOE_GEMM_MODEL", *options, f"-I{sources}", *files]
    subprocess.run([*command, "-lpthread", "-o", program], check=True, timeout=200)
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    command = [*launcher, program, str(seed)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


def changed(folder: Path, name: str, text: str, new: str) -> Path:
    """Copy the sources to a folder, with ``new`` for ``text`` in a file, and return their new path."""
    shutil.copytree(SOURCES, folder / "csrc")
    path = folder / "csrc/cuda/gemm" / name
    source = path.read_text()
    assert text in source
    path.write_text(source.replace(text, new))
    return folder / "csrc"


@pytest.fixture(scope="module")
def fixed_addresses() -> tuple[str, ...]:
    """Start a program without random addresses, for which ThreadSanitizer may have no room."""
    command = ("setarch", "-R")
    works = (
        shutil.which("setarch") and not subprocess.run([*command, "true"], capture_output=True, check=False).returncode
    )
    return command if works else ()


def test_kernels_have_the_results_of_float64(tmp_path: Path) -> None:
    run = result(SOURCES, tmp_path)
    assert run.returncode == 0, run.stdout
    assert run.stdout == "0 failures\n"


@pytest.mark.slow
@pytest.mark.parametrize("fault", WRONG_RESULTS)
def test_the_model_finds_faults(fault: str, tmp_path: Path) -> None:
    assert result(changed(tmp_path, *WRONG_RESULTS[fault]), tmp_path).returncode == 1


@pytest.mark.slow
def test_barriers_order_all_accesses(fixed_addresses: tuple[str, ...], tmp_path: Path) -> None:
    run = result(SOURCES, tmp_path, *THREAD, seed=2, launcher=fixed_addresses)
    assert (run.returncode, run.stdout) == (0, "0 failures\n"), run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("race", RACES)
def test_a_missing_barrier_is_a_data_race(race: str, fixed_addresses: tuple[str, ...], tmp_path: Path) -> None:
    run = result(changed(tmp_path, *RACES[race]), tmp_path, *THREAD, seed=0, launcher=fixed_addresses)
    assert run.returncode and "ThreadSanitizer: data race" in run.stderr, run.stdout + run.stderr
