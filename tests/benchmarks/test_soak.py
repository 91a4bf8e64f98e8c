"""A run with faults of every kind is bit-identical to one without faults and leaves nothing behind."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak import __main__ as command, leak_check, study as soak
from benchmarks.soak.study import Soak
from moe_comm import cli
from moe_comm.errors import ConfigError
from moe_comm.observe.faults import DAMAGE, KINDS, parse


def test_a_plan_has_every_kind_and_damages_checkpoints_that_are_read(tmp_path: Path) -> None:
    faults = [parse(text) for text in soak.plan(Soak(tmp_path, faults=60))]
    assert len(faults) == 60
    assert {fault.kind for fault in faults} == set(KINDS) - {"slow_link"}
    for fault, following in itertools.pairwise(faults):
        if fault.kind in DAMAGE:
            assert (following.kind, following.step, following.rank) == ("kill", fault.step, fault.rank)
            assert fault.step is not None
            assert (fault.step - 1) // 4 * 4 > (fault.step - 1) // 3 * 3, (
                "the checkpoint must be newer than the snapshot"
            )
        else:
            assert following.step is not None and fault.step is not None and following.step > fault.step
    assert [parse(text) for text in soak.plan(Soak(tmp_path, faults=60))] == faults
    assert soak.plan(Soak(tmp_path, faults=60, seed=1)) != soak.plan(Soak(tmp_path, faults=60))
    with pytest.raises(ConfigError, match="unknown kinds: slow_link; known: kill"):
        Soak(tmp_path, faults=10, kinds=("kill", "slow_link"))


@pytest.mark.slow
def test_thirty_faults_of_all_kinds_do_not_change_the_result(tmp_path: Path) -> None:
    settings = Soak(tmp_path, ranks=2, faults=30, seed=1)
    messages: list[str] = []
    result = soak.run(settings, messages.append)
    assert not soak.problems(result), result["difference"] or result["left_behind"]
    assert result["identical"] and result["faults"] == 30
    assert len(result["kinds"]) >= 12
    for kind, one in result["kinds"].items():
        assert one["recovered"] is not None, f"no recovery from {kind} was recorded"
        harmless = kind in ("slow_cpu", "slow_sleep", "full_shm")
        assert harmless or one["detected"] is not None, f"{kind} was not detected"
    assert 0 < result["effective_time_ratio"] < 1
    assert json.loads(json.dumps(result)) == result
    assert "30 faults" in soak.table(result) and messages
    # A complete soak is not repeated, and a soak with different settings is rejected.
    assert soak.run(settings, messages.append)["kinds"] == result["kinds"]
    with pytest.raises(ConfigError, match="contains a soak with different settings"):
        soak.run(Soak(tmp_path, ranks=2, faults=31, seed=1))


def test_the_command_writes_the_result_and_fails_with_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passed = {"identical": True, "left_behind": [], "difference": "", "planned": 2, "faults": 2, "repeated": []}
    passed |= {"kinds": {}, "starts": 1, "ranks": 2, "steps": 3, "effective_time_ratio": 0.5}
    received: list[Soak] = []

    def fake_run(settings: Soak, say: object, **changed: object) -> dict[str, object]:
        received.append(settings)
        return passed | changed

    monkeypatch.setattr(soak, "run", fake_run)  # the test above has a real run
    arguments = ["--ranks", "2", "--faults", "2", "--kind", "kill", "--json", str(tmp_path / "out.json")]
    assert cli.run(arguments, command.app, command.NAME) == 0
    assert (received[0].ranks, received[0].faults, received[0].kinds) == (2, 2, ("kill",))
    assert json.loads((tmp_path / "out.json").read_text()) == passed
    assert "2 faults, 1 starts of 2 ranks" in capsys.readouterr().out
    monkeypatch.setattr(soak, "run", lambda settings, say: fake_run(settings, say, left_behind=["/dev/shm/a"]))
    assert cli.run(arguments, command.app, command.NAME) == 1
    assert capsys.readouterr().err == "python -m benchmarks.soak: error: left behind: /dev/shm/a\n"
    assert cli.run(["--kind", "nothing"], command.app, command.NAME) == 2
    assert "python -m benchmarks.soak: error: a soak needs" in capsys.readouterr().err


def test_a_repeated_fault_does_not_replace_a_missing_one() -> None:
    passed = {"identical": True, "left_behind": [], "difference": "", "planned": 2, "faults": 2, "repeated": []}
    assert not soak.problems(passed)
    reasons = soak.problems(passed | {"faults": 1, "repeated": ["0@14"]})
    assert reasons == ["faults that were injected more than once: 0@14", "only 1 of 2 faults were injected"]


def test_leaks_of_a_run_are_distinguished_from_other_programs(tmp_path: Path) -> None:
    check = leak_check.start()
    code = "import sys; sys.stdin.read()"
    mark = "MOE_COMM_SOAK=test-of-left-over"
    name, _, value = mark.partition("=")
    environments = [os.environ | {name: value}, dict(os.environ)]
    marked, unmarked = (
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, env=environment)
        for environment in environments
    )
    files = [Path(f"/dev/shm/moe_comm-test.{process.pid}.{tmp_path.name}") for process in (marked, unmarked)]
    try:
        for path in files:
            path.touch()
        check.watch(mark)
        left = [line for line in check.left(mark, 0.0) if "moe_comm-test" in line or "process" in line]
        assert [line for line in left if str(marked.pid) in line and "process" in line]
        assert str(files[0]) in left
        assert not [line for line in left if str(unmarked.pid) in line]
    finally:
        for process in (marked, unmarked):
            process.communicate()
        for path in files:
            path.unlink()
    assert not [line for line in check.left(mark, 60.0) if "moe_comm-test" in line or "process" in line]
