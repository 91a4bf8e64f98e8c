"""Megatron-Core and NeMo Automodel call the ``deep_ep`` module of moe_comm, on CPU ranks.

Each reference is the program's own all-gather path, or one process in float64.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm.integrations.deepep import install, uninstall
from tests.integrations.hosts.routed import (
    CASES,
    Case,
    expected,
    experts,
    inputs,
    megatron_dispatcher,
    megatron_on_cpu,
    route,
    run_dispatcher,
)
from tests.pool import RankPool

FLEX_ONLY = (Case("zero tokens on some ranks", tokens=(0, 7)),)  # Megatron's all-gather needs equal tokens


def megatron(rank: int, world: int, etp: int) -> list[Any]:
    """Return the results of Megatron's flex and all-gather dispatchers, and of one process, for each case."""
    install()
    results = []
    with megatron_on_cpu(expert_model_parallel_size=world // etp, expert_tensor_parallel_size=etp):
        for case in (*CASES, *FLEX_ONLY):
            flex = run_dispatcher(megatron_dispatcher("flex", case), case, rank, etp)
            theirs = None
            if case not in FLEX_ONLY:
                theirs = run_dispatcher(megatron_dispatcher("allgather", case), case, rank, etp)
            results.append((case, flex, theirs, expected(case, rank)))
    uninstall()
    return results


@pytest.mark.parametrize(("world", "etp"), [(2, 1), (4, 1), (4, 2)])
def test_megatron_flex_equals_its_allgather_dispatcher(world: int, etp: int, pools: dict[int, RankPool]) -> None:
    pytest.importorskip("megatron.core", reason="needs Megatron-Core: make adapters")
    for results in pools[world].run(megatron, etp):
        for case, (flex, counts), theirs, whole in results:
            for got, want in zip(flex[:3], whole, strict=True):
                torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5, msg=case.name)
            if theirs is None:
                continue
            assert counts == theirs[1]
            for got, want in zip(flex[:3], theirs[0][:3], strict=True):
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, msg=case.name)


def automodel(rank: int, world: int, case: Case) -> Any:
    """Return output and gradients of Automodel's DeepEP manager, and of one process."""
    install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nemo_automodel.components.moe.megatron.token_dispatcher import _DeepepManager

    local = case.num_experts // world
    manager = _DeepepManager(dist.group.WORLD, case.top_k, num_experts=case.num_experts, num_local_experts=local)
    x, router, grad = inputs(case, rank, torch.float32)
    x.requires_grad_()
    router.requires_grad_()
    probs, _ = route(case, x, router)
    manager.setup_metadata(x.shape[0], probs)
    hidden = manager.dispatch(x.flatten(0, 1), async_finish=True, allocate_on_comm_stream=True)
    rows, permuted_probs = manager.get_permuted_hidden_states_by_experts(hidden)
    counts = manager.get_number_of_tokens_per_expert().tolist()
    out = experts(rows, counts, permuted_probs, range(rank * local, (rank + 1) * local))
    y = manager.combine(manager.get_restored_hidden_states_by_experts(out)).view_as(x)
    y.backward(grad)
    assert x.grad is not None and router.grad is not None
    uninstall()
    return (y.detach(), x.grad, router.grad), expected(case, rank)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", [*CASES[:3], *FLEX_ONLY], ids=lambda case: case.name)
def test_automodel_equals_one_process(case: Case, world: int, pools: dict[int, RankPool]) -> None:
    pytest.importorskip("nemo_automodel", reason="needs NeMo Automodel: make adapters")
    for result, whole in pools[world].run(automodel, case):
        for got, want in zip(result, whole, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
