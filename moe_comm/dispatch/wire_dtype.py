"""Wire dtypes: the format of a row in transfer.

A row contains its own scales, so every transport that moves bytes can move it. "to 4 bytes" is padding to a multiple:

    fp8, per token          | D values, e4m3 | to 4 bytes | 1 fp32 scale               | to 16 bytes |
    fp8, per 128 channels   | D values, e4m3 | to 4 bytes | ceil(D / 128) fp32 scales  | to 16 bytes |
    bf16                    | D values, bf16 |                                         | to 16 bytes |
    same                    | D values in their own dtype, nothing else                              |

A block with largest magnitude m has the scale m / 448 (448 is the largest e4m3 number), or the next power of two. It is
at least 2^-126. So nothing saturates, a block of zeros stays zero, and for every finite row

    |decoded - x| <= max(2^-4 |x|, 2^-10 scale)        3 bits of fraction; below 2^-6 scale the step is 2^-9 scale

up to the rounding of the scale (2^-23; none for a power of two) and of the result's own dtype. A NaN or an infinity
makes its whole block NaN. The scale of the block is NaN then, because versions of torch convert infinity to e4m3
differently (to NaN or 448).

MegaScale-MoE (arXiv 2505.11432) quantises gradients per channel over groups of up to 128 consecutive rows of one source
rank and one expert. The scales of a group have four times the bytes of a row. They are sent separately, once per group,
and both sides compute the groups from the exchanged counts:

    rank 0 sends   e0: 130 rows   e1: 5 rows │ e2: 0 rows   e3: 128 rows
    groups            0 (128)  1 (2)  2 (5)  │                 3 (128)
    scales         ─────── 3 rows ─────────▶ rank 0          1 row ─▶ rank 1

The rows of a group, and so the bits, depend on how tokens are distributed over ranks, so this format requires
``DispatchOptions(deterministic=False)``. NaN and infinity become NaN and do not change the scales of their group.
Prefer "fp8_block", which also has one scale per 128 values: its bits do not depend on the number of ranks, and it needs
fewer bytes if groups have few rows. (DeepSeek-V3, arXiv 2412.19437, section 3.3, uses 1 x 128 blocks for gradients and
activations.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_comm.comm.header import DISPATCH_AGAIN, EXTRA, EXTRA_BACKWARD
from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels.fp8 import (
    BLOCK,
    E4M3,
    TRITON_DTYPES,
    ScaledRows,
    in_blocks,
    of_packed,
    saturating_cast,
    scales_for,
)
from moe_comm.kernels.native import for_triton
from moe_comm.runtime.memory import as_dtype

Format = Literal["same", "bf16", "fp8"]
ScaleKind = Literal["token", "block", "group"]
WireDtypeName = Literal[
    "same", "bf16", "fp8_token", "fp8_block", "fp8_group", "fp8_token_pow2", "fp8_block_pow2", "fp8_group_pow2"
]

ALIGN = 16
"""Alignment of a row in bytes, so that copies and gathers move whole words."""
SCALE_BYTES = 4
GROUP = 128
"""Maximum number of rows that share scales."""


@dataclass(frozen=True)
class WireDtype:
    """Format of rows in transfer, for one direction.

    Args:
        format: "same": the dtype of the rows. "bf16": rounded to nearest even; 16-bit rows are unchanged, and values
            beyond the range (3.39e38) become infinite. "fp8": e4m3 with scales.
        scales: for fp8. "token": one scale per row. "block": one per ``BLOCK`` channels of a row. "group", for
            gradients: one per channel of up to 128 rows, sent separately from the rows.
        power_of_two: for fp8. Round scales up to powers of two, so that multiplying by them is exact.
    """

    format: Format = "same"
    scales: ScaleKind = "block"
    power_of_two: bool = False

    def __post_init__(self) -> None:
        if self.format not in get_args(Format) or self.scales not in get_args(ScaleKind):
            raise ConfigError(
                f"the format of a wire dtype is one of {', '.join(get_args(Format))} and its scales one of "
                f"{', '.join(get_args(ScaleKind))}; got {self.format!r} and {self.scales!r}"
            )
        if self.format != "fp8" and (self.scales != "block" or self.power_of_two):
            raise ConfigError(f"only fp8 has scales; {self.format} takes neither scales nor power_of_two")

    @classmethod
    def named(cls, name: str) -> WireDtype:
        """Return the wire dtype called ``name``, one of ``WireDtypeName``.

        Raises:
            ConfigError: unknown name.
        """
        if name not in _BY_NAME:
            raise ConfigError(f"unknown wire dtype {name!r}; known: {', '.join(_BY_NAME)}")
        return _BY_NAME[name]

    @property
    def name(self) -> str:
        """The ``WireDtypeName`` of this wire dtype."""
        if self.format != "fp8":
            return self.format
        return f"fp8_{self.scales}" + ("_pow2" if self.power_of_two else "")

    def narrows(self, dtype: torch.dtype) -> bool:
        """Return whether this wire dtype changes rows of ``dtype``."""
        return self.format == "fp8" or (self.format == "bf16" and dtype.itemsize > 2)

    def num_scales(self, hidden: int) -> int:
        """Return the number of scales in a row of ``hidden`` channels."""
        if self.format != "fp8" or self.scales == "group":
            return 0
        return 1 if self.scales == "token" else -(-hidden // BLOCK)


SAME = WireDtype()
_BY_NAME = {
    wire_dtype.name: wire_dtype
    for wire_dtype in (
        SAME,
        WireDtype("bf16"),
        *(WireDtype("fp8", scales, power) for power in (False, True) for scales in get_args(ScaleKind)),
    )
}


@dataclass(frozen=True)
class WireDtypes:
    """A wire dtype, or the name of one, for each direction.

    Combined rows are decoded before the K rows of a token are summed in fp32.

    Args:
        dispatch: tokens to their experts.
        combine: expert outputs to their tokens.
        dispatch_backward: gradients of the experts' input, to their tokens.
        combine_backward: gradients of the output, to the experts.

    Raises:
        ConfigError: an unknown wire dtype, or group scales in a forward direction.
    """

    dispatch: WireDtype | WireDtypeName = SAME
    combine: WireDtype | WireDtypeName = SAME
    dispatch_backward: WireDtype | WireDtypeName = SAME
    combine_backward: WireDtype | WireDtypeName = SAME

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                object.__setattr__(self, field.name, WireDtype.named(value))
            elif not isinstance(value, WireDtype):
                raise ConfigError(
                    f"wire dtype of {field.name} must be a WireDtype or one of {', '.join(_BY_NAME)}; got {value!r}"
                )
        for name in ("dispatch", "combine"):
            if getattr(self, name).scales == "group":
                raise ConfigError(
                    f"scales per group of rows are for gradients, dispatch_backward and combine_backward; {name} takes "
                    "fp8_token or fp8_block"
                )

    @property
    def invariant(self) -> bool:
        """Whether results are independent of how rows are distributed over ranks."""
        return "group" not in (self.of("dispatch backward").scales, self.of("combine backward").scales)

    def of(self, op: str) -> WireDtype:
        """Return the wire dtype of an operation, given its name in headers, such as "combine backward"."""
        if op in (EXTRA, EXTRA_BACKWARD):
            return SAME
        wire_dtype = self.dispatch if op == DISPATCH_AGAIN else getattr(self, op.replace(" ", "_"))
        assert isinstance(wire_dtype, WireDtype)  # by __post_init__
        return wire_dtype


UNCHANGED = WireDtypes()


def bytes_per_row(hidden: int, wire_dtype: WireDtype, dtype: torch.dtype) -> int:
    """Return the bytes of an encoded row of ``hidden`` channels of ``dtype``, without group scales."""
    if not hidden or not wire_dtype.narrows(dtype):
        return hidden * dtype.itemsize
    if wire_dtype.format == "bf16":
        return _up(2 * hidden, ALIGN)
    return _up(_up(hidden, SCALE_BYTES) + SCALE_BYTES * wire_dtype.num_scales(hidden), ALIGN)


def encode(rows_RD: Tensor, wire_dtype: WireDtype) -> Tensor:
    """Encode rows for transfer. Does not copy to the CPU. The bits are the same on every device.

    Args:
        rows_RD: [R, D] floating point, any strides. For fp8, 64-bit rows are rounded to fp32 first.
        wire_dtype: target format; not one with group scales.

    Returns:
        [R, ``bytes_per_row``] uint8, contiguous; a view of ``rows_RD`` if ``wire_dtype`` does not change them.
    """
    _check_no_group_scales(wire_dtype)
    if rows_RD.dim() != 2 or not rows_RD.is_floating_point():
        raise InputError(f"encode needs floating-point rows [R, D]; got {tuple(rows_RD.shape)} {rows_RD.dtype}")
    num_rows, hidden = rows_RD.shape
    if not hidden or not wire_dtype.narrows(rows_RD.dtype):
        return as_dtype(torch.uint8, rows_RD)
    width = bytes_per_row(hidden, wire_dtype, rows_RD.dtype)
    if wire_dtype.format == "bf16":
        packed_RB = torch.empty(num_rows, width, dtype=torch.uint8, device=rows_RD.device)
        packed_RB.view(torch.bfloat16)[:, :hidden].copy_(rows_RD)
        packed_RB[:, 2 * hidden :] = 0
        return packed_RB
    if rows_RD.dtype in TRITON_DTYPES and for_triton(rows_RD):
        from moe_comm.kernels.triton.quantize import quantize  # needs Triton

        per_row = wire_dtype.scales == "token"
        return quantize(rows_RD.contiguous(), per_row=per_row, power_of_two=wire_dtype.power_of_two)
    first, last = _scale_bytes(hidden, wire_dtype)
    packed_RB = torch.empty(num_rows, width, dtype=torch.uint8, device=rows_RD.device)
    rows_RSB = _blocks(rows_RD.to(torch.float32).contiguous(), wire_dtype)
    scale_RS = scales_for(rows_RSB.abs().amax(2), wire_dtype.power_of_two)
    packed_RB[:, hidden:first] = 0
    packed_RB.view(torch.float32)[:, first // SCALE_BYTES : last // SCALE_BYTES] = scale_RS
    packed_RB[:, last:] = 0
    packed_RB[:, :hidden].view(E4M3).copy_((rows_RSB / scale_RS.unsqueeze(2)).flatten(1)[:, :hidden])
    return packed_RB


def decode(packed_RB: Tensor, wire_dtype: WireDtype, hidden: int, dtype: torch.dtype) -> Tensor:
    """Decode received rows. The inverse of ``encode`` up to rounding.

    Args:
        packed_RB: [R, ``bytes_per_row(hidden, wire_dtype, dtype)``] bytes, or a view of them in a wider dtype.
        wire_dtype: format of ``packed_RB``.
        hidden: number of channels.
        dtype: of the rows before encoding, and of the result.

    Returns:
        [R, hidden]. Values saturate at the largest finite number of ``dtype``.
    """
    _check_no_group_scales(wire_dtype)
    bytes_RB = as_dtype(torch.uint8, packed_RB)
    if bytes_RB.dim() != 2 or bytes_RB.shape[1] != bytes_per_row(hidden, wire_dtype, dtype):
        raise InputError(
            f"{hidden} channels of {dtype} encoded as {wire_dtype.name!r} are rows of "
            f"{bytes_per_row(hidden, wire_dtype, dtype)} bytes; got {tuple(bytes_RB.shape)}"
        )
    if not hidden or not wire_dtype.narrows(dtype):
        return as_dtype(dtype, bytes_RB)
    if wire_dtype.format == "bf16":
        return bytes_RB.view(torch.bfloat16)[:, :hidden].to(dtype)
    rows = of_packed(bytes_RB, hidden, wire_dtype.num_scales(hidden))
    return apply_scales(rows.values_RD.view(torch.uint8), rows.scale_RB, wire_dtype, dtype)


def apply_scales(
    values_RD: Tensor, scale_RS: Tensor, wire_dtype: WireDtype, dtype: torch.dtype, counts: Tensor | None = None
) -> Tensor:
    """Decode rows from [R, D] bytes of e4m3 values and their fp32 scales, which may be received separately.

    Args:
        counts: number of rows that are needed of each R / C consecutive rows, C int64 values on the device. The other
            rows may be left uninitialised. None: all rows.
    """
    if dtype in TRITON_DTYPES and for_triton(values_RD):
        from moe_comm.kernels.triton.quantize import dequantize_rows  # needs Triton

        return dequantize_rows(values_RD, scale_RS, dtype, per_row=wire_dtype.scales == "token", counts=counts)
    wide_RSB = _blocks(values_RD.view(E4M3).to(torch.float32), wire_dtype).mul_(scale_RS.unsqueeze(2))
    return saturating_cast(wide_RSB, dtype).flatten(1)[:, : values_RD.shape[1]].contiguous()


def rounded(rows_RD: Tensor, wire_dtype: WireDtype) -> Tensor:
    """Encode and decode rows: used by backends that move rows in place, and as the reference."""
    if not wire_dtype.narrows(rows_RD.dtype):
        return rows_RD
    return decode(encode(rows_RD, wire_dtype), wire_dtype, rows_RD.shape[1], rows_RD.dtype)


def pack(rows_RD: Tensor, wire_dtype: WireDtype) -> Tensor:
    """Return rows in the form that dispatchers index: unchanged, or encoded and viewed as 8-byte words."""
    if not rows_RD.shape[1] or not wire_dtype.narrows(rows_RD.dtype):
        return rows_RD
    return as_dtype(torch.int64, encode(rows_RD, wire_dtype))


def unpack(packed: Tensor, wire_dtype: WireDtype, hidden: int, dtype: torch.dtype) -> Tensor:
    """The inverse of ``pack``: [R, hidden] rows of ``dtype``."""
    if not hidden or not wire_dtype.narrows(dtype):
        return packed
    return decode(packed, wire_dtype, hidden, dtype)


def as_scaled(values_RD: Tensor, scale_RS: Tensor) -> ScaledRows:
    """Return received values, [R, D] bytes or e4m3, and scales with a scale for each block, also if a row has one."""
    return ScaledRows(values_RD.view(E4M3), scale_RS.expand(-1, -(-values_RD.shape[1] // BLOCK)))


def scaled_format(wire_dtype: WireDtype) -> WireDtype:
    """Return the format of rows for fp8 GEMMs: the wire dtype of dispatch if it is fp8, else "fp8_block"."""
    return wire_dtype if wire_dtype.format == "fp8" else _BY_NAME["fp8_block"]


def quantized(rows_RD: Tensor, wire_dtype: WireDtype) -> ScaledRows:
    """Return rows in ``scaled_format``. A row has the same bytes, whichever rank quantizes it."""
    wire_dtype = scaled_format(wire_dtype)
    return unpack_scaled(pack(rows_RD, wire_dtype), wire_dtype, rows_RD.shape[1])


def unpack_scaled(packed: Tensor, wire_dtype: WireDtype, hidden: int) -> ScaledRows:
    """Return the values and scales of fp8 rows from ``pack``, as views."""
    rows = of_packed(as_dtype(torch.uint8, packed), hidden, wire_dtype.num_scales(hidden))
    return as_scaled(rows.values_RD, rows.scale_RB)


def _check_no_group_scales(wire_dtype: WireDtype) -> None:
    if wire_dtype.scales == "group":
        raise ConfigError(f"{wire_dtype.name} does not store scales in rows; use encode_groups")


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


def _scale_bytes(hidden: int, wire_dtype: WireDtype) -> tuple[int, int]:
    """Return the first byte of the scales of a row, and the byte after them."""
    first = _up(hidden, SCALE_BYTES)
    return first, first + SCALE_BYTES * wire_dtype.num_scales(hidden)


def _blocks(rows_RD: Tensor, wire_dtype: WireDtype) -> Tensor:
    """View rows as [R, S, B]: the B channels that share each of S scales. Zeros pad the last block."""
    return rows_RD.unsqueeze(1) if wire_dtype.scales == "token" else in_blocks(rows_RD)


# --- scales per group of rows ---


@dataclass(frozen=True)
class RowGroups:
    """group_R: group of each row, in order. per_rank: number of groups sent to, or received from, each rank."""

    group_R: Tensor
    per_rank: tuple[int, ...]

    @classmethod
    def of(cls, blocks: npt.NDArray[np.int64], offsets: Sequence[int], device: torch.device) -> RowGroups:
        """Divide blocks of consecutive rows into groups.

        Args:
            blocks: rows in each block.
            offsets: first block of each rank, and the number of blocks at the end.
        """
        rows_B = torch.from_numpy(blocks.copy())
        groups_B = (rows_B + GROUP - 1) // GROUP
        per_rank = tuple(int(groups_B[lo:hi].sum()) for lo, hi in pairwise(offsets))
        num_rows = int(rows_B.sum())
        # First row and first group of each block.
        start_B, first_B = rows_B.cumsum(0) - rows_B, groups_B.cumsum(0) - groups_B
        facts_3B = torch.stack((rows_B, start_B, first_B)).to(device, non_blocking=True)
        start_R, first_R = torch.repeat_interleave(facts_3B[1:], facts_3B[0], dim=1, output_size=num_rows)
        return cls(first_R + (torch.arange(num_rows, device=device) - start_R) // GROUP, per_rank)


def encode_groups(rows_RD: Tensor, groups: RowGroups, wire_dtype: WireDtype) -> tuple[Tensor, Tensor]:
    """Return rows without scales, as 8-byte words [R, ceil(D / 16) * 2], and [G, D] fp32 scales."""
    num_rows, hidden = rows_RD.shape
    wide_RD = rows_RD.to(torch.float32)
    finite_RD = wide_RD.isfinite()
    amax_GD = wide_RD.new_zeros(sum(groups.per_rank), hidden)
    group_RD = groups.group_R.unsqueeze(1).expand(num_rows, hidden)
    amax_GD.scatter_reduce_(0, group_RD, wide_RD.abs().masked_fill(~finite_RD, 0.0), "amax")
    scale_GD = scales_for(amax_GD, wire_dtype.power_of_two)
    packed_RB = torch.zeros(
        num_rows, bytes_per_row(hidden, wire_dtype, rows_RD.dtype), dtype=torch.uint8, device=rows_RD.device
    )
    scaled_RD = (wide_RD / scale_GD[groups.group_R]).masked_fill_(~finite_RD, torch.nan)
    packed_RB[:, :hidden].view(E4M3).copy_(scaled_RD)
    return as_dtype(torch.int64, packed_RB), scale_GD


def decode_groups(packed_RX: Tensor, scale_GD: Tensor, groups: RowGroups, dtype: torch.dtype) -> Tensor:
    """The inverse of ``encode_groups`` up to rounding: [R, D] rows of ``dtype``."""
    values_RD = as_dtype(torch.uint8, packed_RX)[:, : scale_GD.shape[1]].view(E4M3).to(torch.float32)
    return saturating_cast(values_RD.mul_(scale_GD[groups.group_R]), dtype)


def rounded_in_groups(rows_RD: Tensor, wire_dtype: WireDtype) -> Tensor:
    """Round consecutive rows in groups, for backends that move rows in place."""
    if not rows_RD.numel():
        return rows_RD
    groups = RowGroups.of(np.array([rows_RD.shape[0]]), (0, 1), rows_RD.device)
    packed_RX, scale_GD = encode_groups(rows_RD, groups, wire_dtype)
    return decode_groups(packed_RX, scale_GD, groups, rows_RD.dtype)
