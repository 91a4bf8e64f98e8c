"""Compiles device code at run time with NVRTC, for machines without kernels compiled by nvcc.

    text in moe_comm._C ──NVRTC──▸ cubin for this GPU ──▸ ~/.cache/moe_comm/kernels ──▸ the driver (``launch.py``)

NVRTC is a library that torch for CUDA installs. The driver belongs to the machine. Compiling does not need a GPU.

Errors: MissingDependency if there is no NVRTC, or no native core with device code; KernelError, with the log of the
compiler, if NVRTC fails or supports no architecture of the GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from moe_comm.errors import KernelError, MissingDependency
from moe_comm.runtime.native_core import native

log = logging.getLogger(__name__)

SOURCE = "cuda/kernels.cu"
"""File with the kernels, relative to csrc. It includes the others."""
OPTIONS = ("--std=c++17", "--fmad=false")
"""Same as for nvcc at build time: a * b + c rounds twice, as on the CPU."""
RUNTIME_OPTIONS = (*OPTIONS, "--device-as-default-execution-space")
"""Options of NVRTC. The last one compiles lambdas for the device, which NVRTC 13.0 otherwise refuses."""
FAMILIES = {9: "a", 10: "a", 12: "a"}
"""Suffix by major compute capability that enables features of this generation only."""
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class Nvrtc:
    """An NVRTC library. version: (13, 0) for CUDA 13.0. archs: compute capabilities that it supports, 90 for 9.0."""

    path: str
    version: tuple[int, int]
    archs: tuple[int, ...]
    library: ctypes.CDLL

    def compile(
        self, source: str, headers: Mapping[str, str], arch: str, options: Sequence[str] = RUNTIME_OPTIONS
    ) -> bytes:
        """Return machine code for ``sm_..``, or PTX for ``compute_..``.

        Args:
            source: key in ``headers`` of the file to compile.
            headers: text of all files, by the names in #include lines.
        """
        names = [name for name in headers if name != source]
        texts = (ctypes.c_char_p * len(names))(*(headers[name].encode() for name in names))
        includes = (ctypes.c_char_p * len(names))(*(name.encode() for name in names))
        program = ctypes.c_void_p()
        self._check(
            self.library.nvrtcCreateProgram(
                ctypes.byref(program), headers[source].encode(), source.encode(), len(names), texts, includes
            ),
            f"could not create a program from {source}",
        )
        try:
            flags = [f"--gpu-architecture={arch}", *options]
            arguments = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
            if status := self.library.nvrtcCompileProgram(program, len(flags), arguments):
                text = self._bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
                self._check(status, f"could not compile {source} for {arch}", text)
            return self._bytes(program, "CUBIN" if arch.startswith("sm_") else "PTX")
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"has no {what}")
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.library, f"nvrtcGet{what}")(program, buffer), f"has no {what}")
        return buffer.raw

    def _check(self, status: int, description: str, log_text: str = "") -> None:
        if status:
            why = self.library.nvrtcGetErrorString(status).decode()
            raise KernelError(
                f"NVRTC {self.version[0]}.{self.version[1]} ({self.path}) {description}: {why}"
                + (f"\n{log_text}" if log_text else "")
            )


@cache
def find(major: int | None = None) -> Nvrtc:
    """Return the NVRTC of this machine: the version of torch if possible, else the newest.

    Args:
        major: required major version of CUDA; None for any.
    """
    failures = []
    for path in _candidates(major):
        try:
            return _open(path)
        except OSError as error:
            failures.append(f"{path}: {error}")
    raise MissingDependency(
        f"no NVRTC{f' for CUDA {major}' if major else ''} was found ({'; '.join(failures)}); install torch for CUDA, "
        "or pip install nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12"
    )


def _candidates(major: int | None) -> list[str]:
    """Return possible paths: files of NVIDIA's packages, and names for the dynamic loader."""
    torch_major = int(torch.version.cuda.split(".")[0]) if torch.version.cuda else None
    majors = [major] if major else list(dict.fromkeys([*([torch_major] if torch_major else []), 13, 12]))
    spec = importlib.util.find_spec("nvidia")
    package_folders = list(spec.submodule_search_locations or []) if spec is not None else []
    paths = []
    for version in majors:
        name = f"libnvrtc.so.{version}"
        for package_folder in package_folders:
            paths += sorted(str(path) for path in Path(package_folder).glob(f"*/lib/{name}"))
        paths += [name, f"/usr/local/cuda/lib64/{name}"]
    return paths


def _open(path: str) -> Nvrtc:
    library = ctypes.CDLL(path)
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_size_t)
    strings = ctypes.POINTER(ctypes.c_char_p)
    for name, arguments in {
        "Version": [ctypes.POINTER(integer)] * 2,
        "GetNumSupportedArchs": [ctypes.POINTER(integer)],
        "GetSupportedArchs": [pointer],
        "CreateProgram": [ctypes.POINTER(pointer), ctypes.c_char_p, ctypes.c_char_p, integer, strings, strings],
        "CompileProgram": [pointer, integer, strings],
        "DestroyProgram": [ctypes.POINTER(pointer)],
        "GetProgramLogSize": [pointer, size],
        "GetProgramLog": [pointer, pointer],
        "GetCUBINSize": [pointer, size],
        "GetCUBIN": [pointer, pointer],
        "GetPTXSize": [pointer, size],
        "GetPTX": [pointer, pointer],
        "GetErrorString": [integer],
    }.items():
        function = getattr(library, f"nvrtc{name}")
        function.argtypes = arguments
        function.restype = integer
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    major, minor, count = integer(), integer(), integer()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    archs = (integer * count.value)()
    library.nvrtcGetSupportedArchs(archs)
    return Nvrtc(path, (major.value, minor.value), tuple(archs), library)


def arch_for(capability: tuple[int, int], archs: Iterable[int]) -> str:
    """Return the architecture to compile for: ``sm_90a`` for capability (9, 0).

    A GPU newer than NVRTC gets PTX of the newest supported architecture.
    """
    major, minor = capability
    number, supported = 10 * major + minor, sorted(archs)
    if number in supported:
        return f"sm_{number}{FAMILIES.get(major, '')}"
    older = [arch for arch in supported if arch < number]
    if not older:
        raise KernelError(f"NVRTC compiles for sm_{supported[0]} and newer, and this GPU is sm_{number}")
    return f"compute_{older[-1]}"


def carried_sources() -> dict[str, str]:
    """Return the device code in the native core, by path relative to csrc."""
    return dict(native().cuda_sources())


def needed(source: str, sources: Mapping[str, str]) -> dict[str, str]:
    """Return ``source`` and all files of ``sources`` that it includes, recursively."""
    files: dict[str, str] = {}
    queue = [source]
    while queue:
        name = queue.pop()
        if name in sources and name not in files:
            files[name] = sources[name]
            queue += re.findall(r'^\s*#\s*include\s*"([^"]+)"', sources[name], re.MULTILINE)
    return dict(sorted(files.items()))


def cache_folder() -> Path:
    """Return the cache folder of compiled kernels: in $XDG_CACHE_HOME, or else in ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "moe_comm" / "kernels"


def kernels(
    arch: str,
    *,
    compiler: Nvrtc | None = None,
    sources: Mapping[str, str] | None = None,
    source: str = SOURCE,
    folder: Path | None = None,
) -> bytes:
    """Return the kernels for ``arch`` (``sm_90a``, or ``compute_90`` for PTX), from the cache or compiled and cached.

    Ranks may call this at the same time: files are written under a temporary name and renamed. A cached file with a
    wrong checksum is ignored. If the folder is not writable, a warning is logged.

    Args:
        compiler, folder: default: ``find()`` and ``cache_folder()``.
        sources, source: files to use instead of the native core's, and the one to compile.
    """
    compiler = compiler or find()
    files = needed(source, sources if sources is not None else carried_sources())
    if source not in files:
        raise MissingDependency(f"this build of moe_comm._C contains no {source}; run `pip install .` again")
    path = (folder or cache_folder()) / _name(files, arch, compiler.version)
    code = _read(path)
    if code is None:
        code = compiler.compile(source, files, arch)
        _write(path, code)
    return code


def _name(files: Mapping[str, str], arch: str, version: tuple[int, int]) -> str:
    """Return the file name, which depends on the source text, the options and the compiler."""
    digest = hashlib.sha256(repr((sorted(files.items()), RUNTIME_OPTIONS, version)).encode()).hexdigest()[:24]
    return f"{arch}-{version[0]}.{version[1]}-{digest}.bin"


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".new")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        log.warning("cannot write compiled kernels to %s (%s); every start compiles them again", path.parent, error)
