"""The section [offload] of a configuration: memory tiers of the optimizer state, of activations and of weights."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from moe_comm.runtime.untrusted import byte_count
from moe_comm.train.section_base import MOST, Section

Tier = Literal["none", "host", "file"]


class OffloadSection(Section):
    """Where optimizer state and separate fp32 masters are stored between updates, activations between passes, and
    weights while they are not used.

    Attributes:
        optimizer: "none": in memory, on the device of the parameters. "file": in a file for each rank. "host": in the
            host's memory, for ranks on a GPU.
        activations: where tensors that autograd saves in the layers are stored between forward and backward; tiers as
            for ``optimizer``. With ``model.recompute`` "full" these are the inputs of the layers.
        weights: "none": on the device. "host": shards of weights, gradients and optimizer state are in the host's
            memory, and the optimizer runs on the CPU. A layer's weights are copied to the device before its passes. It
            requires ``parallel.sharding`` "fsdp", and ``optimizer`` "none" or "file". On CPU ranks, shards are in the
            host's memory already: the run has the same results and saves nothing.
        budget: bytes of memory on the device for parts of the state, for each rank: a number of bytes, or a text such
            as "512MiB".
        activation_budget: bytes of memory on the device for stored activations, for each rank, in addition to
            ``budget``.
        path: an existing folder on a local disk for the files.
        in_flight: parts that are read or written while another one is used.
        deadline_s: seconds to wait for one part.
        checksums: verify the CRC-32 of each part that is read from the file.
    """

    optimizer: Tier = "none"
    activations: Tier = "none"
    weights: Literal["none", "host"] = "none"
    budget: str | int = 0
    activation_budget: str | int = 0
    path: str = Field(default="", max_length=4096)
    in_flight: int = Field(default=2, ge=1, le=64)
    deadline_s: float = Field(default=60.0, gt=0, le=MOST)
    checksums: bool = True

    @property
    def budget_bytes(self) -> int:
        """``budget`` in bytes."""
        return byte_count(self.budget)

    @property
    def limit(self) -> int | None:
        """Bytes of memory for offloaded state; None if it is in memory."""
        return None if self.optimizer == "none" else self.budget_bytes

    @property
    def activation_bytes(self) -> int:
        """``activation_budget`` in bytes."""
        return byte_count(self.activation_budget)

    @property
    def activation_limit(self) -> int | None:
        """Bytes of memory for stored activations; None if they are not offloaded."""
        return None if self.activations == "none" else self.activation_bytes

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key, tier, budget, size in (
            ("optimizer", self.optimizer, "budget", self.budget_bytes),
            ("activations", self.activations, "activation_budget", self.activation_bytes),
        ):
            if tier != "none" and not size:
                raise ValueError(f"{key} = {tier!r} requires {budget}, such as '512MiB' for each rank")
            if tier == "file" and not self.path:
                raise ValueError(f"{key} = 'file' requires path, a folder on a local disk")
        if self.weights == "host" and self.optimizer == "host":
            raise ValueError("weights = 'host' also stores the optimizer state on the host: set optimizer = 'none'")
        return self
