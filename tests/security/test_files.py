"""Untrusted files are data: they cannot run code, make the library read other files, or block a read for ever."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm.errors import CheckpointError, ConfigError, CorruptFile
from moe_comm.runtime.untrusted import DEEPEST, open_regular, parse_object, read_bounded, shown
from moe_comm.train.checkpoint import Checkpointer, CheckpointReader, Entry, latest, load
from moe_comm.train.config import load as load_config
from moe_comm.train.data import open_tokens
from tests.fuzz import targets
from tests.fuzz.targets import TARGETS

_events: list[str] | None = None
_RUNS_CODE = {"pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"}


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _events is not None and event in _RUNS_CODE:
        _events.append(event)


sys.addaudithook(_audit)


@pytest.fixture
def events() -> Iterator[list[str]]:
    """Yield the audit events, during the test, of operations by which a file could run code."""
    global _events
    _events = []
    yield _events
    _events = None


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_the_pickle_bomb_works_and_its_audit_event_is_recorded(tmp_path: Path, events: list[str]) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "boom")))
    assert (tmp_path / "boom").is_dir() and "pickle.find_class" in events


@pytest.mark.parametrize("name", ["COMPLETE", "manifest.json", "metadata.json", "rank-00000.safetensors", ".metadata"])
@pytest.mark.parametrize("signed", [True, False])
def test_a_pickle_in_any_file_of_a_checkpoint_is_never_run(
    name: str, signed: bool, tmp_path: Path, events: list[str]
) -> None:
    """``signed``: all checksums are corrected, so that only the format itself protects against the pickle."""
    bombs = [pickle.dumps(Bomb(tmp_path / "boom"))]
    torch.save({"a": Bomb(tmp_path / "boom")}, tmp_path / "torch")
    bombs.append((tmp_path / "torch").read_bytes())
    for bomb in bombs:
        path = targets._sign({name: bomb} if signed else {}, bomb if signed and name == "manifest.json" else None)
        if not signed or name in ("COMPLETE", ".metadata"):
            (path / name).write_bytes(bomb)
        try:
            reader = CheckpointReader(path)
            for tensor in reader.names:
                reader.read(tensor)
            load(path, {"model/a": Entry.whole(torch.zeros(2, 3))}, allow_unused=True)
            loaded = True
        except CheckpointError:
            loaded = False
        # Torch's own file is never read. Any bytes are valid tensor data if there are enough of them.
        is_data = signed and name == "rank-00000.safetensors" and len(bomb) >= len(targets._original(name))
        assert loaded == (name == ".metadata" or is_data)
        (path / name).unlink()
    assert not (tmp_path / "boom").exists()
    assert "pickle.find_class" not in events


def test_no_fuzz_target_runs_code_of_a_file(events: list[str]) -> None:
    for target in TARGETS.values():
        if not target.needs or importlib.util.find_spec(target.needs):
            for content in (*target.seeds(), *(path.read_bytes() for path in target.corpus_files[:5])):
                target.run(content)
    assert not events


@pytest.mark.parametrize("path", TARGETS["checkpoint_metadata"].corpus_files, ids=lambda path: path.name)
def test_an_inconsistent_checkpoint_is_refused_before_a_tensor_is_read(path: Path) -> None:
    signed = targets._sign({"metadata.json": path.read_bytes()})
    if path.name.startswith("empty-tensor-of-endless"):  # consistent: the tensor has no elements
        assert CheckpointReader(signed).read("model/a").numel() == 0
        return
    with pytest.raises(CheckpointError, match=r"metadata.json of .* damaged"):
        CheckpointReader(signed)


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_terabyte(path: Path) -> None:
    os.truncate(path, 1 << 40)


def as_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


STRANGE = [as_pipe, as_folder, as_terabyte, as_device]


@pytest.mark.parametrize("make", STRANGE)
@pytest.mark.parametrize("name", ["COMPLETE", "manifest.json", "metadata.json", "rank-00000.safetensors"])
def test_a_checkpoint_file_that_is_not_regular_or_too_large_is_refused(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": Entry.whole(torch.ones(3))})
    make(tmp_path / "step-00000001" / name)
    with pytest.raises(CheckpointError, match=name):
        CheckpointReader(tmp_path / "step-00000001").verify()
    if name == "COMPLETE":
        with pytest.raises(CheckpointError, match=name):
            latest(tmp_path)


@pytest.mark.parametrize("make", STRANGE)
@pytest.mark.parametrize("name", ["meta.json", "tokens.bin", "offsets.bin", "counts.bin", "tokenizer/tokenizer.json"])
def test_a_token_file_that_is_not_regular_or_too_large_is_refused(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    targets.tokens_meta(targets._token_original("meta.json"))
    for file in ("meta.json", "tokens.bin", "offsets.bin", "counts.bin", "tokenizer/tokenizer.json"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(targets._token_original(file))
    open_tokens(tmp_path)
    make(tmp_path / name)
    with pytest.raises((CorruptFile, ConfigError), match=Path(name).name):
        open_tokens(tmp_path)


@pytest.mark.parametrize("make", STRANGE)
def test_a_configuration_file_that_is_not_regular_or_too_large_is_refused(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "a.toml"
    path.write_text("")
    make(path)
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_config(path)


def test_a_state_that_could_not_be_loaded_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(DEEPEST):
        deep = [deep]
    with Checkpointer(tmp_path) as checkpointer:
        for state in ({"a": deep}, {1: "one", "1": "another"}, {"a": float("nan")}):
            checkpointer.save(1, {"a": Entry.whole(torch.ones(1))}, state=state)
            with pytest.raises(CheckpointError, match="must be valid JSON"):
                checkpointer.wait()
        checkpointer.save(2, {"a": Entry.whole(torch.ones(1))}, state={"a": deep[0][0][0]})
        checkpointer.wait()
    assert CheckpointReader(latest(tmp_path) or "").state == {"a": deep[0][0][0]}


def test_export_refuses_a_checkpoint_that_moe_comm_train_did_not_write(tmp_path: Path) -> None:
    export = pytest.importorskip("moe_comm.train.loop.export", reason="needs the hf extra")
    with pytest.raises(CheckpointError, match="is not a checkpoint of moe-comm train: KeyError"):
        export.export_checkpoint(targets._sign({}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_strict_json_refuses_duplicate_keys_nan_and_deep_nesting() -> None:
    value = {"a": [1, -2.5e300, None, True, "é\n"], "": {"b": {}}, "n": 10**400}
    assert parse_object(json.dumps(value)) == value
    for bad in ('{"a": 1, "a": 1}', '{"a": NaN}', '{"a": 1e999}', "[]", "1", "", "{", '{"\\ud800": 1}', "\ufeff{}"):
        with pytest.raises(ValueError, match=r".+"):
            parse_object(bad)
    inside = "[" * DEEPEST + "]" * DEEPEST
    with pytest.raises(ValueError, match="deep"):
        parse_object(f'{{"a": {inside}}}')
    assert parse_object(f'{{"a": {inside[1:-1]}}}')


def test_read_bounded_refuses_files_above_the_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bounded(tmp_path / "a", 5) == b"12345"
    for limit, name in ((4, "a"), (9, "."), (9, "none")):
        with pytest.raises(OSError, match=r".+"):
            read_bounded(tmp_path / name, limit)
    os.close(open_regular(tmp_path / "a"))


def test_shown_gives_a_short_text_for_any_value() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "a list too large to show"
    assert shown(1 << 50_000) == "a int too large to show"
    assert shown("\ud800") == "'\\ud800'"
    assert len(shown("x" * 10_000)) < 300
