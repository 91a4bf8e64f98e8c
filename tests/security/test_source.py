"""The package never executes content of files. The tests inspect every call in the source."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "moe_comm"
PLANNER = ROOT / "moe_plan"
PAGE = (ROOT / "docs/reliability.md").read_text()

UNPICKLING = {
    *(
        f"{module}.{name}"
        for module in ("pickle", "_pickle", "cPickle", "dill", "cloudpickle")
        for name in ("load", "loads")
    ),
    *("pickle.Unpickler", "pickle._Unpickler", "marshal.load", "marshal.loads", "shelve.open", "joblib.load"),
    *("torch.load", "torch.jit.load", "torch.hub.load", "numpy.load", "np.load", "yaml.load", "pandas.read_pickle"),
    *("pd.read_pickle", "multiprocessing.connection.Listener", "multiprocessing.managers.BaseManager"),
}
CODE = {
    *("eval", "exec", "compile", "__import__", "importlib.import_module", "import_module", "runpy.run_path"),
    *("runpy.run_module", "builtins.eval", "builtins.exec", "pydoc.locate", "hydra.utils.instantiate", "instantiate"),
    *("importlib.util.spec_from_file_location", "util.spec_from_file_location", "os.system", "os.popen"),
    *("subprocess.getoutput", "tempfile.mktemp", "http.server.HTTPServer", "HTTPServer"),
}
OBJECTS = re.compile(r"(gather|broadcast|scatter|send|recv)_object(_list)?$")
"""Torch's collectives that pickle."""

ALLOWED: dict[str, dict[str, str]] = {
    "moe_comm/lazy.py": {"importlib.import_module": "names of our own modules, from a table in a package's file"},
    "moe_comm/cli/options.py": {"importlib.import_module": "names of our own modules, written in the commands"},
    "moe_comm/runtime/versions.py": {"import_module": "Megatron-Core's version, written in the file"},
    "moe_comm/bench/layer/peers.py": {"import_module": "packages to compare with, written in the file"},
    "moe_comm/bench/train/peers.py": {"import_module": "packages to compare with, written in the file"},
    "moe_comm/bench/dispatch/mpi_ranks.py": {"import_module": "mpi4py, written in the file"},
    "moe_comm/bench/hosts/ranks.py": {
        "pickle.loads": "jobs and answers of ranks in network namespaces, through handles they inherit",
        "importlib.import_module": "the module of the function that the parent gave in such a job",
    },
    "moe_comm/train/checkpoint/exchange.py": {
        "dist.all_gather_object": "objects of ranks of one job; torch's own checkpoint planner does the same"
    },
}
"""Allowed calls by file, with the reason. Benchmarks may also gather objects from each other: see below."""


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` for a dotted name, or "" for another expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else f"?.{node.attr}"
    return ""


def is_true(call: ast.Call, name: str) -> bool:
    return any(k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is True for k in call.keywords)


def dangerous(source: str) -> Counter[str]:
    """Count, by name, the calls and imports that could run data as code."""
    calls: Counter[str] = Counter()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            # A call of a name that is imported this way has no dotted name to recognize.
            calls.update(name for name in names & (UNPICKLING | (CODE - {"importlib.import_module"})))
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        last = name.rpartition(".")[2]
        if name in ("torch.load", "_load") and is_true(node, "weights_only"):
            continue
        if name in ("numpy.load", "np.load") and not is_true(node, "allow_pickle"):
            continue
        if name in UNPICKLING | CODE or OBJECTS.search(last) or is_true(node, "shell"):
            calls[name] += 1
    return calls


def found_in_package() -> dict[str, set[str]]:
    by_file = {}
    for path in sorted((*PACKAGE.rglob("*.py"), *PLANNER.rglob("*.py"))):
        if names := set(dangerous(path.read_text())):
            by_file[str(path.relative_to(ROOT))] = names
    return by_file


def test_calls_that_could_run_data_as_code_are_listed_with_a_reason() -> None:
    names_by_file = {}
    for file, names in found_in_package().items():
        if file.startswith("moe_comm/bench/"):
            # Benchmarks gather times from their own ranks only, and read no untrusted file that way.
            names = {name for name in names if name != "dist.all_gather_object"}
        if names:
            names_by_file[file] = names
    assert names_by_file == {file: set(names) for file, names in ALLOWED.items()}


def test_all_allowed_files_are_in_the_documentation() -> None:
    for file in ALLOWED:
        assert f"`{file.removeprefix('moe_comm/')}`" in PAGE, file


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(x)",
        "from pickle import loads",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
        "eval(text)",
        "importlib.import_module(config['class'])",
        "dist.broadcast_object_list([x])",
        "group.scatter_object(x)",
        "subprocess.run(line, shell=True)",
    ],
)
def test_dangerous_calls_are_found(source: str) -> None:
    assert dangerous(source)


def test_safe_calls_are_not_reported() -> None:
    assert not dangerous("torch.load(f, weights_only=True)\nnp.load(f)\nre.compile(x)\njson.loads(x)\nsafe_open(f)")
