"""A damaged checkpoint is an error that names the file, on every rank, before any tensor changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm.errors import CheckpointError
from moe_comm.topology import ParallelConfig
from moe_comm.train.checkpoint import Checkpointer, CheckpointReader, Entry, latest, read_tensor
from tests.fuzz import targets
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


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("files", 0), "../../secret"),
        (("state",), []),
        (("ranks",), [1]),
        (("tensors", "model/a", "shape"), [2, -3]),
        (("tensors", "model/a", "dtype"), "O"),
        (("tensors", "model/a", "parts", 0, 1), 1 << 40),
        (("tensors", "model/a", "parts", 0, 2), [1, 1]),
        (("tensors", "model/a", "parts"), []),
    ],
    ids=str,
)
def test_inconsistent_metadata_with_valid_checksums_is_rejected(keys: tuple[Any, ...], value: Any) -> None:
    """tests/security has more of them, and shows that no pickle is read."""
    node = metadata = json.loads(targets._original("metadata.json"))
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    with pytest.raises(CheckpointError, match=r"metadata\.json of .* damaged"):
        CheckpointReader(targets._sign({"metadata.json": json.dumps(metadata).encode()}))


def test_a_newer_format_version_is_refused_with_advice_to_update(tmp_path: Path) -> None:
    (tmp_path / "COMPLETE").write_text('{"version": 2}')
    with pytest.raises(CheckpointError, match=r"COMPLETE of .* version 2.*update"):
        CheckpointReader(tmp_path)


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
