"""Settings of a corpus: its sources, and how they become batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from moe_comm.errors import ConfigError
from moe_comm.train.section_base import MOST, Section

MOST_MICRO_BATCHES, MOST_WORKERS, MOST_VOCAB = 1 << 16, 1 << 10, 1 << 24
"""Largest accepted number of micro-batches, of processes that tokenize, and of trained tokens."""
Format = Literal["auto", "text", "jsonl", "parquet"]
PackingName = Literal["contiguous", "best_fit", "random"]
DocumentMode = Literal["joined", "separate"]
Verify = Literal["all", "touched"]


@dataclass(frozen=True)
class SourceSpec:
    """One source of documents.

    Args:
        path: "pydoc" (the language reference of Python, one document per topic), "stdlib" (the source of this Python's
            standard library, one document per file), a file, a folder, or a glob pattern ("**" recurses). In folders
            and patterns, files that are not UTF-8 are skipped and counted.
        name: name in messages and in the sampler's state; default: the path.
        weight: share of this source in the training sequences, relative to the other sources.
        format: "auto" uses the suffix of each file: .jsonl and .ndjson, .parquet; other files are text documents.
        field: JSONL key or Parquet column of the text.

    Raises:
        ConfigError: the path or field is empty, the format is unknown, or the weight is not a positive number.
    """

    path: str
    name: str = ""
    weight: float = 1.0
    format: Format = "auto"
    field: str = "text"

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("a data source needs a path: pydoc, stdlib, a file, a folder or a glob pattern")
        if not self.name:
            object.__setattr__(self, "name", self.path)
        if self.format not in get_args(Format):
            raise ConfigError(
                f"format of data source {self.name!r} must be one of {', '.join(get_args(Format))}; got {self.format!r}"
            )
        if not self.field:
            raise ConfigError(f"data source {self.name!r}: field must name the text in JSONL and Parquet; got ''")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(f"data source {self.name!r}: weight must be positive and finite; got {self.weight}")


class CorpusSettings(Section):
    """Training text, tokenizer and batches: the section ``[data]``.

    Attributes:
        source: "pydoc" (the language reference shipped with Python), "stdlib" (source code of the standard library),
            a file, a folder, a glob pattern, or a list of these, all different.
        weights: sampling weight of each source. None: equal weights.
        format: file format; "auto" chooses by file suffix.
        field: key or column that contains the text in JSONL and Parquet files.
        vocab: entries of a trained "bpe" tokenizer. It can be smaller if the text is too short.
        seq_len: tokens of a sequence.
        tokenizer: "bytes" (256 bytes and an end of text), "bpe" (trained on the text, with ``vocab`` entries), or the
            path of a Hugging Face ``tokenizer.json`` or of its folder.
        end_of_text: name of the end-of-document token in a tokenizer file. None: ``eos_token`` in the folder's
            ``tokenizer_config.json``, else the first well-known name in the vocabulary.
        cache: folder of prepared token files, shared by the ranks of a host.
        workers: tokenizer processes. 0: choose by the amount of text and the cores.
        batch: sequences of ``seq_len`` tokens per step, over all ranks.
        micro_batches: micro-batches per step; each is sharded over the data-parallel ranks.
        validation: fraction at the end of each source that is held out for validation. A training run needs some.
        shuffle: reorder the sequences in each epoch.
        packing: "contiguous" cuts the stream of documents every ``seq_len`` tokens. "best_fit" fills each sequence with
            whole documents and padding, and only cuts documents longer than it (Ding et al., arXiv 2404.10830).
            "random" takes windows at random positions.
        documents: "joined": a token attends to earlier documents of its sequence. "separate": it does not; positions
            restart, and targets in the next document are ignored.
        verify: "all": verify the token files at the start. "touched": verify each block when it is read.
    """

    source: str | list[str] = "pydoc"
    weights: list[float] | None = None
    format: Format = "auto"
    field: str = Field(default="text", min_length=1)
    tokenizer: str = Field(default="bytes", min_length=1)
    vocab: int = Field(default=4096, ge=257, le=MOST_VOCAB)
    end_of_text: str | None = None
    cache: str = Field(default="runs/data", min_length=1)
    workers: int = Field(default=0, ge=0, le=MOST_WORKERS)
    seq_len: int = Field(default=256, ge=2, le=MOST)
    batch: int = Field(default=16, ge=1, le=MOST)
    micro_batches: int = Field(default=1, ge=1, le=MOST_MICRO_BATCHES)
    validation: float = Field(default=0.1, ge=0, lt=1)
    packing: PackingName = "contiguous"
    documents: DocumentMode = "joined"
    shuffle: bool = True
    verify: Verify = "all"

    @model_validator(mode="after")
    def _check(self) -> Self:
        paths = self.paths
        if self.batch % self.micro_batches:
            raise ValueError(f"batch ({self.batch}) must be a multiple of micro_batches ({self.micro_batches})")
        if not paths:
            raise ValueError("data needs at least one source")
        if len(set(paths)) != len(paths):
            raise ValueError(f"data sources must be different; got {', '.join(paths)}")
        if self.weights is not None and len(self.weights) != len(paths):
            raise ValueError(f"weights must have one number for each of {len(paths)} sources; got {self.weights}")
        self.sources  # noqa: B018  raises ConfigError
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """The sources as they are named in the configuration."""
        return (self.source,) if isinstance(self.source, str) else tuple(self.source)

    @property
    def sources(self) -> tuple[SourceSpec, ...]:
        """The sources with their weights."""
        weights = self.weights or (1.0,) * len(self.paths)
        return tuple(
            SourceSpec(path, weight=weight, format=self.format, field=self.field)
            for path, weight in zip(self.paths, weights, strict=True)
        )
