"""The cost model of the device executor never chooses it where the model says that it loses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from moe_comm.errors import ConfigError
from moe_comm.overlap.tuning.cost import MARGIN
from moe_comm.overlap.tuning.device_cost import BUDGETS, H100, DeviceRates, DeviceWork, forecast, ready_shares

RATES = DeviceRates(132, 56e9, 400e9, 2.6e12, 650e12, 0.95, 2e-5)
"""Synthetic: about an H100 whose ranks are connected by NVLink."""
WORK = DeviceWork(32768, 7168, 2048, 2, 8)
"""DeepSeek-V3 with 1024 rows for each of 32 experts."""


@st.composite
def rates(draw: st.DrawFn) -> DeviceRates:
    speeds = [draw(st.floats(1e9, 1e13)) for _ in range(3)]
    return DeviceRates(
        draw(st.integers(1, 200)), *speeds, draw(st.floats(1e12, 1e16)), draw(st.floats(0.1, 1)), draw(st.floats(0, 1))
    )


works = st.builds(
    DeviceWork, st.integers(0, 1 << 20), st.integers(1, 8192), st.integers(1, 8192), st.just(2), st.integers(1, 64),
    st.integers(0, 64), st.booleans(),
)  # fmt: skip


@given(works, rates())
def test_the_device_executor_is_chosen_only_if_it_wins(work: DeviceWork, rates: DeviceRates) -> None:
    result = forecast(work, rates)
    floor = sum(work.flops) / rates.flops_per_s
    assert all(seconds >= floor * (1 - 1e-9) and 0 <= result.hidden[b] <= 1 for b, seconds in result.device_s.items())
    if result.blocks is None:
        assert all(seconds >= result.serial_s * (1 - MARGIN) for seconds in result.device_s.values())
        assert result.lines()[-1].startswith("choice: serial")
    else:
        assert result.device_s[result.blocks] == min(result.device_s.values()) < result.serial_s * (1 - MARGIN)
        assert result.lines()[-1] == f"choice: device with {result.blocks} blocks"


def test_rows_by_expert_hide_dispatch() -> None:
    result = forecast(WORK, RATES)
    assert result.blocks is not None
    assert all(result.hidden[blocks] > 0.5 for blocks in BUDGETS)
    slow = replace(RATES, block_bytes_per_s=10e9)
    assert forecast(WORK, slow).device_s[24] < forecast(WORK, slow).device_s[8], "8 blocks send below the link's rate"


def test_costs_of_the_device_executor_make_it_lose() -> None:
    assert forecast(replace(WORK, rows=64), RATES).blocks is None, "fixed costs"
    assert forecast(WORK, replace(RATES, waiting=0.5)).blocks is None, "a slow GEMM"
    assert forecast(WORK, replace(RATES, processors=9)).blocks is None, "no processors for the GEMM"
    assert forecast(WORK, replace(RATES, processors=8)).device_s == {}


def test_measured_constants_choose_by_the_number_of_rows() -> None:
    work = replace(WORK, experts=32, gradients=True)
    assert forecast(work, H100).blocks is not None
    assert forecast(replace(work, rows=512), H100).blocks is None, "reading the weights takes longer than the rows"
    assert forecast(replace(work, world=1), H100).blocks is None, "nothing is sent over a link"


def test_tiles_are_ready_in_proportion_to_the_rows() -> None:
    shares = ready_shares(32768, 8)
    assert shares == sorted(shares) and shares[0] < 0.05 and shares[-1] == 1 and 0.5 < shares[32] < 0.56


@pytest.mark.parametrize(
    "wrong", [{"link_bytes_per_s": 0}, {"flops_per_s": math.nan}, {"fixed_s": math.inf}, {"source": "x" * 101}]
)
def test_rates_that_cannot_be_used_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        replace(RATES, **wrong)
