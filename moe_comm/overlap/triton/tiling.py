"""Tile sizes and numbers of programs of the kernels for experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_comm.errors import ConfigError
from moe_comm.overlap.options import at_least_one


@dataclass(frozen=True)
class ExpertTiling:
    """How the kernels split their work. The same on every rank, which is checked.

    rows, columns, inner: tile of the GEMM, and its step along the inner dimension; powers of two, at least 16.
    send_rows, send_columns: block that a program copies at once; powers of two.
    sum_tokens: tokens that a program sums at once; a power of two.
    slices: slices of the columns in which results are returned.
    extra_tiles: see ``tiles.Cut``.
    programs: total number; None: ``waiting_programs`` of the GPU. All must be resident at once, since each may wait.
    communicating: fraction of the programs that send, relay or sum; at least one of each.
    communicators: number of programs that send, relay or sum, instead of the fraction.
    relay: send a token's row once to each rank that has experts for it.
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
        for name in ("slices", "warps", "stages"):
            at_least_one(name, getattr(self, name))
        minimum = {"rows": 16, "columns": 16, "inner": 16, "send_rows": 1, "send_columns": 1, "sum_tokens": 1}
        for name, least in minimum.items():
            value = getattr(self, name)
            at_least_one(name, value)
            if value < least or value & (value - 1):
                raise ConfigError(f"{name} must be a power of two of at least {least}; got {value}")
        if self.programs is not None and self.programs < 3:
            raise ConfigError(f"programs must be at least 3, one to send, relay and compute; got {self.programs}")
        if self.communicators is not None:
            at_least_one("communicators", self.communicators)
        if not 0 <= self.communicating < 1:
            raise ConfigError(f"communicating must be a fraction below 1; got {self.communicating}")

    @classmethod
    def of(cls, dtype: torch.dtype, *, relay: bool = False) -> ExpertTiling:
        """Return the default for rows of ``dtype``. fp32 uses no tensor cores, and smaller tiles to avoid spills."""
        if dtype == torch.float32:
            return cls(relay=relay)
        return cls(rows=128, columns=128, inner=64, warps=8, relay=relay)

    def split(self, processors: int, kinds: int) -> tuple[int, int]:
        """Return the programs for each of ``kinds`` kinds of communication, and the programs that compute.

        Raises:
            ConfigError: no program is left to compute.
        """
        total = self.programs or processors
        if self.communicators is not None and self.communicators >= max(total, 2):
            raise ConfigError(f"{self.communicators} communicating programs leave none of {total} to compute")
        per_kind = max(1, (self.communicators or int(total * self.communicating)) // kinds)
        return per_kind, max(1, total - kinds * per_kind)

    @property
    def blocks(self) -> dict[str, int]:
        """The tile sizes as kernel arguments."""
        return {"BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_K": self.inner}

    def launch(self, device: torch.device) -> dict[str, Any]:
        """Return launch options. Cooperative: CUDA rejects a grid that is not resident at once and would deadlock."""
        if device.type != "cuda":
            return {}
        return {"num_warps": self.warps, "num_stages": self.stages, "launch_cooperative_grid": True}

    def slices_of(self, columns: int) -> int:
        """Return the number of slices for ``columns`` columns: at most one for each block of columns."""
        return min(self.slices, -(-columns // self.columns))
