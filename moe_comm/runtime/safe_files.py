"""Writing and deletion of files that follow no links, in folders to which others may have written.

A link in a run folder can lead to any file of the user. A file is therefore written under a new random name and
renamed, which replaces a link instead of the file that it leads to. A deletion removes a link itself.

The folder that the caller names may be reached through links. Only the last component of a path is checked.

All functions raise OSError.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_new(path: str | os.PathLike[str], dir_fd: int | None = None) -> BinaryIO:
    """Create a file and open it for writing. ``dir_fd``: the folder of ``path``, if it is open."""
    name = path if dir_fd is None else os.path.basename(path)
    return open(path, "wb", opener=lambda *_: os.open(name, os.O_WRONLY | _NEW, 0o666, dir_fd=dir_fd))


def open_unnamed(folder: str | os.PathLike[str]) -> tuple[int, bool]:
    """Create a file without a name in ``folder``; its space is freed when its descriptor is closed.

    Returns:
        The descriptor, open for reading and writing, and whether I/O bypasses the page cache (``O_DIRECT``). Then
        offsets, sizes and addresses must be multiples of 4096 bytes.
    """
    for direct in (os.O_DIRECT, 0):
        try:
            return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC | direct, 0o600), bool(direct)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR):
                raise
    # A file system without unnamed files: the name exists until the next line only.
    name = Path(folder) / f"{secrets.token_hex(12)}.part"
    handle = os.open(name, os.O_RDWR | _NEW, 0o600)
    name.unlink()
    return handle, False


def file_system(path: str | os.PathLike[str]) -> str:
    """Return the type of the file system of ``path``, such as "ext4"; "" if it is not known."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for fields in map(str.split, mounts):
            if len(fields) > 2 and fields[2] == number and "-" in fields:
                return fields[fields.index("-") + 1]
    return ""


def open_own_folder(path: str | os.PathLike[str]) -> int:
    """Open a folder, for use as ``dir_fd``, and return its descriptor."""
    return os.open(path, _FOLDER)


def make_folders(root: Path, *names: str) -> Path:
    """Create ``root`` and the nested folders ``names`` in it, unless they exist. Return the innermost one."""
    root.mkdir(parents=True, exist_ok=True)
    for name in names:
        root = root / name
        root.mkdir(exist_ok=True)
        os.close(open_own_folder(root))
    return root


def check_replaceable(path: Path) -> None:
    """Raise ``OSError`` if ``path`` is a folder, a device or a pipe, which ``replacing`` does not replace."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    # /dev/stdout is a link to /proc. It may lead to a regular file, but a rename would replace the link.
    if not stat.S_ISREG(mode) or (path.is_symlink() and os.readlink(path).startswith("/proc/")):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))


@contextlib.contextmanager
def replacing(path: Path, sync: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file that replaces ``path`` if the block ends without an error. ``sync`` flushes it to disk first."""
    check_replaceable(path)
    partial = path.with_name(f"{path.name[:40]}.{secrets.token_hex(6)}.part")
    try:
        with open_new(partial) as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_file(path: Path, content: str | bytes, sync: bool = False) -> None:
    """Write a file atomically; see ``replacing``. Text is encoded as UTF-8, and its folder is created."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, sync) as file:
        file.write(data)


def open_to_append(path: Path) -> BinaryIO:
    """Open a regular file for reading and appending, without buffer; create it if there is none."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return os.fdopen(handle, "a+b", buffering=0)


def move_file(source: Path, target: Path) -> None:
    """Move a file of this process over ``target``, which must be replaceable. Atomic on one file system."""
    check_replaceable(target)
    os.replace(source, target)


def sync_to_disk(path: Path) -> None:
    """Write a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Delete a file, a link itself, or a folder with its content, if there is one. Links inside are not followed."""
    try:
        is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if is_folder:
        shutil.rmtree(path)  # it refuses a folder that has been replaced by a link meanwhile
    else:
        path.unlink(missing_ok=True)
