"""Tensor-parallel linear layers (Megatron-LM, arXiv 1909.08053), with sequence parallelism (arXiv 2205.05198).

A column-parallel layer followed by a row-parallel one communicates once at each end:

    replicated tokens (sequence_dim None)
        x ──copy_to──▶ x @ W[:, own outputs]ᵀ ──▶ (own heads, own FFN columns) ──▶ @ W[own inputs]ᵀ ──sum_over──▶ y
        Outside of the block, all ranks have all tokens. Gradients of replicated parameters there (norms, routers, the
        row layer's bias) are complete on each rank and must NOT be summed over the group.

    sequence parallel (sequence_dim set)
        x, own tokens ──gather_dim──▶ all tokens ──▶ ... ──scatter_sum──▶ y, own tokens
        Outside of the block, each rank has its own tokens. Gradients of replicated parameters there are partial sums.
        They are summed over the group together with the data-parallel ranks (``Sharding.sum_axes``).

Both forms send the same number of bytes; the second stores 1/W of the activations outside of the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels.autograd import cast_parameter, compute_dtype
from moe_comm.layers.parallel.collectives import (
    check_cut,
    copy_to,
    gather_dim,
    group_rank,
    group_size,
    scatter_sum,
    sum_over,
)
from moe_comm.layers.parallel.module import ParallelModule
from moe_comm.layers.parallel.recompute import recomputed
from moe_comm.overlap.linear import gather_matmul, matmul_scatter
from moe_comm.overlap.options import Overlap
from moe_comm.topology import Sharding, Split

LinearT = TypeVar("LinearT", "ColumnParallelLinear", "RowParallelLinear")


def size_per_rank(length: int, group: ProcessGroup | None, what: str, segments: int = 1) -> int:
    """Return ``length`` per rank of ``group``; raise ConfigError unless ranks * ``segments`` divides it."""
    world = group_size(group)
    if length % (world * segments):
        divisor = f"{segments} segments * {world} ranks" if segments > 1 else f"the {world} ranks"
        raise ConfigError(f"{what} must be a multiple of {divisor} of the group; got {length}")
    return length // world


def take_shard(full: Tensor, split: Split, group: ProcessGroup | None) -> Tensor:
    """Return a copy of this rank's part of a full parameter."""
    sharding = Sharding(tuple(full.shape), (split,))
    return sharding.take(full.detach(), {split.axis: group_rank(group)}, {split.axis: group_size(group)})


def init_linear(weight: nn.Parameter, bias: nn.Parameter | None, fan_in: int) -> None:
    """Initialize as ``nn.Linear``: uniform within 1 / sqrt(inputs) of zero, independently on each rank."""
    bound = 1 / math.sqrt(max(fan_in, 1))
    for parameter in (weight, bias):
        if parameter is not None:
            nn.init.uniform_(parameter, -bound, bound)


def check_width(x: Tensor, width: int, layer: str) -> None:
    if x.shape[-1:] != (width,):
        raise InputError(f"{layer} expects [.., {width}] on this rank; got {tuple(x.shape)}")


class ColumnParallelLinear(ParallelModule):
    """x @ weight.T + bias with the outputs split over a group.

    Args:
        in_features: number of inputs.
        out_features: number of outputs of all ranks together.
        group: tensor-parallel group; None: one rank holds the full layer.
        bias: create a bias.
        sequence_dim: dimension of x that is split over the ranks and gathered here; None: x is equal on all ranks.
        segments: the outputs consist of this many equal segments, each of which is split separately (fused gate and
            up).
        overlap: with ``sequence_dim``, how the gather overlaps with the GEMM (``overlap.linear.gather_matmul``); None:
            no overlap.

    Attributes:
        weight: [out / W, in].
        bias: [out / W] or None.
        gathers_input: gather x along ``sequence_dim``. Set it to False if x was gathered already because several layers
            read it.

    Raises:
        ConfigError: the number of ranks does not divide the outputs.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: ProcessGroup | None = None,
        *,
        bias: bool = True,
        sequence_dim: int | None = None,
        segments: int = 1,
        overlap: Overlap | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.group, self.sequence_dim, self.segments = group, sequence_dim, segments
        self.overlap, self.gathers_input = overlap, True
        local_out = size_per_rank(out_features, group, "out_features of a column-parallel linear", segments)
        self.weight = nn.Parameter(torch.empty(local_out, in_features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(local_out, dtype=dtype, device=device)) if bias else None
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: ProcessGroup | None = None,
        *,
        sequence_dim: int | None = None,
        segments: int = 1,
        gathers_input: bool = True,
        overlap: Overlap | None = None,
    ) -> ColumnParallelLinear:
        """Build with a copy of this rank's part of ``linear``, which is equal on all ranks."""
        parallel = _from_linear(cls, linear, group, sequence_dim=sequence_dim, segments=segments, overlap=overlap)
        parallel.gathers_input = gathers_input
        return parallel

    def reset_parameters(self) -> None:
        """Initialize as ``nn.Linear``, independently on each rank."""
        init_linear(self.weight, self.bias, self.in_features)

    def shardings(self) -> dict[str, Sharding]:
        """Return the sharding of each parameter."""
        split = Split(0, "tp", self.segments)
        shardings = {"weight": Sharding((self.out_features, self.in_features), (split,))}
        if self.bias is not None:
            shardings["bias"] = Sharding((self.out_features,), (split,))
        return shardings

    def forward(self, x: Tensor) -> Tensor:
        """Map [.., in] to [.., out / W]; with ``sequence_dim``, that dimension becomes W times as long. Collective."""
        check_width(x, self.in_features, "a column-parallel linear")
        if not self.gathers_input:
            return F.linear(x, self.weight, self.bias)
        return column_linear(x, self.weight, self.group, self.sequence_dim, self.overlap, self.bias)

    def extra_repr(self) -> str:
        return _describe(self, f"out/{group_size(self.group)}")


class RowParallelLinear(ParallelModule):
    """x @ weight.T + bias with the inputs split over a group: each rank computes a partial sum of all outputs.

    Args:
        in_features: number of inputs of all ranks together.
        out_features: number of outputs.
        group: tensor-parallel group; None: one rank holds the full layer.
        bias: create a bias. It is replicated and added once, after the sum.
        sequence_dim: dimension of the result that is split over the ranks; None: each rank gets the full result.
        overlap: with ``sequence_dim``, how the sum overlaps with the GEMM (``overlap.linear.matmul_scatter``); None: no
            overlap.

    Attributes:
        weight: [out, in / W].
        bias: [out] or None. Its gradient covers this rank's tokens with ``sequence_dim``, else it is complete on each
            rank.

    Raises:
        ConfigError: the number of ranks does not divide the inputs.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: ProcessGroup | None = None,
        *,
        bias: bool = True,
        sequence_dim: int | None = None,
        overlap: Overlap | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.group, self.sequence_dim, self.overlap = group, sequence_dim, overlap
        local_in = size_per_rank(in_features, group, "in_features of a row-parallel linear")
        self.weight = nn.Parameter(torch.empty(out_features, local_in, dtype=dtype, device=device))
        # Zeros are equal on all ranks, as a replicated parameter must be.
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: ProcessGroup | None = None,
        *,
        sequence_dim: int | None = None,
        overlap: Overlap | None = None,
    ) -> RowParallelLinear:
        """Build with a copy of this rank's part of ``linear``, which is equal on all ranks."""
        return _from_linear(cls, linear, group, sequence_dim=sequence_dim, overlap=overlap)

    def reset_parameters(self) -> None:
        """Initialize the weight as ``nn.Linear``, independently on each rank, and the bias with zero."""
        init_linear(self.weight, None, self.in_features)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def shardings(self) -> dict[str, Sharding]:
        """Return the sharding of each parameter."""
        shardings = {"weight": Sharding((self.out_features, self.in_features), (Split(1, "tp"),))}
        if self.bias is not None:
            shardings["bias"] = Sharding((self.out_features,))
        return shardings

    def forward(self, x: Tensor) -> Tensor:
        """Map [.., in / W] to [.., out]; with ``sequence_dim``, that dimension becomes 1 / W as long. Collective."""
        check_width(x, self.weight.shape[1], "a row-parallel linear")
        y = row_linear(x, self.weight, self.group, self.sequence_dim, self.overlap)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return _describe(self, f"in/{group_size(self.group)}")


def gather_input(x: Tensor, group: ProcessGroup | None, sequence_dim: int | None) -> Tensor:
    """Return all tokens, at the start of a tensor-parallel block."""
    if sequence_dim is None:
        return copy_to(x, group)
    return recomputed(partial(gather_dim, group=group, dim=sequence_dim), x, collective=group_size(group) > 1)


def reduce_output(y: Tensor, group: ProcessGroup | None, sequence_dim: int | None) -> Tensor:
    """Sum the ranks' partial results at the end of a tensor-parallel block, for all tokens or this rank's."""
    return sum_over(y, group) if sequence_dim is None else scatter_sum(y, group, sequence_dim)


def column_linear(
    x: Tensor,
    weight: Tensor,
    group: ProcessGroup | None,
    sequence_dim: int | None,
    overlap: Overlap | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return ``F.linear`` of ``gather_input``; one fused operator if they overlap."""
    if overlap is None or sequence_dim is None or group_size(group) == 1:
        return F.linear(gather_input(x, group, sequence_dim), weight, bias)
    length = x.shape[sequence_dim] * group_size(group)
    y = _by_rows(gather_matmul, x, weight, group, sequence_dim, overlap, length)
    return y if bias is None else y + bias.to(y.dtype)


def row_linear(
    x: Tensor, weight: Tensor, group: ProcessGroup | None, sequence_dim: int | None, overlap: Overlap | None = None
) -> Tensor:
    """Return ``reduce_output`` of ``F.linear``; one fused operator if they overlap."""
    if overlap is None or sequence_dim is None or group_size(group) == 1:
        return reduce_output(F.linear(x, weight), group, sequence_dim)
    check_cut(x, sequence_dim % x.dim(), group)
    length = x.shape[sequence_dim] // group_size(group)
    return _by_rows(matmul_scatter, x, weight, group, sequence_dim, overlap, length)


def _by_rows(
    operator: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    group: ProcessGroup | None,
    dim: int,
    overlap: Overlap,
    length: int,
) -> Tensor:
    """Apply a fused operator, which gathers or scatters rows, along ``dim`` of x; the result has ``length`` there."""
    dtype = compute_dtype(x)

    def rows_of(x: Tensor) -> Tensor:
        return x.to(dtype).movedim(dim, 0).reshape(-1, x.shape[-1])

    other_dims = x.movedim(dim, 0).shape[1:-1]
    y = operator(recomputed(rows_of, x), cast_parameter(weight, x), group, overlap)
    return y.view(length, *other_dims, weight.shape[0]).movedim(0, dim)


def _from_linear(
    kind: Callable[..., LinearT], linear: nn.Linear, group: ProcessGroup | None, **options: Any
) -> LinearT:
    """Return a layer of ``kind`` with this rank's part of each parameter of ``linear``."""
    shape = linear.in_features, linear.out_features
    layer = kind(*shape, group, bias=linear.bias is not None, dtype=linear.weight.dtype, device="meta", **options)
    for name, sharding in layer.shardings().items():
        full = linear.get_parameter(name)
        part = take_shard(full, sharding.splits[0], group) if sharding.splits else full.detach().clone()
        setattr(layer, name, nn.Parameter(part, requires_grad=full.requires_grad))
    return layer


def _describe(layer: ColumnParallelLinear | RowParallelLinear, local_size: str) -> str:
    return (
        f"in_features={layer.in_features}, out_features={layer.out_features}, bias={layer.bias is not None}, "
        f"{local_size}, sequence_dim={layer.sequence_dim}"
    )
