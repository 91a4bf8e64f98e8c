"""Text as bytes, and batches of it that do not depend on the number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_comm.errors import ConfigError
from moe_comm.train.config import DataSection

VOCAB_BYTES = 256
END_OF_TEXT = 256
"""The one special token; it pads and ends, and does not occur in the text itself."""
VOCAB_SIZE = 257


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch: inputs_BS and targets_BS int64 (the same text, one byte later).

    num_targets: targets of the *global* batch; a loss summed over this rank's tokens and divided by it adds up over
    the ranks to the mean over the global batch.
    """

    inputs_BS: Tensor
    targets_BS: Tensor
    num_targets: int


def read_text(source: str) -> bytes:
    """The text of ``source`` ("pydoc" or a path), UTF-8.

    Many paragraphs of the language reference occur in several topics; only the first is kept, so that validation
    text was not seen in training.

    Raises:
        ConfigError: the file cannot be read, or is not UTF-8.
    """
    if source == "pydoc":
        from pydoc_data.topics import topics

        text = "\n\n\n".join(topics.values())
        return "\n\n".join(dict.fromkeys(text.split("\n\n"))).encode()
    try:
        return Path(source).read_text(encoding="utf-8").encode()
    except OSError as error:
        raise ConfigError(f"data.source: cannot read {source!r}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.source: {source!r} is not UTF-8 text: {error}") from error


def unigram_entropy(text: bytes) -> float:
    """Entropy of single bytes, nats per byte: the loss of the best model that ignores the context."""
    counts = np.bincount(np.frombuffer(text, np.uint8), minlength=VOCAB_BYTES)
    p = counts[counts > 0] / max(len(text), 1)
    return float(-(p * np.log(p)).sum())


class Corpus:
    """Training and validation text, cut into batches.

    A batch is a function of (seed, step) alone: every rank computes the places of the whole global batch and takes
    its own sequences, so the order of the data is the same for any number of ranks.

        global batch of 5 sequences, 2 ranks:   rank 0: 0 1   rank 1: 2 3 4
    """

    def __init__(self, text: bytes, section: DataSection, seed: int) -> None:
        self.section = section
        self.seed = seed
        self.entropy = unigram_entropy(text)
        window = section.seq_len + 1
        cut = len(text) - max(math.ceil(len(text) * section.validation), window)
        if cut < window:
            raise ConfigError(
                f"data.source {section.source!r} has {len(text)} bytes; training and validation need "
                f"{window} bytes each at data.seq_len {section.seq_len}"
            )
        self._train = torch.frombuffer(bytearray(text[:cut]), dtype=torch.uint8)
        self._validation = torch.frombuffer(bytearray(text[cut:]), dtype=torch.uint8)

    @property
    def train_bytes(self) -> int:
        return self._train.numel()

    @property
    def validation_bytes(self) -> int:
        return self._validation.numel()

    def train_batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """This rank's part of the batch of ``step``: windows at random places of the training text."""
        rng = np.random.default_rng((self.seed, step))
        places_B = rng.integers(0, self.train_bytes - self.section.seq_len, size=self.section.batch)
        return self._cut(self._train, places_B, rank, world)

    def validation_batches(self, count: int, rank: int = 0, world: int = 1) -> list[Batch]:
        """This rank's part of ``count`` batches, their windows evenly spread over the validation text."""
        last = self.validation_bytes - self.section.seq_len - 1
        places_N = np.linspace(0, last, count * self.section.batch).astype(np.int64)
        return [self._cut(self._validation, places_B, rank, world) for places_B in np.split(places_N, count)]

    def prompt(self, length: int) -> bytes:
        """The first line of the validation text that starts within it, cut to ``length`` bytes."""
        text = bytes(self._validation.numpy())
        return text[text.find(b"\n") + 1 :][:length] or text[:length]

    def _cut(self, text: Tensor, places_B: npt.NDArray[np.int64], rank: int, world: int) -> Batch:
        batch, seq_len = len(places_B), self.section.seq_len
        mine = torch.from_numpy(places_B[batch * rank // world : batch * (rank + 1) // world])
        tokens_BS = text[mine[:, None] + torch.arange(seq_len + 1)].long()
        return Batch(tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous(), batch * seq_len)
