"""Description of a prepared folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moe_comm.train.data.batches import entropy
from moe_comm.train.data.tokenfile import open_tokens


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
