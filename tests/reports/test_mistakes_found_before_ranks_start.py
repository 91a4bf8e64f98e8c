"""The launcher finds mistakes that a configuration shows: no rank starts, and no folder is created."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="needs the train extra")

from moe_comm import cli
from moe_comm.cli import train as train_command
from moe_comm.errors import ConfigError
from moe_comm.runtime.versions import LOWEST_TORCH
from moe_comm.train import config as configuration
from moe_comm.train.dry_run import check_start

ROOT = Path(__file__).parents[2]
MISTAKES = [
    (["parallel.ep=3"], "must divide the ranks of a pipeline stage"),
    (["parallel.ranks=3", "parallel.tp=2"], "must divide the 3 ranks"),
    (["parallel.ranks=8", "parallel.tp=8", "model.heads=4"], "heads"),
    (["data.batch=2"], "1 sequences .* for 2 data-parallel ranks"),
    (["parallel.ranks=2", "parallel.cp=2", "data.seq_len=63"], "data.seq_len"),
    (["parallel.pp=2", "parallel.ranks=2", "model.layers=1"], "layers"),
    (["data.source=no/such/file.txt"], "cannot read 'no/such/file.txt'"),
    (['data.source=["pydoc", "nothing/*.txt"]'], "has no files"),
    (["data.tokenizer=no/such/tokenizer.json"], "data.tokenizer: cannot read"),
    (["data.tokenizer=gpt2"], "data.tokenizer: cannot read"),
    (["model.vocab=10"], "smaller than the tokenizer's"),
    (["model.pretrained=no/such/model"], "no/such/model"),
    (["checkpoint.resume=no/such/run"], "neither no nor auto, nor the folder of a run"),
    (["run.folder=file/runs"], "run.folder: cannot write to 'file/runs'"),
    (["data.cache=file/cache"], "data.cache: cannot write to 'file/cache'"),
]


@pytest.mark.parametrize(("settings", "message"), MISTAKES, ids=lambda value: " ".join(value))
def test_a_mistake_is_found_before_ranks_start(
    settings: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    config = configuration.load("tiny", settings)
    with pytest.raises(ConfigError, match=message):
        check_start(config, config.parallel.ranks)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("command", ["train", "inject"])
def test_commands_check_before_they_start_ranks(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(train_command, "launch")  # a start of ranks would be a NameError
    assert cli.run([command, "tiny", "data.source=missing.txt"]) == 2
    assert "cannot read 'missing.txt'" in capfd.readouterr().err
    assert not os.listdir(tmp_path)


def test_a_folder_without_permission_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    config = configuration.load("tiny", [f"run.folder={tmp_path}/new/runs"])
    with pytest.raises(ConfigError, match=r"run\.folder: cannot write to .*new/runs.*no permission to write to"):
        check_start(config, 2)


def test_configurations_that_can_run_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for settings in ([], ["parallel.ranks=4", "parallel.tp=2"], ["parallel=auto"], ["checkpoint.resume=auto"]):
        config = configuration.load("tiny", settings)
        check_start(config, config.parallel.ranks)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["train", "tinny"], "did you mean 'tiny'"),
        (["train", "smal", "--dry-run"], "did you mean 'small'"),
        (["mesh", "mixtral-8x7"], "did you mean 'mixtral-8x7b'"),
        (["train", "tiny.toml"], "did you mean the preset 'tiny'"),
        (["train", "tiny", "run.step=3"], "did you mean 'run.steps'"),
        (["train", "tiny", "modell.hidden=64"], "did you mean 'model'"),
        (["bench", "dispatch", "--peer", "torch_glo"], "did you mean 'torch_gloo'"),
        (["bench", "layer", "--peer", "torchtitn"], "did you mean 'torchtitan'"),
        (["check-grads", "--case", "route"], "did you mean 'routed'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_misspelled_names_have_a_suggestion(
    arguments: list[str], hint: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(arguments) == 2
    assert hint in capfd.readouterr().err


@pytest.mark.parametrize(
    ("command", "peer"), [("dispatch", "torch_mpich_tuned"), ("layer", "sonic_moe"), ("train", "deepspeed_zero2")]
)
def test_help_names_the_peers(command: str, peer: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", command, "--help"]) == 0
    assert peer in capfd.readouterr().out


@pytest.mark.parametrize(("installed", "fails"), [("2.4.1", True), ("2.10.0+cpu", True), (f"{LOWEST_TORCH}.0", False)])
def test_a_torch_that_is_too_old_fails_at_import(installed: str, fails: bool, tmp_path: Path) -> None:
    info = tmp_path / f"torch-{installed}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {installed}\n")
    done = subprocess.run(
        [sys.executable, "-c", "import moe_comm"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    expected = f"MissingDependency: moe_comm needs torch >= {LOWEST_TORCH}, but torch {installed} is installed"
    assert (done.returncode != 0, expected in done.stderr) == (fails, fails), done.stderr


def test_the_lowest_torch_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={LOWEST_TORCH}" in project["dependencies"]
