"""The grouped GEMMs of the native core: values against float64, and bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_comm.kernels.native import core

_C: Any = core()
pytestmark = pytest.mark.skipif(_C is None, reason="needs the native core")

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
OWN_ORDER = "avx512_bf16"
SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 14, 15, 17, 29, 33, 64)
WIDTHS = (1, 3, 16, 31, 33, 100, 257, 300)
DEPTHS = (1, 3, 31, 32, 33, 100, 256, 257, 513, 700)


@pytest.fixture(params=CODES, ids=str)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    code = CODES[request.param]
    chosen = _C.gemm_isa(code)
    yield request.param
    _C.set_gemm_isa(code, chosen)


def isas(dtype: torch.dtype) -> Iterator[str]:
    for name in _C.gemm_isa_names(CODES[dtype]):
        assert _C.set_gemm_isa(CODES[dtype], name)
        yield name


def rows(sources: Sequence[Tensor], count: int, place: Tensor | None = None, scale: Tensor | None = None) -> tuple:
    x = sources[0]
    return (
        [s.data_ptr() for s in sources],
        [s.shape[0] for s in sources],
        x.stride(0) * x.element_size(),
        0 if place is None else place.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        count,
        x.shape[1],
    )


def bytes_of(t: Tensor) -> list[int]:
    return [t.data_ptr(), *(s * t.element_size() for s in t.stride())]


def product(
    sizes: Sequence[int],
    sources: Sequence[Tensor],
    w: Tensor,
    bias: Tensor | None = None,
    place: Tensor | None = None,
    scale: Tensor | None = None,
    threads: int = 1,
    into: Tensor | None = None,
) -> Tensor:
    count = sum(sizes)
    out = torch.full((count, w.shape[1]), float("nan"), dtype=w.dtype) if into is None else into
    given = rows(sources, count, place, scale)
    biases = [0, 0] if bias is None else bytes_of(bias)[:2]
    results = bytes_of(out)[:2]
    _C.grouped_gemm(sizes, CODES[w.dtype], threads, given, bytes_of(w), w.shape[1], biases, results, into is not None)
    return out


def gradients(sizes: Sequence[int], y: Tensor, x: Tensor, out: Tensor, accumulate: bool, threads: int = 1) -> Tensor:
    left, right = rows([y], sum(sizes)), rows([x], sum(sizes))
    _C.grouped_gemm_weights(sizes, CODES[x.dtype], threads, left, right, bytes_of(out), CODES[out.dtype], accumulate)
    return out


def one_of(values: Sequence[int]) -> int:
    return values[int(torch.randint(len(values), ()))]


def weights_with(strides: int, experts: int, n: int, k: int, dtype: torch.dtype) -> Tensor:
    if strides == 0:
        return torch.randn(experts, n, k).to(dtype)
    if strides == 1:
        return torch.randn(experts, k, n).to(dtype).transpose(1, 2)
    return torch.randn(experts, n, 2 * k).to(dtype)[:, :, ::2]


def test_products_are_close_to_float64_and_equal_on_all_instruction_sets(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for trial in range(40):
        experts, n, k = one_of((1, 2, 5)), one_of(WIDTHS), one_of(DEPTHS)
        sizes = [one_of(SIZES) for _ in range(experts)]
        x = torch.randn(sum(sizes), k).to(dtype)
        w = weights_with(trial % 3, experts, n, k, dtype)
        bias = torch.randn(experts, n).to(dtype) if trial % 4 == 0 else None
        exact = torch.cat([part.double() @ w[e].double().t() for e, part in enumerate(x.split(sizes))])
        if bias is not None:
            exact += bias.double().repeat_interleave(torch.tensor(sizes), dim=0)
        first = None
        for isa in isas(dtype):
            out = product(sizes, [x], w, bias)
            torch.testing.assert_close(out.double(), exact, rtol=ROUNDING[dtype], atol=ROUNDING[dtype] * k**0.5 * 4)
            first = out if first is None else first
            assert isa == OWN_ORDER or torch.equal(out, first), (isa, sizes, n, k)
            assert torch.equal(product(sizes, [x], w, bias, threads=3), out), (isa, sizes, n, k)


def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for trial, (m, n, k) in enumerate(((131, 70, 700), (131, 300, 33), (300, 70, 1100), (300, 70, 1100))):
        x, w = torch.randn(m, k).to(dtype), weights_with(trial % 2, 1, n, k, dtype)
        for isa in isas(dtype):
            together = product([m], [x], w)
            for first, last in ((0, 1), (7, 8), (3, 5), (1, 16), (50, 83), (m - 32, m)):
                assert torch.equal(product([last - first], [x[first:last]], w), together[first:last]), isa


def test_columns_that_several_blocks_of_rows_use() -> None:
    """The last block of rows has one panel, and the columns are more than are kept packed."""
    torch.manual_seed(5)
    m, n, k = 790, 1100, 1030
    x, chosen = torch.randn(m, k), _C.gemm_isa(0)
    for strides in (0, 1):
        w, first = weights_with(strides, 1, n, k, torch.float32), None
        for isa in (name for name in isas(torch.float32) if name != "baseline"):
            out = product([m], [x], w)
            torch.testing.assert_close(out.double(), x.double() @ w[0].double().t(), rtol=2e-6, atol=3e-4)
            assert torch.equal(product([9], [x[700:709]], w), out[700:709]), isa
            first = out if first is None else first
            assert torch.equal(out, first), isa
    _C.set_gemm_isa(0, chosen)


def test_products_are_added_to_results(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    for m, n, k in ((5, 33, 40), (150, 70, 300), (17, 70, 4200)):
        x, w, before = torch.randn(m, k).to(dtype), torch.randn(1, n, k).to(dtype), torch.randn(m, n).to(dtype)
        exact = before.double() + x.double() @ w[0].double().t()
        for isa in isas(dtype):
            added = product([m], [x], w, into=before.clone())
            torch.testing.assert_close(added.double(), exact, rtol=ROUNDING[dtype], atol=ROUNDING[dtype] * k**0.5 * 4)
            assert torch.equal(product([1], [x[3:4]], w, into=before[3:4].clone()), added[3:4]), isa


def test_rows_are_gathered_from_sources_and_scaled(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    sources = [torch.randn(9, 70).to(dtype), torch.randn(5, 70).to(dtype)]
    owner, row = torch.randint(2, (40,)), torch.randint(5, (40,))
    place = owner << 48 | row
    x = torch.stack([sources[o][r] for o, r in zip(owner.tolist(), row.tolist(), strict=True)])
    w, sizes, scale = torch.randn(3, 50, 70).to(dtype), [11, 0, 29], torch.rand(40)
    assert torch.equal(product(sizes, sources, w, place=place), product(sizes, [x], w))
    scaled = (x.float() * scale[:, None]).to(dtype)
    assert torch.equal(product(sizes, sources, w, place=place, scale=scale), product(sizes, [scaled], w))
    assert product([0, 0, 0], sources, w, place=place[:0]).shape == (0, 50)


@pytest.mark.parametrize("bad", [5, 1 << 48 | 2, 2 << 48, -1, -(1 << 48)])
def test_places_out_of_range_are_errors(bad: int) -> None:
    sources = [torch.randn(5, 8), torch.randn(2, 8)]
    place = torch.tensor([0, bad, 1])
    with pytest.raises(ValueError, match="entry 1 of the row list"):
        product([3], sources, torch.randn(1, 4, 8), place=place)


def test_more_rows_than_the_source_has_are_an_error() -> None:
    with pytest.raises(ValueError, match="has 2 rows and needs 3"):
        product([3], [torch.randn(2, 8)], torch.randn(1, 4, 8))


def test_gradients_of_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    for _ in range(15):
        n, k = one_of(WIDTHS), one_of(WIDTHS)
        sizes = [one_of((*SIZES, 600)) for _ in range(3)]
        y, x = torch.randn(sum(sizes), n).to(dtype), torch.randn(sum(sizes), k).to(dtype)
        parts = zip(y.split(sizes), x.split(sizes), strict=True)
        exact = torch.stack([a.double().t() @ b.double() for a, b in parts])
        before, first = torch.randn(3, n, k), None
        for isa in isas(dtype):
            out = gradients(sizes, y, x, torch.full((3, n, k), float("nan")), accumulate=False)
            torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)
            main = gradients(sizes, y, x, before.clone(), accumulate=True, threads=2)
            torch.testing.assert_close(main.double(), exact + before.double(), rtol=1e-4, atol=1e-4)
            narrow = gradients(sizes, y, x, torch.empty(3, n, k, dtype=dtype), accumulate=False)
            assert torch.equal(narrow, out.to(dtype))
            first = main if first is None else first
            assert isa == OWN_ORDER or torch.equal(main, first), (isa, sizes, n, k)


def test_ten_thousand_experts() -> None:
    sizes = [e % 3 for e in range(10_000)]
    x, w = torch.randn(sum(sizes), 5), torch.randn(10_000, 3, 5)
    expert = torch.repeat_interleave(torch.arange(10_000), torch.tensor(sizes))
    expected = (w[expert].double() @ x.double()[:, :, None])[:, :, 0]
    torch.testing.assert_close(product(sizes, [x], w).double(), expected, rtol=1e-5, atol=1e-5)


def test_denormals_of_bf16_are_zeros_in_all_instruction_sets() -> None:
    chosen = _C.gemm_isa(1)
    x = torch.full((3, 64), 1e-39).bfloat16()
    w = torch.full((1, 5, 64), 1e30).bfloat16()
    for _ in isas(torch.bfloat16):
        assert not product([3], [x], w).any()
    _C.set_gemm_isa(1, chosen)
