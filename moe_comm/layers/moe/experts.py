"""The experts of one rank, with stacked weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_comm.dispatch.expert_call import ExpertCall, run_mlp
from moe_comm.dispatch.types import OnDevice
from moe_comm.errors import ConfigError
from moe_comm.kernels.activations import Activation, Composed, activation_of
from moe_comm.kernels.autograd import cast_parameter
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.kernels.fp8 import GemmDtype
from moe_comm.kernels.native import TRITON_DEVICES
from moe_comm.topology import Placement, Sharding, Split

if TYPE_CHECKING:
    from moe_comm.layers.data_parallel.copies import ExpertCopies
    from moe_comm.layers.data_parallel.lent_call import LentCall


_PARAMETERS = "w13", "w2", "b13", "b2"


def has_hooks(*modules: nn.Module, foreign: bool = False, known: object = None) -> bool:
    """Return whether a hook, of ``modules`` or of all modules, or a replaced ``forward`` sees arguments or results.

    Args:
        foreign: ignore hooks of this library and of torch, such as FSDP's.
        known: a hook to ignore.
    """
    every = torch.nn.modules.module
    hooks = [
        *every._global_forward_pre_hooks.values(),
        *every._global_forward_hooks.values(),
        *every._global_backward_hooks.values(),
        *every._global_backward_pre_hooks.values(),
    ]
    for module in modules:
        if "forward" in vars(module):
            return True
        hooks += module._forward_pre_hooks.values()
        hooks += module._forward_hooks.values()
        hooks += module._backward_hooks.values()
        hooks += module._backward_pre_hooks.values()
    if not foreign:
        return bool(set(hooks) - {known})
    return any(not (getattr(hook, "__module__", None) or "").startswith(("moe_comm.", "torch.")) for hook in hooks)


@dataclass(frozen=True)
class ExpertSlice:
    """Slice ``index`` of ``count`` equal slices of each expert's width F, for expert tensor parallelism."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ConfigError(f"the slice index must be in 0..{self.count - 1}; got {self.index}")


class Experts(nn.Module):
    """E experts, each activation(x @ w13.T + b13) @ w2.T + b2, applied to rows that are grouped by expert.

    With a slice of each expert, w13, b13 and w2 are split along F, and the outputs of the etp ranks add up to the
    experts':

        w13 [gate 0 .. F | up 0 .. F]   slice 1 of 2 holds  [gate F/2 .. F | up F/2 .. F]  ─▶ half of the activation
        w2  [D, 0 .. F]                 slice 1 of 2 holds  [D, F/2 .. F]                  ─▶ half of the sum over F

    Args:
        num_experts: E, the number of experts of this rank; zero is allowed.
        hidden: D.
        ffn: F of a complete expert.
        activation: a name in ``ACTIVATIONS`` or an ``Activation``; G = 2F if it is gated, else F.
        bias: create b13 and b2.
        transposed: store w13 as [E, D, G] and w2 as [E, F, D], as gpt-oss does.
        part: the slice of each expert that this rank holds.

    Attributes:
        w13: [E, G, D], gate rows first, as in Hugging Face's ``gate_up_proj``. For slices, G is smaller.
        w2: [E, D, F]. For slices, F is smaller.
        b13: [E, G] or None.
        b2: [E, D] or None. For slices it is [E, D / count]: each rank adds its own columns.
        recompute: False by default. True: recompute activations in backward instead of storing them; costs one more
            GEMM.
        copies: copies of experts of other ranks, which ``forward`` computes with as well; None if there are none.
        gemm_dtype: operands of the forward GEMMs. "same": in the dtype of the rows. "fp8": e4m3 with one fp32 scale per
            128 channels of a row and per 128 x 128 weights; results and backward stay in the dtype of the rows.

    Raises:
        ConfigError: a size is below 1; or the number of slices does not divide F, or D if there is a bias.
    """

    gemm_dtype: GemmDtype
    copies: ExpertCopies | None = None

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        ffn: int,
        activation: str | Activation = "swiglu",
        *,
        bias: bool = False,
        transposed: bool = False,
        part: ExpertSlice = ExpertSlice(),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if num_experts < 0 or hidden < 1 or ffn < 1:
            raise ConfigError(f"experts need hidden and ffn of at least 1; got {num_experts} experts, {hidden}, {ffn}")
        if ffn % part.count:
            raise ConfigError(f"ffn = {ffn} must be a multiple of etp = {part.count}, which splits the expert's width")
        self.num_experts, self.hidden, self.ffn, self.part = num_experts, hidden, ffn, part
        self.activation = activation_of(activation)
        self.transposed, self.recompute, self.gemm_dtype = transposed, False, "same"
        width = ffn // part.count
        width_h = 2 * width if self.activation.gated else width

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, dtype=dtype, device=device))

        self.w13 = parameter(hidden, width_h) if transposed else parameter(width_h, hidden)
        self.w2 = parameter(width, hidden) if transposed else parameter(hidden, width)
        self.b13 = parameter(width_h) if bias else None
        if bias and hidden % part.count:
            raise ConfigError(
                f"hidden = {hidden} must be a multiple of etp = {part.count}, which splits the output bias"
            )
        self.b2 = parameter(hidden // part.count) if bias else None
        self.reset_parameters(int(torch.randint(2**31, (), device="cpu").item()))

    @torch.no_grad()
    def reset_parameters(self, seed: int, first_expert: int | Sequence[int] = 0, std: float = 0.02) -> None:
        """Initialize weights from a normal distribution, and biases with zero.

        An expert's weights depend on ``seed`` and its global id only, not on its rank. A slice is initialized as the
        same slice of the complete expert.

        Args:
            seed: seed of all experts.
            first_expert: global id of this rank's first expert, or the ids of all its experts.
        """
        if self.w13.device.type == "meta":
            return  # tensors without memory need no values
        generator = torch.Generator("cpu")
        ids = range(first_expert, first_expert + self.num_experts) if isinstance(first_expert, int) else first_expert
        for e, expert in enumerate(ids):
            generator.manual_seed((seed * 1_000_003 + expert) % 2**63)
            for name, weight in (("w13", self.w13), ("w2", self.w2)):
                full = self.sharding_of_one(name)
                values = torch.empty(full.shape, dtype=torch.float32, device="cpu")
                values.normal_(std=std, generator=generator)
                weight[e].copy_(full.take(values, {"etp": self.part.index}, {"etp": self.part.count}))
        for bias in (self.b13, self.b2):
            if bias is not None:
                bias.zero_()

    def sharding_of_one(self, name: str) -> Sharding:
        """Return the sharding of one expert's w13, w2, b13 or b2 over the etp ranks."""
        gated = self.activation.gated
        width_h = 2 * self.ffn if gated else self.ffn
        # Gate and up are split separately; if they are interleaved, one split keeps the pairs together.
        segments = 2 if gated and not self.activation.interleaved else 1
        transposed = self.transposed
        shape, dim, segments = {
            "w13": ((self.hidden, width_h) if transposed else (width_h, self.hidden), 1 if transposed else 0, segments),
            "w2": ((self.ffn, self.hidden) if transposed else (self.hidden, self.ffn), 0 if transposed else 1, 1),
            "b13": ((width_h,), 0, segments),
            "b2": ((self.hidden,), 0, 1),
        }[name]
        return Sharding(shape, (Split(dim, "etp", segments),), expert=True)

    def shardings_over(self, placement: Placement) -> dict[str, Sharding]:
        """Return the sharding of each parameter [E_global, ...] over ep (by ``placement``) and etp, by name."""
        over_ep = Split.of_experts(placement)
        shardings = {}
        for name, _ in self.named_parameters():
            expert_sharding = self.sharding_of_one(name)
            inner = (Split(split.dim + 1, split.axis, split.segments) for split in expert_sharding.splits)
            shardings[name] = Sharding((placement.num_experts, *expert_sharding.shape), (over_ep, *inner), expert=True)
        return shardings

    def extra_repr(self) -> str:
        part = f", slice {self.part.index} of {self.part.count}" if self.part.count > 1 else ""
        return (
            f"num_experts={self.num_experts}, hidden={self.hidden}, ffn={self.ffn}, "
            f"activation={self.activation.name}, bias={self.b13 is not None}{part}"
        )

    def forward(self, rows_RD: Tensor, rows_per_expert: Sequence[int], call: ExpertCall | None = None) -> Tensor:
        """Run each expert on its rows.

        Args:
            rows_RD: [R, D], grouped by expert.
            rows_per_expert: E row counts; their sum is R. With slots for copies, a count for each slot.
            call: the call of a layer that dispatched the rows; None: the rows are those of this rank alone.

        Returns:
            [R, D] in the dtype of the rows, or autocast's; or the result of ``ExpertCall.compute``.

        Raises:
            InputError: shapes or dtypes do not match.
        """
        mlp = self.mlp_for(rows_RD, None if call is None else call.lent)
        if call is None:
            return run_mlp(rows_RD, rows_per_expert, mlp)
        return call.compute(rows_RD, rows_per_expert, mlp)

    def on_device(self, x_TD: Tensor) -> OnDevice:
        """Return what a GPU can compute all experts from without row counts on the CPU."""
        if (not self.w13.is_cuda and self.w13.device.type not in TRITON_DEVICES) or not self.is_uncounted(x_TD):
            return ""
        return "rows" if has_hooks(self) else "tokens"  # hooks, such as those of FSDP, may need the rows

    def is_uncounted(self, x_TD: Tensor) -> bool:
        """Return whether a GPU can compute all experts without row counts on the CPU, if no hooks need them."""
        w13, w2, b13, b2 = self.w13, self.w2, self.b13, self.b2
        return (
            type(w13) is nn.Parameter
            and type(w2) is nn.Parameter
            and (b13 is None or (type(b13) is nn.Parameter and b13.stride(1) == 1))
            and (b2 is None or (type(b2) is nn.Parameter and b2.stride(1) == 1))
            and (self.copies is None or self.copies.plans_on_device)
            and self.gemm_dtype == "same"
            and (self.num_experts > 0 or self.copies is not None)
            and (w13.dtype == x_TD.dtype or torch.is_autocast_enabled(x_TD.device.type))
            and isinstance(self.activation, Composed)
        )

    def mlp_for(self, rows: Tensor, lent: LentCall | None = None) -> ExpertMLP:
        """Return the parameters in the dtype in which ``rows`` are computed.

        Args:
            lent: the experts that are lent in this call.
        """
        values: Mapping[str, Tensor | None] = {"w13": self.w13, "w2": self.w2, "b13": self.b13, "b2": self.b2}
        if lent is not None:
            values = lent.entered()
        elif self.copies is not None:
            values = self.copies.stacked()
        # Every layer runs this before its first kernel, so it enters no function that has nothing to do.
        if torch.is_autocast_enabled(rows.device.type):
            values = self._cast(values, rows)
        tensors = self._oriented(values) if self.transposed else tuple(map(values.get, _PARAMETERS))
        if self.part.count > 1:
            tensors = self._padded(tensors)
        mlp = ExpertMLP(tensors, self.activation, self.recompute, self.gemm_dtype)
        if lent is None:
            return mlp
        width = self.hidden // self.part.count
        columns = slice(self.part.index * width, (self.part.index + 1) * width)
        return lent.experts(
            mlp, lambda one: self._padded(self._oriented(self._cast(one, rows))), self._oriented, columns
        )

    def _cast(self, values: Mapping[str, Tensor | None], rows: Tensor) -> Mapping[str, Tensor | None]:
        if not torch.is_autocast_enabled(rows.device.type):
            return values
        return {name: None if value is None else cast_parameter(value, rows) for name, value in values.items()}

    def _oriented(self, values: Mapping[str, Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return views of w13, w2, b13 and b2 as GEMMs take them; None for missing ones."""
        w13, w2, b13, b2 = map(values.get, _PARAMETERS)
        if self.transposed:
            w13, w2 = (None if w is None else w.transpose(1, 2) for w in (w13, w2))
        return w13, w2, b13, b2

    def _padded(self, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Return w13, w2, b13 and b2 with all columns of b2."""
        w13, w2, b13, b2 = tensors
        if b2 is not None and self.part.count > 1:
            # Pad this rank's columns with zeros: combine adds the outputs of the slices.
            before, width = self.part.index * b2.shape[1], b2.shape[1]
            b2 = F.pad(b2, (before, self.hidden - before - width))
        return w13, w2, b13, b2
