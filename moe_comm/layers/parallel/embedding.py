"""The vocabulary split over tensor-parallel ranks: the embedding and the output projection.

    vocabulary of 10 over 4 ranks     rank 0: 0 1 2    rank 1: 3 4 5    rank 2: 6 7 8    rank 3: 9

Rows are split by ``row_range``; the last ranks hold fewer rows (or none). Nothing is padded: checkpoints contain the
true vocabulary for any number of ranks, and no padding row can be selected.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.errors import InputError
from moe_comm.kernels.autograd import without_autocast
from moe_comm.layers.parallel.collectives import gather_dim_replicated, group_rank, group_size
from moe_comm.layers.parallel.cross_entropy import IGNORE_INDEX, vocab_parallel_cross_entropy
from moe_comm.layers.parallel.linear import check_width, gather_input, reduce_output
from moe_comm.layers.parallel.module import ParallelModule
from moe_comm.topology import Sharding, Split, row_range


def vocab_sharding(vocab: int, hidden: int, ranks: int) -> Sharding:
    """Return the sharding of a [V, D] embedding or head over ``ranks`` tensor-parallel ranks."""
    # An even sharding needs no sizes and is valid for any number of ranks.
    even = vocab % ranks == 0
    sizes = None if even else tuple(len(row_range(vocab, rank, ranks)) for rank in range(ranks))
    return Sharding((vocab, hidden), (Split(0, "tp", sizes=sizes),))


class _VocabRows(ParallelModule):
    """This rank's ``rows`` of a [V, D] table, in ``weight``."""

    def __init__(
        self,
        vocab: int,
        hidden: int,
        group: ProcessGroup | None = None,
        *,
        sequence_dim: int | None = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.vocab, self.hidden, self.group, self.sequence_dim = vocab, hidden, group, sequence_dim
        self.rows = row_range(vocab, group_rank(group), group_size(group))
        self.weight = nn.Parameter(torch.empty(len(self.rows), hidden, dtype=dtype, device=device))
        self.reset_parameters()

    @classmethod
    def from_weight(cls, weight: Tensor, group: ProcessGroup | None = None, *, sequence_dim: int | None = 1) -> Any:
        """Build with a copy of this rank's rows of a full [V, D] weight (of ``nn.Embedding`` or an untied head)."""
        vocab, hidden = weight.shape
        module = cls(vocab, hidden, group, sequence_dim=sequence_dim, dtype=weight.dtype, device="meta")
        local_rows = weight.detach()[module.rows.start : module.rows.stop].clone()
        frozen = isinstance(weight, nn.Parameter) and not weight.requires_grad
        module.weight = nn.Parameter(local_rows, requires_grad=not frozen)
        return module

    def reset_parameters(self, std: float = 0.02) -> None:
        """Initialize the weight from a normal distribution, independently on each rank."""
        nn.init.normal_(self.weight, std=std)

    def shardings(self) -> dict[str, Sharding]:
        """Return the sharding of the weight; its shape has the true vocabulary."""
        return {"weight": vocab_sharding(self.vocab, self.hidden, group_size(self.group))}

    def extra_repr(self) -> str:
        rows = f"rows {self.rows.start}..{self.rows.stop - 1}" if len(self.rows) else "no rows"
        return f"{rows} of {self.vocab}, hidden={self.hidden}, sequence_dim={self.sequence_dim}"


class VocabParallelEmbedding(_VocabRows):
    """Embedding table whose rows are split over the ranks.

    Args:
        vocab: V, any number.
        hidden: D.
        group: tensor-parallel group; None: this rank holds the full table.
        sequence_dim: dimension of the result (1: the sequence of [B, S, D]) that is split over the ranks; None: each
            rank gets the full result.

    Attributes:
        weight: [own rows, D]. Its gradient covers the tokens of all ranks of the group.
        padding_idx: id whose row gets no gradient, as in ``nn.Embedding``; default None.
    """

    padding_idx: int | None = None

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Map [B, S] ids, equal on all ranks, to [B, S / W, D]. Collective.

        Raises:
            InputError: an id is outside 0..V-1, or the number of ranks does not divide the sequence; raised on all
                ranks, before the collective.
        """
        check_ids(ids_BS, self.vocab, "token")
        if group_size(self.group) == 1:
            return F.embedding(ids_BS, self.weight, self.padding_idx)
        remote_BS = (ids_BS < self.rows.start) | (ids_BS >= self.rows.stop)
        if len(self.rows):
            # Ids of other ranks look up row 0; the result and its gradient are masked.
            row_BS = (ids_BS - self.rows.start).masked_fill(remote_BS, 0)
            padding = self.padding_idx
            padding = padding - self.rows.start if padding is not None and padding in self.rows else None
            local_BSD = F.embedding(row_BS, self.weight, padding)
            local_BSD = local_BSD.masked_fill(remote_BS.unsqueeze(-1), 0.0)
        else:
            # A product with the empty weight makes backward reach the collective on this rank.
            with without_autocast(self.weight):
                local_BSD = self.weight.new_zeros(*ids_BS.shape, 0) @ self.weight
        return reduce_output(local_BSD, self.group, self.sequence_dim)


class VocabParallelHead(_VocabRows):
    """The output projection, with the vocabulary split over the ranks; tied if its weight is set to the embedding's.

    Args:
        vocab, hidden, group: as for ``VocabParallelEmbedding``.
        sequence_dim: dimension in which the hidden states are split over the ranks; None: they are equal on all ranks.
    """

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map [B, S / W, D] to this rank's logits of all tokens, [B, S, own rows]. Collective."""
        check_width(x_BSD, self.hidden, "the output projection")
        return F.linear(gather_input(x_BSD, self.group, self.sequence_dim), self.weight)

    def full_logits(self, x_BSD: Tensor) -> Tensor:
        """Map [B, S / W, D] to the logits of all tokens over the full vocabulary, [B, S, V], on each rank. Collective.

        All ranks must do the same work with them; the gradients are those of this work done once.
        """
        logits_BSV = VocabParallelHead.forward(self, x_BSD)  # subclasses may override forward
        longest = len(row_range(self.vocab, 0, group_size(self.group)))
        # Pad to equal lengths for the gather. Only the last ranks have fewer rows, so the padding is at the end.
        padded_BSV = F.pad(logits_BSV, (0, longest - logits_BSV.shape[-1]))
        return gather_dim_replicated(padded_BSV, self.group, -1)[..., : self.vocab]

    def loss(
        self, x_BSD: Tensor, targets_BS: Tensor, *, ignore_index: int = IGNORE_INDEX, chunk: int | None = None
    ) -> Tensor:
        """Return ``vocab_parallel_cross_entropy`` of the hidden states with this weight."""
        return vocab_parallel_cross_entropy(
            x_BSD,
            self.weight,
            targets_BS,
            self.group,
            ignore_index=ignore_index,
            chunk=chunk,
            sequence_dim=self.sequence_dim,
        )


def check_ids(ids: Tensor, vocab: int, what: str) -> None:
    """Raise InputError for ids outside of the vocabulary, whose lookup would be a device error or a silent zero."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"{what} ids must be int64 or int32; got {ids.dtype}")
    if not ids.numel() or ids.device.type == "meta":
        return
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < 0 or high >= vocab:
        raise InputError(
            f"{what} id {low if low < 0 else high} is outside 0..{vocab - 1}; the vocabulary has {vocab} entries. "
            "Was the data tokenized with another tokenizer?"
        )
