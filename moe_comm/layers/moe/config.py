"""Configuration of an MoE layer, and the ranks that it runs on. ``MoELayer.build`` builds the layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.distributed import ProcessGroup

from moe_comm.comm.group_setup import as_group
from moe_comm.dispatch.slots.capacity import Capacity
from moe_comm.errors import ConfigError
from moe_comm.kernels.activations import Activation
from moe_comm.kernels.fp8 import GemmDtype, check_gemm_dtype
from moe_comm.layers.moe.router import RouterConfig, ZeroExperts
from moe_comm.topology import Placement

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class MoEConfig:
    """Configuration of an MoE layer.

    Args:
        hidden: width D of the tokens.
        ffn: width F of one expert.
        router: router, with the number of experts.
        activation: name of a registered activation, or an ``Activation``.
        expert_bias: both linears of the experts have biases.
        shared_ffn: width of the shared expert; 0 builds none.
        shared_gate: scale the shared expert's output by a learned sigmoid gate.
        capacity: maximum number of rows per expert; None drops no row.
        recompute: recompute the activations of experts in backward instead of storing them.
        experts_per_rank: number of real experts on each expert-parallel rank; None distributes them evenly.
        placement: the expert-parallel ranks that hold each expert, in place of ``experts_per_rank``. The results have
            the same bits for every placement.
        expert_gemm_dtype: operands of the experts' forward GEMMs, see ``Experts.gemm_dtype``. "fp8" needs ``hidden`` to
            be a multiple of 128, and another executor than "device". If the wire dtype of dispatch is fp8, experts read
            the received bytes.

    Raises:
        ConfigError: a size is out of range, ``shared_gate`` without a shared expert, fp8 with another ``hidden``, or a
            placement that does not fit.
    """

    hidden: int
    ffn: int
    router: RouterConfig
    activation: str | Activation = "swiglu"
    expert_bias: bool = False
    shared_ffn: int = 0
    shared_gate: bool = False
    capacity: Capacity | None = None
    recompute: bool = False
    experts_per_rank: tuple[int, ...] | None = None
    expert_gemm_dtype: GemmDtype = field(default="same", kw_only=True)
    placement: Placement | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.hidden < 1 or self.ffn < 1 or self.shared_ffn < 0:
            raise ConfigError(f"hidden and ffn must be at least 1; got {self.hidden}, {self.ffn}, {self.shared_ffn}")
        check_gemm_dtype(self.expert_gemm_dtype, self.hidden)
        if self.shared_gate and not self.shared_ffn:
            raise ConfigError("shared_gate needs a shared expert; set shared_ffn")
        if self.placement is not None and self.experts_per_rank is not None:
            raise ConfigError("placement determines the experts of each rank; do not set experts_per_rank as well")

    def placement_on(self, world: int) -> Placement:
        """Return the placement of the experts on ``world`` expert-parallel ranks.

        Raises:
            ConfigError: ``placement`` or ``experts_per_rank`` is for another number of experts or ranks.
        """
        if self.placement is None:
            return Placement.contiguous(self.num_experts, world, self.experts_per_rank)
        return self.placement.fitting(self.num_experts, world)

    @property
    def num_experts(self) -> int:
        """Number of real experts of all ranks together."""
        return self.router.num_experts

    @property
    def zero_experts(self) -> ZeroExperts:
        """Zero-computation experts of the router."""
        return self.router.zero_experts


@dataclass(frozen=True)
class MoEGroups:
    """Process groups of an MoE layer in a folded mapping: attention and experts group the same ranks differently.

    Args:
        experts: the ep * etp ranks that share one set of experts, etp fastest; None holds every expert on this rank.
        etp: number of ranks that share each expert (expert tensor parallelism).
        tokens: the ranks that hold the tokens of one micro-batch: all ranks of a pipeline stage. Auxiliary losses and
            a capacity of scope "batch" cover their tokens together. None: ``experts``.
        sequence: the ranks that share each sequence (context and tensor parallelism), for the sequence-wise balance
            loss. None: each sequence is on one rank.
    """

    experts: ProcessGroup | None = None
    etp: int = 1
    tokens: ProcessGroup | None = None
    sequence: ProcessGroup | None = None

    @classmethod
    def of(cls, group: ProcessGroup | DeviceMesh | MoEGroups | None) -> MoEGroups:
        """Return ``group`` itself, or the groups of a layer whose experts are distributed over ``group`` alone."""
        return group if isinstance(group, MoEGroups) else cls(as_group(group, "ep"))
