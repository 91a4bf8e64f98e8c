"""Device code compiled at run time by NVRTC, for machines where nobody compiled it before: no nvcc, no headers.

    text in moe_comm._C ──NVRTC──▸ cubin for this GPU ──▸ ~/.cache/moe_comm/kernels ──▸ the driver (``driver.py``)

NVRTC is one library, which torch for CUDA depends on and so has installed; the driver is the machine's own. Compiling
needs no GPU, only loading does.
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

log = logging.getLogger(__name__)

SOURCE = "cuda/kernels.cu"
"""Below csrc: the file with the kernels; it includes the others."""
OPTIONS = ("--std=c++17", "--fmad=false")
"""As nvcc is given when the module is built: a * b + c rounds twice, as on the CPU."""
FAMILIES = {9: "a", 10: "a", 12: "a"}
"""By major compute capability: the suffix that opens what only this generation has."""
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class Nvrtc:
    """One NVRTC. version: (13, 0) for CUDA 13.0. archs: compute capabilities it compiles for, 90 for 9.0."""

    path: str
    version: tuple[int, int]
    archs: tuple[int, ...]
    library: ctypes.CDLL

    def compile(self, source: str, headers: Mapping[str, str], arch: str, options: Sequence[str] = OPTIONS) -> bytes:
        """Machine code for ``sm_..``; PTX, which the driver translates, for ``compute_..``.

        Args:
            source: name in ``headers`` of the file to compile.
            headers: all files, by the names that #include has.

        Raises:
            KernelError: with the compiler's words.
        """
        names = [name for name in headers if name != source]
        texts = (ctypes.c_char_p * len(names))(*(headers[name].encode() for name in names))
        includes = (ctypes.c_char_p * len(names))(*(name.encode() for name in names))
        program = ctypes.c_void_p()
        self._check(
            self.library.nvrtcCreateProgram(
                ctypes.byref(program), headers[source].encode(), source.encode(), len(names), texts, includes
            ),
            f"could not take {source}",
        )
        try:
            flags = [f"--gpu-architecture={arch}", *options]
            given = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
            if status := self.library.nvrtcCompileProgram(program, len(flags), given):
                said = self._bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
                self._check(status, f"could not compile {source} for {arch}", said)
            return self._bytes(program, "CUBIN" if arch.startswith("sm_") else "PTX")
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"has no {what}")
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.library, f"nvrtcGet{what}")(program, buffer), f"has no {what}")
        return buffer.raw

    def _check(self, status: int, description: str, said: str = "") -> None:
        if status:
            why = self.library.nvrtcGetErrorString(status).decode()
            raise KernelError(
                f"NVRTC {self.version[0]}.{self.version[1]} ({self.path}) {description}: {why}"
                + (f"\n{said}" if said else "")
            )


@cache
def find(major: int | None = None) -> Nvrtc:
    """The NVRTC of this machine: torch's own version first, else the newest.

    Args:
        major: of CUDA, that it must have; None: any.

    Raises:
        MissingDependency: none is there.
    """
    tried = []
    for path in _candidates(major):
        try:
            return _open(path)
        except OSError as error:
            tried.append(f"{path}: {error}")
    raise MissingDependency(
        f"no NVRTC{f' for CUDA {major}' if major else ''} was found ({'; '.join(tried)}); torch for CUDA brings "
        "it, and so does pip install nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12"
    )


def _candidates(major: int | None) -> list[str]:
    """Where it may be: files of NVIDIA's packages, and what the loader finds by name."""
    torch_major = int(torch.version.cuda.split(".")[0]) if torch.version.cuda else None
    majors = [major] if major else list(dict.fromkeys([*([torch_major] if torch_major else []), 13, 12]))
    spec = importlib.util.find_spec("nvidia")
    homes = list(spec.submodule_search_locations or []) if spec is not None else []
    found = []
    for wanted in majors:
        name = f"libnvrtc.so.{wanted}"
        for home in homes:
            found += sorted(str(path) for path in Path(home).glob(f"*/lib/{name}"))
        found.append(name)
        found.append(f"/usr/local/cuda/lib64/{name}")
    return found


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
    """What to compile for a GPU of this compute capability: ``sm_90a`` for (9, 0).

    A GPU newer than NVRTC gets PTX of the newest that it knows.

    Raises:
        KernelError: a GPU older than anything it compiles for.
    """
    major, minor = capability
    number, known = 10 * major + minor, sorted(archs)
    if number in known:
        return f"sm_{number}{FAMILIES.get(major, '')}"
    older = [arch for arch in known if arch < number]
    if not older:
        raise KernelError(f"NVRTC compiles for sm_{known[0]} and newer, and this GPU is sm_{number}")
    return f"compute_{older[-1]}"


def carried_sources() -> dict[str, str]:
    """The device code in the native core, by path below csrc.

    Raises:
        MissingDependency: there is no native core, or it is older than these kernels.
    """
    try:
        from moe_comm import _C  # here because it may not be built
    except ImportError as error:
        raise MissingDependency(f"the native core moe_comm._C is not built ({error}); run `pip install .`") from error
    if not hasattr(_C, "cuda_sources"):
        raise MissingDependency("this build of moe_comm._C carries no device code; run `pip install .` again")
    return dict(_C.cuda_sources())


def needed(source: str, sources: Mapping[str, str]) -> dict[str, str]:
    """``source`` and what it includes of ``sources``, however deep."""
    found: dict[str, str] = {}
    wanted = [source]
    while wanted:
        name = wanted.pop()
        if name in sources and name not in found:
            found[name] = sources[name]
            wanted += re.findall(r'^\s*#\s*include\s*"([^"]+)"', sources[name], re.MULTILINE)
    return dict(sorted(found.items()))


def cache_folder() -> Path:
    """Where compiled kernels are kept, as XDG says: below $XDG_CACHE_HOME, else ~/.cache."""
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
    """The kernels for ``arch``: from disk if they were compiled before, else compiled and left there.

    Ranks may call it at the same time: each file is written under a name of its own and renamed. A file with other
    bytes than were written counts as none; a folder that cannot be written to is a notice.

    Args:
        arch: ``sm_90a``, or ``compute_90`` for PTX.
        sources: other files than the native core's; the one called ``source`` is compiled.
        folder: instead of ``cache_folder()``.

    Raises:
        KernelError: NVRTC refuses.
        MissingDependency: no NVRTC, or no native core.
    """
    compiler = compiler or find()
    given = needed(source, sources if sources is not None else carried_sources())
    if source not in given:
        raise MissingDependency(f"this build of moe_comm._C carries no {source}; run `pip install .` again")
    path = (folder or cache_folder()) / _name(given, arch, compiler.version)
    code = _read(path)
    if code is None:
        code = compiler.compile(source, given, arch)
        _write(path, code)
    return code


def _name(files: Mapping[str, str], arch: str, version: tuple[int, int]) -> str:
    """Of the file on disk; other text, options or compiler: another file."""
    digest = hashlib.sha256(repr((sorted(files.items()), OPTIONS, version)).encode()).hexdigest()[:24]
    return f"{arch}-{version[0]}.{version[1]}-{digest}.bin"


def _read(path: Path) -> bytes | None:
    try:
        whole = path.read_bytes()
    except OSError:
        return None
    digest, code = whole[:_DIGEST_BYTES], whole[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, fresh = tempfile.mkstemp(dir=path.parent, suffix=".new")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(fresh, path)
        except BaseException:
            os.unlink(fresh)
            raise
    except OSError as error:
        log.warning("compiled kernels cannot be kept in %s (%s); every start compiles them again", path.parent, error)
