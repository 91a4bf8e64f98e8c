"""Tensor-parallel linear layers (Megatron-LM, arXiv 1909.08053), with sequence parallelism (arXiv 2205.05198).

A column-parallel layer and a row-parallel one after it make a block that communicates once at each end:

    replicated tokens (sequence_dim None)
        x ──copy_to──▶ x @ W[:, own outputs]ᵀ ──▶ (own heads, own FFN columns) ──▶ @ W[own inputs]ᵀ ──sum_over──▶ y
        Every rank has all tokens outside of the block, so the gradients of what stands there (norms, routers, the row
        layer's bias) are complete on every rank: they must NOT be summed over the group.

    sequence parallel (sequence_dim set)
        x, own tokens ──gather_dim──▶ all tokens ──▶ ... ──scatter_sum──▶ y, own tokens
        Every rank has its own tokens outside of the block, so the gradients of what stands there are partial sums:
        they are summed over the group with those of the data-parallel ranks, as ``Sharding.sum_axes`` says.

The bytes of both forms are the same; the second keeps 1/W of the activations outside of the block.
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
from moe_comm.kernels.autocast import cast_parameter, compute_dtype
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
from moe_comm.layers.parallel.recompute import again
from moe_comm.overlap.gather_matmul import gather_matmul
from moe_comm.overlap.matmul_scatter import matmul_scatter
from moe_comm.overlap.options import Overlap
from moe_comm.topology import Sharding, Split

Cut = TypeVar("Cut", "ColumnParallelLinear", "RowParallelLinear")


def part_of(length: int, group: ProcessGroup | None, what: str, segments: int = 1) -> int:
    """``length`` over the ranks of ``group``.

    Raises:
        ConfigError: it does not divide.
    """
    world = group_size(group)
    if length % (world * segments):
        each = f"{segments} parts of {length / segments:g}, each of which" if segments > 1 else "which"
        raise ConfigError(f"{what} is {length}, {each} must divide evenly over the {world} ranks of the group")
    return length // world


def take_part(whole: Tensor, split: Split, group: ProcessGroup | None) -> Tensor:
    """A copy of this rank's part of a full parameter."""
    sharding = Sharding(tuple(whole.shape), (split,))
    return sharding.take(whole.detach(), {split.axis: group_rank(group)}, {split.axis: group_size(group)})


def init_linear(weight: nn.Parameter, bias: nn.Parameter | None, fan_in: int) -> None:
    """As ``nn.Linear`` starts: uniform within 1 / sqrt(inputs) of zero; another draw on every rank."""
    bound = 1 / math.sqrt(max(fan_in, 1))
    for parameter in (weight, bias):
        if parameter is not None:
            nn.init.uniform_(parameter, -bound, bound)


def check_width(x: Tensor, width: int, layer: str) -> None:
    if x.shape[-1:] != (width,):
        raise InputError(f"{layer} takes [.., {width}] here; got {tuple(x.shape)}")


class ColumnParallelLinear(ParallelModule):
    """x @ weight.T + bias with the outputs cut over a group: each rank computes its own.

    Args:
        in_features, out_features: of the whole layer.
        group: the tensor-parallel group; None: one rank holds everything.
        bias: whether there is one.
        sequence_dim: dimension of x that is cut over the ranks and gathered here; None: x is alike on every rank.
        segments: the outputs are that many equal parts one after the other, each cut by itself (a fused gate and up).
        enters: False if x has been through ``enter`` already, as where several layers read it.
        overlap: with ``sequence_dim``, how to hide the gather behind the product (``overlap.gather_matmul``); None:
            one after the other.

    Attributes:
        weight [out / W, in], bias [out / W] or None.

    Raises:
        ConfigError: the outputs do not divide by the ranks.
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
        enters: bool = True,
        overlap: Overlap | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.group, self.sequence_dim, self.segments, self.enters = group, sequence_dim, segments, enters
        self.overlap = overlap
        own = part_of(out_features, group, "out_features of a column-parallel linear", segments)
        self.weight = nn.Parameter(torch.empty(own, in_features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(own, dtype=dtype, device=device)) if bias else None
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: ProcessGroup | None = None,
        *,
        sequence_dim: int | None = None,
        segments: int = 1,
        enters: bool = True,
        overlap: Overlap | None = None,
    ) -> ColumnParallelLinear:
        """This rank's part of ``linear``, which every rank holds alike: a copy, in the same dtype, on the same device.

        Raises:
            ConfigError: the outputs do not divide by the ranks.
        """
        options = {"sequence_dim": sequence_dim, "segments": segments, "enters": enters, "overlap": overlap}
        return _from_linear(cls, linear, group, **options)

    def reset_parameters(self) -> None:
        """As ``nn.Linear``; every rank draws for itself."""
        init_linear(self.weight, self.bias, self.in_features)

    def shardings(self) -> dict[str, Sharding]:
        """How the ranks hold each parameter."""
        split = Split(0, "tp", self.segments)
        found = {"weight": Sharding((self.out_features, self.in_features), (split,))}
        if self.bias is not None:
            found["bias"] = Sharding((self.out_features,), (split,))
        return found

    def forward(self, x: Tensor) -> Tensor:
        """[.., in] to [.., out / W]; with ``sequence_dim`` that dimension becomes W times as long. Collective.

        Raises:
            InputError: x has another width. PeerDied, PeerTimeout: a rank is gone or does not come.
        """
        check_width(x, self.in_features, "a column-parallel linear")
        if not self.enters:
            return F.linear(x, self.weight, self.bias)
        return entering_linear(x, self.weight, self.group, self.sequence_dim, self.overlap, self.bias)

    def extra_repr(self) -> str:
        return _describe(self, f"out/{group_size(self.group)}")


class RowParallelLinear(ParallelModule):
    """x @ weight.T + bias with the inputs cut over a group: each rank computes a part of every sum.

    Args:
        in_features, out_features: of the whole layer.
        group: the tensor-parallel group; None: one rank holds everything.
        bias: whether there is one; it is alike on every rank and added once, after the sum.
        sequence_dim: dimension of the result that is cut over the ranks; None: every rank gets all of it.
        overlap: with ``sequence_dim``, how to hide the sum behind the product (``overlap.matmul_scatter``); None: one
            after the other.

    Attributes:
        weight [out, in / W], bias [out] or None. The bias's gradient with ``sequence_dim`` is that of this rank's
        tokens, else it is complete on every rank.

    Raises:
        ConfigError: the inputs do not divide by the ranks.
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
        own = part_of(in_features, group, "in_features of a row-parallel linear")
        self.weight = nn.Parameter(torch.empty(out_features, own, dtype=dtype, device=device))
        # Zeros, not a draw: it must be alike on every rank.
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
        """This rank's part of ``linear``, which every rank holds alike: a copy, in the same dtype, on the same device.

        Raises:
            ConfigError: the inputs do not divide by the ranks.
        """
        return _from_linear(cls, linear, group, sequence_dim=sequence_dim, overlap=overlap)

    def reset_parameters(self) -> None:
        """The weight as ``nn.Linear``'s, every rank drawing for itself; the bias zero, so that it is alike on all."""
        init_linear(self.weight, None, self.in_features)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def shardings(self) -> dict[str, Sharding]:
        """How the ranks hold each parameter."""
        found = {"weight": Sharding((self.out_features, self.in_features), (Split(1, "tp"),))}
        if self.bias is not None:
            found["bias"] = Sharding((self.out_features,))
        return found

    def forward(self, x: Tensor) -> Tensor:
        """[.., in / W] to [.., out]; with ``sequence_dim`` that dimension becomes 1 / W as long. Collective.

        Raises:
            InputError: x has another width, or the sequence does not divide by the ranks.
            PeerDied, PeerTimeout: a rank is gone or does not come.
        """
        check_width(x, self.weight.shape[1], "a row-parallel linear")
        y = leaving_linear(x, self.weight, self.group, self.sequence_dim, self.overlap)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return _describe(self, f"in/{group_size(self.group)}")


def enter(x: Tensor, group: ProcessGroup | None, sequence_dim: int | None) -> Tensor:
    """All tokens, at the start of a tensor-parallel block."""
    if sequence_dim is None:
        return copy_to(x, group)
    return again(partial(gather_dim, group=group, dim=sequence_dim), x)


def leave(y: Tensor, group: ProcessGroup | None, sequence_dim: int | None) -> Tensor:
    """The sum of the ranks' parts, at the end of a tensor-parallel block: of all tokens or of one's own."""
    return sum_over(y, group) if sequence_dim is None else scatter_sum(y, group, sequence_dim)


def entering_linear(
    x: Tensor,
    weight: Tensor,
    group: ProcessGroup | None,
    sequence_dim: int | None,
    overlap: Overlap | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """``F.linear`` of what ``enter`` gives, in one where they overlap."""
    if overlap is None or sequence_dim is None or group_size(group) == 1:
        return F.linear(enter(x, group, sequence_dim), weight, bias)
    length = x.shape[sequence_dim] * group_size(group)
    y = _by_rows(gather_matmul, x, weight, group, sequence_dim, overlap, length)
    return y if bias is None else y + bias.to(y.dtype)


def leaving_linear(
    x: Tensor, weight: Tensor, group: ProcessGroup | None, sequence_dim: int | None, overlap: Overlap | None = None
) -> Tensor:
    """``leave`` of ``F.linear``, in one where they overlap."""
    if overlap is None or sequence_dim is None or group_size(group) == 1:
        return leave(F.linear(x, weight), group, sequence_dim)
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
    """A fused operator, which gathers or scatters rows, along ``dim`` of x, which is ``length`` long in the result."""
    dtype = compute_dtype(x)

    def rows_of(x: Tensor) -> Tensor:
        return x.to(dtype).movedim(dim, 0).reshape(-1, x.shape[-1])

    between = x.movedim(dim, 0).shape[1:-1]
    y = operator(again(rows_of, x), cast_parameter(weight, x), group, overlap)
    return y.view(length, *between, weight.shape[0]).movedim(0, dim)


def _from_linear(kind: Callable[..., Cut], linear: nn.Linear, group: ProcessGroup | None, **options: Any) -> Cut:
    """A layer of ``kind`` with this rank's part of each of ``linear``'s parameters, as the layer's shardings say."""
    shape = linear.in_features, linear.out_features
    layer = kind(*shape, group, bias=linear.bias is not None, dtype=linear.weight.dtype, device="meta", **options)
    for name, sharding in layer.shardings().items():
        whole = linear.get_parameter(name)
        part = take_part(whole, sharding.splits[0], group) if sharding.splits else whole.detach().clone()
        setattr(layer, name, nn.Parameter(part, requires_grad=whole.requires_grad))
    return layer


def _describe(layer: ColumnParallelLinear | RowParallelLinear, cut: str) -> str:
    return (
        f"in_features={layer.in_features}, out_features={layer.out_features}, bias={layer.bias is not None}, "
        f"{cut}, sequence_dim={layer.sequence_dim}"
    )
