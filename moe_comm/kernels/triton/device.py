"""Arithmetic for all Triton kernels that is also correct in Triton's interpreter.

The interpreter stores bfloat16 as bits, multiplies and adds them as integers, and truncates in casts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.kernels.triton.launch import INTERPRETING

INTERPRETED = tl.constexpr(INTERPRETING)
"""Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 when triton was first imported)."""


@triton.jit
def int64(x):  # type: ignore[no-untyped-def]
    """Return ``x`` as int64: an argument, a constant, or a loop variable (an int in the interpreter)."""
    return tl.full((), 0, tl.int64) + x


@triton.jit
def multiply_add(a, b, acc):  # type: ignore[no-untyped-def]
    """Return acc + a @ b in fp32; a [M, K] and b [K, N] of one dtype. Tensor cores, but no TF32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rounded(x, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return fp32 ``x`` in DTYPE, rounded to nearest, ties to even."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, nearest, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    """Return 1 / (1 + exp(-x)) of fp32 ``x``. If exp overflows to infinity, the result is 0."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def e4m3_bits(x, CONVERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return fp32 ``x``, of magnitude below 464 or NaN, as the 8 bits of e4m3, rounded to nearest, ties to even.

    CONVERTS: whether the GPU has an instruction for it (from sm_89). Otherwise integer arithmetic gives the same bits.
    """
    if CONVERTS:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Below 2^-6 the step is 2^-9, the last bit of 2^14 in fp32, so adding 2^14 rounds to it.
        small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        # Otherwise change the exponent's bias from 127 to 7, and round off 20 bits of the fraction.
        normal = (magnitude - 0x3C000000 + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        byte = tl.where(magnitude < 0x3C800000, small, normal)
        byte = tl.where(magnitude > 0x7F800000, 0x7F, byte)
        return (byte | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_value(bits):  # type: ignore[no-untyped-def]
    """Return the exact fp32 value of e4m3 ``bits`` (uint8), by integer arithmetic for all GPUs and the interpreter."""
    wide = bits.to(tl.uint32)
    magnitude = wide & 0x7F
    # The bits at fp32's positions have an exponent that is 120 too low. Multiply by 2 ** 120, also for subnormals.
    value = (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(wide >= 0x80, -value, value)


@triton.jit
def tile_at(tile, tiles_m, tiles_n):  # type: ignore[no-untyped-def]
    """Return row and column of tile ``tile``. 8 rows of tiles are grouped, so that loads of neighbors hit the cache."""
    per_group = 8 * tiles_n
    first_m = tile // per_group * 8
    group_m = min(tiles_m - first_m, 8)
    index = tile % per_group
    return first_m + index % group_m, index // group_m


@triton.jit
def tiles_of_program(skip, tiles, programs):  # type: ignore[no-untyped-def]
    """Return the number of the tiles skip, skip + programs, ... below ``tiles``.

    Loop over this number, and compute tile ``skip + step * programs`` from it: Triton 3.6 does not update a ``skip``
    that changes in an outer loop if its only use is the start of an inner ``range``.
    """
    return tl.cdiv(tl.maximum(tiles - skip, 0), programs)


@triton.jit
def store_tile(acc, out_ptr, out_stride, row, valid_m, column, columns, ELEMENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a tile of fp32 ``acc`` to the rows ``row`` where ``valid_m``, and the columns below ``columns``."""
    to_ptrs = out_ptr + (row * out_stride)[:, None] + column[None, :]
    tl.store(to_ptrs, rounded(acc, ELEMENT), mask=valid_m[:, None] & (column < columns)[None, :])


@triton.jit
def sum_of_lanes(lanes, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return [ROWS], the sums of [ROWS, 32] in halves. Each sum has two terms, so their order does not matter."""
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 16)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 8)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 4)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 2)), axis=1)
    return tl.sum(lanes, axis=1)
