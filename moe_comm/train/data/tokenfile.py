"""Prepared token files: a folder of raw tokens to map into memory, with a checksum per block.

    <name>-<key>/
        tokens.bin      ids, uint16 where the vocabulary has at most 65536 entries, else uint32; little-endian
        offsets.bin     int64 [documents + 1]: document d is tokens[offsets[d]:offsets[d + 1]], with its end of text
        counts.bin      int64 [vocab_size]: number of occurrences of each id
        tokenizer/      the tokenizer, for AutoTokenizer
        meta.json       counts, size and checksums of all other files, and its own checksum; written last

The folder is written under a temporary name, synced and renamed, so it is either complete or absent.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from moe_comm.errors import ConfigError, CorruptFile
from moe_comm.runtime.safe_files import open_new, remove, sync_to_disk, write_file
from moe_comm.runtime.untrusted import open_regular, parse_object, read_bounded, regular_size, shown
from moe_comm.train.data.settings import Verify

FORMAT = "moe_comm-tokens"
VERSION = 1
BLOCK = 1 << 20
META = "meta.json"
META_BYTES = 1 << 28
"""Maximum size of meta.json. The checksum of a block takes about 40 bytes."""
MAX_VOCAB_SIZE = 1 << 28
"""Maximum size of a vocabulary. Its entries are counted in memory."""
_NAME = re.compile(r"(tokenizer/)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_SUM = re.compile(r"[0-9a-f]{32}")
Ints = npt.NDArray[np.int64]


def block_sum(data: bytes | memoryview) -> str:
    """Return the checksum of a block: blake2b, 16 bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return uint16, or uint32 if ``vocab_size`` needs it."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@contextlib.contextmanager
def fresh_folder(final: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``final`` if the block ends without an error, and is removed otherwise.

    If another process has created ``final`` in the meantime, that folder is used. Temporary folders of killed processes
    of this host are removed.
    """
    prefix = f".partial-{final.name}-{socket.gethostname()}-"
    folder = final.parent / f"{prefix}{os.getpid()}"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        for old in final.parent.glob(glob.escape(prefix) + "*"):
            if not _alive(old.name.removeprefix(prefix)) or old == folder:
                with contextlib.suppress(OSError):  # it may belong to another user
                    remove(old)
        folder.mkdir()
    except OSError as error:
        raise ConfigError(f"data.cache: cannot write to {str(final.parent)!r}: {error.strerror or error}") from error
    try:
        yield folder
        for path in (*folder.rglob("*"), folder):
            sync_to_disk(path)
        try:
            os.rename(folder, final)
        except OSError:
            if not final.is_dir():
                raise
        sync_to_disk(final.parent)
    except OSError as error:  # for example a full disk, or a removed source
        raise ConfigError(f"data.cache: cannot create {str(final)!r}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            remove(folder)


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:  # a process of another user
        pass
    return True


class TokenWriter:
    """Writes tokens, offsets and metadata into ``folder``. Ids must be below ``vocab_size``."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.folder = folder
        self.dtype = token_dtype(vocab_size)
        self.counts_V = np.zeros(vocab_size, np.int64)
        self.tokens = 0
        self._offsets = [np.zeros(1, np.int64)]
        self._file: BinaryIO = open_new(folder / "tokens.bin")

    def append(self, tokens_T: npt.NDArray[Any], ends: npt.NDArray[Any]) -> None:
        """Append tokens. ``ends`` are the positions after the last token of each document, relative to ``tokens_T``."""
        self._file.write(tokens_T.astype(self.dtype, copy=False).tobytes())
        self._offsets.append(ends.astype(np.int64) + self.tokens)
        self.counts_V += np.bincount(tokens_T, minlength=len(self.counts_V))
        self.tokens += len(tokens_T)

    def finish(self, facts: dict[str, object]) -> None:
        """Close the files and write the metadata with ``facts``. The tokenizer's folder must exist."""
        self._file.close()
        offsets = np.concatenate(self._offsets)
        write_file(self.folder / "offsets.bin", offsets.astype("<i8").tobytes())
        write_file(self.folder / "counts.bin", self.counts_V.astype("<i8").tobytes())
        files = {}
        for path in sorted(p for p in self.folder.rglob("*") if p.is_file()):
            with path.open("rb") as file:
                sums = [block_sum(block) for block in iter(lambda file=file: file.read(BLOCK), b"")]  # type: ignore[misc]
            files[path.relative_to(self.folder).as_posix()] = {"bytes": path.stat().st_size, "blocks": sums}
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype.name,
            "vocab_size": len(self.counts_V),
            "tokens": self.tokens,
            "documents": len(offsets) - 1,
            **facts,
            "block_bytes": BLOCK,
            "files": files,
        }
        meta["checksum"] = _meta_sum(meta)
        write_file(self.folder / META, json.dumps(meta, indent=1) + "\n")

    def close(self) -> None:
        self._file.close()


class TokenFile:
    """An open token folder. Arrays are mapped, not read.

    Attributes:
        tokens: [tokens] uint16 or uint32.
        offsets: [documents + 1] int64.
        counts_V: [vocab_size] int64.
        digest: digest of the tokens, their documents and the tokenizer.
    """

    def __init__(self, path: Path, meta: dict[str, Any], verify: Verify) -> None:
        self.path = path
        self.meta = meta
        identity = [meta["files"][name]["blocks"] for name in ("tokens.bin", "offsets.bin")]
        self.digest = block_sum(json.dumps([meta["tokenizer"], meta["dtype"], *identity]).encode())
        self.vocab_size: int = meta["vocab_size"]
        self.end_of_text: int = meta["end_of_text"]
        self._check_sizes()
        for name, entry in meta["files"].items():
            if name != "tokens.bin" or verify == "all":
                self._check(name, range(len(entry["blocks"])))
        # An empty file cannot be mapped. ``_check_meta`` has ensured that no file is empty.
        self.tokens: npt.NDArray[Any] = np.memmap(path / "tokens.bin", np.dtype(meta["dtype"]).newbyteorder("<"), "r")
        self.offsets: Ints = np.memmap(path / "offsets.bin", np.dtype("<i8"), "r")
        self.counts_V: Ints = np.fromfile(path / "counts.bin", np.dtype("<i8"))
        self._check_documents()
        self._unchecked = np.ones(len(meta["files"]["tokens.bin"]["blocks"]), bool) if verify == "touched" else None

    def __len__(self) -> int:
        return int(self.meta["tokens"])

    def read(self, start: int, stop: int) -> Ints:
        """Return tokens [start, stop) as int64.

        Raises:
            CorruptFile: a block that is read for the first time does not match its checksum, or an id is out of range.
        """
        if self._unchecked is not None and stop > start:
            width = self.tokens.itemsize
            for block in range(start * width // BLOCK, (stop * width - 1) // BLOCK + 1):
                if self._unchecked[block]:
                    self._check("tokens.bin", [block])
                    self._unchecked[block] = False
        ids = self.tokens[start:stop].astype(np.int64)
        if ids.size and ids.max() >= self.vocab_size:
            path = self.path / "tokens.bin"
            raise CorruptFile(f"{path} contains id {ids.max()} of a vocabulary of {self.vocab_size}; {_REMEDY}")
        return ids

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer."""
        return self.path / "tokenizer"

    def _check_sizes(self) -> None:
        for name, entry in self.meta["files"].items():
            try:
                size = regular_size(self.path / name)
            except OSError as error:
                raise CorruptFile(f"{self.path / name} cannot be read: {error.strerror}; {_REMEDY}") from error
            if size != entry["bytes"]:
                raise CorruptFile(f"{self.path / name} has {size} bytes instead of {entry['bytes']}; {_REMEDY}")

    def _check_documents(self) -> None:
        """Check that offsets increase from 0 to the number of tokens, and that the counts sum to it."""
        increases = bool((self.offsets[1:] >= self.offsets[:-1]).all())
        if not increases or self.offsets[0] != 0 or self.offsets[-1] != len(self):
            raise CorruptFile(f"{self.path / 'offsets.bin'} does not cut {len(self)} tokens into documents; {_REMEDY}")
        if (self.counts_V < 0).any() or int(self.counts_V.sum()) != len(self):
            raise CorruptFile(f"{self.path / 'counts.bin'} does not count {len(self)} tokens; {_REMEDY}")

    def _check(self, name: str, blocks: Sequence[int]) -> None:
        path, sums = self.path / name, self.meta["files"][name]["blocks"]
        # hashlib releases the interpreter's lock for large blocks.
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            for block, actual in zip(blocks, pool.map(partial(_read_block_sum, path), blocks), strict=True):
                if actual != sums[block]:
                    at = block * BLOCK
                    raise CorruptFile(f"{path} is altered: bytes from {at} on do not match their checksum; {_REMEDY}")


def open_tokens(path: str | Path, verify: Verify = "all") -> TokenFile:
    """Open a folder that ``prepare`` returned.

    Args:
        verify: "all" verifies every byte now. "touched" verifies a block of tokens when it is first read.

    Raises:
        ConfigError: it is not such a folder, or has another version.
        CorruptFile: a file is missing, truncated or altered; the message names it.
    """
    path = Path(path)
    file = path / META
    try:
        text = read_bounded(file, META_BYTES)
    except OSError as error:
        raise ConfigError(f"{path} is not a prepared folder: cannot read {file}: {error.strerror}") from error
    try:
        meta = parse_object(text)
        if meta["format"] == FORMAT and meta["version"] != VERSION:
            version = shown(meta["version"])
            raise ConfigError(f"{path} has version {version}; this moe_comm reads {VERSION}; prepare it again")
        if meta["format"] != FORMAT or meta["checksum"] != _meta_sum(meta):
            raise CorruptFile(f"{file} does not match its checksum; {_REMEDY}")
        _check_meta(meta)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise CorruptFile(f"{file} is damaged: {shown(error)}; {_REMEDY}") from error
    return TokenFile(path, meta, verify)


_REMEDY = "delete the folder and prepare the data again"


def _meta_sum(meta: dict[str, Any]) -> str:
    content = {key: value for key, value in meta.items() if key != "checksum"}
    return block_sum(json.dumps(content, sort_keys=True).encode())


def _check_meta(meta: dict[str, Any]) -> None:
    """Check that the metadata is consistent. Its checksum detects accidents, but not deliberately altered values."""
    facts = {key: meta[key] for key in ("vocab_size", "tokens", "documents", "text_bytes", "end_of_text")}
    for key, value in facts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < (key != "end_of_text"):
            raise ValueError(f"{key} is {shown(value)}")
    if (
        facts["vocab_size"] > MAX_VOCAB_SIZE
        or facts["end_of_text"] >= facts["vocab_size"]
        or meta["block_bytes"] != BLOCK
    ):
        raise ValueError("vocab_size, end_of_text or block_bytes out of range")
    dtype = token_dtype(facts["vocab_size"])
    if meta["dtype"] != dtype.name or not isinstance(meta["tokenizer"], str):
        raise ValueError(f"dtype or tokenizer is {shown((meta['dtype'], meta['tokenizer']))}")
    files: dict[str, Any] = meta["files"]
    for name, entry in files.items():
        # Names with slashes or dots could refer to files outside of the folder.
        if not _NAME.fullmatch(name) or not isinstance(entry["bytes"], int) or not isinstance(entry["blocks"], list):
            raise ValueError(f"file {shown(name)}")
        if len(entry["blocks"]) != -(-entry["bytes"] // BLOCK):
            raise ValueError(f"{len(entry['blocks'])} checksums for {name} of {shown(entry['bytes'])} bytes")
        if not all(isinstance(block, str) and _SUM.fullmatch(block) for block in entry["blocks"]):
            raise ValueError(f"a checksum of {name} has another format")
    lengths = {"tokens": facts["tokens"] * dtype.itemsize, "offsets": 8 * (facts["documents"] + 1)}
    for name, length in (lengths | {"counts": 8 * facts["vocab_size"]}).items():
        if files[f"{name}.bin"]["bytes"] != length:
            raise ValueError(f"{name}.bin has {files[f'{name}.bin']['bytes']} bytes; expected {length}")


def _read_block_sum(path: Path, block: int) -> str:
    """Return the checksum of block number ``block`` of a file."""
    with os.fdopen(open_regular(path), "rb") as file:
        file.seek(block * BLOCK)
        return block_sum(file.read(BLOCK))


def entropy(probability_V: npt.NDArray[np.float64]) -> float:
    """Return the entropy in nats of probabilities that sum to one."""
    p = probability_V[probability_V > 0]
    return float(-(p * np.log(p)).sum())


@dataclass(frozen=True)
class Description:
    """Counts of a prepared folder whose checksums match. ``unigram_entropy`` is in nats per token."""

    path: str
    tokens: int
    documents: int
    text_bytes: int
    vocab_size: int
    used_ids: int
    bytes_per_token: float
    unigram_entropy: float
    longest_document: int
    dtype: str
    tokenizer: str
    digest: str

    def lines(self) -> list[tuple[str, str]]:
        """Return (name, value) pairs for a table."""
        return [
            ("tokens", f"{self.tokens:,} ({self.dtype})"),
            ("documents", f"{self.documents:,}, the longest {self.longest_document:,} tokens"),
            ("text", f"{self.text_bytes:,} bytes, {self.bytes_per_token:.3f} per token"),
            ("vocabulary", f"{self.used_ids:,} of {self.vocab_size:,} ids occur (tokenizer {self.tokenizer})"),
            ("unigram entropy", f"{self.unigram_entropy:.4f} nats/token"),
            ("folder", self.path),
        ]


def describe(path: str | Path) -> Description:
    """Verify all checksums of the prepared folder ``path`` and count its content.

    Raises:
        ConfigError: it is not a prepared folder.
        CorruptFile: a file is truncated or altered.
    """
    file = open_tokens(path, "all")
    sizes = file.offsets[1:] - file.offsets[:-1]
    return Description(
        path=str(path),
        tokens=len(file),
        documents=len(sizes),
        text_bytes=int(file.meta["text_bytes"]),
        vocab_size=file.vocab_size,
        used_ids=int((file.counts_V > 0).sum()),
        bytes_per_token=file.meta["text_bytes"] / len(file),
        unigram_entropy=entropy(file.counts_V / len(file)),
        longest_document=int(sizes.max()),
        dtype=file.meta["dtype"],
        tokenizer=file.meta["tokenizer"],
        digest=file.digest,
    )
