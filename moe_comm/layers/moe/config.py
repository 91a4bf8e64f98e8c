"""What an MoE layer is made of. Frozen descriptions only; ``moe.py`` builds it."""

from __future__ import annotations

from dataclasses import dataclass

from moe_comm.dispatch.capacity import Capacity
from moe_comm.errors import ConfigError
from moe_comm.kernels.activations import Activation
from moe_comm.layers.moe.router import RouterConfig


@dataclass(frozen=True)
class ZeroExperts:
    """Zero-computation experts, whose ids follow those of the real ones: first identities, then those that add 0."""

    identity: int = 0
    zero: int = 0

    def __post_init__(self) -> None:
        if self.identity < 0 or self.zero < 0:
            raise ConfigError(f"numbers of zero-computation experts cannot be negative; got {self}")

    @property
    def total(self) -> int:
        return self.identity + self.zero


@dataclass(frozen=True)
class MoEConfig:
    """A whole MoE layer.

    hidden, ffn: D, and F of one expert.
    router: its ``num_experts`` counts real and zero-computation experts.
    shared_ffn: width of the shared expert; 0 for none. shared_gate: it has a sigmoid gate.
    capacity: bound on the rows per expert; None drops nothing.
    recompute: experts keep less for backward.
    experts_per_rank: how many real experts each expert-parallel rank holds; None spreads them evenly.
    """

    hidden: int
    ffn: int
    router: RouterConfig
    activation: str | Activation = "swiglu"
    expert_bias: bool = False
    zero_experts: ZeroExperts = ZeroExperts()
    shared_ffn: int = 0
    shared_gate: bool = False
    capacity: Capacity | None = None
    recompute: bool = False
    experts_per_rank: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.hidden < 1 or self.ffn < 1 or self.shared_ffn < 0:
            raise ConfigError(f"hidden and ffn must be at least 1; got {self.hidden}, {self.ffn}, {self.shared_ffn}")
        if self.num_experts < 1:
            raise ConfigError(
                f"no real expert is left of {self.router.num_experts}: all are zero-computation ({self.zero_experts})"
            )
        if self.shared_gate and not self.shared_ffn:
            raise ConfigError("shared_gate needs a shared expert; set shared_ffn")

    @property
    def num_experts(self) -> int:
        """Real experts of all ranks together."""
        return self.router.num_experts - self.zero_experts.total
