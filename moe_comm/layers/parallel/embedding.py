"""The vocabulary cut over tensor-parallel ranks: the embedding at one end of a model and the head at the other.

    vocabulary of 10 over 4 ranks     rank 0: 0 1 2    rank 1: 3 4 5    rank 2: 6 7 8    rank 3: 9

Rows are cut as ``row_range`` does, the last ranks holding fewer (or none), so nothing is padded: checkpoints hold the
true vocabulary whatever the number of ranks was, and no row exists that could be chosen by mistake.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.errors import InputError
from moe_comm.kernels.autocast import without_autocast
from moe_comm.layers.parallel.collectives import gather_dim_replicated, group_rank, group_size
from moe_comm.layers.parallel.cross_entropy import IGNORE_INDEX, vocab_parallel_cross_entropy
from moe_comm.layers.parallel.linear import check_width, enter, leave
from moe_comm.layers.parallel.module import ParallelModule
from moe_comm.topology import Sharding, Split, row_range


def vocab_sharding(vocab: int, hidden: int, ranks: int) -> Sharding:
    """How a [V, D] embedding or head lies over ``ranks`` tensor-parallel ranks."""
    # Where it divides, the description is that of any number of ranks.
    even = vocab % ranks == 0
    sizes = None if even else tuple(len(row_range(vocab, rank, ranks)) for rank in range(ranks))
    return Sharding((vocab, hidden), (Split(0, "tp", sizes=sizes),))


class _VocabRows(ParallelModule):
    """Rows of a [V, D] table on the ranks of ``group``. Attributes: weight, this rank's rows; rows, which they are."""

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
        """This rank's rows of a full [V, D] weight (``nn.Embedding``'s, or an untied head's): a copy."""
        vocab, hidden = weight.shape
        module = cls(vocab, hidden, group, sequence_dim=sequence_dim, dtype=weight.dtype, device="meta")
        own = weight.detach()[module.rows.start : module.rows.stop].clone()
        frozen = isinstance(weight, nn.Parameter) and not weight.requires_grad
        module.weight = nn.Parameter(own, requires_grad=not frozen)
        return module

    def reset_parameters(self, std: float = 0.02) -> None:
        """Normal weights; every rank draws for itself."""
        nn.init.normal_(self.weight, std=std)

    def shardings(self) -> dict[str, Sharding]:
        """How the ranks hold the weight; its shape is the true vocabulary's."""
        return {"weight": vocab_sharding(self.vocab, self.hidden, group_size(self.group))}

    def extra_repr(self) -> str:
        held = f"rows {self.rows.start}..{self.rows.stop - 1}" if len(self.rows) else "no rows"
        return f"{held} of {self.vocab}, hidden={self.hidden}, sequence_dim={self.sequence_dim}"


class VocabParallelEmbedding(_VocabRows):
    """Looks up token ids in a table whose rows are spread over the ranks.

    Args:
        vocab, hidden: V and D of the whole table; any V.
        group: the tensor-parallel group; None: one rank holds everything.
        sequence_dim: dimension of the result (1: the sequence of [B, S, D]) that is cut over the ranks; None: every
            rank gets all of it.

    Attributes:
        weight: [own rows, D]. Its gradient covers the tokens of all ranks of the group.
        padding_idx: an id whose row gets no gradient, as in ``nn.Embedding``; None unless set.
    """

    padding_idx: int | None = None

    def forward(self, ids_BS: Tensor) -> Tensor:
        """[B, S] ids, alike on every rank, to [B, S / W, D]. Collective.

        Raises:
            InputError: an id outside 0..V-1, or a sequence that does not divide by the ranks; as ids are alike on
                every rank, on all of them, before anything moves.
            PeerDied, PeerTimeout: a rank is gone or does not come.
        """
        check_ids(ids_BS, self.vocab, "token")
        if group_size(self.group) == 1:
            return F.embedding(ids_BS, self.weight, self.padding_idx)
        away_BS = (ids_BS < self.rows.start) | (ids_BS >= self.rows.stop)
        if len(self.rows):
            # Any row does for ids of other ranks: what is looked up is masked, and so is its gradient.
            place_BS = (ids_BS - self.rows.start).masked_fill(away_BS, 0)
            padding = self.padding_idx
            padding = padding - self.rows.start if padding is not None and padding in self.rows else None
            own_BSD = F.embedding(place_BS, self.weight, padding)
            own_BSD = own_BSD.masked_fill(away_BS.unsqueeze(-1), 0.0)
        else:
            # A product with the empty weight, so that backward reaches the collective on this rank too.
            with without_autocast(self.weight):
                own_BSD = self.weight.new_zeros(*ids_BS.shape, 0) @ self.weight
        return leave(own_BSD, self.group, self.sequence_dim)


class VocabParallelHead(_VocabRows):
    """The output projection, with the vocabulary cut over the ranks; tied if its weight is set to the embedding's.

    Args:
        vocab, hidden, group: as for ``VocabParallelEmbedding``.
        sequence_dim: dimension in which the hidden states are cut over the ranks; None: alike on every rank.
    """

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S / W, D] to this rank's logits of all tokens, [B, S, own rows]. Collective."""
        return self._own_logits(x_BSD)

    def _own_logits(self, x_BSD: Tensor) -> Tensor:
        check_width(x_BSD, self.hidden, "the output projection")
        return F.linear(enter(x_BSD, self.group, self.sequence_dim), self.weight)

    def full_logits(self, x_BSD: Tensor) -> Tensor:
        """[B, S / W, D] to the logits of all tokens over the whole vocabulary, [B, S, V], on every rank. Collective.

        Every rank must go on to do the same work with them; its gradients are then those of that work done once.
        """
        logits_BSV = self._own_logits(x_BSD)
        longest = len(row_range(self.vocab, 0, group_size(self.group)))
        # Parts of one length can be gathered; only the last ones are shorter, so what is padded ends up at the end.
        padded_BSV = F.pad(logits_BSV, (0, longest - logits_BSV.shape[-1]))
        return gather_dim_replicated(padded_BSV, self.group, -1)[..., : self.vocab]

    def loss(
        self, x_BSD: Tensor, targets_BS: Tensor, *, ignore_index: int = IGNORE_INDEX, chunk: int | None = None
    ) -> Tensor:
        """``vocab_parallel_cross_entropy`` of these hidden states with this weight."""
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
    """Refuse ids outside of the vocabulary, whose lookup would be an error of the device or a silent zero.

    Raises:
        InputError: naming the first bad id.
    """
    if ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"{what} ids must be int64 or int32; got {ids.dtype}")
    if not ids.numel() or ids.device.type == "meta":
        return
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < 0 or high >= vocab:
        raise InputError(
            f"{what} id {low if low < 0 else high} is outside 0..{vocab - 1}; the vocabulary has {vocab} entries. "
            "Was the data tokenised with another tokenizer?"
        )
