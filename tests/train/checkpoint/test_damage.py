"""A damaged checkpoint is an error that names the file, on every rank, before any tensor changes. No pickle is read."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm.errors import CheckpointError
from moe_comm.topology import ParallelConfig
from moe_comm.train.checkpoint import Checkpointer, CheckpointReader, Entry, latest, load, read_tensor
from tests.pool import RankPool
from tests.train.checkpoint.common import Mapping_, entries_of

MAPPING = Mapping_(ParallelConfig(tp=2, etp=2), "replicate")
FILES = ("rank-00000.safetensors", "rank-00001.safetensors", "metadata.json", "manifest.json", "COMPLETE")


def flip(position: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(position * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


DAMAGES = {
    "first byte": flip(0),
    "middle byte": flip(0.5),
    "last byte": flip(1),
    "truncated": truncate,
    "empty": empty,
    "longer": grow,
    "missing": Path.unlink,
}


def save_one(rank: int, world: int, folder: Path) -> None:
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, entries_of(MAPPING, rank))


def load_each(rank: int, world: int, paths: list[Path]) -> list[str]:
    """Return the error of each load; "" if it succeeded, "changed" if a tensor was changed."""
    texts = []
    with Checkpointer("/nowhere") as checkpointer:
        for path in paths:
            entries = entries_of(MAPPING, rank, fill=False)
            try:
                checkpointer.load(path, entries)
                texts.append("")
            except CheckpointError as error:
                untouched = all(not entry.tensor.any() for entry in entries.values())
                texts.append(str(error) if untouched else "changed")
    return texts


def test_damage_to_any_file_is_reported_on_every_rank_before_a_tensor_changes(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(save_one, tmp_path / "good")
    cases = []
    for file in FILES:
        for kind, damage in DAMAGES.items():
            path = tmp_path / f"{file} {kind}" / "step-00000001"
            shutil.copytree(tmp_path / "good/step-00000001", path)
            damage(path / file)
            cases.append((file, kind, path))
    good = tmp_path / "good/step-00000001"
    first, second = pool2.run(load_each, [path for _, _, path in cases] + [good])
    assert first[-1] == second[-1] == ""
    for (file, kind, _), text, other in zip(cases, first, second, strict=False):
        assert f"{file} of " in text, (file, kind, text)
        assert text == other


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(3, {"a": Entry.whole(torch.arange(6.0).view(2, 3)), "b": Entry.whole(torch.tensor(7))})
    return folder / "step-00000003"


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "metadata.json", "manifest.json", "COMPLETE"])
def test_any_flipped_byte_of_any_file_is_detected(small: Path, tmp_path: Path, file: str) -> None:
    path = tmp_path / "step-00000003"
    shutil.copytree(small, path)
    content = (path / file).read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        (path / file).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=file):
            CheckpointReader(path).verify()


def test_a_file_is_hashed_once_and_before_its_first_tensor_is_read(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "step-00000003"
    shutil.copytree(small, path)
    reader = CheckpointReader(path)
    flip(1)(path / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match="sha256 differs"):
        reader.read("a")
    flip(1)(path / "rank-00000.safetensors")
    assert torch.equal(reader.read("a"), torch.arange(6.0).view(2, 3))
    flip(1)(path / "rank-00000.safetensors")
    reader.read("b")  # the file was verified before
    with pytest.raises(CheckpointError, match="sha256 differs"):
        read_tensor(path, "b")


def test_a_file_truncated_after_it_was_verified_is_an_error(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "step-00000003"
    shutil.copytree(small, path)
    reader = CheckpointReader(path)
    reader.verify()
    empty(path / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors of .* truncated"):
        reader.read("a")


def test_no_pickle_is_read(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler", "_load", "_loads", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    target = torch.zeros(2, 3)
    load(small, {"a": Entry.whole(target)}, allow_unused=True)
    assert torch.equal(target, torch.arange(6.0).view(2, 3))


def rewrite(path: Path, change: Callable[[dict[str, Any]], None], version: int = 1) -> None:
    """Change metadata.json and update all checksums, as an attacker would."""
    metadata = json.loads((path / "metadata.json").read_text())
    change(metadata)
    content = json.dumps(metadata).encode()
    (path / "metadata.json").write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["metadata.json"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    for name in metadata.get("files") or []:
        if isinstance(name, str):
            manifest["files"].setdefault(name, {"size": 1 << 40, "sha256": "0" * 64})
    content = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    check = hashlib.sha256(f"{version} {digest} 1".encode()).hexdigest()
    marker = {"version": version, "manifest": digest, "sequence": 1, "check": check}
    (path / "COMPLETE").write_text(json.dumps(marker))


def setter(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(metadata: Any) -> None:
        for key in keys[:-1]:
            metadata = metadata[key]
        metadata[keys[-1]] = value

    change.__name__ = " ".join(map(str, keys)) + f" = {value}"
    return change


@pytest.mark.parametrize(
    "change",
    [
        setter("files", 0, value="../../secret"),
        setter("tensors", "a", "shape", value=[2, -3]),
        setter("tensors", "a", "shape", value=[1 << 62, 1 << 62]),
        setter("tensors", "a", "dtype", value="O"),
        setter("tensors", "a", "parts", 0, 1, value=1 << 40),
        setter("tensors", "a", "parts", 0, 2, value=[1, 1]),
        setter("tensors", "a", "parts", value=[]),
        setter("state", value=[]),
        setter("ranks", value=[1]),
    ],
)
def test_inconsistent_metadata_with_valid_checksums_is_rejected(
    small: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    path = tmp_path / "step-00000003"
    shutil.copytree(small, path)
    (tmp_path / "secret").write_bytes(b"\0" * 1000)
    rewrite(path, change)
    with pytest.raises(CheckpointError):
        load(path, {"a": Entry.whole(torch.zeros(2, 3)), "b": Entry.whole(torch.tensor(0))})


def test_a_newer_format_version_is_refused_with_advice_to_update(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "step-00000003"
    shutil.copytree(small, path)
    rewrite(path, lambda metadata: None, version=2)
    with pytest.raises(CheckpointError, match=r"COMPLETE of .* version 2.*update"):
        CheckpointReader(path)


def test_with_a_damaged_marker_the_newest_checkpoint_is_unknown(small: Path, tmp_path: Path) -> None:
    shutil.copytree(small, tmp_path / "step-00000003")
    assert latest(tmp_path) == tmp_path / "step-00000003"
    flip(0.5)(tmp_path / "step-00000003/COMPLETE")
    with pytest.raises(CheckpointError, match="COMPLETE of"):
        latest(tmp_path)


def test_a_folder_that_is_not_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"COMPLETE of .* is missing"):
        CheckpointReader(tmp_path)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": Entry.whole(torch.ones(1))})
    with pytest.raises(CheckpointError, match=r"has no tensor 'z'; it has a"):
        read_tensor(tmp_path / "step-00000001", "z")
