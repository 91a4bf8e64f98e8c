"""Whether a launcher started this process as a rank: the environment variables of torchrun, read and checked here."""

from __future__ import annotations

import os
from dataclasses import dataclass

from moe_comm.errors import ConfigError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OTHER_LAUNCHERS = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun (Open MPI)": "OMPI_COMM_WORLD_SIZE", "mpiexec": "PMI_SIZE"}
"""Variables with the number of processes that a launcher started, which does not set those of torchrun."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_UNSET = "unset them to start ranks on this host"


@dataclass(frozen=True)
class RankEnvironment:
    """This rank, according to the environment.

    Attributes:
        one_host: all ranks run on this host.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    one_host: bool


def rank_environment() -> RankEnvironment | None:
    """Return the rank that a launcher (torchrun, an operator, or ``launch``) made this process; None: no rank.

    A variable that is empty counts as unset, and so does -1 as LOCAL_RANK.
    """
    given = {name: text for name in _VARIABLES if (text := os.environ.get(name, "").strip())}
    if given.get("LOCAL_RANK") == "-1":  # an old convention of scripts for "not distributed"
        del given["LOCAL_RANK"]
    if not given:
        for launcher, name in _OTHER_LAUNCHERS.items():
            text = os.environ.get(name, "").strip()
            shell = name.startswith("SLURM") and "SLURM_PTY_PORT" in os.environ  # only one of the tasks has a terminal
            if text.isdecimal() and int(text) > 1 and not shell:
                raise ConfigError(
                    f"{launcher} started {text} processes ({name}), but RANK and WORLD_SIZE are not set, so each of "
                    f"them would work alone: start one torchrun per host, set RANK, WORLD_SIZE, LOCAL_RANK, "
                    f"LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process, or unset {name}"
                )
        return None
    shown = ", ".join(f"{name}={text!r}" for name, text in given.items())
    if missing := [name for name in _VARIABLES[:2] if name not in given]:
        raise ConfigError(
            f"the environment has {shown}, but not {' and '.join(missing)}: a rank needs both RANK and WORLD_SIZE; "
            f"set them, or {_UNSET.replace('them', ' and '.join(given))}"
        )
    if wrong := [name for name, text in given.items() if not (text.isascii() and text.isdecimal())]:
        raise ConfigError(f"{' and '.join(wrong)} must be an integer, at least 0; the environment has {shown}")
    values = {name: int(text) for name, text in given.items()}
    rank, world = values["RANK"], values["WORLD_SIZE"]
    if not rank < world:
        raise ConfigError(
            f"RANK must be less than WORLD_SIZE, which is at least 1; the environment has {shown}; correct it, or "
            f"{_UNSET}"
        )
    one_host = values.get("LOCAL_WORLD_SIZE") == world or os.environ.get("MASTER_ADDR") in _LOOPBACK or world == 1
    local_world = values.get("LOCAL_WORLD_SIZE", world if one_host else 1)
    local_rank = values.get("LOCAL_RANK", rank if one_host and local_world == world else 0)
    if "LOCAL_WORLD_SIZE" in values and not local_rank < local_world <= world:
        raise ConfigError(
            f"LOCAL_RANK must be less than LOCAL_WORLD_SIZE, which is at most WORLD_SIZE; the environment has {shown}"
        )
    return RankEnvironment(rank, world, local_rank, local_world, one_host)


def under_torchrun() -> bool:
    """Whether a launcher (torchrun, or ``launch``) started this process as a rank. The variables are not checked."""
    return bool(os.environ.get("RANK") and os.environ.get("WORLD_SIZE"))


def ranks_to_use(requested: int | None, default: int = 1) -> int:
    """Return the number of ranks: ``requested``; if None, that of the launcher of this rank, else ``default``.

    Raises:
        ConfigError: a launcher started this rank with another number of ranks than ``requested``; or as
            ``rank_environment``.
    """
    environment = rank_environment()
    if environment is None:
        return default if requested is None else requested
    if requested is not None and requested != environment.world:
        raise ConfigError(
            f"{requested} rank(s) are requested, but this process is rank {environment.rank} of {environment.world} "
            f"that torchrun or an operator started (RANK={environment.rank}, WORLD_SIZE={environment.world}); pass "
            f"--ranks {environment.world} (parallel.ranks={environment.world}), start {requested}, or unset RANK and "
            f"WORLD_SIZE to start ranks on this host"
        )
    return environment.world
