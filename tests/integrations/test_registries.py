"""``ep_implementation="moe_comm"`` of transformers, and how both names are registered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import EPImplementationInterface
from transformers.integrations.moe import ExpertsInterface

from moe_comm.errors import ConfigError, RoutingError, UnsupportedModel
from moe_comm.integrations.hugging_face import register, registries, swap_moe
from tests.integrations.import_orders import ORDERS, registered
from tests.integrations.models import (
    assert_close,
    batch,
    load,
    num_targets,
    route_to_first_half,
    save_model,
    token_loss,
)
from tests.pool import RankPool

needs_cpu = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="transformers puts every rank on the accelerator, one device a rank"
)


def test_registering_twice_has_no_effect() -> None:
    register()
    first = ExpertsInterface()["moe_comm"], EPImplementationInterface()["moe_comm"]
    register()
    assert first == (ExpertsInterface()["moe_comm"], EPImplementationInterface()["moe_comm"])


def run_distributed(rank: int, world: int, arg: tuple[str, dict[str, Any], str]) -> tuple[Any, ...]:
    """Return logits, full gradients and share of local experts under ``DistributedConfig``. TP ranks use one batch."""
    folder, sizes, experts_implementation = arg
    register()
    results = []
    for name in ("all_to_all", "moe_comm"):
        config = DistributedConfig(**sizes, ep_implementation=name)
        model = load(folder, distributed_config=config, experts_implementation=experts_implementation)
        model.train()
        parts = batch(world)
        ids = parts[rank // sizes["tp_size"]]
        logits = model(ids, use_cache=False).logits
        token_loss(logits, ids, num_targets(parts)).backward()
        grads = {n: _full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        held = sum(p.to_local().numel() for n, p in model.named_parameters() if ".experts." in n)
        total = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
        results.append((logits.detach(), grads, held / total))
    return tuple(results)


def _full(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def check_distributed(results: list[Any], folder: str, tp_size: int, share: float) -> None:
    expected = [load(folder)(ids).logits.detach() for ids in batch(len(results))]
    for rank, ((_, hf_grads, _), (logits, grads, held)) in enumerate(results):
        assert_close(logits, expected[rank // tp_size], f"logits of rank {rank}")
        assert held == share
        assert grads.keys() == hf_grads.keys()
        for name, grad in hf_grads.items():
            assert_close(grads[name], grad, name)


@needs_cpu
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_ep_implementation_on_two_ranks_equals_transformers_own(
    family: str, saved: Callable[[str], str], pool2: RankPool
) -> None:
    sizes = {"tp_size": 1, "fsdp_size": 2, "ep_size": 2}
    results = pool2.run(run_distributed, (saved(family), sizes, "moe_comm"), timeout=120)
    check_distributed(results, saved(family), tp_size=1, share=1 / 2)


@needs_cpu
@pytest.mark.parametrize(
    "sizes",
    [
        {"tp_size": 1, "fsdp_size": 4, "ep_size": 2},
        {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
        {"tp_size": 4, "fsdp_size": 1, "ep_size": 4},
    ],
    ids=str,
)
def test_ep_implementation_with_expert_copies_and_with_tensor_parallelism(
    sizes: dict[str, int], saved: Callable[[str], str], pool4: RankPool
) -> None:
    results = pool4.run(run_distributed, (saved("mixtral"), sizes, "grouped_mm"), timeout=120)
    check_distributed(results, saved("mixtral"), sizes["tp_size"], share=1 / 4)


def run_unknown_experts(rank: int, world: int, arg: tuple[str, dict[str, Any], str]) -> tuple[Any, ...]:
    def refuse(module: Any) -> Any:
        raise UnsupportedModel("an unknown kind")

    with mock.patch.object(registries, "read_layout", refuse):
        return run_distributed(rank, world, arg)


@needs_cpu
def test_ep_implementation_moves_rows_of_experts_that_only_transformers_can_compute(
    tmp_path: Path, pool2: RankPool
) -> None:
    folder = save_model("deepseek_v3", tmp_path, edit=route_to_first_half)
    sizes = {"tp_size": 1, "fsdp_size": 2, "ep_size": 2}
    results = pool2.run(run_unknown_experts, (folder, sizes, "grouped_mm"), timeout=120)
    check_distributed(results, folder, tp_size=1, share=1 / 2)


def run_fp8(rank: int, world: int, folder: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits, and full gradients of experts, under expert parallelism."""
    register()
    config = DistributedConfig(tp_size=1, fsdp_size=2, ep_size=2, ep_implementation="moe_comm_fp8")
    model, parts = load(folder, distributed_config=config), batch(world)
    logits = model(parts[rank], use_cache=False).logits
    token_loss(logits, parts[rank], num_targets(parts)).backward()
    grads = {n: _full(p.grad) for n, p in model.named_parameters() if ".experts." in n and p.grad is not None}
    return logits.detach(), grads


@needs_cpu
def test_moe_comm_fp8_has_the_bits_of_a_swapped_model_with_fp8_gemms(tmp_path: Path, pool2: RankPool) -> None:
    register()
    folder = save_model("mixtral", tmp_path / "wide", hidden_size=128)
    parts = batch(2)

    def run(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(ids, use_cache=False).logits
        token_loss(logits, ids, num_targets(parts)).backward()
        return logits.detach(), {n: p.grad for n, p in model.named_parameters() if ".experts." in n}

    swapped = [run(swap_moe(load(folder), expert_gemm_dtype="fp8"), ids) for ids in parts]
    logits, grads = run(load(folder, experts_implementation="moe_comm_fp8"), parts[0])
    assert torch.equal(logits, swapped[0][0])
    assert not torch.equal(logits, run(load(folder, experts_implementation="moe_comm"), parts[0])[0])
    assert grads.keys() == swapped[0][1].keys()
    for name, grad in grads.items():
        assert torch.equal(grad, swapped[0][1][name]), name
    for (expected, _), (of_rank, sums) in zip(swapped, pool2.run(run_fp8, folder, timeout=120), strict=True):
        assert torch.equal(of_rank, expected)
        for name, grad in sums.items():
            assert_close(grad, (swapped[0][1][name] + swapped[1][1][name]) / 2, name)  # transformers averages
    with pytest.raises(ConfigError, match="multiple of 128; got 32"):
        load(save_model("mixtral", tmp_path / "narrow"), experts_implementation="moe_comm_fp8")(parts[0])


def use_distributed(rank: int, world: int, arg: tuple[str, str]) -> tuple[str, str, dict[str, Tensor]]:
    """Return the errors of NaN weights and of a swap of a distributed model, and the local experts of a model."""
    mixtral, gpt_oss = arg
    register()
    config = DistributedConfig(tp_size=1, fsdp_size=2, ep_size=2, ep_implementation="moe_comm")
    model = load(mixtral, distributed_config=config)
    embeds = torch.randn(2, 5, 32)
    if rank == 1:
        embeds[0, 3] = float("nan")
    with pytest.raises(RoutingError) as nan:
        model(inputs_embeds=embeds)
    with pytest.raises(UnsupportedModel) as swapped:
        swap_moe(load(mixtral, distributed_config=DistributedConfig(tp_size=1, fsdp_size=2, ep_size=2)))
    model = load(gpt_oss, distributed_config=config)
    local = {n: p.to_local().detach() for n, p in model.named_parameters() if ".experts." in n}
    return str(nan.value), str(swapped.value), local


@needs_cpu
def test_distributed_models_report_nan_on_every_rank_hold_local_experts_and_are_not_swapped(
    saved: Callable[[str], str], pool2: RankPool
) -> None:
    results = pool2.run(use_distributed, (saved("mixtral"), saved("gpt_oss")))
    for nan, swapped, _ in results:
        assert "NaN" in nan
        assert "already distributed" in swapped and "ep_implementation='moe_comm'" in swapped
    for name, full in load(saved("gpt_oss")).named_parameters():
        if ".experts." in name:
            assert torch.equal(torch.cat([local[name] for *_, local in results]), full)


@pytest.mark.slow
def test_registration_does_not_depend_on_the_order_of_imports() -> None:
    with RankPool(len(ORDERS), bare=True) as pool:
        assert pool.run(registered, timeout=120) == [[True] * 4] * len(ORDERS)
