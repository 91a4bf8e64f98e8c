"""Programs and libraries that run the GEMMs of csrc/cuda/gemm in a model of Hopper's instructions, on the CPU."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from moe_comm.gpu.gemm import GpuGemm
from moe_comm.gpu.launch import Driver

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
COMPILER = shutil.which("c++")
FLAGS = ("-std=c++17", "-O1", "-w", "-DMOE_GEMM_MODEL")


def compiled(name: str, folder: Path, sources: Path = CSRC, *flags: str) -> Path:
    """Return what csrc/tests/gemm/``name`` is compiled to, in ``folder``."""
    assert COMPILER is not None
    files = [sources / "tests/gemm" / name, sources / "cuda/gemm/launch.cpp"]
    path = folder / f"{name}.out"
    subprocess.run([COMPILER, *FLAGS, *flags, f"-I{sources}", *files, "-lpthread", "-o", path], check=True, timeout=200)
    return path


@cache
def _library() -> Path:
    """Return the driver of the model. All processes and runs with the same sources share it, in build/gemm-model."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted((CSRC / "cuda").rglob("*")) + sorted((CSRC / "tests/gemm").iterdir()) + [CSRC / "layout.h"]:
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    library = ROOT / "build/gemm-model" / f"{digest.hexdigest()[:20]}.so"
    if not library.exists():
        own = library.parent / str(os.getpid())
        own.mkdir(parents=True, exist_ok=True)
        compiled("driver.cpp", own, CSRC, "-shared", "-fPIC").replace(library)
        own.rmdir()
    return library


def model_gemm(blocks: int = 3) -> GpuGemm:
    """Return the launcher of a GPU of ``blocks`` multiprocessors whose kernels run on memory of the CPU."""
    return GpuGemm(0, blocks, code=b"model", driver=Driver(str(_library())))
