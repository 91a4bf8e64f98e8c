"""Options of the plugin in axolotl's YAML."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class MoeCommArgs(BaseModel):
    """Fields that axolotl adds to its schema."""

    moe_comm_ep_size: int | None = Field(default=None, ge=1)
    """Ranks that the experts are distributed over; None for all ranks. It divides the number of ranks."""
    moe_comm_backend: str = "auto"
    """Dispatch backend; see ``make_dispatcher``."""
    moe_comm_overlap: bool | Literal["auto"] = False
    """Run dispatch and combine during the expert GEMMs; "auto": where that is faster."""
    moe_comm_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds to wait for a live peer."""
