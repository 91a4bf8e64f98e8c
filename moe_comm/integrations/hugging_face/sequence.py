"""Positions, document boundaries and sequence shards for models with swapped attention.

Under context parallelism a rank holds only some tokens of the sequence, possibly out of order, so the causal masks of
transformers would be wrong. A hook before the decoder derives documents from the full sequence instead: padding from
``attention_mask``, and packed documents from positions that restart, as transformers does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.errors import InputError
from moe_comm.layers.attention.config import Context
from moe_comm.layers.attention.sequence import Documents, local_positions, shard_sequence, unshard_sequence
from moe_comm.layers.parallel.collectives import gather_values, group_rank, group_size

DOCUMENTS = "moe_comm_documents"
"""Keyword argument that passes the documents from the hook to the attention modules."""
IGNORED = -100

Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def shard_inputs(
    input_ids: Tensor,
    labels: Tensor | None = None,
    *,
    cp_group: ProcessGroup | None,
    context: Context = "ulysses",
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> dict[str, Any]:
    """Shard a batch for a model swapped over ``cp_group``: ``model(**shard_inputs(ids, ids, cp_group=group))``.

    Labels are shifted *before* the sequence is sharded, because a rank does not hold the token after its last one. The
    sum of the losses over the ranks is the loss of the full batch. The sum of the gradients is its gradient
    (``sum_replicated_gradients`` over ``cp_group``).

    Args:
        input_ids: [B, S], the full sequence, the same on every rank of ``cp_group``.
        labels: [B, S], not shifted; -100 marks positions without a target. None: no loss.
        cp_group: ranks that share the sequence.
        context: form of context parallelism; must match ``swap_attention``.
        position_ids: [B or 1, S]. A new document begins where positions restart. None: 0, 1, ..., S - 1.
        attention_mask: [B, S], 0 for padding.

    Returns:
        Keyword arguments of the model: ``input_ids``; ``position_ids`` and ``attention_mask`` if they were passed; with
        ``labels`` also ``labels``, ``shift_labels`` and ``num_items_in_batch``. The last is the number of targets in
        this batch. With data parallelism, replace it by its sum over the data-parallel ranks.

    Raises:
        InputError: the length of the sequence is not a multiple of cp (ulysses) or 2 * cp (ring).
    """
    cp, rank = group_size(cp_group), group_rank(cp_group)

    def shard(full: Tensor) -> Tensor:
        return shard_sequence(full, cp, rank, context).contiguous()

    inputs: dict[str, Any] = {"input_ids": shard(input_ids)}
    if position_ids is not None:
        inputs["position_ids"] = shard(position_ids)
    if attention_mask is not None:
        inputs["attention_mask"] = shard(attention_mask)
    if labels is not None:
        shifted = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        inputs["labels"] = inputs["shift_labels"] = shard(shifted)
        inputs["num_items_in_batch"] = (shifted != IGNORED).sum()
    return inputs


def prepare(cp_group: ProcessGroup | None, context: Context) -> Hook:
    """Return a forward pre-hook for the decoder of a swapped model."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = list(inspect.signature(module.forward).parameters)
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        if inputs.get("past_key_values") is not None or inputs.get("use_cache"):
            raise InputError(
                "a model with swapped attention has no key-value cache; pass use_cache=False, also to generate()"
            )
        # transformers creates a cache by default, also for training.
        inputs["use_cache"] = False
        tokens = inputs.get("input_ids")
        tokens = inputs.get("inputs_embeds") if tokens is None else tokens
        if tokens is not None:
            mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
            inputs[DOCUMENTS] = _documents(tokens, mask, positions, cp_group, context)
            inputs["attention_mask"] = None
            if positions is None:
                cp, rank = group_size(cp_group), group_rank(cp_group)
                positions = local_positions(tokens.shape[1] * cp, cp, rank, context)
                inputs["position_ids"] = positions.to(tokens.device).unsqueeze(0)
        return (), inputs

    return hook


def _documents(
    tokens: Tensor, mask: Tensor | None, positions: Tensor | None, cp_group: ProcessGroup | None, context: Context
) -> Documents | None:
    """Return the documents, or None if each row is one document without padding.

    Collective unless ``mask`` and ``positions`` are both None.
    """
    shape = tokens.shape[:2]
    if mask is not None:
        if mask.shape != shape:
            raise InputError(
                f"attention_mask must have shape {list(shape)} (the local sequence shard), 0 for padding; got "
                f"{list(mask.shape)}. Swapped attention does not support other masks."
            )
        documents = Documents.of(mask.bool().long(), cp_group, context)
        if bool((documents.ids_BS.diff(dim=1).clamp(min=0).sum(1) + documents.ids_BS[:, 0] > 1).any()):
            raise InputError(
                "attention_mask masks tokens in the middle of a row; swapped attention supports padding at the ends of "
                "a row only. To pack documents, omit the mask and pass position_ids that restart."
            )
    elif positions is not None:
        if positions.shape not in (shape, (1, shape[1])):
            raise InputError(
                f"position_ids must have shape {list(shape)} or [1, {shape[1]}]; got {list(positions.shape)}"
            )
        shards = gather_values(positions.contiguous(), cp_group, "an exchange of positions")
        full = unshard_sequence(list(shards), context)
        starts = torch.zeros_like(full)
        starts[:, 1:] = full[:, 1:] != full[:, :-1] + 1
        documents = Documents(starts.cumsum(1).expand(shape[0], -1))
    else:
        return None
    return documents if bool(documents.runs_BS[:, -1].any()) else None
