"""Device code is compiled at run time without a GPU, cached on disk, and launched with correct driver calls."""

from __future__ import annotations

import ctypes
import json
import re
import struct
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks.cuda_resources import read_tree
from moe_comm.errors import ConfigError, KernelError
from moe_comm.gpu import launch, nvrtc
from moe_comm.gpu.arguments import kernel_fields
from moe_comm.gpu.blocks import single_block
from moe_comm.gpu.nvrtc import Nvrtc
from moe_comm.gpu.operations import GroupOperations
from moe_comm.gpu.protocol import HEADER_WORDS, NOTHING, GroupShape
from tests.gpu.fake_driver import launches

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
RECORDED = ROOT / "benchmarks" / "results" / "cuda-resources.json"
FILES = {
    "cuda/add.cu": '#include "cuda/words.h"\n'
    'extern "C" __global__ void p2p_add(const __grid_constant__ Words w) { *(long long*)w.at = w.a + w.b; }\n',
    "cuda/words.h": "#pragma once\nstruct Words { long long at, a, b; };\n",
    "cuda/other.h": "never included\n",
}


@pytest.fixture(scope="module")
def compiler() -> Nvrtc:
    return nvrtc.find()  # installed by the extra "dev", and by torch for CUDA


class Counting:
    """A fake NVRTC that counts compilations."""

    version = (13, 0)

    def __init__(self) -> None:
        self.compiled = 0

    def compile(self, source: str, headers: dict[str, str], arch: str) -> bytes:
        self.compiled += 1
        return f"{arch} {sorted(headers)}".encode()


def compile_cached(folder: Path, compiler: object, files: dict[str, str] = FILES, arch: str = "sm_90a") -> bytes:
    return nvrtc.kernels(arch, compiler=compiler, sources=files, source="cuda/add.cu", folder=folder)  # type: ignore[arg-type]


SLOW = pytest.mark.slow


MOST_SPILLED, MARGIN = 16, 8
"""Bytes of stack that NVRTC may use where nvcc uses none, and tolerance in registers."""


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_80", marks=SLOW), pytest.param("sm_100a", marks=SLOW)])
def test_our_kernels_compile_without_a_gpu_and_use_as_much_as_recorded(
    compiler: Nvrtc, arch: str, tmp_path: Path
) -> None:
    sources = read_tree(CSRC)
    code = nvrtc.kernels(arch, compiler=compiler, sources=sources, folder=tmp_path)
    assert code.startswith(b"\x7fELF")
    names = re.findall(r"^MOE_P2P_KERNEL\((\w+),", sources[nvrtc.SOURCE], re.MULTILINE)
    assert len(names) > 5
    for name in names:
        assert f"p2p_{name}\0".encode() in code, name
    path = tmp_path / "code.cubin"
    path.write_bytes(code)
    command = [pytest.importorskip("triton").knobs.nvidia.cuobjdump.path, "-res-usage", path]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    used = {name: (int(a), int(b)) for name, a, b in re.findall(r"Function p2p_(\w+):\s+REG:(\d+) STACK:(\d+)", shown)}
    rows = [row for row in json.loads(RECORDED.read_text())["results"] if row["target"] == arch]
    recorded = {row["kernel"]: row for row in rows if not row["kernel"].startswith("gemm_")}  # of another file
    assert used.keys() == recorded.keys() == set(names)
    for name, (registers, stack) in used.items():
        assert registers <= recorded[name]["registers"] + MARGIN and stack <= MOST_SPILLED, (name, registers, stack)


def test_the_native_core_contains_the_current_device_sources() -> None:
    pytest.importorskip("moe_comm._C", reason="the native core is not built")
    carried = nvrtc.needed(nvrtc.SOURCE, nvrtc.carried_sources())
    assert carried == nvrtc.needed(nvrtc.SOURCE, read_tree(CSRC)), "rebuild the native core"
    names = re.findall(r"^MOE_P2P_KERNEL\((\w+),", carried[nvrtc.SOURCE], re.MULTILINE)
    assert set(names) == kernel_fields().keys()


def test_ptx_serves_a_gpu_newer_than_the_compiler(compiler: Nvrtc) -> None:
    arch = nvrtc.arch_for((99, 0), compiler.archs)
    assert arch == f"compute_{max(compiler.archs)}"
    assert b".visible .entry p2p_add" in compiler.compile("cuda/add.cu", FILES, arch)


def test_the_compiler_log_is_in_the_error(compiler: Nvrtc) -> None:
    broken = FILES | {"cuda/words.h": "struct Words { long long at, a; };\n"}
    with pytest.raises(KernelError, match=r'could not compile cuda/add.cu for sm_90a(.|\n)*has no member "b"'):
        compiler.compile("cuda/add.cu", broken, "sm_90a")
    with pytest.raises(KernelError, match=r"cuda/add.cu for sm_1"):
        compiler.compile("cuda/add.cu", FILES, "sm_1")


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 9), "compute_103")],
)
def test_a_gpu_gets_code_of_its_own_generation(capability: tuple[int, int], arch: str) -> None:
    assert nvrtc.arch_for(capability, (103, 80, 89, 90, 100)) == arch


def test_a_gpu_that_is_too_old_is_refused() -> None:
    with pytest.raises(KernelError, match=r"sm_80 and newer, and this GPU is sm_70"):
        nvrtc.arch_for((7, 0), (80, 90))


def test_kernels_are_compiled_once_and_again_when_anything_changes(tmp_path: Path) -> None:
    counting = Counting()
    first = compile_cached(tmp_path, counting)
    assert first == b"sm_90a ['cuda/add.cu', 'cuda/words.h']"
    assert compile_cached(tmp_path, counting) == first
    assert compile_cached(tmp_path, counting, FILES | {"cuda/other.h": "changed"}) == first, "other.h is not included"
    assert counting.compiled == 1
    compile_cached(tmp_path, counting, FILES | {"cuda/words.h": FILES["cuda/words.h"] + "// changed\n"})
    compile_cached(tmp_path, counting, arch="sm_80")
    counting.version = (13, 1)
    compile_cached(tmp_path, counting)
    assert counting.compiled == 4
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("damage", [lambda whole: whole[:-1], lambda whole: b"", lambda whole: whole + b"x"])
def test_a_damaged_file_is_compiled_again(tmp_path: Path, damage: object) -> None:
    counting = Counting()
    code = compile_cached(tmp_path, counting)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert compile_cached(tmp_path, counting) == code
    assert counting.compiled == 2
    assert compile_cached(tmp_path, counting) == code
    assert counting.compiled == 2


def test_concurrent_compilations_leave_one_complete_file(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    class Slow(Counting):
        def compile(self, source: str, headers: dict[str, str], arch: str) -> bytes:
            barrier.wait(120)
            return b"x" * 100_000

    with ThreadPoolExecutor(8) as threads:
        codes = list(threads.map(lambda _: compile_cached(tmp_path, Slow()), range(8)))
    assert set(codes) == {b"x" * 100_000}
    assert [path.suffix for path in tmp_path.iterdir()] == [".bin"]


def test_a_folder_that_is_not_writable_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert compile_cached(tmp_path / "file" / "kernels", Counting()).startswith(b"sm_90a")
    assert "compiles them again" in caplog.text


def test_the_cache_folder_follows_xdg_cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert nvrtc.cache_folder() == tmp_path / "moe_comm" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the XDG specification says to ignore relative paths
    assert nvrtc.cache_folder() == Path.home() / ".cache" / "moe_comm" / "kernels"


# --- the driver, simulated by a library that records its calls (fake_driver.c) ---

GROUP_WORDS = (
    "world",
    "rank",
    "experts",
    "local_experts",
    "peers_at",
    "offsets_at",
    "state_at",
    "report_at",
    "abort_at",
    "timeout_ns",
)
WORDS = dict.fromkeys(GROUP_WORDS, 0)
"""The arguments of the kernel ``done``."""
READY_WORDS = {**WORDS, "tokens": 0, "top_k": 0, "place_at": 0}
"""The arguments of the kernel ``ll_ready``."""


def launcher(driver_api: launch.Driver, device: int = 0, code: bytes = b"code!") -> launch.NvrtcLauncher:
    return launch.NvrtcLauncher(torch.device("cuda", device), code=code, driver=driver_api)


def test_a_launch_passes_its_arguments_to_the_driver_in_order(fake_driver: tuple[launch.Driver, ctypes.CDLL]) -> None:
    driver_api, library = fake_driver
    cuda_launcher = launcher(driver_api)
    assert library.fake_loaded() == b"code!"
    cuda_launcher.launch("done", 7, 256, 1024, 99, {**WORDS, "timeout_ns": -3, "world": 1 << 40, "rank": 2})
    cuda_launcher.launch("ll_ready", 1, 32, 0, 0, READY_WORDS)
    cuda_launcher.launch("ll_ready", 0, 32, 0, 0, READY_WORDS)
    first, second = launches(library)  # a launch with an empty grid is skipped
    assert (first.function, first.grid, first.block, first.shared, first.stream) == (ord("e"), 7, 256, 1024, 99)
    assert struct.unpack("10q", bytes(first.words[:80])) == (1 << 40, 2, *[0] * 7, -3)
    assert (second.function, second.grid, second.block) == (ord("y"), 1, 32)


def test_launches_use_the_context_of_their_device_and_restore_the_threads_context(
    fake_driver: tuple[launch.Driver, ctypes.CDLL],
) -> None:
    driver_api, library = fake_driver
    launchers = [launcher(driver_api, 0), launcher(driver_api, 3)]

    def launch_all() -> int | None:
        current = ctypes.c_void_p()
        driver_api.set_context(ctypes.c_void_p(1000))
        for device_launcher in launchers:
            device_launcher.launch("done", 1, 1, 0, 0, WORDS)
        driver_api.get_context(ctypes.byref(current))
        return current.value

    thread = threading.Thread(target=lambda: launchers[1].launch("done", 1, 1, 0, 0, WORDS))
    thread.start()
    thread.join(120)
    assert launch_all() == 1000
    assert [launch.context for launch in launches(library)] == [1003, 1000, 1003]


def test_more_shared_memory_than_the_default_is_requested_once(
    fake_driver: tuple[launch.Driver, ctypes.CDLL],
) -> None:
    driver_api, library = fake_driver
    cuda_launcher = launcher(driver_api)
    for shared in (48 * 1024, 100_000, 60_000, 100_000, 200_000):
        cuda_launcher.launch("done", 1, 32, shared, 0, WORDS)
    count = ctypes.c_int()
    attributes = library.fake_attributes(ctypes.byref(count))
    assert [attributes[3 * i + 2] for i in range(count.value)] == [100_000, 200_000]
    assert [launch.shared for launch in launches(library)] == [48 * 1024, 100_000, 60_000, 100_000, 200_000]


def test_the_kernels_of_an_operation_are_launched_through_the_driver(
    fake_driver: tuple[launch.Driver, ctypes.CDLL],
) -> None:
    driver_api, library = fake_driver
    operations = GroupOperations(
        GroupShape(0, (0, 2)), single_block(1 << 16, torch.device("cpu")), launcher(driver_api, device=2)
    )
    operations.begin(7.0)
    operations.meet(bytes(8 * HEADER_WORDS), NOTHING)
    operations.plan.receive_few(1, 0)
    meet, arrive = launches(library)
    assert (meet.function, meet.grid, meet.block) == (ord("t"), 1, 1024) and arrive.function == ord("e")
    for call in (meet, arrive):
        assert call.context == 1002 and struct.unpack("10q", bytes(call.words[:80]))[-1] == 7 * 10**9
    library.fake_refuse_next()
    with pytest.raises(KernelError, match="cuLaunchKernel with error 700"):
        operations.meet(bytes(8 * HEADER_WORDS), NOTHING)
    assert operations.turn == 1


def test_an_error_of_the_driver_is_raised_with_its_text(fake_driver: tuple[launch.Driver, ctypes.CDLL]) -> None:
    driver_api, library = fake_driver
    cuda_launcher = launcher(driver_api)
    library.fake_refuse_next()
    with pytest.raises(KernelError, match=r"cuLaunchKernel with error 700 \(CUDA_ERROR_ILLEGAL_ADDRESS: in words\)"):
        cuda_launcher.launch("done", 1, 1, 0, 0, WORDS)
    with pytest.raises(ConfigError, match="missing words"):
        cuda_launcher.launch("done", 1, 1, 0, 0, {"world": 0})
    cuda_launcher.launch("done", 1, 1, 0, 0, WORDS)
    library.fake_lose(b"p2p_spread")
    with pytest.raises(KernelError, match="cuModuleGetFunction"):
        launcher(driver_api)
    assert len(launches(library)) == 1


def test_a_missing_cuda_driver_raises() -> None:
    with pytest.raises(KernelError, match="there is no CUDA driver"):
        launch.Driver("libcuda-that-is-not-there.so.1")
