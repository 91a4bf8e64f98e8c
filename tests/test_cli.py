"""The command line: errors are one line on standard error with an exit code, without a traceback."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moe_comm
from moe_comm import cli
from moe_comm.cli import options, train as train_command
from moe_comm.errors import MissingDependency, PeerTimeout
from moe_comm.runtime.launch import RankFailed
from moe_comm.runtime.native_core import native_is_built

CONFIG = str(Path(__file__).parent.parent / "examples" / "pydoc.toml")


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the line on standard error, without its prefix."""
    return error_line_of(capsys.readouterr().err)


def error_line_of(shown: str) -> str:
    lines = shown.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("moe-comm: error: ")
    return lines[0].removeprefix("moe-comm: error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "nothing"),
        (["doctor", "--jsn"], "--json"),
        (["bench", "dispatch", "--ranks", "0"], "--ranks"),
        (["bench", "dispatch", "--experts", "4", "--top-k", "8"], "top_k must not exceed experts (4); got 8"),
        (["bench", "dispatch", "--backend", "rdma"], "unknown backend 'rdma'; known: auto"),
        (["bench", "dispatch", "--peer", "nobody"], "unknown peer 'nobody'; known: "),
        (["train"], "CONFIG"),
        (["train", "no/such/file.toml"], "no/such/file.toml: No such file"),
        (["train", CONFIG, "run.step=3"], "unknown key 'run.step' (did you mean 'run.steps'?)"),
        (["train", "tiny", "--set", "run.step=3"], "did you mean 'run.steps'?"),
        (["train", "tiny", "--resume", "always"], "checkpoint.resume: 'always' is neither no nor auto, nor the folder"),
        (["train", "tiny", 'faults.plan=["klil:step=1"]'], "did you mean kill"),
        (["train", "tiny", "--ranks", "2", 'faults.plan=["kill:rank=2,step=1"]'], "no rank 2; there are 2 ranks"),
        (["mesh", "tiny", "--ranks", "3", "parallel.tp=2"], "3"),
        (["parity", "--mapping", "tp 3"], "unknown mapping 'tp 3'; known: tp 2"),
        (["parity", "--optimizer", "adam"], "unknown optimizer 'adam' (did you mean 'adamw'?); known: sgd"),
        (["data", "tiny", "data.source=no/such/text.txt"], "no/such/text.txt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_usage_error_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    assert message in error_line(capsys)


def test_export_needs_a_run_with_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["export", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "has no complete checkpoint" in error_line(capsys)
    assert not (tmp_path / "out").exists()
    assert cli.run(["export", str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert error_line(capsys) == f"there is no run or checkpoint at {tmp_path / 'nothing'}"


def test_a_missing_extra_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.import_module

    def absent(name: str, package: str | None = None) -> Any:
        if name == "moe_comm.train.config":
            raise ModuleNotFoundError("No module named 'pydantic.fields'", name="pydantic.fields")
        return real(name, package)

    monkeypatch.setattr(options.importlib, "import_module", absent)
    assert cli.run(["train", CONFIG]) == 2
    assert (
        error_line(capsys)
        == "pydantic.fields is not installed; run: pip install '.[train]' in the checkout of moe_comm"
    )


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (PeerTimeout("rank 1 did not come\nwithin 3 s"), 1, "rank 1 did not come; within 3 s"),
        (MissingDependency("install it"), 2, "install it"),
        (RankFailed("rank 0 failed with KeyError: x", "the traceback"), 1, "rank 0 failed with KeyError: x"),
        (cli.Interrupted(15), 143, "stopped by SIGTERM"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (PermissionError(13, "Permission denied", "/somewhere"), 2, "/somewhere: Permission denied"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_kind_of_failure_has_its_exit_code(
    raised: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(train_command, "launch", fail)
    assert cli.run(["train", CONFIG]) == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == f"moe-comm: error: {message}"
    assert lines[:-1] == (["the traceback"] if isinstance(raised, RankFailed) else [])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_typed_error_of_ranks_is_one_line_and_has_a_traceback_on_request(
    ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").touch()
    source = f"data.source={tmp_path / 'empty.txt'}"
    arguments = ["train", "tiny", "--ranks", str(ranks), f"data.cache={tmp_path / 'cache'}", source]
    assert cli.run(arguments) == 2
    line = error_line_of(capfd.readouterr().err)
    assert cli.run([*arguments, "--traceback"]) == 2
    *trace, last = capfd.readouterr().err.strip().splitlines()
    assert error_line_of(last) == line and "contains no text" in line
    assert trace[0].startswith("Traceback") and any("in prepare" in one for one in trace)


def test_an_internal_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(train_command, "launch", fail)
    with pytest.raises(ZeroDivisionError):
        cli.run(["train", CONFIG])


def test_train_starts_the_requested_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def launch(*args: Any, **options: Any) -> list[int]:
        calls.append((*args, options))
        return [0]

    monkeypatch.setattr(train_command, "launch", launch)
    assert cli.run(["train", CONFIG]) == 0
    more = ["--set", "run.seed=7", "--restarts", "4", "--resume", "auto", "--traceback"]
    assert cli.run(["train", CONFIG, "--ranks", "3", "run.steps=5", *more]) == 0
    assert [call[2] for call in calls] == [2, 3]
    loaded = train_command.LOADED
    assert [call[3] for call in calls] == [
        {"restarts": 0, "preload": loaded, "tracebacks": False},
        {"restarts": 4, "preload": loaded, "tracebacks": True},
    ]
    (config,) = calls[1][1]
    assert (config.run.steps, config.run.seed) == (5, 7)
    assert (config.parallel.ranks, config.checkpoint.resume) == (3, "auto")


@pytest.mark.parametrize(
    ("overrides", "restarts", "resume"),
    [
        ([], "0", "no"),
        ([], "2", "auto"),
        (["checkpoint.resume=a-run/checkpoints/step-00000002"], "0", "a-run/checkpoints/step-00000002"),
        (["checkpoint.resume=a-run/checkpoints/step-00000002"], "1", "a-run"),
    ],
)
def test_restarted_ranks_resume_their_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, overrides: list[str], restarts: str, resume: str
) -> None:
    """Ranks that start for the first time do not resume an older run, unless requested."""
    from moe_comm.train.config import load
    from moe_comm.train.loop import job

    calls = []

    def run(config: Any) -> SimpleNamespace:
        calls.append(config.checkpoint.resume)
        return SimpleNamespace(signal=0)

    checkpoint = tmp_path / "a-run" / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    monkeypatch.setattr(job, "run_config", run)
    assert train_command.train_rank(load("tiny", overrides)) == 0
    assert calls == [resume]


def test_version_is_that_of_pyproject(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert moe_comm.__version__ == project["version"]
    assert cli.run(["--version"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"moe-comm {project['version']}, torch {torch.__version__}, native core: "), output
    assert ("native core: yes" in output) == native_is_built()


def test_mesh_shows_the_coordinates_of_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["mesh", "tiny", "--ranks", "4", "parallel.tp=2", "--set", "parallel.ep=4"]) == 0
    shown = capsys.readouterr().out
    assert "tp" in shown and "ep" in shown and len(shown.splitlines()) > 4


def test_data_describes_a_text_and_lists_the_files_that_it_skips(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "words.txt").write_text("some words\n" * 500)
    (text / "picture.png").write_bytes(b"\x89PNG\xff")
    (text / ".hidden").write_text("more words")
    assert cli.run(["data", "tiny", f"data.source={text}", f"data.cache={tmp_path / 'cache'}", "data.seq_len=16"]) == 0
    shown = capsys.readouterr().out
    assert "5,50" in shown, "the output lacks the number of tokens"
    assert list((tmp_path / "cache").iterdir())
    assert f"2 files of {text}" in shown
    assert f"'{text / '.hidden'}' (hidden)" in shown and f"'{text / 'picture.png'}' (not UTF-8" in shown
    assert "words.txt (" not in shown


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    shown = capsys.readouterr().out
    commands = ("data", "doctor", "export", "mesh", "parity", "train", "bench", "check-grads")
    assert all(name in shown for name in commands)
    for command in (["bench", "dispatch"], ["bench", "layer"], *([name] for name in sorted(commands, reverse=True))):
        assert cli.run([*command, "--help"]) == 0
    assert "--top-k" in capsys.readouterr().out


def test_python_dash_m_is_the_same_command_and_does_not_import_torch() -> None:
    code = "import sys; from moe_comm import cli; cli.run(['--help']); print('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert process.stdout.splitlines()[-1] == "False"
    command = [sys.executable, "-m", "moe_comm", "bench", "dispatch", "--rank", "2"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 2
    assert process.stderr.splitlines() == ["moe-comm: error: No such option: --rank (Possible options: --ranks)"]


def test_bench_dispatch_writes_one_json_object(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    small = ["--tokens", "16", "--hidden", "32", "--experts", "4", "--top-k", "2", "--iterations", "2"]
    assert cli.run(["bench", "dispatch", "--ranks", "1", *small, "--peer", "torch_gloo", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    keys = {"dispatch_ms", "combine_ms", "dispatch_limit_ms", "combine_limit_ms", "limit_ratio", "peers", "settings"}
    assert keys <= result.keys()
    assert result["settings"]["tokens"] == 16


def test_check_grads_compares_ranks_with_one(capfd: pytest.CaptureFixture[str]) -> None:
    small = ["--tokens", "8", "--hidden", "16", "--ffn", "16", "--experts", "4", "--top-k", "2"]
    assert cli.run(["check-grads", "--ranks", "2", *small]) == 0
    assert capfd.readouterr().out
