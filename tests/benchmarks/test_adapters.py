"""``python -m benchmarks.adapters``: each adapter that is installed returns what the native call returns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_ratios_of_installed_adapters_are_written(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = ["--tokens", "16", "--hidden", "8", "--rounds", "2", "--seconds", "0"]
    command = [sys.executable, "-m", "benchmarks.adapters", *sizes, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    adapters = json.loads(out.read_text())["adapters"]
    assert adapters.keys() == {"deepep", "torchtitan", "megatron"} and adapters["deepep"]["count"] == 2
    for name, found in adapters.items():
        assert found.get("count") == 2 or "pip install" in found["skipped"], name
