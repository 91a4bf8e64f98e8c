"""Ulysses pairs: a linear layer and the all-to-all between tokens and heads beside it, one behind the other.

    matmul_swap     q, k, v of own tokens, all heads   ──all-to-all──▶   own heads of all tokens
    swap_matmul     own heads of all tokens            ──all-to-all──▶   all heads of own tokens, times o

forward of matmul_swap, and backward of swap_matmul: the products of the peers' columns come first

    GEMM      [peers', rows 0][peers', rows 1][own columns, all rows][weight gradient, in backward]
    network                   [rows 0        ][rows 1       ]

forward of swap_matmul, and backward of matmul_swap: all columns of a chunk of rows arrive, then their product

    network   [rows 0       ][rows 1       ]
    GEMM      [gradient of   ][rows 0      ][rows 1][weight gradient of the peers' columns]
               own columns, in backward

Cut along rows on both sides: cut along heads, the second form would add up partial products, in an order that depends
on the number of chunks. Pairs of Flux (arXiv 2406.06858: GEMM + all-to-all + transpose) and MegaScale-MoE (2505.11432).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_comm.comm.meeting import channel_of, group_size
from moe_comm.errors import InputError
from moe_comm.kernels.autocast import without_autocast
from moe_comm.kernels.needed_grads import wanted_gradients
from moe_comm.kernels.row_invariant import row_invariant_mm
from moe_comm.overlap.chunked import Lines, check_linear, exact_mm
from moe_comm.overlap.cost import Work
from moe_comm.overlap.options import Overlap


def matmul_swap(x_SD: Tensor, weight_ND: Tensor, group: ProcessGroup | None, overlap: Overlap | None = None) -> Tensor:
    """[W * S, N / W] = this rank's columns of ``x @ weight.T`` of every rank's rows, in order of rank. Collective;
    differentiable once.

    Args:
        x_SD: [S, D] this rank's rows; S, D and the dtype are the same on every rank.
        weight_ND: [N, D] of the same dtype; its outputs stand by the rank that gets them, N / W for each.
        group: None is one rank.
        overlap: chunks of rows and determinism, the same on every rank. The result has the same bits for every choice,
            and so has the gradient of x; so has the weight's if deterministic. That is of this rank's rows: ranks that
            hold the same weight add theirs up.

    Raises:
        InputError: shapes, dtypes or devices do not fit each other, or N does not divide by the ranks.
        RankMismatch: ranks differ (through shared memory always, else where collectives are checked).
        PeerDied, PeerTimeout: a rank is gone or does not come.
    """
    check_linear(x_SD, weight_ND, "matmul_swap")
    _check_cut(weight_ND.shape[0], group, "matmul_swap: the weight's {} outputs")
    return _MatmulSwap.apply(x_SD, weight_ND, group, overlap or Overlap())  # type: ignore[no-any-return]


def swap_matmul(x_TK: Tensor, weight_NK: Tensor, group: ProcessGroup | None, overlap: Overlap | None = None) -> Tensor:
    """[S, N] = this rank's rows of all columns of x, times ``weight.T``. Collective; differentiable once.

    Args:
        x_TK: [W * S, K / W] this rank's columns of all ranks' rows, in order of rank.
        weight_NK: [N, K] of the same dtype, the whole weight.
        group: None is one rank.
        overlap: as in ``matmul_swap``.

    Raises:
        InputError: shapes, dtypes or devices do not fit each other, or the rows do not divide by the ranks.
        RankMismatch: ranks differ (through shared memory always, else where collectives are checked).
        PeerDied, PeerTimeout: a rank is gone or does not come.
    """
    world = group_size(group)
    if x_TK.dim() == 2 and weight_NK.dim() == 2 and x_TK.shape[1] * world != weight_NK.shape[1]:
        raise InputError(
            f"swap_matmul takes x [rows, K / {world}] and weight [N, K]; got {tuple(x_TK.shape)} and "
            f"{tuple(weight_NK.shape)}"
        )
    check_linear(x_TK, weight_NK[:, : x_TK.shape[-1]] if weight_NK.dim() == 2 else weight_NK, "swap_matmul")
    _check_cut(x_TK.shape[0], group, "swap_matmul: {} rows")
    return _SwapMatmul.apply(x_TK, weight_NK, group, overlap or Overlap())  # type: ignore[no-any-return]


def matmul_swap_reference(x_SD: Tensor, weight_ND: Tensor, group: ProcessGroup | None) -> Tensor:
    """The forward pass in plain torch, one step after the other: the bits that ``matmul_swap`` must give."""
    parts_WSn = torch.stack([row_invariant_mm(x_SD, w.t()) for w in weight_ND.chunk(group_size(group))])
    return _swapped(parts_WSn, group).flatten(0, 1)


def swap_matmul_reference(x_TK: Tensor, weight_NK: Tensor, group: ProcessGroup | None) -> Tensor:
    """The forward pass in plain torch, one step after the other: the bits that ``swap_matmul`` must give."""
    world = group_size(group)
    parts_WSk = _swapped(x_TK.unflatten(0, (world, x_TK.shape[0] // world)), group)
    return row_invariant_mm(parts_WSk.movedim(0, 1).flatten(1), weight_NK.t())


def _swapped(parts_W: Tensor, group: ProcessGroup | None) -> Tensor:
    if group_size(group) == 1:
        return parts_W
    assert group is not None
    ones = [1] * group_size(group)
    return channel_of(group).all_to_all(parts_W, ones, ones, "a swap")


class _MatmulSwap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, w_ND: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
        ctx.save_for_backward(x_SD, w_ND)
        ctx.group, ctx.overlap = group, overlap
        if group is None or group_size(group) == 1:
            return row_invariant_mm(x_SD, w_ND.t())
        lines = _lines(_work(False, "forward", x_SD.shape[0], w_ND, group), x_SD, group, overlap)
        return _send_columns(lines, x_SD, w_ND.t())().flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_Tn: Tensor) -> tuple[Tensor | None, ...]:
        x_SD, w_ND = ctx.saved_tensors
        needs_x, needs_w = wanted_gradients(ctx)[:2]
        if group_size(ctx.group) == 1:
            grad_x = row_invariant_mm(grad_Tn, w_ND) if needs_x else None
            return grad_x, exact_mm(grad_Tn.t(), x_SD) if needs_w else None, None, None
        lines = _lines(_work(False, "backward", x_SD.shape[0], w_ND, ctx.group), grad_Tn, ctx.group, ctx.overlap)
        grad_SN = grad_Tn.new_empty(x_SD.shape[0], w_ND.shape[0])
        arrivals = _take_rows(lines, grad_Tn.unflatten(0, (lines.ring.world, x_SD.shape[0])), grad_SN)
        weight = _WeightGradient(lines, grad_Tn, x_SD, grad_SN) if needs_w else None
        grad_x = x_SD.new_empty(x_SD.shape) if needs_x else None
        for rows in arrivals:
            if grad_x is not None:
                row_invariant_mm(grad_SN[rows], w_ND, out=grad_x[rows])
            if weight is not None and not ctx.overlap.deterministic:
                weight.add(rows)
        if weight is not None and ctx.overlap.deterministic:
            weight.add(slice(None))
        return grad_x, weight.sum_ND if weight is not None else None, None, None


class _SwapMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, w_NK: Tensor, group: ProcessGroup | None, overlap: Overlap) -> Tensor:
        ctx.group, ctx.overlap = group, overlap
        if group is None or group_size(group) == 1:
            ctx.save_for_backward(x_TK, w_NK)
            return row_invariant_mm(x_TK, w_NK.t())
        rows_S = x_TK.shape[0] // group_size(group)
        lines = _lines(_work(True, "forward", rows_S, w_NK, group), x_TK, group, overlap)
        whole_SK = x_TK.new_empty(rows_S, w_NK.shape[1])
        y_SN = x_TK.new_empty(rows_S, w_NK.shape[0])
        for rows in _take_rows(lines, x_TK.unflatten(0, (lines.ring.world, rows_S)), whole_SK):
            row_invariant_mm(whole_SK[rows], w_NK.t(), out=y_SN[rows])
        # As large as x, and all that backward needs: x itself can go.
        ctx.save_for_backward(whole_SK, w_NK)
        return y_SN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SN: Tensor) -> tuple[Tensor | None, ...]:
        whole_SK, w_NK = ctx.saved_tensors
        needs_x, needs_w = wanted_gradients(ctx)[:2]
        if group_size(ctx.group) == 1:
            grad_x = row_invariant_mm(grad_SN, w_NK) if needs_x else None
            return grad_x, exact_mm(grad_SN.t(), whole_SK) if needs_w else None, None, None
        finish = None
        if needs_x:
            work = _work(True, "backward", grad_SN.shape[0], w_NK, ctx.group)
            lines = _lines(work, grad_SN, ctx.group, ctx.overlap)
            finish = _send_columns(lines, grad_SN.contiguous(), w_NK)
        grad_w = exact_mm(grad_SN.t(), whole_SK) if needs_w else None
        return finish().flatten(0, 1) if finish is not None else None, grad_w, None, None


def _work(swap_first: bool, direction: str, rows: int, weight: Tensor, group: ProcessGroup) -> Work:
    outputs, inputs = weight.shape
    operator, sent, other = ("swap_matmul", inputs, outputs) if swap_first else ("matmul_swap", outputs, inputs)
    return Work(operator, direction, rows, sent, other, weight.dtype, group_size(group))


def _send_columns(lines: Lines, x_SD: Tensor, b_DN: Tensor) -> Callable[[], Tensor]:
    """Begin to send each rank its columns of x @ b; the call returned gives this rank's of all rows, [W, S, N / W].

    With one span: all products, and what comes out of the swap.
    """
    world, own = lines.ring.world, lines.ring.rank
    columns_W = b_DN.unflatten(1, (world, b_DN.shape[1] // world)).unbind(1)
    width, ones = columns_W[own].shape[1], [1] * world
    # In several spans the own places stay unset: those columns need no network, and are computed while it works.
    peers = lines.ring.scatters[:-1] if len(lines.spans) > 1 else lines.ring.scatters
    started = []
    for first, end in lines.spans:
        parts_Wsn = x_SD.new_empty(world, end - first, width)
        for peer in peers:
            row_invariant_mm(x_SD[first:end], columns_W[peer], out=parts_Wsn[peer])
        started.append((first, end, lines.channel.start_all_to_all(parts_Wsn, ones, ones, lines.description)))
    if len(started) == 1:
        return started[0][2]
    y_WSn = x_SD.new_empty(world, x_SD.shape[0], width)
    row_invariant_mm(x_SD, columns_W[own], out=y_WSn[own])

    def finish() -> Tensor:
        for first, end, arrived in started:
            parts_Wsn = arrived()
            for part in (slice(0, own), slice(own + 1, world)):
                y_WSn[part, first:end] = parts_Wsn[part]
        return y_WSn

    return finish


def _take_rows(lines: Lines, x_WSk: Tensor, out_SK: Tensor) -> Iterator[slice]:
    """Begin to send each rank its rows, of this rank's columns; yields which of one's own have arrived in ``out_SK``,
    with the columns of all ranks."""
    ones = [1] * lines.ring.world
    started = [
        (slice(first, end), lines.channel.start_all_to_all(x_WSk[:, first:end], ones, ones, lines.description))
        for first, end in lines.spans
    ]
    out_SWk = out_SK.unflatten(1, (lines.ring.world, x_WSk.shape[2]))

    def arrivals() -> Iterator[slice]:
        for rows, arrived in started:
            out_SWk[rows] = arrived().movedim(0, 1)
            yield rows

    return arrivals()


def _lines(work: Work, like: Tensor, group: ProcessGroup, overlap: Overlap) -> Lines:
    """Every rank cuts all rows of its work, which are its own."""
    return Lines.of(group, work, like, overlap, work.rows)


class _WeightGradient:
    """grad.T @ x by ranges of the weight's outputs: that of the own columns at once, the peers' as they arrive.

    Each range is one product over all rows if all of them are added at once, whatever the chunks.
    """

    def __init__(self, lines: Lines, grad_Tn: Tensor, x_SD: Tensor, grad_SN: Tensor) -> None:
        world, own, width = lines.ring.world, lines.ring.rank, grad_Tn.shape[1]
        self._x_SD, self._grad_SN = x_SD, grad_SN
        self._peers = [slice(0, own * width), slice((own + 1) * width, world * width)]
        self.sum_ND = grad_Tn.new_zeros(world * width, x_SD.shape[1])
        own_Sn = grad_Tn.unflatten(0, (world, x_SD.shape[0]))[own]
        self._add(slice(own * width, (own + 1) * width), own_Sn, x_SD)

    def add(self, rows: slice) -> None:
        """Take in rows of which all columns have arrived."""
        for part in self._peers:
            self._add(part, self._grad_SN[rows, part], self._x_SD[rows])

    def _add(self, part: slice, grad_sn: Tensor, x_sD: Tensor) -> None:
        with without_autocast(x_sD):
            self.sum_ND[part].addmm_(grad_sn.t(), x_sD)


def _check_cut(length: int, group: ProcessGroup | None, what: str) -> None:
    if length % group_size(group):
        raise InputError(f"{what.format(length)} do not divide evenly over {group_size(group)} ranks")
