"""The GEMMs of csrc/cuda/gemm, in a model of Hopper's instructions on a CPU, have the results of float64."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "csrc"
COMPILER = shutil.which("c++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
FAULTS = {
    "strides of MN-major tiles": (
        "weights.h",
        "descriptor(bt + i * 2048, kGradBox)",
        "descriptor(bt + i * 2048, 4096)",
    ),
    "rows of the next expert": ("weights.h", "if (live % 16 != 0)", "if (false)"),
    "stage read after its release": ("rows.h", "products_wait<1>();", ""),
    "buffer overwritten before its store": ("rows.h", "if (lane_ == 0) wait_stores_read<kBuffers - 1>();", ""),
    "rows read before they are loaded": ("rows.h", "barrier_wait(full + ring.stage * 8, ring.phase);", ""),
    "arrivals of a barrier": ("rows.h", "barrier_init(empty + s * 8, 8);", "barrier_init(empty + s * 8, 9);"),
}
"""Changes of the kernels that the model must find: file, text, new text."""


def result(sources: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    assert COMPILER is not None
    files = [str(sources / "tests/gemm/main.cpp"), str(sources / "cuda/gemm/launch.cpp")]
    program = str(folder / "gemm_model")
    options = ["-std=c++17", "-O1", "-w", "-DMOE_GEMM_MODEL", f"-I{sources}"]
    subprocess.run([COMPILER, *options, *files, "-o", program], check=True, timeout=100)
    return subprocess.run([program], capture_output=True, text=True, timeout=100, check=False)


def test_kernels_have_the_results_of_float64(tmp_path: Path) -> None:
    run = result(SOURCES, tmp_path)
    assert run.returncode == 0, run.stdout
    assert run.stdout == "0 failures\n"


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_model_finds_faults(fault: str, tmp_path: Path) -> None:
    name, text, new = FAULTS[fault]
    shutil.copytree(SOURCES, tmp_path / "csrc")
    path = tmp_path / "csrc/cuda/gemm" / name
    source = path.read_text()
    assert text in source
    path.write_text(source.replace(text, new))
    assert result(tmp_path / "csrc", tmp_path).returncode == 1
