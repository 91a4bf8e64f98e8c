"""The planner can be imported without torch, and models the trainer's chunk of logits."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import moe_plan
from moe_comm.layers.parallel.cross_entropy import CHUNK_ELEMENTS
from moe_plan.model.activations import LOGITS_CHUNK


def test_no_module_of_the_planner_loads_torch() -> None:
    names = [module.name for module in pkgutil.walk_packages(moe_plan.__path__, "moe_plan.")]
    assert "moe_plan.search.search" in names
    code = (
        f"import importlib, sys; [importlib.import_module(name) for name in {names}]; "
        "print([name for name in sys.modules if name.partition('.')[0] == 'torch'])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert process.returncode == 0 and process.stdout == "[]\n", process.stderr


def test_the_chunk_of_logits_is_the_trainers() -> None:
    assert LOGITS_CHUNK == CHUNK_ELEMENTS
