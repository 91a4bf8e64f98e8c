"""Limit the processor time of a rank with a cgroup, so that ranks that share cores behave like ranks on slower cores.

4 ranks on 2 cores   without a quota: a rank that waits gives its core to another one, so waiting costs little
                     0.5 cores each:  a rank that waits leaves half a core idle, as on a machine with 4 cores
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moe_comm.errors import ConfigError

PREFIX = "moe_comm-rank-"
SLICE_US = 1000
"""Length of a time slice, the shortest that Linux accepts."""


@contextmanager
def processor_quota(cores: float | None) -> Iterator[None]:
    """Limit all threads of this process to ``cores`` seconds of processor time per second. None: no limit.

    Raises:
        ConfigError: the limit cannot be set: not root, or no cgroup controller of processor time.
    """
    if cores is None:
        yield
        return
    root, version, before = _controller()
    _remove_unused(root)
    group = root / f"{PREFIX}{os.getpid()}"
    period = max(SLICE_US, round(SLICE_US / cores))
    quota = round(period * cores)
    try:
        group.mkdir()
        if version == 1:
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {period}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        raise ConfigError(f"cannot limit this process to {cores:g} cores by a cgroup in {root}: {error}") from error
    try:
        yield
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))
        with suppress(OSError):  # a child process is still in the cgroup; a later call removes the cgroup
            group.rmdir()


def unavailable_reason() -> str:
    """Return why processor time cannot be limited here; empty if it can be."""
    try:
        with processor_quota(1.0):
            return ""
    except ConfigError as error:
        return str(error)


def _controller() -> tuple[Path, int, Path]:
    """Return the root of the cgroups that limit processor time, their version, and the cgroup of this process."""
    cgroups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        root = Path(mount)
        if kind == "cgroup" and "cpu" in options.split(","):
            path = next((path for _, names, path in cgroups if "cpu" in names.split(",")), "/")
            return root, 1, root / path.lstrip("/")
        if kind == "cgroup2" and "cpu" in (root / "cgroup.subtree_control").read_text().split():
            return root, 2, root / next((path for _, names, path in cgroups if not names), "/").lstrip("/")
    raise ConfigError("cannot limit the processor time of ranks: no cgroup controller 'cpu' is mounted")


def _remove_unused(root: Path) -> None:
    """Remove the cgroups of ranks that were killed."""
    for group in root.glob(f"{PREFIX}*"):
        if not Path("/proc", group.name.removeprefix(PREFIX)).exists():
            with suppress(OSError):  # another rank removed it
                group.rmdir()
