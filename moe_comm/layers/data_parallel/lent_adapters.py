"""Low-rank adapters (LoRA) of experts that other ranks compute in one call (``lending.py``).

    forward    A and B of a lent expert: home ─▶ rank of the plan
    backward   their gradients: rank of the plan ─▶ home, which adds them in the order of the owners, in fp32

A and B have few elements, so each call sends them, also between ranks that read the weights of others in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moe_comm.kernels.low_rank import LowRank
from moe_comm.layers.data_parallel.copies import entered

Adapters = Mapping[str, Sequence[LowRank]]
"""The active adapters by parameter, in the same order on all ranks."""


def lend_adapters(
    adapters: Adapters,
    experts: tuple[int, ...],
    offsets: tuple[int, ...],
    homes: int,
    send: Callable[[Sequence[Tensor], Sequence[Tensor]], None],
    add: Callable[[Sequence[Tensor], Sequence[Tensor]], None],
) -> tuple[Adapters, Callable[[], None]]:
    """Return the adapters of the experts in the slots of this rank, and a function that receives those of lent experts.

    The function is collective. Call it before the experts run. The adapters enter the autograd graph here, so before
    the dispatch their backward follows that of the dispatch, as that of weights (``LentExperts.begin``).

    Args:
        experts: global ids of the experts in the rank's slots; -1 for an empty slot.
        offsets: for each of them, the number of rows that other owners compute before this rank's.
        homes: number of slots with experts whose home is this rank, which are the first.
        send: sends rows of tensors [homes, ...] to rows of tensors [slots, ...] of other ranks. Collective.
        add: adds rows of gradients [slots, ...] to those [homes, ...] of the homes, in place. Collective.
    """
    flat = [one for of_parameter in adapters.values() for one in of_parameter]
    own = {f"{index}.{key}": t for index, one in enumerate(flat) for key, t in (("a", one.a_ELI), ("b", one.b_ELO))}
    result, received = dict[str, Tensor](), list[tuple[list[Tensor], list[Tensor]]]()

    def take(like: Mapping[str, Tensor], names: Sequence[str], grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the gradients of this rank's adapters, after adding those of other ranks. Collective."""
        of_slots = [torch.zeros_like(like[name]) if g is None else g for name, g in zip(names, grads, strict=True)]
        own = [grad[:homes].clone() for grad in of_slots]
        add(of_slots, own)
        return own

    for dtype in dict.fromkeys(t.dtype for t in own.values()):
        params = {name: t for name, t in own.items() if t.dtype == dtype}
        slots = {name: t.new_zeros(len(experts), *t.shape[1:]) for name, t in params.items()}
        with torch.no_grad():
            for name, t in params.items():
                slots[name][:homes] = t
        memory = {name: t.detach() for name, t in slots.items()}  # without the graph, which keeps it
        received.append(([t.detach() for t in params.values()], list(memory.values())))
        trained = {name: t for name, t in params.items() if t.requires_grad} if torch.is_grad_enabled() else {}
        result |= entered(slots, trained, partial(take, memory))

    def receive() -> None:
        for tensors, out in received:
            send(tensors, out)

    def in_slots(index: int) -> LowRank:
        one = flat[index]
        dropout = one.dropout and replace(one.dropout, experts=experts, offsets=offsets)
        return replace(one, a_ELI=result[f"{index}.a"], b_ELO=result[f"{index}.b"], dropout=dropout)

    numbers = iter(range(len(flat)))
    return {name: [in_slots(next(numbers)) for _ in of] for name, of in adapters.items()}, receive
