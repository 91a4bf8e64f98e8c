"""Checksums of dispatched rows: sender and receiver sum the bits of each block of rows.

    rank 0   x_TD ─▶ round to wire dtype ─▶ sum of each row ─▶ sum by expert ─┐ all-gather of [2, E]: number of rows
    rank 1   the same                                                         ├─▶ and sum of each (source, expert)
    ...                                                                       ┘
    rows_RD ─▶ sum of each row ─▶ sum by (expert, source) ─▶ compare

The sum of a row adds its bits as 64-bit words (or narrower words, if its size is not a multiple of 8 bytes) modulo
2^64. It detects every single flipped bit, and other corruption except for one case in 2^64. It does not detect two
flips that cancel each other in the sum of their block, or rows of one block in another order. The sender reads its
tokens once, whatever K is. The receiver reads its rows once. The exchange takes 16 bytes per expert.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_comm.dispatch.wire_dtype import WireDtype, rounded
from moe_comm.errors import CorruptPayload
from moe_comm.runtime.memory import as_dtype

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def row_sums(rows_RD: Tensor) -> Tensor:
    """Return [R] int64, the sum modulo 2^64 of the words of each row. Any floating-point dtype and strides."""
    rows_RD = rows_RD.detach()
    num_rows, width = rows_RD.shape
    if not width or not num_rows:
        return torch.zeros(num_rows, dtype=torch.int64, device=rows_RD.device)
    # The word size depends on the shape alone, so sender and receiver use the same one.
    size = next(size for size in _WORDS if width * rows_RD.element_size() % size == 0)
    rows_RD = rows_RD.contiguous()
    if rows_RD.data_ptr() % size:
        rows_RD = rows_RD.clone()
    return as_dtype(_WORDS[size], rows_RD).sum(1, dtype=torch.int64)


@dataclass
class CorruptionLog:
    """Checksum mismatches of a dispatcher's rows since the last ``take`` or ``fault``.

    count_only: the caller reads the count with ``take``. If False, the dispatcher's next call raises on every rank.
    """

    count_only: bool = False
    _mismatches: list[tuple[Tensor, range, str]] = field(default_factory=list)

    def note(self, bad_EW: Tensor, experts: range, description: str) -> None:
        """Record mismatches. ``bad_EW`` is bool: [experts of this rank, source ranks]."""
        # On a GPU, reading the value here would synchronise; ``take`` and ``fault`` read it later.
        if bad_EW.device.type != "cpu" or bool(bad_EW.any()):
            self._mismatches.append((bad_EW, experts, description))

    def take(self) -> int:
        """Return the number of corrupt blocks of rows, and reset it."""
        mismatches, self._mismatches = self._mismatches, []
        return sum(int(bad_EW.sum()) for bad_EW, _, _ in mismatches)

    def fault(self) -> CorruptPayload | None:
        """Return the error to raise, if any, and reset."""
        if self.count_only:
            return None
        mismatches, self._mismatches = self._mismatches, []
        for bad_EW, experts, description in mismatches:
            bad = bad_EW.nonzero().tolist()
            if bad:
                expert, source = bad[0]
                return CorruptPayload(
                    f"rows of expert {experts[expert]} from rank {source} differ from those that were sent, in "
                    f"{description}; {len(bad)} of {bad_EW.numel()} blocks differ. Run the step again; if the error "
                    "repeats, check the memory and the network of these two ranks"
                )
        return None


@dataclass(frozen=True, eq=False)
class SentChecksums:
    """Checksums of the rows of one dispatch, from all ranks.

    expected_W2E: by rank and expert, the number of rows sent and their sum.
    narrowed: whether the rows were converted to a wire dtype.
    """

    expected_W2E: Tensor
    narrowed: bool
    experts: range
    log: CorruptionLog
    description: str

    def check(self, rows_RD: Tensor) -> None:
        """Compare the rows returned by dispatch with their checksums, and record mismatches."""
        expected_2EW = self.expected_W2E[:, :, self.experts.start : self.experts.stop].permute(1, 2, 0)
        counts = expected_2EW[0].reshape(-1)
        ends = counts.cumsum(0)
        sums_R = row_sums(_without_nan(rows_RD, self.narrowed))
        # The sum of a block is a difference of running sums, modulo 2^64.
        running = torch.cat((sums_R.new_zeros(1), sums_R.cumsum(0)))
        received_EW = (running[ends] - running[ends - counts]).view(expected_2EW.shape[1:])
        self.log.note(received_EW != expected_2EW[1], self.experts, self.description)


def sums_by_expert(x_TD: Tensor, ids_TK: Tensor, wire_dtype: WireDtype, num_experts: int) -> Tensor:
    """Return [2, E] int64: the number of rows that this rank sends to each expert, and the sum of their words."""
    sums_T = row_sums(_without_nan(rounded(x_TD.detach(), wire_dtype), wire_dtype.narrows(x_TD.dtype)))
    flat = ids_TK.reshape(-1).long()
    place = torch.where(flat < 0, num_experts, flat)
    sums_2E = sums_T.new_zeros(2, num_experts + 1)
    sums_2E[0].scatter_add_(0, place, torch.ones_like(place))
    sums_2E[1].scatter_add_(0, place, sums_T.repeat_interleave(ids_TK.shape[1]))
    return sums_2E[:, :num_experts].contiguous()


def _without_nan(rows_RD: Tensor, narrowed: bool) -> Tensor:
    """Replace NaN and -0 by 0 if rows were converted to a wire dtype: decoding may change the bits of NaN and -0."""
    return rows_RD.detach().masked_fill(rows_RD.isnan(), 0.0) + 0.0 if narrowed else rows_RD
