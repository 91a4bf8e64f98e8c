"""Griffe extension: entries ``name: text`` in a docstring become a section that mkdocstrings renders as a table."""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(r"^(\w+(?:, \w+)*): ")
SECTION = re.compile(
    r"^(Args|Arguments|Attributes|Raises|Returns|Yields|Examples?|Note)s?:$"
)


def sectioned(text: str, names: set[str], title: str) -> str:
    """``text`` with a section for each paragraph that begins with an entry for one of ``names``."""
    paragraphs = re.split(r"\n\s*\n", text)
    for at, paragraph in enumerate(paragraphs):
        found = ENTRY.match(paragraph)
        if (
            found
            and not SECTION.match(paragraph.split("\n")[0])
            and set(found[1].split(", ")) <= names
        ):
            lines = []
            for line in paragraph.split("\n"):
                entry = ENTRY.match(line)
                if entry and set(entry[1].split(", ")) <= names:
                    lines += [
                        f"    {name}: {line[entry.end() :]}"
                        for name in entry[1].split(", ")
                    ]
                else:
                    lines.append(f"    {line}")
            paragraphs[at] = f"{title}:\n" + "\n".join(lines)
    return "\n\n".join(paragraphs)


class Fields(griffe.Extension):
    """Rewrites docstrings after they are loaded."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.docstring:
            cls.docstring.value = sectioned(
                cls.docstring.value, set(cls.members), "Attributes"
            )

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring:
            names = {parameter.name for parameter in func.parameters}
            func.docstring.value = sectioned(
                func.docstring.value, names, "Args"
            )
