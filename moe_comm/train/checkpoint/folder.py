"""The folder of a run's checkpoints: search for complete ones, publishing, and deletion of old ones.

    checkpoints/
        step-00000100/
            rank-00000.safetensors    parts of global tensors, one file per rank
            rank-00001.safetensors
            metadata.json             location of each part of each tensor; step, sampler, mapping and so on
            manifest.json             size and SHA-256 of each file above
            COMPLETE                  SHA-256 of manifest.json, and the sequence number of this save; written last
        step-00000200.partial/        in progress, or left by a crash: never read

A checkpoint is written to ``.partial``, which is renamed when all files are synced. The newest checkpoint is the one
that was saved last. It does not have the highest step if a run was resumed from an earlier one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from moe_comm.errors import CheckpointError
from moe_comm.runtime.safe_files import open_own_folder, remove, sync_to_disk
from moe_comm.runtime.untrusted import read_bounded, shown
from moe_comm.train.checkpoint.files import FileDigest, parse_json, sha256, write_json

METADATA, MANIFEST, COMPLETE = "metadata.json", "manifest.json", "COMPLETE"
VERSION = 1
"""Version of the format. Readers reject later ones."""
MARKER_BYTES = 1 << 16
"""Maximum size of COMPLETE."""
MAX_STEP = MAX_SEQUENCE = (1 << 63) - 1
"""Largest step and sequence number that readers accept."""
_STEP = re.compile(r"step-([0-9]{8,})(\.replaced)?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_log = logging.getLogger(__name__)


class OtherVersion(CheckpointError):
    """The checkpoint has another version of the format."""


@dataclass(frozen=True)
class Marker:
    """The content of COMPLETE: SHA-256 of the manifest, and the number of the save in its folder, from 1."""

    manifest: str
    sequence: int

    @property
    def check(self) -> str:
        """SHA-256 of the marker."""
        return sha256(f"{VERSION} {self.manifest} {self.sequence}".encode())


@dataclass(frozen=True)
class CompleteCheckpoint:
    """A complete checkpoint in a folder."""

    path: Path
    step: int
    sequence: int


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def partial_path(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of ``step`` while it is written."""
    return folder / f"step-{step:08d}.partial"


def latest(folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint of a folder, or None if there is none or no such folder.

    Raises:
        CheckpointError: a completion marker is damaged, or the folder or one of its checkpoints cannot be read, so the
            newest checkpoint is unknown.
    """
    checkpoints = complete_checkpoints(Path(folder), lenient=False)
    return checkpoints[-1].path if checkpoints else None


def complete_checkpoints(folder: Path, *, lenient: bool) -> list[CompleteCheckpoint]:
    """Return the complete checkpoints of a folder, in the order of their saves.

    If ``lenient``, skip checkpoints with a damaged marker, or that cannot be read, instead of raising.
    """
    checkpoints: dict[int, CompleteCheckpoint] = {}
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"the checkpoints in {folder} cannot be read: {error.strerror or error}") from None
    for name in names:
        match = _STEP.fullmatch(name)
        if match is None:
            continue
        step = int(match[1])
        try:
            if not (folder / name / COMPLETE).exists():
                continue
            marker = read_marker(folder / name)
        except CheckpointError:
            if lenient:
                continue
            raise
        except OSError as error:
            if lenient:
                continue
            raise CheckpointError(f"{folder / name} cannot be read: {error.strerror or error}") from None
        # "step-1.replaced" is the old checkpoint while a second save of step 1 is published. It only counts if the
        # new "step-1" is not in place yet. "step-1" sorts first, so setdefault prefers it.
        checkpoints.setdefault(step, CompleteCheckpoint(folder / name, step, marker.sequence))
    return sorted(checkpoints.values(), key=lambda checkpoint: (checkpoint.sequence, checkpoint.step))


def read_marker(path: Path) -> Marker:
    """Return the completion marker of the checkpoint at ``path``."""
    what = f"{COMPLETE} of {path}"
    try:
        content = read_bounded(path / COMPLETE, MARKER_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{what} is missing: this is not a checkpoint, or it is incomplete") from None
    except OSError as error:
        raise CheckpointError(f"{what} cannot be read: {error.strerror or error}") from None
    value = parse_json(content, what)
    version, manifest, sequence = (value.get(key) for key in ("version", "manifest", "sequence"))
    if version is not None and version != VERSION and not (isinstance(version, int) and version < VERSION):
        raise OtherVersion(f"{what} has version {shown(version, 40)}; this library reads up to {VERSION}: update it")
    if version != VERSION or not isinstance(manifest, str) or not _SHA256.fullmatch(manifest):
        raise CheckpointError(f"{what} is damaged: it has no sha256 of {MANIFEST}")
    if isinstance(sequence, bool) or not isinstance(sequence, int) or not 0 < sequence <= MAX_SEQUENCE:
        raise CheckpointError(f"{what} is damaged: it has no sequence number")
    marker = Marker(manifest, sequence)
    if value.get("check") != marker.check:
        raise CheckpointError(f"{what} is damaged: its sha256 differs")
    return marker


def create_partial(folder: Path, step: int) -> Path:
    """Create an empty folder for the checkpoint of ``step``. Files left by a crash are removed."""
    path = partial_path(folder, step)
    remove(path)
    path.mkdir(parents=True)
    return path


def check_version(folder: Path, step: int) -> None:
    """Check that a save of ``step`` would not replace a checkpoint of another version of the format."""
    path = step_path(folder, step)
    for saved in (path, _replaced(path)):
        try:
            read_marker(saved)
        except OtherVersion as error:
            raise CheckpointError(f"{error}, or save to another folder") from None
        except CheckpointError:
            pass  # none, or a damaged one


def complete(folder: Path, step: int, files: dict[str, FileDigest]) -> Path:
    """Complete the files in the ``.partial`` folder of ``step`` with manifest and marker, and return the folder."""
    partial = partial_path(folder, step)
    listed = {name: {"size": digest.size, "sha256": digest.sha256} for name, digest in sorted(files.items())}
    manifest = write_json(partial / MANIFEST, {"version": VERSION, "files": listed})
    sync_to_disk(partial)
    sequence = max((saved.sequence for saved in complete_checkpoints(folder, lenient=True)), default=0) + 1
    if sequence > MAX_SEQUENCE:
        raise CheckpointError(f"a checkpoint in {folder} has sequence number {sequence - 1}, after which there is none")
    marker = Marker(manifest.sha256, sequence)
    write_json(
        partial / COMPLETE,
        {"version": VERSION, "manifest": marker.manifest, "sequence": marker.sequence, "check": marker.check},
    )
    sync_to_disk(partial)
    return partial


def publish(folder: Path, step: int) -> Path:
    """Make the complete ``.partial`` folder of ``step`` the newest checkpoint."""
    partial, path = partial_path(folder, step), step_path(folder, step)
    old = _replaced(path)
    if (path / COMPLETE).exists():
        # A rename cannot replace a non-empty folder. Between the two renames, `latest` returns the old checkpoint.
        _remove(old)
        os.rename(path, old)
    else:
        remove(path)
    os.rename(partial, path)
    sync_to_disk(folder)
    _remove(old)
    return path


def prune(folder: Path, keep: int) -> None:
    """Delete all but the ``keep`` newest complete checkpoints, and folders left by crashes. Never raises.

    If a checkpoint is a link, for example to one of another run, only the link is deleted.
    """
    try:
        checkpoints = complete_checkpoints(folder, lenient=True)
        names = {entry.name for entry in folder.iterdir()}
        leftover = [name for name in names if re.fullmatch(r"step-[0-9]{8,}\.partial", name)]
        # A folder that a second save of a step has replaced, if a crash prevented its deletion.
        leftover += [f"{saved.path.name}.replaced" for saved in checkpoints if f"{saved.path.name}.replaced" in names]
        for path in (*(saved.path for saved in checkpoints[:-keep]), *(folder / name for name in sorted(leftover))):
            _remove(path)
    except (OSError, CheckpointError) as error:
        _log.warning("an old checkpoint could not be deleted: %s", error)


def discard(folder: Path, step: int) -> None:
    """Delete an incomplete checkpoint. Never raises."""
    with contextlib.suppress(OSError):
        remove(partial_path(folder, step))


def _replaced(path: Path) -> Path:
    """Return the name of the old checkpoint at ``path`` while a new one replaces it."""
    return path.with_name(path.name + ".replaced")


def _remove(path: Path) -> None:
    """Delete a checkpoint. Its marker goes first, so a partly deleted checkpoint is not complete."""
    handle = None
    with contextlib.suppress(OSError):  # no such folder, or a link
        handle = open_own_folder(path)
    if handle is not None:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(COMPLETE, dir_fd=handle)
        finally:
            os.close(handle)
    remove(path)
