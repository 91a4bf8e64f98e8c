"""The experts that one rank holds, their weights stacked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moe_comm.errors import ConfigError
from moe_comm.kernels.activations import Activation, activation_of
from moe_comm.layers.autocast import cast_parameter, compute_dtype
from moe_comm.layers.grouped_mlp import grouped_mlp
from moe_comm.layers.memory import Alloc, warm_rows


class Experts(nn.Module):
    """E experts, each activation(x @ w13.T + b13) @ w2.T + b2, run on rows that stand expert after expert.

    Args:
        num_experts: E of this rank; zero is allowed.
        hidden, ffn: D and F.
        activation: a name in ``ACTIVATIONS`` or an ``Activation``; G = 2F if it is gated, else F.
        bias: have b13 and b2.
        transposed: store w13 as [E, D, G] and w2 as [E, F, D], as gpt-oss does.
        recompute: keep less for backward at the price of one matrix product more there.

    Attributes:
        w13: [E, G, D], gate rows first, Hugging Face's ``gate_up_proj``. w2: [E, D, F]. b13: [E, G]. b2: [E, D].
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        ffn: int,
        activation: str | Activation = "swiglu",
        *,
        bias: bool = False,
        transposed: bool = False,
        recompute: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if num_experts < 0 or hidden < 1 or ffn < 1:
            raise ConfigError(f"experts need hidden and ffn of at least 1; got {num_experts} experts, {hidden}, {ffn}")
        self.num_experts, self.hidden, self.ffn = num_experts, hidden, ffn
        self.activation = activation_of(activation)
        self.transposed, self.recompute = transposed, recompute
        width_h = 2 * ffn if self.activation.gated else ffn

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, dtype=dtype, device=device))

        self.w13 = parameter(hidden, width_h) if transposed else parameter(width_h, hidden)
        self.w2 = parameter(ffn, hidden) if transposed else parameter(hidden, ffn)
        self.b13 = parameter(width_h) if bias else None
        self.b2 = parameter(hidden) if bias else None
        self.reset_parameters(int(torch.randint(2**31, (), device="cpu").item()))

    @torch.no_grad()
    def reset_parameters(self, seed: int, first_expert: int = 0, std: float = 0.02) -> None:
        """Normal weights and zero biases; an expert's depend on ``seed`` and its global id only, not on its rank.

        Args:
            first_expert: global id of this rank's first expert.
        """
        generator = torch.Generator("cpu")
        for e in range(self.num_experts):
            generator.manual_seed((seed * 1_000_003 + first_expert + e) % 2**63)
            for weight in (self.w13, self.w2):
                drawn = torch.empty(weight.shape[1:], dtype=torch.float32, device="cpu")
                drawn.normal_(std=std, generator=generator)
                weight[e].copy_(drawn)
        for bias in (self.b13, self.b2):
            if bias is not None:
                bias.zero_()

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, hidden={self.hidden}, ffn={self.ffn}, "
            f"activation={self.activation.name}, bias={self.b13 is not None}"
        )

    def forward(self, rows_RD: Tensor, rows_per_expert: Sequence[int], alloc: Alloc = warm_rows) -> Tensor:
        """Run each expert on its rows.

        Args:
            rows_RD: [R, D], expert after expert.
            rows_per_expert: E counts that add up to R.
            alloc: takes the output and the rows' gradient; give the dispatcher's ``empty_rows``.

        Returns:
            [R, D] in the dtype of the rows, or autocast's.

        Raises:
            InputError: shapes or dtypes do not fit.
        """
        w13 = cast_parameter(self.w13, rows_RD)
        w2 = cast_parameter(self.w2, rows_RD)
        if self.transposed:
            w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
        return grouped_mlp(
            rows_RD.to(compute_dtype(rows_RD)),
            rows_per_expert,
            w13,
            w2,
            None if self.b13 is None else cast_parameter(self.b13, rows_RD),
            None if self.b2 is None else cast_parameter(self.b2, rows_RD),
            self.activation,
            alloc,
            self.recompute,
        )
