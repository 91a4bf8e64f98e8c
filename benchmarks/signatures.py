"""Signatures and first paragraphs of public names, read from the source without importing it, as Markdown."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
WIDTH = 88
Function = ast.FunctionDef | ast.AsyncFunctionDef


def entry(path: str, names: list[str]) -> str:
    """Return the section of one class or function.

    docs/site_hooks.py replaces what is between the comments by the entry of mkdocstrings.

    Args:
        path: dotted name, with the module that defines it.
        names: the names that users import.
    """
    module, _, name = path.rpartition(".")
    node = next(one for one in _definitions(module) if one.name == name)
    code = "\n".join(_class(node) if isinstance(node, ast.ClassDef) else _function(node))
    code = code.replace("'", '"')  # ast.unparse does not keep the quotes of the source
    heading = ", ".join(f"`{one}`" for one in names)
    parts = [f"<!-- api: {path} -->", f"### {heading}", f"```python no-run\n{code}\n```", summary(node)]
    return "\n\n".join(filter(None, [*parts, "<!-- /api -->"]))


def summary(node: ast.ClassDef | Function) -> str:
    """Return the first paragraph of the docstring as Markdown."""
    text = " ".join(inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")[0].split())
    return "\n".join(textwrap.wrap(re.sub(r"``(.+?)``", r"`\1`", text), 120, break_long_words=False))


@cache
def _definitions(module: str) -> list[ast.ClassDef | Function]:
    file = ROOT.joinpath(*module.split("."))
    source = file.with_suffix(".py") if file.with_suffix(".py").is_file() else file / "__init__.py"
    body = ast.parse(source.read_text()).body
    return [node for node in body if isinstance(node, ast.ClassDef | Function)]


def _class(node: ast.ClassDef) -> list[str]:
    bases = [base for base in map(ast.unparse, node.bases) if not base.startswith("_")]
    head = f"class {node.name}({', '.join(bases)}):" if bases else f"class {node.name}:"
    members = [line for child in node.body for line in _member(child)]
    return [head, *(f"    {line}" for line in members)] if members else [f"{head} ..."]


def _member(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
        if ast.unparse(node.annotation).startswith("InitVar"):
            return
        value = "" if node.value is None else f" = {ast.unparse(node.value)}"
        yield f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}{value}"
    elif isinstance(node, Function) and (node.name == "__init__" or _is_public(node)):
        decorators = [ast.unparse(one) for one in node.decorator_list]
        if any(one.endswith("property") for one in decorators):
            yield f"{node.name}: {ast.unparse(node.returns) if node.returns else 'Any'}"
            return
        yield from (f"@{one}" for one in decorators if one in ("classmethod", "staticmethod"))
        yield from _function(node, 4)


def _is_public(node: Function) -> bool:
    return not node.name.startswith("_") and node.name != "forward" and ast.get_docstring(node) is not None


def _function(node: Function, indent: int = 0) -> list[str]:
    start = f"{'async ' * isinstance(node, ast.AsyncFunctionDef)}def {node.name}("
    returns = "): ..." if node.returns is None else f") -> {ast.unparse(node.returns)}: ..."
    parameters = list(_parameters(node.args))
    line = start + ", ".join(parameters) + returns
    if len(line) + indent <= WIDTH:
        return [line]
    return [start, *(f"    {parameter}," for parameter in parameters), returns]


def _parameters(given: ast.arguments) -> Iterator[str]:
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    for at, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
        yield _parameter(argument, default)
        if at + 1 == len(given.posonlyargs):
            yield "/"
    if given.vararg is not None:
        yield f"*{_parameter(given.vararg, None)}"
    elif given.kwonlyargs:
        yield "*"
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield _parameter(argument, default)
    if given.kwarg is not None:
        yield f"**{_parameter(given.kwarg, None)}"


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg if argument.annotation is None else f"{argument.arg}: {ast.unparse(argument.annotation)}"
    return text if default is None else f"{text} = {ast.unparse(default)}"
