"""Native sums, scaling and dot products of rows have the bits of plain torch."""

from __future__ import annotations

import pytest
import torch

from moe_comm.dispatch.slots import plain, sums
from moe_comm.kernels import row_weights

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def _draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 7, 32, 100])
def test_weighted_sum_has_the_bits_of_plain_torch(dtype: torch.dtype, hidden: int) -> None:
    rows = _draw(50, hidden, dtype=dtype)
    place = torch.randint(-1, 50, (33, 3), generator=torch.Generator().manual_seed(hidden))
    weights = _draw(33, 3, dtype=plain.accumulate_dtype(dtype))
    for layout in (weights, None, weights.T.contiguous().T):
        assert torch.equal(sums.weighted_sum(rows, place, layout), plain.weighted_sum(rows, place, layout))
    dropped = torch.full_like(place, -1)
    for source, places in ((rows[:0], dropped), (rows, place[:0]), (rows.T.contiguous().T, place)):
        used_weights = weights[: places.shape[0]]
        assert torch.equal(
            sums.weighted_sum(source, places, used_weights), plain.weighted_sum(source, places, used_weights)
        )


def test_an_expanded_gradient_without_rows_is_accepted() -> None:
    """``y.sum().backward()`` on a rank without rows: the strides are 0, even after a copy."""
    no_rows, dropped = torch.ones(()).expand(0, 5), torch.full((2, 3), -1)
    assert not sums.weighted_sum(no_rows, dropped, _draw(2, 3)).any()
    assert sums.take(no_rows, dropped[0, :0]).shape == (0, 5)
    assert sums.spread(no_rows, dropped[:0], _draw(0, 3), 4, _draw(4, 5))[0].shape == (4, 5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 7, 32, 100])
def test_rows_are_scaled_in_place_after_the_dot_products(dtype: torch.dtype, hidden: int) -> None:
    rows, partner = _draw(40, hidden, dtype=dtype), _draw(40, hidden + 40, dtype=dtype)[:, :hidden]
    weights = _draw(40, dtype=plain.accumulate_dtype(dtype))
    for other in (partner.contiguous(), partner, None):
        scaled = rows.clone()
        dots = row_weights.scale_(scaled, weights, other)
        assert torch.equal(scaled, row_weights.scale(rows, weights))
        if other is None:
            assert dots is None
        else:
            assert dots is not None
            assert torch.equal(dots, row_weights.lane_dot(rows, other))
    assert row_weights.scale_(rows[:0], weights[:0], None) is None
