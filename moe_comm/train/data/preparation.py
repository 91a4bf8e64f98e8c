"""From documents to token files: in parallel, once, into a cache that all ranks share.

                       1 MiB of text a chunk
    documents ──▶ chunks ──▶ workers (tokenise) ──▶ in order of the chunks ──▶ tokens.bin, offsets.bin ──▶ rename

One process of those that share a cache prepares; the others wait for it and open what it made. The result is the same
for any number of workers, and its name comes from the content of the files and the tokenizer, so that the next run
finds it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.train.data.settings import CorpusSettings, SourceSpec
from moe_comm.train.data.sources import PIECE, Piece, Source, scan
from moe_comm.train.data.tokenfile import META, VERSION, TokenWriter, fresh_folder
from moe_comm.train.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    encode_arrays,
    load_tokenizer,
    train_bpe,
)

WORKER_BYTES = 16 << 20
"""Text for which one more process pays for its start."""
BPE_BYTES = 64 << 20
"""Text that a BPE is trained from, in equal shares from the start of each source."""

Progress = Callable[[str, int, int], None]
"""Called with the source's name, bytes of text done, and bytes of its files (compressed ones hold more text)."""


@dataclass(frozen=True)
class _Chunk:
    """What a worker sends back: tokens, the places behind each document's end, bytes of text."""

    tokens_T: npt.NDArray[np.uint32]
    ends: npt.NDArray[np.int64]
    text_bytes: int


def prepare_all(
    settings: CorpusSettings, progress: Progress | None = None, scanned: Callable[[Source], None] | None = None
) -> list[Path]:
    """Prepare every source of ``settings``; the folders in their order. One process of a host calls it.

    Args:
        scanned: takes each source when its files have been found.

    Raises:
        ConfigError: a source or the tokenizer cannot be used, or the cache not be written.
        MissingDependency: a package for this kind of file or tokenizer is not installed.
    """
    cache = Path(settings.cache).expanduser()
    sources = []
    for spec in settings.sources:
        sources.append(scan(spec))
        if scanned is not None:
            scanned(sources[-1])
    tokenizer = make_tokenizer(settings, sources)
    return [prepare_source(source, tokenizer, cache, settings.workers, progress) for source in sources]


def prepare(
    spec: SourceSpec, tokenizer: Tokenizer, cache: str | Path, workers: int = 0, progress: Progress | None = None
) -> Path:
    """Tokenise one source into ``cache``, or find it there; the folder for ``open_tokens``.

    Args:
        workers: processes; 0: by the amount of text and the cores of this machine. The result does not depend on it.

    Raises:
        ConfigError: the source cannot be read or has no text, or the cache cannot be written.
        MissingDependency: a package for this kind of file is not installed.
    """
    return prepare_source(scan(spec), tokenizer, Path(cache).expanduser(), workers, progress)


def make_tokenizer(settings: CorpusSettings, sources: Sequence[Source]) -> Tokenizer:
    """The tokenizer that ``settings`` names; a trained one comes from the cache where the text is the same.

    Raises:
        ConfigError: its file cannot be used.
        MissingDependency: the tokenizers library is not installed.
    """
    if settings.tokenizer == "bytes":
        return ByteTokenizer()
    if settings.tokenizer != "bpe":
        return load_tokenizer(settings.tokenizer, settings.end_of_text)
    key = _key(["bpe", VERSION, settings.vocab_size, BPE_BYTES, [source.digest for source in sources]])
    folder = Path(settings.cache).expanduser() / f"bpe{settings.vocab_size}-{key}"
    if not (folder / "tokenizer.json").is_file():
        share = BPE_BYTES // len(sources)
        texts = itertools.chain.from_iterable(_opening(source, share) for source in sources)
        with fresh_folder(folder) as fresh:
            train_bpe(texts, settings.vocab_size).save(fresh)
    return load_tokenizer(folder)


def prepare_source(source: Source, tokenizer: Tokenizer, cache: Path, workers: int, progress: Progress | None) -> Path:
    """``prepare`` for a source that was scanned."""
    name = source.spec.name
    key = _key(["tokens", VERSION, PIECE, tokenizer.digest, source.digest])
    folder = cache / f"{_slug(name)}-{key}"
    if (folder / META).is_file():
        return folder
    with fresh_folder(folder) as fresh:
        writer = TokenWriter(fresh, tokenizer.vocab_size)
        text_bytes = 0
        try:
            for chunk in _tokenised(source, tokenizer, _workers(workers, source, tokenizer)):
                writer.append(chunk.tokens_T, chunk.ends)
                text_bytes += chunk.text_bytes
                if progress is not None:
                    progress(name, text_bytes, source.size)
            if not text_bytes:
                raise ConfigError(f"data source {name!r}: {source.spec.path!r} holds no text")
            tokenizer.save(fresh / "tokenizer")
            writer.finish(
                {
                    "end_of_text": tokenizer.end_of_text,
                    "end_name": tokenizer.end_name,
                    "tokenizer": tokenizer.digest,
                    "source": source.digest,
                    "text_bytes": text_bytes,
                }
            )
        finally:
            writer.close()
    return folder


def _opening(source: Source, limit: int) -> Iterator[str]:
    """The texts of ``source`` from its start, about ``limit`` bytes of them."""
    done = 0
    for piece in source.pieces():
        if done >= limit:
            return
        done += len(piece.text.encode())
        yield piece.text


def _chunks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Neighbouring pieces, together at least ``PIECE`` characters."""
    chunk: list[Piece] = []
    size = 0
    for piece in pieces:
        chunk.append(piece)
        size += len(piece.text)
        if size >= PIECE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _tokenised(source: Source, tokenizer: Tokenizer, workers: int) -> Iterator[_Chunk]:
    chunks = _chunks(source.pieces())
    if workers == 1:
        for chunk in chunks:
            yield _tokenise(tokenizer, chunk)
        return
    # Not fork: the caller may be a rank with communication threads. The feed is bounded, so memory stays so too.
    context = multiprocessing.get_context("spawn")
    waiting: deque[Future[_Chunk]] = deque()
    pool = ProcessPoolExecutor(workers, context, _start_worker, (tokenizer,))
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_work, chunk))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise MoeCommError(
            f"a process that tokenised {source.spec.name!r} died; see above for why (out of memory, or a script "
            "without \"if __name__ == '__main__'\"), or set data.workers to 1"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker_tokenizer: Tokenizer


def _start_worker(tokenizer: Tokenizer) -> None:
    global _worker_tokenizer
    # The library's own threads would compete with the other workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = tokenizer


def _work(chunk: list[Piece]) -> _Chunk:
    return _tokenise(_worker_tokenizer, chunk)


def _tokenise(tokenizer: Tokenizer, chunk: list[Piece]) -> _Chunk:
    end = np.array([tokenizer.end_of_text], np.uint32)
    parts: list[npt.NDArray[np.uint32]] = []
    ends: list[int] = []
    length = 0
    for piece, ids in zip(chunk, encode_arrays(tokenizer, [piece.text for piece in chunk]), strict=True):
        parts.append(ids)
        length += len(ids)
        if piece.ends:
            parts.append(end)
            length += 1
            ends.append(length)
    text_bytes = sum(len(piece.text.encode()) for piece in chunk)
    return _Chunk(np.concatenate(parts), np.array(ends, np.int64), text_bytes)


def _workers(wanted: int, source: Source, tokenizer: Tokenizer) -> int:
    if multiprocessing.current_process().daemon:
        return 1  # Python lets such a process have no children
    if wanted:
        return wanted
    if isinstance(tokenizer, ByteTokenizer):
        return 1  # sending the text to another process costs more than the work
    return max(1, min(len(os.sched_getaffinity(0)), source.size // WORKER_BYTES))


def _key(content: object) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


def _slug(name: str) -> str:
    """The last part of ``name``, in characters that any file system takes."""
    stem = Path(name).name if not re.search(r"[*?\[]", name) else name
    return re.sub(r"[^\w.-]+", "_", stem).strip("._")[:40] or "data"
