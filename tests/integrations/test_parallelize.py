"""``parallelize_*`` accept DeviceMeshes, as ``torch.distributed.tensor.parallel.parallelize_module`` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import moe_comm
from moe_comm.errors import ConfigError
from tests.integrations.models import assert_close, batch, load
from tests.pool import RankPool


def test_the_swap_functions_are_short_aliases() -> None:
    assert moe_comm.swap_moe is moe_comm.parallelize_moe
    assert moe_comm.swap_attention is moe_comm.parallelize_attention
    assert moe_comm.swap_linears is moe_comm.parallelize_linears


def on_a_mesh(rank: int, world: int, folder: str) -> tuple[Tensor, Tensor, Tensor, str]:
    """Return logits with the modules over a flat mesh and over an [ep 2, tp 2] mesh, and an error message."""
    flat_mesh = init_device_mesh("cpu", (world,))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    ids = batch(1)[0]
    experts = moe_comm.parallelize_moe(load(folder), flat_mesh)
    named = moe_comm.parallelize_moe(load(folder), mesh)
    split: Any = moe_comm.parallelize_linears(moe_comm.parallelize_attention(load(folder), mesh), mesh)
    try:
        moe_comm.parallelize_moe(load(folder), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
    except ConfigError as error:
        message = str(error)
    with torch.no_grad():
        return experts(ids).logits, named(ids).logits, split(ids).logits, message


def test_a_flat_mesh_or_a_named_mesh_dimension_gives_the_same_logits(
    saved: Callable[[str], str], pool4: RankPool
) -> None:
    folder = saved("mixtral")
    with torch.no_grad():
        expected = load(folder)(batch(1)[0]).logits
    for experts, named, split, message in pool4.run(on_a_mesh, folder, timeout=120):
        for got in (experts, named, split):
            assert_close(got, expected, "logits", 2e-5)
        assert "one dimension or with a dimension 'ep'" in message


@pytest.mark.parametrize("name", ["parallelize_moe", "parallelize_attention", "parallelize_linears"])
def test_without_a_group_the_logits_are_unchanged(name: str, saved: Callable[[str], str]) -> None:
    ids = batch(1)[0]
    with torch.no_grad():
        expected = load(saved("mixtral"))(ids).logits
        got = getattr(moe_comm, name)(load(saved("mixtral")))(ids).logits
    assert_close(got, expected, name, 2e-5)
