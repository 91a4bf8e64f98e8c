"""Make the MoE blocks of a user's model expert-parallel.

A recognition is never trusted: before a block is swapped, the original and a swapped copy of it run on random tokens in
fp32, forward and backward, and must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from moe_comm.comm.agree import gather_texts
from moe_comm.comm.group_setup import channel_of
from moe_comm.dispatch import Dispatcher
from moe_comm.errors import UnsupportedModel
from moe_comm.integrations.blocks.adapter import is_inside
from moe_comm.integrations.blocks.block import BlockPlan
from moe_comm.integrations.blocks.check import check
from moe_comm.integrations.blocks.distribute import distribute, refuse_ties, uses_of_parameters
from moe_comm.integrations.blocks.find import FoundBlock
from moe_comm.integrations.blocks.recognise import describe
from moe_comm.integrations.blocks.signature import Number, Signatures, numbers_read
from moe_comm.layers.data_parallel.gradients import replicated_parameter
from moe_comm.layers.parallel.hooks import refuse_hooks
from moe_comm.overlap.options import Overlap

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


Planned = tuple[FoundBlock, BlockPlan]


def swap_blocks(
    model: nn.Module,
    blocks: Sequence[Planned],
    dispatchers: Mapping[int, Dispatcher],
    overlap: Overlap | None,
    optional: Collection[FoundBlock],
    after: Callable[[FoundBlock, BlockPlan], None],
) -> dict[str, str]:
    """Check and swap the MoE blocks of a model. Collective.

    Args:
        blocks: with their plans, from ``plan_blocks``.
        dispatchers: by number of experts.
        optional: blocks to leave unchanged if a swapped one does not compute what the original does.
        after: is called for each swapped block, before the next one is swapped.

    Returns:
        The reasons why blocks are unchanged, by name.

    Raises:
        UnsupportedModel: a swapped block does not compute what the original does; on every rank. The model is
            unchanged.
    """
    if not blocks:
        return {}
    group = next(iter(dispatchers.values())).group
    # The ranks check together, also if attributes of their own make blocks differ on one of them only.
    first = {id(plan): number for number, (_, plan) in reversed(list(enumerate(blocks)))}
    differing: dict[int, UnsupportedModel] = {}
    for number in on_any_rank(first.values(), group):
        block, plan = blocks[number]
        try:
            check(block, plan, dispatchers[block.num_experts], overlap)
        except UnsupportedModel as error:  # on every rank
            if block not in optional:
                raise
            differing |= {n: error for n, (_, other) in enumerate(blocks) if other is plan} | {number: error}
    left = on_any_rank(differing, group) if optional else []
    for number, (block, plan) in enumerate(blocks):
        if number in left:
            continue
        experts = f"{block.name}.{plan.path}.".lstrip(".")
        names = (name for name, _ in model.named_parameters() if name.startswith(f"{block.name}.".lstrip(".")))
        router = next((name for name in names if not name.startswith(experts)), "")
        path, _, key = router.rpartition(".")
        replicated = partial(replicated_parameter, model.get_submodule(path), key) if router else lambda: None
        distribute(block, plan, dispatchers[block.num_experts], overlap, replicated)
        after(block, plan)
    return {blocks[number][0].name: str(differing.get(number, "it differs on another rank")) for number in left}


def optional_blocks(blocks: Sequence[FoundBlock], of_transformers: bool) -> set[FoundBlock]:
    """Return the blocks to leave unchanged if they are not supported: other blocks of the model are swapped.

    of_transformers: the model has blocks of transformers. Else a ``ModuleDict`` beside other blocks may be no MoE.
    """
    dicts = {block for block in blocks if block.adapter is None and isinstance(block.experts, nn.ModuleDict)}
    if of_transformers:
        return {block for block in blocks if block.adapter is None}
    return dicts if len(dicts) < len(blocks) else set()


def plan_blocks(
    model: nn.Module, blocks: Sequence[FoundBlock], optional: Collection[FoundBlock]
) -> tuple[list[Planned], dict[int, UnsupportedModel]]:
    """Return each block with its plan, from ``describe``. Equal blocks, by ``Signatures``, share one.

    optional: blocks whose errors are returned, by their numbers, instead of raised.
    """
    plans, uses = _Plans(), uses_of_parameters(model)
    planned, refused = list[Planned](), dict[int, UnsupportedModel]()
    for number, block in enumerate(blocks):
        try:
            _refuse_hooks(block, [name for name, _ in block.block.named_modules() if is_inside(name, [block.path])], [])
            plan = plans.of(block)
            names = plan.formula.names
            _refuse_hooks(block, sorted({owner for name in names if (owner := name.rpartition(".")[0])}), names)
            refuse_ties(uses, block, plan)
            planned.append((block, plan))
        except UnsupportedModel as error:
            if block not in optional:
                raise
            refused[number] = error
    return planned, refused


class _Plans:
    """Plans of blocks, of which equal ones share one."""

    def __init__(self) -> None:
        self._signatures = Signatures()
        self._plans: dict[str, BlockPlan | UnsupportedModel] = {}
        self._similar: dict[str, list[tuple[FoundBlock, BlockPlan]]] = {}
        self._read: dict[int, set[Number] | None] = {}

    def of(self, block: FoundBlock) -> BlockPlan:
        """Return the plan of a block, or raise UnsupportedModel."""
        if (kind := self._signatures.of(block)) not in self._plans:
            self._plans[kind] = self._new(block)
        plan = self._plans[kind]
        if isinstance(plan, UnsupportedModel):
            raise plan
        return plan

    def _new(self, block: FoundBlock) -> BlockPlan | UnsupportedModel:
        similar = self._similar.setdefault(self._signatures.of(block, ()), [])
        for other, plan in similar:
            if id(plan) not in self._read:
                self._read[id(plan)] = numbers_read(other, plan)
            numbers = self._read[id(plan)]
            if numbers is not None and self._signatures.of(block, numbers) == self._signatures.of(other, numbers):
                return plan
        try:
            plan = describe(block)
        except UnsupportedModel as error:
            return error
        similar.append((block, plan))
        return plan


def on_any_rank(numbers: Iterable[int], group: ProcessGroup | None) -> list[int]:
    """Return in order the numbers that any rank passes. Collective."""
    mask = sum(1 << number for number in set(numbers))
    if group is not None and group.size() > 1:
        for text in gather_texts(channel_of(group), "numbers of the blocks that swap_moe swaps", f"{mask:x}"):
            mask |= int(text, 16)
    return [number for number in range(mask.bit_length()) if mask >> number & 1]


def _refuse_hooks(found: FoundBlock, modules: Sequence[str], parameters: Sequence[str]) -> None:
    """Raise UnsupportedModel if modules or parameters in a block, which the swap replaces, have hooks."""
    title = partial("{}.{}".format, found.name) if found.name else str
    refuse_hooks(
        "swap_moe",
        ((title(name), found.block.get_submodule(name)) for name in modules),
        ((title(name), found.block.get_parameter(name)) for name in parameters),
    )
