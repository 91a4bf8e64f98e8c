"""The parts of ``benchmarks/gpu.sh``: order, commands, environment and limits."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.gpu.sources import ROOT

Kind = Literal["build", "smoke", "measurement", "tests"]
SHORT = ("movement", "ceilings", "products", "fused")
"""Modules with operations of a few seconds. Operations of other modules may compile kernels or fill the memory."""
Family = Literal["", "peer_to_peer", "bulk", "triton", "fused", "linear", "fp8", "layer"]
BEGIN = ("build", "smoke", "ceilings")
PRESETS: dict[str, tuple[str, ...]] = {
    "move": (*BEGIN, "kernel-tests", "dispatch", "few", "bulk", "virtual", "virtual-tests", "hidden", "host"),
    "gemm": (*BEGIN, "gemm-tests", "products", "fused", "triton-tests"),
    "layer": (*BEGIN, "layer-", "host-profile", "check-grads", "gpu-tests", "features"),
    "contract": ("build", "smoke", "contract-"),
}
"""Parts of a preset by the beginning of their names. Each preset takes at most PRESET_S seconds with the build."""
PRESET_S = 360.0
LAYERS = (
    "qwen3-30b-a3b",
    "deepseek-v3-ep8",
    "mixtral-8x7b",
    "deepseek-v3",
    "sonic-16k",
    "qwen3-30b-a3b-32k",
    "deepseek-v3-ep8-32k",
    "mixtral-8x7b-32k",
)
"""Shapes of ``benchmarks.gpu.layers`` that are measured on a GPU."""


@dataclass(frozen=True)
class Part:
    """A command with a limit.

    Args:
        name: unique name.
        limit_s: seconds until the command and its children are killed.
        command: program and arguments.
        kind: ``measurement`` and ``smoke`` append to the results; ``tests`` is a pytest run, which fails if no test
            passed.
        family: kernels that the part needs. After a timeout or a failed smoke check, later parts of it are skipped.
        env: additional environment variables.
        always: runs in every call, because later parts are compared with its results on the same machine.
    """

    name: str
    limit_s: float
    command: tuple[str, ...]
    kind: Kind = "measurement"
    family: Family = ""
    env: Mapping[str, str] = field(default_factory=dict)
    always: bool = False


def parts(results: Path, capability: tuple[int, int], emulated: bool = False) -> list[Part]:
    """Return the parts in the order in which they run.

    Args:
        results: file to which measurements append lines of JSON.
        capability: compute capability of the GPU. The native core is built for this capability only.
        emulated: on a CPU: small sizes, emulated kernels, and Triton's interpreter; the times mean nothing.
    """
    python, found = sys.executable, []
    device = "cpu" if emulated else "cuda"

    def measurement(
        name: str,
        limit_s: float,
        module: str,
        *arguments: str,
        family: Family = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        # The limit of an operation ends before that of its part, so that stacks and name of the operation are recorded.
        inner = f"{0.6 * limit_s if emulated else min(0.6 * limit_s, 20 if module in SHORT else 45):g}"
        command = (python, "-m", f"benchmarks.gpu.{module}", *arguments, "--device", device, "--limit", inner)
        kind: Kind = "smoke" if module == "smoke" else "measurement"
        full = (*command, "--results", str(results))
        found.append(Part(name, limit_s, full, kind, family, env or {}, always=name == "ceilings"))

    def tests(
        name: str,
        limit_s: float,
        *arguments: str,
        family: Family = "",
        test_s: int = 20,
        env: Mapping[str, str] | None = None,
    ) -> None:
        # pytest-timeout cannot interrupt a test that waits in C. faulthandler prints its stacks nevertheless.
        stacks = ("-o", f"faulthandler_timeout={test_s}", "--timeout", str(test_s + 5))
        flags = ("-v", "-p", "no:cacheprovider", *stacks, "--maxfail", "10")
        found.append(Part(name, limit_s, (python, "-m", "pytest", *flags, *arguments), "tests", family, env or {}))

    if emulated:
        small = ("--hidden", "128", "--experts", "16", "--top-k", "4", "--iterations", "2", "--warmup", "1")
        interpreted = {"TRITON_INTERPRET": "1"}
        limit_s = 300  # a part takes 3 to 13 s on an idle core, and several times as long on a busy machine
        measurement("smoke", limit_s, "smoke", env=interpreted)
        measurement("ceilings", limit_s, "ceilings")
        measurement("dispatch", limit_s, "movement", "dispatch", "--tokens", "32", *small, family="peer_to_peer")
        measurement("nccl", limit_s, "movement", "nccl", "--tokens", "32", *small)
        measurement("few", limit_s, "movement", "few", "--tokens", "1", "8", *small, family="peer_to_peer")
        measurement("bulk", limit_s, "movement", "bulk", "--tokens", "32", *small, family="bulk")
        measurement("virtual", limit_s, "movement", "virtual", "--tokens", "32", *small, family="peer_to_peer")
        measurement("host", limit_s, "movement", "host", "--tokens", "8", *small, family="peer_to_peer")
        measurement("hidden", limit_s, "hidden", family="triton", env=interpreted)
        measurement("products", limit_s, "products", family="triton", env=interpreted)
        measurement("fused", limit_s, "fused", family="triton", env=interpreted)
        measurement("layer-small", limit_s, "layers", "small", family="layer")
        measurement("host-profile-small", limit_s, "host_profile", "small", family="layer")
        tests("kernel-tests", limit_s, "tests/gpu_emulated/test_operations.py", family="peer_to_peer", test_s=120)
        return found

    # From Hopper on, the suffix "a" enables the instructions that exist on this architecture only.
    arch = "".join(map(str, capability)) + ("a-real" if capability[0] >= 9 else "-real")
    build = {"MOE_COMM_CUDA": "on", "MOE_COMM_CUDA_ARCHS": arch}
    found.append(Part("build", 240, (python, "setup.py", "build_ext", "--inplace"), "build", "", build))
    measurement("smoke", 75, "smoke")
    measurement("ceilings", 45, "ceilings")
    tests("kernel-tests", 60, "tests/gpu/test_kernels_on_gpu.py", "-k", "nvcc", family="peer_to_peer")
    measurement("dispatch", 90, "movement", "dispatch", family="peer_to_peer")
    measurement("nccl", 45, "movement", "nccl")
    measurement("few", 60, "movement", "few", family="peer_to_peer")
    if capability >= (9, 0):
        measurement("bulk", 60, "movement", "bulk", family="bulk")
    # Loading a kernel may wait for running kernels, and streams must not share a hardware queue.
    together = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    measurement("virtual", 60, "movement", "virtual", family="peer_to_peer", env=together)
    # Each GEMM in CUDA C++ against Triton and float64, before their rates. Those that have never run on a GPU are in
    # processes of their own, because an error of a kernel ends the use of CUDA in its process.
    in_cuda = {"MOE_COMM_GEMM": "cuda"}
    of_rows, of_weights = "tests/gpu/test_gemm.py", "tests/gpu/test_weight_gemm.py"
    others = "not fused and not linear and not e4m3"
    tests("gemm-tests", 60, of_rows, of_weights, "-m", "gpu", "-k", others, family="triton", test_s=30, env=in_cuda)
    tests("gemm-tests-fused", 45, of_rows, "-m", "gpu", "-k", "fused", family="fused", env=in_cuda)
    tests("gemm-tests-linear", 45, of_rows, "-m", "gpu", "-k", "linear", family="linear", env=in_cuda)
    tests("gemm-tests-fp8", 45, of_rows, "-m", "gpu", "-k", "e4m3", family="fp8", env=in_cuda)
    executor = "tests/gpu/test_device_executor_on_gpu.py"
    tests("gemm-tests-executor", 75, executor, "-m", "gpu", "-k", "1-1024 or 2-1024", family="linear", test_s=30,
          env=in_cuda)  # fmt: skip
    measurement("hidden", 75, "hidden", family="triton")
    measurement("products", 90, "products", family="triton")
    measurement("fused", 60, "fused", family="fused", env=in_cuda)
    for shape in LAYERS:
        measurement(f"layer-{shape}", 75, "layers", shape, family="layer")
    measurement("host-profile-qwen3-30b-a3b", 45, "host_profile", "qwen3-30b-a3b", family="layer")
    measurement("host", 45, "movement", "host", family="peer_to_peer")
    check_grads = (python, "-m", "moe_comm", "check-grads", "--ranks", "1", "--device", "cuda")
    found.append(Part("check-grads", 45, check_grads, "measurement", "layer"))
    tests("triton-tests", 120, "tests/gpu/test_triton_on_gpu.py", "tests/gpu/test_triton_around.py", family="triton",
          test_s=60)  # fmt: skip
    features = "tests/gpu/test_features_on_gpu.py"
    names = "device_call", "lending", "peer_to_peer"
    first = tuple(f"tests/gpu/test_{name}_on_gpu.py" for name in names)  # have never run
    elsewhere = ("tests/gpu/test_resources.py", features, of_rows, of_weights)  # the last three are other parts
    paths = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    rest = [path for path in paths if path not in (*first, *elsewhere) and "/test_triton_" not in path]
    tests("gpu-tests", 120, *first, *rest, "-m", "gpu and not slow", family="peer_to_peer", test_s=45)
    tests("features", 240, features, family="layer", test_s=110)
    virtual = "tests/gpu_emulated/test_virtual_ranks.py"
    tests("virtual-tests", 60, virtual, family="peer_to_peer", test_s=40, env=together)
    contract = ("tests/dispatch/test_contract.py", "--device", "cuda", "-k")
    shared = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    tests("contract-peer-to-peer", 200, *contract, "peer_to_peer", family="peer_to_peer", test_s=40, env=shared)
    tests("contract-others", 300, *contract, "not shared_memory and not peer_to_peer", test_s=40)
    return found
