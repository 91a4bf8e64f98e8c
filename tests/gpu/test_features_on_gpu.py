"""Swaps of Hugging Face models and training runs on one GPU: the results of the same code on a CPU, or of the unswapped
model."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("pydantic")

from moe_comm.integrations.hugging_face import register, swap_moe
from moe_comm.integrations.hugging_face.attention import swap_attention
from moe_comm.integrations.hugging_face.linears import swap_linears
from moe_comm.runtime.launch import init_ranks
from tests.integrations.models import VOCAB, gradients, new_model, randomise, token_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "qwen2_moe")
TINY = ("run.steps=12", "run.eval_batches=1", "run.sample_tokens=4", "data.seq_len=64", "data.batch=4",
        "model.layers=2", "parallel.ranks=1", "optimizer.warmup=2")  # fmt: skip


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with init_ranks("cuda", timeout_s=60):
        yield dist.group.WORLD


def model_on_gpu(family: str) -> Any:
    model = new_model(family)
    randomise(model, 0)
    return model.cuda()


def results(model: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (3, 16), generator=generator).cuda()
    logits = model(ids, use_cache=False).logits
    token_loss(logits, ids, ids.numel()).backward()
    return {"logits": logits.detach(), **gradients(model)}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        error = float((actual[name] - want).norm() / want.norm().clamp(min=1e-12))
        assert error < 1e-4, (name, error)


SWAPS: dict[str, Callable[[Any, Any], Any]] = {
    "moe": swap_moe,
    "attention": swap_attention,
    "linears": swap_linears,
    "attention and moe": lambda model, group: swap_moe(swap_attention(model, group), group),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("swap", SWAPS)
def test_swapped_model_computes_what_the_model_computed(swap: str, family: str, group: dist.ProcessGroup) -> None:
    if family == "gpt_oss" and "attention" in swap:
        pytest.skip("the attention of gpt_oss is not swapped")
    model = model_on_gpu(family)
    expected = results(copy.deepcopy(model))
    assert_same(results(SWAPS[swap](model, group)), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_implementation_computes_what_transformers_computes(family: str) -> None:
    register()
    model = model_on_gpu(family)
    expected = results(copy.deepcopy(model))
    model.set_experts_implementation("moe_comm")
    assert_same(results(model), expected)


def train(folder: Path, *overrides: str, device: str = "cuda", launcher: tuple[str, ...] = ()) -> list[float]:
    """Return the losses of a run of ``moe-comm train`` with one rank."""
    command = [sys.executable, *launcher, "-m", "moe_comm", "train", "tiny", *TINY, f"run.folder={folder}",
               f"data.cache={folder}/data", *overrides]  # fmt: skip
    hidden = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=os.environ | hidden)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (metrics,) = folder.glob("tiny-*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


RUNS = {
    "zero1": ("parallel.sharding=zero1",),
    "fsdp, bf16": ("parallel.sharding=fsdp", "model.dtype=bfloat16"),
    "sgd": ("optimizer.kind=sgd", "optimizer.lr=0.05"),
    "lamb": ("optimizer.kind=lamb",),
    "muon": ("optimizer.kind=muon",),
    "recompute": ("model.recompute=full", "model.recompute_experts=true", "data.micro_batches=2"),
    "deepseek": ("model.family=deepseek_v3", "model.shared_ffn=64", "model.first_dense=1", "model.dense_ffn=128"),
    "checks": ("guard.checksums=true", "guard.weights_every=4", "run.nonfinite=rerun"),
    "snapshots": ("checkpoint.peer_every=4", "checkpoint.every=4"),
    "lend experts": ("placement.balance={rows = 1.0}",),
    "fp8 payload": ("payload.dispatch=fp8_token", "payload.combine=bf16"),
}


@pytest.mark.parametrize("what", RUNS)
def test_training_on_a_gpu_has_the_losses_of_a_cpu(what: str, tmp_path: Path) -> None:
    expected = train(tmp_path / "cpu", *RUNS[what], device="cpu")
    actual = train(tmp_path / "cuda", *RUNS[what])
    assert len(actual) == len(expected) > 0
    assert actual == pytest.approx(expected, rel=2e-2 if "bf16" in what or "fp8" in what else 5e-3)


OFFLOADED = {
    "state on the host": ("offload.optimizer=host", "offload.budget=1MiB"),
    "state in a file": ("offload.optimizer=file", "offload.budget=1MiB", "model.dtype=bfloat16"),
    "activations on the host": ("offload.activations=host", "offload.activation_budget=1MiB"),
    "activations in a file": ("offload.activations=file", "offload.activation_budget=1MiB", "model.recompute=full"),
    "weights on the host": ("offload.weights=host", "model.recompute=full", "data.micro_batches=2"),
    "weights on the host, bf16": ("offload.weights=host", "model.dtype=bfloat16"),
}
GROUP = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
"""FSDP needs a process group."""


@pytest.mark.parametrize("what", OFFLOADED)
def test_offload_on_a_gpu_keeps_the_losses(what: str, tmp_path: Path) -> None:
    offload, settings = OFFLOADED[what][0], OFFLOADED[what][1:]
    launcher = GROUP if "weights" in what else ()
    common = ["parallel.sharding=fsdp"] if launcher else []
    common += [setting for setting in settings if not setting.startswith("offload")]
    expected = train(tmp_path / "resident", *common, launcher=launcher)
    actual = train(tmp_path / "offloaded", *common, *settings, offload, f"offload.path={tmp_path}", launcher=launcher)
    assert len(actual) == len(expected) > 0
    # The CPU updates weights that are on the host.
    assert actual == pytest.approx(expected, rel=2e-2 if "bf16" in what else 5e-3 if launcher else 1e-4)
