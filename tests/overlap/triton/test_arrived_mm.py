"""The device executor over ``peer_to_peer``: emulated CUDA kernels and interpreted Triton kernels of several processes.

Its rows, flags and faults are those of ``peer_to_peer``; its bits are those of serial execution with Triton kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("moe_comm._C", reason="the native core is not built")

from moe_comm.dispatch.wire_dtype import WireDtypes
from moe_comm.kernels.activations import activation_of
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.overlap.options import Overlap
from moe_comm.topology import ExpertPlacement
from tests.layers.reference import draw
from tests.overlap.triton.common import interpreted, needs_triton
from tests.overlap.triton.device_layer import (
    DEVICE,
    EXPERTS,
    WORLD,
    D,
    F,
    leaves_of,
    make_device_dispatcher,
    run_layer,
    slot_ids,
    triton_on_cpus,
)
from tests.pool import on_ranks
from tests.support.gemm_model import COMPILER, model_gemm

pytestmark = needs_triton
SWIGLU = activation_of("swiglu")


# --- the list of tiles ---


def reference_tiles(rows_EW: np.ndarray, rank: int, tile_rows: int) -> list[list[int]]:
    """Return the tiles of dispatched rows in the order of ``tile_list.py``: expert, first and end row, first and last
    source, first row of the first source."""
    tiles, first = [], 0
    for expert, rows_W in enumerate(rows_EW.tolist()):
        source_R = [source for source, rows in enumerate(rows_W) for _ in range(rows)]
        starts = range(0, len(source_R), tile_rows)
        after_own = [start for start in starts if start >= sum(rows_W[: rank + 1])]
        for start in [*after_own, *(start for start in starts if start not in after_own)]:
            sources = source_R[start : start + tile_rows]
            rows = first + start, first + start + len(sources)
            tiles.append([expert, *rows, sources[0], sources[-1], first + source_R.index(sources[0])])
        first += len(source_R)
    return tiles


@on_ranks(3)
@pytest.mark.parametrize(
    "arg",
    [
        pytest.param((3, 0.3, 4), marks=pytest.mark.slow),
        (13, 0.8, 4),
        pytest.param((20, 0.7, 4), marks=pytest.mark.slow),
        pytest.param((40, 1.0, 4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tiles_listed_on_the_device_are_those_of_the_reference(
    rank: int, world: int, arg: tuple[int, float, int]
) -> None:
    most, density, rows = arg
    tile_list = interpreted("tile_list")
    generator = np.random.default_rng(most)
    for index, (ranks, experts, before) in enumerate(((1, 3, 0), (5, 9, 2), (4, 17, 1), (4, 0, 3))):
        for own in {ranks // 2, ranks - 1} if ranks < 5 else {2}:
            rows_EW = generator.integers(0, most + 1, (experts, ranks)) * (generator.random((experts, ranks)) < density)
            if index % world != rank:  # the ranks divide the cases
                continue
            counts_WE = torch.zeros(ranks, before + experts + 2, dtype=torch.int64)
            counts_WE[:, before : before + experts] = torch.from_numpy(rows_EW.T)
            tiles = tile_list.list_tiles(counts_WE, range(before, before + experts), own, int(rows_EW.sum()), rows)
            expected = reference_tiles(rows_EW, own, rows)
            covered = [sum(rows_EW[e, w] > 0 for e, *_, a, z, _ in expected if a <= w <= z) for w in range(ranks)]
            assert tiles.tiles_W.tolist() == covered
            assert tiles.count.tolist() == [len(expected)]
            assert tiles.items_N6[: len(expected)].tolist() == expected
            assert torch.equal(tiles.rows_EW, torch.from_numpy(rows_EW)) or not experts
            assert tiles.counts_E.tolist() == rows_EW.sum(1).tolist()


# --- a layer ---


@on_ranks(WORLD)
@pytest.mark.parametrize(
    ("kind", "experts", "dtype", "options"),
    [
        ("random", EXPERTS, torch.bfloat16, {}),
        ("dropped", EXPERTS, torch.float16, {}),
        pytest.param("one expert", EXPERTS, torch.bfloat16, {}, marks=pytest.mark.slow),
        ("no tokens on rank 0", EXPERTS, torch.bfloat16, {"checksums": True}),
        ("few", 2, torch.bfloat16, {}),
        ("no rows", EXPERTS, torch.bfloat16, {}),
        ("random", EXPERTS, torch.bfloat16, {"wire_dtypes": WireDtypes("fp8_block", "bf16", "bf16", "fp8_token")}),
        ("random", EXPERTS, torch.bfloat16, {"relay": True}),
        ("dropped", EXPERTS, torch.bfloat16, {"biased": True}),
    ],
    ids=[
        "random", "fp16", "one expert", "checksums", "a rank without experts", "no rows", "wire dtypes", "relayed",
        "biases",
    ],
)  # fmt: skip
def test_output_and_gradients_have_the_bits_of_serial_execution(
    rank: int, world: int, kind: str, experts: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    biased = bool(options.get("biased"))
    activation = "clamped_swiglu" if biased else "swiglu"  # those of gpt-oss
    options = {name: value for name, value in options.items() if name != "biased"}
    with triton_on_cpus():
        dispatcher = make_device_dispatcher(rank, world, experts, **options)
        ids = slot_ids(kind, rank, experts, min(3, experts))
        expected = run_layer(dispatcher, ids, None, dtype, biased=biased, activation=activation)
        both = biased or (kind == "random" and not options)
        for settings in ({"recompute": True}, {"complete": True}) if both else ({},):
            actual = run_layer(dispatcher, ids, DEVICE, dtype, **settings, biased=biased, activation=activation)
            assert all(map(torch.equal, actual, expected)), settings
        if not options and not biased and ids.numel():
            assert all(map(torch.equal, one_rank(rank, world, experts, ids, dtype), expected))


def one_rank(rank: int, world: int, experts: int, ids: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the output of ``run_layer``, and the gradients of x and of the routing weights, with all experts over
    ``local``."""
    from moe_comm.dispatch.backends.local import LocalDispatcher
    from moe_comm.dispatch.device_call import device_call

    counts = ExpertPlacement.of(experts, world).experts_per_rank
    stacks = [leaves_of(other, count, ids, dtype)[2:] for other, count in enumerate(counts)]
    w13, w2 = (torch.cat(parts).detach() for parts in zip(*stacks, strict=True))
    x, weights, *_ = leaves_of(rank, counts[rank], ids, dtype)
    call = device_call(LocalDispatcher(ExpertPlacement.of(experts, 1)), x, ids, weights)
    assert call is not None
    y = call.combine(call.compute(call.rows, call.handle.rows_per_expert, ExpertMLP((w13, w2, None, None), SWIGLU)))
    return [y.detach(), *torch.autograd.grad(y, (x, weights), draw(*y.shape, seed=99 + rank, dtype=dtype))]


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@on_ranks(WORLD, timeout=100)
def test_kernels_for_hopper_have_the_results_of_serial_execution(rank: int, world: int) -> None:
    """The kernels in CUDA C++ run in their model, and wait for rows and results of emulated ``peer_to_peer``."""
    from moe_comm.kernels import tensor_cores

    model, used = model_gemm(2), list[str]()

    def launcher_for(rows_RD: Tensor, kernel: str) -> Any:
        used.append(kernel)
        return model if kernel in tensor_cores.LISTED else None

    with triton_on_cpus(), pytest.MonkeyPatch.context() as patch:
        dispatcher, ids = make_device_dispatcher(rank, world, EXPERTS), slot_ids("random", rank, EXPERTS, 3)
        expected = run_layer(dispatcher, ids, None, hidden=264, biased=True, activation="clamped_swiglu")
        patch.setenv(tensor_cores.GEMM, "cuda")
        patch.setattr(tensor_cores, "launcher_for", launcher_for)
        actual = run_layer(dispatcher, ids, DEVICE, hidden=264, biased=True, activation="clamped_swiglu")
    assert {"arrived_swiglu", "published", "arrived_transposed", "published_transposed"} <= {*used}
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2 * float(other.abs().max()))


@on_ranks(3)
def test_fp32_agrees_with_serial_execution(rank: int, world: int) -> None:
    """Serial execution multiplies fp32 by cuBLAS or torch, so only the values agree."""
    interpreted("arrived_mm")
    dispatcher, ids = make_device_dispatcher(rank, world, EXPERTS), slot_ids("random", rank, EXPERTS, 3)
    with triton_on_cpus():
        actual = run_layer(dispatcher, ids, DEVICE, torch.float32, biased=True)
    expected = run_layer(dispatcher, ids, None, torch.float32, biased=True)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


@on_ranks(3)
def test_gradients_of_biases_alone_wait_for_the_gradients_of_all_ranks(rank: int, world: int) -> None:
    from moe_comm.overlap.executors.choice import dispatch_rows

    with triton_on_cpus():
        dispatcher, ids = make_device_dispatcher(rank, world, EXPERTS), slot_ids("random", rank, EXPERTS, 3)
        expected = run_layer(dispatcher, ids, None, biased=True)[-2:]
        experts = len(dispatcher.local_experts)
        x, weights, w13, w2, *biases = leaves_of(rank, experts, ids, torch.bfloat16, biased=True)
        for trained in (0, 1):
            call = dispatch_rows(dispatcher, x.detach(), ids, weights.detach(), DEVICE, width=F)
            b13, b2 = (b if i == trained else b.detach() for i, b in enumerate(biases))
            mlp = ExpertMLP((w13.detach(), w2.detach(), b13, b2), SWIGLU)
            y = call.combine(call.compute(call.rows, call.handle.rows_per_expert, mlp))
            grad = draw(*y.shape, seed=99 + rank, dtype=torch.bfloat16)
            (actual,) = torch.autograd.grad(y, biases[trained], grad)
            assert torch.equal(actual, expected[trained])


@on_ranks(3)
def test_gradients_can_be_computed_again_and_in_two_steps(rank: int, world: int) -> None:
    """Compute the gradients of the rows and those of the weights in two backward passes, and again."""
    from moe_comm.overlap.executors.choice import dispatch_rows

    with triton_on_cpus():
        from torch.distributed.pipelining._backward import (  # imports Triton
            stage_backward_input,
            stage_backward_weight,
        )

        dispatcher, ids = make_device_dispatcher(rank, world, EXPERTS), slot_ids("random", rank, EXPERTS, 3)
        _, *expected = run_layer(dispatcher, ids, None)

        def run(leaves: list[Tensor]) -> Tensor:
            call = dispatch_rows(dispatcher, leaves[0], ids, leaves[1], DEVICE, width=F)
            mlp = ExpertMLP((leaves[2], leaves[3], None, None), SWIGLU)
            return call.combine(call.compute(call.rows, call.handle.rows_per_expert, mlp))

        leaves = leaves_of(rank, len(dispatcher.local_experts), ids, torch.bfloat16)
        y = run(leaves)
        grad = draw(*y.shape, seed=99 + rank, dtype=torch.bfloat16)
        for _ in range(2):
            assert all(map(torch.equal, torch.autograd.grad(y, leaves, grad, retain_graph=True), expected))
        parameters = leaves[2:]
        (x_grad,), groups = stage_backward_input([run(leaves)], [grad], [leaves[0]], iter(parameters))
        assert torch.equal(x_grad, expected[0]) and all(p.grad is None for p in parameters)
        stage_backward_weight(iter(parameters), groups)
        assert all(torch.equal(p.grad, e) for p, e in zip(parameters, expected[2:], strict=True) if p.grad is not None)
        assert all(p.grad is not None for p in parameters)


def _whole_numbers(*shape: int, seed: int) -> Tensor:
    """Return small whole numbers, so that every sum of products is exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float().requires_grad_()


@on_ranks(3)
def test_operators_equal_serial_execution_on_whole_numbers(rank: int, world: int) -> None:
    from moe_comm.overlap.expert_operators import dispatch_matmul, matmul_combine

    interpreted("arrived_mm")
    dispatcher, ids = make_device_dispatcher(rank, world, EXPERTS), slot_ids("dropped", rank, EXPERTS, 3)
    experts, tokens = len(dispatcher.local_experts), ids.shape[0]
    results = []
    for overlap in (Overlap(1), Overlap(1, backend="triton"), Overlap(2, 1, backend="triton", programs=1)):
        x, weights = _whole_numbers(tokens, D, seed=rank), _whole_numbers(*ids.shape, seed=30 + rank)
        w1, w2 = _whole_numbers(experts, F, D, seed=40 + rank), _whole_numbers(experts, D, F, seed=50 + rank)
        h, dispatch = dispatch_matmul(dispatcher, x, ids, w1, overlap)
        y = matmul_combine(h, w2, weights, dispatch)
        grads = torch.autograd.grad(y, (x, w1, w2, weights), _whole_numbers(tokens, D, seed=60 + rank))
        results.append([h.detach(), y.detach(), *grads])
    for actual in results[1:]:
        assert all(map(torch.equal, actual, results[0]))


@on_ranks(3)
def test_weight_gradients_are_added_to_main_grad_without_other_gradients(rank: int, world: int) -> None:
    """Compare the sums in ``main_grad`` after two backward passes with twice the gradient of one pass."""
    from moe_comm.overlap.expert_operators import dispatch_matmul, matmul_combine

    interpreted("arrived_mm")
    dispatcher, ids = make_device_dispatcher(rank, world, EXPERTS), slot_ids("dropped", rank, EXPERTS, 3)
    experts, (tokens, top_k) = len(dispatcher.local_experts), ids.shape
    x, weights = _whole_numbers(tokens, D, seed=rank), _whole_numbers(tokens, top_k, seed=30 + rank).detach()
    parameters = [
        [
            _whole_numbers(*shape, seed=40 + rank).detach().bfloat16().requires_grad_()
            for shape in ((experts, F, D), (experts, D, F))
        ]
        for _ in range(2)
    ]

    def run(w1: Tensor, w2: Tensor) -> None:
        h, dispatch = dispatch_matmul(dispatcher, x.detach().bfloat16(), ids, w1, Overlap(backend="triton"))
        matmul_combine(h, w2, weights, dispatch).sum().backward()

    run(*parameters[0])
    for w in parameters[1]:
        vars(w)["main_grad"] = torch.full(w.shape, 0.5)
    for _ in range(2):
        run(*parameters[1])
    for w, plain_w in zip(parameters[1], parameters[0], strict=True):
        assert plain_w.grad is not None and w.grad is None and plain_w.grad.any()
        assert torch.equal(((vars(w)["main_grad"] - 0.5) / 2).bfloat16(), plain_w.grad)
