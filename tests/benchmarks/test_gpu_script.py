"""benchmarks/gpu.sh: a failed part does not stop later parts, passed parts are not repeated, and time is limited.

The fake interpreter only prints its arguments, so no GPU is needed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKE = f"""#!/bin/sh
case "$*" in
  *get_device_name*) echo "NVIDIA Fake 1" ;;
  *torch.version.cuda*) echo "2.13 CUDA 13.0" ;;
  *gpu_table.py*) exec {sys.executable} "$@" ;;
  *"-m moe_comm doctor"*) [ -e "$(dirname "$0")/broken" ] && exit 3; echo healthy ;;
  *"bench dispatch"*) sleep 60 ;;
  *setup.py*) [ -e "$(dirname "$0")/uncompilable" ] && exit 2; echo built ;;
  *"-m pytest"*) [ -e "$(dirname "$0")/skipping" ] && echo "10 skipped in 1 s" || echo "3 passed, 10 skipped in 1 s" ;;
  *) echo "ran $*" ;;
esac
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    path = tmp_path / "python3"
    path.write_text(FAKE)
    path.chmod(0o755)
    return path


def run(python: Path, *arguments: str, deadline_s: int = 540) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHON": str(python), "DEADLINE_S": str(deadline_s)}
    command = ["bash", "benchmarks/gpu.sh", *arguments, str(python.parent / "out")]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)


def table(shown: str) -> dict[str, str]:
    return dict(re.findall(r"^\| ([\w-]+) \| ([^|]+) \| *\d* \|$", shown, re.MULTILINE))


def test_a_run_resumes_where_the_last_one_ended(python: Path) -> None:
    broken = python.parent / "broken"
    broken.touch()
    first = run(python, "--only", "build,doctor,triton")
    assert first.returncode == 1
    results = table(first.stdout)
    assert (results["build"], results["doctor"], results["triton"]) == ("passed", "failed (3)", "passed")
    assert results["contract"] == "not run"
    broken.unlink()
    second = run(python, "--only", "build,doctor,triton")
    assert second.returncode == 0, second.stdout
    assert "build: has passed with these files" in second.stdout
    assert "triton: has passed with these files" in second.stdout
    assert table(second.stdout)["doctor"] == "passed"
    assert "build (at most" in run(python, "--only", "build", "--again").stdout
    assert (python.parent / "out" / "README.md").read_text().startswith("# NVIDIA Fake 1\n")


def test_tests_that_are_all_skipped_have_not_passed(python: Path) -> None:
    (python.parent / "skipping").touch()
    done = run(python, "--only", "build,contract,doctor")
    assert done.returncode == 1
    results = table(done.stdout)
    assert (results["contract"], results["doctor"]) == ("failed (no test passed)", "passed")
    (python.parent / "skipping").unlink()
    assert table(run(python, "--only", "contract").stdout)["contract"] == "passed"


def test_nothing_runs_without_what_the_build_makes(python: Path) -> None:
    (python.parent / "uncompilable").touch()
    done = run(python, "--only", "build,doctor,contract")
    assert done.returncode == 1 and "doctor: not run, since the build failed" in done.stdout
    results = table(done.stdout)
    assert (results["build"], results["doctor"], results["contract"]) == ("failed (2)", "not run", "not run")


def test_parts_without_time_are_reported_as_failures(python: Path) -> None:
    done = run(python, "--only", "build,dispatch", deadline_s=5)
    assert done.returncode == 1
    assert "build: no time left" in done.stdout
    assert table(done.stdout)["dispatch"] == "not run"


def test_unknown_parts_and_options_are_refused(python: Path) -> None:
    for arguments, told in (
        (("--only", "nonsense"), "no part begins with 'nonsense'"),
        (("--fast",), "unknown option"),
    ):
        done = run(python, *arguments)
        assert done.returncode == 2
        assert told in done.stderr


def test_parts_end_within_their_limits_and_call_what_exists(python: Path) -> None:
    shown = run(python, "--list").stdout
    parts = re.findall(r"^([\w-]+) \((\d+) s\): (.+)$", shown, re.MULTILINE)
    assert len({name for name, _, _ in parts}) == len(parts) > 10
    assert all(int(limit) < 540 for _, limit, _ in parts)
    for path in re.findall(r"(?:tests|benchmarks)/[\w/.]+|setup\.py", shown):
        assert (ROOT / path).exists(), path
