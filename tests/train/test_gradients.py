from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from moe_comm.errors import MoeCommError
from moe_comm.train.config import OptimizerSection
from moe_comm.train.gradients import GradientBucket, Gradients, clip
from moe_comm.train.optimizer import learning_rate, make_optimizer
from moe_comm.train.ranks import Ranks
from tests.pool import RankPool


def _toy_norm(rank: int, world: int, ep: int) -> tuple[float, list[float]]:
    """One replicated scalar, one expert scalar a rank; every rank's part of every gradient is 1."""
    ranks = Ranks.make(ep)
    shared, expert = Parameter(torch.zeros(1)), Parameter(torch.zeros(1))
    gradients = Gradients([shared], [expert], ranks)
    (shared + expert).backward()
    gradients.reduce()
    norm = clip(gradients, 1.0)
    return norm, [float(p.grad) for p in (shared, expert) if p.grad is not None]


def test_replicated_gradients_are_summed_once_and_experts_counted_on_every_owner(pool2: RankPool) -> None:
    # ep 2: shared 1 + 1 = 2, two experts of 1: sqrt(4 + 1 + 1). ep 1: one expert in two copies: sqrt(4 + 4).
    for norm, (shared, expert) in pool2.run(_toy_norm, 2):
        assert norm == pytest.approx(6**0.5)
        assert (shared, expert) == pytest.approx((2 / 6**0.5, 1 / 6**0.5))
    for norm, (shared, expert) in pool2.run(_toy_norm, 1):
        assert norm == pytest.approx(8**0.5)
        assert (shared, expert) == pytest.approx((2 / 8**0.5, 2 / 8**0.5))


def test_a_gradient_below_the_limit_is_left_alone_and_zero_means_no_limit() -> None:
    for limit in (10.0, 0.0):
        param = Parameter(torch.zeros(2))
        gradients = Gradients([param], [], Ranks())
        (param * torch.tensor([3.0, 4.0])).sum().backward()
        assert clip(gradients, limit) == pytest.approx(5)
        assert torch.equal(gradients.replicated.flat, torch.tensor([3.0, 4.0]))


def test_a_bucket_holds_what_backward_adds_and_notices_a_replaced_gradient() -> None:
    params = [Parameter(torch.ones(3)), Parameter(torch.ones(2, 2))]
    bucket = GradientBucket(params)
    for _ in range(2):
        (params[0].sum() + 2 * params[1].sum()).backward()
    assert bucket.flat.tolist() == [2.0] * 3 + [4.0] * 4
    bucket.check()
    params[1].grad = torch.ones(2, 2)
    with pytest.raises(MoeCommError, match="no longer in its bucket"):
        bucket.check()
    bucket.zero()
    bucket.check()
    assert not bucket.flat.any()


def test_the_learning_rate_warms_up_and_ends_at_its_final_value() -> None:
    section = OptimizerSection(lr=1.0, warmup=4, final_lr=0.1)
    rates = [learning_rate(step, 20, section) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[4] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(0, 1, OptimizerSection(lr=1.0, warmup=0)) == 1.0


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_only_matrices_decay(kind: Any) -> None:
    matrix, vector = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2))
    optimizer = make_optimizer([matrix, vector], OptimizerSection(kind=kind, weight_decay=0.5))
    GradientBucket([matrix, vector])
    optimizer.step()
    assert bool((matrix < 1).all())
    assert torch.equal(vector, torch.ones(2))
