"""The bits of every result are the same under other defaults of torch for the dtype and the device of new tensors."""

from __future__ import annotations

import ast
import dataclasses
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_comm
from moe_comm.errors import InputError
from moe_comm.integrations.hugging_face import swap_moe
from moe_comm.layers import MoELayer
from moe_comm.runtime.memory import address, row_address
from moe_comm.topology import ParallelConfig
from tests.dispatch import cases, workers
from tests.dispatch.workers import Job
from tests.integrations.models import batch, gradients, load, num_targets, save_model, token_loss
from tests.layers import tiny
from tests.layers.moe_configs import RICH
from tests.pool import RankPool
from tests.support.torch_defaults import OTHER_DEFAULTS, TorchDefaults, run_under
from tests.train import common

BACKENDS = ("all_to_all", "all_gather", "shared_memory", "hierarchical", "peer_to_peer")
NAMES = tuple(case.name for case in cases.CASES[::4])


MAPPINGS = (ParallelConfig(tp=2, ep=2), ParallelConfig(cp=2, ep=2))


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


@pytest.mark.parametrize(("backend", "defaults"), [*zip(BACKENDS, cycle(OTHER_DEFAULTS), strict=False)])
def test_every_backend(backend: str, defaults: TorchDefaults, pool2: RankPool) -> None:
    ranks = pool2.run(run_under, (defaults, workers.run_cases, Job(backend, names=NAMES)), timeout=120)
    usual = pool2.run(workers.run_cases, Job(backend, names=NAMES), timeout=120)
    for actual, expected in zip(ranks, usual, strict=True):
        for name in NAMES:
            assert same(actual.get(name), expected[name]), actual.get(name)


def layer_step(rank: int, world: int, backend: str) -> dict[str, Any]:
    """Build a layer; one step with auxiliary losses, clipping and an update of the router's bias."""
    layer = MoELayer.build(RICH, dist.group.WORLD, backend=backend, seed=3, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(9 + rank, 16, generator=generator, dtype=torch.float32, device="cpu").requires_grad_()
    y_TD = layer(x_TD)
    y_TD.square().sum().backward()
    moe_comm.sync_gradients(layer)
    norm = moe_comm.clip_grad_norm_(layer, 0.1)
    layer.router.update_bias(layer.router.take_load(), 0.01)
    grads = {name: param.grad for name, param in layer.named_parameters()}
    return {
        "y": y_TD.detach(),
        "x": x_TD.grad,
        "norm": norm,
        **grads,
        **dict(layer.named_buffers()),
        **layer.router.losses,
    }


def transformer_step(rank: int, world: int, mapping: ParallelConfig) -> Any:
    return tiny.run(tiny.Case(mapping, dtype=torch.float32, packed=True))


def swapped_step(rank: int, world: int, call: tuple[TorchDefaults, str]) -> dict[str, Any]:
    """The user's model is in fp32; the defaults change afterwards."""
    defaults, folder = call
    model = load(folder, dtype=torch.float32)
    with defaults.set():
        swap_moe(model, dist.group.WORLD)
        ids = batch(world)
        logits = model(ids[rank], use_cache=False).logits
        token_loss(logits, ids[rank], num_targets(ids)).backward()
        moe_comm.sync_gradients(model)
        return {"logits": logits.detach(), **gradients(model)}


@pytest.mark.parametrize("backend", ["auto", "all_to_all"])
def test_a_layer(backend: str, pool2: RankPool) -> None:
    expected = pool2.run(layer_step, backend)
    for defaults in OTHER_DEFAULTS:
        assert same(pool2.run(run_under, (defaults, layer_step, backend)), expected), defaults


@pytest.mark.parametrize(("mapping", "defaults"), [*zip(MAPPINGS, OTHER_DEFAULTS, strict=False)])
def test_attention_and_parallel_linears(mapping: ParallelConfig, defaults: TorchDefaults, pool2: RankPool) -> None:
    expected = pool2.run(transformer_step, mapping)
    assert same(pool2.run(run_under, (defaults, transformer_step, mapping)), expected)


def test_a_swapped_model(pool2: RankPool, tmp_path) -> None:  # type: ignore[no-untyped-def]
    folder = save_model("qwen2_moe", tmp_path)
    expected = pool2.run(swapped_step, (TorchDefaults(torch.float32), folder))
    for defaults in OTHER_DEFAULTS:
        assert same(pool2.run(swapped_step, (defaults, folder)), expected), defaults


def test_the_trainer(pool2: RankPool, tmp_path) -> None:  # type: ignore[no-untyped-def]
    settings = [*common.write_text(tmp_path), "run.steps=2", "parallel.ep=2", "model.z_loss=0.01"]
    expected = pool2.run(common.train, settings)
    for defaults in OTHER_DEFAULTS:
        assert same(pool2.run(run_under, (defaults, common.train, settings)), expected), defaults


INTEGERS = {"arange", "randint", "randperm"}
"""int64 for int arguments under every default."""
FACTORIES = INTEGERS | {"empty", "zeros", "ones", "full", "tensor", "rand", "randn", "linspace", "logspace", "eye"}
FACTORIES |= {"empty_strided", "scalar_tensor", "tril_indices", "triu_indices"}


def test_every_new_tensor_of_the_package_names_its_dtype_and_device() -> None:
    """Calls of ``torch.NAME(...)``. Those of ``Tensor.new_empty`` and ``empty_like`` do not depend on the defaults."""
    unnamed = []
    for path in Path(moe_comm.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            match call:
                case ast.Call(func=ast.Attribute(ast.Name("torch"), name), keywords=keywords) if name in FACTORIES:
                    given = {keyword.arg for keyword in keywords}
                    needed = {"device"} if name in INTEGERS else {"device", "dtype"}
                    if not needed <= given and not given & {"out", None}:
                        unnamed.append(f"{path}:{call.lineno}: {ast.unparse(call)}")
    assert not unnamed, "\n".join(unnamed)


def test_native_code_gets_no_address_of_another_kind_of_tensor() -> None:
    x_RD = torch.zeros(4, 6)
    assert address(x_RD, torch.float32, (4, 6)) == x_RD.data_ptr() and address(None, torch.float32) == 0
    assert row_address(x_RD[:, 2:5], torch.float32, (4, 3)) == (x_RD.data_ptr() + 8, 24)
    complex_RD = torch.ones(4, 6, dtype=torch.complex64)
    for wrong in (x_RD.double(), x_RD.to("meta"), x_RD[:3], x_RD.t(), torch.zeros(6, 4).t(), complex_RD.conj().imag):
        for pointer in (address, row_address):
            with pytest.raises(InputError, match=r"native code needs a dense torch\.float32 tensor of shape"):
                pointer(wrong, torch.float32, (4, 6))
