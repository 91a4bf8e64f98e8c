"""Without a group, functions use the default group or warn; routing is recorded once under activation checkpointing."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import moe_comm
from moe_comm import MoEConfig, MoEGroups, MoELayer, RouterConfig
from moe_comm.integrations.hugging_face import record_routing, swapped_experts
from tests.pool import RankPool
from tests.reports.test_equal_weights import mixtral

CONFIG = MoEConfig(hidden=8, ffn=8, router=RouterConfig(num_experts=4, top_k=2))


class Records(logging.Handler):
    """Keeps the levels and texts of log records."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((record.levelname, record.getMessage()))


def alone() -> Any:
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def swapped(rank: int, world: int, arg: object) -> list[tuple[tuple[int, ...], list[tuple[str, str]]]]:
    """Return the local experts, and what was logged, for no group, the default group, and a group of one rank."""
    results = []
    logger = logging.getLogger("moe_comm")
    level = logger.level
    for group in (None, dist.group.WORLD, alone()):
        handler = Records()
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        model = moe_comm.swap_moe(mixtral(0), group)
        logger.removeHandler(handler)
        (experts,) = swapped_experts(model).values()
        results.append((tuple(experts.local_experts), handler.found))
    logger.setLevel(level)
    return results


def test_swap_moe_without_a_group_uses_the_default_group_and_says_so(pool2: RankPool) -> None:
    for rank, (default, explicit, one) in enumerate(pool2.run(swapped)):
        assert default[0] == explicit[0] == ((0, 1), (2, 3))[rank]
        assert one == ((0, 1, 2, 3), [("INFO", "swap_moe: 1 MoE blocks, 4 experts over 1 ranks")])
        text = "swap_moe: 1 MoE blocks, 4 experts over 2 ranks"
        assert default[1] == ([] if rank else [("WARNING", f"{text}, the default group")])
        assert explicit[1] == ([] if rank else [("INFO", text)])


def saved(rank: int, world: int, arg: object) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Return the parameters that a dictionary of ``named_parameters`` does not have in full, and what to save."""
    model = moe_comm.swap_moe(mixtral(0))
    by_hand = {name: param.detach().cpu() for name, param in model.named_parameters()}
    whole = moe_comm.gather_state_dict(model)
    other = moe_comm.state_dict(model, rank0_only=True, cpu=True)
    assert whole.keys() == (other.keys() if rank == 0 else whole.keys())
    assert all(torch.equal(whole[name], value) for name, value in other.items())
    return [name for name, value in by_hand.items() if value.shape != whole[name].shape], whole


def test_the_documented_call_saves_the_experts_that_named_parameters_lacks(pool2: RankPool) -> None:
    expected = mixtral(0).state_dict()
    for lost, whole in pool2.run(saved):
        assert lost and all(".experts." in name for name in lost)
        assert whole.keys() == expected.keys()
        assert all(torch.equal(whole[name], value) for name, value in expected.items())


def warned(rank: int, world: int, arg: object) -> list[list[str]]:
    """Return the warnings of calls without a group, twice each, and of calls with a group of one rank."""
    one = alone()
    calls: list[Callable[[], object]] = [
        lambda: moe_comm.make_dispatcher(4),
        lambda: MoELayer.build(CONFIG, seed=0),
        lambda: moe_comm.swap_linears(mixtral(0)),
        lambda: moe_comm.swap_attention(mixtral(0)),
        lambda: moe_comm.make_dispatcher(4, one),
        lambda: MoELayer.build(CONFIG, one, seed=0),
        lambda: MoELayer.build(CONFIG, MoEGroups(None), seed=0),
        lambda: moe_comm.swap_linears(mixtral(0), one),
        lambda: moe_comm.swap_attention(mixtral(0), one),
        lambda: moe_comm.swap_moe(mixtral(0)),
    ]
    results = []
    for call in calls:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
            call()
        results.append([str(one.message) for one in caught if "without a group" in str(one.message)])
    return results


def test_other_functions_warn_once_that_each_rank_works_alone(pool2: RankPool) -> None:
    names = ("make_dispatcher", "MoELayer.build", "swap_linears", "swap_attention")
    for results in pool2.run(warned):
        for name, found in zip(names, results, strict=False):
            assert len(found) == 1 and found[0].startswith(f"{name} without a group: each of the 2 ranks"), found
            assert "torch.distributed.group.WORLD" in found[0] and "use_local_synchronization=True" in found[0]
        assert not any(results[4:]), results


@pytest.mark.parametrize("swap", [False, True])
def test_routing_is_recorded_once_under_activation_checkpointing(swap: bool) -> None:
    ids = torch.randint(32, (2, 5))
    plain = moe_comm.swap_moe(mixtral(0)) if swap else mixtral(0)
    with record_routing(plain) as expected:
        plain(ids)
    for reentrant in (False, True):
        model = copy.deepcopy(plain).train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        by_hand = copy.deepcopy(plain)
        for one, forward in ((model, model), (by_hand, partial(checkpointed, by_hand, reentrant))):
            with record_routing(one) as routing:
                forward(ids).logits.sum().backward()
                forward(ids)
            assert torch.equal(routing.ids, torch.cat((expected.ids, expected.ids))), (reentrant, one is model)


def checkpointed(model: Any, reentrant: bool, ids: torch.Tensor) -> Any:
    """Run the model with a checkpoint around the whole of it."""
    embeds = model.get_input_embeddings()(ids)
    logits = checkpoint(lambda x: model(inputs_embeds=x).logits, embeds, use_reentrant=reentrant)
    return SimpleNamespace(logits=logits)
