"""The folder of a run's checkpoints: which are complete, which is the newest, which may go.

    checkpoints/
        step-00000100/
            rank-00000.safetensors    parts of global tensors, a file a rank
            rank-00001.safetensors
            metadata.json             which part of which tensor is where; step, sampler, mapping and so on
            manifest.json             size and SHA-256 of every file above
            COMPLETE                  SHA-256 of manifest.json, and the number of this save; written last
        step-00000200.partial/        being written, or left behind by a crash: never looked at

A checkpoint is written to ``.partial`` and renamed when everything in it is on the disk. The newest is the one that was
saved last, which is not the highest step where a run went back to an earlier one.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from moe_comm.errors import CheckpointError
from moe_comm.runtime.untrusted import read_bounded
from moe_comm.train.checkpoint.files import Digest, parse_json, sha256, sync_folder, write_json

METADATA, MANIFEST, COMPLETE = "metadata.json", "manifest.json", "COMPLETE"
VERSION = 1
"""Of the format; a reader refuses a later one."""
MARKER_BYTES = 1 << 16
"""COMPLETE is never longer."""
_STEP = re.compile(r"step-(\d{8,})(\.replaced)?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Marker:
    """The content of COMPLETE: sequence numbers the saves of one folder, from 1."""

    manifest: str
    sequence: int

    @property
    def check(self) -> str:
        """SHA-256 of the marker itself."""
        return sha256(f"{VERSION} {self.manifest} {self.sequence}".encode())


@dataclass(frozen=True)
class Complete:
    """A finished checkpoint in a folder."""

    path: Path
    step: int
    sequence: int


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def partial_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is while it is being written."""
    return folder / f"step-{step:08d}.partial"


def latest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint of a folder; None where there is none, or no such folder.

    Raises:
        CheckpointError: a completion marker is damaged, so that it is not known which is the newest.
    """
    found = complete(Path(folder), lenient=False)
    return found[-1].path if found else None


def complete(folder: Path, *, lenient: bool) -> list[Complete]:
    """The finished checkpoints of a folder, the oldest first.

    Args:
        lenient: leave out one whose marker is damaged, rather than raise.
    """
    found: dict[int, Complete] = {}
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except FileNotFoundError:
        return []
    for name in names:
        match = _STEP.fullmatch(name)
        if match is None or not (folder / name / COMPLETE).exists():
            continue
        step = int(match[1])
        try:
            marker = read_marker(folder / name)
        except CheckpointError:
            if lenient:
                continue
            raise
        # Of a step that was saved twice the old one is only there between two renames; "step-1" sorts before it.
        found.setdefault(step, Complete(folder / name, step, marker.sequence))
    return sorted(found.values(), key=lambda one: (one.sequence, one.step))


def read_marker(path: Path) -> Marker:
    """The completion marker of the checkpoint at ``path``.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    what = f"{COMPLETE} of {path}"
    try:
        content = read_bounded(path / COMPLETE, MARKER_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{what} is missing: this is no checkpoint, or one that was not finished") from None
    except OSError as error:
        raise CheckpointError(f"{what} cannot be read: {error.strerror or error}") from None
    value = parse_json(content, what)
    version, manifest, sequence = (value.get(key) for key in ("version", "manifest", "sequence"))
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(f"{what} says format {version}; this library reads up to {VERSION}: update it")
    if version != VERSION or not isinstance(manifest, str) or not _SHA256.fullmatch(manifest):
        raise CheckpointError(f"{what} is damaged: no sha256 of {MANIFEST}")
    if isinstance(sequence, bool) or not isinstance(sequence, int) or sequence < 1:
        raise CheckpointError(f"{what} is damaged: no number of the save")
    marker = Marker(manifest, sequence)
    if value.get("check") != marker.check:
        raise CheckpointError(f"{what} is damaged: its sha256 differs")
    return marker


def begin(folder: Path, step: int) -> Path:
    """An empty folder for the checkpoint of ``step``; what a crash left there is removed."""
    path = partial_path(folder, step)
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


def publish(folder: Path, step: int, files: dict[str, Digest]) -> Path:
    """Make the files in the ``.partial`` folder of ``step`` the newest checkpoint.

    Raises:
        OSError: as the system has it; the earlier checkpoints are as they were.
    """
    fresh, path = partial_path(folder, step), step_path(folder, step)
    listed = {name: {"size": digest.size, "sha256": digest.sha256} for name, digest in sorted(files.items())}
    manifest = write_json(fresh / MANIFEST, {"version": VERSION, "files": listed})
    sync_folder(fresh)
    sequence = max((one.sequence for one in complete(folder, lenient=True)), default=0) + 1
    marker = Marker(manifest.sha256, sequence)
    write_json(
        fresh / COMPLETE,
        {"version": VERSION, "manifest": marker.manifest, "sequence": marker.sequence, "check": marker.check},
    )
    sync_folder(fresh)
    old = path.with_name(path.name + ".replaced")
    if (path / COMPLETE).exists():
        # A rename cannot replace a folder that holds something. Between the two renames `latest` finds the old one.
        _remove(old)
        os.rename(path, old)
    elif path.exists():
        shutil.rmtree(path)
    os.rename(fresh, path)
    sync_folder(folder)
    _remove(old)
    return path


def prune(folder: Path, keep: int) -> None:
    """Delete all but the ``keep`` newest complete checkpoints, and what crashes left behind. Never raises."""
    try:
        found = complete(folder, lenient=True)
        names = {entry.name for entry in folder.iterdir()}
        gone = [name for name in names if re.fullmatch(r"step-\d{8,}\.partial", name)]
        # The folder that a second save of a step replaced, where a crash came before its deletion.
        gone += [f"{one.path.name}.replaced" for one in found if f"{one.path.name}.replaced" in names]
        for path in (*(one.path for one in found[:-keep]), *(folder / name for name in sorted(gone))):
            _remove(path)
    except OSError as error:
        _log.warning("an old checkpoint could not be deleted: %s", error)


def discard(folder: Path, step: int) -> None:
    """Free the space of a checkpoint that could not be finished. Never raises."""
    shutil.rmtree(partial_path(folder, step), ignore_errors=True)


def _remove(path: Path) -> None:
    """Delete a checkpoint; one that is half deleted is not complete."""
    if path.exists():
        (path / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(path)
