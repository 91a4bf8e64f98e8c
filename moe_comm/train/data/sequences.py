"""Sequences of a run from prepared token files: their order, and the documents in each. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_comm.errors import ConfigError
from moe_comm.train.data.packing import Packing, TokenRange, document_runs, make_packing
from moe_comm.train.data.sampler import SampledSource, Sampler, SequenceIndices
from moe_comm.train.data.settings import CorpusSettings
from moe_comm.train.data.tokenfile import TokenFile, open_tokens


def open_files(paths: Sequence[str | Path], settings: CorpusSettings) -> list[TokenFile]:
    """Open the folders that ``prepare_all`` returned for ``settings``.

    Raises:
        ConfigError: their number is not that of the sources, or a folder is not a prepared one.
        CorruptFile: a file is truncated or altered.
    """
    if len(paths) != len(settings.paths):
        raise ConfigError(f"data has {len(settings.paths)} sources but {len(paths)} prepared folders")
    return [open_tokens(path, settings.verify) for path in paths]


class TrainingSequences:
    """The training sequences of one or more prepared sources, in the order of a run.

    Args:
        files: one per source of ``settings``, in the same order.
        seed: seed of the random order.

    Attributes:
        train, validation: the two splits of each source.
        packings: training sequences of each source.
        sampler: source and sequence of each row of a batch.

    Raises:
        ConfigError: sources have different tokenizers, or one is too short for a sequence of each split.
    """

    def __init__(self, files: Sequence[TokenFile], settings: CorpusSettings, seed: int = 0) -> None:
        self.files = list(files)
        first, specs = self.files[0], settings.sources
        for spec, file in zip(specs, self.files, strict=True):
            if (file.meta["tokenizer"], file.vocab_size) != (first.meta["tokenizer"], first.vocab_size):
                raise ConfigError(
                    f"data sources {specs[0].name!r} and {spec.name!r} were prepared with different "
                    "tokenizers; prepare them together"
                )
        splits = [_split(file, spec.name, settings) for spec, file in zip(specs, self.files, strict=True)]
        self.train = [training for training, _ in splits]
        self.validation = [held_out for _, held_out in splits]
        self.packings = [
            make_packing(settings.packing, tokens, settings.seq_len, settings.documents, (seed, number))
            for number, tokens in enumerate(self.train)
        ]
        sources = [
            SampledSource(spec.name, file.digest, packing.sequences, spec.weight, packing.endless)
            for spec, file, packing in zip(specs, self.files, self.packings, strict=True)
        ]
        other_settings = {key: getattr(settings, key) for key in ("seq_len", "packing", "documents", "validation")}
        self.sampler = Sampler(sources, settings.batch, seed, settings.shuffle, other_settings)

    def first_lengths(self, count: int) -> list[tuple[int, ...]]:
        """Return the tokens of each document of the first ``count`` sequences of a run."""
        result: list[tuple[int, ...]] = []
        for step in range(-(-count // self.sampler.batch)):
            result += document_lengths(self.packings, self.sampler.indices(step))
        return result[:count]


def document_lengths(packings: Sequence[Packing], indices: SequenceIndices) -> list[tuple[int, ...]]:
    """Return the tokens of each document of each sequence, without reading tokens. Padding is left out."""
    pairs = zip(indices.source_B.tolist(), indices.index_B.tolist(), strict=True)
    return [tuple(run.length for run in document_runs(packings[source], index)) for source, index in pairs]


def _split(file: TokenFile, name: str, settings: CorpusSettings) -> tuple[TokenRange, TokenRange]:
    """Return the training split and the held-out split, which is at the end of the file.

    The cut is between two documents if that holds out between half and twice the configured amount. Otherwise, as in a
    single document, it is inside one.
    """
    total, window = len(file), settings.seq_len + 1
    held_out = max(math.ceil(total * settings.validation), window) if settings.validation else 0
    if total - held_out < window:
        needed = "training and validation need" if held_out else "training needs"
        raise ConfigError(
            f"data source {name!r} has {total} tokens; {needed} {window} each at data.seq_len {settings.seq_len}"
        )
    cut = total - held_out
    if held_out:
        document = int(np.searchsorted(file.offsets, cut))
        nearest = [int(file.offsets[d]) for d in (document - 1, document) if 0 <= d < len(file.offsets)]
        fitting = [at for at in nearest if at >= window and max(window, held_out / 2) <= total - at <= 2 * held_out]
        cut = min(fitting, key=lambda at: abs(at - cut), default=cut)
    return TokenRange(file, 0, cut), TokenRange(file, cut, total)
