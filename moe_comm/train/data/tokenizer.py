"""Tokenizers: bytes, a Hugging Face ``tokenizers`` file, or a BPE trained from the data.

Each saves a folder that ``transformers.AutoTokenizer`` loads. The end-of-text token only marks the end of a document.
If its name occurs in a text, the name is tokenised like other text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_comm.errors import ConfigError, MissingDependency, pip_install
from moe_comm.runtime.safe_files import make_folders, open_own_folder, write_file
from moe_comm.runtime.untrusted import read_bounded

VOCAB_BYTES = 256
END_OF_TEXT = "<|endoftext|>"
END_TOKENS = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eot_id|>",
    "<|im_end|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
EXTRA_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Other files of a tokenizer in a model's folder. They are saved with the tokenizer."""
FREE_IDS = 1 << 16
"""Number of unused ids that any vocabulary may have. Memory is allocated for each id."""
FILE_BYTES = 1 << 28
"""Maximum size of a file of a tokenizer. The largest in use have about 40 MB."""


class ByteTokenizer:
    """Tokenizer whose ids 0 to 255 are the bytes of the UTF-8 text. 256 is the end of text.

    Attributes:
        vocab_size: number of ids.
        end_of_text, end_name: id and name of the token that ends a document.
        digest: id of the mapping; tokenizers with equal digests encode equally.
    """

    vocab_size = VOCAB_BYTES + 1
    end_of_text = VOCAB_BYTES
    end_name = END_OF_TEXT
    digest = "bytes"

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens."""
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text. Invalid UTF-8 becomes U+FFFD; ends of text are left out."""
        return bytes(i for i in ids if i < VOCAB_BYTES).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Save it as a BPE without merges.

        Raises:
            MissingDependency: the tokenizers library is not installed.
        """
        library = _library()
        # The alphabet of the tokenizers library: one printable character per byte.
        printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        rest = [byte for byte in range(VOCAB_BYTES) if byte not in printable]
        letters = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(rest)}
        vocab = {letters[byte]: byte for byte in range(VOCAB_BYTES)} | {END_OF_TEXT: VOCAB_BYTES}
        backend = library.Tokenizer(library.models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = library.decoders.ByteLevel()
        backend.add_special_tokens([library.AddedToken(END_OF_TEXT, special=True)])
        _save(folder, backend.to_str(pretty=False), END_OF_TEXT, {})


class FileTokenizer:
    """A tokenizer of the Hugging Face ``tokenizers`` library, with the attributes of ``ByteTokenizer``.

    Args:
        text: the content of a ``tokenizer.json``.
        end_of_text: name of the token that ends a document; None: the first of ``END_TOKENS`` in the vocabulary.
        extra_files: other files to save with the tokenizer, by name.

    Raises:
        ConfigError: ``text`` is not a tokenizer, has no such token, or has large gaps between its ids.
        MissingDependency: the tokenizers library is not installed.
    """

    def __init__(self, text: str, end_of_text: str | None = None, extra_files: dict[str, bytes] | None = None) -> None:
        library = _library()
        try:
            self._backend = library.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"data.tokenizer is not a readable tokenizer.json: {error}") from error
        self.text = text
        self.extra_files = extra_files or {}
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        names = (end_of_text,) if end_of_text is not None else END_TOKENS
        end_names = [name for name in names if self._backend.token_to_id(name) is not None]
        if not end_names:
            raise ConfigError(
                f"data.tokenizer has no token {' or '.join(names)} to end a document; "
                "set data.end_of_text to the name of a token of its vocabulary"
            )
        self.end_name = end_names[0]
        self.end_of_text: int = self._backend.token_to_id(self.end_name)
        # Ids may have gaps, so this can exceed the number of entries.
        ids = self._backend.get_vocab(with_added_tokens=True).values()
        self.vocab_size: int = max(ids) + 1
        if self.vocab_size > 4 * len(ids) + FREE_IDS:
            raise ConfigError(
                f"data.tokenizer has ids up to {max(ids):,} for {len(ids):,} tokens; a model would have a row for each "
                f"id. Renumber the tokens"
            )
        content = json.dumps([text, self.end_name]).encode()
        self.digest = hashlib.blake2b(content, digest_size=16).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        # The worker processes of ``preparation`` receive the tokenizer by pickle.
        return type(self), (self.text, self.end_name, self.extra_files)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens."""
        return [encoding.ids for encoding in self._backend.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, without special tokens."""
        decoded: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return decoded

    def save(self, folder: Path) -> None:
        """Write the tokenizer to ``folder``, in the format of Hugging Face."""
        _save(folder, self.text, self.end_name, self.extra_files)


Tokenizer = ByteTokenizer | FileTokenizer
"""Maps text to ids below ``vocab_size`` and back."""


def load_tokenizer(path: str | Path, end_of_text: str | None = None) -> FileTokenizer:
    """Load the tokenizer in ``path``: a ``tokenizer.json``, or a folder that contains one.

    Args:
        end_of_text: name of the token that ends a document; None: as configured in the folder.

    Raises:
        ConfigError: it cannot be read, or has no token that ends a document.
        MissingDependency: the tokenizers library is not installed.
    """
    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        # The digest of prepared data depends on the text with the newlines of ``Path.read_text``.
        text = read_bounded(file, FILE_BYTES).decode().replace("\r\n", "\n").replace("\r", "\n")
        extra_files = _read_files(file.parent, EXTRA_FILES)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.tokenizer: cannot read {str(file)!r}: {error}") from error
    return FileTokenizer(text, end_of_text or _configured_end(extra_files), extra_files)


def train_bpe(texts: Iterable[str], vocab_size: int) -> FileTokenizer:
    """Train a byte-level BPE with GPT-2's splitting. Equal texts give equal tokenizers.

    Args:
        vocab_size: maximum size of the vocabulary.

    Raises:
        MissingDependency: the tokenizers library is not installed.
    """
    library = _library()
    backend = library.Tokenizer(library.models.BPE())
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return FileTokenizer(backend.to_str(pretty=False), END_OF_TEXT)


def encode_arrays(tokenizer: Tokenizer, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
    """Return ``tokenizer.encode`` as arrays. Bytes are converted without Python integers."""
    if isinstance(tokenizer, ByteTokenizer):
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]
    return [np.asarray(ids, np.uint32) for ids in tokenizer.encode(texts)]


def _configured_end(extra_files: dict[str, bytes]) -> str | None:
    """Return ``eos_token`` of ``tokenizer_config.json``: a name, or the ``content`` of an object."""
    try:
        end = json.loads(extra_files["tokenizer_config.json"])["eos_token"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return None
    name = end.get("content") if isinstance(end, dict) else end
    return name if isinstance(name, str) else None


def _save(folder: Path, text: str, end_name: str, extra_files: dict[str, bytes]) -> None:
    write_file(folder / "tokenizer.json", text)
    for name, content in extra_files.items():
        write_file(folder / name, content)
    if "tokenizer_config.json" not in extra_files:
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": end_name,
            "eos_token": end_name,
            "pad_token": end_name,
            "clean_up_tokenization_spaces": False,
        }
        write_file(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def saved_files(folder: Path, *, follow: bool = False) -> dict[str, bytes]:
    """Return the files that ``save`` of a tokenizer wrote to ``folder``, by name. Other files there are ignored.

    They may be copied into the folder of a model: none has the name of a model's configuration, weights or code.

    Args:
        follow: follow links, in a folder that the user has named.
    """
    try:
        if not follow:
            os.close(open_own_folder(folder))
        return _read_files(folder, ("tokenizer.json", *EXTRA_FILES), follow=follow)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer in {str(folder)!r}: {error}") from error


def copy_tokenizer(source: Path, folder: Path, *, follow: bool = False) -> None:
    """Copy the tokenizer saved in ``source`` into ``folder``. Other files of ``folder`` are not changed.

    follow: as in ``saved_files``.
    """
    files = saved_files(source, follow=follow)
    if not files:
        raise ConfigError(f"there is no tokenizer in {str(source)!r}")
    make_folders(folder.parent, folder.name)
    for name, content in files.items():
        write_file(folder / name, content)


def _read_files(folder: Path, names: Sequence[str], follow: bool = True) -> dict[str, bytes]:
    files = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            files[name] = read_bounded(folder / name, FILE_BYTES, follow)
    return files


def _library() -> Any:
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: F401  attributes of the package
    except ImportError as error:
        raise MissingDependency(
            f"this tokenizer needs the package tokenizers; install with: {pip_install('train')}"
        ) from error
    return tokenizers
