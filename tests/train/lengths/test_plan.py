"""``moe-comm plan --lengths``: the documents of a corpus, as a dry run predicts them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from moe_comm import cli
from moe_comm.train.config import load
from moe_comm.train.data import Corpus, prepare_all
from moe_comm.train.dry_run import describe
from moe_comm.train.lengths.predict import predict_lengths
from moe_comm.train.loop.build import architecture_of
from tests.train.data.common import write_jsonl

CONFIG = """
[data]
source = "{folder}/documents.jsonl"
cache = "{folder}/cache"
tokenizer = "bytes"
seq_len = 512
batch = 16
micro_batches = 2
documents = "separate"
packing = "best_fit"
[model]
hidden = 64
layers = 2
heads = 4
kv_heads = 2
experts = 4
ffn = 64
[parallel]
ranks = 4
context = "ring"
lengths = "balanced"
machine = "h100"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    rng = random.Random(0)
    documents = ["x" * 511, *("y" * min(500, int(rng.lognormvariate(4, 1))) for _ in range(300)), "z" * 511]
    write_jsonl(tmp_path / "documents.jsonl", documents)
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.format(folder=tmp_path))
    return file


def plan(config: Path, lengths: Path, *more: str) -> list[str]:
    options = {"--model": config, "--lengths": lengths, "--gpus": 4, "--hardware": "h100", "--seq-len": 512}
    options |= {"--global-batch": 16, "--dtype": "fp32"}
    return ["plan", *(str(word) for pair in options.items() for word in pair), *more]


@pytest.mark.parametrize("mapping", [("dp=4,ep=1", 2), ("cp=2,dp=2,ep=2", 4)])
def test_the_plan_predicts_what_a_dry_run_predicts(
    mapping: tuple[str, int], config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    degrees, micro_batch = mapping
    parsed = load(str(config), [f"parallel.{degree}" for degree in degrees.split(",")])
    folders = prepare_all(parsed.data)
    corpus = Corpus.open(folders, parsed.data, parsed.run.seed)
    ranks, architecture = parsed.parallel.mapping(4), architecture_of(parsed, corpus.vocab_size)
    expected = predict_lengths(parsed, corpus, ranks, architecture)
    assert expected is not None and expected.static > expected.balanced
    assert str(expected) in describe(parsed)
    more = ("--mapping", degrees, "--micro-batch", str(micro_batch), "--json", "-")
    assert cli.run(plan(config, config, *more)) == 0
    lengths: dict[str, Any] = json.loads(capsys.readouterr().out)["lengths"]
    assert lengths["static"]["slowest"] == pytest.approx(expected.static, rel=1e-12)
    assert lengths["balanced"]["slowest"] == pytest.approx(expected.balanced, rel=1e-12)


def test_the_written_configuration_balances_lengths_if_that_is_faster(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    histogram, out = tmp_path / "lengths.json", tmp_path / "out.toml"
    for lengths, mode in (({"8192": 1, "64": 400}, "balanced"), ({"8192": 1}, "static")):
        histogram.write_text(json.dumps(lengths))
        command = plan(config, histogram, "--mapping", "dp=4", "--config", str(out), "--json", "-")
        command[command.index("--seq-len") + 1] = "8192"
        assert cli.run(command) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["mapping"]["lengths"] == mode
        assert result["step_s"] == min(prediction["step_s"] for prediction in result["lengths"].values())
        assert load(str(out)).parallel.lengths == mode
        assert tomllib.loads(out.read_text())["data"]["documents"] == "separate"


def test_bad_lengths_are_one_line(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(plan(config, config)) == 2
    assert f"is not prepared; run: moe-comm data {config}" in capsys.readouterr().err
    assert cli.run(plan(config, tmp_path)) == 2
    assert "is not a prepared folder" in capsys.readouterr().err
    (folder,) = prepare_all(load(str(config)).data)
    offsets = folder / "offsets.bin"
    offsets.write_bytes(bytes([offsets.read_bytes()[0] ^ 1]) + offsets.read_bytes()[1:])
    assert cli.run(plan(config, folder)) == 1
    assert "offsets.bin" in capsys.readouterr().err


def test_a_plan_for_prepared_text_loads_no_torch(config: Path) -> None:
    (folder,) = prepare_all(load(str(config)).data)
    command = plan(Path("mixtral-8x7b"), folder, "--mapping", "ep=4")
    code = f"import sys; from moe_comm import cli; assert cli.run({command}) == 0; assert 'torch' not in sys.modules"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert process.returncode == 0, process.stderr
