"""Small corpora for the tests of data loading."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from moe_comm.train.data import Corpus, CorpusSettings, TokenFile, open_tokens, prepare_all
from moe_comm.train.data.tokenfile import TokenWriter, fresh_folder

WORDS = ["sun", "wind", "h\u00e9", "\u2192", "\u6f22\u5b57", "\U0001f40d", "line\n", "  ", "x", "\u00df\u0301"]


def texts(count: int, seed: int, longest: int = 40) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(WORDS, k=rng.randint(1, longest))) for _ in range(count)]


def write_jsonl(path: Path, documents: Sequence[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in documents), encoding="utf-8")
    return path


def token_file(folder: Path, lengths: Sequence[int], vocab: int = 1 << 17) -> TokenFile:
    """Return a token file with documents of these lengths. Its tokens are 1, 2, 3, ...: position plus one."""
    final = folder / f"made-{len(list(folder.iterdir()))}"
    with fresh_folder(final) as fresh:
        writer = TokenWriter(fresh, vocab)
        ends = np.cumsum(lengths)
        writer.append(np.arange(1, ends[-1] + 1, dtype=np.uint32), ends)
        (fresh / "tokenizer").mkdir()
        writer.finish({"end_of_text": 0, "end_name": "e", "tokenizer": "made", "text_bytes": int(ends[-1])})
    return open_tokens(final)


def corpus_of(lengths: Sequence[Sequence[int]], folder: Path, weights: Sequence[float] = (), **settings: Any) -> Corpus:
    """Return a corpus of synthetic files, one per source."""
    files = [token_file(folder, documents) for documents in lengths]
    names = [f"made{number}" for number in range(len(files))]
    seed = settings.pop("seed", 0)
    return Corpus(files, CorpusSettings(source=names, weights=list(weights) or None, **settings), seed)


def prepared(documents: Sequence[str], folder: Path, **settings: Any) -> tuple[Corpus, CorpusSettings]:
    """Return a corpus of these texts, prepared from a JSONL file."""
    source = str(write_jsonl(folder / "documents.jsonl", documents))
    corpus_settings = CorpusSettings(source=source, cache=str(folder / "cache"), **settings)
    return Corpus.open(prepare_all(corpus_settings), corpus_settings), corpus_settings


def pairs(ids_BS: Tensor, targets_BS: Tensor) -> list[tuple[int, int]]:
    """Return (token, target) of all targets that are not ignored."""
    return [(i, t) for i, t in zip(ids_BS.flatten().tolist(), targets_BS.flatten().tolist(), strict=True) if t >= 0]
