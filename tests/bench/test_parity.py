"""``moe-comm parity``: a list of mappings that fits into a test run keeps the target, and the tool can tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_comm.bench import parity
from moe_comm.bench.parity_cases import CASES, PIPELINES, QUICK, Case
from moe_comm.errors import ConfigError

SMALL = ("data.seq_len=32", "data.batch=8", "model.hidden=32", "model.ffn=32")


def test_the_quick_list_has_the_losses_norms_and_weights_of_one_process(tmp_path: Path) -> None:
    """With SGD alone: AdamW hides a wrong gradient scale. The whole list, with both, is the command's."""
    out = tmp_path / "parity.json"
    assert parity.main(str(out), steps=6, names=QUICK, optimizers=("sgd",), settings=SMALL)
    found = json.loads(out.read_text())
    assert found["target"] == 1e-5 and found["ok"]
    rows = {row["mapping"]: row for row in found["mappings"]}
    assert set(rows) == set(QUICK)
    for name, row in rows.items():
        assert row["loss_rel_diff"] <= 1e-5, name
        assert row["grad_norm_rel_diff"] <= 3e-5, name
        assert row["param_rel_diff"] <= 3e-5, name
        assert (row["optimizer"], row["ok"]) == ("sgd", True)
        assert (row["dropped"] > 0) == (row["mode"] == "capacity (batch)")


@pytest.mark.slow
def test_the_whole_list_keeps_the_target(tmp_path: Path) -> None:
    assert parity.main(str(tmp_path / "parity.json"), steps=6, settings=SMALL)


def test_a_run_that_differs_is_found_and_no_parity_is_promised_where_drops_depend_on_the_mapping() -> None:
    cases = [Case("other weights", 1, ("run.seed=1",)), Case("alike", 1), Case("by rank", 1, (), "capacity (rank)")]
    rows = {row.mapping: row for row in parity.compare(cases, ("sgd",), 2, SMALL)}
    assert {name: row.ok for name, row in rows.items()} == {"other weights": False, "alike": True, "by rank": None}
    assert rows["alike"].loss_rel_diff == rows["alike"].param_rel_diff == 0
    assert rows["other weights"].param_rel_diff > 0.1
    assert rows["by rank"].dropped > 0


def test_the_list_covers_every_kind_of_parallelism() -> None:
    names = {case.name for case in CASES}
    assert len(names) == len(CASES), "names are unique"
    assert set(QUICK) < names
    for schedule in PIPELINES:
        assert f"pp 2, {schedule}" in names
    assert {2, 4, 8} == {case.ranks for case in CASES}
    with pytest.raises(ConfigError, match="unknown mapping 'tp 3'; known: tp 2"):
        parity.chosen(["tp 3"])
