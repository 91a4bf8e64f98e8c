"""``moe-comm parity``: the quick mappings match one process, and differences are detected."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_comm.bench.parity import compare as parity
from moe_comm.bench.parity.cases import CASES, PIPELINES, QUICK, ParityCase
from moe_comm.bench.parity.training import Parts, assemble
from moe_comm.errors import ConfigError
from moe_comm.topology import Sharding, Split
from tests.pool import RankPool
from tests.train.common import session, write_text

SMALL = ("data.seq_len=32", "data.batch=8", "model.hidden=32", "model.ffn=32")


SOME = ("dp 2, fsdp", "pp 2, zbv", "ep 2, capacity")
"""Mappings of two ranks; tests of the trainer compare more mappings, and more ranks."""


def test_mappings_match_one_process(tmp_path: Path) -> None:
    """With SGD only: AdamW hides a wrong gradient scale. The command runs all mappings with both."""
    out = tmp_path / "parity.json"
    assert parity.main(str(out), steps=3, names=SOME, optimizers=("sgd",), settings=SMALL)
    result = json.loads(out.read_text())
    assert result["target"] == result["limits"]["sgd"]["loss"] == 1e-5 and result["ok"]
    rows = {row["mapping"]: row for row in result["mappings"]}
    assert set(rows) == set(SOME)
    for name, row in rows.items():
        assert max(row["loss_rel_diff"], row["grad_norm_rel_diff"], row["param_rel_diff"]) <= 1e-5, name
        assert row["replica_diff"] == 0, name
        assert (row["optimizer"], row["ok"]) == ("sgd", True)
        assert (row["dropped"] > 0) == (row["mode"] == "capacity (batch)")


@pytest.mark.slow
def test_all_mappings_match_one_process(tmp_path: Path) -> None:
    sizes = [setting for setting in SMALL if not setting.startswith("data.batch")]  # four ranks need more sequences
    assert parity.main(str(tmp_path / "parity.json"), steps=6, settings=sizes)


def test_a_difference_is_detected_and_per_rank_capacity_has_no_parity() -> None:
    cases = [
        ParityCase("other weights", 1, ("run.seed=1",)),
        ParityCase("same", 1),
        ParityCase("by rank", 1, (), "capacity (rank)"),
    ]
    cases += [ParityCase("other model", 1, common=("model.tie=true",))]
    rows = {row.mapping: row for row in parity.compare(cases, ("sgd",), 2, SMALL)}
    assert {name: row.ok for name, row in rows.items()} == {
        "other weights": False,
        "same": True,
        "by rank": None,
        "other model": True,  # compared with one process with the same model
    }
    assert rows["same"].loss_rel_diff == rows["same"].param_rel_diff == 0
    assert rows["other weights"].param_rel_diff > 0.1
    assert rows["by rank"].dropped > 0


def test_each_difference_has_its_own_limit() -> None:
    row = parity.ParityRow("a", 2, "dropless", "sgd", 1e-8, 1e-7, 1e-6, 0.0, 0.0, None)
    assert row.exceeded() == []
    assert replace(row, loss_rel_diff=2e-5).exceeded() == ["loss"]
    assert replace(row, grad_norm_rel_diff=2e-5).exceeded() == ["grad norm"]
    assert replace(row, param_rel_diff=2e-5, replica_diff=1e-9).exceeded() == ["weights", "copies"]
    assert replace(row, optimizer="adamw", param_rel_diff=2e-5).exceeded() == []
    assert replace(row, loss_rel_diff=math.nan, replica_diff=math.nan).exceeded() == ["loss", "copies"]


def test_replicas_are_compared_with_the_first_and_nan_is_reported() -> None:
    sharding = Sharding((4,), (Split(0, "tp"),))

    def parts(values: list[float], tp: int) -> Parts:
        return {"w": ((4,), [(box, torch.tensor(values)) for box in sharding.boxes({"tp": tp}, {"tp": 2})])}

    ranks = [parts([1.0, 2.0], 0), parts([3.0, -8.0], 1), parts([1.0, 2.0], 0), parts([3.0, -8.0], 1)]
    full, differences = assemble(ranks)
    assert full["w"].tolist() == [1, 2, 3, -8] and differences == {"w": 0.0}
    full, differences = assemble([*ranks, parts([3.0, -7.0], 1)])
    assert full["w"].tolist() == [1, 2, 3, -8] and differences == {"w": 1 / 8}
    assert math.isnan(assemble([*ranks, parts([math.nan, 2.0], 0)])[1]["w"])
    assert assemble(ranks[:1])[0]["w"].isnan().tolist() == [False, False, True, True]


def parts_before_and_after(rank: int, world: int, arg: tuple[list[str], str]) -> tuple[list[Parts], list[Parts]]:
    """Return parts and copies after a step, before and after a weight of the last rank changes."""
    settings, name = arg
    with session(settings) as training:
        training.trainer.train_step(0)
        result = [training.parts()], [training.copies()]
        if rank == world - 1:
            parameter = training.stages[-1].get_parameter(name)
            with torch.no_grad():
                parameter[0] += 0.5
        result[0].append(training.parts())
        result[1].append(training.copies())
        return result


@pytest.mark.parametrize(
    ("mapping", "name", "origin"),
    [
        (("parallel.ep=2",), "norm.weight", "norm.weight"),
        (("parallel.ep=1", "parallel.sharding=zero1"), "norm.weight", "norm.weight"),
        (("parallel.tp=2",), "layers.1.moe.router.weight", "layers.1.moe.router.weight"),
        (("parallel.pp=2", "model.tie=true"), "head.weight", "embed.weight"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_replica_that_differs_is_detected(
    pool2: RankPool, tmp_path: Path, mapping: tuple[str, ...], name: str, origin: str
) -> None:
    result = pool2.run(parts_before_and_after, ([*write_text(tmp_path), *mapping], name), timeout=90)
    for kind in range(2):
        before, after = (assemble([rank[kind][when] for rank in result])[1] for when in range(2))
        assert before.keys() == after.keys() and not any(before.values())
        # Under ZeRO-1 each rank owns different optimizer rows, so only the parameters of modules are replicated.
        drifted = {name for name, difference in after.items() if difference}
        assert drifted == ({origin} if kind == 1 or "parallel.sharding=zero1" not in mapping else set())


def test_the_list_covers_every_kind_of_parallelism() -> None:
    names = {case.name for case in CASES}
    assert len(names) == len(CASES), "names are unique"
    assert set(QUICK) < names
    for schedule in PIPELINES:
        assert f"pp 2, {schedule}" in names
    assert {2, 4, 8} == {case.ranks for case in CASES}
    with pytest.raises(ConfigError, match="unknown mapping 'tp 3'; known: tp 2"):
        parity.chosen(["tp 3"])
