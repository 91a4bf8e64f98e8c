"""The published tables and their strict validation."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan_validation.published import OperatorCase, StepCase, from_json, load, tables
from moe_comm.errors import ConfigError
from moe_plan.machine.hardware_table import MACHINES
from moe_plan.model.files import model_named
from moe_plan.model.mapping import Mapping

VALID: dict[str, Any] = {
    "format": "moe_comm published",
    "version": 1,
    "name": "t",
    "source": "a paper",
    "machine": "h100",
    "unit": "ms",
    "better": "lower",
    "notes": ["note"],
    "rows": [
        {
            "system": "a",
            "case": "one",
            "value": 1.5,
            "fits": "fused.GROUPED",
            "operator": {"pattern": "product", "transport": "none", "m": 1, "n": 2, "k": 3, "ranks": 8},
        },
        {
            "system": "a",
            "case": "two",
            "value": "OOM",
            "step": {"model": "mixtral-8x7b", "gpus": 8, "seq_len": 4096, "global_batch": 8, "mapping": "ep=8"},
        },
    ],
}


def by_name() -> dict[str, Any]:
    return {table.name: table for table in tables()}


def test_every_table_has_its_source_and_a_known_machine() -> None:
    assert set(by_name()) == {
        "automodel",
        "bridge-b200",
        "bridge-h100",
        "folding",
        "llm-foundry-a100",
        "llm-foundry-h100",
        "mcore-mixtral",
        "megascale",
        "megascale-ablation",
        "megatron-weak",
        "nemo-dense",
        "nemo-grok",
        "parallelkittens",
        "flux-dense",
        "flux-moe-h800",
        "flux-moe-l20",
        "torchtitan-a100",
    }
    for table in tables():
        assert table.source
        assert table.machine in MACHINES


def test_folding_has_all_twenty_cells_and_two_ran_out_of_memory() -> None:
    rows = by_name()["folding"].rows
    assert len(rows) == 20
    assert {(row.system, row.case) for row in rows if row.value is None} == {
        ("FSDP", "llama3-8x70b on 256"),
        ("TP+EP+DP", "llama3-8x70b on 256"),
    }


def test_steps_name_models_and_mappings_that_exist() -> None:
    for table in tables():
        for row in table.rows:
            if isinstance(row.what, StepCase):
                model_named(row.what.model)
                Mapping.parse(row.what.mapping, row.what.gpus, coupled=row.what.coupled)


def test_megascale_at_240_is_excluded_with_its_reason() -> None:
    excluded = [row for row in by_name()["megascale"].rows if row.excluded]
    assert [(row.system, row.case, row.value) for row in excluded] == [("Megatron", "240 GPUs", 39.94)]
    assert "39.04" in str(excluded[0].excluded)


def test_at_most_one_row_of_a_system_is_fitted() -> None:
    for table in tables():
        fitted = [row.system for row in table.rows if row.fits]
        assert len(fitted) == len(set(fitted))


def test_rows_are_parsed() -> None:
    table = from_json(copy.deepcopy(VALID))
    one, two = table.rows
    assert one.what == OperatorCase("product", "none", 1, 2, 3, 8)
    assert one.value == 1.5
    assert two.value is None
    assert isinstance(two.what, StepCase)
    assert two.what.machine == "h100"


def test_optional_fields_of_a_step_are_read() -> None:
    data: Any = copy.deepcopy(VALID)
    data["rows"][1]["step"] |= {"micro_batch": 3, "recompute": "full"}
    stated, default = from_json(data).rows[1].what, from_json(VALID).rows[1].what
    assert isinstance(stated, StepCase) and (stated.micro_batch, stated.recompute) == (3, "full")
    assert isinstance(default, StepCase) and (default.micro_batch, default.recompute) == (None, None)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("unit",), "hours", "unit and better"),
        (("better",), "higher", "unit and better"),
        (("source",), "", "source: String should have at least 1 character"),
        (("extra",), 1, "extra: Extra inputs are not permitted"),
        (("version",), 2, "version: Input should be 1"),
        (("notes",), [1], "notes.0: Input should be a valid string"),
        (("rows", 0, "value"), float("nan"), "rows.0.value"),
        (("rows", 0, "value"), -1, "rows.0.value"),
        (("rows", 0, "value"), True, "rows.0.value"),
        (("rows", 0, "value"), "oom", "rows.0.value"),
        (("rows", 0, "system"), "", "rows.0.system"),
        (("rows", 0, "operator", "m"), 0, "rows.0.operator.m: Input should be greater than or equal to 1"),
        (("rows", 0, "operator", "m"), 1.0, "rows.0.operator.m: Input should be a valid integer"),
        (("rows", 0, "operator", "pattern"), "magic", "rows.0.operator.pattern: Input should be 'product'"),
        (("rows", 0, "operator", "top_k"), 2, "top_k at most experts"),
        (("rows", 0, "operator", "typo"), 1, "rows.0.operator.typo: Unexpected keyword argument"),
        (("rows", 1, "step", "dispatcher"), "nccl", "rows.1.step.dispatcher"),
        (("rows", 0, "step"), VALID["rows"][1]["step"], "either operator or step"),
        (("rows", 1, "step", "free"), "ep", "rows.1.step.free: Input should be a valid"),
        (("rows", 1, "step", "machine"), "h100", "must not have the key 'machine'"),
        (("rows", 1, "step", "micro_batch"), 0, "rows.1.step.micro_batch"),
        (("rows", 1, "step", "micro_batch"), True, "rows.1.step.micro_batch"),
        (("rows", 1, "step", "recompute"), "some", "rows.1.step.recompute"),
        (("rows", 1, "case"), "one", "appears twice"),
        (("rows", 1, "fits"), "fused.GROUPED", "at most one row of a"),
    ],
)
def test_errors_name_the_field(path: tuple[str | int, ...], value: object, message: str) -> None:
    data: Any = copy.deepcopy(VALID)
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(ConfigError, match=message):
        from_json(data)


@pytest.mark.parametrize("key", ["name", "rows", "machine"])
def test_missing_keys_are_named(key: str) -> None:
    data = {name: value for name, value in VALID.items() if name != key}
    with pytest.raises(ConfigError, match=f"{key}: Field required"):
        from_json(data)


@pytest.mark.parametrize("text", ["", "[", "[1]", '{"format": NaN}', "[" * 100_000])
def test_invalid_files_are_config_errors(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load(path)
    with pytest.raises(ConfigError, match="nowhere"):
        load(tmp_path / "nowhere.json")


def test_a_file_gives_the_same_table_as_its_data(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(VALID))
    assert load(path) == from_json(VALID)
