"""Replace the experts of a recognised MoE block by those of this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from moe_comm.dispatch import Dispatcher
from moe_comm.errors import UnsupportedModel
from moe_comm.integrations.blocks.block import BlockExperts, BlockPlan, BlockSource, before_load, swapped_class
from moe_comm.integrations.blocks.find import FoundBlock
from moe_comm.layers.data_parallel.optimizers import mark_replaced
from moe_comm.overlap.options import Overlap


def uses_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, by its identity."""
    uses: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        uses.setdefault(id(param), []).append(name)
    return uses


def refuse_ties(uses: Mapping[int, Sequence[str]], found: FoundBlock, plan: BlockPlan) -> None:
    """Raise UnsupportedModel if parameters of experts are also used elsewhere. uses: all names of the parameters."""
    params = dict(found.block.named_parameters())
    for name in plan.formula.names:
        if len(names := uses[id(params[name])]) > 1:
            raise UnsupportedModel(
                f"{' and '.join(names)} are one parameter of experts. Each rank keeps some of the experts only, so "
                "these cannot be shared"
            )


def distribute(
    found: FoundBlock,
    plan: BlockPlan,
    dispatcher: Dispatcher,
    overlap: Overlap | None,
    replicated: Callable[[], nn.Parameter | None],
) -> None:
    """Replace the experts of a block by those of this rank, and its forward pass by one that dispatches."""
    block, formula = found.block, plan.formula
    original = dict(block.named_modules()).get(plan.path)
    was_transposed = bool(getattr(original, "is_transposed", False))
    source = BlockSource(block, formula, was_transposed).train(block.training)
    label = ".".join(part for part in (found.name, plan.path) if part)
    experts = BlockExperts(source, formula.layout, dispatcher, label, overlap, replicated)
    experts.use(plan, source)
    params = dict(block.named_parameters())
    for name in formula.names:
        mark_replaced(params[name], experts.gate_up_proj, f"{found.name}.{name}", "swap_moe")
    for name in formula.names:
        owner, _, key = name.rpartition(".")
        if not f"{owner}.".startswith(f"{plan.path}."):  # of a module that is not replaced
            delattr(block.get_submodule(owner), key)
    parent, _, child = plan.path.rpartition(".")
    setattr(block.get_submodule(parent), child, experts)
    block.block_plan = plan  # type: ignore[assignment]
    block.register_load_state_dict_pre_hook(before_load)
    kind: Any = type(block)  # typed as not hashable
    block.__class__ = swapped_class(kind)
