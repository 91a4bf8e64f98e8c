from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_comm.runtime.memory_server import start_ticks
from moe_comm.runtime.persistent_memory import LauncherProcess
from tests.pool import RankPool
from tests.train.common import write_text


@pytest.fixture(scope="package")
def pool2() -> Iterator[RankPool]:
    """Yield two ranks, shared by all training tests, because importing transformers dominates their start."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="package")
def pool4() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="package")
def shared_settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return settings of tiny runs on one text, whose tokens are prepared once."""
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def settings(shared_settings: list[str], tmp_path: Path) -> list[str]:
    """Return the same settings with a separate folder of runs for the test."""
    return [*shared_settings, f"run.folder={tmp_path / 'runs'}"]


@pytest.fixture
def owner() -> Iterator[LauncherProcess]:
    """Yield a process that acts as the launcher; its snapshots are released when it exits."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield LauncherProcess(process.pid, start_ticks(process.pid))
    finally:
        process.kill()
        process.communicate()
