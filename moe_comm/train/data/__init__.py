"""Training data: from files to tokens to batches.

    settings = CorpusSettings(source="stdlib", tokenizer="bpe", seq_len=512, batch=32)
    paths = prepare_all(settings)                       # one process of a host
    corpus = Corpus.open(paths, settings)               # every rank
    batch = corpus.batch_of(step).micro(i, n).local(dp_rank, dp)

Modules are loaded on first use: the processes that tokenise do not need torch.
"""

from __future__ import annotations

from moe_comm.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
