"""Make the MoE blocks of a user's model expert-parallel.

A recognition is never trusted: before a block is swapped, the original and a swapped copy of it run on random tokens in
fp32, forward and backward, and must agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import nn

from moe_comm.comm.agree import gather_texts
from moe_comm.comm.group_setup import channel_of
from moe_comm.dispatch import Dispatcher
from moe_comm.integrations.blocks.adapter import is_inside
from moe_comm.integrations.blocks.block import BlockPlan
from moe_comm.integrations.blocks.check import check
from moe_comm.integrations.blocks.distribute import distribute
from moe_comm.integrations.blocks.find import FoundBlock
from moe_comm.integrations.blocks.recognise import describe
from moe_comm.integrations.blocks.signature import Signatures
from moe_comm.integrations.hooks import refuse_hooks
from moe_comm.layers.data_parallel.gradients import replicated_parameter
from moe_comm.overlap.options import Overlap


def swap_blocks(
    model: nn.Module,
    blocks: Sequence[tuple[FoundBlock, BlockPlan]],
    dispatchers: Mapping[int, Dispatcher],
    overlap: Overlap | None,
) -> None:
    """Check and swap the MoE blocks of a model. Collective.

    Args:
        blocks: with their plans, from ``plan_blocks``.
        dispatchers: by number of experts.

    Raises:
        UnsupportedModel: a swapped block does not compute what the original does; on every rank. The model is
            unchanged.
    """
    for number in _to_check(blocks, dispatchers):
        block, plan = blocks[number]
        check(block, plan, dispatchers[block.num_experts], overlap)
    for block, plan in blocks:
        experts = f"{block.name}.{plan.path}.".lstrip(".")
        names = (name for name, _ in model.named_parameters() if name.startswith(f"{block.name}.".lstrip(".")))
        router = next((name for name in names if not name.startswith(experts)), "")
        path, _, key = router.rpartition(".")
        replicated = partial(replicated_parameter, model.get_submodule(path), key) if router else lambda: None
        distribute(block, plan, dispatchers[block.num_experts], overlap, replicated)


def plan_blocks(blocks: Sequence[FoundBlock]) -> list[tuple[FoundBlock, BlockPlan]]:
    """Return each block with its plan, from ``describe``. Equal blocks, by ``Signatures``, share one."""
    signatures, plans = Signatures(), dict[str, BlockPlan]()
    planned = []
    for block in blocks:
        _refuse_hooks(block, [name for name, _ in block.block.named_modules() if is_inside(name, [block.path])], [])
        if (kind := signatures.of(block)) not in plans:
            plans[kind] = describe(block)
        names = plans[kind].formula.names
        _refuse_hooks(block, sorted({owner for name in names if (owner := name.rpartition(".")[0])}), names)
        planned.append((block, plans[kind]))
    return planned


def _refuse_hooks(found: FoundBlock, modules: Sequence[str], parameters: Sequence[str]) -> None:
    """Raise UnsupportedModel if modules or parameters in a block, which the swap replaces, have hooks."""
    title = partial("{}.{}".format, found.name) if found.name else str
    refuse_hooks(
        "swap_moe",
        ((title(name), found.block.get_submodule(name)) for name in modules),
        ((title(name), found.block.get_parameter(name)) for name in parameters),
    )


def _to_check(blocks: Sequence[tuple[FoundBlock, BlockPlan]], dispatchers: Mapping[int, Dispatcher]) -> list[int]:
    """Return the numbers of the blocks to check: the first with each plan, on any rank. Collective."""
    first = {id(plan): number for number, (_, plan) in reversed(list(enumerate(blocks)))}
    mask = sum(1 << number for number in first.values())
    dispatcher = next(iter(dispatchers.values()))
    if blocks and dispatcher.group is not None and dispatcher.world > 1:
        # The ranks check together, also if attributes of their own make blocks differ on one of them only.
        for text in gather_texts(channel_of(dispatcher.group), "the blocks that swap_moe checks", f"{mask:x}"):
            mask |= int(text, 16)
    return [number for number in range(len(blocks)) if mask >> number & 1]
