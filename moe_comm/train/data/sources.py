"""Documents from text, JSONL and Parquet files, and from files of every Python installation.

A source is scanned once for the digest of its content. Then it is read in parts: a document longer than ``PART_CHARS``
characters is split at line ends. So memory does not grow with the size of a file, and several processes can work on one
file. The parts only depend on the text.

A source that cannot be read raises ``ConfigError``, which names the file and line; Parquet without pyarrow raises
``MissingDependency``.
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

from moe_comm.errors import ConfigError, MissingDependency, pip_install
from moe_comm.runtime.untrusted import abridged, open_regular
from moe_comm.train.data.settings import SourceSpec

PART_CHARS = 1 << 20
READ = 1 << 22
"""Bytes per read when a file is scanned."""
JSONL = (".jsonl", ".ndjson")
PARQUET = (".parquet", ".pq")
_JSON_TYPES = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}
LONGEST_LINE = 1 << 28
"""Maximum length of a JSON line in characters. A line is held in memory."""


class TextPart(NamedTuple):
    """Text of a document, or a part of it. ``ends_document`` marks the last part."""

    text: str
    ends_document: bool


@dataclass(frozen=True)
class SourceFile:
    """A file of a source: format ("text", "jsonl" or "parquet"), size in bytes, and digest of its bytes."""

    path: Path
    format: str
    size: int
    digest: str


@dataclass(frozen=True)
class ScannedSource:
    """A scanned source."""

    spec: SourceSpec
    files: tuple[SourceFile, ...]
    size: int  # bytes of its files
    digest: str  # digest of everything that its documents depend on
    skipped: tuple[tuple[Path, str], ...] = ()  # files of a folder or pattern that are not read, with the reason

    def parts(self) -> Iterator[TextPart]:
        """Yield all non-empty documents in order."""
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


def scan(spec: SourceSpec) -> ScannedSource:
    """Find the files of ``spec`` and read them once for their digest."""
    if spec.path == "pydoc":
        topics = _pydoc()
        digest = hashlib.blake2b("\0".join(topics).encode(), digest_size=16).hexdigest()
        return ScannedSource(spec, (), sum(len(topic.encode()) for topic in topics), digest)
    paths, hidden, is_single = _find(spec)
    files, skipped = [], [(path, "hidden") for path in hidden]
    for path in paths:
        file = _scan_file(path, spec, is_single)
        if isinstance(file, str):
            skipped.append((path, file))
        else:
            files.append(file)
    if not files:
        raise ConfigError(f"data source {spec.name!r}: {spec.path!r} has no file of UTF-8 text")
    # The digest does not depend on names and folders: moved files are the same data.
    content = [[file.format, file.digest, "" if file.format == "text" else spec.field] for file in files]
    digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
    return ScannedSource(spec, tuple(files), sum(file.size for file in files), digest, tuple(skipped))


def check_files(spec: SourceSpec) -> None:
    """Find the files of ``spec`` without reading them."""
    if spec.path == "pydoc":
        return
    for path in _find(spec)[0]:
        if _format(path, spec) == "parquet":
            _pyarrow(path)


def cut(text: str) -> Iterator[TextPart]:
    """Yield ``text`` in parts of about ``PART_CHARS`` characters, split after line ends where possible."""
    start = 0
    while len(text) - start > PART_CHARS:
        newline = text.find("\n", start + PART_CHARS - 1, start + 2 * PART_CHARS)
        stop = newline + 1 if newline >= 0 else min(start + 2 * PART_CHARS, len(text))
        if stop == len(text):
            break
        yield TextPart(text[start:stop], False)
        start = stop
    if start < len(text):
        yield TextPart(text[start:], True)


def _pydoc() -> list[str]:
    """Return the topics of the language reference.

    Many paragraphs occur in several topics. Only the first one is used, so that validation text is not in the training
    text.
    """
    # Imported here: 700 kB of text that only this source needs.
    from pydoc_data.topics import topics

    used: set[str] = set()
    documents = []
    for topic in topics.values():
        paragraphs = [p for p in dict.fromkeys(topic.strip("\n").split("\n\n")) if p not in used]
        used.update(paragraphs)
        if paragraphs:
            documents.append("\n\n".join(paragraphs) + "\n")
    return documents


def _stdlib() -> list[Path]:
    """Return the files of the standard library, without installed packages and files of this machine's build."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    modules = [
        path
        for path in paths
        if not {"site-packages", "dist-packages", "__pycache__"} & set(path.parts)
        and not path.parts[0].startswith(("config-", "_sysconfigdata"))
    ]
    return [root / path for path in sorted(modules, key=lambda path: path.as_posix())]


def _find(spec: SourceSpec) -> tuple[list[Path], list[Path], bool]:
    """Return the files of ``spec`` in order, the skipped hidden files, and whether ``spec`` names a single file."""
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
        reason = "it is neither a file nor a folder" if path.exists() else "No such file or directory"
        raise ConfigError(f"data source {spec.name!r}: cannot read {spec.path!r}: {reason}")
    files = sorted((p for p in inside if p.is_file()), key=lambda p: p.as_posix())
    paths = [p for p in files if p not in hidden]
    if not paths:
        raise ConfigError(f"data source {spec.name!r}: {spec.path!r} has no files")
    return paths, [p for p in files if p in hidden], False


def _format(path: Path, spec: SourceSpec) -> str:
    if spec.format != "auto":
        return spec.format
    suffix = path.suffix.lower()
    return "jsonl" if suffix in JSONL else "parquet" if suffix in PARQUET else "text"


def _scan_file(path: Path, spec: SourceSpec, is_single: bool) -> SourceFile | str:
    """Return the file, or the reason why it is skipped."""
    kind = _format(path, spec)
    if kind == "parquet":
        _pyarrow(path)
    checksum, size, lines = hashlib.blake2b(digest_size=16), 0, 0
    decoder = None if kind == "parquet" else codecs.getincrementaldecoder("utf-8")()
    try:
        with os.fdopen(open_regular(path, holes=False), "rb") as file:
            while block := file.read(READ):
                checksum.update(block)
                size += len(block)
                if decoder is not None:
                    decoder.decode(block)
                    lines += block.count(b"\n")
        if decoder is not None:
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        if not is_single:
            return f"not UTF-8 text: {error.reason}"
        line = lines + error.object.count(b"\n", 0, error.start) + 1
        where = f"data source {spec.name!r}: {str(path)!r}"
        raise ConfigError(f"{where} is not UTF-8 text: {error.reason} in line {line}") from error
    except OSError as error:
        raise ConfigError(f"data source {spec.name!r}: cannot read {str(path)!r}: {error.strerror or error}") from error
    return SourceFile(path, kind, size, checksum.hexdigest())


def _read_text(path: Path) -> Iterator[TextPart]:
    with os.fdopen(open_regular(path, holes=False), encoding="utf-8", newline="") as file:
        part = file.read(PART_CHARS) + file.readline(PART_CHARS)
        while part:
            next_part = file.read(PART_CHARS) + file.readline(PART_CHARS)
            yield TextPart(part, ends_document=not next_part)
            part = next_part


def _read_jsonl(path: Path, field: str) -> Iterator[TextPart]:
    # utf-8-sig: editors on Windows write a byte order mark.
    with os.fdopen(open_regular(path, holes=False), encoding="utf-8-sig") as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), ""), 1):
            if len(line) > LONGEST_LINE:
                raise ConfigError(f"{path}, line {number}: longer than {LONGEST_LINE} characters")
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error
            text = record.get(field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                got = _described(record, field)
                raise ConfigError(f"{path}, line {number}: expected an object with text in {field!r}; {got}")
            yield from cut(_encodable(text))


def _described(record: object, field: str) -> str:
    """Return what a JSON record without text in ``field`` has instead."""
    if not isinstance(record, dict):
        return f"it is {_JSON_TYPES[type(record)]}"
    if field in record:
        return f"{field!r} is {_JSON_TYPES[type(record[field])]}"
    return f"it has {abridged(', '.join(record)) or 'no keys'}; set data.field to the key of the text"


def _read_parquet(path: Path, field: str) -> Iterator[TextPart]:
    parquet = _pyarrow(path)
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow also raises errors of non-public types
        raise ConfigError(f"{path} is not a readable Parquet file: {error}") from error
    with file:
        names = file.schema_arrow.names
        if field not in names:
            raise ConfigError(f"{path} has no column {field!r}; it has {', '.join(names)}")
        kind = str(file.schema_arrow.field(field).type)
        if kind not in ("string", "large_string", "string_view"):
            raise ConfigError(f"{path}: column {field!r} must have a string type; its type is {kind}")
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
            f"{path} is a Parquet file, which needs pyarrow; install with: {pip_install('data')}"
        ) from error
    return parquet


def _encodable(text: str) -> str:
    """Replace half surrogate pairs, which JSON can contain but UTF-8 cannot, by question marks."""
    return text.encode("utf-8", "replace").decode()
