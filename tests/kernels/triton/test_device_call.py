"""A layer on one GPU, whose row counts stay on the device, has the bits of dispatch, experts and combine."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import checkpoint

from moe_comm.dispatch import device_call, device_layer
from moe_comm.dispatch.backends.local import LocalDispatcher
from moe_comm.dispatch.slots.capacity import Capacity
from moe_comm.dispatch.types import DispatchOptions, PeerToPeerOptions
from moe_comm.errors import HeapError, InputError, KernelError, RoutingError
from moe_comm.gpu.record import BufferIndex
from moe_comm.kernels import expert_mlp_gpu, native, recording, tensor_cores
from moe_comm.kernels.activations import activation_of
from moe_comm.layers.moe import whole_call
from moe_comm.layers.moe.config import MoEConfig
from moe_comm.layers.moe.experts import Experts
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.moe.router import Router, RouterConfig, Routing
from moe_comm.layers.moe.shared import SharedExpert
from moe_comm.overlap.options import Overlap
from moe_comm.topology import ExpertPlacement
from tests.kernels.triton.common import drawn, kernels, needed_kernels, some_ids
from tests.overlap.triton.common import needs_triton
from tests.pool import on_ranks
from tests.support.gemm_model import COMPILER, model_gemm
from tests.support.python_driver import CONTEXT, PythonDriver

pytestmark = needs_triton
HIDDEN, FFN, EXPERTS, TOKENS, TOP_K = 16, 16, 5, 9, 2
FORWARD = ["linear_kernel", "route_kernel", "count_chunks_kernel", "place_slots_kernel", "take_rows_kernel",
           "grouped_mm_tma_kernel", "swiglu_kernel", "grouped_mm_tma_kernel", "weighted_sum_kernel"]  # fmt: skip
BACKWARD = ["take_rows_kernel", "grouped_mm_tma_kernel", "weighted_swiglu_backward_kernel",
            "grouped_weight_grad_kernel", "grouped_mm_tma_kernel", "weighted_sum_kernel", "take_rows_kernel",
            "grouped_weight_grad_kernel", "route_backward_kernel", "linear_backward_kernel"]  # fmt: skip
FROZEN = ["take_rows_kernel", "take_rows_kernel", "grouped_mm_tma_kernel", "grouped_mm_tma_kernel",
          "weighted_swiglu_backward_kernel", "grouped_weight_grad_kernel", "grouped_mm_tma_kernel",
          "weighted_sum_kernel", *BACKWARD[8:]]  # fmt: skip
GPT_OSS = {"bias": True, "activation": "clamped_swiglu"}
WITH_BIASES = [*BACKWARD[:3], "add_bias_dots_kernel", BACKWARD[3], "take_rows_kernel", "sum_rows_kernel",
               "sum_rows_kernel", *BACKWARD[4:]]  # fmt: skip
STREAM = 77
OF_GPU = 3
"""Frames of ``repeats`` and ``current_stream``, which the emulation replaces."""
ALLOCATING = {f"aten::{name}" for name in ("empty", "view", "_unsafe_view", "detach", "reshape")}


def layer(dtype: torch.dtype = torch.bfloat16, **settings: Any) -> MoELayer:
    router = Router(HIDDEN, RouterConfig(EXPERTS, TOP_K), dtype=dtype)
    experts = Experts(EXPERTS, HIDDEN, FFN, dtype=dtype, **settings)
    built = MoELayer(router, experts, LocalDispatcher(ExpertPlacement.balanced(EXPERTS, 1)))
    router.reset_parameters(std=1.0, generator=torch.Generator().manual_seed(0))
    experts.reset_parameters(1, std=0.3)
    fill_biases(experts)
    return built


def fill_biases(experts: Experts) -> None:
    for seed, bias in enumerate((experts.b13, experts.b2)):
        if bias is not None:
            bias.data.copy_(drawn(*bias.shape, seed=seed))


def passes(built: MoELayer, x_TD: Tensor, routing: Routing | None = None) -> list[Tensor]:
    """Return output, gradients, and load of the layer."""
    x_TD = x_TD.detach().requires_grad_()
    built.zero_grad(set_to_none=True)
    built.router.load_E.zero_()
    y_TD = built(x_TD, routing)
    y_TD.backward(drawn(*y_TD.shape, dtype=y_TD.dtype, seed=3))
    grads = [x_TD.grad, *(p.grad for p in built.parameters() if p.grad is not None)]
    if routing is not None and routing.weights_TK.requires_grad:
        grads.append(routing.weights_TK.grad)
        routing.weights_TK.grad = None
    return [y_TD.detach(), *(grad for grad in grads if grad is not None), built.router.load_E.clone()]


@on_ranks(1)
def test_logits_agree_with_float64_and_do_not_depend_on_the_batch() -> None:
    linear = kernels("linear").linear
    for dtype in (torch.bfloat16, torch.float16):
        for rows, columns, inner in ((70, 33, 40), (5, 16, 64), (0, 3, 8), (3, 0, 8)):
            rows_RD = drawn(rows, inner + 3, dtype=dtype)[:, :inner]
            w_ND = drawn(inner, columns, dtype=dtype, seed=1).t()
            out_RN = linear(rows_RD, w_ND)
            torch.testing.assert_close(out_RN, (rows_RD.double() @ w_ND.double().T).float())
            assert torch.equal(linear(rows_RD[2:4], w_ND), out_RN[2:4])
    with pytest.raises(InputError, match="needs 16-bit rows"):
        linear(drawn(2, 3), drawn(4, 3))


@on_ranks(1)
def test_gradients_of_logits_agree_with_float64_and_do_not_depend_on_the_batch() -> None:
    both, linear_gradients = (True, True), kernels("linear").linear_gradients
    for dtype in (torch.bfloat16, torch.float16):
        for rows, experts, hidden in ((150, 33, 40), (5, 16, 64), (0, 3, 8), (3, 5, 0)):
            grad_TE = drawn(rows, experts + 2)[:, :experts] * 1e-3
            w_ED = drawn(hidden, experts, dtype=dtype, seed=1).t()
            x_TD = drawn(rows, hidden + 3, dtype=dtype, seed=2)[:, :hidden]
            grad_x_TD, grad_ED = linear_gradients(grad_TE, x_TD, w_ED, both)
            # As the products of fp32 operands, rounded once; one unit in the last place for sums in another order.
            tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-7}
            torch.testing.assert_close(grad_x_TD, (grad_TE.double() @ w_ED.double()).to(dtype), **tolerance)
            torch.testing.assert_close(grad_ED, (grad_TE.double().T @ x_TD.double()).to(dtype), **tolerance)
            of_rows, none = linear_gradients(grad_TE[2:4], x_TD[2:4], w_ED, (True, False))
            assert torch.equal(of_rows, grad_x_TD[2:4]) and none is None
            none, of_weights = linear_gradients(grad_TE, x_TD, w_ED, (False, True))
            assert torch.equal(of_weights, grad_ED) and none is None
    with pytest.raises(InputError, match="needs 16-bit tokens and weights"):
        linear_gradients(drawn(2, 4), drawn(2, 3), drawn(4, 3), both)


def saved_bytes(built: MoELayer, x_TD: Tensor) -> int:
    """Return the bytes of the tensors that autograd saves, except parameters."""
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y_TD = built(x_TD.detach().requires_grad_())
    assert y_TD.requires_grad
    return sum(size for address, size in saved.items() if address not in {p.data_ptr() for p in built.parameters()})


def stop(*_: Any) -> None:
    raise AssertionError("the CPU read a tensor of the device")


@on_ranks(1)
def test_a_layer_never_waits_for_counts_and_has_the_same_bits() -> None:
    kernels("device")
    weights_TK = torch.rand(TOKENS, TOP_K, generator=torch.Generator().manual_seed(4)).requires_grad_()
    given = Routing(some_ids(TOKENS, TOP_K, EXPERTS), weights_TK)
    x_TD = drawn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    native.TRITON_DEVICES.add("cpu")
    try:
        for routing in (None, given):
            for settings, recompute in (({}, False), ({"transposed": True}, True), (GPT_OSS, False)):
                built = layer(**settings)
                built.experts.recompute = recompute
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(Experts, "is_uncounted", lambda *_: False)
                    expected, stats = passes(built, x_TD, routing), built.dispatch_stats
                actual, launched = needed_kernels(lambda b=built, r=routing: passes(b, x_TD, r), stop)
                assert all(map(torch.equal, expected, actual)) and len(expected) == len(actual)
                assert built.dispatch_stats == stats
                if routing is None:
                    assert recompute or launched == FORWARD + (WITH_BIASES if settings else BACKWARD)
                    assert saved_bytes(built, x_TD) == TOKENS * (
                        2 * HIDDEN + TOP_K * (0 if recompute else 4 * FFN)  # x, h
                        + 4 * EXPERTS + TOP_K * (8 + 4)  # logits, ids, weights
                    )  # fmt: skip
    finally:
        native.TRITON_DEVICES.discard("cpu")


@on_ranks(1)
def test_other_activations_frozen_experts_and_fp16_have_the_same_bits() -> None:
    kernels("device")
    native.TRITON_DEVICES.add("cpu")
    half, first, second = torch.float16, ("w13",), ("router.weight", "w13")
    try:
        cases = (({"activation": "geglu", "bias": True}, (), False), ({"activation": "relu2"}, second, True),
                 ({}, first, False), ({}, ("w2",), True), ({"dtype": half}, (), True), ({}, second, False),
                 ({**GPT_OSS, "dtype": half}, (), True), (GPT_OSS, ("w13", "b13", "w2"), True),
                 ({"bias": True}, ("w13", "w2", "b2", "router.weight"), False))  # fmt: skip
        for settings, frozen, with_routing in cases:
            built = layer(**settings)
            for name, p in built.named_parameters():
                p.requires_grad_(not name.endswith(frozen))
            x_TD = drawn(TOKENS, HIDDEN, dtype=built.experts.w2.dtype)
            routing = Routing(some_ids(TOKENS, TOP_K, EXPERTS), torch.full((TOKENS, TOP_K), 0.3))
            given = routing if with_routing else None
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Experts, "is_uncounted", lambda *_: False)
                expected = passes(built, x_TD, given)
            actual = passes(built, x_TD, given)
            assert all(map(torch.equal, expected, actual)) and len(expected) == len(actual), (settings, frozen)
            y_TD = built(x_TD)  # no gradient of x
            y_TD.sum().backward()
    finally:
        native.TRITON_DEVICES.discard("cpu")


FUSED_FORWARD = ["linear_kernel", "route_kernel", "count_chunks_kernel", "place_slots_kernel", "weighted_sum_kernel"]
FUSED_BACKWARD = ["take_rows_kernel", "add_sections_kernel", "weighted_sum_kernel", "take_rows_kernel",
                  "route_backward_kernel", "linear_backward_kernel"]  # fmt: skip


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@on_ranks(1)
def test_a_layer_runs_on_the_fused_kernels_for_hopper_in_their_model() -> None:
    kernels("device")
    built, x_TD = layer(), drawn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    weights_TK = torch.rand(TOKENS, TOP_K, generator=torch.Generator().manual_seed(4)).requires_grad_()
    given = Routing(some_ids(TOKENS, TOP_K, EXPERTS), weights_TK)
    native.TRITON_DEVICES.add("cpu")
    try:
        expected = [passes(built, x_TD, routing) for routing in (None, given)]
        with pytest.MonkeyPatch.context() as patch:
            model = model_gemm()
            patch.setenv(tensor_cores.GEMM, "cuda")
            patch.setattr(tensor_cores, "launcher_for", lambda rows_RD, kernel: model)
            actual, launched = needed_kernels(lambda: [passes(built, x_TD, routing) for routing in (None, given)], stop)
            assert launched[: len(FUSED_FORWARD + FUSED_BACKWARD)] == FUSED_FORWARD + FUSED_BACKWARD
            for built.experts.recompute, frozen in ((True, ()), (False, ("w2",)), (False, ("w13", "router.weight"))):
                for name, p in built.named_parameters():
                    p.requires_grad_(not name.endswith(frozen))
                actual.append(passes(built, x_TD, given))
                patch.setattr(tensor_cores, "launcher_for", lambda rows_RD, kernel: None)
                expected.append(passes(built, x_TD, given))
                patch.setattr(tensor_cores, "launcher_for", lambda rows_RD, kernel: model)
    finally:
        native.TRITON_DEVICES.discard("cpu")
    for ours, theirs in zip(actual, expected, strict=True):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert (a.double() - b.double()).abs().max() <= 0.02 * b.double().abs().max()
            assert a.dtype == b.dtype and a.any() == b.any()


class Interpreted:
    """A compiled kernel of a ``PythonDriver``, in the interpreter."""

    def __init__(self, driver: PythonDriver, kernel: Any, args: Sequence[Any], constants: dict[str, Any]) -> None:
        tensors = (arg.tensor if type(arg).__name__ == "Matrix" else arg for arg in args)
        self._dtypes = [getattr(t, "dtype", None) for t in tensors]
        self._driver, self._kernel, self._constants = driver, kernel, constants

    def add_to(self, record: Any, grid: Sequence[int], args: Sequence[Any]) -> bool:
        """Add the launch to a record, as ``launch._Compiled.add_to``."""
        parameters: list[Any] = []
        for arg in args:
            if type(arg).__name__ == "Matrix":
                parameters.append((arg.tensor, 9, 3, 2, *arg.shape, arg.strides[0], *arg.block))
            elif type(arg) is BufferIndex:
                parameters.append(arg)
            else:
                parameters.append(struct.pack("=d" if type(arg) is float else "=q", arg))
        self._args = list(args)
        number = self._driver.add(self._kernel.__name__, self._run)
        record.kernel(number, (*grid, 1, 1)[:3], 128, 0, parameters)
        return True

    def _run(self, grid: tuple[int, ...], parameters: Any) -> None:
        args: list[Any] = []
        for i, (dtype, arg) in enumerate(zip(self._dtypes, self._args, strict=True)):
            if dtype is None:
                kind = ctypes.c_double if type(arg) is float else ctypes.c_int64
                args.append(ctypes.cast(parameters[i], ctypes.POINTER(kind))[0])
                assert args[-1] == arg
                continue
            address = ctypes.cast(parameters[i], ctypes.POINTER(ctypes.c_int64))[0]
            t = torch.frombuffer((ctypes.c_char * 64).from_address(address), dtype=dtype)
            args.append(arg._replace(tensor=t).described() if type(arg).__name__ == "Matrix" else t)
        self._kernel[grid](*args, **self._constants)


@contextmanager
def emulated(driver: PythonDriver) -> Iterator[None]:
    """Return a context in which programs are recorded, and repeated by native code on the driver."""
    launches, program = kernels("launch"), kernels("program")
    for module in (device_call, device_layer, expert_mlp_gpu):
        module._programs.cache_clear()
    routers = kernels("router")._FORWARD, kernels("router")._BACKWARD
    for other in (kernels("linear")._LINEAR, kernels("linear")._GRADIENTS, *routers):
        other._plans.clear()

    def launch(kernel: Any, grid: Sequence[int], on: Tensor, args: Sequence[Any], **settings: Any) -> None:
        constants = {name: value for name, value in settings.items() if name not in launches.OPTIONS}
        with _disable_current_modes():  # the interpreter copies tensors
            kernel[tuple(grid)](*launches._described(args), **constants)
        recording.record(recording.Step(Interpreted(driver, kernel, args, constants).add_to, grid, args))

    native.TRITON_DEVICES.add("cpu")
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("biases", "grouped_mm", "linear", "router", "rows", "slot_order", "swiglu", "swiglu_gradient"):
                patch.setattr(kernels(name), "launch", launch)
            patch.setattr(launches, "repeats", lambda device: True)
            patch.setattr(program, "new_record", driver.record)
            patch.setattr(program, "current_stream", lambda device: STREAM)
            yield
    finally:
        native.TRITON_DEVICES.discard("cpu")


def step_by_step(built: MoELayer, x_TD: Tensor, routing: Routing | None = None) -> list[Tensor]:
    """Return ``passes`` of router, dispatch, experts and combine one after the other, without records."""
    with pytest.MonkeyPatch.context() as without:
        without.setattr(Experts, "is_uncounted", lambda *_: False)
        without.setattr(kernels("launch"), "repeats", lambda device: False)
        return passes(built, x_TD, routing)


@on_ranks(1)
@pytest.mark.parametrize("case", ["", "frozen", "gpt-oss"])
def test_a_layer_is_one_native_call_forward_and_one_backward_with_the_same_bits(case: str) -> None:
    driver = PythonDriver()
    program = kernels("program")
    with emulated(driver):
        built, frozen = layer(**(GPT_OSS if case == "gpt-oss" else {})), case == "frozen"
        built.experts.w13.requires_grad_(not frozen)
        built.experts.recompute = frozen
        for seed in range(4):
            x_TD = drawn(TOKENS, HIDDEN, dtype=torch.bfloat16, seed=seed)
            driver.launches.clear()
            driver.named.clear()
            actual = passes(built, x_TD)
            expected = step_by_step(built, x_TD)
            assert all(map(torch.equal, expected, actual)) and len(expected) == len(actual)
            if seed < 2:
                assert not driver.launches
                continue
            calls = [len(list(group)) for key, group in groupby(driver.named) if key == "cuLaunchKernel"]
            names = [driver.names[launch.kernel] for launch in driver.launches]
            assert names == FORWARD + {"": BACKWARD, "frozen": FROZEN, "gpt-oss": WITH_BIASES}[case]
            assert calls == [len(FORWARD), len(names) - len(FORWARD)] and driver.named.count("cuCtxGetCurrent") == 2
            assert {launch.stream for launch in driver.launches} == {STREAM}
            assert {launch.context for launch in driver.launches} == {CONTEXT}
        (plan,) = device_layer._programs()[1]._plans.values()
        rows, slots = TOKENS * TOP_K, TOKENS * TOP_K
        buffers = [2 * rows * HIDDEN, 2 * rows * FFN, 2 * rows * 2 * FFN]  # gradients and then rows, activation, its h
        buffers += [2 * rows * 2 * FFN] if frozen else []  # h, which is recomputed; rows are in the gradient of h
        parts = -(-TOKENS // (2 * kernels("linear").INTERPRETED.inner))
        buffers += [4 * slots, 4, 4 * TOKENS * EXPERTS, 4 * parts * EXPERTS * HIDDEN]  # of weights, a counter, logits
        buffers += [4 * slots] if case == "gpt-oss" else []  # weights of rows
        assert plan.workspace == sum(-(-size // program.ALIGNMENT) * program.ALIGNMENT for size in buffers)
        driver.launches.clear()
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(built(x_TD), expected[0])
        assert [driver.names[launch.kernel] for launch in driver.launches] == FORWARD


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@on_ranks(1)
def test_native_calls_repeat_the_fused_kernels_for_hopper_in_their_model() -> None:
    driver = PythonDriver()
    with emulated(driver), pytest.MonkeyPatch.context() as patch:
        model = model_gemm()
        patch.setenv(tensor_cores.GEMM, "cuda")
        patch.setattr(tensor_cores, "launcher_for", lambda rows_RD, kernel: model)
        built = layer()
        for seed in range(3):
            x_TD = drawn(TOKENS, HIDDEN, dtype=torch.bfloat16, seed=seed)
            driver.launches.clear()
            driver.named.clear()
            actual = passes(built, x_TD)
            names = [driver.names[launch.kernel] for launch in driver.launches]
            assert names == (FUSED_FORWARD + FUSED_BACKWARD if seed > 1 else [])  # and the GEMMs, on the model
            assert driver.named.count("cuCtxGetCurrent") == (2 if seed > 1 else 0)
            with patch.context() as without:
                without.setattr(kernels("launch"), "repeats", lambda device: False)
                expected = passes(built, x_TD)
            assert all(map(torch.equal, expected, actual)) and len(expected) == len(actual)


class Operators(TorchDispatchMode):
    """Records the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


@on_ranks(1)
def test_a_repeated_call_only_allocates_and_launches_in_a_few_frames() -> None:
    """So a CUDA graph can capture it: nothing is copied to or read by the CPU, and nothing depends on values."""
    driver = PythonDriver()
    with emulated(driver):
        built, x_TD = layer(), drawn(TOKENS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
        grad_TD = drawn(TOKENS, HIDDEN, dtype=torch.bfloat16, seed=1)
        wanted = [x_TD, *built.parameters()]
        for _ in range(2):
            torch.autograd.grad(built(x_TD), wanted, grad_TD)
        driver.kernels = dict.fromkeys(driver.kernels, lambda *_: None)
        with Operators() as forward:
            y_TD = built(x_TD)
        with Operators() as backward:
            torch.autograd.grad(y_TD, wanted, grad_TD)
        assert forward.names <= ALLOCATING and backward.names <= ALLOCATING, (forward.names, backward.names)
        assert len(driver.launches) == len(FORWARD) + len(BACKWARD)
        frames, y_TD = frames_of_package(lambda: built(x_TD))
        assert len(frames) <= 22 - OF_GPU, frames
        frames, _ = frames_of_package(lambda: torch.autograd.grad(y_TD, wanted, grad_TD))
        assert len(frames) <= 15, frames


def frames_of_package(work: Callable[[], Any]) -> tuple[list[str], Any]:
    """Return the functions of the package that were called, and the result of ``work``."""
    frames: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "/moe_comm/" in frame.f_code.co_filename:
            frames.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    return frames, result


def hooked(module: torch.nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


WHOLE: dict[str, Callable[[MoELayer], Any]] = {
    "plain": lambda built: None,
    "evaluated": lambda built: built.eval(),
    "hooks of the layer": lambda built: hooked(built),
    "shards of FSDP2": lambda built: fully_shard(built),
    "recomputed activations": lambda built: setattr(built.experts, "recompute", True),
    "correction bias": lambda built: setattr(built.router, "correction_bias", torch.arange(EXPERTS) * 0.1),
}
"""Changes of a layer whose calls are one function."""
GIVEN: dict[str, Callable[[MoELayer], Any]] = {
    "hooks of the router": lambda built: hooked(built.router),
    "auxiliary loss": lambda built: setattr(built.router, "config", replace(built.router.config, balance_loss=0.1)),
    "capacity": lambda built: setattr(built, "capacity", Capacity(0.5)),
    "shared expert": lambda built: setattr(built, "shared", SharedExpert(HIDDEN, 8, dtype=torch.bfloat16)),
    "dropped tokens": lambda built: setattr(built.router, "drop_invalid", True),
}
"""Changes of a layer whose calls are the router, and one function for the rest."""
PARTS: dict[str, Callable[[MoELayer], Any]] = {
    "hooks of the experts": lambda built: hooked(built.experts),
    "hooks in flight": lambda built: setattr(built, "in_flight_hook", lambda: None),
    "adapters": lambda built: built.experts.add_module("adapter", torch.nn.Identity()),
    "GeGLU": lambda built: setattr(built.experts, "activation", activation_of("geglu")),
    "main_grad": lambda built: setattr(built.experts.w2, "main_grad", torch.zeros(built.experts.w2.shape)),
    "overlap": lambda built: setattr(built, "overlap", Overlap()),
    "hooks before dispatch": lambda built: built.dispatcher.before_dispatch.append(lambda: None),
}
"""Changes of a layer whose calls are router, dispatch, experts and combine."""


@on_ranks(1)
@pytest.mark.parametrize("case", [*WHOLE, *GIVEN, *PARTS])
def test_unusual_calls_are_several_functions_and_have_the_same_bits(case: str) -> None:
    kernels("device")
    native.TRITON_DEVICES.add("cpu")
    calls = {"router": 0, "given": 0}

    def counted(x_TD: Tensor, routing: Any, *args: Any, call: Any = whole_call.device_layer) -> Any:
        calls["given" if routing.rule is None else "router"] += 1
        return call(x_TD, routing, *args)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(whole_call, "device_layer", counted)
            torch.manual_seed(0)
            built, x_TD = layer(), drawn(2, TOKENS, HIDDEN, dtype=torch.bfloat16)
            (WHOLE | GIVEN | PARTS)[case](built)
            actual, stats = passes(built, x_TD), built.dispatch_stats
            assert calls == {"router": case in WHOLE, "given": case in GIVEN}
            expected = step_by_step(built, x_TD)
            assert all(map(torch.equal, actual, expected)) and len(actual) == len(expected)
            assert str(built.dispatch_stats) == str(stats)
            if case != "plain":
                return
            mask = torch.arange(2 * TOKENS).view(2, TOKENS) % 3 > 0
            for other in ({"mask": mask}, {"routing": Routing(some_ids(2 * TOKENS, TOP_K, EXPERTS),
                                                              torch.full((2 * TOKENS, TOP_K), 0.5))}):  # fmt: skip
                built(x_TD, **other)
            with torch.autocast("cpu", torch.bfloat16):
                built(x_TD)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(kernels("slot_order"), "FEW", 0)  # many slots
                assert torch.equal(built(x_TD), actual[0])
            assert calls == {"router": 1, "given": 3}
            y = checkpoint(built, x_TD.requires_grad_(), use_reentrant=False)
            built.router.take_load()
            y.sum().backward()
            assert calls["router"] == 3 and not built.router.load_E.any()  # a recomputation is not counted again
    finally:
        native.TRITON_DEVICES.discard("cpu")


@on_ranks(1)
def test_calls_with_a_given_routing_are_two_native_calls() -> None:
    driver = PythonDriver()
    with emulated(driver):
        built = layer()
        for seed in range(3):
            x_TD = drawn(TOKENS, HIDDEN, dtype=torch.bfloat16, seed=seed)
            weights_TK = torch.rand(TOKENS, TOP_K, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            routing = Routing(some_ids(TOKENS, TOP_K, EXPERTS, seed), weights_TK)
            driver.named.clear()
            actual, entered = passes(built, x_TD, routing), driver.named.count("cuCtxGetCurrent")
            assert entered == (2 if seed > 1 else 0)
            assert all(map(torch.equal, step_by_step(built, x_TD, routing), actual))


@on_ranks(1)
def test_what_a_program_cannot_repeat_is_not_left_out() -> None:
    launches, program, driver = kernels("launch"), kernels("program"), PythonDriver()
    x_TD = drawn(TOKENS, HIDDEN)
    with emulated(driver):
        # Other operators than launches, and other numbers of launches.
        for body, number in ((lambda x: (x + 1,), 0), (lambda x: (launches.DTYPES and torch.empty_like(x),), 1)):
            other = program.Program(body)
            for _ in range(3):
                other(number, (x_TD,))
            assert list(other._plans.values()) == [False]


@on_ranks(1)
def test_a_launch_that_the_driver_refuses_raises() -> None:
    driver = PythonDriver()
    with emulated(driver):
        built, x_TD = layer(), drawn(TOKENS, HIDDEN, dtype=torch.bfloat16)
        for _ in range(2):
            built(x_TD)

        def fail(*_: Any) -> None:
            raise OSError("no more")

        driver.kernels[4] = fail
        with pytest.raises(KernelError, match="cuLaunchKernel with error 719"):
            built(x_TD)
        assert len(driver.launches) == 4 and isinstance(driver.error, OSError)


@on_ranks(1)
def test_invalid_ids_make_results_nan_and_raise_in_the_next_call() -> None:
    kernels("device")
    native.TRITON_DEVICES.add("cpu")
    try:
        built, x_TD = layer(), drawn(TOKENS, HIDDEN, dtype=torch.bfloat16)
        ids_TK = torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
        ids_TK[:, 1] = 1
        wrong_TK = ids_TK.clone()
        wrong_TK[4, 1], wrong_TK[6, 0] = 5, -2
        weights_TK = torch.full((TOKENS, TOP_K), 0.5)
        y_TD = built(x_TD, Routing(wrong_TK, weights_TK))
        bad_T = torch.zeros(TOKENS, dtype=torch.bool)
        bad_T[[4, 6]] = True
        expected_TD = None
        with pytest.raises(RoutingError, match=r"earlier call.*expert id 5 of token 4, slot 1.*2 bad ids"):
            built(x_TD, Routing(ids_TK, weights_TK))
        expected_TD = built(x_TD, Routing(ids_TK, weights_TK))
        assert torch.equal(y_TD.isnan().any(1), bad_T) and torch.equal(y_TD[~bad_T], expected_TD[~bad_T])
        with torch.no_grad():
            x_TD[3, 0] = float("nan")
        y_TD = built(x_TD.requires_grad_())
        assert y_TD[3].isnan().all() and not y_TD[4].isnan().any()
        with pytest.raises(RoutingError, match="router logits of token 3"):
            y_TD.sum().backward()
        built(x_TD)
        with pytest.raises(RoutingError, match="router logits of token 3"):
            built.dispatcher.check_ids()
        built.dispatcher.check_ids()
    finally:
        native.TRITON_DEVICES.discard("cpu")


@on_ranks(2)
def test_layers_over_peer_to_peer_with_room_for_rows_never_wait_for_counts(rank: int) -> None:
    pytest.importorskip("moe_comm._C", reason="the native core is not built")
    from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher

    kernels("device")
    driver = PythonDriver()

    def build(capacity: int | None, dtype: torch.dtype = torch.bfloat16) -> MoELayer:
        peers = PeerToPeerOptions(emulate=True, capacity_rows=capacity)
        options = DispatchOptions(timeout_s=60, peer_to_peer=peers)
        config = MoEConfig(HIDDEN, FFN, RouterConfig(EXPERTS, TOP_K))
        return MoELayer.build(config, dist.group.WORLD, backend="peer_to_peer", options=options, seed=1, dtype=dtype)

    native.TRITON_DEVICES.add("cpu")
    try:
        for dtype in (torch.bfloat16, torch.float16):
            counted, fixed = build(None, dtype), build(50, dtype)
            unused = fixed.dispatcher.empty_rows(500, HIDDEN, dtype, torch.device("cpu")).fill_(torch.nan)
            del unused  # rows without a slot are not read
            for tokens in (TOKENS + rank, rank) if dtype == torch.bfloat16 else (TOKENS + rank,):
                x_TD = drawn(tokens, HIDDEN, dtype=dtype, seed=rank)
                weights_TK = torch.rand(tokens, TOP_K, generator=torch.Generator().manual_seed(4)).requires_grad_()
                for routing in (None, Routing(some_ids(tokens, TOP_K, EXPERTS, rank), weights_TK)):
                    expected, stats = passes(counted, x_TD, routing), counted.dispatch_stats
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(PeerToPeerDispatcher, "_send", stop)
                        actual, _ = needed_kernels(lambda b=fixed, r=routing, x=x_TD: passes(b, x, r), stop)
                    assert all(map(torch.equal, expected, actual)) and len(expected) == len(actual) > 3
                    assert fixed.dispatch_stats == stats and fixed.saved_bytes >= counted.saved_bytes
        x_TD = drawn(TOKENS, HIDDEN, dtype=torch.bfloat16, seed=rank)
        built = build(2 * TOKENS)
        hooked(built.experts)  # separate calls, which find a fault before the next operation
        one_rank = Routing(torch.tensor([[0, 1]] * TOKENS), torch.ones(TOKENS, TOP_K))
        with pytest.raises(HeapError, match=r"rank 0 has no room for its rows.*capacity_rows"):
            built(x_TD, one_rank)
        wrong = one_rank._replace(ids_TK=one_rank.ids_TK.clone())
        wrong.ids_TK[3, 1] += 7 * rank
        built = build(50)
        hooked(built.experts)
        with pytest.raises(RoutingError, match="expert id 8 of token 3"):
            built(x_TD, wrong)
        assert torch.equal(build(50)(x_TD, one_rank), build(None)(x_TD, one_rank))
    finally:
        native.TRITON_DEVICES.discard("cpu")
    with emulated(driver):
        counted, fixed = build(None), build(50)
        for seed in range(3):
            x_TD = drawn(TOKENS, HIDDEN, dtype=torch.bfloat16, seed=seed + rank)
            weights_TK = torch.rand(TOKENS, TOP_K, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            routing = Routing(some_ids(TOKENS, TOP_K, EXPERTS, seed), weights_TK)
            driver.named.clear()
            actual, entered = passes(fixed, x_TD, routing), driver.named.count("cuCtxGetCurrent")
            assert entered == (2 if seed > 1 else 0)  # the GEMMs, forward and backward
            assert all(map(torch.equal, step_by_step(counted, x_TD, routing), actual))


@on_ranks(1)
@pytest.mark.parametrize("swap", [True, False], ids=["swap_moe", "experts implementation"])
def test_experts_of_hugging_face_models_never_wait_for_counts(swap: bool) -> None:
    pytest.importorskip("transformers")
    from moe_comm.integrations.hugging_face import register, swap_moe
    from tests.integrations.models import new_model, randomise

    kernels("device")
    register()
    model = new_model("mixtral")
    randomise(model, 0)
    model.bfloat16()
    if swap:
        swap_moe(model)
    else:
        model.set_experts_implementation("moe_comm")
    experts = next(module for module in model.modules() if hasattr(module, "gate_up_proj"))
    x_TD = drawn(TOKENS, model.config.hidden_size, dtype=torch.bfloat16)
    ids_TK = some_ids(TOKENS, TOP_K, experts.num_experts).clamp(min=0)

    def work() -> list[Tensor]:
        leaf, weights_TK = x_TD.detach().requires_grad_(), torch.full((TOKENS, TOP_K), 0.5).requires_grad_()
        experts.zero_grad(set_to_none=True)
        y_TD = experts(leaf, ids_TK, weights_TK)
        y_TD.backward(drawn(*y_TD.shape, dtype=torch.bfloat16, seed=3))
        return [y_TD.detach(), *(t.grad for t in (leaf, weights_TK, *experts.parameters()) if t.grad is not None)]

    expected = work()
    native.TRITON_DEVICES.add("cpu")
    try:
        actual, launched = needed_kernels(work, stop)
    finally:
        native.TRITON_DEVICES.discard("cpu")
    assert launched[:2] == ["count_chunks_kernel", "place_slots_kernel"] and len(actual) == len(expected) == 5
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2)


@on_ranks(1)
def test_main_grad_is_filled_if_backward_sees_other_tensors_than_were_saved() -> None:
    kernels("router")
    native.TRITON_DEVICES.add("cpu")
    try:
        built = layer()
        weights = (built.experts.w13, built.experts.w2)
        for weight in weights:
            weight.main_grad = torch.zeros(weight.shape)
        for run in (lambda x_TD: checkpoint(built, x_TD, use_reentrant=False), built):
            with saved_tensors_hooks(lambda t: t.clone(), lambda t: t) if run is built else nullcontext():
                y_TD = run(drawn(TOKENS, HIDDEN, dtype=torch.bfloat16).requires_grad_())
            y_TD.float().sum().backward()
            for weight in weights:
                assert weight.main_grad.any() and weight.grad is None
                weight.main_grad.zero_()
    finally:
        native.TRITON_DEVICES.discard("cpu")


@on_ranks(1)
def test_hooks_of_all_modules_see_the_rows_of_experts() -> None:
    kernels("router")
    native.TRITON_DEVICES.add("cpu")
    seen: list[tuple[int, ...]] = []

    def hook(module: torch.nn.Module, args: Any, _: Any) -> None:
        if isinstance(module, Experts):
            seen.append(tuple(args[0].shape))

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        layer()(drawn(TOKENS, HIDDEN, dtype=torch.bfloat16))
    finally:
        handle.remove()
        native.TRITON_DEVICES.discard("cpu")
    assert seen == [(TOKENS * TOP_K, HIDDEN)]
