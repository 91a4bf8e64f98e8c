"""EP 2 and 4 compared with EP 1 and float64 for all backends; ``check_grads`` detects wrong gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.dispatch import DispatchOptions
from moe_comm.errors import ConfigError, InputError, RoutingError
from moe_comm.kernels.activations import Activation
from moe_comm.layers import (
    CheckGradsConfig,
    MoEConfig,
    MoELayer,
    RouterConfig,
    ZeroExperts,
    check_grads,
    gather_state_dict,
    load_state_dict,
    run_check_grads,
)
from moe_comm.overlap.options import Overlap
from tests.layers.reference import draw
from tests.pool import RankPool

BACKENDS = ["shared_memory", "all_to_all", "all_gather"]
RICH = MoEConfig(
    48,
    20,
    RouterConfig(
        7,
        3,
        score="sigmoid",
        correction_bias=True,
        scale=2.5,
        balance_loss=0.1,
        z_loss=0.01,
        zero_experts=ZeroExperts(1, 1),
    ),
    expert_bias=True,
    shared_ffn=24,
    shared_gate=True,
)


def check_config(rank: int, world: int, config: CheckGradsConfig) -> tuple[bool, str]:
    report = run_check_grads(config, dist.group.WORLD)
    return report.ok, str(report)


def check_layer(rank: int, world: int, arg: tuple[MoEConfig, str]) -> tuple[bool, str]:
    config, backend = arg
    layer = MoELayer.build(config, dist.group.WORLD, backend=backend, seed=4)
    report = check_grads(layer, tokens=19)
    layer.dispatcher.close()
    return report.ok, str(report)


def check_broken(rank: int, world: int, arg: Any) -> tuple[bool, list[str]]:
    """Check a layer whose rank 1 returns twice the gradient of its experts."""
    layer = MoELayer.build(MoEConfig(16, 8, RouterConfig(4, 2)), dist.group.WORLD, backend="all_to_all", seed=4)
    if rank == 1:
        layer.experts.w2.register_hook(lambda grad: grad * 2)
    report = check_grads(layer, tokens=19)
    layer.dispatcher.close()
    return report.ok, sorted({c.tensor for c in report.failures})


def run_layer(rank: int, world: int, arg: tuple[MoEConfig, list[int]]) -> dict[str, Tensor]:
    """Return output and gradients of this rank's part of one global batch, and the full state dict."""
    config, sizes = arg
    layer = MoELayer.build(config, dist.group.WORLD if world > 1 else None, seed=4)
    first = sum(sizes[:rank])
    x = draw(sum(sizes), config.hidden)[first : first + sizes[rank]].clone().requires_grad_()
    y = layer(x)
    y.backward(draw(sum(sizes), config.hidden, seed=1)[first : first + sizes[rank]])
    grads = {f"grad {n}": p.grad.clone() for n, p in layer.experts.named_parameters() if p.grad is not None}
    state = gather_state_dict(layer)
    load_state_dict(layer, {k: v + 1 for k, v in state.items()})
    reloaded = gather_state_dict(layer)
    assert all(torch.equal(reloaded[k], v + 1) for k, v in state.items())
    layer.dispatcher.close()
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad, **grads, **state}


def raise_on_nan(rank: int, world: int, arg: Any) -> str:
    layer = MoELayer.build(MoEConfig(16, 8, RouterConfig(4, 2)), dist.group.WORLD, backend=arg, seed=4)
    x = draw(5, 16)
    if rank == 1:
        x[3] = float("nan")
    try:
        layer(x)
    except RoutingError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize(("backend", "experts"), [("shared_memory", 5), ("all_to_all", 8), ("all_gather", 5)])
def test_two_ranks_give_the_same_bits_as_one(pool2: RankPool, backend: str, experts: int) -> None:
    config = CheckGradsConfig(num_experts=experts, backend=backend, hidden=40, ffn=24, shared_ffn=16)
    for ok, text in pool2.run(check_config, config, timeout=120):
        assert ok, text
        assert "all right" in text and "WRONG" not in text


def test_four_ranks_give_the_same_bits_as_one(pool4: RankPool) -> None:
    config = CheckGradsConfig(num_experts=6, tokens=11, hidden=33, ffn=7, top_k=3)
    for ok, text in pool4.run(check_config, config, timeout=120):
        assert ok, text


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_a_layer_with_all_features_are_correct(pool2: RankPool, backend: str) -> None:
    for ok, text in pool2.run(check_layer, (RICH, backend), timeout=120):
        assert ok, text


def test_gradients_are_correct_on_more_ranks_than_experts(pool4: RankPool) -> None:
    router = RouterConfig(3, 2, zero_experts=ZeroExperts(1, 1))
    config = replace(RICH, router=router, experts_per_rank=(2, 0, 1, 0), activation="geglu")
    for ok, text in pool4.run(check_layer, (config, "auto"), timeout=120):
        assert ok, text


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_gradients_are_correct_in_other_dtypes(pool2: RankPool, dtype: str) -> None:
    config = CheckGradsConfig(dtype=dtype, backend="all_to_all", tokens=13)
    for ok, text in pool2.run(check_config, config, timeout=120):
        assert ok, text


def test_a_wrong_gradient_is_detected_on_all_ranks(pool2: RankPool) -> None:
    for ok, wrong in pool2.run(check_broken, None, timeout=120):
        assert not ok and wrong == ["experts.w2"]


@pytest.mark.parametrize("sizes", [[7, 12], [0, 9], [1, 2]])
def test_one_batch_over_two_ranks_gives_the_same_bits_as_on_one_rank(pool2: RankPool, sizes: list[int]) -> None:
    alone = run_layer(0, 1, (RICH, [sum(sizes)]))
    ranks = pool2.run(run_layer, (RICH, sizes), timeout=120)
    for name, expected in alone.items():
        if name in ("y", "x") or name.startswith("grad "):
            assert torch.equal(torch.cat([r[name] for r in ranks]), expected), name
        else:
            assert all(torch.equal(r[name], expected) for r in ranks), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_on_one_rank_raises_on_all(pool2: RankPool, backend: str) -> None:
    assert all("token 3" in text for text in pool2.run(raise_on_nan, backend, timeout=60))


def raise_in_experts(rank: int, world: int, arg: tuple[str, str, bool]) -> list[tuple[str, str]]:
    """Rank 1's activation raises in forward or backward; return what this rank raises then, and in the next call."""
    backend, where, overlaps = arg
    phase: list[str] = []

    def act(h: Tensor) -> Tensor:
        # The layer calls the activation under no_grad in forward, and again with gradients enabled in backward.
        if rank == 1 and phase == ["backward" if torch.is_grad_enabled() else "forward"]:
            raise ZeroDivisionError("no such expert")
        return h.relu()

    config = MoEConfig(
        hidden=8, ffn=8, router=RouterConfig(num_experts=4, top_k=2), activation=Activation("raises", act, gated=False)
    )
    group = dist.new_group()  # a failure with rows in flight makes the group unusable
    overlap = Overlap(chunks=2, chunk_bytes=1) if overlaps else None
    options = DispatchOptions(timeout_s=200.0)
    layer = MoELayer.build(config, group, backend=backend, seed=1, options=options, label="moe.1", overlap=overlap)
    x = draw(16, 8).requires_grad_()
    layer(x).sum().backward()
    messages = []
    for phase[:] in ([where], []):
        try:
            layer(x).sum().backward()
            messages.append(("", ""))
        except Exception as error:
            messages.append((type(error).__name__, str(error)))
    return messages


@pytest.mark.parametrize(
    ("backend", "overlaps", "where"),
    [
        ("shared_memory", False, "forward"),
        ("all_to_all", False, "backward"),
        ("all_gather", False, "forward"),
        ("all_to_all", True, "forward"),
        ("all_to_all", True, "backward"),
    ],
)
def test_experts_that_raise_on_one_rank_raise_on_all(pool2: RankPool, backend: str, overlaps: bool, where: str) -> None:
    (other_rank, other_rank_after), (faulty_rank, faulty_rank_after) = pool2.run(
        raise_in_experts, (backend, where, overlaps), timeout=120
    )
    assert faulty_rank == ("ZeroDivisionError", "no such expert")
    assert other_rank[0] == ("PeerError" if overlaps else "PeerRaised")
    for expected in ("rank 1", "ZeroDivisionError", "no such expert", "moe.1"):
        assert expected in other_rank[1]
    assert other_rank_after[0] == faulty_rank_after[0] == ("PeerError" if overlaps else "")


def wrong_width(rank: int, world: int, _: None) -> tuple[str, bool]:
    layer = MoELayer.build(MoEConfig(hidden=8, ffn=8, router=RouterConfig(num_experts=4, top_k=2)), dist.group.WORLD)
    with pytest.raises(InputError) as caught:
        layer(torch.ones(3, 9 if rank == 1 else 8))
    return str(caught.value), bool(layer(torch.ones(3, 8)).isfinite().all())


def test_a_wrong_width_on_one_rank_raises_on_all_and_the_layer_stays_usable(pool2: RankPool) -> None:
    for text, still_usable in pool2.run(wrong_width, timeout=60):
        assert "this layer's hidden size is 8" in text and still_usable


def test_check_grads_compares_one_rank_with_float64() -> None:
    report = run_check_grads(CheckGradsConfig(shared_ffn=16, score="sigmoid"))
    assert report.ok, report
    assert {c.against for c in report.comparisons} == {"float64"}


def test_a_check_does_not_change_the_layer() -> None:
    layer = MoELayer.build(RICH, seed=1)
    layer(draw(5, 48))
    before, load = {k: v.clone() for k, v in layer.state_dict().items()}, layer.router.load_E.clone()
    assert check_grads(lambda: layer, tokens=9).ok
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    assert torch.equal(layer.router.load_E, load) and all(p.grad is None for p in layer.parameters())


def test_invalid_settings_of_a_check_raise() -> None:
    with pytest.raises(ConfigError, match="no tokens anywhere"):  # the message lists the names of the valid cases
        run_check_grads(CheckGradsConfig(cases=("nonsense",)))
    with pytest.raises(ConfigError, match="int8"):
        CheckGradsConfig(dtype="int8")
