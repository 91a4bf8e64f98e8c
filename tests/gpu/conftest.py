"""A CUDA driver that records its calls (fake_driver.c)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from moe_comm.gpu import launch
from tests.gpu.fake_driver import Launched


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cc = shutil.which("cc") or shutil.which("gcc")
    assert cc is not None, "this test needs a C compiler, which building moe_comm needs as well"
    path = tmp_path_factory.mktemp("driver") / "libcuda.so"
    source = Path(__file__).with_name("fake_driver.c")
    subprocess.run([cc, "-shared", "-fPIC", "-Wall", "-Werror", "-o", path, source], check=True, timeout=120)
    return path


@pytest.fixture
def fake_driver(library: Path, tmp_path: Path) -> tuple[launch.Driver, ctypes.CDLL]:
    # A library loaded from another file has records of its own, which are empty.
    path = shutil.copy(library, tmp_path / "libcuda.so")
    loaded_library = ctypes.CDLL(path)
    loaded_library.fake_launches.restype = ctypes.POINTER(Launched)
    loaded_library.fake_attributes.restype = ctypes.POINTER(ctypes.c_int64)
    loaded_library.fake_loaded.restype = ctypes.c_char_p
    return launch.Driver(path), loaded_library
