"""Prepared token files as batches for training and evaluation.

corpus = Corpus.open(paths, settings)
whole = corpus.batch_of(step)                   # known on every rank, nothing read yet
part = whole.micro(i, micro_batches)            # the i-th micro-batch, of all ranks together
batch = part.local(dp_rank, dp, shard)          # reads this rank's sequences only

global batch of 8 sequences, 2 micro-batches, dp 2        micro 0: [0 1 | 2 3]    micro 1: [4 5 | 6 7]
                                                          dp rank:    0     1                0     1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_comm.errors import ConfigError
from moe_comm.train.data.packing import Contiguous, Packing, View, make_packing, read_row
from moe_comm.train.data.sampler import Mixture, Places, Sampler, Supply
from moe_comm.train.data.settings import CorpusSettings
from moe_comm.train.data.tokenfile import Ints, TokenFile, open_tokens
from moe_comm.train.data.tokenizer import ByteTokenizer, Tokenizer, copy_tokenizer, load_tokenizer

Shard = Callable[[Tensor], Tensor]
"""Takes a tensor [B, S] to this context-parallel rank's part of it along the sequence."""


@dataclass(frozen=True)
class Batch:
    """One rank's part of a micro-batch, [B, S] each, on the CPU.

    ids_BS, targets_BS: int64; a target of -100 counts in no loss. positions_BS: int64, from 0 in each document where
    documents are separate, else in each sequence. documents_BS: int32 number of the document in its sequence; None
    where documents are joined. num_targets: targets that count in the whole step, over all its micro-batches and
    ranks: losses summed over tokens and divided by it add up to the step's mean.
    """

    ids_BS: Tensor
    targets_BS: Tensor
    positions_BS: Tensor
    documents_BS: Tensor | None
    num_targets: int

    def to(self, device: torch.device | str) -> Batch:
        """The same on ``device``."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def shard(self, shard: Shard) -> Batch:
        """The same with ``shard`` applied to each tensor."""
        return self._each(shard)

    def _each(self, change: Shard) -> Batch:
        documents = None if self.documents_BS is None else change(self.documents_BS)
        return Batch(
            change(self.ids_BS), change(self.targets_BS), change(self.positions_BS), documents, self.num_targets
        )


@dataclass(frozen=True)
class GlobalBatch:
    """Sequences of a step, or of one of its micro-batches, over all ranks; the same object on every rank.

    places: source and index of each sequence; index -1 is padding. num_targets: of the whole step.
    """

    packings: Sequence[Packing]
    places: Places
    num_targets: int

    @property
    def rows(self) -> int:
        return len(self.places.index_B)

    def micro(self, index: int, micro_batches: int) -> GlobalBatch:
        """Micro-batch ``index`` of ``micro_batches`` equal ones.

        Raises:
            ConfigError: they do not divide the batch, or there is no such one.
        """
        if self.rows % micro_batches or not 0 <= index < micro_batches:
            raise ConfigError(
                f"data.batch ({self.rows}) must be a multiple of data.micro_batches ({micro_batches}), "
                f"and a micro-batch one of them; got number {index}"
            )
        size = self.rows // micro_batches
        return self._part(slice(index * size, (index + 1) * size))

    def local(self, dp_rank: int = 0, dp: int = 1, shard: Shard | None = None) -> Batch:
        """Read the sequences of data-parallel rank ``dp_rank`` of ``dp``, as even a share as there is.

        Where shares differ by one, later ranks have the larger ones. A rank can then tell that its sequences come
        after those of the ranks before it from the size of its own share alone: ``dp_rank`` times that is past theirs.

        Args:
            shard: cuts each tensor along the sequence for this context-parallel rank; None: whole sequences.

        Raises:
            ConfigError: a rank would get no sequence.
            CorruptFile: tokens do not match their checksum.
        """
        if self.rows < dp:
            raise ConfigError(
                f"a micro-batch has {self.rows} sequences for {dp} data-parallel ranks; each needs at least one: "
                "raise data.batch or lower data.micro_batches"
            )
        share, left = divmod(self.rows, dp)
        larger = dp_rank - (dp - left)  # of the ranks before this one, if any
        begin = dp_rank * share + max(larger, 0)
        mine = slice(begin, begin + share + (larger >= 0))
        rows = [
            read_row(self.packings[source], index)
            for source, index in zip(
                self.places.source_B[mine].tolist(), self.places.index_B[mine].tolist(), strict=True
            )
        ]
        documents = None
        if self.packings[0].separate:
            documents = torch.from_numpy(np.stack([row.documents_S for row in rows]))
        batch = Batch(
            torch.from_numpy(np.stack([row.ids_S for row in rows])),
            torch.from_numpy(np.stack([row.targets_S for row in rows])),
            torch.from_numpy(np.stack([row.positions_S for row in rows])),
            documents,
            self.num_targets,
        )
        return batch if shard is None else batch.shard(shard)

    def _part(self, rows: slice) -> GlobalBatch:
        return GlobalBatch(
            self.packings, Places(self.places.source_B[rows], self.places.index_B[rows]), self.num_targets
        )


@dataclass(frozen=True)
class Statistics:
    """Of a corpus; with several sources, in the proportions of training.

    unigram_entropy: nats per token, the loss of the best model that ignores the context. bytes_per_token: of text; a
    loss per token divided by it is a loss per byte. The counts are tokens and documents of the files, and tokens of
    the two splits, over all sources.
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
        files: one a source of ``settings``, in order.

    Raises:
        ConfigError: sources disagree on the tokenizer, or one is too short for a sequence of each split.
    """

    def __init__(self, files: Sequence[TokenFile], settings: CorpusSettings) -> None:
        self.settings = settings
        self.files = list(files)
        first = self.files[0]
        for spec, file in zip(settings.sources, self.files, strict=True):
            if (file.meta["tokenizer"], file.vocab_size) != (first.meta["tokenizer"], first.vocab_size):
                raise ConfigError(
                    f"data sources {settings.sources[0].name!r} and {spec.name!r} were prepared with different "
                    "tokenizers; prepare them together"
                )
        self.vocab_size = first.vocab_size
        self.end_of_text = first.end_of_text
        views = [_split(file, spec.name, settings) for spec, file in zip(settings.sources, self.files, strict=True)]
        self.train, self.validation = [view[0] for view in views], [view[1] for view in views]
        self._packings = [
            make_packing(settings.packing, view, settings.seq_len, settings.documents, (settings.seed, number))
            for number, view in enumerate(self.train)
        ]
        self._held_out: list[Packing] = [
            Contiguous(view, settings.seq_len, settings.documents == "separate") for view in self.validation
        ]
        supplies = [
            Supply(spec.name, file.digest, packing.sequences, spec.weight, packing.endless)
            for spec, file, packing in zip(settings.sources, self.files, self._packings, strict=True)
        ]
        kept = {key: getattr(settings, key) for key in ("seq_len", "packing", "documents", "validation")}
        self.sampler = Sampler(supplies, settings.batch, settings.seed, settings.shuffle, kept)

    @classmethod
    def open(cls, paths: Sequence[str | Path], settings: CorpusSettings) -> Corpus:
        """Open the folders that ``prepare_all`` returned for ``settings``. Every rank calls it.

        Raises:
            ConfigError: see the class; also a folder that is not a prepared one.
            CorruptFile: a file is truncated or altered.
        """
        if len(paths) != len(settings.sources):
            raise ConfigError(f"{len(settings.sources)} data sources need as many prepared folders; got {len(paths)}")
        return cls([open_tokens(path, settings.verify) for path in paths], settings)

    def batch_of(self, step: int) -> GlobalBatch:
        """The global batch of ``step`` (from 0): a function of the data, the settings and the step."""
        places = self.sampler.places(step)
        return GlobalBatch(self._packings, places, _targets(self._packings, places))

    def validation_batches(self, count: int | None = None, batch: int | None = None) -> list[GlobalBatch]:
        """Held-out sequences, each at most once, evenly spread over the held-out text of every source.

        Args:
            count: batches at most, their sequences from the sources in the proportions of training; None: all
                held-out text. What is missing to full batches is padding, which has no targets.
            batch: sequences of one; None: ``settings.batch``.

        Raises:
            ConfigError: nothing is held out.
        """
        batch = batch or self.settings.batch
        available = [packing.sequences for packing in self._held_out]
        if not all(available):
            raise ConfigError("data.validation is 0: no text is held out to evaluate on")
        wanted = available
        if count is not None:
            rows = np.array(count * batch)
            mixture = self.sampler.mixture
            wanted = [min(int(mixture.count(s, rows)), have) for s, have in enumerate(available)]
        sources = np.repeat(np.arange(len(wanted)), wanted)
        spread = [_spread(have, want) for have, want in zip(available, wanted, strict=True)]
        missing = -sum(wanted) % batch
        source_N = np.concatenate([sources, np.zeros(missing, np.int64)])
        index_N = np.concatenate([*spread, np.full(missing, -1)])
        parts = [Places(source_N[at : at + batch], index_N[at : at + batch]) for at in range(0, len(index_N), batch)]
        return [GlobalBatch(self._held_out, places, _targets(self._held_out, places)) for places in parts]

    def state(self, step: int) -> dict[str, Any]:
        """The sampler's state before ``step``, for the checkpoint; plain JSON."""
        return self.sampler.state(step)

    def resume(self, state: dict[str, Any]) -> int:
        """The step to go on with, where the data is what the checkpoint was trained on.

        Raises:
            ConfigError: it is not; the message names each difference.
        """
        return self.sampler.resume(state)

    @property
    def epochs(self) -> list[float]:
        """Epochs of each source that one step takes: shares of its sequences."""
        turns = self.sampler.mixture
        share = [self.settings.batch * n / turns.period for n in turns.turns]
        return [rows / packing.sequences for rows, packing in zip(share, self._packings, strict=True)]

    def statistics(self) -> Statistics:
        """See ``Statistics``."""
        mixture = self.sampler.mixture
        shares = [turns / mixture.period for turns in mixture.turns]
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
        """What made the tokens.

        Raises:
            ConfigError, MissingDependency: its file cannot be loaded.
        """
        if self.files[0].meta["tokenizer"] == ByteTokenizer.digest:
            return ByteTokenizer()
        return load_tokenizer(self.files[0].tokenizer, self.files[0].meta["end_name"])

    def save_tokenizer(self, folder: str | Path) -> None:
        """Copy the tokenizer into ``folder``, where AutoTokenizer finds it."""
        copy_tokenizer(self.files[0].tokenizer, Path(folder))

    def prompt(self, length: int) -> list[int]:
        """The first ``length`` tokens of the held-out text (training text where none is held out)."""
        view = self.validation[0] if len(self.validation[0]) else self.train[0]
        ids: list[int] = view.file.read(view.start, min(view.start + length, view.stop)).tolist()
        return ids


def entropy(probability_V: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """In nats, of probabilities that add up to one."""
    p = probability_V[probability_V > 0]
    return float(-(p * np.log(p)).sum())


def _targets(packings: Sequence[Packing], places: Places) -> int:
    total = 0
    for s in np.unique(places.source_B):
        index_N = places.index_B[(places.source_B == s) & (places.index_B >= 0)]
        total += int(packings[s].valid_targets(index_N).sum())
    return total


def _spread(have: int, want: int) -> Ints:
    """``want`` different numbers below ``have``, evenly spread, the first and the last among them."""
    if want <= 1:
        return np.zeros(want, np.int64)
    return np.arange(want) * (have - 1) // (want - 1)


def _split(file: TokenFile, name: str, settings: CorpusSettings) -> tuple[View, View]:
    """The part for training and the part held out, at the end of the file.

    The cut falls between two documents where one ends near enough that half to twice the wanted amount is held out;
    elsewhere, as with a single document, inside one.
    """
    total, window = len(file), settings.seq_len + 1
    held = max(math.ceil(total * settings.validation), window) if settings.validation else 0
    if total - held < window:
        needed = "training and validation need" if held else "training needs"
        raise ConfigError(
            f"data source {name!r} has {total} tokens; {needed} {window} each at data.seq_len {settings.seq_len}"
        )
    cut = total - held
    if held:
        behind = int(np.searchsorted(file.offsets, cut))
        near = [int(file.offsets[d]) for d in (behind - 1, behind) if 0 <= d < len(file.offsets)]
        fitting = [at for at in near if at >= window and max(window, held / 2) <= total - at <= 2 * held]
        cut = min(fitting, key=lambda at: abs(at - cut), default=cut)
    return View(file, 0, cut), View(file, cut, total)


__all__ = ["Batch", "Corpus", "GlobalBatch", "Mixture", "Statistics", "entropy"]
