"""The number of ranks that a user requests is the number that runs, whatever the environment contains."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from moe_comm import cli
from moe_comm.errors import ConfigError
from moe_comm.runtime.launch import init_ranks, launch, ranks_to_use

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OTHER = ("SLURM_STEP_NUM_TASKS", "SLURM_PTY_PORT", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
ONE = {"RANK": "0", "WORLD_SIZE": "1"}
COMMANDS = [
    ["check-grads", "--ranks", "2"],
    ["train", "tiny", "--ranks", "2"],
    ["train", "tiny", "parallel.ranks=2"],
    ["train", "tiny"],  # the preset sets parallel.ranks
    ["inject", "tiny", "--ranks", "2"],
    ["plan", "--calibrate", "--ranks", "2"],
    ["parity", "--quick"],
    ["tune", "--ranks", "2"],
    ["bench", "dispatch"],
    ["bench", "layer"],
    ["bench", "train"],
    ["bench", "placement", "--ranks", "2"],
    ["bench", "plan", "--no-hosts", "--ranks", "2"],
]
INVALID = [
    ({"RANK": "0"}, "not WORLD_SIZE"),
    ({"WORLD_SIZE": "2"}, "not RANK"),
    ({"LOCAL_RANK": "0"}, "not RANK and WORLD_SIZE"),
    ({"LOCAL_WORLD_SIZE": "1"}, "not RANK and WORLD_SIZE"),
    ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK must be less than WORLD_SIZE"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be less than WORLD_SIZE"),
    ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK must be an integer"),
    ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE must be an integer"),
    ({"RANK": "0", "WORLD_SIZE": "2.0"}, "WORLD_SIZE must be an integer"),
    ({**ONE, "LOCAL_RANK": "x"}, "LOCAL_RANK must be an integer"),
    ({**ONE, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK must be less than LOCAL_WORLD_SIZE"),
    ({**ONE, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "at most WORLD_SIZE"),
    ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "srun started 2 processes"),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI.* started 2 processes"),
    ({"PMI_SIZE": "3"}, "mpiexec started 3 processes"),
]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, *OTHER):
        monkeypatch.delenv(name, raising=False)


def set_variables(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "variables",
    [{"LOCAL_RANK": "-1"}, {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PTY_PORT": "40001"}, {"SLURM_STEP_NUM_TASKS": "1"}],
)
def test_other_processes_are_no_ranks(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts set LOCAL_RANK to -1 without a launcher; of the tasks of an interactive shell, one has the terminal."""
    set_variables(monkeypatch, variables)
    assert ranks_to_use(2) == 2 and ranks_to_use(None) == 1


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_refuse_another_number_of_ranks_than_the_environment_has(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    set_variables(monkeypatch, ONE)
    monkeypatch.chdir(str(tmp_path))
    assert cli.run(command) == 2
    said = capfd.readouterr()
    assert "2 rank(s) are requested, but this process is rank 0 of 1" in said.err
    assert "pass --ranks 1" in said.err and "unset RANK and WORLD_SIZE" in said.err
    assert "all right" not in said.out and not os.listdir(str(tmp_path))


def test_a_function_refuses_another_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, {"RANK": "1", "WORLD_SIZE": "4"})
    for ranks in (1, 2, 8):
        with pytest.raises(ConfigError, match=rf"{ranks} rank\(s\) are requested, .* rank 1 of 4"):
            launch(os.getpid, ranks=ranks)
    assert launch(os.getpid, ranks=4) == launch(os.getpid) == [os.getpid()]


def test_without_a_request_the_ranks_of_the_environment_are_used(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    set_variables(monkeypatch, ONE)
    assert cli.run(["check-grads", "--case", "routed"]) == 0
    assert "1 rank(s)" in capfd.readouterr().out


@pytest.mark.parametrize(("variables", "message"), INVALID)
def test_an_incomplete_or_wrong_environment_is_refused(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    set_variables(monkeypatch, variables)
    with pytest.raises(ConfigError, match=message):
        launch(os.getpid, ranks=2)
    with pytest.raises(ConfigError, match=message), init_ranks("cpu"):
        pass
    assert cli.run(["check-grads", "--ranks", "2"]) == 2
    assert capfd.readouterr().err.startswith("moe-comm: error: ")


def test_a_rank_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, {"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="set MASTER_ADDR and MASTER_PORT"), init_ranks("cpu"):
        pass
    set_variables(monkeypatch, {"MASTER_ADDR": "localhost", "MASTER_PORT": "none"})
    with pytest.raises(ConfigError, match="got 'localhost' and 'none'"), init_ranks("cpu"):
        pass
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "variables",
    [{}, {"RANK": "", "WORLD_SIZE": ""}, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, {"SLURM_STEP_NUM_TASKS": "1"}],
)
def test_ranks_start_without_a_launcher(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation of SLURM, such as that of a batch script, is not a launcher."""
    set_variables(monkeypatch, variables)
    assert launch(os.getpid, ranks=1) == [os.getpid()]
