"""Training configurations: presets, files, overrides, and errors that name the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_comm.errors import ConfigError
from moe_comm.train.config import dump, load, ready_configs

EXAMPLE = Path(__file__).parents[2] / "examples" / "pydoc.toml"
READY = ("deepseek-v3", "mixtral-8x22b", "mixtral-8x7b", "qwen3-30b-a3b", "small", "tiny")


def test_the_example_loads() -> None:
    config = load(EXAMPLE)
    assert config.data.source == "pydoc"
    assert config.parallel.ranks == 2


def test_presets_load_by_name_and_their_mappings_fit() -> None:
    assert tuple(ready_configs()) == READY
    for name in READY:
        parallel = load(name).parallel
        assert parallel.mapping(parallel.ranks).world == parallel.ranks
    assert load("tiny", ["run.steps=3"]).run.steps == 3
    with pytest.raises(ConfigError, match="no configuration named 'big'; presets: deepseek-v3, mixtral"):
        load("big")


def test_a_dumped_configuration_loads_unchanged(tmp_path: Path) -> None:
    config = load(
        None,
        [
            "run.time_limit_s=12.5",
            "parallel.ep=1",
            'data.source=["a \\"quoted\\" path\\\\n", "b"]',
            "data.weights=[0.25, 0.75]",
            "parallel.stage_layers=[3, 1]",
            "optimizer.betas=[0.8, 0.99]",
            "run.seed=7",
            "run.folder=läufe/\N{GRINNING FACE}",
        ],
    )
    path = tmp_path / "config.toml"
    path.write_text(dump(config), encoding="utf-8")
    assert load(path) == config


def test_json_and_toml_mean_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"optimizer": {"betas": [0.8, 0.9], "lr": 1}}))
    (tmp_path / "a.toml").write_text("[optimizer]\nbetas = [0.8, 0.9]\nlr = 1\n")
    assert load(tmp_path / "a.json") == load(tmp_path / "a.toml")


def test_overrides_have_priority_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[run]\nsteps = 3\nseed = 4\n")
    config = load(path, ["run.steps=5", "model.family=olmoe", "model.tie = true"])
    assert (config.run.steps, config.run.seed, config.model.family, config.model.tie) == (5, 4, "olmoe", True)


def test_parallel_auto_leaves_the_mapping_to_the_planner(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('parallel = "auto"\n')
    (tmp_path / "a.json").write_text('{"parallel": "auto"}')
    config = load(path)
    assert config.parallel.auto and config == load(tmp_path / "a.json") == load(None, ["parallel=auto"])
    assert config.parallel.model_fields_set == {"auto"}
    with pytest.raises(ConfigError, match="chooses the mapping when a run starts"):
        config.parallel.mapping(2)
    # Overrides are constraints in any order; chosen keys of the file are not, the others remain.
    both = load("small", ["parallel.ep=2", "parallel=auto"])
    assert both == load("small", ["parallel=auto", "parallel.ep=2"])
    assert (both.parallel.ep, both.parallel.tp, both.parallel.ranks) == (2, 1, load("small").parallel.ranks)
    assert load("small", ["parallel.auto=true"]).parallel.tp == load("small").parallel.tp == 2
    # A dumped configuration has the same constraints.
    path.write_text(dump(both))
    assert load(path).parallel.model_fields_set == both.parallel.model_fields_set


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("parallel.machine=h100", "parallel: machine requires auto"),
        ("parallel.dp_replicate=2", "parallel: dp_replicate"),
        ("run=3", "section.key=value"),
        ("run.steps", "section.key=value"),
        ("run.steps.x=3", "run.steps:"),
        ("run.stepz=5", "did you mean 'run.steps'?"),
        ("model.lr=1.0", "did you mean 'optimizer.lr'?"),
        ("placement.balance.rws=2.0", "did you mean 'placement.balance.rows'?"),
        ("zzz.hidden=64", "known: run, data, model, optimizer, parallel, placement, payload"),
        ("model.zzz=64", "known: model.family, model.pretrained"),
        ("optimizer.betas=[0.9, nan]", "optimizer.betas.1:"),
        ("optimizer.betas=[0.9, 1.0]", "betas"),
        ("run.steps=0", "run.steps: input should be greater than or equal to 1; got 0"),
        ("model.top_k=99", "top_k (99)"),
        ("model.hidden=130", "hidden (130)"),
        ("model.kv_heads=3", "kv_heads (3)"),
        ("model.first_dense=1", "dense_ffn"),
        ("data.validation=0.0", "data.validation"),
        ("data.micro_batches=3", "micro_batches (3)"),
        ("data.weights=[0.5, 0.5]", "weights"),
    ],
)
def test_a_bad_override_names_the_key_and_what_to_do(override: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [override])
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.decay"):  # a rule of two sections
        load(None, ["optimizer.schedule=wsd", "optimizer.decay=999"])
    with pytest.raises(ConfigError, match=r"run\.steps.*optimizer\.lr"):
        load(None, ["run.steps=0", "optimizer.lr=0.0"])


def test_an_invalid_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml: No such file"):
        load(tmp_path / "none.toml")
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(ConfigError, match="cannot read"):
        load(folder)
    with pytest.raises(ConfigError, match=r"\.toml or \.json"):
        load(tmp_path / "a.yaml")
    for name, text in [("a.toml", b"[run\n"), ("a.json", b"{"), ("b.toml", b"\xff\xfe"), ("b.json", b"[1]")]:
        (tmp_path / name).write_bytes(text)
        with pytest.raises(ConfigError, match=name):
            load(tmp_path / name)
