"""Preparation of token files from text: sources, parallel tokenization, the cache, and damaged files."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_comm.errors import ConfigError, CorruptFile, MissingDependency
from moe_comm.train.data import (
    ByteTokenizer,
    CorpusSettings,
    SourceSpec,
    TokenFile,
    describe,
    open_tokens,
    preparation,
    prepare,
    prepare_all,
    sources,
    tokenfile,
    train_bpe,
)
from tests.train.data.common import texts, write_jsonl

BYTES = ByteTokenizer()
needs_pyarrow = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")


def documents_of(file: TokenFile) -> list[str]:
    """Decode tokens of ``ByteTokenizer``. Each document must end with an end of text."""
    documents = []
    for start, stop in zip(file.offsets[:-1].tolist(), file.offsets[1:].tolist(), strict=True):
        ids = file.read(start, stop).tolist()
        assert ids[-1] == BYTES.end_of_text and BYTES.end_of_text not in ids[:-1]
        documents.append(BYTES.decode(ids))
    return documents


def write_parquet(path: Path, columns: dict[str, list[Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=3)
    return path


def test_jsonl_has_one_document_per_line_and_empty_ones_are_skipped(tmp_path: Path) -> None:
    expected = texts(20, seed=2)
    path = write_jsonl(tmp_path / "d.jsonl", ["", *expected, ""], field="body")
    path.write_text(path.read_text() + "\n\n")
    file = open_tokens(prepare(SourceSpec(str(path), field="body"), BYTES, tmp_path / "cache"))
    assert documents_of(file) == expected
    assert file.meta["documents"] == 20
    assert file.meta["text_bytes"] == sum(len(text.encode()) for text in expected) == len(file) - 20
    assert file.tokens.dtype == np.uint16


@needs_pyarrow
def test_parquet_has_one_document_per_row(tmp_path: Path) -> None:
    expected = texts(10, seed=3)
    path = write_parquet(tmp_path / "d.parquet", {"n": list(range(12)), "text": ["", *expected, None]})
    file = open_tokens(prepare(SourceSpec(str(path)), BYTES, tmp_path / "cache"))
    assert documents_of(file) == expected


@needs_pyarrow
def test_parquet_faults_are_config_errors(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "d.parquet", {"n": [1], "text": ["a"]})
    with pytest.raises(ConfigError, match=r"no column 'body'; it has n, text"):
        prepare(SourceSpec(str(path), field="body"), BYTES, tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"column 'n' must have a string type; its type is int64"):
        prepare(SourceSpec(str(path), field="n"), BYTES, tmp_path / "cache")
    (tmp_path / "e.parquet").write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match="not a readable Parquet file"):
        prepare(SourceSpec(str(tmp_path / "e.parquet")), BYTES, tmp_path / "cache")


@pytest.mark.parametrize(
    ("path", "reason"), [("/dev/zero", "it is neither a file nor a folder"), ("/no/such", "No such file or directory")]
)
def test_a_source_that_is_not_a_file_raises_with_the_reason(path: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        prepare(SourceSpec(path), BYTES, tmp_path / "cache")


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependency, match=r"\.\[data\]"):
        prepare(SourceSpec(str(tmp_path / "d.parquet")), BYTES, tmp_path / "cache")


def test_a_folder_has_one_document_per_file_and_other_files_are_skipped(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    (root / "b").mkdir(parents=True)
    (root / ".hidden").mkdir()
    (root / "b" / "two.py").write_text("two \u2192", encoding="utf-8")
    (root / "one.txt").write_bytes(b"one\r\nline")
    (root / "a.bin").write_bytes(b"\xff\xfe\x00")
    (root / "empty.txt").write_text("")
    (root / ".hidden" / "x.txt").write_text("hidden")
    write_jsonl(root / "c.jsonl", ["three", "four"])
    file = open_tokens(prepare(SourceSpec(str(root)), BYTES, tmp_path / "cache"))
    assert documents_of(file) == ["two \u2192", "three", "four", "one\r\nline"]
    assert sources.scan(SourceSpec(str(root))).skipped == (
        (root / ".hidden" / "x.txt", "hidden"),
        (root / "a.bin", "not UTF-8 text: invalid start byte"),
    )
    pattern = open_tokens(prepare(SourceSpec(str(root / "**" / "*.py")), BYTES, tmp_path / "cache"))
    assert documents_of(pattern) == ["two \u2192"]


def test_the_sources_pydoc_and_stdlib_need_no_files(tmp_path: Path) -> None:
    file = open_tokens(prepare(SourceSpec("pydoc"), BYTES, tmp_path))
    assert file.meta["text_bytes"] > 300_000
    paragraphs = "\n\n".join(text.rstrip("\n") for text in documents_of(file)).split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs)
    modules = sources.scan(SourceSpec("stdlib")).files
    names = [module.path.name for module in modules]
    assert {"argparse.py", "typing.py"} <= set(names)
    assert not any("site-packages" in module.path.parts for module in modules)
    assert len(names) > 500 and sum(module.size for module in modules) > 5_000_000


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_tokenising_in_parallel_gives_the_same_bytes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PART_CHARS", 200)
    monkeypatch.setattr(preparation, "PART_CHARS", 500)
    documents = [*texts(60, seed=4), "long " * 300, *texts(10, seed=5)]
    tokenizer = BYTES if kind == "bytes" else train_bpe(documents, 300)
    source = SourceSpec(str(write_jsonl(tmp_path / "d.jsonl", documents)))
    before = set(multiprocessing.active_children())
    folders = [prepare(source, tokenizer, tmp_path / f"by{workers}", workers) for workers in (1, 2)]
    assert folders[0].name == folders[1].name
    names = sorted(p.relative_to(folders[0]).as_posix() for p in folders[0].rglob("*") if p.is_file())
    assert "tokens.bin" in names and "meta.json" in names
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    assert set(multiprocessing.active_children()) <= before


def test_a_daemon_process_tokenises_without_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiprocessing starts some ranks as daemons, which cannot have children."""
    path = write_jsonl(tmp_path / "d.jsonl", ["text"])
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    monkeypatch.setattr(preparation, "ProcessPoolExecutor", None)
    assert documents_of(open_tokens(prepare(SourceSpec(str(path)), BYTES, tmp_path / "cache", 4))) == ["text"]


def test_a_long_document_read_in_parts_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART_CHARS", 64)
    for number, text in enumerate(("line of text\n" * 50, "no line end " * 50, "x" * 64, "x" * 128, "\u6f22" * 129)):
        path = tmp_path / f"{number}.txt"
        path.write_text(text, encoding="utf-8")
        assert documents_of(open_tokens(prepare(SourceSpec(str(path)), BYTES, tmp_path / "cache"))) == [text]
        record = write_jsonl(tmp_path / f"{number}.jsonl", [text, "after"])
        file = open_tokens(prepare(SourceSpec(str(record)), BYTES, tmp_path / "cache"))
        assert documents_of(file) == [text, "after"]
        assert max(len(piece.text) for piece in sources.cut(text)) <= 128


def test_half_a_surrogate_pair_in_json_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "a\\ud800b \\ud83d\\udc0d"}\n')
    assert documents_of(open_tokens(prepare(SourceSpec(str(path)), BYTES, tmp_path / "cache"))) == ["a?b \U0001f40d"]


def test_equal_content_is_prepared_once_and_other_content_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ["one", "two"])
    settings = CorpusSettings(source=str(path), cache=str(tmp_path / "cache"))
    first = prepare_all(settings)
    moved = tmp_path / "elsewhere.jsonl"
    shutil.copy(path, moved)

    def fail(*_: object) -> None:
        raise AssertionError("prepared again")

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_tokenised", fail)
        assert prepare_all(settings) == first
        assert prepare(SourceSpec(str(moved), name=str(path)), BYTES, tmp_path / "cache") == first[0]
    write_jsonl(path, ["one", "three"])
    assert prepare_all(settings) != first
    assert documents_of(open_tokens(first[0])) == ["one", "two"]


def test_a_bpe_is_trained_once_and_saved_with_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", texts(50, seed=6))
    settings = CorpusSettings(
        source=[str(path), "pydoc"],
        cache=str(tmp_path / "cache"),
        tokenizer="bpe",
        vocab=300,
    )
    monkeypatch.setattr(preparation, "BPE_BYTES", 40_000)
    first = prepare_all(settings)
    monkeypatch.setattr(preparation, "train_bpe", None)
    assert prepare_all(settings) == first
    files = [open_tokens(folder) for folder in first]
    assert files[0].meta["tokenizer"] == files[1].meta["tokenizer"]
    assert files[0].vocab_size == 300
    saved = CorpusSettings(source=settings.source, cache=settings.cache, tokenizer=str(files[0].tokenizer))
    assert prepare_all(saved) == first


def test_processes_that_prepare_concurrently_produce_one_folder(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", texts(50, seed=7))
    context = multiprocessing.get_context("spawn")
    arguments = (SourceSpec(str(path)), BYTES, tmp_path / "cache")
    jobs = [context.Process(target=prepare, args=arguments) for _ in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(120)
    assert [job.exitcode for job in jobs] == [0, 0]
    (folder,) = (tmp_path / "cache").iterdir()
    assert len(documents_of(open_tokens(folder))) == 50


def test_failed_and_killed_preparations_leave_no_files(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ["fine"])
    path.write_text(path.read_text() + '{"text": 3}\n')
    cache = tmp_path / "cache"
    with pytest.raises(ConfigError, match=r"d.jsonl, line 2: expected an object with text in 'text'"):
        prepare(SourceSpec(str(path), name="s"), BYTES, cache)
    assert not list(cache.iterdir())
    write_jsonl(path, ["fine"])
    final = prepare(SourceSpec(str(path), name="s"), BYTES, cache)
    shutil.rmtree(final)
    partial = cache / f".partial-{final.name}-{tokenfile.socket.gethostname()}-{2**22 + os.getpid()}"  # no such process
    partial.mkdir()
    assert prepare(SourceSpec(str(path), name="s"), BYTES, cache) == final
    assert list(cache.iterdir()) == [final]


def test_a_full_disk_is_a_config_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenfile.TokenWriter, "append", full)
    with pytest.raises(ConfigError, match=r"data\.cache: cannot create .*No space left on device"):
        prepare(SourceSpec(str(write_jsonl(tmp_path / "d.jsonl", ["text"]))), BYTES, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "contains no text"),
        (b"{not json}\n", "line 1: not JSON"),
        (b'{"text": "caf\xe9"}\n', "not UTF-8"),
    ],
)
def test_invalid_jsonl_is_a_config_error(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        prepare(SourceSpec(str(tmp_path / "d.jsonl")), BYTES, tmp_path / "cache")


def test_a_missing_source_is_a_config_error(tmp_path: Path) -> None:
    for path, message in (("none.txt", "No such file"), ("*.txt", "has no files"), (".", "has no file")):
        with pytest.raises(ConfigError, match=message):
            prepare(SourceSpec(str(tmp_path / path)), BYTES, tmp_path / "cache")
    (tmp_path / "file").write_text("text")
    with pytest.raises(ConfigError, match=r"data\.cache: cannot write"):
        prepare(SourceSpec(str(tmp_path / "file")), BYTES, tmp_path / "file")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": []}, "at least one source"),
        ({"source": ["a", "a"]}, "must be different"),
    ],
)
def test_invalid_settings_are_config_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CorpusSettings(**settings)
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="weight must be positive"):
            SourceSpec("a", weight=weight)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a prepared folder whose tokens are several blocks long."""
    folder = tmp_path_factory.mktemp("sound")
    path = folder / "d.txt"
    path.write_text("".join(f"line {n}\n" for n in range(100_000)), encoding="utf-8")
    return prepare(SourceSpec(str(path)), BYTES, folder)


NAMES = ["tokens.bin", "offsets.bin", "counts.bin", "meta.json", "tokenizer/tokenizer.json"]


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_is_an_error_that_names_it(name: str, sound: Path, tmp_path: Path) -> None:
    data = (sound / name).read_bytes()
    middle = len(data) * 2 // 3
    flipped = data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]
    for number, damaged in enumerate((flipped, data[:-2], data + b"\0", None)):
        folder = tmp_path / str(number)
        shutil.copytree(sound, folder)
        if damaged is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(damaged)
        error = ConfigError if name == "meta.json" and damaged is None else CorruptFile
        with pytest.raises(error, match=name.replace(".", r"\.")):
            open_tokens(folder)


def test_a_block_is_verified_when_it_is_first_read(sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(sound, folder)
    data = bytearray((folder / "tokens.bin").read_bytes())
    assert len(data) > tokenfile.BLOCK
    data[tokenfile.BLOCK + 5] ^= 1
    (folder / "tokens.bin").write_bytes(data)
    file = open_tokens(folder, "touched")
    first = tokenfile.BLOCK // file.tokens.itemsize
    assert file.read(0, first).tolist() == open_tokens(sound).read(0, first).tolist()
    for _ in range(2):
        with pytest.raises(CorruptFile, match=f"tokens.bin is altered: bytes from {tokenfile.BLOCK} on"):
            file.read(first - 1, first + 1)


def test_another_format_version_is_rejected(sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(sound, folder)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "version": 99}))
    with pytest.raises(ConfigError, match="version 99; this moe_comm reads 1"):
        open_tokens(folder)


def test_describe_reports_sizes(sound: Path) -> None:
    description = describe(sound)
    assert (description.documents, description.dtype, description.vocab_size) == (1, "uint16", 257)
    assert description.tokens == description.text_bytes + 1 == description.longest_document
    assert description.used_ids == len(set("line 0123456789\n")) + 1
    assert ("documents", f"1, the longest {description.tokens:,} tokens") in description.lines()


def test_threads_may_read_one_file(sound: Path) -> None:
    file = open_tokens(sound, "touched")
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda start: file.read(start, start + 1000), range(0, len(file) - 1000, 1000)))
    assert BYTES.decode(np.concatenate(parts).tolist()).startswith("line 0\nline 1\n")
