"""Ids of the slots to which a dispatcher sends the tokens of an expert.

A slot is a position among the experts that a rank holds, or one slice of it with expert tensor parallelism. The slots
of a rank have consecutive ids, so a dispatcher needs no table:

    owners of experts 0..3: ranks 1 0 1 0            slots of rank 0: 0 1    rank 1: 2 3
    expert ids  0 1 2 3   ─▶   slot ids  2 0 3 1
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_comm.topology import Placement


class SlotTable:
    """Maps the global expert ids of a layer to ids of slots.

    Args:
        placement: ranks of each expert.
        parts: number of slices of each expert; each slice has a slot of its own.
    """

    def __init__(self, placement: Placement, parts: int) -> None:
        slices = placement.layout.slice_ids(parts)
        self._slots_EP = torch.tensor([slices[slots[0]] for slots in placement.slot_ids()], device="cpu")

    @classmethod
    def of(cls, placement: Placement, parts: int) -> SlotTable | None:
        """Return the table, or None if the id of each expert is the id of its slot."""
        return None if placement.is_contiguous and parts == 1 else cls(placement, parts)

    def __call__(self, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Return [T, K * parts] ids of the slots of each token's experts, and their weights.

        Negative ids remain. An id past the last expert becomes an id past the last slot, which dispatch rejects.
        """
        if self._slots_EP.device != ids_TK.device:
            self._slots_EP = self._slots_EP.to(ids_TK.device)
        slots_EP = self._slots_EP
        experts, parts = slots_EP.shape
        invalid_TK1 = torch.where(ids_TK < 0, ids_TK, ids_TK + experts * (parts - 1)).long().unsqueeze(-1)
        is_expert_TK1 = ((ids_TK >= 0) & (ids_TK < experts)).unsqueeze(-1)
        ids_TKP = torch.where(is_expert_TK1, slots_EP[ids_TK.clamp(0, experts - 1).long()], invalid_TK1)
        if parts == 1:
            return ids_TKP.squeeze(-1), weights_TK
        return ids_TKP.flatten(1), weights_TK.unsqueeze(-1).expand_as(ids_TKP).flatten(1)
