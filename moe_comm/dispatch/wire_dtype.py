"""Quantised payloads: what a row looks like while it travels.

A row carries its own scales, so that whatever moves rows as bytes can carry it:

    fp8, per token          | D values, e4m3 | to 4 bytes | 1 fp32 scale               | to 16 bytes |
    fp8, per 128 channels   | D values, e4m3 | to 4 bytes | ceil(D / 128) fp32 scales  | to 16 bytes |
    bf16                    | D values, bf16 |                                         | to 16 bytes |
    same                    | D values in their own dtype, nothing else                              |

A block with largest magnitude m has the scale m / 448 (448 is the largest e4m3 number), or the power of two above it,
and at least 2^-126. So nothing saturates, a block of zeros stays zeros, and for every finite row

    |decoded - x| <= max(2^-4 |x|, 2^-10 scale)        3 bits of fraction; below 2^-6 scale the step is 2^-9 scale

up to the rounding of the scale (2^-23; none for a power of two) and of the result's own dtype. A NaN or an infinity
makes its block NaN: the block's scale says so, because conversions to e4m3 differ between versions of torch in what
they make of infinity (NaN or 448).

MegaScale-MoE (arXiv 2505.11432) quantises gradients per channel over groups of 128 tokens. That is one scale for 128
values, too, but a row cannot bring the scales of its group: they are four times its own bytes. They travel beside the
rows (``group_scales.py``), and which rows share them depends on how tokens are cut over ranks, so this form needs
``DispatchOptions(deterministic=False)``. The other way to 128 values a scale, and the one to prefer, is "fp8_block" in
backward as in forward: its bits do not depend on the number of ranks, and few rows cost no more. (DeepSeek-V3,
arXiv 2412.19437, section 3.3, takes 1 x 128 blocks for gradients as for activations.)
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels.native import for_triton
from moe_comm.runtime.memory import as_dtype

Format = Literal["same", "bf16", "fp8"]
Scales = Literal["token", "block", "group"]
WireDtypeName = Literal[
    "same",
    "bf16",
    "fp8_token",
    "fp8_block",
    "fp8_group",
    "fp8_token_pow2",
    "fp8_block_pow2",
    "fp8_group_pow2",
]

BLOCK = 128
"""Channels that share a scale of kind "block"."""
ALIGN = 16
"""A row's bytes are a multiple of this, so that copies and gathers move whole words."""
SCALE_BYTES = 4
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
TINIEST = 2.0**-126
"""Smallest scale: below it fp32 loses bits of the scale itself."""
FRACTION = 0x7FFFFF
"""The fraction bits of fp32."""
_IN_TRITON = (torch.float32, torch.bfloat16, torch.float16)
"""Rows whose fp8 a GPU makes in one pass, of the same bytes (of NaN, values may differ in sign)."""


@dataclass(frozen=True)
class WireDtype:
    """How rows travel in one direction.

    format: "same": in their own dtype. "bf16": rounded to nearest even; rows of 16 bits travel as they are, and
        what is beyond its range (3.39e38) becomes infinite. "fp8": e4m3 with scales.
    scales: of fp8: one a row ("token"), one for each ``BLOCK`` channels of a row ("block"), or, for gradients, one for
        each channel of up to 128 rows ("group"), which travel beside the rows.
    power_of_two: of fp8: scales are rounded up to powers of two, so that multiplying with them is exact.
    """

    format: Format = "same"
    scales: Scales = "block"
    power_of_two: bool = False

    def __post_init__(self) -> None:
        if self.format not in get_args(Format) or self.scales not in get_args(Scales):
            raise ConfigError(
                f"a payload's format is one of {', '.join(get_args(Format))} and its scales one of "
                f"{', '.join(get_args(Scales))}; got {self.format!r} and {self.scales!r}"
            )
        if self.format != "fp8" and (self.scales != "block" or self.power_of_two):
            raise ConfigError(f"only fp8 has scales; a {self.format} payload takes no scales and no power_of_two")

    @classmethod
    def named(cls, name: str) -> WireDtype:
        """The payload that ``name``, one of ``WireDtypeName``, stands for.

        Raises:
            ConfigError: there is none of that name.
        """
        if name not in _BY_NAME:
            raise ConfigError(f"unknown payload {name!r}; known: {', '.join(_BY_NAME)}")
        return _BY_NAME[name]

    @property
    def name(self) -> str:
        """Its ``WireDtypeName``."""
        if self.format != "fp8":
            return self.format
        return f"fp8_{self.scales}" + ("_pow2" if self.power_of_two else "")

    def narrows(self, dtype: torch.dtype) -> bool:
        """Whether rows of ``dtype`` travel in another form than their own."""
        return self.format == "fp8" or (self.format == "bf16" and dtype.itemsize > 2)

    def num_scales(self, hidden: int) -> int:
        """Scales in a row of ``hidden`` channels."""
        if self.format != "fp8" or self.scales == "group":
            return 0
        return 1 if self.scales == "token" else -(-hidden // BLOCK)


SAME = WireDtype()
_BY_NAME = {
    wire_dtype.name: wire_dtype
    for wire_dtype in (
        SAME,
        WireDtype("bf16"),
        *(WireDtype("fp8", scales, power) for power in (False, True) for scales in get_args(Scales)),
    )
}


@dataclass(frozen=True)
class WireDtypes:
    """A payload, or the name of one, for each direction in which rows travel.

    dispatch: tokens to their experts. combine: results back. dispatch_backward: gradients of the experts' input back
    to their tokens. combine_backward: gradients of the results to the experts. Where rows come back, K of a token are
    decoded and summed in fp32.

    Raises:
        ConfigError: an unknown payload; scales of groups for what is no gradient.
    """

    dispatch: WireDtype | WireDtypeName = SAME
    combine: WireDtype | WireDtypeName = SAME
    dispatch_backward: WireDtype | WireDtypeName = SAME
    combine_backward: WireDtype | WireDtypeName = SAME

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if isinstance(given, str):
                object.__setattr__(self, field.name, WireDtype.named(given))
            elif not isinstance(given, WireDtype):
                raise ConfigError(
                    f"payload of {field.name} must be a WireDtype or one of {', '.join(_BY_NAME)}; got {given!r}"
                )
        for name in ("dispatch", "combine"):
            if getattr(self, name).scales == "group":
                raise ConfigError(
                    f"scales per group of rows are for gradients, dispatch_backward and combine_backward; {name} takes "
                    "fp8_token or fp8_block"
                )

    @property
    def invariant(self) -> bool:
        """Whether what arrives does not depend on how rows are spread over ranks."""
        return "group" not in (self.of("dispatch backward").scales, self.of("combine backward").scales)

    def of(self, op: str) -> WireDtype:
        """The payload of an operation as headers name it, such as "combine backward"."""
        found = getattr(self, op.replace(" ", "_"))
        assert isinstance(found, WireDtype)  # by __post_init__
        return found


AS_THEY_ARE = WireDtypes()


def bytes_per_row(hidden: int, wire_dtype: WireDtype, dtype: torch.dtype) -> int:
    """Bytes of one travelling row of ``hidden`` channels of ``dtype``, without scales of groups; see the picture."""
    if not hidden or not wire_dtype.narrows(dtype):
        return hidden * dtype.itemsize
    if wire_dtype.format == "bf16":
        return _up(2 * hidden, ALIGN)
    return _up(_up(hidden, SCALE_BYTES) + SCALE_BYTES * wire_dtype.num_scales(hidden), ALIGN)


def encode(rows_RD: Tensor, wire_dtype: WireDtype) -> Tensor:
    """Rows as they travel. No copy from the device to the host; the same bits on every device.

    Args:
        rows_RD: [R, D] floating point, any strides. Rows of 64 bits are rounded to 32 bits first, for fp8.

    Returns:
        [R, ``bytes_per_row``] uint8, contiguous; a view of ``rows_RD`` where nothing changes.

    Raises:
        InputError: not a matrix of floating-point numbers.
        ConfigError: scales that do not travel in rows.
    """
    _in_rows(wire_dtype)
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
    if rows_RD.dtype in _IN_TRITON and for_triton(rows_RD):
        from moe_comm.kernels.triton.quantize import Scales, quantize  # needs Triton

        return quantize(rows_RD.contiguous(), Scales(wire_dtype.scales == "token", wire_dtype.power_of_two))
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
    """Rows that arrived, as ``dtype``. The inverse of ``encode`` up to the rounding of the wire_dtype.

    Args:
        packed_RB: [R, ``bytes_per_row(hidden, payload, dtype)``] bytes, or a view of them in a wider dtype.
        dtype: of the rows that were encoded.

    Returns:
        [R, hidden]. A value that rounding would have carried past the largest number of ``dtype`` is that number.

    Raises:
        InputError: rows of another width.
        ConfigError: scales that do not travel in rows.
    """
    _in_rows(wire_dtype)
    bytes_RB = as_dtype(torch.uint8, packed_RB)
    if bytes_RB.dim() != 2 or bytes_RB.shape[1] != bytes_per_row(hidden, wire_dtype, dtype):
        raise InputError(
            f"{hidden} channels of {dtype} in payload {wire_dtype.name!r} are rows of "
            f"{bytes_per_row(hidden, wire_dtype, dtype)} bytes; got {tuple(bytes_RB.shape)}"
        )
    if not hidden or not wire_dtype.narrows(dtype):
        return as_dtype(dtype, bytes_RB)
    if wire_dtype.format == "bf16":
        return bytes_RB.view(torch.bfloat16)[:, :hidden].to(dtype)
    if dtype in _IN_TRITON and for_triton(bytes_RB):
        from moe_comm.kernels.triton.quantize import Scales, dequantize  # needs Triton

        return dequantize(bytes_RB, Scales(wire_dtype.scales == "token"), hidden, dtype)
    first, last = _scale_bytes(hidden, wire_dtype)
    scale_RS = bytes_RB.view(torch.float32)[:, first // SCALE_BYTES : last // SCALE_BYTES]
    return scaled(bytes_RB[:, :hidden], scale_RS, wire_dtype, dtype)


def scaled(values_RD: Tensor, scale_RS: Tensor, wire_dtype: WireDtype, dtype: torch.dtype) -> Tensor:
    """[R, D] rows whose e4m3 values, [R, D] bytes, and fp32 scales arrived apart."""
    wide_RSB = _blocks(values_RD.view(E4M3).to(torch.float32), wire_dtype).mul_(scale_RS.unsqueeze(2))
    return narrowed(wide_RSB, dtype).flatten(1)[:, : values_RD.shape[1]].contiguous()


def rounded(rows_RD: Tensor, wire_dtype: WireDtype) -> Tensor:
    """What arrives where ``rows_RD`` were sent: for backends that move rows in place, and as the reference."""
    if not wire_dtype.narrows(rows_RD.dtype):
        return rows_RD
    return decode(encode(rows_RD, wire_dtype), wire_dtype, rows_RD.shape[1], rows_RD.dtype)


def pack(rows_RD: Tensor, wire_dtype: WireDtype) -> Tensor:
    """Rows as a dispatcher moves them: themselves, or encoded and viewed as 8-byte words, which index quickly."""
    if not rows_RD.shape[1] or not wire_dtype.narrows(rows_RD.dtype):
        return rows_RD
    return as_dtype(torch.int64, encode(rows_RD, wire_dtype))


def unpack(moved: Tensor, wire_dtype: WireDtype, hidden: int, dtype: torch.dtype) -> Tensor:
    """The inverse of ``pack``: [R, hidden] rows of ``dtype``."""
    if not hidden or not wire_dtype.narrows(dtype):
        return moved
    return decode(moved, wire_dtype, hidden, dtype)


def _in_rows(wire_dtype: WireDtype) -> None:
    if wire_dtype.scales == "group":
        raise ConfigError(f"the scales of {wire_dtype.name} are not in the rows; group_scales.encode_groups gives both")


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


def _scale_bytes(hidden: int, wire_dtype: WireDtype) -> tuple[int, int]:
    """Where a row's scales begin and end."""
    first = _up(hidden, SCALE_BYTES)
    return first, first + SCALE_BYTES * wire_dtype.num_scales(hidden)


def _blocks(rows_RD: Tensor, wire_dtype: WireDtype) -> Tensor:
    """[R, S, B] the channels that share each scale; zeros fill up the last block."""
    num_scales = wire_dtype.num_scales(rows_RD.shape[1])
    missing = 0 if num_scales == 1 else num_scales * BLOCK - rows_RD.shape[1]
    whole_RD: Tensor = F.pad(rows_RD, (0, missing)) if missing else rows_RD
    return whole_RD.view(whole_RD.shape[0], num_scales, whole_RD.shape[1] // num_scales)


def scales_for(most: Tensor, power_of_two: bool) -> Tensor:
    """fp32 scales of blocks whose largest magnitudes are ``most``, fp32; NaN where that is NaN or infinity."""
    scale = (most / E4M3_MAX).clamp(min=TINIEST)
    if power_of_two:
        # Up to the next power of two: a carry out of the fraction raises the exponent.
        scale = ((scale.view(torch.int32) + FRACTION) & ~FRACTION).view(torch.float32)
    return torch.where(most.isfinite(), scale, torch.nan)


def narrowed(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 ``wide``, which is overwritten, as ``dtype``; rounding makes no infinity, and NaN passes."""
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return wide.clamp_(-most, most).to(dtype)


__all__ = [
    "AS_THEY_ARE",
    "BLOCK",
    "E4M3",
    "SAME",
    "WireDtype",
    "WireDtypeName",
    "WireDtypes",
    "bytes_per_row",
    "decode",
    "encode",
    "narrowed",
    "pack",
    "rounded",
    "scaled",
    "scales_for",
    "unpack",
]
