"""Without ``moe_comm._C``, features in docs/reference/install.md work in plain torch, and others name what to build."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_comm
from tests.pool import RankPool

SOURCE = Path(moe_comm.__file__).parent


def results(rank: int, world: int, has_core: bool) -> list[dict[str, Any]]:
    """Return the results of layers and swaps alone and over all ranks.

    Without ``has_core``, the import of the native core fails, as if it were not built.
    """
    if not has_core:
        assert "moe_comm.runtime.events" not in sys.modules
        sys.modules["moe_comm._C"] = None  # type: ignore[assignment]
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        from moe_comm.runtime.events import EVENTS  # noqa: F401  warns on import
    from moe_comm.kernels.native import core

    assert (core() is not None) == has_core
    texts = [str(one.message) for one in recorded if "native core" in str(one.message)]
    assert len(texts) == (0 if has_core else 1) and all("pip install -e ." in text for text in texts), texts
    return [results_of_group(group, rank) for group in (dist.new_group([rank], use_local_synchronization=True), None)]


def results_of_group(alone: dist.ProcessGroup | None, rank: int) -> dict[str, Any]:
    """Return what can be compared with and without the core. ``alone``: a group of this rank; None: all ranks."""
    from transformers import MixtralConfig, MixtralForCausalLM

    from moe_comm import MoEConfig, MoELayer, RouterConfig, check_grads, make_dispatcher, swap_moe

    group = alone or dist.group.WORLD
    config = MoEConfig(16, 24, RouterConfig(6, 2, balance_loss=0.1), shared_ffn=8)
    layer = MoELayer.build(config, group, backend="all_to_all", seed=3)
    x_TD = torch.randn(7 + rank, 16, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    y_TD = layer(x_TD)
    y_TD.square().sum().backward()
    results = {f"gradient of {name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    results |= {"y": y_TD.detach(), "gradient of x": x_TD.grad}
    assert check_grads(layer).ok
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=32, num_hidden_layers=1, num_local_experts=4, **size))
    model = swap_moe(model, group, backend="all_to_all")
    ids = torch.arange(6).view(1, 6) + rank
    loss = model(ids, labels=ids).loss
    loss.backward()
    results |= {"loss": loss.detach(), "gradient of the head": model.lm_head.weight.grad}
    rows_RD = make_dispatcher(2, group).dispatch(torch.arange(6.0).view(3, 2), torch.tensor([[1], [0], [-1]])).rows_RD
    return results | {"rows": rows_RD, "backend": MoELayer.build(config, group, seed=3).dispatcher.name}


def refusal(rank: int, world: int, arg: object) -> str:
    from moe_comm import make_dispatcher
    from moe_comm.errors import ConfigError, MissingDependency

    with pytest.raises((ConfigError, MissingDependency)) as caught:
        make_dispatcher(6, dist.group.WORLD, backend="shared_memory")
    return str(caught.value)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the package without its native core."""
    folder = tmp_path_factory.mktemp("plain")
    for name in ("moe_comm", "moe_plan"):
        shutil.copytree(SOURCE.parent / name, folder / name, ignore=shutil.ignore_patterns("_C.*"))
    return folder


def run(path: Path, arguments: list[str]) -> str:
    """Return the output of a successful run with the package in ``path``."""
    environment = os.environ | {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    process = subprocess.run(
        command, cwd=path, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout + process.stderr


def test_layers_and_swaps_compute_what_the_native_core_does(pool2: RankPool) -> None:
    pytest.importorskip("moe_comm._C", reason="the native core is not built")
    pytest.importorskip("transformers", minversion="5.23", reason="needs the hf extra")
    with RankPool(2, bare=True) as pool:
        without_core = pool.run(results, False)
        for text in pool.run(refusal):
            assert "not built on every rank; run `pip install -e .`, or use 'all_to_all'" in text
    for got_of_rank, expected_of_rank in zip(without_core, pool2.run(results, True), strict=True):
        for ranks, (got, expected) in enumerate(zip(got_of_rank, expected_of_rank, strict=True), 1):
            assert got.pop("backend") in (("local",) if ranks == 1 else ("all_to_all", "all_gather"))
            del expected["backend"]
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_the_doctor_names_what_to_build_and_reports_nothing_broken(plain: Path) -> None:
    output = " ".join(run(plain, ["-m", "moe_comm", "doctor"]).split())
    assert (
        "moe_comm._C: plain torch replaces it, is slower, and gives a row other bits in other batches; to build it: pip"
        in output
    )


@pytest.mark.slow
def test_a_model_trains_without_the_native_core_and_is_not_watched(plain: Path, tmp_path: Path) -> None:
    pytest.importorskip("pydantic", reason="needs the train extra")
    (tmp_path / "text.txt").write_text("some words about experts\n" * 400)
    settings = [f"data.source={tmp_path / 'text.txt'}", f"data.cache={tmp_path / 'cache'}", "data.seq_len=16"]
    settings += [f"run.folder={tmp_path / 'runs'}", "run.steps=2", "run.sample_tokens=0", "model.layers=1"]
    output = run(plain, ["-m", "moe_comm", "train", "tiny", *settings])
    assert "the ranks are not watched: rank 0 has no native core" in output
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "result.json").read_text())["status"] == "finished"
