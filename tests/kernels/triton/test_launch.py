"""``launch`` passes the same parameters to the driver directly and through Triton."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.overlap.triton.common import needs_triton

pytestmark = needs_triton
ROOT = Path(__file__).parents[3]


def test_direct_launches_pass_what_triton_passes(tmp_path: Path) -> None:
    cc = shutil.which("cc") or shutil.which("gcc")
    assert cc is not None, "this test needs a C compiler, which building moe_comm needs as well"
    library, source = tmp_path / "libcuda.so.1", Path(__file__).with_name("fake_driver.c")
    soname = "-Wl,-soname,libcuda.so.1"
    command = [cc, "-shared", "-fPIC", "-Wall", "-Werror", soname, "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "TRITON_LIBCUDA_PATH": str(tmp_path),
        "LD_LIBRARY_PATH": str(tmp_path),
    }
    command = [sys.executable, "-m", "tests.kernels.triton.direct_launches", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0 and "equal 6" in done.stdout, done.stdout + done.stderr
