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
from tests.pool import RankPool, on_ranks
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


@on_ranks(2)
def test_the_documented_call_saves_the_experts_that_named_parameters_lacks(rank: int) -> None:
    expected, model = mixtral(0).state_dict(), moe_comm.swap_moe(mixtral(0))
    whole = moe_comm.gather_state_dict(model)
    other = moe_comm.state_dict(model, rank0_only=True, cpu=True)
    assert whole.keys() == expected.keys() and other.keys() == (whole.keys() if rank == 0 else set())
    assert all(torch.equal(whole[name], value) for name, value in [*expected.items(), *other.items()])
    lost = [name for name, param in model.named_parameters() if param.shape != whole[name].shape]
    assert lost and all(".experts." in name for name in lost)


@on_ranks(2)
def test_other_functions_warn_once_that_each_rank_works_alone() -> None:
    one = alone()
    warn: dict[str, Callable[[], object]] = {
        "make_dispatcher": lambda: moe_comm.make_dispatcher(4),
        "MoELayer.build": lambda: MoELayer.build(CONFIG, seed=0),
        "swap_linears": lambda: moe_comm.swap_linears(mixtral(0)),
        "swap_attention": lambda: moe_comm.swap_attention(mixtral(0)),
    }
    silent: list[Callable[[], object]] = [
        lambda: moe_comm.make_dispatcher(4, one),
        lambda: MoELayer.build(CONFIG, one, seed=0),
        lambda: MoELayer.build(CONFIG, MoEGroups(None), seed=0),
        lambda: moe_comm.swap_linears(mixtral(0), one),
        lambda: moe_comm.swap_attention(mixtral(0), one),
        lambda: moe_comm.swap_moe(mixtral(0)),
    ]
    for name, call in [*warn.items(), *(("", call) for call in silent)]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
            call()
        found = [str(one.message) for one in caught if "without a group" in str(one.message)]
        assert len(found) == bool(name)
        for text in found:
            assert text.startswith(f"{name} without a group: each of the 2 ranks")
            assert "torch.distributed.group.WORLD" in text and "use_local_synchronization=True" in text


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
