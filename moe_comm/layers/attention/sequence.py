"""How the ranks of a context-parallel group cut a sequence, and which document each of its tokens belongs to.

    8 tokens, cp 2     ulysses: contiguous      rank 0: 0 1 2 3     rank 1: 4 5 6 7
                       ring: zig-zag            rank 0: 0 1 6 7     rank 1: 2 3 4 5

In ring order the sequence is 2 * cp chunks and rank r holds chunks r and 2 * cp - 1 - r. A late token attends to more
tokens than an early one; with one chunk from either end all ranks have the same work (zig-zag, as in Llama 3,
arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.errors import ConfigError, InputError
from moe_comm.layers.attention.config import Context
from moe_comm.layers.parallel.collectives import gather_values, group_size

GROUP_TOKENS = 256
"""Neighbouring documents are attended together, under a mask, as long as they are no more tokens than this."""


def check_context(context: str) -> None:
    """Raise ConfigError unless ``context`` is one of the forms of context parallelism."""
    if context not in get_args(Context):
        raise ConfigError(f"context must be one of {', '.join(get_args(Context))}; got {context!r}")


def _chunk(length: int, cp: int, context: str) -> int:
    """Tokens in each of the pieces a sequence is cut into: cp of them, or 2 * cp in either ring."""
    check_context(context)
    pieces = 2 * cp if context != "ulysses" and cp > 1 else cp
    if length % pieces:
        raise InputError(
            f"a sequence of {length} tokens cannot be cut into {pieces} equal pieces ({context}, cp {cp}); pad it"
        )
    return length // pieces


def zigzag_positions(length: int, cp: int, rank: int) -> Tensor:
    """[length / cp] places in the whole sequence, int64, of the tokens that ``rank`` holds in ring order.

    Raises:
        InputError: ``length`` is not a multiple of 2 * cp.
    """
    return local_positions(length, cp, rank, "ring")


def local_positions(length: int, cp: int, rank: int, context: Context) -> Tensor:
    """[length / cp] places in the whole sequence of ``length`` tokens, int64, of those that ``rank`` holds.

    Raises:
        InputError: ``length`` is not a multiple of cp (ulysses) or 2 * cp (ring).
    """
    return torch.cat([torch.arange(at, at + size) for at, _, size in chunks_of(length, cp, rank, context)])


def chunks_of(length: int, cp: int, rank: int, context: Context) -> list[tuple[int, int, int]]:
    """(place in the whole sequence, place in the local one, tokens) of each chunk that ``rank`` holds, in order."""
    if not 0 <= rank < cp:
        raise ConfigError(f"rank {rank} is outside 0..{cp - 1}")
    size = _chunk(length, cp, context)
    if context == "ulysses" or cp == 1:
        return [(rank * size, 0, size)]
    return [(rank * size, 0, size), ((2 * cp - 1 - rank) * size, size, size)]


def shard_sequence(whole: Tensor, cp: int, rank: int, context: Context, dim: int = 1) -> Tensor:
    """The part of ``whole`` that ``rank`` holds: ids, targets, positions, documents or activations.

    Args:
        dim: the sequence.

    Raises:
        InputError: the dimension is not a multiple of cp (ulysses) or 2 * cp (ring).
    """
    chunks = chunks_of(whole.shape[dim], cp, rank, context)
    return torch.cat([whole.narrow(dim, at, size) for at, _, size in chunks], dim)


def unshard_sequence(parts: Sequence[Tensor], context: Context, dim: int = 1) -> Tensor:
    """The whole sequence from the parts of all ranks, in order of rank: the inverse of ``shard_sequence``."""
    cp = len(parts)
    length = sum(part.shape[dim] for part in parts)
    placed = [
        (at, part.narrow(dim, place, size))
        for rank, part in enumerate(parts)
        for at, place, size in chunks_of(length, cp, rank, context)
    ]
    return torch.cat([piece for _, piece in sorted(placed, key=lambda entry: entry[0])], dim)


@dataclass(frozen=True, eq=False)
class Documents:
    """Which document each token of a packed micro-batch is from; a token attends within its own document only.

    Neighbouring tokens of equal id are one document; the ids themselves mean nothing.

    Make it once a micro-batch with ``of`` and give it to every layer: the exchange over the context-parallel group
    happens there.

    whole_BS: [B, S] ids of the whole sequence, in its order, on every rank of the context-parallel group.
    plans: what follows from them for attention, worked out by the first layer and kept for the others.
    """

    whole_BS: Tensor
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, local_BS: Tensor, cp_group: ProcessGroup | None = None, context: Context = "ulysses") -> Documents:
        """From the ids of this rank's tokens. Collective over ``cp_group``.

        Args:
            local_BS: [B, S / cp] ids of the tokens as ``shard_sequence`` cuts them, any integer dtype.

        Raises:
            InputError: not two-dimensional, or not integers.
        """
        if local_BS.dim() != 2 or local_BS.is_floating_point() or local_BS.is_complex():
            raise InputError(f"documents must be integers [B, S / cp]; got {local_BS.dtype} {tuple(local_BS.shape)}")
        if group_size(cp_group) == 1:
            return cls(local_BS)
        parts = gather_values(local_BS.contiguous(), cp_group, "an exchange of document ids")
        return cls(unshard_sequence(list(parts), context))

    @cached_property
    def runs_BS(self) -> Tensor:
        """[B, S] number of the document in its row, int64, from 0."""
        starts = torch.zeros_like(self.whole_BS, dtype=torch.long)
        starts[:, 1:] = self.whole_BS[:, 1:] != self.whole_BS[:, :-1]
        return starts.cumsum(1)

    @property
    def positions_BS(self) -> Tensor:
        """[B, S] place of each token in its own document, int64: positions that restart with every document."""
        places = torch.arange(self.whole_BS.shape[1], device=self.whole_BS.device).expand_as(self.runs_BS)
        is_start = torch.zeros_like(self.runs_BS, dtype=torch.bool)
        is_start[:, 0] = True
        is_start[:, 1:] = self.runs_BS[:, 1:] != self.runs_BS[:, :-1]
        return places - torch.where(is_start, places, 0).cummax(1).values

    @cached_property
    def groups(self) -> list[tuple[slice, int, int, bool]]:
        """(rows, first token, end, whether it is several documents): what is attended together. Read on the host.

        A long document stands alone and needs no mask; short neighbours share one small mask, which costs less than
        a call for each of them.
        """
        rows, length = self.whole_BS.shape
        if length <= GROUP_TOKENS:
            return [(slice(0, rows), 0, length, True)]
        found = []
        for row, runs in enumerate(self.runs_BS.cpu()):
            ends = runs.bincount().cumsum(0).tolist()
            begin, at, count = 0, 0, 0
            for end in ends:
                if count and end - begin > GROUP_TOKENS:
                    found.append((slice(row, row + 1), begin, at, count > 1))
                    begin, count = at, 0
                at, count = end, count + 1
            found.append((slice(row, row + 1), begin, at, count > 1))
        return found
