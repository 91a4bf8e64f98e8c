"""A layer on one GPU, whose row counts stay on the device, has the bits of dispatch, experts and combine."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from moe_comm.dispatch import device_call
from moe_comm.dispatch.backends.local import LocalDispatcher
from moe_comm.errors import InputError, RoutingError
from moe_comm.kernels import native, recording, tensor_cores
from moe_comm.layers.moe.experts import Experts
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.moe.router import Router, RouterConfig, Routing
from moe_comm.topology import ExpertPlacement
from tests.kernels.triton.common import drawn, kernels, needed_kernels, some_ids
from tests.overlap.triton.common import needs_triton
from tests.pool import on_ranks
from tests.support.gemm_model import COMPILER, model_gemm

pytestmark = needs_triton
HIDDEN, FFN, EXPERTS, TOKENS, TOP_K = 16, 16, 5, 9, 2
FORWARD = ["linear_kernel", "route_kernel", "count_chunks_kernel", "place_slots_kernel", "take_rows_kernel",
           "grouped_mm_tma_kernel", "swiglu_kernel", "grouped_mm_tma_kernel", "weighted_sum_kernel"]  # fmt: skip
BACKWARD = ["take_rows_kernel", "grouped_mm_tma_kernel", "weighted_swiglu_backward_kernel",
            "grouped_weight_grad_kernel", "grouped_mm_tma_kernel", "weighted_sum_kernel", "take_rows_kernel",
            "grouped_weight_grad_kernel", "route_backward_kernel", "linear_rows_kernel", "linear_weights_kernel",
            "sum_parts_kernel"]  # fmt: skip


def layer(dtype: torch.dtype = torch.bfloat16, **settings: Any) -> MoELayer:
    router = Router(HIDDEN, RouterConfig(EXPERTS, TOP_K), dtype=dtype)
    experts = Experts(EXPERTS, HIDDEN, FFN, dtype=dtype, **settings)
    built = MoELayer(router, experts, LocalDispatcher(ExpertPlacement.balanced(EXPERTS, 1)))
    router.reset_parameters(std=1.0, generator=torch.Generator().manual_seed(0))
    experts.reset_parameters(1, std=0.3)
    return built


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
    module = kernels("linear_backward")
    for dtype in (torch.bfloat16, torch.float16):
        for rows, experts, hidden in ((150, 33, 40), (5, 16, 64), (0, 3, 8), (3, 5, 0)):
            grad_TE = drawn(rows, experts + 2)[:, :experts] * 1e-3
            w_ED = drawn(hidden, experts, dtype=dtype, seed=1).t()
            x_TD = drawn(rows, hidden + 3, dtype=dtype, seed=2)[:, :hidden]
            grad_x_TD, grad_ED = module.grad_of_rows(grad_TE, w_ED), module.grad_of_weights(grad_TE, x_TD)
            # As the products of fp32 operands, rounded once; one unit in the last place for sums in another order.
            tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-7}
            torch.testing.assert_close(grad_x_TD, (grad_TE.double() @ w_ED.double()).to(dtype), **tolerance)
            torch.testing.assert_close(grad_ED, (grad_TE.double().T @ x_TD.double()).to(dtype), **tolerance)
            assert torch.equal(module.grad_of_rows(grad_TE[2:4], w_ED), grad_x_TD[2:4])
    with pytest.raises(InputError, match="needs a 16-bit operand"):
        module.grad_of_rows(drawn(2, 3), drawn(4, 3))


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
            for settings, recompute in (({}, False), ({"transposed": True}, True)):
                built = layer(**settings)
                built.experts.recompute = recompute
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(Experts, "on_device", lambda *_: False)
                    expected, stats = passes(built, x_TD, routing), built.dispatch_stats
                actual, launched = needed_kernels(lambda b=built, r=routing: passes(b, x_TD, r), stop)
                assert all(map(torch.equal, expected, actual)) and len(expected) == len(actual)
                assert built.dispatch_stats == stats
                if routing is None:
                    assert recompute or launched == FORWARD + BACKWARD
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
        for settings, frozen in (({"activation": "geglu"}, ()), ({"activation": "relu2"}, second), ({}, first),
                                 ({}, ("w2",)), ({"dtype": half}, ()), ({}, second)):  # fmt: skip
            built = layer(**settings)
            for name, p in built.named_parameters():
                p.requires_grad_(not name.endswith(frozen))
            x_TD = drawn(TOKENS, HIDDEN, dtype=built.experts.w2.dtype)
            for given in (None, Routing(some_ids(TOKENS, TOP_K, EXPERTS), torch.full((TOKENS, TOP_K), 0.3))):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(Experts, "on_device", lambda *_: False)
                    expected = passes(built, x_TD, given)
                actual = passes(built, x_TD, given)
                assert all(map(torch.equal, expected, actual)) and len(expected) == len(actual), (settings, frozen)
            y_TD = built(x_TD)  # no gradient of x
            y_TD.sum().backward()
    finally:
        native.TRITON_DEVICES.discard("cpu")


FUSED_FORWARD = ["linear_kernel", "route_kernel", "count_chunks_kernel", "place_slots_kernel", "weighted_sum_kernel"]
FUSED_BACKWARD = ["take_rows_kernel", "add_sections_kernel", "weighted_sum_kernel", "take_rows_kernel",
                  "route_backward_kernel", "linear_rows_kernel", "linear_weights_kernel",
                  "sum_parts_kernel"]  # fmt: skip


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@on_ranks(1)
def test_a_layer_runs_on_the_fused_kernels_for_hopper_in_their_model(tmp_path: Path) -> None:
    kernels("device")
    built, x_TD = layer(), drawn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    weights_TK = torch.rand(TOKENS, TOP_K, generator=torch.Generator().manual_seed(4)).requires_grad_()
    given = Routing(some_ids(TOKENS, TOP_K, EXPERTS), weights_TK)
    native.TRITON_DEVICES.add("cpu")
    try:
        expected = [passes(built, x_TD, routing) for routing in (None, given)]
        with pytest.MonkeyPatch.context() as patch:
            model = model_gemm(tmp_path)
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
    """A compiled kernel that takes addresses, in the interpreter."""

    def __init__(self, kernel: Any, args: Sequence[Any], constants: dict[str, Any]) -> None:
        tensors = (arg.tensor if type(arg).__name__ == "Matrix" else arg for arg in args)
        self._dtypes = [getattr(t, "dtype", None) for t in tensors]
        self._kernel, self._constants = kernel, constants

    def __call__(self, grid: Sequence[int], device: int, values: list[Any]) -> None:
        args: list[Any] = []
        for dtype, value in zip(self._dtypes, values, strict=True):
            if dtype is None:
                args.append(value)
                continue
            address = value.tensor if type(value).__name__ == "Matrix" else value
            memory = (ctypes.c_char * 64).from_address(address)
            t = torch.frombuffer(memory, dtype=dtype)
            args.append(t if value is address else value._replace(tensor=t).described())
        self._kernel[tuple(grid)](*args, **self._constants)


@on_ranks(1)
@pytest.mark.parametrize("frozen", [False, True])
def test_repeated_launches_have_the_same_bits(frozen: bool) -> None:
    launches, program = kernels("launch"), kernels("program")
    repeated = [0]
    device_call._programs.cache_clear()
    routers = kernels("router")._FORWARD, kernels("router")._BACKWARD
    for other in (kernels("linear")._PROGRAM, kernels("linear_backward")._BACKWARD, *routers):
        other._plans.clear()

    def launch(kernel: Any, grid: Sequence[int], on: Tensor, args: Sequence[Any], **settings: Any) -> None:
        constants = {name: value for name, value in settings.items() if name not in launches.OPTIONS}
        with _disable_current_modes():  # the interpreter copies tensors
            kernel[tuple(grid)](*launches._described(args), **constants)
        recording.record(recording.Step(Interpreted(kernel, args, constants), grid, args))

    def counted(plan: Any, inputs: Any, run: Any = program._Plan.run) -> Any:
        repeated[0] += 1
        return run(plan, inputs)

    native.TRITON_DEVICES.add("cpu")
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("grouped_mm", "linear", "linear_backward", "router", "scale_rows", "slot_order", "swiglu",
                         "take_rows", "weighted_sum"):  # fmt: skip
                patch.setattr(kernels(name), "launch", launch)
            patch.setattr(launches, "repeats", lambda device: True)
            patch.setattr(launches, "index_of", lambda device: 0)
            patch.setattr(program._Plan, "run", counted)
            built = layer()
            built.experts.w13.requires_grad_(not frozen)
            built.experts.recompute = frozen
            for seed in range(5):
                x_TD = drawn(TOKENS, HIDDEN, dtype=torch.bfloat16, seed=seed)
                repeated[0] = 0
                actual = passes(built, x_TD)
                # Logits, routing, places, experts, sum; the backward passes of these, of routing and of logits.
                assert repeated[0] == (8 if seed > 1 else 0), (seed, repeated)
                with pytest.MonkeyPatch.context() as without:
                    without.setattr(Experts, "on_device", lambda *_: False)
                    without.setattr(launches, "repeats", lambda device: False)
                    expected = passes(built, x_TD)
                assert all(map(torch.equal, expected, actual)) and len(expected) == len(actual)
            (plan,) = device_call._programs()[3]._plans.values()
            rows = TOKENS * TOP_K
            buffers = [rows * HIDDEN, rows * FFN, rows * 2 * FFN]  # gradients and then rows, activation, gradient of h
            buffers += [rows * 2 * FFN] if frozen else []  # h, which is recomputed; rows are in the gradient of h
            assert plan.workspace == sum(-(-2 * size // program.ALIGNMENT) * program.ALIGNMENT for size in buffers)
            repeated[0] = 8
            with torch.no_grad():
                assert torch.equal(built(x_TD), expected[0]) and repeated[0] == 8 + 5
            # Other operators than launches, and other numbers of launches, are not left out.
            for body, number in ((lambda x: (x + 1,), 0), (lambda x: (launches.DTYPES and torch.empty_like(x),), 1)):
                other = program.Program(body)
                for _ in range(3):
                    other(number, (x_TD,))
                assert list(other._plans.values()) == [False]
    finally:
        native.TRITON_DEVICES.discard("cpu")


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
