"""Settings of a corpus: its sources, and how they become batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from moe_comm.errors import ConfigError

Format = Literal["auto", "text", "jsonl", "parquet"]
Packing = Literal["contiguous", "best_fit", "random"]
DocumentMode = Literal["joined", "separate"]
Verify = Literal["all", "touched"]


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


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
        _one_of(f"format of data source {self.name!r}", self.format, get_args(Format))
        if not self.field:
            raise ConfigError(f"data source {self.name!r}: field must name the text in JSONL and Parquet; got ''")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(f"data source {self.name!r}: weight must be positive and finite; got {self.weight}")


@dataclass(frozen=True)
class CorpusSettings:
    """All settings that decide which tokens a step uses, and the location of the prepared files.

    Args:
        sources: at least one, with different names.
        tokenizer: "bytes" (256 bytes and an end of text), "bpe" (trained from the sources), or the path of a Hugging
            Face ``tokenizer.json`` or of its folder.
        vocab_size: entries of a trained BPE. It can be smaller if the text is too short.
        end_of_text: name of the token that ends a document; None: ``eos_token`` in the folder's
            ``tokenizer_config.json``, else the first known name in the vocabulary.
        cache: folder of prepared token files, shared by the ranks of a host.
        workers: processes that tokenise; 0: depends on the amount of text and the cores of this machine.
        seq_len: tokens per sequence.
        batch: sequences per step, over all ranks.
        validation: fraction of each source's tokens, at its end, that is held out from training.
        packing: "contiguous" cuts the stream of documents every ``seq_len`` tokens. "best_fit" fills each sequence with
            whole documents and padding, and only cuts documents longer than it (Ding et al., arXiv 2404.10830).
            "random" takes windows at random positions.
        documents: "joined": tokens attend to earlier documents of their sequence. "separate": each token gets its
            document's number, positions restart, and targets in the next document are ignored.
        shuffle: order the sequences randomly in each epoch; False: in the order of the files.
        verify: "all" verifies every byte when a token file is opened. "touched" verifies each block at its first use,
            for files that are too large to read at every start.
        seed: seed of the random order.

    Raises:
        ConfigError: a setting is out of range or unknown.
    """

    sources: tuple[SourceSpec, ...] = (SourceSpec("pydoc"),)
    tokenizer: str = "bytes"
    vocab_size: int = 4096
    end_of_text: str | None = None
    cache: str = "runs/data"
    workers: int = 0
    seq_len: int = 256
    batch: int = 16
    validation: float = 0.1
    packing: Packing = "contiguous"
    documents: DocumentMode = "joined"
    shuffle: bool = True
    verify: Verify = "all"
    seed: int = 0

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        if not names:
            raise ConfigError("data needs at least one source")
        if len(set(names)) != len(names):
            raise ConfigError(f"data sources need different names; got {', '.join(names)}")
        if not self.tokenizer:
            raise ConfigError("data.tokenizer must be bytes, bpe or a path; got ''")
        if self.tokenizer == "bpe" and self.vocab_size < 257:
            raise ConfigError(f"data.vocab_size must be at least 257 (256 bytes, end of text); got {self.vocab_size}")
        for key, least in (("workers", 0), ("seq_len", 1), ("batch", 1), ("seed", 0)):
            if getattr(self, key) < least:
                raise ConfigError(f"data.{key} must be at least {least}; got {getattr(self, key)}")
        if not 0 <= self.validation < 1:
            raise ConfigError(f"data.validation must be in [0, 1); got {self.validation}")
        _one_of("data.packing", self.packing, get_args(Packing))
        _one_of("data.documents", self.documents, get_args(DocumentMode))
        _one_of("data.verify", self.verify, get_args(Verify))
