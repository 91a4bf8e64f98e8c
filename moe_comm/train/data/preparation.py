"""Parallel preparation of token files, in a cache that all ranks share.

                       1 MiB of text a chunk
    documents ──▶ chunks ──▶ workers (tokenise) ──▶ in order of the chunks ──▶ tokens.bin, offsets.bin ──▶ rename

One process per cache prepares; the others wait for it and open the result. The result does not depend on the number of
workers. Its name depends on the content of the files and the tokenizer, so later runs find it.
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
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.train.data.settings import CorpusSettings, SourceSpec
from moe_comm.train.data.sources import PART_CHARS, ScannedSource, TextPart, scan
from moe_comm.train.data.tokenfile import META, VERSION, TokenWriter, fresh_folder
from moe_comm.train.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    encode_arrays,
    load_tokenizer,
    train_bpe,
)

WORKER_BYTES = 16 << 20
"""Bytes of text per worker process. For less, the start of a process does not pay off."""
BPE_BYTES = 64 << 20
"""Bytes of text for training a BPE, in equal shares from the start of each source."""


class _Chunk(NamedTuple):
    """The result of a worker: tokens, the position after the end of each document, bytes of text."""

    tokens_T: npt.NDArray[np.uint32]
    ends: npt.NDArray[np.int64]
    text_bytes: int


def prepare_all(settings: CorpusSettings, scanned: Callable[[ScannedSource], object] | None = None) -> list[Path]:
    """Prepare every source of ``settings``, and return their folders. One process per host calls it.

    Args:
        scanned: called with each source after its files were found.

    Raises:
        ConfigError: a source or the tokenizer cannot be used, or the cache cannot be written.
        MissingDependency: a package for this kind of file or tokenizer is not installed.
    """
    sources = []
    for spec in settings.sources:
        sources.append(scan(spec))
        if scanned is not None:
            scanned(sources[-1])
    tokenizer = make_tokenizer(settings, sources)
    return [prepare(source, tokenizer, settings.cache, settings.workers) for source in sources]


def prepared(settings: CorpusSettings) -> list[Path] | None:
    """Return the folders of ``prepare_all`` if an earlier run prepared all sources, else None. Writes nothing.

    Reads all text if there are folders of the names of the sources.
    """
    cache = Path(settings.cache).expanduser()
    if not all(any(cache.glob(f"{_folder_name(spec.name)}-*")) for spec in settings.sources):
        return None
    try:
        sources = [scan(spec) for spec in settings.sources]
        if settings.tokenizer == "bpe" and not (_bpe_folder(settings, sources) / "tokenizer.json").is_file():
            return None
        tokenizer = make_tokenizer(settings, sources)
    except MoeCommError:
        return None
    folders = [_token_folder(source, tokenizer, settings.cache) for source in sources]
    return folders if all((folder / META).is_file() for folder in folders) else None


def make_tokenizer(settings: CorpusSettings, sources: Sequence[ScannedSource]) -> Tokenizer:
    """Return the tokenizer of ``settings``. A trained one is cached."""
    if settings.tokenizer == "bytes":
        return ByteTokenizer()
    if settings.tokenizer != "bpe":
        return load_tokenizer(settings.tokenizer, settings.end_of_text)
    folder = _bpe_folder(settings, sources)
    if not (folder / "tokenizer.json").is_file():
        limit = BPE_BYTES // len(sources)
        texts = itertools.chain.from_iterable(_first_texts(source, limit) for source in sources)
        with fresh_folder(folder) as fresh:
            train_bpe(texts, settings.vocab).save(fresh)
    return load_tokenizer(folder)


def _bpe_folder(settings: CorpusSettings, sources: Sequence[ScannedSource]) -> Path:
    key = _key(["bpe", VERSION, settings.vocab, BPE_BYTES, [source.digest for source in sources]])
    return Path(settings.cache).expanduser() / f"bpe{settings.vocab}-{key}"


def _token_folder(source: ScannedSource, tokenizer: Tokenizer, cache: str | Path) -> Path:
    key = _key(["tokens", VERSION, PART_CHARS, tokenizer.digest, source.digest])
    return Path(cache).expanduser() / f"{_folder_name(source.spec.name)}-{key}"


def prepare(spec: SourceSpec | ScannedSource, tokenizer: Tokenizer, cache: str | Path, workers: int = 0) -> Path:
    """Tokenise one source into ``cache``, if it is not there. Returns the folder for ``open_tokens``.

    Args:
        workers: number of processes; 0: depends on the amount of text and the cores. The result does not depend on it.

    Raises:
        ConfigError: the source cannot be read or has no text, or the cache cannot be written.
        MissingDependency: a package for this kind of file is not installed.
    """
    source = scan(spec) if isinstance(spec, SourceSpec) else spec
    name, folder = source.spec.name, _token_folder(source, tokenizer, cache)
    if (folder / META).is_file():
        return folder
    with fresh_folder(folder) as fresh:
        writer = TokenWriter(fresh, tokenizer.vocab_size)
        text_bytes = 0
        try:
            for chunk in _tokenised(source, tokenizer, _num_workers(workers, source, tokenizer)):
                writer.append(chunk.tokens_T, chunk.ends)
                text_bytes += chunk.text_bytes
            if not text_bytes:
                raise ConfigError(f"data source {name!r}: {source.spec.path!r} contains no text")
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


def _first_texts(source: ScannedSource, limit: int) -> Iterator[str]:
    """Yield the first texts of ``source``, about ``limit`` bytes."""
    num_bytes = 0
    for part in source.parts():
        if num_bytes >= limit:
            return
        num_bytes += len(part.text.encode())
        yield part.text


def _parts_of_size(parts: Iterable[TextPart]) -> Iterator[list[TextPart]]:
    """Yield lists of consecutive parts with together at least ``PART_CHARS`` characters."""
    chunk: list[TextPart] = []
    size = 0
    for part in parts:
        chunk.append(part)
        size += len(part.text)
        if size >= PART_CHARS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _tokenised(source: ScannedSource, tokenizer: Tokenizer, workers: int) -> Iterator[_Chunk]:
    chunks = _parts_of_size(source.parts())
    if workers == 1:
        for chunk in chunks:
            yield _tokenise(tokenizer, chunk)
        return
    # Not fork: the caller may be a rank with communication threads. The queue is bounded, and so is the memory.
    context = multiprocessing.get_context("spawn")
    pending: deque[Future[_Chunk]] = deque()
    pool = ProcessPoolExecutor(workers, context, _start_worker, (tokenizer,))
    try:
        for chunk in chunks:
            pending.append(pool.submit(_work, chunk))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise MoeCommError(
            f"a worker process that tokenised {source.spec.name!r} died; its output above shows the cause (often lack "
            "of memory, or a script without \"if __name__ == '__main__'\"); data.workers=1 needs no worker processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker_tokenizer: Tokenizer


def _start_worker(tokenizer: Tokenizer) -> None:
    global _worker_tokenizer
    # The threads of the library would compete with the other workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = tokenizer


def _work(chunk: list[TextPart]) -> _Chunk:
    return _tokenise(_worker_tokenizer, chunk)


def _tokenise(tokenizer: Tokenizer, chunk: list[TextPart]) -> _Chunk:
    end = np.array([tokenizer.end_of_text], np.uint32)
    parts: list[npt.NDArray[np.uint32]] = []
    ends: list[int] = []
    length = 0
    for part, ids in zip(chunk, encode_arrays(tokenizer, [part.text for part in chunk]), strict=True):
        parts.append(ids)
        length += len(ids)
        if part.ends_document:
            parts.append(end)
            length += 1
            ends.append(length)
    text_bytes = sum(len(part.text.encode()) for part in chunk)
    return _Chunk(np.concatenate(parts), np.array(ends, np.int64), text_bytes)


def _num_workers(requested: int, source: ScannedSource, tokenizer: Tokenizer) -> int:
    if multiprocessing.current_process().daemon:
        return 1  # a daemon process cannot have children
    if requested:
        return requested
    if isinstance(tokenizer, ByteTokenizer):
        return 1  # sending the text to another process costs more than tokenising it
    return max(1, min(len(os.sched_getaffinity(0)), source.size // WORKER_BYTES))


def _key(content: object) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


def _folder_name(name: str) -> str:
    """Return the last component of ``name``, in characters that are valid in any file system."""
    stem = Path(name).name if not re.search(r"[*?\[]", name) else name
    return re.sub(r"[^\w.-]+", "_", stem).strip("._")[:40] or "data"
