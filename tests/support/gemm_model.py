"""Programs and libraries that run the GEMMs of csrc/cuda/gemm in a model of Hopper's instructions, on the CPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from moe_comm.gpu.gemm import GpuGemm
from moe_comm.gpu.launch import Driver

CSRC = Path(__file__).parents[2] / "csrc"
COMPILER = shutil.which("c++")
FLAGS = ("-std=c++17", "-O1", "-w", "-DMOE_GEMM_MODEL")


def compiled(name: str, folder: Path, sources: Path = CSRC, *flags: str) -> Path:
    """Return what csrc/tests/gemm/``name`` is compiled to, in ``folder``."""
    assert COMPILER is not None
    files = [sources / "tests/gemm" / name, sources / "cuda/gemm/launch.cpp"]
    path = folder / f"{name}.out"
    subprocess.run([COMPILER, *FLAGS, *flags, f"-I{sources}", *files, "-lpthread", "-o", path], check=True, timeout=200)
    return path


def model_gemm(folder: Path, blocks: int = 3) -> GpuGemm:
    """Return the launcher of a GPU of ``blocks`` multiprocessors whose kernels run on memory of the CPU."""
    library = compiled("driver.cpp", folder, CSRC, "-shared", "-fPIC")
    return GpuGemm(0, blocks, code=b"model", driver=Driver(str(library)))
