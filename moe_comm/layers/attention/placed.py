"""Documents of a micro-batch, each on one or several ranks of a group.

    4 ranks        rank 0      rank 1      rank 2      rank 3
    document a     a0 a7       a1 a6       a2 a5       a3 a4        16 tokens on 4 ranks, zig-zag in 8 chunks
    document b     b0 b3       b1 b2       -           -            on ranks 0 and 1
    c to g         -           -           c d         e f g        short documents on one rank each

Positions count through all documents of the group: first those on several ranks, then the others rank by rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from moe_comm.layers.attention.sequence import Documents, SequenceChunk


@dataclass(frozen=True, eq=False)
class PlacedDocuments(Documents):
    """Documents in chunks on any ranks of a group, instead of a sequence that all ranks share.

    ``ids_BS`` is [1, S], the documents of all ranks. A rank's tensors have one row with the tokens of its chunks.
    Numbers of tokens may differ between ranks.

    Attributes:
        chunks: chunks of each rank, ascending, with at least one token in each.
    """

    chunks: tuple[tuple[SequenceChunk, ...], ...] = ()

    @cached_property
    def digest(self) -> str:
        """Hash of the chunks, which the ranks compare before a transfer."""
        return f"{zlib.crc32(repr(self.chunks).encode()):08x}"


class DocumentPiece(NamedTuple):
    """Contiguous tokens of document ``document``, from token ``begin``, on one rank."""

    document: int
    begin: int
    size: int


@dataclass(frozen=True)
class DocumentPlacement:
    """Chunks and documents of all ranks.

    Attributes:
        chunks: chunks of each rank, for ``PlacedDocuments``.
        pieces: pieces of each rank, in the order of its tokens. Padding follows.
        padding: number of padding tokens of each rank, a document of their own.
        sizes: tokens of each document and padding in the order of positions.
    """

    chunks: tuple[tuple[SequenceChunk, ...], ...]
    pieces: tuple[tuple[DocumentPiece, ...], ...]
    padding: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(
        cls, lengths: Sequence[int], ranks: Sequence[Sequence[int]], world: int, multiple: int = 1
    ) -> DocumentPlacement:
        """Place each document on its ranks.

        Args:
            lengths: tokens of each document, at least 1.
            ranks: ranks of each document, which have equal work.
            world: number of ranks.
            multiple: the tokens of each rank are padded to a positive multiple of this number.
        """
        chunks: list[list[SequenceChunk]] = [[] for _ in range(world)]
        pieces: list[list[DocumentPiece]] = [[] for _ in range(world)]
        alone: list[list[int]] = [[] for _ in range(world)]
        held, sizes, start = [0] * world, [], 0
        for document, (length, on) in enumerate(zip(lengths, ranks, strict=True)):
            if len(on) == 1:
                alone[on[0]].append(document)
                continue
            for part in range(2 * len(on)):
                rank = on[min(part, 2 * len(on) - 1 - part)]
                begin, end = (at * length // (2 * len(on)) for at in (part, part + 1))
                if end > begin:
                    chunks[rank].append(SequenceChunk(start + begin, held[rank], end - begin))
                    pieces[rank].append(DocumentPiece(document, begin, end - begin))
                    held[rank] += end - begin
            start += length
            sizes.append(length)
        padding = []
        for rank in range(world):
            own = [lengths[document] for document in alone[rank]]
            pieces[rank] += [DocumentPiece(document, 0, lengths[document]) for document in alone[rank]]
            tokens = held[rank] + sum(own)
            padding.append(-tokens % multiple if tokens else multiple)
            own += [padding[rank]] if padding[rank] else []
            if own:
                chunks[rank].append(SequenceChunk(start, held[rank], sum(own)))
            start += sum(own)
            sizes += own
        return cls(tuple(map(tuple, chunks)), tuple(map(tuple, pieces)), tuple(padding), tuple(sizes))

    def documents(self, device: torch.device | str) -> PlacedDocuments:
        """Return the documents for attention, on ``device``."""
        sizes = torch.tensor(self.sizes, dtype=torch.int64, device="cpu")
        ids_S = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), sizes)
        return PlacedDocuments(ids_S.unsqueeze(0).to(device), chunks=self.chunks)
