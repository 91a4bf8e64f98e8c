"""Whether rows arrived as they were sent: one sum for each block of rows, taken on both sides.

    rank 0   x_TD ─▶ what the payload makes of it ─▶ a sum for each row ─▶ added up by expert ─┐ all-gather of [2, E]:
    rank 1   the same                                                                          ├─▶ rows and sums of each
    ...                                                                                        ┘   (source, expert)
    rows_RD ─▶ a sum for each row ─▶ added up by (expert, source), as the rows stand ─▶ compared

A row's sum is that of its bits as 64-bit words (narrower ones where they do not come out even), modulo 2^64. So a
single flipped bit is always seen, and other damage but for one case in 2^64; two flips that undo each other in the sum
of their block are not, nor are rows of one block that changed places. The sender reads its tokens once, however many
experts they go to; the receiver reads its rows once more; 16 bytes an expert travel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_comm.comm.meeting import channel_of
from moe_comm.dispatch.wire_dtype import rounded
from moe_comm.errors import CorruptPayload
from moe_comm.runtime.memory import as_dtype

if TYPE_CHECKING:
    from moe_comm.comm.header import Header
    from moe_comm.dispatch.base import Dispatcher

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def row_sums(rows_RD: Tensor) -> Tensor:
    """[R] int64, the sum of the words of each row, modulo 2^64. Any floating-point dtype, any strides; no autograd."""
    rows_RD = rows_RD.detach()
    num_rows, width = rows_RD.shape
    if not width or not num_rows:
        return torch.zeros(num_rows, dtype=torch.int64, device=rows_RD.device)
    # Which words depends on the shape alone: the other side, where rows stand elsewhere, must take the same.
    size = next(size for size in _WORDS if width * rows_RD.element_size() % size == 0)
    rows_RD = rows_RD.contiguous()
    if rows_RD.data_ptr() % size:
        rows_RD = rows_RD.clone()
    return as_dtype(_WORDS[size], rows_RD).sum(1, dtype=torch.int64)


@dataclass
class Damage:
    """What a dispatcher found wrong in rows that arrived, since it was last asked.

    count_only: for a caller who asks (``take``) and then decides with all ranks; else the dispatcher's next call raises
    it on every rank.
    """

    count_only: bool = False
    _found: list[tuple[Tensor, range, str]] = field(default_factory=list)

    def note(self, bad_EW: Tensor, experts: range, description: str) -> None:
        """bad_EW: bool, which blocks of this rank's ``experts`` from which rank differ."""
        # On other devices asking would wait for them: later.
        if bad_EW.device.type != "cpu" or bool(bad_EW.any()):
            self._found.append((bad_EW, experts, description))

    def take(self) -> int:
        """Blocks of rows that were damaged."""
        found, self._found = self._found, []
        return sum(int(bad_EW.sum()) for bad_EW, _, _ in found)

    def fault(self) -> CorruptPayload | None:
        """What is to be raised, once."""
        if self.count_only:
            return None
        found, self._found = self._found, []
        for bad_EW, experts, description in found:
            bad = bad_EW.nonzero().tolist()
            if bad:
                expert, source = bad[0]
                return CorruptPayload(
                    f"rows of expert {experts[expert]} from rank {source} are not those that it sent, in {description}; "
                    f"{len(bad)} of {bad_EW.numel()} blocks differ. Run the step again; if it comes again, suspect the "
                    "memory or the network of these two ranks"
                )
        return None


@dataclass(frozen=True, eq=False)
class Claim:
    """What all ranks say of the rows of one dispatch.

    told_W2E: for each rank and expert, how many rows it sends there and the sum of their sums.
    """

    told_W2E: Tensor
    narrowed: bool
    experts: range
    damage: Damage
    description: str

    def check(self, rows_RD: Tensor) -> None:
        """Compare with what stands here, rows as dispatch gives them, and note what differs."""
        told_2EW = self.told_W2E[:, :, self.experts.start : self.experts.stop].permute(1, 2, 0)
        counts = told_2EW[0].reshape(-1)
        ends = counts.cumsum(0)
        sums_R = row_sums(_without_nan(rows_RD, self.narrowed))
        running = torch.cat((sums_R.new_zeros(1), sums_R.cumsum(0)))
        found_EW = (running[ends] - running[ends - counts]).view(told_2EW.shape[1:])
        self.damage.note(found_EW != told_2EW[1], self.experts, self.description)


def claim(dispatcher: Dispatcher, x_TD: Tensor, ids_TK: Tensor, header: Header) -> Claim | None:
    """Tell the other ranks what is sent, and learn what they send. Collective, once headers have been compared.

    Args:
        x_TD, ids_TK: as ``Dispatcher.dispatch`` takes them.

    Returns:
        None without ``DispatchOptions.checksums``, and where ranks have no group (several in one process).
    """
    if not dispatcher.options.checksums or (dispatcher.group is None and dispatcher.world > 1):
        return None
    wire_dtype = dispatcher.options.wire_dtypes.of(header.op)
    narrowed = wire_dtype.narrows(x_TD.dtype)
    sums_T = row_sums(_without_nan(rounded(x_TD.detach(), wire_dtype), narrowed))
    num_experts, (_, top_k) = dispatcher.num_experts, ids_TK.shape
    flat = ids_TK.reshape(-1).long()
    place = torch.where(flat < 0, num_experts, flat)
    told_2E = sums_T.new_zeros(2, num_experts + 1)
    told_2E[0].scatter_add_(0, place, torch.ones_like(place))
    told_2E[1].scatter_add_(0, place, sums_T.repeat_interleave(top_k))
    told_2E = told_2E[:, :num_experts].contiguous()
    description = f"dispatch (call {header.seq})" + (f" of layer {header.label!r}" if header.label else "")
    if dispatcher.group is None or dispatcher.world == 1:
        told_W2E = told_2E.unsqueeze(0)
    else:
        told_W2E = channel_of(dispatcher.group).all_gather(told_2E, f"the checksums of {description}")
    return Claim(told_W2E, narrowed, dispatcher.local_experts, dispatcher.damage, description)


def _without_nan(rows_RD: Tensor, narrowed: bool) -> Tensor:
    """Rows in which all NaN and all zeros have the same bits, where a payload was decoded: its decoder may choose those
    of NaN, and the sign of zero. Rows that travel as they are keep all bits."""
    return rows_RD.detach().masked_fill(rows_RD.isnan(), 0.0) + 0.0 if narrowed else rows_RD


__all__ = ["Claim", "Damage", "claim", "row_sums"]
