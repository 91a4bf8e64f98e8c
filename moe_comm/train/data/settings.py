"""What a corpus is made of and how it becomes batches: plain settings, checked where they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from moe_comm.errors import ConfigError

Format = Literal["auto", "text", "jsonl", "parquet"]
Packing = Literal["contiguous", "best_fit", "random"]
DocumentMode = Literal["joined", "separate"]
Verify = Literal["all", "touched"]


def _one_of(what: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise ConfigError(f"{what} must be one of {', '.join(known)}; got {given!r}")


@dataclass(frozen=True)
class SourceSpec:
    """One source of documents.

    path: "pydoc" (the language reference inside every Python, a document per topic), "stdlib" (the source text of
        this Python's standard library, a document per file), a file, a folder, or a glob pattern ("**" recurses).
        Of a folder or pattern, files that are not UTF-8 are left out, and counted.
    name: in messages and in the sampler's state; empty: the path.
    weight: this source's share of the sequences of training, relative to the other sources.
    format: "auto" goes by each file's suffix: .jsonl and .ndjson, .parquet, and anything else is one text document.
    field: JSONL key or Parquet column that holds the text.

    Raises:
        ConfigError: an empty path or field, an unknown format, or a weight that is not a positive number.
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
            raise ConfigError(f"data source {self.name!r}: field names the text in JSONL and Parquet; got an empty one")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(f"data source {self.name!r}: weight must be positive and finite; got {self.weight}")


@dataclass(frozen=True)
class CorpusSettings:
    """Everything that decides which tokens a step sees, and where the prepared files are.

    sources: at least one; their names differ.
    tokenizer: "bytes" (256 bytes and an end of text), "bpe" (trained from the sources, ``vocab_size`` entries), or the
        path of a Hugging Face ``tokenizer.json`` or of the folder that holds it.
    vocab_size: of a trained BPE; less where the text is too small for so many merges.
    end_of_text: name of the token that ends a document in a tokenizer file; None: what the folder's
        ``tokenizer_config.json`` calls ``eos_token``, else the first well-known name in the vocabulary.
    cache: folder of prepared token files, shared by all ranks of a host.
    workers: processes that tokenise; 0: by the amount of text and the cores of this machine.
    seq_len: tokens of one sequence. batch: sequences of one step, over all ranks.
    validation: fraction of each source's tokens, at its end, that training never sees; 0 for none.
    packing: "contiguous" cuts the stream of documents every ``seq_len`` tokens; "best_fit" fills each sequence with
        whole documents and cuts only those longer than it (Ding et al., arXiv 2404.10830), the rest is padding;
        "random" takes windows at random places.
    documents: "joined" lets a token see the earlier documents of its sequence; "separate" gives each token its
        document's number, restarts positions and leaves out targets that belong to the next document.
    shuffle: another order of the sequences in each epoch; False: the order of the files.
    verify: "all" checks every byte when a token file is opened; "touched" each block when it is first read, for files
        too large to read at every start.
    seed: of the shuffling.

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
            raise ConfigError("data.tokenizer must be bytes, bpe or a path; got an empty one")
        if self.tokenizer == "bpe" and self.vocab_size < 257:
            raise ConfigError(f"data.vocab_size must be at least 257 (256 bytes, end of text); got {self.vocab_size}")
        for key, least in (("workers", 0), ("seq_len", 1), ("batch", 1), ("seed", 0)):
            if getattr(self, key) < least:
                raise ConfigError(f"data.{key} must be at least {least}; got {getattr(self, key)}")
        if not 0 <= self.validation < 1:
            raise ConfigError(f"data.validation must lie in [0, 1); got {self.validation}")
        _one_of("data.packing", self.packing, get_args(Packing))
        _one_of("data.documents", self.documents, get_args(DocumentMode))
        _one_of("data.verify", self.verify, get_args(Verify))
