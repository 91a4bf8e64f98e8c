"""Assignment of layers to stages and ranks, for all small cases."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, strategies as st

from moe_comm.errors import ConfigError
from moe_comm.train.pipeline import SCHEDULES, StagePlan, check_micro_batches, plan_stages, stages_per_rank


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    limits = SCHEDULES[name]
    pp = draw(st.integers(2, 6))
    virtual = draw(st.integers(limits.least, limits.most or 4))
    return {
        "schedule": name,
        "pp": pp,
        "virtual": virtual,
        "num_layers": draw(st.integers(pp * virtual, 70)),
    }


@given(cases())
def test_every_layer_is_on_one_stage_in_order_and_every_stage_on_one_rank(case: dict[str, Any]) -> None:
    plan = plan_stages(**case)
    assert [layer for stage in range(plan.num_stages) for layer in plan.layers_of(stage)] == [*range(plan.num_layers)]
    assert sorted(stage for rank in range(plan.pp) for stage in plan.stages_of(rank)) == [*range(plan.num_stages)]
    assert all(len(plan.stages_of(rank)) == plan.virtual for rank in range(plan.pp))


@given(cases())
def test_no_other_split_has_a_smaller_largest_stage(case: dict[str, Any]) -> None:
    plan = plan_stages(**case)
    assert max(plan.counts) == -(-case["num_layers"] // plan.num_stages)


@given(cases())
def test_a_v_has_first_and_last_stage_on_the_first_rank_and_a_loop_is_cyclic(case: dict[str, Any]) -> None:
    plan = plan_stages(**case)
    for rank in range(plan.pp):
        if SCHEDULES[case["schedule"]].style == "v":
            assert plan.stages_of(rank) == (rank, 2 * plan.pp - 1 - rank)
        else:
            assert plan.stages_of(rank) == tuple(range(rank, plan.num_stages, plan.pp))
    assert plan.last_rank == (0 if plan.style == "v" else plan.pp - 1)
    assert plan.rank_of(0) == 0


def test_uneven_stages_and_stages_without_layers() -> None:
    plan = plan_stages(5, 2, "interleaved_1f1b", stage_layers=(2, 0, 3, 0))
    assert [list(plan.layers_of(stage)) for stage in range(4)] == [[0, 1], [], [2, 3, 4], []]
    assert "stage 1 (no layers)" in str(plan)
    assert "stage 3 (no layers, head)" in str(plan)


def test_without_pipeline_there_is_one_stage_for_every_schedule() -> None:
    for name in SCHEDULES:
        assert plan_stages(3, 1, name) == StagePlan(1, 1, "loop", (3,))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_layers": 4, "pp": 2, "stage_layers": (1, 2)}, ["(1, 2)", "3", "4 layers"]),
        ({"num_layers": 4, "pp": 2, "stage_layers": (4,)}, ["2 * 1 = 2", "1 counts"]),
        ({"num_layers": 4, "pp": 2, "stage_layers": (5, -1)}, ["(5, -1)"]),
        ({"num_layers": 3, "pp": 4}, ["3 layers", "4 stages", "stage 3"]),
        ({"num_layers": 8, "pp": 2, "schedule": "zbv", "virtual": 3}, ["zbv", "exactly 2", "3"]),
        ({"num_layers": 8, "pp": 2, "schedule": "interleaved_1f1b", "virtual": 1}, ["at least 2", "1"]),
        ({"num_layers": 8, "pp": 2, "schedule": "1f1b", "virtual": 2}, ["1f1b", "exactly 1", "2"]),
        ({"num_layers": 8, "pp": 2, "schedule": "2f2b"}, ["2f2b", "interleaved_1f1b"]),
        ({"num_layers": 8, "pp": 1, "virtual": 2}, ["2", "pp is 1"]),
        ({"num_layers": 0, "pp": 1}, ["0"]),
    ],
)
def test_errors_name_the_numbers(arguments: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_stages(**arguments)
    assert all(word in str(caught.value) for word in named), str(caught.value)


class _Stage:
    """The attributes of a stage that the constructors of torch's schedules read."""

    def __init__(self, index: int, stages: int, pp: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, pp, 0
        self.is_first, self.is_last, self.submod = index == 0, index == stages - 1, None


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_a_number_of_micro_batches_raises_exactly_if_torch_cannot_run_it(name: str, pp: int) -> None:
    from torch.distributed.pipelining.schedules import get_schedule_class

    entry, virtual = SCHEDULES[name], stages_per_rank(name, pp)
    plan = StagePlan(pp, virtual, entry.style, (1,) * (pp * virtual))
    stages: Any = [_Stage(stage, plan.num_stages, pp) for stage in plan.stages_of(0)]
    for micro_batches in range(1, 14):
        try:
            make: Any = get_schedule_class(entry.torch_name)
            make(stages[0] if entry.single else stages, micro_batches, loss_fn=min)
            torch_accepts = True
        except ValueError:
            torch_accepts = False
        with nullcontext() if torch_accepts else pytest.raises(ConfigError, match=str(micro_batches)):
            check_micro_batches(name, pp, micro_batches)


def test_an_invalid_number_of_micro_batches_names_the_nearest_valid_ones() -> None:
    with pytest.raises(ConfigError, match="4 and 6"):
        check_micro_batches("interleaved_1f1b", 2, 5)
    with pytest.raises(ConfigError, match="at least one"):
        check_micro_batches("gpipe", 1, 0)
