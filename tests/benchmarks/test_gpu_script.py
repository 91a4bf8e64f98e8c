"""benchmarks/gpu.sh: parts that crash, hang or are killed lose nothing that was measured, and do not stop the others.

The parts are small commands on the CPU. ``make gpu-script`` runs the real parts with emulated kernels.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import driver as driver_module
from benchmarks.gpu.cache import restore, store
from benchmarks.gpu.driver import Driver, files_hash
from benchmarks.gpu.main import main, selected
from benchmarks.gpu.parts import PRESETS, Family, Kind, Part, parts
from benchmarks.gpu.profile import profile_parts, short_name
from benchmarks.gpu.record import append, read
from benchmarks.gpu.sources import files_of, hash_of

ROOT = Path(__file__).parents[2]
WORKER = """
import os, signal, sys, time
from pathlib import Path
from benchmarks.gpu.record import Recorder

def crash():
    raise RuntimeError("no such kernel")

def hang():
    time.sleep(600)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def row():
    return {"who": "ours", "device_us": 3.0}

work = {"row": row, "crash": crash, "hang": hang, "die": die}
recorder = Recorder(sys.argv[2], Path(sys.argv[1]), "cpu", limit_s=float(sys.argv[3]))
sys.exit(recorder.run_all((name, work[name.split(",")[0]]) for name in sys.argv[4:]))
"""


@pytest.fixture(autouse=True)
def same_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "files_hash", lambda *_: "tree")
    monkeypatch.setattr(driver_module, "hash_of", lambda *_: "tree")


def worker(out: Path, name: str, *operations: str, limit_s: float = 60, inner_s: float = 30, **more: Any) -> Part:
    command = (sys.executable, "-c", WORKER, str(out / "results.jsonl"), name, str(inner_s), *operations)
    return Part(name, limit_s, command, **more)


def shell(name: str, script: str, kind: Kind = "measurement", family: Family = "") -> Part:
    return Part(name, 30, ("bash", "-c", script), kind, family)


def run(out: Path, *found: Part, deadline_s: float = 540, again: bool = False) -> tuple[int, dict[str, str]]:
    driver = Driver(out, out / "results.tar.gz", deadline_s, "gpu.sh")
    code = driver.run(found, again)
    return code, {name: outcome.result for name, outcome in driver.outcomes.items()}


def archived(out: Path) -> list[dict[str, Any]]:
    with tarfile.open(out / "results.tar.gz") as archive:
        member = archive.extractfile(f"{out.name}/results.jsonl")
        assert member is not None
        return [json.loads(line) for line in member.read().splitlines()]


def test_crash_hang_and_kill_name_the_operation_and_keep_the_rows(tmp_path: Path) -> None:
    code, results = run(
        tmp_path,
        worker(tmp_path, "crashes", "row", "crash", "row, again"),
        worker(tmp_path, "hangs", "row", "hang, 4096 tokens", inner_s=1, family="triton"),
        worker(tmp_path, "dies", "row", "die"),
        worker(tmp_path, "skipped", "row", family="triton"),
        worker(tmp_path, "passes", "row", family="layer"),
    )
    assert code == 1
    assert results == {
        "crashes": "failed: exit code 1",
        "hangs": "hung in 'hang, 4096 tokens'",
        "dies": "killed by SIGKILL in 'die'",
        "skipped": "skipped: hangs hung",
        "passes": "passed",
    }
    rows = [(line["part"], line["operation"]) for line in archived(tmp_path) if line["event"] == "row"]
    assert rows == [("crashes", "row"), ("crashes", "row, again"), ("hangs", "row"), ("dies", "row"), ("passes", "row")]
    errors = [line["error"] for line in read(tmp_path / "results.jsonl") if line["event"] == "failed"]
    assert errors == ["RuntimeError: no such kernel"]
    assert "in hang" in (tmp_path / "hangs.log").read_text()  # the stacks
    page = (tmp_path / "README.md").read_text()
    assert "- crash: RuntimeError: no such kernel" in page and "| ours | 3.0 |" in page


def test_a_part_is_killed_at_its_limit(tmp_path: Path) -> None:
    assert run(tmp_path, Part("slow", 1, ("sleep", "60"))) == (1, {"slow": "took longer than 1 s"})


@pytest.mark.slow
def test_the_operation_of_a_part_that_is_killed_at_its_limit_is_named(tmp_path: Path) -> None:
    """The operation's own limit does not help a process that does not return from C, or whose limit is wrong."""
    hangs = worker(tmp_path, "hangs", "row", "hang", limit_s=15)
    assert run(tmp_path, hangs) == (1, {"hangs": "hung in 'hang'"})


def test_an_operation_without_time_does_not_start(tmp_path: Path) -> None:
    code, results = run(tmp_path, worker(tmp_path, "short", "row", limit_s=4.9))
    assert code == 1 and results["short"] in ("failed: exit code 1", "took longer than 5 s")
    assert not [line for line in read(tmp_path / "results.jsonl") if line["event"] in ("started", "row")]


def test_a_missing_tool_fails_its_part_only(tmp_path: Path) -> None:
    code, results = run(tmp_path, Part("ncu", 10, ("no-such-profiler",)), shell("dispatch", "exit 0"))
    assert (code, results) == (1, {"ncu": "failed: exit code 127", "dispatch": "passed"})


def test_a_failed_test_is_not_taken_for_one_that_hangs(tmp_path: Path) -> None:
    slow = shell("slow", "echo 'Failed: Timeout (>20.0s) from pytest-timeout.'; exit 1", "tests", "triton")
    hung = shell("hung", "echo 'Timeout (0:00:20)!'; exit 1", "tests", "layer")
    results = run(tmp_path, slow, hung, shell("a", "exit 0", family="triton"), shell("b", "exit 0", family="layer"))[1]
    assert results == {"slow": "failed: exit code 1", "hung": "hung", "a": "passed", "b": "skipped: hung hung"}


def test_a_run_that_is_killed_leaves_what_it_measured(tmp_path: Path) -> None:
    part = worker(tmp_path, "hangs", "row", "hang")
    script = (
        "import sys; from pathlib import Path; from benchmarks.gpu.driver import Driver; "
        "from benchmarks.gpu.parts import Part; out = Path(sys.argv[1]); "
        "Driver(out, out / 'results.tar.gz', 540, '').run([Part('hangs', 60, tuple(sys.argv[2:]))])"
    )
    command = [sys.executable, "-c", script, str(tmp_path), *part.command]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        try:
            while not (tmp_path / "results.tar.gz").exists() or len(archived(tmp_path)) < 3:
                assert process.poll() is None
                time.sleep(0.05)
        finally:
            process.send_signal(signal.SIGKILL)
            for child in _children(process.pid):
                os.kill(child, signal.SIGKILL)
    assert [line["event"] for line in archived(tmp_path)][:3] == ["started", "row", "done"]


def _children(pid: int) -> list[int]:
    listed = subprocess.run(["pgrep", "-s", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    return [int(child) for child in listed if int(child) != pid]


def test_operations_continue_after_one_that_breaks_the_device(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from benchmarks.gpu.record import FATAL, Recorder\n"
        "recorder = Recorder('breaks', Path(sys.argv[1]), 'cpu')\n"
        "recorder.run_all([('first', lambda: {'who': 'ours'}), ('second', lambda: os._exit(FATAL)),"
        " ('third', lambda: {'who': 'ours'})])"
    )
    part = Part("breaks", 60, (sys.executable, "-c", script, str(tmp_path / "results.jsonl")))
    code, results = run(tmp_path, part)
    assert (code, results) == (1, {"breaks": "failed: 1 operations left the CUDA context unusable"})
    events = [(line["operation"], line["event"]) for line in read(tmp_path / "results.jsonl")]
    assert events == [("first", "started"), ("first", "row"), ("first", "done"), ("second", "started"),
                      ("third", "started"), ("third", "row"), ("third", "done")]  # fmt: skip


def test_a_failed_smoke_check_skips_only_the_parts_that_need_it(tmp_path: Path) -> None:
    def smoke(failing: str) -> Part:
        lines = [
            json.dumps({"part": "smoke", "operation": failing, "event": event, "error": "e"})
            for event in ("started", "failed")
        ]
        write = "; ".join(
            f"""echo '{line[:-1]}, "attempt": "'"$MOE_COMM_GPU_ATTEMPT"'"}}' >> {tmp_path}/results.jsonl"""
            for line in lines
        )
        return shell("smoke", f"{write}; exit 1", "smoke")

    others = shell("dispatch", "exit 0", family="peer_to_peer"), shell("products", "exit 0", family="triton")
    assert run(tmp_path, smoke("triton, operators"), *others)[1] == {
        "smoke": "failed: exit code 1",
        "dispatch": "passed",
        "products": "skipped: the smoke check of triton failed",
    }
    results = run(tmp_path, smoke("probe"), *others, again=True)[1]
    assert results["dispatch"] == results["products"] == "skipped: the smoke check failed"


def test_nothing_runs_after_a_failed_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "BUILT", tmp_path / "built")
    build = shell("build", "exit 2", "build")
    code, results = run(tmp_path, build, shell("dispatch", "exit 0"))
    assert (code, results) == (1, {"build": "failed: exit code 2", "dispatch": "skipped: the build failed"})
    passing = shell("build", "exit 0", "build")
    assert run(tmp_path, passing)[1]["build"] == "passed"
    assert (tmp_path / "built").read_text() == "tree \n"


def test_passed_parts_are_not_repeated_with_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    part = shell("dispatch", f"echo ran >> {tmp_path}/ran.txt")
    for again, tree, count in ((False, "tree", 1), (False, "tree", 1), (True, "tree", 2), (False, "changed", 3)):
        monkeypatch.setattr(driver_module, "files_hash", lambda *_, tree=tree: tree)
        assert run(tmp_path, part, again=again)[0] == 0
        assert len((tmp_path / "ran.txt").read_text().splitlines()) == count
    assert "dispatch: has passed with these files" in capfd.readouterr().out


def test_parts_without_time_are_failures(tmp_path: Path) -> None:
    code, results = run(tmp_path, shell("dispatch", "exit 0"), deadline_s=5)
    assert (code, results) == (1, {"dispatch": "skipped: no time left; run the same command again"})


def test_a_test_run_in_which_no_test_passed_has_failed(tmp_path: Path) -> None:
    skipped = shell("skips", "echo 10 skipped in 1 s", "tests")
    passed = shell("passes", "echo 3 passed, 10 skipped in 1 s", "tests")
    assert run(tmp_path, skipped, passed)[1] == {"skips": "failed: no test passed", "passes": "passed"}


def test_a_line_that_was_cut_off_is_left_out_and_the_next_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append(path, '{"part": "dispatch"}')
    path.write_text(path.read_text() + '{"part": "disp')
    assert read(path) == [{"part": "dispatch"}]
    append(path, '{"part": "few"}')
    append(path, '{"part": "host"}')
    assert read(path) == [{"part": "dispatch"}, {"part": "few"}, {"part": "host"}]
    assert len(path.read_text().splitlines()) == 4


def test_options_that_match_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, reason in (
        (("--emulated", "--only", "nonsense"), "no part begins with 'nonsense'"),
        (("--fast",), "unrecognized arguments: --fast"),
        (("speed",), "invalid choice: 'speed'"),
    ):
        with pytest.raises(SystemExit) as raised:
            main([*arguments, "--out", str(tmp_path)])
        assert raised.value.code == 2
        assert reason in capsys.readouterr().err


def test_commands_exist_and_operations_end_before_their_parts(tmp_path: Path) -> None:
    for emulated in (False, True):
        found = parts(tmp_path / "results.jsonl", (9, 0), emulated)
        assert len({part.name for part in found}) == len(found) > 8
        for part in found:
            for path in re.findall(r"(?:tests|benchmarks)/[\w/.]+|setup\.py", " ".join(part.command)):
                assert (ROOT / path).exists(), path
            for module in re.findall(r"-m (benchmarks[\w.]+)", " ".join(part.command)):
                assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
            if "--limit" in part.command:
                assert float(part.command[part.command.index("--limit") + 1]) < part.limit_s
            if "--timeout" in part.command:
                assert float(part.command[part.command.index("--timeout") + 1]) < part.limit_s
    build = parts(tmp_path / "results.jsonl", (10, 0))[0]
    assert build.env["MOE_COMM_CUDA_ARCHS"] == "100a-real"
    assert parts(tmp_path / "results.jsonl", (8, 6))[0].env["MOE_COMM_CUDA_ARCHS"] == "86-real"


def test_the_longest_kernels_of_the_results_are_profiled(tmp_path: Path) -> None:
    kernels = {"void moe_comm::push<2>(Args)": 90.0, "sum(Args)": 80.0, "meet(Args)": 20.0, "count(Args)": 5.0}
    line = {"part": "dispatch", "operation": "o", "event": "row", "who": "peer_to_peer", "kernels": kernels}
    append(tmp_path / "results.jsonl", json.dumps(line))
    names = [part.name for part in profile_parts(tmp_path)]
    assert names == ["sanitize-memcheck", "sanitize-racecheck", "ncu-push", "ncu-sum", "ncu-meet"]
    assert short_name("triton_kernel_3d") == "triton_kernel_3d"


def test_presets_select_parts_that_exist_and_fit_into_their_time(tmp_path: Path) -> None:
    found = parts(tmp_path / "results.jsonl", (9, 0))
    for preset, prefixes in PRESETS.items():
        names = [part.name for part in selected(found, ",".join(prefixes))]
        assert names[:2] == ["build", "smoke"] and len(names) > 3, preset
    in_presets = {part.name for prefixes in PRESETS.values() for part in selected(found, ",".join(prefixes))}
    assert {part.name for part in found} - in_presets == {"nccl"}


def test_a_part_that_others_are_compared_with_runs_in_every_call(tmp_path: Path) -> None:
    part = Part("ceilings", 30, ("bash", "-c", f"echo ran >> {tmp_path}/ran.txt"), always=True)
    for count in (1, 2):
        assert run(tmp_path, part)[0] == 0
        assert len((tmp_path / "ran.txt").read_text().splitlines()) == count


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a source tree with a lazily loaded package, a native core, and tests."""
    files = {
        "moe_comm/__init__.py": "def later():\n    import moe_comm.unrelated",
        "moe_comm/__init__.pyi": "from moe_comm.layer import Layer as Layer\nfrom moe_comm.other import Other as Other",
        "moe_comm/layer.py": "def f():\n    from moe_comm.kernel import run\n    load('moe_comm.named')",
        "moe_comm/kernel.py": "from typing import TYPE_CHECKING\nfrom moe_comm import _C\n"
        "if TYPE_CHECKING:\n    from moe_comm.typed import T",
        **{f"moe_comm/{name}.py": "" for name in ("named", "other", "typed", "unrelated")},
        "moe_comm/_C.pyi": "",
        "csrc/a.cu": "",
        "setup.py": "",
        "benchmarks/__init__.py": "",
        "benchmarks/layers.py": "from moe_comm import Layer",
        "benchmarks/all.py": "import moe_comm",
        "tests/conftest.py": "",
        "tests/a/test_a.py": "from benchmarks import layers",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_files_of_a_part_are_those_that_it_imports(tree: Path) -> None:
    def names(*command: str) -> set[str]:
        return {str(file.relative_to(tree)) for file in files_of(command, tree)}

    native = {"csrc/a.cu", "setup.py", "moe_comm/_C.pyi"}
    layers = {f"moe_comm/{name}.py" for name in ("__init__", "layer", "kernel", "named")} | native
    layers |= {"benchmarks/__init__.py", "benchmarks/layers.py"}
    assert names("python", "-m", "benchmarks.layers", "--limit", "3") == layers
    assert names("python", "-m", "benchmarks.all") - layers == {"benchmarks/all.py", "moe_comm/other.py"}
    assert names("python", "-m", "pytest", "tests/a") == layers | {"tests/conftest.py", "tests/a/test_a.py"}


def test_the_hash_of_a_part_follows_its_files_and_arguments(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    part = Part("layer", 30, ("python", "-m", "benchmarks.gpu.ceilings", "--results", str(tree / "results.jsonl")))
    same = replace(part, command=(*part.command[:-1], str(tree / "x" / "results.jsonl")))
    other = replace(part, command=(*part.command, "--device", "cpu"))
    values = [files_hash(part, tree / "results.jsonl"), files_hash(same, tree / "x" / "results.jsonl"),
              files_hash(other, tree / "results.jsonl")]  # fmt: skip
    assert values[0] == values[1] != values[2]
    files = files_of(("-m", "benchmarks.layers"), tree)
    before = hash_of(files, root=tree)
    (tree / "moe_comm/unrelated.py").write_text("changed")
    assert hash_of(files_of(("-m", "benchmarks.layers"), tree), root=tree) == before
    (tree / "moe_comm/kernel.py").write_text("from moe_comm import _C")
    assert hash_of(files_of(("-m", "benchmarks.layers"), tree), root=tree) != before


def test_compiled_kernels_move_to_another_tree(tree: Path, tmp_path: Path) -> None:
    for name in ("moe_comm/_C.so", "moe_comm/_C.built", "build/triton-cache/key/kernel.cubin"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    cache = tmp_path / "out" / "cache.tar.gz"
    store(cache, tree)
    other = tmp_path / "other"
    restore(cache, other)
    restore(tmp_path / "absent", other)
    found = sorted(str(path.relative_to(other)) for path in other.rglob("*") if path.is_file())
    assert found == ["build/triton-cache/key/kernel.cubin", "moe_comm/_C.built", "moe_comm/_C.so"]
