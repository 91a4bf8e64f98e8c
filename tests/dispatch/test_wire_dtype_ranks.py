"""Wire dtypes between ranks: the same bits on every backend, bytes on the wire, training."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.comm.channel import Channel
from moe_comm.dispatch import DispatchOptions, WireDtypes
from moe_comm.dispatch.wire_dtype import bytes_per_row
from moe_comm.layers.check import check_grads
from moe_comm.layers.moe.layer import MoEConfig, MoELayer
from moe_comm.layers.moe.router import RouterConfig
from tests.dispatch import cases, workers
from tests.dispatch.cases import Case
from tests.dispatch.workers import Job, Result
from tests.pool import on_ranks
from tests.train.common import train, write_text

MIXED = WireDtypes("fp8_block_pow2", "bf16", "bf16", "fp8_token")
ALL_FP8 = WireDtypes("fp8_block", "fp8_block", "fp8_token", "fp8_block_pow2")
GRADIENTS = 2 * 2.0**-4
"""Relative to the largest value: a value is rounded twice in forward and twice in backward, and then summed."""


CASE_NAMES = (
    "plain",
    "no tokens anywhere",
    "all tokens on the first rank",
    "uneven experts, one rank without",
    "some slots dropped",
    "strided inputs",
    "bfloat16",
    "float16",
    "hidden 1",
    "hidden 1024",
)
CASES = (
    *(cases.BY_NAME[name] for name in CASE_NAMES),
    dataclasses.replace(cases.BY_NAME["plain"], name="weights want no gradient", weights_grad=False, hidden=200),
)


def run_cases(rank: int, world: int, job: Job) -> list[Result]:
    return [workers.run_case(case, job, dist.group.WORLD, rank, world) for case in CASES]


@pytest.mark.parametrize("backend", ["all_to_all", "all_gather", "shared_memory"])
@pytest.mark.parametrize(
    ("wire_dtypes", "world"), [(MIXED, 2), (ALL_FP8, 2), (ALL_FP8, 4)], ids=["mixed-2", "fp8-2", "fp8-4"]
)
def test_same_bits_as_one_rank_with_wire_dtypes(wire_dtypes: WireDtypes, backend: str, world: int, pools: Any) -> None:
    """Rows, output and every gradient for every transport, also after a call with NaN."""
    if backend == "shared_memory":
        pytest.importorskip("moe_comm._C", reason="the native core is not built")
    ranks = pools[world].run(run_cases, Job(backend, wire_dtypes=wire_dtypes), timeout=120)
    changed = 0
    for case, of_ranks in zip(CASES, zip(*ranks, strict=True), strict=True):
        whole = workers.run_case(case, Job("plain", wire_dtypes=wire_dtypes), None, 0, 1)
        for field in ("rows_RD", "y_TD", "x_grad_TD", "weights_grad_TK", "experts_grad"):
            parts, one = [getattr(r, field) for r in of_ranks], getattr(whole, field)
            assert one is None or torch.equal(torch.cat(parts), one), (case.name, field)
        exact = workers.run_case(case, Job("plain"), None, 0, 1)
        changed += not torch.equal(whole.y_TD, exact.y_TD) and not torch.equal(whole.x_grad_TD, exact.x_grad_TD)
    assert changed >= len(CASES) - 3, "wire dtypes must change the bits of most cases"


@on_ranks(2)
def test_combine_with_a_wire_dtype_returns_rows_instead_of_partial_sums(rank: int, world: int) -> None:
    case = cases.BY_NAME["plain"]
    job = Job("all_gather", deterministic=False, wire_dtypes=ALL_FP8)
    whole = workers.run_case(case, Job("plain", wire_dtypes=ALL_FP8), None, 0, 1)
    part = workers.run_case(case, job, dist.group.WORLD, rank, world)
    assert torch.equal(part.y_TD, whole.y_TD[case.rows(rank, world)])


def count_on(dispatcher: Any) -> dict[str, int]:
    """Count the bytes of rows that ``dispatcher`` sends, by operation."""
    sent: dict[str, int] = {}

    def counted(tensor: Tensor, description: str) -> None:
        op = description.split(" (")[0]
        wide = tensor.dim() == 2 and tensor.shape[1] > 3  # rows, because ids and weights are narrower
        sent[op] = sent.get(op, 0) + (tensor.nbytes if wide else 0)

    class Counting(Channel):
        def all_to_all(self, rows: Tensor, send: Any, receive: Any, description: str) -> Tensor:
            counted(rows, description)
            return super().all_to_all(rows, send, receive, description)

        def all_gather(self, tensor: Tensor, description: str) -> Tensor:
            counted(tensor, description)
            return super().all_gather(tensor, description)

    dispatcher.channel.__class__ = Counting
    return sent


@on_ranks(2)
@pytest.mark.parametrize("backend", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("wire_dtypes", [WireDtypes(), MIXED, ALL_FP8], ids=["same", "mixed", "fp8"])
def test_the_bytes_sent_equal_the_formula(rank: int, world: int, wire_dtypes: WireDtypes, backend: str) -> None:
    case = dataclasses.replace(cases.BY_NAME["plain"], hidden=300, top_k=3)
    batch, experts = cases.make(case)
    part, job = batch.part(case, rank, world), Job(backend, wire_dtypes=wire_dtypes)
    dispatcher = workers.build(case, dist.group.WORLD, job, rank, world)
    sent, own = count_on(dispatcher), dispatcher.local_experts
    rows = len(workers.layer(dispatcher, case, part, experts[own.start : own.stop]).rows_RD)
    sent_rows = max(case.tokens_per_rank(world)) if backend == "all_gather" else part.ids_TK.numel()
    rows_by_op = {"dispatch": sent_rows, "combine": rows, "dispatch backward": rows, "combine backward": sent_rows}
    assert sent == {op: n * bytes_per_row(300, wire_dtypes.of(op), torch.float32) for op, n in rows_by_op.items()}


GROUP_SCALES = WireDtypes(dispatch_backward="fp8_group_pow2", combine_backward="fp8_group_pow2")


@on_ranks(2, 4)
@pytest.mark.parametrize(
    ("backend", "weights_grad"),
    [("all_to_all", True), ("all_to_all", False), ("all_gather", True), ("shared_memory", False)],
)
def test_group_scales_are_applied_to_their_own_rows(rank: int, world: int, backend: str, weights_grad: bool) -> None:
    """Gradients that e4m3 can hold are unchanged, and the bytes sent are those of the formula.

    Channels differ by up to 2^80, so a scale applied to a wrong channel, group or rank changes every bit.
    """
    if backend == "shared_memory":
        pytest.importorskip("moe_comm._C", reason="the native core is not built")
    num_experts = 5
    case = Case("groups", tokens=700, hidden=20, num_experts=num_experts, split="uneven", weights_grad=weights_grad)
    batch, _ = cases.make(case)
    g = torch.Generator().manual_seed(3)
    eighths_TD = torch.randint(8, 16, (case.tokens, case.hidden), generator=g) / 8
    size_T = 2.0 ** torch.randint(0, 8, (case.tokens, 1), generator=g)
    batch = dataclasses.replace(
        batch,
        grad_TD=eighths_TD * size_T * 2.0 ** torch.arange(-40, 40, 4),
        weights_TK=2.0 ** torch.randint(-3, 1, (case.tokens, case.top_k), generator=g),
    )
    part = batch.part(case, rank, world)
    results, sent = [], {}
    for wire_dtypes in (WireDtypes(), GROUP_SCALES):
        dispatcher = workers.build(
            case, dist.group.WORLD, Job(backend, deterministic=False, wire_dtypes=wire_dtypes), rank, world
        )
        sent = count_on(dispatcher) if hasattr(dispatcher, "channel") else {}
        own = dispatcher.local_experts
        results.append(workers.layer(dispatcher, case, part, torch.ones(len(own), case.hidden)))
    plain, grouped = results
    fields = ("y_TD", "x_grad_TD", "experts_grad", *(["weights_grad_TK"] if weights_grad else []))
    assert all(torch.equal(getattr(plain, field), getattr(grouped, field)) for field in fields)
    if backend != "all_to_all":
        return
    rows_E = torch.bincount(part.ids_TK.flatten(), minlength=num_experts)
    rows_WL = torch.stack(
        [
            torch.bincount(batch.part(case, r, world).ids_TK.flatten(), minlength=num_experts)[own.start : own.stop]
            for r in range(world)
        ]
    )
    for op, rows in {"combine backward": rows_E, "dispatch backward": rows_WL}.items():
        assert sent[op] == int(32 * rows.sum() + 4 * 20 * ((rows + 127) // 128).sum()), op


@on_ranks(2, 4)
def test_gradients_with_fp8_have_the_bits_of_one_rank_and_are_near_float64() -> None:
    """Bits equal those of EP 1; errors against float64 are within ``GRADIENTS`` of the largest value."""
    config, options = MoEConfig(160, 32, RouterConfig(8, 2)), DispatchOptions(wire_dtypes=ALL_FP8)
    layer = MoELayer.build(config, dist.group.WORLD, backend="all_to_all", seed=0, options=options)
    report = check_grads(layer, tokens=11, tolerance=GRADIENTS, cases=("unequal tokens", "dropped slots"))
    assert report.ok, report
    max_error = max(c.max_rel for c in report.comparisons if c.against == "float64")
    assert max_error > 1e-3, "the error must exceed that of fp32, or nothing was rounded"


# --- training ---

LEARNING = ("run.steps=24", "optimizer.lr=0.005", "model.hidden=32")
DEEPSEEK = ("payload.dispatch=fp8_block_pow2", "payload.combine_backward=fp8_block_pow2")
EVERYWHERE = (*DEEPSEEK, "payload.combine=fp8_block_pow2", "payload.dispatch_backward=fp8_block_pow2")
NOISE = 0.015
"""Runs with different seeds differ by 8%; bf16 as the wire dtype changes a run by up to 0.6%."""


@pytest.mark.slow
def test_training_with_fp8_wire_dtypes_reaches_the_same_loss_up_to_noise(tmp_path: Path, pools: Any) -> None:
    settings = [*write_text(tmp_path), *LEARNING]
    plain = train(0, 1, settings)
    assert plain.losses[-1] < 0.8 * plain.losses[0], "the loss must fall"
    for backend, wire_dtypes in {"all_to_all": DEEPSEEK, "auto": EVERYWHERE}.items():
        for result in pools[2].run(train, [*settings, *wire_dtypes, f"parallel.backend={backend}"], timeout=120):
            assert result.status == plain.status
            assert result.losses[-1] != pytest.approx(plain.losses[-1], rel=1e-5), "the wire dtypes must be used"
            assert sum(result.losses[-5:]) == pytest.approx(sum(plain.losses[-5:]), rel=NOISE)
            assert result.validation == pytest.approx(plain.validation, rel=NOISE)
