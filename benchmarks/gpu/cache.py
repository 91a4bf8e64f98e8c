"""Compiled kernels in one archive, so that a call on another machine with the same software does not compile again.

The archive has the native core with the hash that it was built from, and Triton's cache. Triton ignores entries that
another Triton or another Python wrote.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

from benchmarks.gpu.sources import ROOT

TRITON_CACHE = ROOT / "build" / "triton-cache"
"""Folder of Triton's cache in all parts."""


def restore(archive: Path, root: Path = ROOT) -> None:
    """Unpack ``archive`` into the tree, if it exists."""
    if archive.exists():
        with tarfile.open(archive) as packed:
            packed.extractall(root, filter="data")


def store(archive: Path, root: Path = ROOT) -> None:
    """Replace ``archive`` by one of the compiled kernels in the tree."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    fresh = archive.with_name(archive.name + ".new")
    with tarfile.open(fresh, "w:gz", compresslevel=3) as packed:
        for path in [*sorted((root / "moe_comm").glob("_C.*")), root / TRITON_CACHE.relative_to(ROOT)]:
            if path.exists() and path.suffix != ".pyi":
                packed.add(path, str(path.relative_to(root)))
    fresh.replace(archive)
