"""Ids of the slots to which a dispatcher sends the tokens of an expert.

A slot is a position among the experts that a rank holds, or one slice of it with expert tensor parallelism. The slots
of a rank have consecutive ids, so a dispatcher needs no table:

    owners of experts 0..3: ranks 1 0 1 0            slots of rank 0: 0 1    rank 1: 2 3
    expert ids  0 1 2 3   ─▶   slot ids  2 0 3 1

The rows of an expert with copies are divided over its owners. Each rank divides its own rows, in the order of (token,
slot), into one interval per owner. Their lengths follow from the rank's own counts (``rebalance.cut_rows``), so nothing
is exchanged, and a recomputed forward pass sends the rows to the same owners:

    owners of expert 0: ranks 0 and 1    rows 0 1 2 3 4 of a rank  ─▶  0 1 2 to rank 0, 3 4 to rank 1

If each rank divides its rows evenly over the ranks, then all rows are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_comm.topology import Placement
from moe_comm.topology.rebalance import cut_rows


class SlotTable:
    """Maps the global expert ids of a layer to ids of slots.

    Args:
        placement: ranks of each expert.
        parts: number of slices of each expert; each slice has its own slot.
    """

    def __init__(self, placement: Placement, parts: int) -> None:
        slices = placement.layout.slice_ids(parts)
        owners = [[slices[slot] for slot in slots] for slots in placement.slot_ids()]
        self._placement = placement
        # Offset from an expert id to its slot id: 0 for negative ids; for ids past the last expert, the number of slots
        # minus experts.
        by_expert = [[slot - expert for slot in homes] for expert, (homes, *_) in enumerate(owners)]
        more = sum(placement.slots_per_rank) * parts - placement.num_experts
        self._added_EP = torch.tensor([[0] * parts, *by_expert, [more] * parts], dtype=torch.int64, device="cpu")
        self._owners = {
            expert: torch.tensor(slots, dtype=torch.int64, device="cpu")
            for expert, slots in enumerate(owners)
            if len(slots) > 1
        }

    def __call__(self, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Return [T, K * parts] ids of the slots of each token's experts, and their weights.

        Negative ids remain. An id past the last expert becomes an id past the last slot, which dispatch rejects.
        """
        if self._added_EP.device != ids_TK.device:
            self._added_EP = self._added_EP.to(ids_TK.device)
            self._owners = {expert: slots_OP.to(ids_TK.device) for expert, slots_OP in self._owners.items()}
        parts = self._added_EP.shape[1]
        ids_TK = ids_TK.long()
        ids_TKP = ids_TK.unsqueeze(-1) + self._added_EP[ids_TK.clamp(-1, self._placement.num_experts) + 1]
        if self._owners:
            self._divide(ids_TK.reshape(-1), ids_TKP.view(-1, parts))
        if parts == 1:
            return ids_TKP.squeeze(-1), weights_TK
        return ids_TKP.flatten(1), weights_TK.unsqueeze(-1).expand_as(ids_TKP).flatten(1)

    def _divide(self, ids_N: Tensor, slots_NP: Tensor) -> None:
        """Write the slots of the owners of each expert with copies."""
        experts = self._placement.num_experts
        keys_N = torch.where((ids_N >= 0) & (ids_N < experts), ids_N, experts)
        counts = torch.bincount(keys_N, minlength=experts + 1).tolist()
        lengths = cut_rows(counts[:experts], self._placement)
        for expert, slots_OP in self._owners.items():
            # With the size, the CPU does not wait for the GPU.
            rows_N = (ids_N == expert).nonzero_static(size=counts[expert]).squeeze(1)
            for slots_P, rows in zip(slots_OP, rows_N.split(lengths[expert]), strict=True):
                slots_NP[rows] = slots_P
