"""What reaches the attention of a swapped model: positions, and which tokens may see each other.

transformers would make causal masks for the tokens it sees, which under context parallelism are a part of the
sequence, out of order. A hook before the decoder works the same facts out for the whole sequence instead: padding from
``attention_mask``, packed documents from positions that start again, as transformers does.
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
"""Keyword by which documents travel from the hook to every attention module."""
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
    """This rank's part of a batch for a model swapped over ``cp_group``: ``model(**shard_inputs(ids, ids, ...))``.

    Labels are shifted *before* the sequence is cut, as a rank does not hold the token after its last one. The ranks'
    losses add up to the loss of the whole batch, and their gradients to its gradients (``sum_replicated_gradients``
    over ``cp_group``).

    Args:
        input_ids: [B, S] of the whole sequence, alike on every rank of ``cp_group``.
        labels: [B, S], not shifted, -100 where nothing is to be predicted; None: no loss.
        position_ids: [B or 1, S]; None: 0, 1, ... Positions that start again begin a new document.
        attention_mask: [B, S], 0 for padding.

    Returns:
        Keyword arguments: ``input_ids`` and, where given, ``position_ids``, ``attention_mask``, and ``labels``,
        ``shift_labels`` and ``num_items_in_batch``. The last counts the targets of this batch; with data parallelism
        replace it by the sum over the data-parallel ranks.

    Raises:
        InputError: the sequence cannot be cut: its length is not a multiple of cp (ulysses) or 2 * cp (ring).
    """
    cp, rank = group_size(cp_group), group_rank(cp_group)

    def own(whole: Tensor) -> Tensor:
        return shard_sequence(whole, cp, rank, context).contiguous()

    given: dict[str, Any] = {"input_ids": own(input_ids)}
    if position_ids is not None:
        given["position_ids"] = own(position_ids)
    if attention_mask is not None:
        given["attention_mask"] = own(attention_mask)
    if labels is not None:
        shifted = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        given["shift_labels"] = own(shifted)
        given["labels"] = given["shift_labels"]
        given["num_items_in_batch"] = (shifted != IGNORED).sum()
    return given


def prepare(cp_group: ProcessGroup | None, context: Context) -> Hook:
    """A forward pre-hook for the decoder of a swapped model."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = list(inspect.signature(module.forward).parameters)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("past_key_values") is not None or given.get("use_cache"):
            raise InputError(
                "a model with swapped attention keeps no key-value cache: pass use_cache=False, also to generate()"
            )
        # transformers' default for models in training is a cache that nobody reads.
        given["use_cache"] = False
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        if tokens is not None:
            mask, positions = given.get("attention_mask"), given.get("position_ids")
            given[DOCUMENTS] = _documents(tokens, mask, positions, cp_group, context)
            given["attention_mask"] = None
            if positions is None:
                cp, rank = group_size(cp_group), group_rank(cp_group)
                places = local_positions(tokens.shape[1] * cp, cp, rank, context)
                given["position_ids"] = places.to(tokens.device).unsqueeze(0)
        return (), given

    return hook


def _documents(
    tokens: Tensor, mask: Tensor | None, positions: Tensor | None, cp_group: ProcessGroup | None, context: Context
) -> Documents | None:
    """None where every row is one document and nothing is padding. Collective where either is given."""
    shape = tokens.shape[:2]
    if mask is not None:
        if mask.shape != shape:
            raise InputError(
                f"attention_mask must be {list(shape)}, 0 for padding, this rank's part of the sequence; got "
                f"{list(mask.shape)}. A mask of another form cannot be combined with swapped attention."
            )
        found = Documents.of(mask.bool().long(), cp_group, context)
        if bool((found.whole_BS.diff(dim=1).clamp(min=0).sum(1) + found.whole_BS[:, 0] > 1).any()):
            raise InputError(
                "attention_mask hides tokens in the middle of a row; swapped attention takes padding at either end "
                "of it only. To pack documents, leave the mask out and give position_ids that start again."
            )
    elif positions is not None:
        if positions.shape not in (shape, (1, shape[1])):
            raise InputError(f"position_ids must be {list(shape)} or [1, {shape[1]}]; got {list(positions.shape)}")
        parts = gather_values(positions.contiguous(), cp_group, "an exchange of positions")
        whole = unshard_sequence(list(parts), context)
        starts = torch.zeros_like(whole)
        starts[:, 1:] = whole[:, 1:] != whole[:, :-1] + 1
        found = Documents(starts.cumsum(1).expand(shape[0], -1))
    else:
        return None
    return found if bool(found.runs_BS[:, -1].any()) else None
