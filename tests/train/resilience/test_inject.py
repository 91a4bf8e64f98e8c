"""Injected faults in training: each occurs once, as planned, and the run ends with the same bits as without it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from moe_comm.errors import CheckpointError, ConfigError, CorruptFile
from moe_comm.observe.faults import fault_outcomes, read_injections
from moe_comm.observe.records import ATTEMPTS, FAULTS, INJECTED, Attempt, FaultRecord, read_lines
from moe_comm.train import run
from moe_comm.train.config import load
from moe_comm.train.resilience import inject as fault_actions
from moe_comm.train.resilience.inject import Injector
from tests.pool import RankPool
from tests.train.loop.test_resume import folder_of
from tests.train.resilience.test_peer_memory import assert_same_run

SETTINGS = ["run.steps=8", "run.nonfinite=rerun", "guard.checksums=true", "watch.enabled=false", "observe.every=0"]


def with_faults(settings: list[str], *faults: str) -> list[str]:
    return [*settings, f"faults.plan={json.dumps(faults)}"]


def _run(rank: int, world: int, settings: list[str]) -> str:
    """Return how the run ended: the status, or the error."""
    try:
        return run(None, settings).status
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_faults_that_a_step_survives_do_not_change_its_numbers(
    pool2: RankPool, shared_settings: list[str], tmp_path: Path
) -> None:
    common = [*shared_settings, *SETTINGS]
    plain, faulty = ([*common, f"run.folder={tmp_path / name}"] for name in ("plain", "broken"))
    faults = [
        "nan_loss:rank=1,step=2",
        "nan_grad:rank=0,step=3",
        "flip_bit:rank=1,step=4,layer=1",
        "slow_sleep:rank=0,step=5,at=backward,seconds=0.01,steps=2",
        "slow_cpu:rank=1,step=6,at=start,seconds=0.01",
        "full_shm:rank=0,step=7,at=end,seconds=0.01,mib=1",
    ]
    assert pool2.run(_run, plain, timeout=90) == ["finished"] * 2
    assert pool2.run(_run, with_faults(faulty, *faults), timeout=90) == ["finished"] * 2
    folder = folder_of(faulty)
    assert [record.fault for record in read_injections(folder / INJECTED)] == faults
    detected = list(read_lines(folder / FAULTS, FaultRecord))
    summaries = {(record.step, record.kind, tuple(record.ranks), record.action) for record in detected}
    assert {(2, "nonfinite", (1,), "rerun"), (4, "corrupt", (1,), "rerun")} <= summaries
    assert any(record.step == 3 and record.kind == "nonfinite" for record in detected)
    assert_same_run(folder, folder_of(plain))
    assert not (folder_of(plain) / INJECTED).exists()


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("raise_forward:step=5", "FaultOnPurpose: raise_forward on purpose, in step 5"),
        ("raise_backward:step=5,layer=1", "FaultOnPurpose: raise_backward on purpose, in step 5"),
        ("raise_thread:step=5", "FaultOnPurpose: raise_thread on purpose, in the data of step 5"),
        ("full_disk:step=5", "CheckpointError: step 6 could not be saved"),
    ],
)
def test_a_run_that_a_fault_ended_resumes_without_it_to_the_same_bits(
    settings: list[str], plain: Path, fault: str, expected: str
) -> None:
    saving = [*settings, *SETTINGS, "checkpoint.every=2", "checkpoint.background=false"]
    assert _run(0, 1, with_faults(saving, fault)).startswith(expected)
    assert _run(0, 1, with_faults([*saving, "checkpoint.resume=auto"], fault)) == "finished"
    folder = folder_of(saving)
    assert [one.kind for one in read_injections(folder / INJECTED)] == [fault.partition(":")[0]]
    assert_same_run(folder, plain)


@pytest.fixture(scope="module")
def plain(shared_settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run without faults on one rank."""
    settings = [*shared_settings, *SETTINGS, f"run.folder={tmp_path_factory.mktemp('plain')}"]
    assert _run(0, 1, settings) == "finished"
    return folder_of(settings)


@pytest.mark.parametrize("kind", ["checkpoint_truncate", "checkpoint_flip", "checkpoint_missing"])
def test_a_damaged_checkpoint_is_skipped_for_the_previous_one(settings: list[str], plain: Path, kind: str) -> None:
    saving = [*settings, *SETTINGS, "checkpoint.every=2", "checkpoint.keep=3"]
    faults = (f"{kind}:step=5", "raise_forward:step=6")
    assert "raise_forward" in _run(0, 1, with_faults(saving, *faults))
    resuming = with_faults([*saving, "checkpoint.resume=auto"], *faults)
    assert _run(0, 1, resuming) == "finished"
    folder = folder_of(saving)
    (detected,) = (record for record in read_lines(folder / FAULTS, FaultRecord) if record.kind == "checkpoint")
    assert (detected.step, detected.action) == (4, "restart")
    assert [record.first_step for record in read_lines(folder / ATTEMPTS, Attempt)] == [1, 3]
    assert_same_run(folder, plain)


def test_if_all_checkpoints_are_damaged_the_newest_one_is_reported(settings: list[str]) -> None:
    saving = [*settings, *SETTINGS, "checkpoint.every=2", "checkpoint.keep=1"]
    faults = ("checkpoint_flip:step=5", "raise_forward:step=5")
    assert "raise_forward" in _run(0, 1, with_faults(saving, *faults))
    with pytest.raises((CheckpointError, CorruptFile), match="step-00000004"):
        run(None, with_faults([*saving, "checkpoint.resume=auto"], *faults))


def test_a_run_without_a_checkpoint_restarts_without_its_fault(pool2: RankPool, settings: list[str]) -> None:
    plan = [f"raise_forward:rank={rank},step=2" for rank in range(2)]
    faults = with_faults([*settings, *SETTINGS], *plan)
    assert all("raise_forward" in end for end in pool2.run(_run, faults, timeout=120))
    assert pool2.run(_run, [*faults, "checkpoint.resume=auto"], timeout=120) == ["finished"] * 2
    folders = sorted(Path(load(None, settings).run.folder).iterdir(), key=lambda path: path.stat().st_ctime_ns)
    outcomes = fault_outcomes(folders[-1])
    assert [(record.injection.kind, record.injection.attempt) for record in outcomes] == [("raise_forward", 0)] * 2
    assert all(record.recovered_s > 0 for record in outcomes), (
        "the run in the new folder has completed the step of the fault"
    )
    attempts, (first,) = (list(read_lines(folder / ATTEMPTS, Attempt)) for folder in reversed(folders))
    assert [record.number for record in attempts] == [0, 1] and attempts[0] == first, (
        "the record of the first attempt is kept"
    )
    assert (attempts[1].lost_steps, attempts[1].source) == (1, "fresh")
    ends = pool2.run(_run, faults, timeout=120)
    assert all("raise_forward" in end for end in ends), "a new run must have its own faults"


def test_an_impossible_fault_is_rejected_on_every_rank(pool2: RankPool, settings: list[str]) -> None:
    for plan, extra, expected in (
        ("kill:rank=2,step=1", [], "no rank 2; there are 2 ranks"),
        ("klil:step=1", [], "did you mean kill"),
        ("flip_bit:step=1", ["parallel.overlap_chunks=2"], "set parallel.overlap_chunks=0"),
        ("slow_link:step=1", [], "it needs ranks on hosts of moe_comm.bench.hosts"),
    ):
        ends = pool2.run(_run, with_faults([*settings, *SETTINGS, *extra], plan), timeout=120)
        assert all(end.startswith("ConfigError") and expected in end for end in ends), ends


def test_slowing_a_link_keeps_its_other_settings_and_restores_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "qdisc tbf 8003: root refcnt 5 rate 1Gbit burst 73728b lat 50ms"
    calls: list[tuple[str, ...]] = []

    def tc(*arguments: str) -> str:
        calls.append(arguments)
        return shown

    monkeypatch.setattr(fault_actions, "_run", tc)
    restore = fault_actions.slow_link(25)
    restore()
    # A restarted rank restores the rate, too, from the record that was written before the link was slowed.
    recorded_shape = fault_actions.link_shape()
    fault_actions.shape_link(recorded_shape)
    assert calls.pop() == calls[-2] and calls.pop() == ("qdisc", "show", "dev", "link0")
    link_arguments = ("dev", "link0", "root", "tbf", "rate")
    unchanged = ("burst", "73728b", "latency", "50ms")
    assert calls[1:] == [
        ("qdisc", "replace", *link_arguments, "25mbit", *unchanged),
        ("qdisc", "replace", *link_arguments, "1Gbit", *unchanged),
    ]
    monkeypatch.setattr(fault_actions, "_run", lambda *arguments: "qdisc noqueue 0: root")
    with pytest.raises(ConfigError, match="not shaped by tbf"):
        fault_actions.slow_link(25)


def test_the_rate_of_a_link_is_restored_after_its_rank_died(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = ["1Gbit"]

    def tc(*arguments: str) -> str:
        if "replace" in arguments:
            rates.append(arguments[arguments.index("rate") + 1])
        return f"qdisc tbf 8003: root refcnt 5 rate {rates[-1]} burst 73728b lat 50ms"

    monkeypatch.setattr(fault_actions, "_run", tc)
    monkeypatch.setattr(fault_actions, "check_link", lambda: "")
    faults = with_faults(
        [*settings, *SETTINGS, "checkpoint.every=2"],
        "slow_link:step=3,steps=2,mbit=20",
        "slow_link:step=4,steps=2,mbit=10",
        "raise_forward:step=4",
    )
    with monkeypatch.context() as patch:
        patch.setattr(Injector, "close", lambda self: None)
        assert "raise_forward" in _run(0, 1, faults)
    assert rates == ["1Gbit", "20.0mbit", "10.0mbit"]
    assert _run(0, 1, [*faults, "checkpoint.resume=auto"]) == "finished"
    assert rates[3:] == ["1Gbit"]


def test_damage_changes_one_file(tmp_path: Path) -> None:
    content = bytes(range(256))
    changed: dict[str, Any] = {}
    for kind in ("checkpoint_truncate", "checkpoint_flip", "checkpoint_missing"):
        path = tmp_path / kind
        path.write_bytes(content)
        fault_actions.damage(path, kind, random.Random(1))
        changed[kind] = path.read_bytes() if path.exists() else None
    assert changed["checkpoint_missing"] is None
    assert content.startswith(changed["checkpoint_truncate"]) and len(changed["checkpoint_truncate"]) < 256
    pairs = zip(content, changed["checkpoint_flip"], strict=True)
    assert sum((a ^ b).bit_count() for a, b in pairs) == 1
    assert fault_actions.choose_file(tmp_path, "checkpoint_flip", random.Random(1)) is None, (
        "a file was chosen although there is no checkpoint"
    )
