"""Arithmetic for all Triton kernels that also holds in Triton's interpreter, which keeps bfloat16 as bits: it
multiplies and adds them as integers, and drops bits in casts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.kernels.triton.interpreter import INTERPRETING

INTERPRETED = tl.constexpr(INTERPRETING)
"""Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 when triton was first imported)."""


@triton.jit
def int64(x):  # type: ignore[no-untyped-def]
    """``x`` as int64: an argument, a constant, or a loop's variable (in the interpreter an int)."""
    return tl.full((), 0, tl.int64) + x


@triton.jit
def multiply_add(a, b, acc):  # type: ignore[no-untyped-def]
    """acc + a @ b in fp32; a [M, K] and b [K, N] of one dtype. Tensor cores, but no TF32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rounded(x, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 ``x`` in DTYPE, rounded to the nearest, ties to even."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, nearest, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-x)) of fp32 ``x``. exp may overflow to infinity; the quotient is then 0."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def e4m3_bits(x, CONVERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 ``x`` of magnitude below 464, or NaN, as the 8 bits of e4m3, rounded to the nearest, ties to even.

    CONVERTS: the GPU has an instruction for it (from sm_89 on). Else with integers, to the same bits.
    """
    if CONVERTS:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        most = bits & 0x7FFFFFFF
        # Below 2^-6 steps are 2^-9: the last bit of 2^14 in fp32, which therefore rounds there when it is added.
        small = (most.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        # Else the exponent's bias changes from 127 to 7, and 20 bits of fraction go.
        normal = (most - 0x3C000000 + 0x7FFFF + ((most >> 20) & 1)) >> 20
        byte = tl.where(most < 0x3C800000, small, normal)
        byte = tl.where(most > 0x7F800000, 0x7F, byte)
        return (byte | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_value(bits):  # type: ignore[no-untyped-def]
    """fp32 value of e4m3 ``bits`` (uint8), exactly; by integers, so that every GPU and the interpreter agree."""
    wide = bits.to(tl.uint32)
    most = wide & 0x7F
    # The bits in fp32's places, 120 too low in the exponent: a power of two mends it, for small numbers as well.
    value = (most << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    value = tl.where(most == 0x7F, float("nan"), value)
    return tl.where(wide >= 0x80, -value, value)
