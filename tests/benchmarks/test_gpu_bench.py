"""benchmarks/gpu_bench.py: wrong results are rejected."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_bench.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_bench", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_bench", module)  # dataclasses look up the module there
    spec.loader.exec_module(module)
    return module


def test_a_wrong_result_ends_the_run(bench: ModuleType) -> None:
    exact_TD = torch.tensor([[4.0, -1.0]], dtype=torch.float64)
    assert bench.difference("peer_to_peer", exact_TD + 0.0625, exact_TD) == 0.0625
    assert bench.difference("peer_to_peer fp8", exact_TD + 0.25, exact_TD) == 0.25
    for name, wrong in (("peer_to_peer", 0.25), ("peer_to_peer fp8", 0.5), ("peer_to_peer", float("nan"))):
        with pytest.raises(SystemExit, match="differs from the reference"):
            bench.difference(name, exact_TD + wrong, exact_TD)
    rows_RD = torch.ones(2, 2)
    with pytest.raises(SystemExit, match="rows differ"):
        bench.check("peer_to_peer", rows_RD + 1, exact_TD, (rows_RD, exact_TD), 1)
