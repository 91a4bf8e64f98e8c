"""The source files that a part of ``benchmarks/gpu.sh`` runs, and a hash of them.

A part that has passed is repeated only if one of its files has changed. Its files are what its command names, what
these files import, and so on, as read from their syntax; the machine may lack git and tools that draw import graphs. A
module that an argument of a call or a list names in a string counts as imported.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("moe_comm", "moe_plan", "tests", "benchmarks")
NATIVE_SOURCES = ("csrc", "setup.py", "CMakeLists.txt")
"""Sources of the native core, ``moe_comm._C``."""
SUFFIXES = {".py", ".sh", ".txt", ".h", ".cpp", ".cu", ".cuh", ".inc"}
MODULE = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)*")


def hash_of(paths: Iterable[Path], *, root: Path = ROOT, more: str = "") -> str:
    """Return a hash of names and contents of files, and of ``more``."""
    digest = hashlib.sha256(more.encode())
    for path in sorted(set(paths)):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def native_files(root: Path = ROOT) -> list[Path]:
    """Return the source files of the native core."""
    found = [path for name in NATIVE_SOURCES for path in [root / name, *(root / name).rglob("*")]]
    return [path for path in found if path.suffix in SUFFIXES and path.is_file()]


def files_of(command: Sequence[str], root: Path = ROOT) -> set[Path]:
    """Return the files of the tree that ``command`` names or imports; for a folder of tests, those of its tests."""
    waiting = [file for argument in command for file in _named(argument, root)]
    found: set[Path] = set()
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += _imports(file, root)
    if any(file.name.startswith("_C.") for file in found):
        found.update(native_files(root))
    return found


def _named(argument: str, root: Path) -> list[Path]:
    """Return the files that an argument of a command names as a module or a path."""
    if MODULE.fullmatch(argument):
        return [*_module_files(argument, root), *_module_files(f"{argument}.__main__", root)]
    path = root / argument.partition("::")[0]
    if argument.startswith("-") or not argument.startswith(tuple(f"{name}/" for name in PACKAGES)):
        return []
    files = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
    conftests = [parent / "conftest.py" for file in files for parent in file.parents if parent.is_relative_to(root)]
    return files + [file for file in conftests if file.is_file()]


@cache
def _imports(file: Path, root: Path) -> frozenset[Path]:
    """Return the files of the tree that a file imports, except for type checkers.

    Imports inside functions count, except in ``__init__.py``: all modules of a package load it, for any purpose.
    """
    if file.suffix != ".py":
        return frozenset()
    names = _names(ast.parse(file.read_bytes()), functions=file.name != "__init__.py")
    return frozenset(found for name in names for found in _module_files(name, root))


def _names(node: ast.AST, *, functions: bool) -> Iterator[str]:
    """Yield dotted names of what a module imports: modules, or names in modules."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.FunctionDef) and not functions:
        return
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name
            yield f"{alias.name}.*"  # its attributes are not followed
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call | ast.List):
        for value in node.args if isinstance(node, ast.Call) else node.elts:
            if isinstance(value, ast.Constant) and isinstance(value.value, str) and MODULE.fullmatch(value.value):
                yield value.value
    for child in ast.iter_child_nodes(node):
        yield from _names(child, functions=functions)


@cache
def _module_files(name: str, root: Path) -> frozenset[Path]:
    """Return the files that an import of ``name`` runs: packages, then a module or the module that defines the name.

    Public names of packages load on first use: the stub beside ``__init__.py`` names their modules.
    """
    parts = name.split(".")
    if parts[0] not in PACKAGES:
        return frozenset()
    found: set[Path] = set()
    folder = root
    for at, part in enumerate(parts):
        stub = folder / "__init__.pyi"
        modules = _stub(stub) if at and stub.is_file() else {}
        if part == "*":
            found.update(file for module in set(modules.values()) for file in _module_files(module, root))
        elif part in modules:
            found |= _module_files(modules[part], root)
        for file in (folder / f"{part}.py", folder / f"{part}.pyi", folder / part / "__init__.py"):
            if file.is_file():
                found.add(file)
        folder /= part
    return frozenset(found)


@cache
def _stub(file: Path) -> dict[str, str]:
    """Return the module of each public name of a stub."""
    return {
        alias.name: node.module
        for node in ast.parse(file.read_bytes()).body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
