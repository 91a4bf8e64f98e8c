"""The public Python API as text, one line for each name, method and parameter list.

python -m tests.support.api            # print
python -m tests.support.api --write    # update tests/api_snapshot.txt
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

PACKAGES = (
    "moe_comm",
    "moe_comm.dispatch",
    "moe_comm.integrations.deepep",
    "moe_comm.integrations.hugging_face",
    "moe_comm.layers",
    "moe_comm.layers.data_parallel",
    "moe_comm.runtime.launch",
    "moe_comm.topology",
    "moe_comm.train",
    "moe_comm.train.data",
    "moe_comm.train.optim",
)
SNAPSHOT = Path(__file__).parent.parent / "api_snapshot.txt"


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield each public name with its object once, under the first package that exports it."""
    yielded: set[int] = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if id(value) not in yielded or not callable(value):
                yielded.add(id(value))
                yield f"{package}.{name}", value


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield public methods and properties that classes of this library define for ``cls``."""
    names = {name for base in cls.__mro__ if base.__module__.startswith("moe_comm") for name in vars(base)}
    for name in sorted(names):
        if not name.startswith("_"):
            yield name, inspect.getattr_static(cls, name)


def lines() -> list[str]:
    """Return the sorted lines of the API."""
    return sorted(_lines())


def _lines() -> Iterator[str]:
    for path, value in public_objects():
        if inspect.isclass(value):
            yield f"class {path}{_signature(value)}"
            for name, member in methods(value):
                function = getattr(member, "__func__", member)
                if isinstance(member, property | cached_property):
                    yield f"property {path}.{name}"
                elif inspect.isfunction(function):
                    yield f"method {path}.{name}{_signature(function)}"
        elif callable(value):
            yield f"function {path}{_signature(value)}"
        else:
            yield f"value {path}"


def _signature(function: Any) -> str:
    try:
        text = str(inspect.signature(function))
    except (TypeError, ValueError):
        return "(...)"
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def main() -> None:
    """Print or write the API."""
    text = "\n".join(lines()) + "\n"
    if "--write" in sys.argv[1:]:
        SNAPSHOT.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
