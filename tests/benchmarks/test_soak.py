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
            assert (fault.step - 1) // 4 * 4 > (fault.step - 1) // 3 * 3, "newer than what is in memory"
        else:
            assert following.step is not None and fault.step is not None and following.step > fault.step
    assert [parse(text) for text in soak.plan(Soak(tmp_path, faults=60))] == faults
    assert soak.plan(Soak(tmp_path, faults=60, seed=1)) != soak.plan(Soak(tmp_path, faults=60))
    with pytest.raises(ConfigError, match="unknown kinds: slow_link; known: kill"):
        Soak(tmp_path, faults=10, kinds=("kill", "slow_link"))


def test_thirty_faults_of_all_kinds_do_not_change_the_result(tmp_path: Path) -> None:
    settings = Soak(tmp_path, ranks=2, faults=30, seed=1)
    said: list[str] = []
    found = soak.run(settings, said.append)
    assert not soak.problems(found), found["difference"] or found["left_behind"]
    assert found["identical"] and found["faults"] == 30
    assert len(found["kinds"]) >= 12
    for kind, one in found["kinds"].items():
        assert one["recovered"] is not None, f"{kind} was never past"
        harmless = kind in ("slow_cpu", "slow_sleep", "full_shm")
        assert harmless or one["detected"] is not None, f"{kind} was never noticed"
    assert 0 < found["effective_time_ratio"] < 1
    assert json.loads(json.dumps(found)) == found
    assert "30 faults" in soak.table(found) and said
    # A complete soak is not repeated, and a soak with different settings is rejected.
    assert soak.run(settings, said.append)["kinds"] == found["kinds"]
    with pytest.raises(ConfigError, match="contains a soak with different settings"):
        soak.run(Soak(tmp_path, ranks=2, faults=31, seed=1))


def test_the_command_writes_the_result_and_fails_with_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"identical": True, "left_behind": [], "difference": "", "planned": 2, "faults": 2, "repeated": []}
    good |= {"kinds": {}, "starts": 1, "ranks": 2, "steps": 3, "effective_time_ratio": 0.5}
    asked: list[Soak] = []

    def found(settings: Soak, say: object, **changed: object) -> dict[str, object]:
        asked.append(settings)
        return good | changed

    monkeypatch.setattr(soak, "run", found)  # the test above has a real run
    arguments = ["--ranks", "2", "--faults", "2", "--kind", "kill", "--json", str(tmp_path / "out.json")]
    assert cli.run(arguments, command.app, command.NAME) == 0
    assert (asked[0].ranks, asked[0].faults, asked[0].kinds) == (2, 2, ("kill",))
    assert json.loads((tmp_path / "out.json").read_text()) == good
    assert "2 faults, 1 starts of 2 ranks" in capsys.readouterr().out
    monkeypatch.setattr(soak, "run", lambda settings, say: found(settings, say, left_behind=["/dev/shm/a"]))
    assert cli.run(arguments, command.app, command.NAME) == 1
    assert capsys.readouterr().err == "python -m benchmarks.soak: error: left behind: /dev/shm/a\n"
    assert cli.run(["--kind", "nothing"], command.app, command.NAME) == 2
    assert "python -m benchmarks.soak: error: a soak needs" in capsys.readouterr().err


def test_a_repeated_fault_does_not_replace_a_missing_one() -> None:
    good = {"identical": True, "left_behind": [], "difference": "", "planned": 2, "faults": 2, "repeated": []}
    assert not soak.problems(good)
    reasons = soak.problems(good | {"faults": 1, "repeated": ["0@14"]})
    assert reasons == ["faults that were injected more than once: 0@14", "only 1 of 2 faults were injected"]


def test_leaks_of_a_run_are_distinguished_from_other_programs(tmp_path: Path) -> None:
    before = leak_check.start()
    code = "import sys; sys.stdin.read()"
    mark = "MOE_COMM_SOAK=test-of-left-over"
    name, _, value = mark.partition("=")
    environments = [os.environ | {name: value}, dict(os.environ)]
    ours, others = (
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, env=environment)
        for environment in environments
    )
    made = [Path(f"/dev/shm/moe_comm-test.{process.pid}.{tmp_path.name}") for process in (ours, others)]
    try:
        for path in made:
            path.touch()
        before.watch(mark)
        left = [line for line in before.left(mark, 0.0) if "moe_comm-test" in line or "process" in line]
        assert [line for line in left if str(ours.pid) in line and "process" in line]
        assert str(made[0]) in left
        assert not [line for line in left if str(others.pid) in line]
    finally:
        for process in (ours, others):
            process.communicate()
        for path in made:
            path.unlink()
    assert not [line for line in before.left(mark, 5.0) if "moe_comm-test" in line or "process" in line]
