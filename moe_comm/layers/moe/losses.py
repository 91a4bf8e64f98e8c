"""Auxiliary losses of a router, and how they reach the gradient without being carried to the end of the model."""

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
    """``y`` unchanged; its backward pass also back-propagates ``scale * loss``.

    So a pipeline schedule or a caller that knows nothing of the loss still trains on it. ``scale`` must be what the
    main loss is multiplied by before backward (a loss scaler's factor, 1 / number of micro-batches).

    Args:
        y: any tensor that the main loss depends on.
        loss: scalar.
    """
    return _AttachLoss.apply(y, loss, scale)  # type: ignore[no-any-return]


def global_counts(
    counts_E: Tensor, num_tokens: int, num_sequences: int, group: ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``counts_E``, tokens and sequences summed over ``group`` (None: as they are). Collective, one message.

    Raises:
        PeerDied, PeerTimeout: a rank is gone, or did not call within ``CollectiveOptions.timeout_s``.
    """
    every = torch.cat([counts_E, counts_E.new_tensor([num_tokens, num_sequences])])
    every = gather_values(every, group, "the router's count of tokens per expert").sum(0)
    return every[:-2], every[-2], every[-1]


def load_balance_loss(probs_TE: Tensor, counts_E: Tensor, num_tokens: Tensor) -> Tensor:
    """E * sum over e of f_e * P_e: f_e slots per token that chose e, P_e mean probability of e.

    Switch Transformer, arXiv 2101.03961, eq. 4-6; for top-k the fractions add up to K, as in Hugging Face's
    ``load_balancing_loss_func``, so a model's ``router_aux_loss_coef`` means the same here.

    Args:
        probs_TE: [T, E] this rank's probabilities.
        counts_E, num_tokens: of this rank, or summed over a group. In the latter case the ranks' losses, and so
            their gradients, add up to those of the loss over the group's whole batch.
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
    """DeepSeek-V3's sequence-wise balance loss (arXiv 2412.19437, eq. 17-20), mean over sequences.

    Per sequence of S tokens: sum over e of f_e * P_e with f_e = E / (K * S) * slots that chose e.

    Args:
        probs_TE: [T, E] scores that add up to 1 per token; T is ``num_sequences`` times the tokens of each here.
        total_sequences: what the sum is divided by: of this rank, or of a group.
        sequence_group: the ranks over which each sequence is spread; f and S are then those of the whole sequence,
            and the ranks' losses, and so their gradients, add up to those of the whole sequences. Collective.

    Raises:
        InputError: the ranks of ``sequence_group`` have different numbers of sequences.
    """
    experts = probs_TE.shape[1]
    spread = sequence_group is not None and dist.get_world_size(sequence_group) > 1
    if spread:
        here = torch.tensor([num_sequences, ids_TK.shape[1]], device=ids_TK.device)
        given = gather_values(here, sequence_group, "the router's number of sequences")[:, 0].tolist()
        if len(set(given)) > 1:
            raise InputError(
                f"the ranks over which sequences are spread must hold a piece of each, but have {given} sequences"
            )
    elif not probs_TE.shape[0]:
        return probs_TE.sum()
    tokens = probs_TE.shape[0] // max(num_sequences, 1)
    shifted_BS = ids_TK.detach().clamp(min=-1).long().reshape(num_sequences, tokens * ids_TK.shape[1]) + 1
    counts_BE = torch.zeros(num_sequences, experts + 1, dtype=torch.int64, device=ids_TK.device)
    counts_BE.scatter_add_(1, shifted_BS, torch.ones_like(shifted_BS))
    counts_BE[:, 0] = tokens  # instead of the dropped slots
    counts_BE = gather_values(counts_BE, sequence_group, "the router's count per sequence").sum(0)
    length_B1 = counts_BE[:, :1].clamp(min=1)
    scale_B1 = experts / (ids_TK.shape[1] * length_B1.double())
    fraction_BE = counts_BE[:, 1:].to(probs_TE.dtype) * scale_B1.to(probs_TE.dtype)
    mean_BE = probs_TE.view(num_sequences, tokens, experts).sum(1) / length_B1
    return (fraction_BE * mean_BE).sum() / total_sequences.clamp(min=1)


def z_loss(logits_TE: Tensor, num_tokens: Tensor) -> Tensor:
    """Mean squared log-sum-exp of the logits (ST-MoE, arXiv 2202.08906, eq. 5), which keeps them small."""
    return torch.logsumexp(logits_TE, -1).square().sum() / num_tokens.clamp(min=1)
