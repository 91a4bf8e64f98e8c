"""Fixtures of all tests: one torch thread, rank pools, reproducible examples, and a check of shared memory leaks.

No test uses the network.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

# huggingface_hub reads it when the first test file imports it. Without it, a test of a model that does not exist tries
# to reach the hub for 23 s.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.pool import RankPool, start_server

SHARED_MEMORY = Path("/dev/shm")
SLOW_CASES = Path(__file__).with_name("slow_cases.txt")
SETTLE_S = 5.0
"""Time in which processes of another test run may map or remove a segment that they created."""
BEFORE: pytest.StashKey[set[str]] = pytest.StashKey()

# No deadline, because an example may take 0.2 s on a busy machine. Each run uses the same examples.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("steady")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of ``SLOW_CASES``."""
    cases = set(SLOW_CASES.read_text().splitlines())
    for item in items:
        if item.nodeid in cases:
            item.add_marker("slow")


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # collections in tests need not visit all modules and test items
    if _is_worker(session.config):  # otherwise a launch in its first file could start the server, with fewer modules
        start_server()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="device of the contract suite")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Return the device chosen on the command line."""
    chosen: str = request.config.getoption("--device")
    if chosen == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return chosen


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    """Yield a pool for each number of ranks. Ranks start when a pool is first used."""
    with ExitStack() as stack:
        yield {world: stack.enter_context(RankPool(world)) for world in (2, 3, 4, 8)}


@pytest.fixture(scope="module")
def pool2(pools: dict[int, RankPool]) -> RankPool:
    return pools[2]


@pytest.fixture(scope="module")
def pool3(pools: dict[int, RankPool]) -> RankPool:
    return pools[3]


@pytest.fixture(scope="module")
def pool4(pools: dict[int, RankPool]) -> RankPool:
    return pools[4]


@pytest.fixture(scope="module")
def pool8(pools: dict[int, RankPool]) -> RankPool:
    return pools[8]


def _segments() -> set[str]:
    return {entry.name for entry in SHARED_MEMORY.glob("*moe_comm*")} if SHARED_MEMORY.is_dir() else set()


def _mapped(names: set[str]) -> set[str]:
    """Return the ``names`` that a running process maps: they belong to another test run and are not leaks."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:  # the process ended, or belongs to another user
            continue
        mapped |= {name for name in names if name in text}
    return mapped


def _is_worker(config: pytest.Config) -> bool:
    """Return whether this is a worker process of pytest-xdist."""
    return hasattr(config, "workerinput")


def pytest_sessionstart(session: pytest.Session) -> None:
    if not _is_worker(session.config):
        session.config.stash[BEFORE] = _segments()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if the tests leave anything in /dev/shm."""
    if _is_worker(session.config):
        return
    end = time.monotonic() + SETTLE_S
    leaked = _segments() - session.config.stash[BEFORE]
    while leaked := (leaked - _mapped(leaked)) & _segments():
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    if leaked:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"\nERROR: left in {SHARED_MEMORY}: {sorted(leaked)}", red=True)
