"""Compare an MoE block with a swapped copy of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from moe_comm.comm.agree import agree, gather_texts
from moe_comm.comm.group_setup import channel_of
from moe_comm.dispatch import Dispatcher
from moe_comm.errors import MoeCommError, PeerDied, PeerTimeout, UnsupportedModel
from moe_comm.integrations.blocks.block import BlockPlan, call_block, replayed
from moe_comm.integrations.blocks.distribute import distribute
from moe_comm.integrations.blocks.find import FoundBlock
from moe_comm.layers.moe.trial import Trial, difference
from moe_comm.overlap.options import Overlap
from moe_comm.topology import Placement


def check(found: FoundBlock, plan: BlockPlan, dispatcher: Dispatcher, overlap: Overlap | None) -> None:
    """Compare a block with a swapped copy of it on random tokens, forward and backward in fp32. Collective.

    Raises:
        UnsupportedModel: they differ, on any rank. Raised on every rank.
    """
    rank, group = dispatcher.rank, dispatcher.group
    trial = Trial.of(found.block, plan.formula, found.device, plan.narrow)
    tried = replace(plan, formula=trial.formula)
    placement = dispatcher.expert_placement or Placement.of_layout(dispatcher.placement)
    # Experts with copies cannot be trained; those that are lent have slots, but no copies in the placement.
    trains = dispatcher.options.balance is not None or placement.slots_per_rank == placement.homes_per_rank

    def agreed(differences: list[str]) -> None:
        outcome: str | MoeCommError = ""
        if differences:
            outcome = UnsupportedModel(
                f"{found.name} ({type(found.block).__name__}) was recognised as {plan}, but a swapped copy of it "
                f"differs from the original on random tokens: {'; '.join(differences[:3])}. Describe it with "
                "moe_comm.block_adapter"
            )
        if group is not None and dispatcher.world > 1:
            agree(outcome, partial(gather_texts, channel_of(group), f"checking the swap of {found.name}"))
        elif isinstance(outcome, MoeCommError):
            raise outcome

    differences: list[str] = []
    for training in (True, False):
        raised: list[str] = []
        try:
            block = trial.copy().requires_grad_().train(training)
            expected = [_run(block, tried, source, trains) for source in range(dispatcher.world)]
        except Exception as error:  # of the user's code
            raised.append(f"the original raised {type(error).__name__}: {error}")
        agreed(raised)  # before ranks wait for each other in the copies
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in block.named_parameters()}
        of_experts = {key: tried.formula.stack(key, grads) for key in tried.formula.layout.parameters}
        block.zero_grad()
        try:
            with dispatcher.abort_on_error():
                distribute(replace(found, block=block), tried, dispatcher, overlap, lambda: None)
                got = _run(block, tried, rank, trains)
        except (PeerDied, PeerTimeout):
            raise
        except Exception as error:
            differences.append(f"the copy raised {type(error).__name__}: {error}")
            continue
        experts: Any = block.get_submodule(plan.path)
        homes = list(experts.placement.homes_of(rank))
        pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {
            f"result {i}": pair for i, pair in enumerate(zip_longest(got[0], expected[rank][0]))
        }
        if trains:
            pairs["gradient of the tokens"] = got[1], expected[rank][1]
            pairs |= {f"gradient of {key}": (getattr(experts, key).grad, g[homes]) for key, g in of_experts.items()}
        pairs |= {f"gradient of {name}": (got[2].get(name), value) for name, value in expected[rank][2].items()}
        for what, (value, reference) in pairs.items():
            if text := difference(value, reference):
                differences.append(f"{what} {text}")
    agreed(differences)


def _run(
    block: nn.Module, plan: BlockPlan, seed: int, trains: bool
) -> tuple[list[Tensor], Tensor | None, dict[str, Tensor]]:
    """Run a block on the tokens of rank ``seed``: results, and gradients of the tokens and of replicated parameters.

    Gradients of experts accumulate. trains: run backward; otherwise there are no gradients.
    """
    inside = {*plan.formula.names, *(f"{plan.path}.{key}" for key in plan.formula.parts)}
    replicated = {n: p for n, p in block.named_parameters() if n not in inside}
    for param in replicated.values():
        param.grad = None
    device = next(block.parameters()).device
    with (
        torch.set_grad_enabled(trains),
        torch.autocast(device.type, enabled=False),
        replayed(block, device, 1000 + seed),
    ):
        x = torch.randn(*plan.shape, plan.formula.layout.hidden, dtype=torch.float32, device=device).requires_grad_()
        results = [leaf for leaf in tree_flatten(call_block(block, x))[0] if isinstance(leaf, Tensor)]
        differentiable = [leaf for leaf in results if leaf.is_floating_point() and leaf.requires_grad]
        if trains:
            loss = sum((leaf * torch.randn_like(leaf)).sum() for leaf in differentiable)
            assert isinstance(loss, Tensor)
            loss.backward()
    assert not trains or x.grad is not None
    grads = {n: p.grad for n, p in replicated.items() if p.grad is not None}
    return [leaf.detach() for leaf in results], x.grad, grads
