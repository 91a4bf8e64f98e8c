"""Auxiliary losses of a router, and the operator that attaches them to the backward pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.errors import InputError
from moe_comm.layers.parallel.collectives import gather_values


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
        ctx.shape, ctx.dtype, ctx.device, ctx.scale = loss.shape, loss.dtype, loss.device, scale
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        one = torch.ones(ctx.shape, dtype=ctx.dtype, device=ctx.device)
        return grad, one * ctx.scale, None


def attach_loss(y: Tensor, loss: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Return ``y`` unchanged; its backward pass also back-propagates ``scale * loss``.

    With it, a pipeline schedule or training loop that does not know about the loss trains on it.

    Args:
        y: any tensor that the main loss depends on.
        loss: scalar.
        scale: the factor by which the main loss is scaled before backward (loss scaler, 1 / number of micro-batches).
    """
    return _AttachLoss.apply(y, loss, scale)  # type: ignore[no-any-return]


def global_counts(
    counts_E: Tensor, num_tokens: int, num_sequences: int, group: ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``counts_E``, tokens and sequences summed over ``group`` (None: unchanged). Collective, one message."""
    counts = torch.cat([counts_E, counts_E.new_tensor([num_tokens, num_sequences])])
    counts = gather_values(counts, group, "the router's count of tokens per expert").sum(0)
    return counts[:-2], counts[-2], counts[-1]


def load_balance_loss(probs_TE: Tensor, counts_E: Tensor, num_tokens: Tensor) -> Tensor:
    """Return E * sum over e of f_e * P_e, for f_e slots per token of expert e and its mean probability P_e.

    Switch Transformer, arXiv 2101.03961, eq. 4-6. For top-k the fractions add up to K, as in Hugging Face's
    ``load_balancing_loss_func``, so ``router_aux_loss_coef`` has the same meaning.

    Args:
        probs_TE: [T, E] probabilities of this rank's tokens.
        counts_E, num_tokens: counts of this rank, or summed over a group. With summed counts, the losses of the ranks,
            and their gradients, add up to the loss over the global batch.
    """
    tokens = num_tokens.clamp(min=1).to(probs_TE.dtype)
    fraction_E = counts_E.to(probs_TE.dtype) / tokens
    return probs_TE.shape[1] * (fraction_E * (probs_TE.sum(0) / tokens)).sum()


def sequence_balance_loss(
    probs_TE: Tensor,
    ids_TK: Tensor,
    num_sequences: int,
    total_sequences: Tensor,
    sequence_group: ProcessGroup | None = None,
) -> Tensor:
    """Return DeepSeek-V3's sequence-wise balance loss (arXiv 2412.19437, eq. 17-20), averaged over sequences.

    For each sequence of S tokens: sum over e of f_e * P_e with f_e = E / (K * S) * slots of expert e.

    Args:
        probs_TE: [T, E] scores that sum to 1 per token; T is ``num_sequences`` times the local length of a sequence.
        ids_TK: [T, K] expert ids; negative ids are not counted.
        num_sequences: number of sequences on this rank.
        total_sequences: divisor of the sum: the number of sequences of this rank, or of a group.
        sequence_group: the ranks that share each sequence; f and S then cover the full sequence, and the losses of the
            ranks, and their gradients, add up. Collective.

    Raises:
        InputError: the ranks of ``sequence_group`` have different numbers of sequences.
    """
    experts = probs_TE.shape[1]
    if sequence_group is not None and dist.get_world_size(sequence_group) > 1:
        local_counts = torch.tensor([num_sequences, ids_TK.shape[1]], dtype=torch.int64, device=ids_TK.device)
        counts = gather_values(local_counts, sequence_group, "the router's number of sequences")[:, 0].tolist()
        if len(set(counts)) > 1:
            raise InputError(
                f"the ranks of sequence_group must have the same number of sequences; got {counts} by rank"
            )
    elif not probs_TE.shape[0]:
        return probs_TE.sum()
    tokens = probs_TE.shape[0] // max(num_sequences, 1)
    shifted_BS = ids_TK.detach().clamp(min=-1).long().reshape(num_sequences, tokens * ids_TK.shape[1]) + 1
    counts_BE = torch.zeros(num_sequences, experts + 1, dtype=torch.int64, device=ids_TK.device)
    counts_BE.scatter_add_(1, shifted_BS, torch.ones_like(shifted_BS))
    counts_BE[:, 0] = tokens  # column 0 counted dropped slots; it now holds the length
    counts_BE = gather_values(counts_BE, sequence_group, "the router's count per sequence").sum(0)
    length_B1 = counts_BE[:, :1].clamp(min=1)
    scale_B1 = experts / (ids_TK.shape[1] * length_B1.double())
    fraction_BE = counts_BE[:, 1:].to(probs_TE.dtype) * scale_B1.to(probs_TE.dtype)
    mean_BE = probs_TE.view(num_sequences, tokens, experts).sum(1) / length_B1
    return (fraction_BE * mean_BE).sum() / total_sequences.clamp(min=1)


def z_loss(logits_TE: Tensor, num_tokens: Tensor) -> Tensor:
    """Return the mean squared log-sum-exp of the logits (ST-MoE, arXiv 2202.08906, eq. 5), which keeps them small."""
    return torch.logsumexp(logits_TE, -1).square().sum() / num_tokens.clamp(min=1)
