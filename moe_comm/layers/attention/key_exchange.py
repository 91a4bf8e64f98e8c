"""Exchange of the keys that each rank of a ring needs of each other rank.

    cp 2, zig-zag, one document         rank 0: chunks 0 3    rank 1: chunks 1 2
    rank 0 sends chunk 0 only           no query of rank 1 is after chunk 3
    rank 1 sends chunks 1 and 2         the queries of chunk 3 are after both

    two documents, cut after chunk 1    rank 0 sends chunk 0, rank 1 sends chunk 2

A query attends to the keys before it, in its document and its window. So a rank needs the end of a chunk, or nothing.
Every rank computes the ranges of all pairs of ranks from the same numbers, so that no message is needed. In step t,
ranks r and r xor t exchange keys (rank r sends to r + t if the number of ranks is not a power of two). A step without
keys is left out, so documents on aligned groups of c = 2^n ranks need c - 1 steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.layers.attention.placed import PlacedDocuments
from moe_comm.layers.attention.sequence import Documents, SequenceChunk, chunks_of
from moe_comm.layers.parallel.collectives import channel_of, group_rank

LINE_BYTES = 64


class KeyRanges:
    """The keys that the ranks of a ring send to each other.

    Args:
        chunks: chunks of each rank, ascending; together they cover the sequence.
        first_key: maps the position of a query to the position of the first key that it attends to, of any sequence of
            the batch.
    """

    def __init__(self, chunks: Sequence[Sequence[SequenceChunk]], first_key: Callable[[int], int]) -> None:
        self.chunks, self._ranks = chunks, len(chunks)
        owners = sorted((chunk, rank) for rank, own in enumerate(chunks) for chunk in own if chunk.size)
        starts = [chunk.start for chunk, _ in owners]
        begin_of: dict[tuple[int, int], dict[SequenceChunk, int]] = {}  # by (query rank, key rank)
        for chunk, query_rank in owners:
            first = first_key(chunk.start)
            for key_chunk, key_rank in owners[bisect_right(starts, first) - 1 : bisect_right(starts, chunk.start) - 1]:
                if key_rank != query_rank:
                    begins = begin_of.setdefault((query_rank, key_rank), {})
                    begins[key_chunk] = min(begins.get(key_chunk, key_chunk.start + key_chunk.size), first)
        self._ranges = {
            pair: [_from(chunk, begin) for chunk, begin in sorted(begins.items())] for pair, begins in begin_of.items()
        }

    def of(self, query_rank: int, key_rank: int) -> list[SequenceChunk]:
        """Return the keys of ``key_rank`` that ``query_rank`` needs, as ranges of the tensors of ``key_rank``."""
        return self._ranges.get((query_rank, key_rank), [])

    def tokens(self, query_rank: int, key_rank: int) -> int:
        """Return the number of tokens of ``of``."""
        return sum(chunk.size for chunk in self.of(query_rank, key_rank))

    @cached_property
    def steps(self) -> list[int]:
        """The steps in which any rank sends keys, ascending."""
        return sorted({self._step(query_rank, key_rank) for query_rank, key_rank in self._ranges})

    @cached_property
    def distances(self) -> list[int]:
        """The distances, in ranks of the ring, from queries to the keys that they need, ascending."""
        return sorted({(key_rank - query_rank) % self._ranks for query_rank, key_rank in self._ranges})

    def partners(self, rank: int, step: int) -> tuple[int, int]:
        """Return the rank that ``rank`` sends its keys to in ``step``, and the one that it receives keys from."""
        if self._ranks & (self._ranks - 1) == 0:
            return rank ^ step, rank ^ step
        return (rank + step) % self._ranks, (rank - step) % self._ranks

    def _step(self, query_rank: int, key_rank: int) -> int:
        power_of_two = self._ranks & (self._ranks - 1) == 0
        return query_rank ^ key_rank if power_of_two else (query_rank - key_rank) % self._ranks


def compact(ranges: Sequence[SequenceChunk]) -> list[SequenceChunk]:
    """Return the ranges as chunks of a tensor that contains only them."""
    chunks, end = [], 0
    for start, _, size in ranges:
        chunks.append(SequenceChunk(start, end, size))
        end += size
    return chunks


def _from(chunk: SequenceChunk, begin: int) -> SequenceChunk:
    skipped = max(begin - chunk.start, 0)
    return SequenceChunk(chunk.start + skipped, chunk.local_start + skipped, chunk.size - skipped)


def key_ranges(documents: Documents | None, length: int, cp: int, window: int | None) -> KeyRanges:
    """Return the ranges of sequences of ``length`` tokens over ``cp`` ranks, in zig-zag order or as placed."""
    if documents is None:
        return _zigzag_ranges(length, cp, window)
    key = ("key ranges", length, cp, window)
    if key not in documents.plans:
        places = torch.arange(documents.ids_BS.shape[1], device=documents.ids_BS.device)
        start_S = (places - documents.positions_BS).amin(0).cpu()  # of any sequence: all send the same ranges

        def first_key(query: int) -> int:
            start = int(start_S[query])
            return start if window is None else max(start, query - window + 1)

        if isinstance(documents, PlacedDocuments):
            chunks: Sequence[Sequence[SequenceChunk]] = documents.chunks
        else:
            chunks = [chunks_of(length, cp, rank, "ring") for rank in range(cp)]
        documents.plans[key] = KeyRanges(chunks, first_key)
    ranges: KeyRanges = documents.plans[key]
    return ranges


@lru_cache(maxsize=64)
def _zigzag_ranges(length: int, cp: int, window: int | None) -> KeyRanges:
    chunks = [chunks_of(length, cp, rank, "ring") for rank in range(cp)]
    return KeyRanges(chunks, lambda query: 0 if window is None else max(0, query - window + 1))


class KeyExchange:
    """Transfers of the keys of ``ranges`` over ``group``, and of their gradients back to the owners. Collective.

    Tensors are [B, heads, tokens, width], and those of one call may differ in heads and width.
    """

    def __init__(self, ranges: KeyRanges, group: ProcessGroup) -> None:
        self.ranges, self._channel = ranges, channel_of(group)
        self._rank = group_rank(group)

    def start_keys(self, step: int, own: Sequence[Tensor], operation: str) -> Callable[[], list[Tensor]]:
        """Start to send the keys of ``step``; return a function that waits for the received ones."""
        to_rank, from_rank = self.ranges.partners(self._rank, step)
        sent = self.ranges.of(to_rank, self._rank)
        packed, views = _allocate(own, sent)
        for view, tensor in zip(views, own, strict=True):
            for chunk, source in zip(compact(sent), sent, strict=True):
                _tokens(view, chunk).copy_(_tokens(tensor, source))
        received = _with_tokens(own, self.ranges.of(self._rank, from_rank))
        return self._start(to_rank, from_rank, (packed, received), operation)

    def start_gradients(
        self, step: int, gradients: Sequence[Tensor], sums: Sequence[Tensor], operation: str
    ) -> Callable[[], None]:
        """Start to return the gradients of the keys that ``start_keys`` received in ``step``.

        The returned function adds the gradients that the other rank returned to ``sums``, those of this rank's keys.
        """
        from_rank, to_rank = self.ranges.partners(self._rank, step)
        ranges = self.ranges.of(from_rank, self._rank)
        receive = self._start(to_rank, from_rank, (pack(gradients), _with_tokens(sums, ranges)), operation)

        def add() -> None:
            for total, part in zip(sums, receive(), strict=True):
                for chunk, source in zip(ranges, compact(ranges), strict=True):
                    _tokens(total, chunk).add_(_tokens(part, source))

        return add

    def _start(
        self, to_rank: int, from_rank: int, packed_and_received: tuple[Tensor, Sequence[Tensor]], operation: str
    ) -> Callable[[], list[Tensor]]:
        packed, received = packed_and_received
        receive = self._channel.send_receive(packed, to_rank, from_rank, _byte_ranges(received)[-1].stop, operation)
        return lambda: unpack(receive(), received)


def _tokens(tensor_BhSd: Tensor, chunk: SequenceChunk) -> Tensor:
    return tensor_BhSd[:, :, chunk.local_start : chunk.local_start + chunk.size]


def _with_tokens(tensors: Sequence[Tensor], ranges: Sequence[SequenceChunk]) -> list[Tensor]:
    """Return tensors on the meta device with the tokens of ``ranges``."""
    size = sum(chunk.size for chunk in ranges)
    return [torch.empty(*t.shape[:2], size, t.shape[3], dtype=t.dtype, device="meta") for t in tensors]


def _allocate(tensors: Sequence[Tensor], ranges: Sequence[SequenceChunk]) -> tuple[Tensor, list[Tensor]]:
    """Return one byte tensor with the tokens of ``ranges`` of each tensor, and its views."""
    like = _with_tokens(tensors, ranges)
    packed = torch.empty(_byte_ranges(like)[-1].stop, dtype=torch.uint8, device=tensors[0].device)
    return packed, unpack(packed, like)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Copy ``tensors`` into one byte tensor, each aligned to a cache line, so that kernels can read them in place."""
    packed = torch.empty(_byte_ranges(tensors)[-1].stop, dtype=torch.uint8, device=tensors[0].device)
    for view, tensor in zip(unpack(packed, tensors), tensors, strict=True):
        view.copy_(tensor)
    return packed


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """View ``packed`` as tensors with the shapes and dtypes of ``like``."""
    return [packed[span].view(t.dtype).view(t.shape) for span, t in zip(_byte_ranges(like), like, strict=True)]


def _byte_ranges(tensors: Sequence[Tensor]) -> list[slice]:
    ranges, end = [], 0
    for tensor in tensors:
        start = -(-end // LINE_BYTES) * LINE_BYTES
        end = start + tensor.numel() * tensor.element_size()
        ranges.append(slice(start, end))
    return ranges
