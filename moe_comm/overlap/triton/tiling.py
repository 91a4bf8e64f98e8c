"""How the kernels of the operators for experts cut their work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_comm.errors import ConfigError
from moe_comm.overlap.options import at_least_one

INTERPRETED_PROGRAMS = 4
"""They run one after another anyway."""


@dataclass(frozen=True)
class ExpertTiling:
    """How the kernels cut their work. The same on every rank, which is checked.

    rows, columns, inner: of a tile of the GEMM, and its steps; powers of two, at least 16.
    send_rows, send_columns: of what a program copies at once; powers of two.
    sum_tokens: tokens that a program sums at once; a power of two.
    slices: parts of the columns in which results go back.
    extra_tiles: see ``tiles.Cut``.
    programs: of a kernel together; None: one for each processor of the GPU. All must run at once, as each may wait.
    communicating: share of the programs that send, relay or sum; at least one of each.
    communicators: how many of them do, in place of a share.
    relay: a token's row travels once to each rank that has experts of it.
    warps, stages: of a compiled program, and of its loop over ``inner``.
    """

    rows: int = 64
    columns: int = 64
    inner: int = 32
    send_rows: int = 16
    send_columns: int = 128
    sum_tokens: int = 16
    slices: int = 4
    extra_tiles: float = 0.25
    programs: int | None = None
    communicating: float = 0.2
    communicators: int | None = None
    relay: bool = False
    warps: int = 4
    stages: int = 3

    def __post_init__(self) -> None:
        for name in (
            "rows",
            "columns",
            "inner",
            "send_rows",
            "send_columns",
            "sum_tokens",
            "slices",
            "warps",
            "stages",
        ):
            at_least_one(name, getattr(self, name))
        for name, least in (("rows", 16), ("columns", 16), ("inner", 16), ("send_rows", 1), ("send_columns", 1)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ConfigError(f"{name} must be a power of two of at least {least}; got {value}")
        if self.sum_tokens & (self.sum_tokens - 1):
            raise ConfigError(f"sum_tokens must be a power of two; got {self.sum_tokens}")
        if self.programs is not None and self.programs < 3:
            raise ConfigError(f"programs must be at least 3, one to send, relay and compute; got {self.programs}")
        if self.communicators is not None:
            at_least_one("communicators", self.communicators)
        if not 0 <= self.communicating < 1:
            raise ConfigError(f"communicating must be a share below 1; got {self.communicating}")

    @classmethod
    def of(cls, dtype: torch.dtype, *, relay: bool = False) -> ExpertTiling:
        """For rows of ``dtype``: fp32 is multiplied without tensor cores, in smaller tiles so as not to spill."""
        if dtype == torch.float32:
            return cls(relay=relay)
        return cls(rows=128, columns=128, inner=64, warps=8, relay=relay)

    def split(self, processors: int, kinds: int) -> tuple[int, int]:
        """Programs for each of ``kinds`` kinds of communication, and those that compute.

        Raises:
            ConfigError: none is left to compute.
        """
        total = self.programs or processors
        if self.communicators is not None and self.communicators >= max(total, 2):
            raise ConfigError(f"{self.communicators} programs to communicate leave none of {total}; give fewer")
        each = max(1, (self.communicators or int(total * self.communicating)) // kinds)
        return each, max(1, total - kinds * each)

    def launch(self, device: torch.device) -> dict[str, Any]:
        """Options of a launch. Cooperative: CUDA refuses a grid that is not resident at once, where it would hang."""
        if device.type != "cuda":
            return {}
        return {"num_warps": self.warps, "num_stages": self.stages, "launch_cooperative_grid": True}

    def slices_of(self, columns: int) -> int:
        """In how many parts ``columns`` columns go back: not more than there are blocks of them."""
        return min(self.slices, -(-columns // self.columns))


def processors(device: torch.device) -> int:
    """Programs that can run at once, one each."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return INTERPRETED_PROGRAMS
