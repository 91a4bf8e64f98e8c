"""Work of each rank of dp x cp for the documents of a micro-batch, with static and with balanced lengths.

    a sequence with documents a, b, c      |a a a a a b|b b c c c c|     static, cp 2: 4 chunks, ranks 0 1 1 0

dp is the slower axis. Keys of documents on several ranks are exchanged in a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_comm.layers.transformer.lengths.cost import LengthCost
from moe_comm.layers.transformer.lengths.solve import solve

MICRO_BATCHES = 8
"""Micro-batches to predict; a run's start waits for them."""
Sequences = Sequence[Sequence[int]]
"""Tokens of each document of each sequence, in order."""


@dataclass(frozen=True)
class RankLoads:
    """Work of ranks, in the unit of a ``LengthCost``.

    Attributes:
        work: of each rank, without transfers.
        exposed: of each rank, in transfers of keys that its attention does not hide.
        keys: (ranks that share a document, tokens whose keys they receive). The tokens are summed over the ranks.
    """

    work: tuple[int, ...]
    exposed: tuple[int, ...]
    keys: tuple[tuple[int, int], ...] = ()


def static_loads(sequences_DP: Sequence[Sequences], seq_len: int, cp: int, cost: LengthCost) -> RankLoads:
    """Return the work with each sequence in 2 * cp chunks over the ranks of cp.

    Args:
        sequences_DP: sequences of each rank of dp. They may have padding at the end.
    """
    chunks = 2 * cp if cp > 1 else 1
    bounds = [part * seq_len // chunks for part in range(chunks + 1)]
    work, exposed = ([0] * (len(sequences_DP) * cp) for _ in range(2))
    transfer, total = dict(cost.transfers).get(cp, 0), 0  # of all tokens of a document, for (cp - 1) / cp received
    for dp_rank, sequences in enumerate(sequences_DP):
        for sequence in sequences:
            start = chunk = 0
            for length in sequence:
                pieces: dict[int, list[tuple[int, int]]] = {}
                first = 0
                while first < length:
                    last = min(bounds[chunk + 1] - start, length)
                    if last > first:
                        pieces.setdefault(min(chunk, chunks - 1 - chunk), []).append((first, last))
                    first = last
                    chunk += start + last == bounds[chunk + 1] and chunk + 1 < chunks
                for rank, own in pieces.items():
                    spent = sum(cost.work(last) - cost.work(first) + cost.document for first, last in own)
                    work[dp_rank * cp + rank] += spent
                    if len(pieces) > 1:
                        received = cost.received(own)
                        attention = spent - sum(cost.token * (last - first) + cost.document for first, last in own)
                        exposed[dp_rank * cp + rank] += max(0, transfer * cp * received // (cp - 1) - attention)
                        total += received
                start += length
    return RankLoads(tuple(work), tuple(exposed), ((cp, total),) if total else ())


def balanced_loads(sequences: Sequences, world: int, cost: LengthCost) -> RankLoads:
    """Return the work with each document on the ranks that ``solve`` assigns."""
    lengths = [length for sequence in sequences for length in sequence]
    assignment = solve(lengths, world, cost)
    exposed = [0] * world
    keys: dict[int, int] = {}
    for length, ranks in zip(lengths, assignment.ranks, strict=True):
        if (shared := len(ranks)) > 1:
            (extra,) = cost.exposed([length], shared)
            for rank in ranks:
                exposed[rank] += extra
            at = [part * length // (2 * shared) for part in range(2 * shared + 1)]
            received = sum(
                cost.received([(at[part], at[part + 1]) for part in (first, 2 * shared - 1 - first)])
                for first in range(shared)
            )
            keys[shared] = keys.get(shared, 0) + received
    return RankLoads(assignment.loads, tuple(exposed), tuple(sorted(keys.items())))


def micro_batches(sequences: Sequences, size: int) -> list[Sequences]:
    """Return the first ``MICRO_BATCHES`` micro-batches of ``size`` sequences, or as many as there are."""
    return [sequences[at : at + size] for at in range(0, min(len(sequences), MICRO_BATCHES * size) - size + 1, size)]
