"""Build ``moe_comm._C`` with CMake; everything else about the package is in pyproject.toml.

Environment: ``MOE_COMM_CUDA=auto|on|off`` (compile csrc/cuda with nvcc), ``MOE_COMM_CUDA_ARCHS`` (only for these
architectures, such as ``90a-real``), ``MOE_COMM_WERROR=on|off`` (treat warnings as errors), ``CXX`` (the compiler),
``MOE_COMM_JOBS`` (number of files compiled at once; by default one per core).

A build for another machine sets ``_PYTHON_HOST_PLATFORM`` (linux-aarch64), ``SETUPTOOLS_EXT_SUFFIX``
(.cpython-311-aarch64-linux-gnu.so) and ``CXX``; benchmarks/wheels.py is an example.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def tool(name: str) -> str:
    """Path of a build tool: from PATH (where build isolation puts it), or beside this Python."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        raise SystemExit(f"moe_comm: {name} is needed to build the native core; run: pip install {name}")
    return found


class CMakeBuild(build_ext):
    """Configure once, then let ninja rebuild what changed; the module lands where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        configure = [
            tool("cmake"),
            "-G",
            "Ninja",
            "-S",
            str(ROOT),
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DMOE_COMM_CUDA={os.environ.get('MOE_COMM_CUDA', 'auto')}",
            f"-DMOE_COMM_CUDA_ARCHS={os.environ.get('MOE_COMM_CUDA_ARCHS', '')}",
            f"-DMOE_COMM_WERROR={os.environ.get('MOE_COMM_WERROR', 'off')}",
        ]
        if machine := os.environ.get("_PYTHON_HOST_PLATFORM", "").removeprefix("linux-"):
            # The headers of this Python serve: its version has the same ones on every 64-bit Linux, except for macros
            # that only the interpreter's own sources use.
            configure += [
                "-DCMAKE_SYSTEM_NAME=Linux",
                f"-DCMAKE_SYSTEM_PROCESSOR={machine}",
                f"-DPython_INCLUDE_DIR={sysconfig.get_path('include')}",
            ]
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = ROOT / "build" / f"native-{target.name.split('.')[1]}"
        # A build folder remembers its tools, and those of an isolated build are gone afterwards: start afresh when
        # anything about the configuration changed.
        stamp, key = build / "configured", "\n".join([*configure, os.environ.get("CXX", "")])
        if not stamp.exists() or stamp.read_text() != key:
            shutil.rmtree(build, ignore_errors=True)
            self._run([*configure, "-B", str(build)])
            stamp.write_text(key)
        jobs = os.environ.get("MOE_COMM_JOBS", str(len(os.sched_getaffinity(0))))
        self._run([tool("cmake"), "--build", str(build), "--target", "_C", "-j", jobs])
        # Copied rather than built there: an editable and an ordinary build have other targets but share this folder.
        target.parent.mkdir(parents=True, exist_ok=True)
        # A new file, not new bytes in the old one: a running process has that one mapped.
        fresh = target.with_suffix(".new")
        (built,) = build.glob("_C.*.so")  # named for the Python that builds
        shutil.copy2(built, fresh)
        fresh.replace(target)

    @staticmethod
    def _run(command: list[str]) -> None:
        try:
            subprocess.run(command, check=True)
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"moe_comm: building the native core failed ({error.returncode}); see above") from None


setup(ext_modules=[Extension("moe_comm._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
