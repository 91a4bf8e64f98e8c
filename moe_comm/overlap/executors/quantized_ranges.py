"""Rows of one dispatch for experts with fp8 GEMMs, quantized row range by row range after they are received."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_comm.dispatch.wire_dtype import WireDtype, bytes_per_row, pack, scaled_format, unpack_scaled
from moe_comm.runtime.memory import warm_rows


class QuantizedRanges:
    """Quantizes ranges of ``rows_RD`` in ``scaled_format`` of the wire dtype of dispatch. Other rows may be in flight.

    Attributes:
        rows: the quantized rows. Those of ranges that were not quantized are undefined.
    """

    def __init__(self, rows_RD: Tensor, wire_dtype: WireDtype) -> None:
        (num_rows, hidden), self._format = rows_RD.shape, scaled_format(wire_dtype)
        words = bytes_per_row(hidden, self._format, rows_RD.dtype) // 8
        self._rows_RD, self._packed_RX = rows_RD, warm_rows(num_rows, words, torch.int64, rows_RD.device)
        self.rows = unpack_scaled(self._packed_RX, self._format, hidden)

    def quantize(self, rows: slice) -> None:
        self._packed_RX[rows] = pack(self._rows_RD[rows], self._format)
