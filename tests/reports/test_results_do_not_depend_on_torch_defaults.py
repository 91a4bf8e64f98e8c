"""The bits of every result are the same under other defaults of torch for the dtype and the device of new tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dispatch import cases, workers
from tests.dispatch.workers import Job, Result
from tests.pool import RankPool
from tests.support.torch_defaults import OTHER_DEFAULTS, TorchDefaults, run_under

BACKENDS = ("all_to_all", "all_gather", "shared_memory", "hierarchical", "peer_to_peer")
ids = [str(defaults.dtype) for defaults in OTHER_DEFAULTS]


def same(actual: Any, expected: Any) -> bool:
    """Return whether two nested results have the same bits."""
    if isinstance(expected, Tensor):
        same_kind = actual.dtype == expected.dtype and actual.device == expected.device
        return same_kind and torch.equal(actual, expected)
    if isinstance(expected, dict):
        return list(actual) == list(expected) and all(same(actual[name], expected[name]) for name in expected)
    if isinstance(expected, list | tuple):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    if dataclasses.is_dataclass(expected):
        return all(same(getattr(actual, f.name), getattr(expected, f.name)) for f in dataclasses.fields(expected))
    return bool(actual == expected)


@pytest.fixture(scope="module")
def usual(pool2: RankPool) -> dict[str, list[dict[str, Result | str]]]:
    """The results of each backend under torch's usual defaults."""
    return {backend: pool2.run(workers.run_cases, Job(backend), timeout=120) for backend in BACKENDS}


@pytest.mark.parametrize("defaults", OTHER_DEFAULTS, ids=ids)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend(backend: str, defaults: TorchDefaults, pool2: RankPool, usual) -> None:  # type: ignore[no-untyped-def]
    ranks = pool2.run(run_under, (defaults, workers.run_cases, Job(backend)), timeout=120)
    for actual, expected in zip(ranks, usual[backend], strict=True):
        for case in cases.CASES:
            assert same(actual.get(case.name), expected[case.name]), actual.get(case.name)
