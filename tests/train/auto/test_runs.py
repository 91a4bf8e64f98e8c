"""Runs with ``parallel=auto``: all ranks choose the same settings, they are written, and a resumed run keeps them."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.train import RunResult, run
from moe_comm.train.auto.choose import StepSeconds, resolve_parallel
from moe_comm.train.config import CHOSEN, TrainConfig, load
from moe_comm.train.dry_run import describe
from moe_comm.train.loop.build import architecture_of
from moe_comm.train.ranks import Ranks
from moe_plan.machine.collectives import Link
from moe_plan.machine.hardware import Cluster
from moe_plan.machine.hardware_file import save
from tests.pool import RankPool
from tests.train.auto.test_choose import CORE, GBIT

AUTO = "parallel=auto"
Loaded = tuple[str | None, list[str]]


def _run(rank: int, world: int, arg: Loaded) -> RunResult:
    return run(*arg)


def _resolve(
    rank: int, world: int, arg: list[str], step_seconds: StepSeconds = lambda *_: []
) -> tuple[TrainConfig, str]:
    config = load(None, arg)
    shape = ModelShape.of(architecture_of(config, 257))
    return resolve_parallel(config, shape, Ranks.make(), "cpu", lambda: None, step_seconds)


def _resolve_by_trials(rank: int, world: int, arg: tuple[list[str], int]) -> tuple[TrainConfig, str]:
    """Resolve with trials in which mappings with ``ep`` are fast. Rank 0 measures less time than the others."""
    settings, ep = arg

    def step_seconds(config: TrainConfig, steps: int) -> list[float]:
        first, later = (0.0, 1.0) if config.parallel.ep == ep else (9.0, 2.0)
        return [first, *[later * (1 + rank)] * (steps - 1)]

    return _resolve(rank, world, settings, step_seconds)


def _error(rank: int, world: int, arg: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        run(None, arg)
    return str(caught.value)


def chosen_in(folder: Path) -> dict[str, object]:
    """Return the planned settings that a run has written."""
    config = load(folder / "config.resolved.toml")
    assert not config.parallel.auto and config.parallel.machine is None
    written = tomllib.loads((folder / "config.resolved.toml").read_text())["parallel"]
    assert set(CHOSEN) - set(written) <= {"virtual", "overlap_chunks"}
    return {name: getattr(config.parallel, name) for name in CHOSEN}


@pytest.fixture
def machine(tmp_path: Path) -> str:
    """Return the override that describes ranks on separate hosts at 1 Gbit/s."""
    save(Cluster(CORE, 2, 1, GBIT, GBIT, start_s=3e-4, direct=True), tmp_path / "slow.json")
    return f"parallel.machine={tmp_path / 'slow.json'}"


def fast_machine(folder: Path) -> str:
    link = Link("fast", 1e12, 1e-9, 1.0)
    core = replace(CORE, launch_s=1e-9)
    save(Cluster(core, 2, 2, link, link, start_s=1e-9, direct=True), folder / "fast.json")
    return f"parallel.machine={folder / 'fast.json'}"


def test_ranks_measure_together_and_choose_the_same(pool2: RankPool, settings: list[str]) -> None:
    (first, text), (second, other_text) = pool2.run(_resolve, [*settings, AUTO], timeout=120)
    assert first == second and text == other_text
    assert first.parallel.mapping(2).world == 2 and text.startswith('parallel "auto": dp ')
    assert " a step predicted (" in text and "GB/s inside a host" in text


def test_measured_steps_decide_between_close_predictions(pool2: RankPool, settings: list[str], tmp_path: Path) -> None:
    given = [*settings, AUTO, fast_machine(tmp_path), "parallel.pp=1", "parallel.tp=1", "parallel.trials=3"]
    for ep in (1, 2):
        results = pool2.run(_resolve_by_trials, (given, ep), timeout=120)
        assert results[0] == results[1]
        config, text = results[0]
        assert config.parallel.ep == ep and config.parallel.trials is None
        assert f"ep {ep}" in text.partition(". Steps measured: ")[0] and ": 2 s" in text and ": 4 s" in text


def test_a_run_measures_steps_and_writes_the_choice_which_trains_alike(pool2: RankPool, settings: list[str]) -> None:
    given = [*settings, AUTO, "parallel.pp=1", "parallel.tp=1", "parallel.cp=1", "parallel.etp=1", "parallel.trials=2"]
    results = pool2.run(_run, (None, given), timeout=240)
    assert results[0].status == "finished" and results[0].steps == 4
    chosen = chosen_in(results[0].folder)
    assert load(results[0].folder / "config.resolved.toml").parallel.mapping(2).world == 2
    # The resolved configuration trains the same run without planning.
    again = pool2.run(_run, (str(results[0].folder / "config.resolved.toml"), []), timeout=240)
    assert again[0].last_loss == results[0].last_loss and chosen_in(again[0].folder) == chosen
    assert len(list(results[0].folder.parent.iterdir())) == 2, "trials write no folder"


@pytest.mark.slow
def test_replicas_over_a_slow_link_between_hosts_train(pool4: RankPool, settings: list[str], tmp_path: Path) -> None:
    fast = Link("fast", 20e9, 1e-6, 1.0)
    save(Cluster(CORE, 4, 2, fast, GBIT, start_s=1e-6, direct=True), tmp_path / "hosts.json")
    given = [*settings, AUTO, f"parallel.machine={tmp_path / 'hosts.json'}", "parallel.ranks=4"]
    given += ["parallel.sharding=fsdp", "parallel.pp=1", "parallel.ep=1"]
    results = pool4.run(_run, (None, given), timeout=240)
    assert results[0].status == "finished" and chosen_in(results[0].folder)["dp_replicate"] == 2
    sharded = pool4.run(_run, (None, [*given, "parallel.dp_replicate=1"]), timeout=240)
    assert chosen_in(sharded[0].folder)["dp_replicate"] == 1
    assert results[0].last_loss == pytest.approx(sharded[0].last_loss, rel=1e-5)


def test_a_resumed_run_keeps_the_first_choice(
    pool2: RankPool, settings: list[str], machine: str, tmp_path: Path
) -> None:
    first = pool2.run(_run, (None, [*settings, AUTO, machine, "run.steps=2"]), timeout=240)[0]
    chosen = chosen_in(first.folder)
    # This machine would be planned with another mapping.
    fast = [*settings, AUTO, fast_machine(tmp_path)]
    other = pool2.run(_resolve, fast, timeout=120)[0][0].parallel
    assert {name: getattr(other, name) for name in CHOSEN} != chosen
    resumed = pool2.run(_run, (None, [*fast, "checkpoint.resume=auto"]), timeout=240)[0]
    assert resumed.folder == first.folder and resumed.steps == 4
    assert chosen_in(resumed.folder) == chosen


def test_a_given_key_has_priority_over_the_choice_of_the_resumed_run(
    pool2: RankPool, settings: list[str], machine: str
) -> None:
    first = pool2.run(_run, (None, [*settings, AUTO, machine, "parallel.ep=1", "run.steps=2"]), timeout=240)[0]
    resume = f"checkpoint.resume={first.folder}"
    resumed = pool2.run(_run, (None, [*settings, AUTO, machine, "parallel.ep=2", resume]), timeout=240)[0]
    assert resumed.steps == 4 and chosen_in(resumed.folder)["ep"] == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("parallel.dp=3", "no mapping"),
        ("parallel.machine=abacus", "unknown hardware 'abacus'"),
        ("checkpoint.resume=/nowhere", "checkpoint.resume"),
    ],
)
def test_errors_are_raised_on_all_ranks(pool2: RankPool, settings: list[str], given: str, message: str) -> None:
    assert all(message in text for text in pool2.run(_error, [*settings, AUTO, given], timeout=120))


def test_one_rank_needs_no_choice(settings: list[str]) -> None:
    result = run(None, [*settings, AUTO, "parallel.ranks=1"])
    assert result.status == "finished" and chosen_in(result.folder)["dp"] == 1


def test_a_dry_run_plans_for_a_described_machine(settings: list[str], machine: str) -> None:
    text = describe(load(None, [*settings, AUTO, machine]))
    assert text.startswith('parallel "auto": ') and "memory in MiB" in text
    with pytest.raises(ConfigError, match=r"set parallel.machine to plan without"):
        describe(load(None, [*settings, AUTO]))
