"""Wire dtypes: error bounds, special values, bytes of a row, group scales."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_comm.dispatch import DispatchOptions, WireDtype, WireDtypes
from moe_comm.dispatch.selection.choice import GroupFacts, Traffic, choose
from moe_comm.dispatch.wire_dtype import (
    RowGroups,
    WireDtypeName,
    bytes_per_row,
    decode,
    decode_groups,
    encode,
    encode_groups,
    pack,
    rounded,
    rounded_in_groups,
    unpack,
)
from moe_comm.errors import ConfigError, InputError
from tests.dispatch import cases, workers
from tests.train.common import config_of

NAMES = [name for name in get_args(WireDtypeName) if "group" not in name]
FP8 = [name for name in NAMES if name.startswith("fp8")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def wide_range_rows(num_rows: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows whose elements differ by ten orders of magnitude, and by two from row to row."""
    g = torch.Generator().manual_seed(seed)
    x_RD = torch.randn(num_rows, hidden, generator=g, dtype=torch.float64)
    size = 10 ** (torch.rand(num_rows, hidden, generator=g, dtype=torch.float64) * 6 - 5)
    return (x_RD * size * 10 ** torch.linspace(-1, 1, num_rows, dtype=torch.float64)[:, None]).to(dtype)


def scales_of(x_RD: Tensor, wire_dtype: WireDtype) -> Tensor:
    """[R, D] float64 scale of each element, from the definition."""
    block = x_RD.shape[1] if wire_dtype.scales == "token" else 128
    parts = []
    for part_RB in x_RD.double().split(block, dim=1):
        scale_R = (part_RB.abs().amax(1, keepdim=True).float() / 448).double().clamp(min=2.0**-126)
        parts.append((2 ** scale_R.log2().ceil() if wire_dtype.power_of_two else scale_R).expand_as(part_RB))
    return torch.cat(parts, dim=1)


E4M3_GRID = torch.tensor(
    [0.0, *(m * 2.0**-9 for m in range(1, 8)), *((8 + m) * 2.0**e for e in range(-9, 6) for m in range(8))],
    dtype=torch.float64,
)[:-1]
"""The finite magnitudes of e4m3: its last code is NaN."""


# --- one row ---


def test_the_e4m3_grid_equals_torchs() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(codes.double(), E4M3_GRID) and E4M3_GRID[-1] == 448


@pytest.mark.parametrize("hidden", [1, 3, 33, 128, 129, 300])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FP8)
def test_fp8_error_is_at_most_half_a_step_of_e4m3(name: str, dtype: torch.dtype, hidden: int) -> None:
    """2^-4 of the value, or 2^-10 of the scale where e4m3 is subnormal; plus the rounding of the result's dtype."""
    wire_dtype = WireDtype.named(name)
    x_RD = wide_range_rows(23, hidden, dtype, hidden)
    rounded_RD = rounded(x_RD, wire_dtype)
    assert rounded_RD.dtype == dtype and rounded_RD.shape == x_RD.shape
    x, scale = x_RD.double(), scales_of(x_RD, wire_dtype)
    step = torch.maximum(x.abs() * 2.0**-4, scale * 2.0**-10) * (1 + 2.0**-20)
    info = torch.finfo(dtype)
    dtype_error = info.eps / 2 * x.abs() * 1.07 + info.smallest_normal * info.eps
    error = (rounded_RD.double() - x).abs()
    assert bool((error <= step + dtype_error).all())
    assert hidden < 33 or bool((error > step / 2).any()), "the bound must be tight"


@pytest.mark.parametrize("name", [name for name in FP8 if name.endswith("pow2")])
def test_fp8_rounds_to_the_nearest_e4m3_value(name: str) -> None:
    wire_dtype = WireDtype.named(name)
    x_RD = wide_range_rows(11, 300, torch.float32)
    scale_RD = scales_of(x_RD, wire_dtype)
    rounded_RD = rounded(x_RD, wire_dtype).double()
    distance_RDG = ((x_RD.double() / scale_RD).abs().unsqueeze(2) - E4M3_GRID).abs()
    nearest_RD = distance_RDG.amin(2)
    assert torch.equal(((rounded_RD - x_RD.double()) / scale_RD).abs(), nearest_RD)
    assert torch.equal(rounded(rounded_RD.float(), wire_dtype).double(), rounded_RD), "rounding must be idempotent"


@pytest.mark.parametrize("dtype", DTYPES)
def test_bf16_rounds_wider_dtypes_and_leaves_16_bit_ones(dtype: torch.dtype) -> None:
    x_RD = wide_range_rows(7, 33, dtype)
    wire_dtype = WireDtype("bf16")
    assert wire_dtype.narrows(dtype) == (dtype.itemsize > 2)
    assert torch.equal(
        rounded(x_RD, wire_dtype), x_RD.to(torch.bfloat16).to(dtype) if wire_dtype.narrows(dtype) else x_RD
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_zeros_keep_their_sign_and_non_finite_values_stay_non_finite(name: str, dtype: torch.dtype) -> None:
    wire_dtype = WireDtype.named(name)
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    x_RD = torch.zeros(7, 300, dtype=dtype)
    x_RD[1] = torch.tensor(-0.0, dtype=dtype)
    x_RD[2, 5] = math.nan
    x_RD[3, 299] = math.inf
    x_RD[4, 0] = -math.inf
    x_RD[5, 7], x_RD[5, 8] = largest, -largest
    x_RD[6, 9] = torch.finfo(torch.promote_types(dtype, torch.float32)).smallest_normal / 8  # 0 or subnormal in 32 bits
    y_RD = rounded(x_RD, wire_dtype)
    assert torch.equal(y_RD[:2], x_RD[:2]) and bool(y_RD[1].signbit().all()), "zeros must keep their sign"
    for row, column in ((2, 5), (3, 299), (4, 0)):
        assert not y_RD[row, column].isfinite(), "non-finite values must stay non-finite"
        if wire_dtype.format == "fp8":
            assert y_RD[row, column].isnan()
        block_columns = [c for c in range(300) if wire_dtype.scales == "token" or c // 128 == column // 128]
        block_is_nan = wire_dtype.format == "fp8"
        assert bool(y_RD[row, block_columns].isnan().all() if block_is_nan else (y_RD[row] == 0).sum() == 299)
    if wire_dtype.format == "fp8":
        assert bool(y_RD[5].isfinite().all()) and bool(((y_RD[5] - x_RD[5]).abs() <= largest / 16).all())
    assert bool(y_RD[6].isfinite().all()) and float((y_RD[6] - x_RD[6]).abs().max()) <= 2.0**-136


def test_float64_values_beyond_the_range_of_a_scale_become_nan() -> None:
    x_RD = torch.tensor([[1e300, 1.0]], dtype=torch.float64)
    assert bool(rounded(x_RD, WireDtype("fp8")).isnan().all())


@pytest.mark.parametrize("hidden", [0, 1, 3, 33, 128, 300, 1024])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_bytes_of_the_formula(name: str, hidden: int) -> None:
    wire_dtype = WireDtype.named(name)
    for dtype in DTYPES:
        width = bytes_per_row(hidden, wire_dtype, dtype)
        if hidden and wire_dtype.narrows(dtype):
            scales = {"same": 0, "bf16": 0, "fp8": 1 if wire_dtype.scales == "token" else math.ceil(hidden / 128)}
            values = 2 * hidden if name == "bf16" else math.ceil(hidden / 4) * 4
            assert width == math.ceil((values + 4 * scales[wire_dtype.format]) / 16) * 16
        else:
            assert width == hidden * dtype.itemsize
        for rows in (0, 1, 5):
            x_RD = wide_range_rows(rows, hidden, dtype)
            packed_RB = encode(x_RD, wire_dtype)
            assert packed_RB.shape == (rows, width) and packed_RB.dtype == torch.uint8
            whole_RD = decode(packed_RB, wire_dtype, hidden, dtype)
            assert torch.equal(unpack(pack(x_RD, wire_dtype), wire_dtype, hidden, dtype), whole_RD)
            if rows:  # rows are independent, so their order does not matter
                assert torch.equal(decode(packed_RB.flip(0), wire_dtype, hidden, dtype), whole_RD.flip(0))


@pytest.mark.parametrize("name", NAMES)
def test_encoded_bytes_do_not_depend_on_strides_or_uninitialized_memory(name: str) -> None:
    wire_dtype = WireDtype.named(name)
    x_RD = wide_range_rows(5, 33, torch.float32)
    with workers.poisoned():
        packed_RB = encode(x_RD, wire_dtype)
        assert torch.equal(encode(cases.strided(x_RD), wire_dtype), packed_RB)
        assert torch.equal(encode(x_RD, wire_dtype), packed_RB)


def test_invalid_rows_are_refused() -> None:
    with pytest.raises(InputError, match=r"floating-point rows \[R, D\]; got \(4,\)"):
        encode(torch.zeros(4), WireDtype("fp8"))
    with pytest.raises(InputError, match="int64"):
        encode(torch.zeros(4, 4, dtype=torch.int64), WireDtype("fp8"))
    with pytest.raises(InputError, match=r"rows of 144 bytes; got \(2, 128\)"):
        decode(torch.zeros(2, 128, dtype=torch.uint8), WireDtype("fp8"), 128, torch.float32)


def test_unknown_names_and_invalid_combinations_are_refused() -> None:
    assert [WireDtype.named(name).name for name in get_args(WireDtypeName)] == list(get_args(WireDtypeName))
    assert WireDtypes(dispatch="fp8_token").dispatch == WireDtype("fp8", "token")
    assert WireDtypes(combine=WireDtype("bf16")) == WireDtypes(combine="bf16")
    with pytest.raises(ConfigError, match="unknown wire dtype 'fp4'; known: same, bf16, fp8_token"):
        WireDtypes(combine="fp4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="wire dtype of dispatch must be"):
        WireDtypes(dispatch=8)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="got 'int8'"):
        WireDtype("int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="only fp8 has scales"):
        WireDtype("bf16", power_of_two=True)
    with pytest.raises(ConfigError, match=r"per group of rows are for gradients.*; combine takes fp8_token"):
        WireDtypes(combine="fp8_group")
    with pytest.raises(ConfigError, match="results depend on the number of ranks; use fp8_block"):
        DispatchOptions(wire_dtypes=WireDtypes(dispatch_backward="fp8_group"))
    with pytest.raises(ConfigError, match="does not store scales in rows"):
        encode(torch.zeros(2, 2), WireDtype("fp8", "group"))
    with pytest.raises(ConfigError, match="wire_dtypes must be a WireDtypes"):
        DispatchOptions(wire_dtypes="fp8_block")  # type: ignore[arg-type]
    assert config_of(["payload.dispatch=fp8_block"]).payload.wire_dtypes() == WireDtypes("fp8_block")
    with pytest.raises(ConfigError, match=r"payload\.combine"):
        config_of(["payload.combine=fp16"])


def test_auto_counts_the_bytes_of_wire_dtypes() -> None:
    hosts = GroupFacts(world=4, hosts=2, native=True, device="cpu", transport="gloo")
    plain, narrow = (
        {c.backend: c.wire_bytes for c in choose(hosts, Traffic(8, 1024, 4, wire_dtypes=wire_dtypes)).candidates}
        for wire_dtypes in (WireDtypes(), WireDtypes("fp8_block", "bf16"))
    )
    assert plain["all_to_all"] == 8 * 3 / 4 * 2 * 4096 and narrow["all_to_all"] == 8 * 3 / 4 * (1056 + 2048)
    assert narrow["all_gather"] == 3 * 1056 + 8 * 3 / 4 * 2048


# --- group scales ---


def test_groups_have_at_most_128_rows_of_one_block() -> None:
    groups = RowGroups.of(np.array([130, 5, 0, 128]), (0, 2, 3, 4), torch.device("cpu"))
    assert groups.group_R.tolist() == [0] * 128 + [1] * 2 + [2] * 5 + [3] * 128
    assert groups.per_rank == (3, 0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power", [False, True])
def test_group_scales_keep_the_bound_in_every_channel(power: bool, dtype: torch.dtype) -> None:
    wire_dtype = WireDtype("fp8", "group", power)
    x_RD = wide_range_rows(263, 33, dtype)
    groups = RowGroups.of(np.array([130, 5, 0, 128]), (0, 4), torch.device("cpu"))
    packed_RX, scale_GD = encode_groups(x_RD, groups, wire_dtype)
    assert packed_RX.nbytes == 263 * 48 and scale_GD.nbytes == 4 * 33 * 4
    decoded_RD = decode_groups(packed_RX, scale_GD, groups, dtype)
    assert decoded_RD.dtype == dtype
    for first, last in ((0, 128), (128, 130), (130, 135), (135, 263)):
        x, decoded = x_RD[first:last].double(), decoded_RD[first:last].double()
        scale = (x.abs().amax(0).float() / 448).double().clamp(min=2.0**-126)
        scale = 2 ** scale.log2().ceil() if power else scale
        step = torch.maximum(x.abs() * 2.0**-4, scale * 2.0**-10) * (1 + 2.0**-20)
        dtype_error = (
            torch.finfo(dtype).eps / 2 * x.abs() * 1.07 + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        )
        assert bool(((decoded - x).abs() <= step + dtype_error).all())


def test_non_finite_values_do_not_affect_other_tokens_of_a_group() -> None:
    x_RD = wide_range_rows(140, 9, torch.float32)
    clean_RD = rounded_in_groups(x_RD, WireDtype("fp8", "group"))
    assert torch.equal(rounded_in_groups(x_RD[:0], WireDtype("fp8", "group")), x_RD[:0])
    small_row = x_RD[:128, 4].abs().argsort()[0]  # its value does not set the scale
    for value in (math.nan, math.inf, -math.inf):
        x_RD[small_row, 4] = value
        rounded_RD = rounded_in_groups(x_RD, WireDtype("fp8", "group"))
        assert bool(rounded_RD[small_row, 4].isnan())
        rounded_RD[small_row, 4] = clean_RD[small_row, 4]
        assert torch.equal(rounded_RD, clean_RD)
