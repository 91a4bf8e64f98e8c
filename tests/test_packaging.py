"""Packaging: a native core without torch, a standalone wheel, pinned dependencies, and the checks of CI."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from benchmarks import emulated
from benchmarks.wheels import MACHINES, faults_of

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHILD = {"capture_output": True, "text": True, "timeout": 280, "check": False}


def native() -> Path:
    """Return the file of the built module."""
    core = pytest.importorskip("moe_comm._C", reason="the native core is not built")
    return Path(core.__file__)


def test_native_core_neither_loads_torch_nor_needs_a_gpu_driver() -> None:
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('moe_comm._C', sys.argv[1])\n"
        "core = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(core)\n"
        "assert core.isa() in core.isas() and 'torch' not in sys.modules\n"
        "print(open('/proc/self/maps').read())\n"
    )
    process = subprocess.run([sys.executable, "-I", "-c", code, str(native())], **CHILD)
    assert process.returncode == 0, process.stderr
    assert not re.search(r"libtorch|libc10|libcudart|libcuda\.", process.stdout)


def test_cuda_probe_reports_devices_or_an_error() -> None:
    from moe_comm import _C

    probe_json = _C.cuda_probe()
    if probe_json is None:
        pytest.skip("built without CUDA")
    probe = json.loads(probe_json)
    assert probe["runtime_version"] >= 12000
    assert "sm_90a" in probe["archs"]
    assert isinstance(probe["devices"], list)
    assert bool(probe["devices"]) or probe["error"]


def test_the_stub_has_the_members_of_the_native_core() -> None:
    native()
    import ast

    from moe_comm import _C

    def members(owner: object) -> set[str]:
        return {name for name in vars(owner) if not name.startswith("_")}

    tree = ast.parse((ROOT / "moe_comm" / "_C.pyi").read_text())
    stub_nodes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    values = {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    assert stub_nodes.keys() | values == members(_C)
    for name, node in stub_nodes.items():
        if isinstance(node, ast.ClassDef) and not issubclass(getattr(_C, name), Exception):
            stub_members = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            stub_members |= {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}  # type: ignore[union-attr]
            assert {item for item in stub_members if not item.startswith("_")} == members(getattr(_C, name)), name


def requirement_names(requirements: list[str]) -> set[str]:
    names = {re.split(r"[<>=!~;\[ ]", line, maxsplit=1)[0] for line in requirements}
    return {name.lower().replace("_", "-") for name in names} - {"moe-comm"}


def test_constraints_pin_every_dependency_once() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9A-Za-z.]+", line) for line in lines), lines
    pins = [line.split("==")[0].lower().replace("_", "-") for line in lines]
    assert len(pins) == len(set(pins))
    extras = PROJECT["optional-dependencies"]
    needed = requirement_names(PROJECT["dependencies"])
    for extra in ("hf", "train", "bench", "dev"):
        needed |= requirement_names(extras[extra])
    assert needed <= set(pins), needed - set(pins)
    assert "torch==2.13.0" in lines


def test_torch_is_no_build_requirement() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert requirement_names(build) == {"setuptools", "pybind11", "cmake", "ninja"}


SUITE = (
    '<?xml version="1.0"?><testsuites name="pytest tests"><testsuite name="pytest" errors="0" failures="{failures}" '
)
SUITE += 'skipped="{skipped}" tests="{tests}" time="1.0"></testsuite></testsuites>'


@pytest.mark.parametrize(
    ("lint", "test", "counts", "code", "message"),
    [
        (0, 0, (5, 0, 1), 0, ""),
        (0, 2, (5, 1, 0), 2, ""),
        (0, 2, (0, 0, 0), 2, "no test ran"),
        (0, 0, (3, 0, 3), 5, "no test ran"),
        (0, 0, None, 5, "no test ran"),
        (1, 0, (5, 0, 0), 1, "make lint, hosts-install or docs failed"),
    ],
    ids=["passed", "one failed", "none collected", "all skipped", "no report", "lint failed"],
)
def test_ci_distinguishes_passed_from_no_test_ran(
    lint: int, test: int, counts: tuple[int, int, int] | None, code: int, message: str, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "bin").mkdir()
    report = "" if counts is None else SUITE.format(tests=counts[0], failures=counts[1], skipped=counts[2])
    make = tmp_path / "bin" / "make"
    make.write_text(
        f'#!/bin/sh\ncase " $* " in *" lint "*) exit {lint} ;; esac\n[ "$1" = test ] || exit 0\n'
        f"mkdir -p build\nprintf '%s' '{report}' > build/test-report.xml\n"
        f"exit {test}\n"
    )
    make.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    process = subprocess.run(["bash", str(tmp_path / ".ci" / "run")], env=env, **CHILD)
    assert process.returncode == code, process.stderr
    assert message in process.stderr
    assert bool(message) or not process.stderr


@pytest.mark.parametrize(
    ("failures", "again", "code", "unstable"),
    [(1, (0, 0), 0, 1), (3, (0, 0), 0, 3), (4, (0, 0), 2, 0), (1, (2, 0), 2, 0), (1, (0, 2), 2, 0)],
    ids=["one", "three", "four", "fails first", "fails second"],
)
def test_ci_passes_with_tests_that_pass_twice_when_run_again(
    failures: int, again: tuple[int, int], code: int, unstable: int, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "bin").mkdir()
    names = [f"tests/test_a.py::test_b[{number} x]" for number in range(failures)]
    (tmp_path / "failed.json").write_text(json.dumps(dict.fromkeys(names, True), indent=2))
    (tmp_path / "report.xml").write_text(SUITE.format(tests=9, failures=failures, skipped=0))
    # The second make of the suite must find the list that the first one emptied.
    make = tmp_path / "bin" / "make"
    make.write_text(
        '#!/bin/sh\n[ "$1" = test ] || exit 0\n'
        "list=.pytest_cache/v/cache/lastfailed\n"
        'case " $* " in *" TEST_ARGS=--last-failed"*)\n'
        f'  cmp failed.json "$list" || exit 3\n  echo {{}} > "$list"\n'
        f"  echo >> runs; [ $(wc -l < runs) = 1 ] && exit {again[0]}; exit {again[1]} ;;\nesac\n"
        'mkdir -p build .pytest_cache/v/cache; cp report.xml build/test-report.xml; cp failed.json "$list"; exit 2\n'
    )
    make.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    process = subprocess.run(["bash", str(tmp_path / ".ci" / "run")], env=env, **CHILD)
    assert process.returncode == code, process.stderr
    assert process.stdout.splitlines() == [f"ci: unstable: {name}" for name in names[:unstable]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel of the checkout, with the native core of the last build."""
    native()
    folder = tmp_path_factory.mktemp("wheel")
    made = folder / "made"
    build = [sys.executable, "setup.py", "--quiet", "egg_info", f"--egg-base={folder}", "build", f"--build-base={made}"]
    build += ["bdist_wheel", f"--bdist-dir={made / 'wheel'}", f"--dist-dir={folder}"]
    process = subprocess.run(build, cwd=ROOT, **CHILD)
    assert process.returncode == 0, process.stderr
    (path,) = folder.glob("moe_comm-*.whl")
    return path


@pytest.fixture
def isolated_wheel(tmp_path: Path) -> Path:
    """Return a wheel that pip built in isolation from a copy of the sources."""
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("csrc", "moe_comm", "moe_plan"):
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "CMakeLists.txt", "MANIFEST.in", "README.md", "constraints.txt"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(source)]
    process = subprocess.run(build, env=clean_environment() | {"MOE_COMM_CUDA": "off"}, **CHILD)
    assert process.returncode == 0, process.stderr
    (path,) = tmp_path.glob("moe_comm-*.whl")
    return path


def clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}


@pytest.mark.slow
def test_a_wheel_built_in_isolation_works_where_only_it_is_installed(isolated_wheel: Path, tmp_path: Path) -> None:
    assert faults_of(isolated_wheel) == []
    names = zipfile.ZipFile(isolated_wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"moe_comm", "moe_plan"}
    site = tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(site),
        str(isolated_wheel),
    ]
    process = subprocess.run(install, env=clean_environment(), **CHILD)
    assert process.returncode == 0, process.stderr
    code = (
        "import moe_comm, moe_comm._C as core; "
        "print(moe_comm.__file__, core.cuda_probe(), core.isa(), 'cuda/kernels.cu' in core.cuda_sources())"
    )
    env = clean_environment() | {"PYTHONPATH": str(site)}
    process = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, **CHILD)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith(str(site))
    assert " None " in process.stdout
    assert process.stdout.endswith(" True\n"), "a wheel without CUDA must contain the device code for NVRTC"


def faults(wheel: Path) -> list[str]:
    """Return the faults of a wheel, which may have the CUDA runtime of nvcc."""
    return [fault for fault in faults_of(wheel) if not fault.endswith("links libcuda")]


def test_a_wheel_has_every_file_the_device_code_and_the_metadata(wheel: Path) -> None:
    assert faults(wheel) == []


@pytest.mark.parametrize(
    ("pattern", "old", "new", "fault"),
    [
        (r"moe_comm/py\.typed", None, None, "no moe_comm/py.typed"),
        (r"moe_plan/pages/page\.html", None, None, "no moe_plan/pages/page.html"),
        (r"moe_comm/_C\.pyi", None, None, "no moe_comm/_C.pyi"),
        (r"moe_comm/train/presets/tiny\.toml", None, None, "no moe_comm/train/presets/tiny.toml"),
        (r"moe_comm/_C\..*\.so", None, None, "0 native cores instead of 1"),
        (r"moe_comm/_C\..*\.so", b"#include", b"#exclude", "no text of cuda/kernels.cu"),
        (r"moe_comm/_C\..*\.so", b"libc.so.6", b"libc10.so", "links libc10"),
        (r".*/METADATA", b"Provides-Extra: hf\n", b"", "no extra hf in METADATA"),
        (r".*/METADATA", b"Requires-Dist: torch", b"Requires-Dist: jax", "no requirement torch in METADATA"),
        (r".*/METADATA", b"Requires-Dist: rich>=13\n", b"", "no requirement rich in METADATA"),  # of extras too
        (r".*/entry_points\.txt", b"moe-comm", b"other", "no command moe-comm"),
        (r".*/top_level\.txt", b"moe_comm", b"moe_comm", ""),
    ],
)
def test_what_a_wheel_lacks_is_reported(
    pattern: str, old: bytes | None, new: bytes | None, fault: str, wheel: Path, tmp_path: Path
) -> None:
    """Remove a file of a wheel, or replace bytes in it."""
    damaged = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(damaged, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if re.fullmatch(pattern, name):
                if old is None or new is None:
                    continue
                assert old in content
                content = content.replace(old, new)
            target.writestr(name, content)
    found = faults(damaged)
    assert any(fault in line for line in found) if fault else found == []


def test_a_native_core_for_another_machine_than_the_tag_is_reported(wheel: Path, tmp_path: Path) -> None:
    (machine,) = (name for name in MACHINES if wheel.name.endswith(f"_{name}.whl"))
    (other,) = MACHINES.keys() - {machine}
    renamed = tmp_path / wheel.name.replace(machine, other)
    shutil.copy(wheel, renamed)
    (fault,) = faults(renamed)
    assert re.fullmatch(rf"moe_comm/_C\..*-{machine}-.*\.so is not for {other}", fault)

    # The name of the native core alone does not make it one for the other machine.
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(renamed, "w") as target:
        for name in source.namelist():
            target.writestr(name.replace(f"-{machine}-", f"-{other}-"), source.read(name))
    (fault,) = faults(renamed)
    assert fault.endswith(f"is not for {other}")


def test_what_emulation_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert emulated.lacking("s390x") == "s390x is not emulated"
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "qemu-aarch64" else f"/usr/bin/{name}")
    assert emulated.lacking("aarch64") == "qemu-aarch64 is missing (Debian: qemu-user)"
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert emulated.lacking("aarch64") == ""


def test_an_emulated_python_is_the_executable_of_the_processes_that_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Commands in place of apt-get, dpkg and the emulator; the emulated Python is that of this test."""
    commands = tmp_path / "commands"
    commands.mkdir()
    log, package = tmp_path / "log", tmp_path / "guest" / "apt" / "archives" / "a.deb"
    scripts = {
        "apt-get": f'echo "$@" >> {log}; case "$*" in *download-only*) touch {package};; esac',
        "dpkg": f'mkdir -p "$3/usr/bin"; ln -s {sys.executable} "$3/usr/bin/python3"',
        # qemu-aarch64 -cpu CPU -L ROOT -0 NAME PROGRAM ARGUMENT...
        "qemu-aarch64": 'test "$1 $3 $5" = "-cpu -L -0" && exec -a "$6" "$7" "${@:8}"',
    }
    for name, script in scripts.items():
        (commands / name).write_text(f"#!/bin/bash\n{script}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    guest = emulated.make("aarch64", tmp_path / "guest")
    assert guest.version == ".".join(map(str, sys.version_info[:2]))
    assert all(
        "APT::Architecture=arm64" in line and "Dir::State::status=/dev/null" in line
        for line in log.read_text().splitlines()
    )
    inner = "import sys; print(sys.executable)"
    code = f"import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', {inner!r}], text=True))"
    assert subprocess.run([guest.python, "-c", code], **CHILD).stdout.strip() == str(guest.python)
    cores = (tmp_path / "guest" / "root" / "proc" / "cpuinfo").read_text()
    assert re.findall(r"^processor\t: (\d+)$", cores, re.MULTILINE) == [
        str(number) for number in range(os.cpu_count() or 1)
    ]

    (commands / "apt-get").write_text("#!/bin/bash\necho no network >&2; exit 100\n")
    with pytest.raises(OSError, match=r"exit status 100\nno network"):
        emulated.make("aarch64", tmp_path / "guest")
