"""Batches for training and evaluation, from prepared token files.

corpus = Corpus.open(paths, settings)
global_batch = corpus.batch_of(step)                 # equal on every rank; reads no tokens
micro_batch = global_batch.micro(i, micro_batches)   # the i-th micro-batch of all ranks
batch = micro_batch.local(dp_rank, dp, shard)        # reads only this rank's sequences

global batch of 8 sequences, 2 micro-batches, dp 2        micro 0: [0 1 | 2 3]    micro 1: [4 5 | 6 7]
                                                          dp rank:    0     1                0     1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from moe_comm.errors import ConfigError
from moe_comm.train.data.packing import Contiguous, Packing, read_row
from moe_comm.train.data.sampler import SequenceIndices
from moe_comm.train.data.sequences import TrainingSequences, open_files
from moe_comm.train.data.settings import CorpusSettings
from moe_comm.train.data.tokenfile import Ints, TokenFile, entropy
from moe_comm.train.data.tokenizer import ByteTokenizer, Tokenizer, copy_tokenizer, load_tokenizer

Shard = Callable[[Tensor], Tensor]
"""Maps a tensor [B, S] to this context-parallel rank's shard of the sequence dimension."""


@dataclass(frozen=True)
class Batch:
    """One rank's part of a micro-batch. Tensors are [B, S], on the CPU.

    Attributes:
        ids_BS: int64.
        targets_BS: int64; a loss ignores targets of -100.
        positions_BS: int64, from 0 in each document if documents are separate, else in each sequence.
        documents_BS: int32 number of the document in its sequence; None if documents are joined.
        num_targets: number of targets in the whole step, over all its micro-batches and ranks. The sum of all losses
            divided by it is the mean loss of the step.
        mask_BS: bool, False for padding; None if these sequences have none.
    """

    ids_BS: Tensor
    targets_BS: Tensor
    positions_BS: Tensor
    documents_BS: Tensor | None
    num_targets: int
    mask_BS: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on ``device``."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def shard(self, shard: Shard) -> Batch:
        """Return the batch with ``shard`` applied to each tensor."""
        return self._each(shard)

    def _each(self, change: Shard) -> Batch:
        values = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        changed: dict[str, Any] = {name: change(value) for name, value in values.items()}
        return replace(self, **changed)


@dataclass(frozen=True)
class GlobalBatch:
    """The sequences of a step, or of one of its micro-batches, over all ranks. Equal on every rank.

    Attributes:
        indices: source and index of each sequence.
        num_targets: number of targets in the whole step.
    """

    packings: Sequence[Packing]
    indices: SequenceIndices
    num_targets: int

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return len(self.indices.index_B)

    def micro(self, index: int, micro_batches: int) -> GlobalBatch:
        """Return micro-batch ``index`` of ``micro_batches`` equal ones.

        Raises:
            ConfigError: they do not divide the batch, or ``index`` is out of range.
        """
        if self.rows % micro_batches or not 0 <= index < micro_batches:
            raise ConfigError(
                f"data.batch ({self.rows}) must be a multiple of data.micro_batches ({micro_batches}), "
                f"and the index of a micro-batch less than that; got index {index}"
            )
        size = self.rows // micro_batches
        rows = slice(index * size, (index + 1) * size)
        indices = SequenceIndices(self.indices.source_B[rows], self.indices.index_B[rows])
        return replace(self, indices=indices)

    def rows_of(self, dp_rank: int, dp: int) -> slice:
        """Return the sequences of data-parallel rank ``dp_rank`` of ``dp``.

        The sequences are distributed evenly. If the numbers differ by one, later ranks have more, so ``dp_rank`` times
        a rank's number of sequences is at or after the end of the previous ranks' sequences.

        Raises:
            ConfigError: a rank would get no sequence.
        """
        if self.rows < dp:
            raise ConfigError(
                f"a micro-batch has {self.rows} sequences for {dp} data-parallel ranks; each needs at least one: "
                "raise data.batch or lower data.micro_batches"
            )
        base, extra = divmod(self.rows, dp)  # the last ``extra`` ranks have one sequence more
        larger = dp_rank - (dp - extra)  # number of larger ranks before this rank; negative if this rank is not larger
        begin = dp_rank * base + max(larger, 0)
        return slice(begin, begin + base + (larger >= 0))

    def local(self, dp_rank: int = 0, dp: int = 1, shard: Shard | None = None) -> Batch:
        """Read the sequences of data-parallel rank ``dp_rank`` of ``dp``: ``rows_of``.

        Args:
            shard: shards each tensor along the sequence for this context-parallel rank; None: whole sequences.

        Raises:
            ConfigError: a rank would get no sequence.
            CorruptFile: tokens do not match their checksum.
        """
        own_rows = self.rows_of(dp_rank, dp)
        rows = [
            read_row(self.packings[source], index)
            for source, index in zip(
                self.indices.source_B[own_rows].tolist(), self.indices.index_B[own_rows].tolist(), strict=True
            )
        ]
        documents = None
        if self.packings[0].separate:
            documents = torch.from_numpy(np.stack([row.documents_S for row in rows]))
        seq_len = self.packings[0].seq_len
        length_B1 = torch.tensor([[row.length] for row in rows], dtype=torch.int64, device="cpu")
        padded = any(row.length < seq_len for row in rows)
        batch = Batch(
            torch.from_numpy(np.stack([row.ids_S for row in rows])),
            torch.from_numpy(np.stack([row.targets_S for row in rows])),
            torch.from_numpy(np.stack([row.positions_S for row in rows])),
            documents,
            self.num_targets,
            torch.arange(seq_len, device="cpu") < length_B1 if padded else None,
        )
        return batch if shard is None else batch.shard(shard)


@dataclass(frozen=True)
class Statistics:
    """Statistics of a corpus. Sources are weighted as in training.

    Attributes:
        unigram_entropy: nats per token; the loss of the best model that ignores the context.
        bytes_per_token: bytes of text. A loss per token divided by it is a loss per byte.
        tokens, documents: totals of the files.
        train_tokens, validation_tokens: totals of the two splits.
    """

    unigram_entropy: float
    bytes_per_token: float
    tokens: int
    documents: int
    train_tokens: int
    validation_tokens: int


class Corpus:
    """Training and held-out text of one or more prepared sources.

    Args:
        files: one per source of ``settings``, in the same order.
        seed: seed of the random order.

    Raises:
        ConfigError: sources have different tokenizers, or one is too short for a sequence of each split.
    """

    def __init__(self, files: Sequence[TokenFile], settings: CorpusSettings, seed: int = 0) -> None:
        self.settings = settings
        training = TrainingSequences(files, settings, seed)
        self.files, self.train, self.validation = training.files, training.train, training.validation
        self.sampler, self._packings = training.sampler, training.packings
        self.vocab_size = self.files[0].vocab_size
        self.end_of_text = self.files[0].end_of_text
        self._held_out: list[Packing] = [
            Contiguous(tokens, settings.seq_len, settings.documents == "separate") for tokens in self.validation
        ]

    @classmethod
    def open(cls, paths: Sequence[str | Path], settings: CorpusSettings, seed: int = 0) -> Corpus:
        """Open the folders that ``prepare_all`` returned for ``settings``. Every rank calls it.

        Raises:
            ConfigError: see the class; or a folder is not a prepared one.
            CorruptFile: a file is truncated or altered.
        """
        return cls(open_files(paths, settings), settings, seed)

    def batch_of(self, step: int) -> GlobalBatch:
        """Return the global batch of ``step`` (from 0). It depends only on the data, the settings and the step."""
        indices = self.sampler.indices(step)
        return GlobalBatch(self._packings, indices, _targets(self._packings, indices))

    def validation_batches(self, count: int | None = None, batch: int | None = None) -> list[GlobalBatch]:
        """Return batches of held-out sequences, evenly spread over the held-out text of every source.

        Each sequence occurs at most once. The last batch is filled with padding, which has no targets.

        Args:
            count: maximum number of batches, with sources weighted as in training; None: all held-out text.
            batch: sequences per batch; None: ``settings.batch``.

        Raises:
            ConfigError: no text is held out.
        """
        batch = batch or self.settings.batch
        available = [packing.sequences for packing in self._held_out]
        if not all(available):
            raise ConfigError("data.validation is 0: no text is held out to evaluate on")
        counts = available
        if count is not None:
            rows = np.array(count * batch)
            mixture = self.sampler.mixture
            counts = [min(int(mixture.count(s, rows)), limit) for s, limit in enumerate(available)]
        sources = np.repeat(np.arange(len(counts)), counts)
        indices = [_spread_evenly(*pair) for pair in zip(available, counts, strict=True)]
        padding = -sum(counts) % batch
        source_N = np.concatenate([sources, np.zeros(padding, np.int64)])
        index_N = np.concatenate([*indices, np.full(padding, -1)])
        parts = [
            SequenceIndices(source_N[at : at + batch], index_N[at : at + batch]) for at in range(0, len(index_N), batch)
        ]
        return [GlobalBatch(self._held_out, part, _targets(self._held_out, part)) for part in parts]

    def state(self, step: int) -> dict[str, Any]:
        """Return the sampler's JSON state before ``step``, for the checkpoint."""
        return self.sampler.state(step)

    def resume(self, state: dict[str, Any]) -> int:
        """Return the step to continue with.

        Raises:
            ConfigError: the checkpoint was trained on other data; the message names each difference.
        """
        return self.sampler.resume(state)

    @property
    def epochs(self) -> list[float]:
        """Fraction of an epoch of each source that one step takes."""
        mixture = self.sampler.mixture
        rows_per_step = [self.settings.batch * draws / mixture.period for draws in mixture.draws]
        return [rows / packing.sequences for rows, packing in zip(rows_per_step, self._packings, strict=True)]

    def statistics(self) -> Statistics:
        """Return the statistics of the corpus."""
        mixture = self.sampler.mixture
        shares = [draws / mixture.period for draws in mixture.draws]
        probability_V = np.zeros(self.vocab_size)
        bytes_per_token = 0.0
        for share, file in zip(shares, self.files, strict=True):
            probability_V += share * file.counts_V / len(file)
            bytes_per_token += share * file.meta["text_bytes"] / len(file)
        return Statistics(
            unigram_entropy=entropy(probability_V),
            bytes_per_token=bytes_per_token,
            tokens=sum(len(file) for file in self.files),
            documents=sum(int(file.meta["documents"]) for file in self.files),
            train_tokens=sum(map(len, self.train)),
            validation_tokens=sum(map(len, self.validation)),
        )

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the corpus.

        Raises:
            ConfigError, MissingDependency: its file cannot be loaded.
        """
        if self.files[0].meta["tokenizer"] == ByteTokenizer.digest:
            return ByteTokenizer()
        return load_tokenizer(self.files[0].tokenizer, self.files[0].meta["end_name"])

    def save_tokenizer(self, folder: str | Path) -> None:
        """Copy the tokenizer into ``folder``, for ``AutoTokenizer``."""
        copy_tokenizer(self.files[0].tokenizer, Path(folder), follow=True)

    def prompt(self, length: int) -> list[int]:
        """Return the first ``length`` tokens of the held-out text, or of the training text if none is held out."""
        tokens = self.validation[0] if len(self.validation[0]) else self.train[0]
        ids: list[int] = tokens.file.read(tokens.start, min(tokens.start + length, tokens.stop)).tolist()
        return ids


def _targets(packings: Sequence[Packing], indices: SequenceIndices) -> int:
    total = 0
    for s in np.unique(indices.source_B):
        index_N = indices.index_B[(indices.source_B == s) & (indices.index_B >= 0)]
        total += int(packings[s].valid_targets(index_N).sum())
    return total


def _spread_evenly(available: int, count: int) -> Ints:
    """Return ``count`` different numbers below ``available``, evenly spread, with the first and the last."""
    if count <= 1:
        return np.zeros(count, np.int64)
    return np.arange(count) * (available - 1) // (count - 1)


T = TypeVar("T")


class Prefetch(Generic[T]):
    """Calls ``load(step + 1)`` in a thread while the caller works on ``step``.

        with Prefetch(load, last=steps) as data:
            for step in range(first, steps):
                batches = data.get(step)

    Args:
        load: returns the data of a step. It is called in one thread, never concurrently.
        last: stop before this step.
    """

    def __init__(self, load: Callable[[int], T], last: int) -> None:
        self._load = load
        self._last = last
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._next: tuple[int, Future[T]] | None = None

    def get(self, step: int) -> T:
        """Return the data of ``step``, or raise the error of ``load``."""
        if self._next is None or self._next[0] != step:
            self._drop()
            self._next = (step, self._pool.submit(self._load, step))
        result = self._next[1].result()
        self._next = (step + 1, self._pool.submit(self._load, step + 1)) if step + 1 < self._last else None
        return result

    def close(self) -> None:
        """End the thread, after the load in progress."""
        self._drop()
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drop(self) -> None:
        if self._next is not None:
            self._next[1].cancel()
            self._next = None
