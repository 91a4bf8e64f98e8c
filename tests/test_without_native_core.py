"""Without ``moe_comm._C``, features in docs/reference/install.md work in plain torch, and others name what to build."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import moe_comm

SOURCE = Path(moe_comm.__file__).parent

# Results of one and of two ranks as exact JSON values, to compare runs with and without the core. The ranks are forked,
# because importing torch and transformers takes most of the time.
LAYER = """
import json, multiprocessing, sys, warnings
with warnings.catch_warnings(record=True) as recorded:
    warnings.simplefilter("always")
    import torch
    import torch.distributed as dist
    from moe_comm import MoEConfig, MoELayer, RouterConfig, check_grads, make_dispatcher, swap_moe
    from moe_comm.errors import ConfigError, MissingDependency
    from moe_comm.kernels.native import core
from transformers import MixtralConfig, MixtralForCausalLM

def work(rank, ranks):
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    record = {"native": core() is not None, "warnings": [str(one.message) for one in recorded]}
    config = MoEConfig(16, 24, RouterConfig(6, 2, balance_loss=0.1), shared_ffn=8)
    layer = MoELayer.build(config, group, backend="all_to_all", seed=3)
    record["backend"] = MoELayer.build(config, group, seed=3).dispatcher.name
    x_TD = torch.randn(7 + rank, 16, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    y_TD = layer(x_TD)
    y_TD.square().sum().backward()
    grads = {name: p.grad.flatten().tolist() for name, p in layer.named_parameters() if p.grad is not None}
    record |= {"y": y_TD.flatten().tolist(), "x": x_TD.grad.flatten().tolist(), "grads": grads}
    record["right"] = check_grads(layer).ok
    torch.manual_seed(0)
    model = swap_moe(MixtralForCausalLM(MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4)), group, backend="all_to_all")
    ids = torch.arange(6).view(1, 6) + rank
    loss = model(ids, labels=ids).loss
    loss.backward()
    record["swapped"] = [loss.item(), *model.lm_head.weight.grad.flatten().tolist()]
    ids_TK = torch.tensor([[1], [0], [-1]])
    record["rows"] = make_dispatcher(2).dispatch(torch.arange(6.0).view(3, 2), ids_TK).rows_RD.tolist()
    record["refused"] = ""
    if group is not None:
        try:
            make_dispatcher(6, group, backend="shared_memory")
        except (ConfigError, MissingDependency) as error:
            record["refused"] = str(error)
        dist.barrier()
    with open(f"{sys.argv[1]}/{ranks}-{rank}.json", "w") as file:
        json.dump(record, file)
    if group is not None:
        dist.destroy_process_group()

for ranks in (1, 2):
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=work, args=(rank, ranks)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a rank failed")
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the package without its native core."""
    folder = tmp_path_factory.mktemp("plain")
    for name in ("moe_comm", "moe_plan"):
        shutil.copytree(SOURCE.parent / name, folder / name, ignore=shutil.ignore_patterns("_C.*", "__pycache__"))
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


def results(path: Path, out: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the results by number of ranks."""
    out.mkdir()
    script = out / "script.py"
    script.write_text(LAYER)
    run(path, [str(script), str(out)])
    return {
        ranks: [json.loads((out / f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)] for ranks in (1, 2)
    }


@pytest.fixture(scope="module")
def both(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the results without and with the native core."""
    pytest.importorskip("moe_comm._C", reason="the native core is not built")
    pytest.importorskip("transformers", minversion="5.23", reason="needs the hf extra")
    folder = tmp_path_factory.mktemp("results")
    return results(plain, folder / "plain"), results(SOURCE.parent, folder / "native")


@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_and_swaps_compute_what_the_native_core_does(
    both: tuple[dict[int, Any], dict[int, Any]], ranks: int
) -> None:
    got, expected = both[0][ranks], both[1][ranks]
    for without_core, with_core in zip(got, expected, strict=True):
        assert (without_core["native"], with_core["native"]) == (False, True)
        assert without_core["backend"] in (("local",) if ranks == 1 else ("all_to_all", "all_gather"))
        assert without_core["right"] and with_core["right"]
        assert without_core["rows"] == with_core["rows"] == [[2, 3], [0, 1]]
        for key in ("y", "x", "swapped"):
            assert without_core[key] == pytest.approx(with_core[key], rel=1e-5, abs=1e-6), key
        assert without_core["grads"].keys() == with_core["grads"].keys()
        for name, values in without_core["grads"].items():
            assert values == pytest.approx(with_core["grads"][name], rel=1e-5, abs=1e-6), name
        recorded = [text for text in without_core["warnings"] if "native core" in text]
        assert len(recorded) == 1 and "pip install -e ." in recorded[0], without_core["warnings"]
        assert not any("native core" in text for text in with_core["warnings"])
        if ranks > 1:
            assert "not built on every rank; run `pip install -e .`, or use 'all_to_all'" in without_core["refused"]


def test_the_doctor_names_what_to_build_and_reports_nothing_broken(plain: Path) -> None:
    output = " ".join(run(plain, ["-m", "moe_comm", "doctor"]).split())
    assert "moe_comm._C: plain torch replaces it, but is slower; to build it: pip install ." in output


def test_a_model_trains_without_the_native_core_and_is_not_watched(plain: Path, tmp_path: Path) -> None:
    pytest.importorskip("pydantic", reason="needs the train extra")
    (tmp_path / "text.txt").write_text("some words about experts\n" * 400)
    settings = [f"data.source={tmp_path / 'text.txt'}", f"data.cache={tmp_path / 'cache'}", "data.seq_len=16"]
    settings += [f"run.folder={tmp_path / 'runs'}", "run.steps=2", "run.sample_tokens=0", "model.layers=1"]
    output = run(plain, ["-m", "moe_comm", "train", "tiny", *settings])
    assert "the ranks are not watched: rank 0 has no native core" in output
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "result.json").read_text())["status"] == "finished"
