"""How the ranks of a context-parallel group divide a sequence, and the document of each token.

    8 tokens, cp 2     ulysses: contiguous      rank 0: 0 1 2 3     rank 1: 4 5 6 7
                       ring: zig-zag            rank 0: 0 1 6 7     rank 1: 2 3 4 5

In zig-zag order the sequence has 2 * cp chunks, and rank r holds chunks r and 2 * cp - 1 - r. A late token attends to
more tokens than an early one; with one chunk from each end, all ranks have the same work (Llama 3, arXiv 2407.21783,
section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.errors import ConfigError, InputError
from moe_comm.layers.attention.config import Context
from moe_comm.layers.parallel.collectives import gather_values, group_size

GROUP_TOKENS = 256
"""Adjacent documents are attended together under a mask if they have at most this many tokens in total."""


def check_context(context: str) -> None:
    """Raise ConfigError unless ``context`` is a form of context parallelism."""
    if context not in get_args(Context):
        raise ConfigError(f"context must be one of {', '.join(get_args(Context))}; got {context!r}")


def _chunk(length: int, cp: int, context: str) -> int:
    """Return the tokens per chunk of a sequence with cp chunks, or with 2 * cp chunks for either ring."""
    check_context(context)
    chunks = 2 * cp if context != "ulysses" and cp > 1 else cp
    if length % chunks:
        raise InputError(
            f"a sequence of {length} tokens cannot be split into {chunks} equal chunks ({context}, cp {cp}); pad it"
        )
    return length // chunks


def local_positions(length: int, cp: int, rank: int, context: Context) -> Tensor:
    """Return [length / cp] positions in the full sequence of the tokens that ``rank`` holds, int64.

    Raises:
        InputError: ``length`` is not a multiple of cp (ulysses) or 2 * cp (ring).
    """
    chunks = chunks_of(length, cp, rank, context)
    return torch.cat([torch.arange(start, start + size, device="cpu") for start, _, size in chunks])


class SequenceChunk(NamedTuple):
    """Contiguous tokens of one rank. start: in the full sequence. local_start: in the local tensor."""

    start: int
    local_start: int
    size: int


def chunks_of(length: int, cp: int, rank: int, context: Context) -> list[SequenceChunk]:
    """Return the chunks that ``rank`` holds, in order."""
    if not 0 <= rank < cp:
        raise ConfigError(f"rank {rank} is outside 0..{cp - 1}")
    size = _chunk(length, cp, context)
    if context == "ulysses" or cp == 1:
        return [SequenceChunk(rank * size, 0, size)]
    return [SequenceChunk(rank * size, 0, size), SequenceChunk((2 * cp - 1 - rank) * size, size, size)]


def shard_sequence(full: Tensor, cp: int, rank: int, context: Context, dim: int = 1) -> Tensor:
    """Return the part of a sequence that ``rank`` holds.

    Args:
        full: the full sequence: ids, targets, positions, documents or activations.
        cp: number of context-parallel ranks.
        rank: the rank, from 0.
        context: form of context parallelism.
        dim: the sequence dimension.

    Raises:
        InputError: the dimension is not a multiple of cp (ulysses) or 2 * cp (ring).
    """
    chunks = chunks_of(full.shape[dim], cp, rank, context)
    return torch.cat([full.narrow(dim, start, size) for start, _, size in chunks], dim)


def unshard_sequence(parts: Sequence[Tensor], context: Context, dim: int = 1) -> Tensor:
    """Return the full sequence from the parts of all ranks, in order of rank; inverse of ``shard_sequence``."""
    cp = len(parts)
    length = sum(part.shape[dim] for part in parts)
    chunks = {
        start: part.narrow(dim, local_start, size)
        for rank, part in enumerate(parts)
        for start, local_start, size in chunks_of(length, cp, rank, context)
    }
    return torch.cat([chunks[start] for start in sorted(chunks)], dim)


@dataclass(frozen=True, eq=False)
class Documents:
    """Document ids of the tokens of a packed micro-batch; a token attends to tokens of its own document only.

    Adjacent tokens with equal ids form one document. Create it once per micro-batch with ``of`` and pass it to all
    layers; ``of`` gathers the ids over the context-parallel group.

    Attributes:
        ids_BS: [B, S] ids of the full sequence, in its order, on each rank of the context-parallel group.
        plans: cache of attention blocks, filled by the first layer.
    """

    ids_BS: Tensor
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, local_BS: Tensor, cp_group: ProcessGroup | None = None, context: Context = "ulysses") -> Documents:
        """Create from the ids of this rank's tokens. Collective over ``cp_group``.

        Args:
            local_BS: [B, S / cp] ids in the order of ``shard_sequence``, any integer dtype.
            cp_group: context-parallel group; None: this rank has the full sequence.
            context: form of context parallelism.

        Raises:
            InputError: the ids are not two-dimensional integers.
        """
        if local_BS.dim() != 2 or local_BS.is_floating_point() or local_BS.is_complex():
            raise InputError(f"documents must be integers [B, S / cp]; got {local_BS.dtype} {tuple(local_BS.shape)}")
        if group_size(cp_group) == 1:
            return cls(local_BS)
        parts = gather_values(local_BS.contiguous(), cp_group, "an exchange of document ids")
        return cls(unshard_sequence(list(parts), context))

    @cached_property
    def runs_BS(self) -> Tensor:
        """[B, S] index of each token's document in its sequence, int64, from 0."""
        starts = torch.zeros_like(self.ids_BS, dtype=torch.long)
        starts[:, 1:] = self.ids_BS[:, 1:] != self.ids_BS[:, :-1]
        return starts.cumsum(1)

    @property
    def positions_BS(self) -> Tensor:
        """[B, S] position of each token in its own document, int64."""
        places = torch.arange(self.ids_BS.shape[1], device=self.ids_BS.device).expand_as(self.runs_BS)
        is_start = torch.zeros_like(self.runs_BS, dtype=torch.bool)
        is_start[:, 0] = True
        is_start[:, 1:] = self.runs_BS[:, 1:] != self.runs_BS[:, :-1]
        return places - torch.where(is_start, places, 0).cummax(1).values

    @cached_property
    def groups(self) -> list[tuple[slice, int, int, bool]]:
        """(rows, first token, end, whether it contains several documents) of tokens that are attended together.

        A long document needs no mask. Short adjacent documents share a small mask, which costs less than one call each.
        The property is computed on the CPU.
        """
        rows, length = self.ids_BS.shape
        if length <= GROUP_TOKENS:
            return [(slice(0, rows), 0, length, True)]
        groups = []
        for row, runs in enumerate(self.runs_BS.cpu()):
            ends = runs.bincount().cumsum(0).tolist()
            begin, at, count = 0, 0, 0
            for end in ends:
                if count and end - begin > GROUP_TOKENS:
                    groups.append((slice(row, row + 1), begin, at, count > 1))
                    begin, count = at, 0
                at, count = end, count + 1
            groups.append((slice(row, row + 1), begin, at, count > 1))
        return groups
