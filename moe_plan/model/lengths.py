"""Documents of different lengths in the sequences of a workload.

A histogram is a JSON object with the number of documents of each length, {"512": 900, "4096": 3}.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Self

from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.lengths.loads import MICRO_BATCHES
from moe_comm.runtime.untrusted import parse_object, read_bounded, shown

HISTOGRAM_BYTES = 1 << 24
"""Limit of the size of a histogram."""
LONGEST, MOST = 1 << 30, 1 << 50
"""Upper bounds of the tokens of a document, and of the documents of a length."""
SEQUENCES = 4096
"""A sample has at most this many sequences, or those of one step."""


def sample_size(global_batch: int) -> int:
    """Return the number of sequences that a prediction needs of a corpus."""
    return max(global_batch, min(MICRO_BATCHES * global_batch, SEQUENCES))


@dataclass(frozen=True, eq=False)
class DocumentLengths:
    """The first sequences of a run, with documents that attend to their own tokens only. Compared by identity.

    Args:
        sequences: tokens of each document of each sequence, in order. Padding is left out.

    Raises:
        ConfigError: there are no documents.
    """

    sequences: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not any(self.sequences):
            raise ConfigError("lengths need at least one document")

    @classmethod
    def drawn(cls, histogram: Mapping[int, int], seq_len: int, count: int) -> Self:
        """Return ``count`` sequences of ``seq_len`` tokens: a stream of random documents, cut into sequences."""

        def sequences() -> Iterator[tuple[int, ...]]:
            source, own, left = random.Random(0), [], seq_len
            lengths, weights = list(histogram), list(histogram.values())
            while True:
                (length,) = source.choices(lengths, weights)
                while length:
                    own.append(min(length, left))
                    length -= own[-1]
                    left -= own[-1]
                    if not left:
                        yield tuple(own)
                        own, left = [], seq_len

        return cls(tuple(islice(sequences(), count)))

    @cached_property
    def _tokens(self) -> Counter[int]:
        """Tokens in documents of each length."""
        result: Counter[int] = Counter()
        for sequence in self.sequences:
            for length in sequence:
                result[length] += length
        return result

    def mean(self, value: Callable[[int], float]) -> float:
        """Return the mean over the tokens of ``value`` of the length of their document."""
        return sum(tokens * value(length) for length, tokens in self._tokens.items()) / self._tokens.total()


def read_histogram(path: Path) -> dict[int, int]:
    """Return the number of documents of each length.

    Raises:
        ConfigError: the file cannot be read, or is no histogram.
    """
    try:
        values = parse_object(read_bounded(path, HISTOGRAM_BYTES))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no histogram of lengths: {shown(error)}") from None
    result = {}
    for key, count in values.items():
        valid = key.isascii() and key.isdecimal() and len(key) <= 10 and 1 <= int(key) <= LONGEST
        if not valid or type(count) is not int or not 0 <= count <= MOST:
            raise ConfigError(
                f'{path} must have numbers of documents by length, such as {{"512": 900}}; got {shown(key)}: '
                f"{shown(count)}"
            )
        if count:
            result[int(key)] = count
    if not result:
        raise ConfigError(f"{path} has no documents")
    return result
