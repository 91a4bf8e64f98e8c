"""The operators for experts as Triton kernels, interpreted by 4 processes.

Inputs of small whole numbers have exact sums and are compared in bits; random inputs within 2 ulp per term.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("triton")

from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import channel_of, communicator_of, configure_collectives
from moe_comm.dispatch import plain
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher, Routes
from moe_comm.dispatch.types import DispatchOptions
from moe_comm.dispatch.wire_dtype import WireDtypes
from moe_comm.errors import ConfigError, InputError, PeerTimeout, RankMismatch, RoutingError
from moe_comm.overlap.ring import Ring
from moe_comm.overlap.tiles import Cut
from moe_comm.overlap.triton import launch
from moe_comm.overlap.triton.experts import dispatch_matmul, matmul_combine
from moe_comm.overlap.triton.routes import (
    RowPositions,
    combine_sums,
    combine_tiles,
    direct_sends,
    dispatch_tiles,
    relay_items,
    relay_sends,
)
from moe_comm.overlap.triton.tiling import ExpertTiling
from moe_comm.topology import ExpertPlacement
from tests.pool import RankPool, with_longer_deadline

WORLD, D, F, K = 4, 32, 24, 3
SMALL = ExpertTiling(rows=16, columns=16, inner=16, send_rows=8, send_columns=32, sum_tokens=8, slices=2, programs=3)


@dataclass(frozen=True)
class Case:
    """experts, tokens: numbers on each rank. route: how slots choose their expert (random | one | few)."""

    experts: tuple[int, ...]
    tokens: tuple[int, ...]
    route: str = "random"

    @property
    def placement(self) -> ExpertPlacement:
        return ExpertPlacement(self.experts)

    def ids(self, rank: int) -> Tensor:
        total = sum(self.experts)
        generator = torch.Generator().manual_seed(rank)
        ids = torch.rand(self.tokens[rank], total, generator=generator).topk(K).indices
        if self.route == "one":
            return torch.full_like(ids, total - 1)
        if self.route == "few":  # experts 0 and 1 get all rows; some slots are dropped
            ids = ids % 2
        return ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -1)


CASES = {
    "balanced": Case((2, 2, 2, 2), (9, 12, 7, 11)),
    "uneven": Case((3, 0, 2, 1), (5, 24, 0, 3)),
    "empty experts": Case((1, 1, 1, 1), (6, 0, 9, 4), "few"),
    "one expert": Case((2, 1, 1, 1), (10, 3, 8, 1), "one"),
    "no tokens": Case((1, 1, 1, 1), (0, 0, 0, 0)),
}


@pytest.fixture(scope="module")
def interpreted() -> Iterator[RankPool]:
    """Ranks that interpret Triton kernels: they import Triton after TRITON_INTERPRET is set."""
    with pytest.MonkeyPatch.context() as patch, RankPool(WORLD, bare=True) as pool:
        patch.setenv("TRITON_INTERPRET", "1")
        yield pool


def _global_inputs(case: Case, dtype: torch.dtype, whole_numbers: bool = True) -> dict[str, list[Tensor]]:
    """Return all inputs by rank. Whole numbers are small, so that every sum of products is exact in fp32."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int, most: int = 2) -> Tensor:
        if whole_numbers:
            return torch.randint(-most, most + 1, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "x": [draw(tokens, D) for tokens in case.tokens],
        "ids": [case.ids(rank) for rank in range(WORLD)],
        "w1": [draw(experts, F, D) for experts in case.experts],
        "w2": [draw(experts, D, F) for experts in case.experts],
        "weights": [draw(tokens, K, most=3).float() for tokens in case.tokens],
        "grad": [draw(tokens, D) for tokens in case.tokens],
    }


@dataclass(frozen=True)
class PassResult:
    """Results of one rank. grads: of x, both weights and the routing weights."""

    h: Tensor
    y: Tensor
    grads: tuple[Tensor, ...]


def _rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    return exact.to(dtype).double()


def _expected(case: Case, dtype: torch.dtype) -> list[PassResult]:
    """Compute the results of all ranks in one process, in float64, rounded where the operators round."""
    inputs = {name: [t.double() for t in values] for name, values in _global_inputs(case, dtype).items()}
    ids = torch.cat(_global_inputs(case, dtype)["ids"])
    x, weights, grad = (torch.cat(inputs[name]) for name in ("x", "weights", "grad"))
    w1, w2 = torch.cat(inputs["w1"]), torch.cat(inputs["w2"])
    y, grad_x = torch.zeros_like(x), torch.zeros_like(x)
    grad_w1, grad_w2, grad_weights = torch.zeros_like(w1), torch.zeros_like(w2), torch.zeros_like(weights)
    rows: list[list[Tensor]] = []
    for e in range(len(w1)):
        token, slot = (ids == e).nonzero(as_tuple=True)
        h = _rounded(x[token] @ w1[e].T, dtype)
        out = _rounded(h @ w2[e].T, dtype)
        y.index_put_((token,), weights[token, slot, None] * out, accumulate=True)
        grad_out = _rounded(grad[token] * weights[token, slot, None], dtype)
        grad_h = _rounded(grad_out @ w2[e], dtype)
        grad_x.index_put_((token,), _rounded(grad_h @ w1[e], dtype), accumulate=True)
        grad_w2[e], grad_w1[e] = grad_out.T @ h, grad_h.T @ x[token]
        grad_weights[token, slot] = (grad[token] * out).sum(1)
        rows.append([h])
    per_rank = [0, *np.cumsum(case.experts).tolist()]
    tokens = list(case.tokens)
    split = [y.split(tokens), grad_x.split(tokens), grad_weights.split(tokens)]
    results = []
    for rank in range(WORLD):
        own = slice(per_rank[rank], per_rank[rank + 1])
        h = torch.cat([torch.zeros(0, F, dtype=torch.double), *(part for e in rows[own] for part in e)])
        grads = (split[1][rank], grad_w1[own], grad_w2[own])
        rounded = tuple(t.to(dtype) for t in (h, split[0][rank], *grads))
        results.append(PassResult(rounded[0], rounded[1], (*rounded[2:], split[2][rank].float())))
    return results


def _forward_and_backward(rank: int, world: int, arg: tuple[Case, torch.dtype, ExpertTiling]) -> PassResult:
    case, dtype, tiling = arg
    inputs = {name: values[rank] for name, values in _global_inputs(case, dtype).items()}
    dispatcher = AllToAllDispatcher(case.placement, dist.group.WORLD, rank)
    leaves = [inputs[name].requires_grad_() for name in ("x", "w1", "w2", "weights")]
    h, dispatch = dispatch_matmul(dispatcher, leaves[0], inputs["ids"], leaves[1], tiling)
    y = matmul_combine(h, leaves[2], leaves[3], dispatch)
    return PassResult(h.detach(), y.detach(), torch.autograd.grad(y, leaves, inputs["grad"]))


@pytest.mark.parametrize(
    ("name", "relay", "dtype"),
    [
        ("balanced", False, torch.float32),
        ("balanced", True, torch.bfloat16),
        ("uneven", False, torch.bfloat16),
        ("uneven", True, torch.float32),
        ("empty experts", False, torch.float32),
        ("one expert", True, torch.bfloat16),
        ("no tokens", True, torch.float32),
    ],
    ids=str,
)
def test_output_and_gradients_are_those_of_one_process(
    name: str, relay: bool, dtype: torch.dtype, interpreted: RankPool
) -> None:
    case = CASES[name]
    tiling = dataclasses.replace(SMALL, relay=relay)
    results = interpreted.run(_forward_and_backward, (case, dtype, tiling))
    for actual, expected in zip(results, _expected(case, dtype), strict=True):
        assert torch.equal(actual.h, expected.h)
        assert torch.equal(actual.y, expected.y)
        for grad, exact_grad in zip(actual.grads, expected.grads, strict=True):
            assert grad.dtype == exact_grad.dtype
            assert torch.equal(grad, exact_grad)


def _accumulate(rank: int, world: int, marked: bool) -> None:
    """Compare the sums in ``main_grad`` after two backward passes with twice the gradient of one pass.

    marked: whether the weights have the attribute by which Megatron requires a gradient from autograd.
    """
    case, dtype = CASES["empty experts"], torch.bfloat16
    inputs = {name: values[rank] for name, values in _global_inputs(case, dtype).items()}
    dispatcher = AllToAllDispatcher(case.placement, dist.group.WORLD, rank)

    def run(w1: Tensor, w2: Tensor) -> None:
        h, dispatch = dispatch_matmul(dispatcher, inputs["x"], inputs["ids"], w1, SMALL)
        matmul_combine(h, w2, inputs["weights"], dispatch).backward(inputs["grad"])

    plain_weights, weights = ([inputs[w].clone().requires_grad_() for w in ("w1", "w2")] for _ in range(2))
    run(*plain_weights)
    for w in weights:
        vars(w).update(main_grad=torch.full(w.shape, 0.5), **({"grad_added_to_main_grad": False} if marked else {}))
    for _ in range(2):
        run(*weights)
    for w, plain_w in zip(weights, plain_weights, strict=True):
        assert plain_w.grad is not None
        assert bool(plain_w.grad.any()) == (rank < 2), "experts 0 and 1 have rows"
        assert torch.equal(((vars(w)["main_grad"] - 0.5) / 2).to(dtype), plain_w.grad)
        assert (w.grad is not None) == vars(w).get("grad_added_to_main_grad", False) == marked


@pytest.mark.parametrize("marked", [False, True])
def test_weight_gradients_are_added_to_main_grad(marked: bool, interpreted: RankPool) -> None:
    interpreted.run(_accumulate, marked)


def _compare_tilings(rank: int, world: int, dtype: torch.dtype) -> None:
    """Run two tilings on random numbers. Compare their bits, and the sums with those of the dispatcher's combine."""
    case = CASES["balanced"]
    inputs = {name: values[rank] for name, values in _global_inputs(case, dtype, whole_numbers=False).items()}
    dispatcher = AllToAllDispatcher(case.placement, dist.group.WORLD, rank)
    first: tuple[Tensor, Tensor] | None = None
    for change in ({}, {"relay": True, "programs": 5, "send_rows": 4, "slices": 1, "sum_tokens": 4}):
        tiling = dataclasses.replace(SMALL, **change)
        h, dispatch = dispatch_matmul(dispatcher, inputs["x"], inputs["ids"], inputs["w1"], tiling)
        y, results = launch.run_combine(dispatch, h, inputs["w2"], inputs["weights"])
        expected_y = dispatcher.combine(results.clone(), inputs["weights"], dispatch.handle)
        assert torch.equal(y, expected_y)
        if first is None:
            first = (h, y)
            reference = dispatcher.dispatch(inputs["x"], inputs["ids"])
            exact = torch.cat(
                [
                    rows.double() @ w.double().T
                    for rows, w in zip(
                        reference.rows_RD.split(reference.handle.rows_per_expert), inputs["w1"], strict=True
                    )
                ]
            )
            ulp = torch.finfo(torch.float32).eps * D + torch.finfo(dtype).eps
            torch.testing.assert_close(h.double(), exact, rtol=2 * ulp, atol=2 * ulp * float(exact.abs().max()))
        assert torch.equal(h, first[0])
        assert torch.equal(y, first[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_relaying_programs_and_slices_do_not_change_a_bit(dtype: torch.dtype, interpreted: RankPool) -> None:
    interpreted.run(_compare_tilings, dtype)


def _call_with_bad_input(rank: int, world: int, arg: Any) -> None:
    case = CASES["balanced"]
    inputs = {name: values[rank] for name, values in _global_inputs(case, torch.float32).items()}
    dispatcher = AllToAllDispatcher(case.placement, dist.group.WORLD, rank)
    ids = inputs["ids"].clone()
    if rank == 2:
        ids[1, 1] = 8
    with pytest.raises(RoutingError, match="expert id 8 of token 1, slot 1"):
        dispatch_matmul(dispatcher, inputs["x"], ids, inputs["w1"], SMALL)
    with pytest.raises(InputError, match=r"needs weights \[2, .., 32\]"):
        dispatch_matmul(dispatcher, inputs["x"], inputs["ids"], inputs["w1"][: 2 - (rank == 1)], SMALL)
    with pytest.raises(InputError, match="float64"):
        dispatch_matmul(dispatcher, inputs["x"].double(), inputs["ids"], inputs["w1"].double(), SMALL)
    with pytest.raises(RankMismatch):
        dispatch_matmul(
            dispatcher, inputs["x"], inputs["ids"], inputs["w1"], dataclasses.replace(SMALL, relay=rank == 3)
        )
    wire_dtypes = WireDtypes(dispatch="bf16")
    bf16_dispatcher = AllToAllDispatcher(
        case.placement, dist.group.WORLD, rank, DispatchOptions(wire_dtypes=wire_dtypes)
    )
    with pytest.raises(ConfigError, match="send rows in their own dtype"):
        dispatch_matmul(bf16_dispatcher, inputs["x"], inputs["ids"], inputs["w1"], SMALL)
    h, dispatch = dispatch_matmul(dispatcher, inputs["x"], inputs["ids"], inputs["w1"], SMALL)
    with pytest.raises(InputError, match="matmul_combine needs weights"):
        matmul_combine(h, inputs["w2"], inputs["weights"][: len(h) if rank else 1], dispatch)
    y = matmul_combine(h, inputs["w2"], inputs["weights"], dispatch)
    assert bool(y.isfinite().all())


def test_bad_input_is_a_typed_error_on_every_rank_and_the_next_call_works(interpreted: RankPool) -> None:
    interpreted.run(_call_with_bad_input)


def _hang_on_rank_2(rank: int, world: int, arg: tuple[str, bool, float]) -> str:
    """Rank 2 takes part in the handshake and then hangs."""
    op, relay, timeout_s = arg
    case = CASES["balanced"]
    inputs = {name: values[rank] for name, values in _global_inputs(case, torch.float32).items()}
    group = dist.new_group()
    try:
        dispatcher = AllToAllDispatcher(case.placement, group, rank)
        channel_of(group)
        tiling = dataclasses.replace(SMALL, relay=relay)
        h, dispatch = dispatch_matmul(dispatcher, inputs["x"], inputs["ids"], inputs["w1"], tiling)
        matmul_combine(h, inputs["w2"], inputs["weights"], dispatch)  # allocates memory before the deadline is short
        dispatch.handshake("combine")
        configure_collectives(CollectiveOptions(timeout_s=timeout_s))  # only now, because setting up may take long
        message = ""
        if rank != 2:
            call = {
                "dispatch": lambda: launch.run_dispatch(dispatch, inputs["x"], None, inputs["w1"]),
                "combine": lambda: launch.run_combine(dispatch, h, inputs["w2"], inputs["weights"]),
            }
            with pytest.raises(PeerTimeout) as error:
                call[op]()
            message = str(error.value)
            with pytest.raises(PeerTimeout):
                launch.run_dispatch(dispatch, inputs["x"], None, inputs["w1"])
        dist.barrier()
        return message
    finally:
        communicator_of(group).forget(("symmetric memory", torch.device("cpu")))
        configure_collectives(CollectiveOptions())


@pytest.mark.parametrize(
    ("op", "relay", "flag"),
    [
        ("dispatch", False, "rows of rank 2 for expert"),
        ("dispatch", True, "block [0-9]+ of relayed rows"),
        ("combine", False, "slice [01] of 2 of the results of rank 2"),
    ],
)
def test_a_rank_that_hangs_is_named_with_its_flag(op: str, relay: bool, flag: str, interpreted: RankPool) -> None:
    def check(timeout_s: float) -> None:
        errors = interpreted.run(_hang_on_rank_2, (op, relay, timeout_s))
        for rank in (0, 1, 3):
            assert "rank 2" in errors[rank]
            assert re.search(flag, errors[rank])

    with_longer_deadline(check, 2.0, 30.0)


def _source_routes(ids_TK: Tensor, rows_WE: Any) -> Routes:
    order, place_TK = plain.order_slots(ids_TK, rows_WE.shape[1])
    slots = order[: int((ids_TK >= 0).sum())]
    return Routes(place_TK, slots, None, None, (), (), (), rows_WE)


@pytest.mark.parametrize("name", CASES)
def test_positions_are_ordered_by_expert_source_token_and_slot(name: str) -> None:
    case = CASES[name]
    ids = [case.ids(rank) for rank in range(WORLD)]
    rows_WE = np.stack([plain.count_slots(one, sum(case.experts))[: sum(case.experts)].numpy() for one in ids])
    positions = [
        RowPositions.of(ids[r], _source_routes(ids[r], rows_WE), case.placement, Ring(r, WORLD)) for r in range(WORLD)
    ]
    for owner in range(WORLD):
        rows = []
        for source, source_positions in enumerate(positions):
            for token, slot in (source_positions.owner_TK == owner).nonzero().tolist():
                expert = int(ids[source][token, slot])
                rows.append((int(source_positions.place_TK[token, slot]), (expert, source, token, slot)))
        rows.sort()
        assert [row for row, _ in rows] == list(range(positions[owner].num_rows))
        assert [key for _, key in rows] == sorted(key for _, key in rows)


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("name", CASES)
def test_sent_rows_match_the_flags_that_are_waited_for(name: str, block: int) -> None:
    """Rows are sent once, to their positions. Each flag that is waited for is raised by the expected rank."""
    case = CASES[name]
    ids = [case.ids(rank) for rank in range(WORLD)]
    rows_WE = np.stack([plain.count_slots(one, sum(case.experts))[: sum(case.experts)].numpy() for one in ids])
    positions = [
        RowPositions.of(ids[r], _source_routes(ids[r], rows_WE), case.placement, Ring(r, WORLD)) for r in range(WORLD)
    ]
    relayed_WW = torch.stack([own_positions.relayed_rows() for own_positions in positions]).numpy()
    raised: dict[tuple[int, int], int] = {}
    arrivals: dict[tuple[int, int], int] = {}
    blocks: dict[tuple[int, int], int] = {}
    for source, own_positions in enumerate(positions):
        sends = direct_sends(own_positions, block)
        for peer, first, num, row, flag, counter, reach in sends.items.tolist():
            blocks[source, counter] = blocks.get((source, counter), 0) + 1
            if blocks[source, counter] == reach:
                raised[peer, flag] = source
            for i in range(num):
                slot = int(sends.index[first + i])
                assert int(own_positions.place_TK.view(-1)[slot]) == row + i
                assert int(own_positions.owner_TK.view(-1)[slot]) == peer
                arrivals[peer, row + i] = arrivals.get((peer, row + i), 0) + 1
        for peer, first, num, slot, _, _, reach in relay_sends(own_positions, relayed_WW, block).items.tolist():
            assert reach == 1
            for i in range(num):
                arrivals[peer, -1 - slot - i] = arrivals.get((peer, -1 - slot - i), 0) + 1
                token = int(relay_sends(own_positions, relayed_WW, block).index[first + i])
                assert bool((own_positions.owner_TK[token] == peer).any())
    assert set(arrivals.values()) <= {1}
    for rank, own_positions in enumerate(positions):
        assert sum(1 for peer, row in arrivals if peer == rank and row >= 0) == own_positions.num_rows
        relay = relay_items(own_positions, relayed_WW, block)
        relayed_here = {-1 - row for peer, row in arrivals if peer == rank and row < 0}
        assert relayed_here == {slot + i for _, slot, num, _, _ in relay.items.tolist() for i in range(num)}
        assert all(slot < relay.slots for slot in relayed_here)
        tiles = dispatch_tiles(own_positions, Cut(8), F, relayed=False)
        awaited = {(flag, source) for flag, _, source in tiles.flags.tolist()}
        assert awaited == {(flag, source) for (peer, flag), source in raised.items() if peer == rank}
        assert sorted(row for t in tiles.items.tolist() for row in range(t[1], t[2])) == list(
            range(own_positions.num_rows)
        )
        sums = combine_sums(own_positions, D, 2, 16, block)
        awaited_sums = {(s, int(source)) for s in range(2) for source in sums.sources}
        raised_flags = {
            (counter // WORLD, raiser)
            for raiser, other_positions in enumerate(positions)
            for counter, _, peer in combine_tiles(other_positions, Cut(8), D, 2, 16).flags.tolist()
            if peer == rank
        }
        assert raised_flags == awaited_sums
        assert sum(num * (end - first) for _, _, num, first, end in sums.items.tolist()) == own_positions.num_tokens * D


@pytest.mark.parametrize(
    "change", [{"rows": 24}, {"columns": 8}, {"programs": 2}, {"communicating": 1.0}, {"slices": 0}, {"sum_tokens": 3}]
)
def test_an_invalid_tiling_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(SMALL, **change)
