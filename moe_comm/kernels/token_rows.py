"""Rows that experts read in place, where their tokens are, instead of from a copy that is sorted by expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_comm.runtime.memory import warm_rows

PLACE_BYTES = 8
CPU = torch.device("cpu")


@dataclass(slots=True, eq=False)  # a frozen dataclass takes longer to construct
class TokenRows:
    """Rows [R, D], sorted by expert. Each is a token of some rank, in the memory of that rank.

    It has the shape, dtype, device and row ranges of a tensor of rows.

    Attributes:
        base, tokens: address and number of the tokens of each rank.
        stride: bytes between tokens.
        place: address of the packed places (rank, token) of all rows (csrc/layout.h).
        shape: R and D.
        copy: Writes a number of rows from a first one on to an address.
        keep: Keeps the memory valid.
        first: Position of the first row among all rows.
    """

    base: list[int]
    tokens: list[int]
    stride: int
    place: int
    shape: tuple[int, int]
    dtype: torch.dtype
    copy: Callable[[int, int, int], None]
    keep: object
    first: int = 0

    @classmethod
    def unreadable(cls, num_rows: int, width: int, dtype: torch.dtype) -> TokenRows:
        """Return the description of rows that nothing reads."""
        return cls([], [], 0, 0, (num_rows, width), dtype, lambda *_: None, None)

    @property
    def device(self) -> torch.device:
        return CPU

    def __getitem__(self, rows: slice) -> TokenRows:
        first, last, _ = rows.indices(self.shape[0])
        return replace(self, first=self.first + first, shape=(last - first, self.shape[1]))

    def operand(self) -> tuple[list[int], list[int], int, int, int, int, int]:
        """Return the rows as the GEMMs of the native core take them (csrc/bind_gemm.cpp)."""
        if not self.shape[0]:  # an empty list has no address
            return [0], [0], self.stride, 0, 0, *self.shape
        return self.base, self.tokens, self.stride, self.place + PLACE_BYTES * self.first, 0, *self.shape

    def dense(self) -> Tensor:
        """Return a copy of the rows."""
        rows_RD = warm_rows(*self.shape, self.dtype, CPU)
        if rows_RD.numel():
            self.copy(self.first, self.shape[0], rows_RD.data_ptr())
        return rows_RD


Rows = Tensor | TokenRows
"""[R, D], sorted by expert."""
