"""The data of training: files to tokens, tokens to batches.

    settings = CorpusSettings(sources=(SourceSpec("stdlib"),), tokenizer="bpe", seq_len=512, batch=32)
    paths = prepare_all(settings)                       # one process of a host
    corpus = Corpus.open(paths, settings)               # every rank
    batch = corpus.batch_of(step).micro(i, n).local(dp_rank, dp)

The names below load their modules on first use: the processes that tokenise need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_comm.lazy import loads_on_use

if TYPE_CHECKING:
    from moe_comm.train.data.batches import Batch, Corpus, GlobalBatch, Statistics
    from moe_comm.train.data.packing import IGNORE
    from moe_comm.train.data.prefetch import Prefetch
    from moe_comm.train.data.preparation import prepare, prepare_all
    from moe_comm.train.data.report import Description, describe
    from moe_comm.train.data.settings import CorpusSettings, SourceSpec
    from moe_comm.train.data.tokenfile import TokenFile, open_tokens
    from moe_comm.train.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer, train_bpe

_HOME = {
    "Batch": "batches",
    "ByteTokenizer": "tokenizer",
    "Corpus": "batches",
    "CorpusSettings": "settings",
    "Description": "report",
    "FileTokenizer": "tokenizer",
    "GlobalBatch": "batches",
    "IGNORE": "packing",
    "Prefetch": "prefetch",
    "SourceSpec": "settings",
    "Statistics": "batches",
    "TokenFile": "tokenfile",
    "Tokenizer": "tokenizer",
    "describe": "report",
    "load_tokenizer": "tokenizer",
    "open_tokens": "tokenfile",
    "prepare": "preparation",
    "prepare_all": "preparation",
    "train_bpe": "tokenizer",
}

__all__ = [
    "IGNORE",
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "CorpusSettings",
    "Description",
    "FileTokenizer",
    "GlobalBatch",
    "Prefetch",
    "SourceSpec",
    "Statistics",
    "TokenFile",
    "Tokenizer",
    "describe",
    "load_tokenizer",
    "open_tokens",
    "prepare",
    "prepare_all",
    "train_bpe",
]

__getattr__ = loads_on_use(__name__, {name: f"{__name__}.{module}" for name, module in _HOME.items()})
