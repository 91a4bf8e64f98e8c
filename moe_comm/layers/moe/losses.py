"""Auxiliary losses of a router, and the operator that attaches them to the backward pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.errors import InputError
from moe_comm.layers.parallel.collectives import gather_values

_loss_gradients: dict[int, Tensor] = {}
"""Factor of the auxiliary losses that ``scale_aux_like`` found, by the id of the backward pass; the last few passes."""


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, scale: float | Tensor | None, factor: float) -> Tensor:
        ctx.shape, ctx.dtype, ctx.device, ctx.scale, ctx.factor = loss.shape, loss.dtype, loss.device, scale, factor
        # Reentrant checkpointing runs a nested backward pass with another id. Use the id of the outer pass.
        ctx.task = torch._C._current_graph_task_id()
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scale = ctx.scale
        if scale is None:
            scale = _loss_gradients.get(torch._C._current_graph_task_id(), _loss_gradients.get(ctx.task, 1.0))
        if isinstance(scale, Tensor):
            scale = scale.to(ctx.device)
        one = torch.ones(ctx.shape, dtype=ctx.dtype, device=ctx.device)
        return grad, one * scale * ctx.factor, None, None


def attach_loss(y: Tensor, loss: Tensor, scale: float | Tensor | None = 1.0, factor: float = 1.0) -> Tensor:
    """Return ``y`` unchanged; its backward pass also back-propagates ``scale * factor * loss``.

    With it, a pipeline schedule or training loop that does not know about the loss trains on it.

    Args:
        y: any tensor that the main loss depends on.
        loss: scalar.
        scale: the factor by which the main loss is scaled before backward (loss scaler, 1 / number of micro-batches).
            None: the factor of ``scale_aux_like`` in the same backward pass, or 1 without it.
        factor: another factor.
    """
    return _AttachLoss.apply(y, loss, scale, factor)  # type: ignore[no-any-return]


def scale_aux_like(loss: Tensor, factor: float = 1.0) -> Tensor:
    """Scale the auxiliary losses of ``MoELayer`` like ``loss``: in backward, by the gradient that arrives at ``loss``.

        loss = scale_aux_like(F.cross_entropy(model(x), y))   # the mean over this micro-batch
        scaler.scale(loss / micro_batches).backward()         # auxiliary losses: also times scale / micro_batches

    Over a step, the auxiliary losses are then the mean over its micro-batches, each with the same weight. Training
    loops of Trainer, accelerate, Lightning and DeepSpeed, and ``GradScaler``, do this by themselves. It has no effect
    on layers whose ``aux_scale`` is set.

    Args:
        loss: scalar loss of one micro-batch, before it is divided by the number of micro-batches and multiplied by a
            loss scaler. Of several calls in one backward pass, that for the innermost tensor has effect; of several for
            one tensor, the first one.
        factor: multiplied with the gradient: 1 / micro-batches if ``loss`` is divided already, as by the number of
            tokens of the whole step.

    Returns:
        ``loss``.

    Raises:
        InputError: ``loss`` is not a scalar.
    """
    if loss.numel() != 1:
        raise InputError(f"scale_aux_like needs a scalar loss; got {tuple(loss.shape)}")
    if loss.requires_grad and not hasattr(loss, "_scales_aux_losses"):
        loss._scales_aux_losses = True  # type: ignore[attr-defined]

        def keep(grad: Tensor) -> None:
            if len(_loss_gradients) >= 16:
                _loss_gradients.pop(next(iter(_loss_gradients)))
            _loss_gradients[torch._C._current_graph_task_id()] = grad.detach().float().reshape(()) * factor

        loss.register_hook(keep)
    return loss


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


def sequence_balance_sums(
    probs_TE: Tensor,
    ids_TK: Tensor,
    num_sequences: int,
    sequence_group: ProcessGroup | None = None,
    mask_N: Tensor | None = None,
) -> tuple[Tensor, int, InputError | None]:
    """Compute DeepSeek-V3's sequence-wise balance loss (arXiv 2412.19437, eq. 17-20), summed over sequences.

    Returns the sum; the number of sequences with tokens, on this rank or on all ranks of its sequence group; and an
    error of the arguments, which all ranks of the sequence group have, to raise after all exchanges.

    For each sequence of S tokens: sum over e of f_e * P_e with f_e = E / (K * S) * slots of expert e.

    Args:
        probs_TE: [T, E] scores that sum to 1 per token.
        ids_TK: [T, K] expert ids; negative ids are not counted.
        num_sequences: number of sequences on this rank, of equal local length with their padding.
        sequence_group: the ranks that share each sequence; f and S then cover the full sequence, and the losses of the
            ranks, and their gradients, add up. Their numbers of sequences must be equal. Collective.
        mask_N: [N] bool with T true values: the tokens in ``num_sequences`` sequences. None: there is no padding.
    """
    experts, top_k, device = probs_TE.shape[1], ids_TK.shape[1], ids_TK.device
    if sequence_group is not None and dist.get_world_size(sequence_group) > 1:
        local_counts = torch.tensor([num_sequences, top_k], dtype=torch.int64, device=device)
        counts = gather_values(local_counts, sequence_group, "the router's number of sequences")[:, 0].tolist()
        if len(set(counts)) > 1:
            text = f"the ranks of sequence_group must have the same number of sequences; got {counts} by rank"
            return probs_TE.sum(), 0, InputError(text)
    elif not probs_TE.shape[0]:
        return probs_TE.sum(), 0, None
    # Sequences of equal length: padding has no experts and zero probabilities.
    probs_NE, ids_NK = probs_TE, ids_TK.detach().clamp(min=-1).long()
    length = probs_TE.shape[0] // max(num_sequences, 1)
    length_B1 = torch.full((num_sequences, 1), length, dtype=torch.int64, device=device)
    if mask_N is not None:
        probs_NE = probs_TE.new_zeros(mask_N.shape[0], experts).masked_scatter(mask_N.unsqueeze(1), probs_TE)
        ids_NK = ids_NK.new_full((mask_N.shape[0], top_k), -1).masked_scatter(mask_N.unsqueeze(1), ids_NK)
        length_B1 = mask_N.view(num_sequences, -1).sum(1, keepdim=True)
    tokens = probs_NE.shape[0] // max(num_sequences, 1)
    shifted_BS = ids_NK.reshape(num_sequences, tokens * top_k) + 1
    counts_BE = torch.zeros(num_sequences, experts + 1, dtype=torch.int64, device=device)
    counts_BE.scatter_add_(1, shifted_BS, torch.ones_like(shifted_BS))
    counts_BE[:, :1] = length_B1  # column 0 counted dropped slots; it now holds the length
    counts_BE = gather_values(counts_BE, sequence_group, "the router's count per sequence").sum(0)
    sequences = num_sequences if mask_N is None and tokens else int((counts_BE[:, 0] > 0).sum())
    length_B1 = counts_BE[:, :1].clamp(min=1)
    scale_B1 = experts / (top_k * length_B1.double())
    fraction_BE = counts_BE[:, 1:].to(probs_TE.dtype) * scale_B1.to(probs_TE.dtype)
    mean_BE = probs_NE.view(num_sequences, tokens, experts).sum(1) / length_B1
    return (fraction_BE * mean_BE).sum(), sequences, None


def z_loss(logits_TE: Tensor, num_tokens: Tensor) -> Tensor:
    """Return the mean squared log-sum-exp of the logits (ST-MoE, arXiv 2202.08906, eq. 5), which keeps them small."""
    return torch.logsumexp(logits_TE, -1).square().sum() / num_tokens.clamp(min=1)
