"""Documents from text, JSONL and Parquet files and from what every Python carries.

A source is scanned once, for its content's digest, and then read in pieces: a document longer than ``PIECE`` characters
comes in several, cut at line ends, so that memory does not grow with a file and one large file is work for several
processes. Pieces depend on the text alone.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moe_comm.errors import ConfigError, MissingDependency
from moe_comm.runtime.untrusted import abridged, open_regular
from moe_comm.train.data.settings import SourceSpec

PIECE = 1 << 20
READ = 1 << 22
JSONL = (".jsonl", ".ndjson")
PARQUET = (".parquet", ".pq")
LONGEST_LINE = 1 << 28
"""Characters of a line of JSON; it is held in memory."""


class Piece(NamedTuple):
    """Text of a document; ``ends``: the document ends with it."""

    text: str
    ends: bool


@dataclass(frozen=True)
class SourceFile:
    """A file to read: how ("text", "jsonl", "parquet"), its size and the digest of its bytes."""

    path: Path
    format: str
    size: int
    digest: str


@dataclass(frozen=True)
class Source:
    """A scanned source: what it reads, and a digest of everything that its documents depend on.

    skipped: files of a folder or pattern that are not read, each with the reason.
    """

    spec: SourceSpec
    files: tuple[SourceFile, ...]
    size: int
    digest: str
    skipped: tuple[tuple[Path, str], ...] = ()

    def pieces(self) -> Iterator[Piece]:
        """All documents in order, without the empty ones.

        Raises:
            ConfigError: a line is not JSON, a field is missing or not text; the message names file and line.
            MissingDependency: Parquet without pyarrow.
        """
        if self.spec.path == "pydoc":
            for topic in _pydoc():
                yield from cut(topic)
            return
        for file in self.files:
            if file.format == "jsonl":
                yield from _read_jsonl(file.path, self.spec.field)
            elif file.format == "parquet":
                yield from _read_parquet(file.path, self.spec.field)
            else:
                yield from _read_text(file.path)


def scan(spec: SourceSpec) -> Source:
    """Find the files of ``spec`` and read them once for their digest.

    Raises:
        ConfigError: nothing is there, a file cannot be read, or one named by itself is not UTF-8.
        MissingDependency: a Parquet file, and pyarrow is not installed.
    """
    if spec.path == "pydoc":
        topics = _pydoc()
        digest = hashlib.blake2b("\0".join(topics).encode(), digest_size=16).hexdigest()
        return Source(spec, (), sum(len(topic.encode()) for topic in topics), digest)
    paths, hidden, alone = _find(spec)
    files, skipped = [], [(path, "hidden") for path in hidden]
    for path in paths:
        file = _scan_file(path, spec, alone)
        if isinstance(file, str):
            skipped.append((path, file))
        else:
            files.append(file)
    if not files:
        raise ConfigError(f"data source {spec.name!r}: {spec.path!r} has no file of UTF-8 text")
    # Names and places are left out: moved files are the same data.
    content = [[file.format, file.digest, "" if file.format == "text" else spec.field] for file in files]
    digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
    return Source(spec, tuple(files), sum(file.size for file in files), digest, tuple(skipped))


def cut(text: str) -> Iterator[Piece]:
    """``text`` in pieces of about ``PIECE`` characters, cut after line ends where there are any."""
    start = 0
    while len(text) - start > PIECE:
        newline = text.find("\n", start + PIECE - 1, start + 2 * PIECE)
        stop = newline + 1 if newline >= 0 else min(start + 2 * PIECE, len(text))
        if stop == len(text):
            break
        yield Piece(text[start:stop], False)
        start = stop
    if start < len(text):
        yield Piece(text[start:], True)


def _pydoc() -> list[str]:
    """The topics of the language reference. Many paragraphs occur in several topics; only the first is kept, so that
    validation text was not seen in training."""
    # 700 kB of text, of use to this source alone.
    from pydoc_data.topics import topics

    seen: set[str] = set()
    documents = []
    for topic in topics.values():
        paragraphs = [p for p in dict.fromkeys(topic.strip("\n").split("\n\n")) if p not in seen]
        seen.update(paragraphs)
        if paragraphs:
            documents.append("\n\n".join(paragraphs) + "\n")
    return documents


def _stdlib() -> list[Path]:
    """The standard library's modules, without installed packages and without what describes this machine's build."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [path.relative_to(root) for path in root.rglob("*.py")]
    own = [
        path
        for path in found
        if not {"site-packages", "dist-packages", "__pycache__"} & set(path.parts)
        and not path.parts[0].startswith(("config-", "_sysconfigdata"))
    ]
    return [root / path for path in sorted(own, key=lambda path: path.as_posix())]


def _find(spec: SourceSpec) -> tuple[list[Path], list[Path], bool]:
    """The files of ``spec`` in order, the hidden ones that are left out, and whether it names just that one."""
    if spec.path == "stdlib":
        return _stdlib(), [], False
    path = Path(spec.path).expanduser()
    if path.is_file():
        return [path], [], True
    hidden: set[Path] = set()
    if path.is_dir():
        inside = list(path.rglob("*"))
        hidden = {p for p in inside if any(part[0] == "." for part in p.relative_to(path).parts)}
    elif glob.has_magic(spec.path):
        inside = [Path(name) for name in glob.glob(str(path), recursive=True)]
    else:
        raise ConfigError(f"data source {spec.name!r}: cannot read {spec.path!r}: No such file or directory")
    found = sorted((p for p in inside if p.is_file()), key=lambda p: p.as_posix())
    paths = [p for p in found if p not in hidden]
    if not paths:
        raise ConfigError(f"data source {spec.name!r}: {spec.path!r} has no files")
    return paths, [p for p in found if p in hidden], False


def _format(path: Path, spec: SourceSpec) -> str:
    if spec.format != "auto":
        return spec.format
    suffix = path.suffix.lower()
    return "jsonl" if suffix in JSONL else "parquet" if suffix in PARQUET else "text"


def _scan_file(path: Path, spec: SourceSpec, alone: bool) -> SourceFile | str:
    """The file, or the reason why it is skipped."""
    kind = _format(path, spec)
    if kind == "parquet":
        _pyarrow(path)
    checksum, size = hashlib.blake2b(digest_size=16), 0
    decoder = None if kind == "parquet" else codecs.getincrementaldecoder("utf-8")()
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            while block := file.read(READ):
                checksum.update(block)
                size += len(block)
                if decoder is not None:
                    decoder.decode(block)
        if decoder is not None:
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        if not alone:
            return f"not UTF-8 text: {error.reason}"
        raise ConfigError(f"data source {spec.name!r}: {str(path)!r} is not UTF-8 text: {error.reason}") from error
    except OSError as error:
        raise ConfigError(f"data source {spec.name!r}: cannot read {str(path)!r}: {error.strerror or error}") from error
    return SourceFile(path, kind, size, checksum.hexdigest())


def _read_text(path: Path) -> Iterator[Piece]:
    with path.open(encoding="utf-8", newline="") as file:
        piece = file.read(PIECE) + file.readline(PIECE)
        while piece:
            after = file.read(PIECE) + file.readline(PIECE)
            yield Piece(piece, not after)
            piece = after


def _read_jsonl(path: Path, field: str) -> Iterator[Piece]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), ""), 1):
            if len(line) > LONGEST_LINE:
                raise ConfigError(f"{path}, line {number}: longer than {LONGEST_LINE} characters")
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(record, dict) or not isinstance(record.get(field), str):
                keys = abridged(", ".join(record)) if isinstance(record, dict) else type(record).__name__
                raise ConfigError(f"{path}, line {number}: expected an object with text in {field!r}; it has {keys}")
            yield from cut(_encodable(record[field]))


def _read_parquet(path: Path, field: str) -> Iterator[Piece]:
    parquet = _pyarrow(path)
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow raises its own kinds, none of them public for every fault
        raise ConfigError(f"{path} is not a Parquet file that can be read: {error}") from error
    with file:
        names = file.schema_arrow.names
        if field not in names:
            raise ConfigError(f"{path} has no column {field!r}; it has {', '.join(names)}")
        kind = str(file.schema_arrow.field(field).type)
        if kind not in ("string", "large_string", "string_view"):
            raise ConfigError(f"{path}: column {field!r} must hold text; it holds {kind}")
        batches = file.iter_batches(batch_size=1024, columns=[field])
        while True:
            try:
                batch = next(batches, None)
                texts = [] if batch is None else batch.column(0).to_pylist()
            except Exception as error:  # damaged pages, text that is not UTF-8
                raise ConfigError(f"{path}: column {field!r} cannot be read: {error}") from error
            if batch is None:
                return
            for text in texts:
                if text:
                    yield from cut(text)


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingDependency(
            f"{path} is a Parquet file, which needs pyarrow; install with: pip install 'moe_comm[data]'"
        ) from error
    return parquet


def _encodable(text: str) -> str:
    """JSON can spell half of a surrogate pair, which is no character and no UTF-8: it becomes a question mark."""
    return text.encode("utf-8", "replace").decode()
