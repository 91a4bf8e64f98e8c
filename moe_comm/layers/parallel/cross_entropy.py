"""Cross-entropy over a vocabulary that is split over tensor-parallel ranks, without materializing all logits.

For each chunk of C tokens, on each rank of the group:

    h_CD ──@ own rows of the weightᵀ──▶ logits_CV (own rows) ──▶ max, sum of exp, the target's logit
                                                             ──exchange [C, 3]──▶ log-sum-exp over all rows ──▶ loss_C
         (softmax - one-hot) of own rows, in place ──▶ part of the hidden states' gradient, sum into the weight's

The largest tensor is [C, V / W]. As in Liger Kernel (arXiv 2410.10989), gradients are computed in the forward pass,
while the logits exist, and scaled in backward: nothing is computed twice. Saved for backward are the gradient of the
hidden states, and that of the weight in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.errors import InputError, RankMismatch
from moe_comm.kernels.autograd import (
    accumulate_dtype,
    cast_parameter,
    compute_dtype,
    needed_gradients,
    once_differentiable,
    without_autocast,
)
from moe_comm.layers.parallel.collectives import (
    gather_dim,
    gather_values,
    group_rank,
    group_size,
    scatter_sum,
    sum_values,
)

IGNORE_INDEX = -100
"""Targets with this value have no loss."""
CHUNK_ELEMENTS = 1 << 24
"""Default number of logits per chunk on one rank: 64 MB in fp32."""


@dataclass(frozen=True)
class _Call:
    """Parameters that are the same for all chunks. rows_W: weight rows of each rank. chunk: tokens per chunk."""

    group: ProcessGroup | None
    rows_W: tuple[int, ...]
    chunk: int
    ignore_index: int
    sequence_dim: int | None
    needs_x: bool
    needs_weight: bool


def vocab_parallel_cross_entropy(
    x_BSD: Tensor,
    weight_VD: Tensor,
    targets_BS: Tensor,
    group: ProcessGroup | None = None,
    *,
    ignore_index: int = IGNORE_INDEX,
    chunk: int | None = None,
    sequence_dim: int | None = 1,
) -> Tensor:
    """Return the sum over tokens of the cross-entropy of softmax(x @ weight.T). Collective.

    With ``sequence_dim``, each rank returns the loss of its own tokens. These losses add up over the group, and the
    gradients are those of the total, for this rank's hidden states and weight rows. All ranks must run backward with
    the same factor. Without ``sequence_dim``, each rank returns the total loss, and the gradient of the hidden states
    is complete on each rank.

    Args:
        x_BSD: [B, S / W, D] hidden states of this rank; without ``sequence_dim`` [B, S, D], equal on all ranks. Any
            number of leading dimensions.
        weight_VD: [own rows, D] of the output projection, any number of rows, in order of rank.
        targets_BS: [B, S] ids of all tokens, equal on all ranks.
        group: tensor-parallel group; None: this rank has all rows.
        ignore_index: targets with this value have no loss and no gradient.
        chunk: tokens per chunk; None: ``CHUNK_ELEMENTS`` logits per chunk.
        sequence_dim: dimension of x in which tokens are split over the ranks.

    Returns:
        Scalar, fp32 (float64 for float64), as are log-sum-exp and the weight's gradient. The GEMMs run in the dtype of
        x, or autocast's.

    Raises:
        InputError: shapes or dtypes do not match, or a target is out of range; raised on all ranks of the group.
        RankMismatch: ranks differ in targets, ``chunk``, or whether x needs a gradient; raised on all ranks.
        PeerDied, PeerTimeout: a rank failed, or did not call in time.
    """
    grad = torch.is_grad_enabled()
    needs_x, needs_weight = grad and x_BSD.requires_grad, grad and weight_VD.requires_grad
    fault = _input_error(x_BSD, weight_VD, targets_BS, group, chunk, sequence_dim)
    rows_W = _compare_inputs(x_BSD, weight_VD, targets_BS, group, (chunk or 0, ignore_index, needs_x), fault)
    _check_targets(targets_BS, sum(rows_W), ignore_index)
    tokens = targets_BS.numel()
    chunk = min(chunk or max(1, CHUNK_ELEMENTS // max(*rows_W, 1)), max(tokens, 1))
    call = _Call(group, rows_W, chunk, ignore_index, sequence_dim, needs_x, needs_weight)
    return _CrossEntropy.apply(x_BSD, weight_VD, targets_BS, call)  # type: ignore[no-any-return]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, weight_VD: Tensor, targets_BS: Tensor, call: _Call) -> Tensor:
        ctx.dtypes = x_BSD.dtype, weight_VD.dtype
        # Cast inside of the autograd function, so that the weight's gradient is not rounded to 16 bits.
        x_BSD, weight_VD = x_BSD.to(compute_dtype(x_BSD)), cast_parameter(weight_VD, x_BSD)
        with without_autocast(x_BSD):
            full_BSD = x_BSD if call.sequence_dim is None else gather_dim(x_BSD, call.group, call.sequence_dim)
            loss_T, grad_TD, grad_VD = _chunks(full_BSD.flatten(0, -2), weight_VD, targets_BS.reshape(-1), call)
            grad_BSD = None if grad_TD is None else grad_TD.view(full_BSD.shape)
            loss_BS = loss_T.view(targets_BS.shape)
            if call.sequence_dim is None:
                grad_BSD = None if grad_BSD is None else sum_values(grad_BSD, call.group)
            else:
                grad_BSD = None if grad_BSD is None else scatter_sum(grad_BSD, call.group, call.sequence_dim)
                world, dim = group_size(call.group), call.sequence_dim
                loss_BS = loss_BS.chunk(world, dim)[group_rank(call.group)] if world > 1 else loss_BS
        ctx.save_for_backward(grad_BSD, grad_VD)
        return loss_BS.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_BSD, grad_VD = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        needs_x, needs_weight, *_ = needed_gradients(ctx)
        return (
            (grad_BSD * grad).to(x_dtype) if needs_x else None,
            (grad_VD * grad).to(weight_dtype) if needs_weight else None,
            None,
            None,
        )


def _chunks(
    x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, call: _Call
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return each token's loss, this rank's part of the hidden states' gradient, and its weight rows' gradient."""
    wide = accumulate_dtype(x_TD.dtype)
    num_rows, first_row = weight_VD.shape[0], sum(call.rows_W[: group_rank(call.group)])
    loss_T = torch.zeros(x_TD.shape[0], dtype=wide, device=x_TD.device)
    grad_TD = torch.empty_like(x_TD) if call.needs_x else None
    grad_VD = torch.zeros_like(weight_VD, dtype=wide) if call.needs_weight else None
    for start in range(0, x_TD.shape[0], call.chunk):
        tokens = slice(start, start + call.chunk)
        x_CD, targets_C = x_TD[tokens], targets_T[tokens]
        valid_C = targets_C != call.ignore_index
        local_C = valid_C & (targets_C >= first_row) & (targets_C < first_row + num_rows)
        row_C1 = (targets_C - first_row).where(local_C, 0).long().unsqueeze(1)
        exp_CV = (x_CD @ weight_VD.t()).to(wide)
        # The steps below work in place: exp_CV holds the logits first, then their exponentials, then the gradient.
        target_C = exp_CV.gather(1, row_C1).squeeze(1).where(local_C, 0.0) if num_rows else exp_CV.new_zeros(len(x_CD))
        max_C = exp_CV.amax(1) if num_rows else exp_CV.new_full((len(x_CD),), -torch.inf)
        sum_C = exp_CV.sub_(max_C.unsqueeze(1)).exp_().sum(1)
        lse_C, target_C = _reduce_over_rows(max_C + sum_C.log() if num_rows else max_C, target_C, call.group)
        loss_T[tokens] = (lse_C - target_C).where(valid_C, 0.0)
        if grad_TD is None and grad_VD is None:
            continue
        # The softmax over the rows of all ranks; 0 for ignored tokens.
        exp_CV.mul_(((max_C - lse_C).exp() * valid_C).unsqueeze(1))
        if num_rows:
            exp_CV.scatter_add_(1, row_C1, local_C.to(wide).neg_().unsqueeze(1))
        grad_CV = exp_CV.to(x_TD.dtype)
        del exp_CV
        if grad_TD is not None:
            torch.mm(grad_CV, weight_VD, out=grad_TD[tokens])
        if grad_VD is not None:
            if grad_VD.dtype == x_TD.dtype:
                grad_VD.addmm_(grad_CV.t(), x_CD)
            else:
                grad_VD += grad_CV.t() @ x_CD
        del grad_CV  # free the memory before the next chunk's logits
    return loss_T, grad_TD, grad_VD


def _reduce_over_rows(lse_C: Tensor, target_C: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return [C] log-sum-exp over the rows of all ranks, and [C] the target's logit, which one rank holds."""
    if group_size(group) == 1:
        return lse_C, target_C
    gathered_W2C = gather_values(torch.stack((lse_C, target_C)), group, "the vocabulary's log-sum-exp")
    return gathered_W2C[:, 0].logsumexp(0), gathered_W2C[:, 1].sum(0)


def _input_error(
    x_BSD: Tensor,
    weight_VD: Tensor,
    targets_BS: Tensor,
    group: ProcessGroup | None,
    chunk: int | None,
    sequence_dim: int | None,
) -> InputError | None:
    world = group_size(group)
    if x_BSD.dim() < 2 or weight_VD.dim() != 2 or x_BSD.shape[-1] != weight_VD.shape[1]:
        return InputError(
            f"cross-entropy needs x [.., D] and weight [V, D]; got {tuple(x_BSD.shape)} and {tuple(weight_VD.shape)}"
        )
    if sequence_dim is not None and not 0 <= sequence_dim < x_BSD.dim() - 1:
        return InputError(f"sequence_dim must be a token dimension of x {tuple(x_BSD.shape)}; got {sequence_dim}")
    expected = [n * world if dim == sequence_dim else n for dim, n in enumerate(x_BSD.shape[:-1])]
    if list(targets_BS.shape) != expected:
        return InputError(
            f"hidden states of shape {tuple(x_BSD.shape)} on each of {world} rank(s) need targets {expected}; "
            f"got {tuple(targets_BS.shape)}"
        )
    if targets_BS.dtype not in (torch.int64, torch.int32):
        return InputError(f"targets must be int64 or int32; got {targets_BS.dtype}")
    if compute_dtype(x_BSD) != cast_parameter(weight_VD, x_BSD).dtype:
        return InputError(f"x is {x_BSD.dtype} and the weight {weight_VD.dtype}; convert one, or use torch.autocast")
    if chunk is not None and chunk < 1:
        return InputError(f"chunk must be at least 1 token; got {chunk}")
    return None


def _compare_inputs(
    x_BSD: Tensor,
    weight_VD: Tensor,
    targets_BS: Tensor,
    group: ProcessGroup | None,
    options: tuple[int, ...],
    fault: InputError | None,
) -> tuple[int, ...]:
    """Return the number of rows of each rank, after comparing the inputs. An error of one rank is raised on all.

    options: further values that must be equal on all ranks.
    """
    if group_size(group) == 1:
        if fault is not None:
            raise fault
        return (weight_VD.shape[0],)
    # Two sums detect different targets: of the ids, and of the ids times their positions.
    flat_T = targets_BS.reshape(-1).long()
    position_T = torch.arange(flat_T.numel(), device=flat_T.device)
    targets = torch.stack((flat_T.sum(), (flat_T * position_T).sum()))
    compared = [flat_T.numel(), x_BSD.shape[-1] if x_BSD.dim() else 0, *options]
    message = torch.tensor(
        [int(fault is not None), weight_VD.shape[0], *compared], dtype=torch.int64, device=flat_T.device
    )
    message = torch.cat((message, targets))
    rows = gather_values(message, group, "the start of a cross-entropy").tolist()
    if fault is not None:
        raise fault
    failed_ranks = [rank for rank, row in enumerate(rows) if row[0]]
    if failed_ranks:
        raise InputError(
            f"ranks {failed_ranks} of the group passed invalid input to the cross-entropy; see their messages"
        )
    if any(row[2:] != rows[0][2:] for row in rows):
        raise RankMismatch(
            "ranks differ in a cross-entropy: by rank, (tokens, hidden size, chunk, ignore_index, whether x needs a "
            "gradient, sum of targets, sum of targets times positions) are "
            f"{[tuple(row[2:]) for row in rows]}"
        )
    return tuple(row[1] for row in rows)


def _check_targets(targets_BS: Tensor, vocab: int, ignore_index: int) -> None:
    # Targets are equal on all ranks, so all ranks raise.
    invalid = ((targets_BS < 0) | (targets_BS >= vocab)) & (targets_BS != ignore_index)
    if bool(invalid.any()):
        value = int(targets_BS[invalid][0])
        raise InputError(
            f"target {value} is outside 0..{vocab - 1} and is not ignore_index {ignore_index}; "
            f"{int(invalid.sum())} such targets"
        )
