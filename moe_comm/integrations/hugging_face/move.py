"""Move the experts of swapped models to other ranks.

placement       experts 0 1 | 2 3 | 4 5  ─▶  0 1 4 | 2 3 5     rank 2 has died
rank 0          rows 0 1 stay, 4 comes from a copy on another rank, or from the files
rank 1          rows 2 3 stay, 5 as well
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.comm.group_setup import channel_of, group_size
from moe_comm.comm.sparse_rows import RowTransfer, into, transfer_rows
from moe_comm.dispatch import Dispatcher
from moe_comm.integrations.hugging_face.swap import EPExperts, swapped_experts
from moe_comm.layers.moe.config import expert_dispatcher
from moe_comm.topology import Box, Placement


@torch.inference_mode(False)
@torch.no_grad()
def move_experts(
    models: Sequence[nn.Module],
    groups: Sequence[ProcessGroup],
    members: Sequence[int],
    new_placement: Callable[[Placement], Placement],
    *,
    from_copies: bool,
) -> list[dict[int, list[Box]]]:
    """Move the experts of ``models`` to the ranks of ``group``, from their ranks there. Collective over ``group``.

    Args:
        groups: ``group``, then those of further micro-batches, with the same ranks.
        members: for each rank of ``group``, its rank in the present group of the experts.
        new_placement: returns the placement over ``group`` from the present one.
        from_copies: whether copies of experts have their weights, on all ranks.

    Returns:
        For each model, the parts of parameters that no rank of ``group`` has: see ``load_parts``. They are not
        initialized.
    """
    dispatchers: dict[Dispatcher, list[Dispatcher]] = {}
    lost: list[dict[int, list[Box]]] = []
    seen: set[EPExperts] = set()
    for model in models:
        lost.append({})
        for experts in swapped_experts(model).values():
            if experts in seen:
                continue
            seen.add(experts)
            old = experts.dispatchers[0]
            if old not in dispatchers:
                dispatchers[old] = _dispatchers(experts, groups, new_placement(experts.placement))
            lost[-1] |= _move(experts, dispatchers[old], groups[0], members, from_copies)
    return lost


def add_dispatchers(models: Sequence[nn.Module], groups: Sequence[ProcessGroup]) -> None:
    """Give the experts of ``models`` a dispatcher for each of ``groups`` of the same ranks. Collective."""
    dispatchers: dict[Dispatcher, list[Dispatcher]] = {}
    for experts in {one: None for model in models for one in swapped_experts(model).values()}:
        own = experts.dispatchers[0]
        if own not in dispatchers:
            dispatchers[own] = [_dispatcher(experts, group, experts.placement, own.name) for group in groups]
        experts.dispatchers = [own, *dispatchers[own]]


def _dispatchers(experts: EPExperts, groups: Sequence[ProcessGroup], placement: Placement) -> list[Dispatcher]:
    old = experts.dispatchers[0]
    # The hosts of the groups may have different numbers of ranks.
    backend = "all_to_all" if old.name == "hierarchical" and groups[0] is not old.group else old.name
    return [_dispatcher(experts, group, placement, backend) for group in groups]


def _dispatcher(experts: EPExperts, group: ProcessGroup, placement: Placement, backend: str) -> Dispatcher:
    """Return a dispatcher with the settings of that of ``experts``. Collective."""
    old, device = experts.dispatchers[0], experts.device
    made = expert_dispatcher(
        placement, group, backend, old.options, experts.overlap, experts.gemm_dtype == "fp8", device=device
    )
    made.has_unknown_experts = False
    return made


def _move(
    experts: EPExperts,
    dispatchers: Sequence[Dispatcher],
    group: ProcessGroup,
    members: Sequence[int],
    from_copies: bool,
) -> dict[int, list[Box]]:
    """Move the experts of one module. Return the parts of its parameters that no rank has."""
    dispatcher = dispatchers[0]
    old, new = experts.placement, dispatcher.expert_placement or Placement.of_layout(dispatcher.placement)
    stored = old.experts_of if from_copies else old.homes_of
    rows_of = [{expert: row for row, expert in enumerate(stored(member))} for member in members]
    names, own = list(experts.layout.parameters), dispatcher.rank
    stacks: dict[str, Tensor] = {name: getattr(experts, name).detach() for name in names}
    if experts.copies is not None and from_copies and old.has_copies:
        stacks = experts.copies.stacked()
    values = {name: stack.new_empty(len(new.homes_of(own)), *stack.shape[1:]) for name, stack in stacks.items()}
    transfers: list[RowTransfer] = []
    lost: list[tuple[int, int]] = []
    for rank in range(new.world):
        for row, expert in enumerate(new.homes_of(rank)):
            sources = [source for source, rows in enumerate(rows_of) if expert in rows]
            if rank in sources:
                for name in names if rank == own else ():
                    values[name][row] = stacks[name][rows_of[own][expert]]
            elif sources:
                source = sources[row % len(sources)]
                transfers.append(RowTransfer(source, rows_of[source][expert], rank, row))
            elif rank == own:
                lost.append((row, expert))

    if group_size(group) > 1:
        what, targets = f"moving the experts of layer {experts.label!r}", [values[name] for name in names]
        transfer_rows(channel_of(group), transfers, [stacks[name] for name in names], into(targets), what)
    experts.redistribute(dispatchers, values)
    return {id(getattr(experts, name)): _boxes(lost, values[name].shape[1:]) for name in names} if lost else {}


def _boxes(rows: Sequence[tuple[int, int]], shape: Sequence[int]) -> list[Box]:
    """Return the boxes of rows of ``shape``, given with the number of their expert."""
    rest = tuple(slice(0, size) for size in shape)
    return [Box((slice(row, row + 1), *rest), (slice(expert, expert + 1), *rest)) for row, expert in rows]
