"""An error about a JSONL file says what its line contains, and files of other systems are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_comm.errors import ConfigError
from moe_comm.train.data import ByteTokenizer, SourceSpec, open_tokens, prepare

BYTES = ByteTokenizer()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": null}', "'text' is null"),
        (b'{"text": 3}', "'text' is a number"),
        (b'{"text": 0.5}', "'text' is a number"),
        (b'{"text": false}', "'text' is true or false"),
        (b'{"text": ["a"]}', "'text' is a list"),
        (b'{"text": {"a": 1}}', "'text' is an object"),
        (b'{"body": "a", "id": 1}', "it has body, id; set data.field"),
        (b"{}", "it has no keys; set data.field"),
        (b"null", "it is null"),
        (b'"text"', "it is a string"),
        (b"[1]", "it is a list"),
        (b"7", "it is a number"),
        (b'{"text": "a"', "not JSON"),
    ],
)
def test_a_line_without_text_is_explained(line: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(ConfigError, match=rf"d\.jsonl, line 3: .*{message}"):
        prepare(SourceSpec(str(tmp_path / "d.jsonl")), BYTES, tmp_path / "cache")


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(ConfigError, match=r"d\.jsonl' is not UTF-8 text: .* in line 2"):
        prepare(SourceSpec(str(tmp_path / "d.jsonl")), BYTES, tmp_path / "cache")


def test_byte_order_marks_line_ends_and_blank_lines_change_nothing(tmp_path: Path) -> None:
    plain, other = tmp_path / "plain.jsonl", tmp_path / "other.jsonl"
    plain.write_bytes(b'{"text": "one\\n"}\n{"text": "two"}\n')
    other.write_bytes(b'\xef\xbb\xbf{"text": "one\\n"}\r\n\r\n  \r\n{"text": ""}\r\n{"text": "two"}')
    read = []
    for path in (plain, other):
        tokens = open_tokens(prepare(SourceSpec(str(path)), BYTES, tmp_path / path.stem))
        read.append(tokens.read(0, len(tokens)).tolist())
    assert read[0] == read[1] and len(read[0]) == len("one\n") + len("two") + 2
