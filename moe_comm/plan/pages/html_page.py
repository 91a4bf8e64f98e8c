"""What the planner's pages have in common: one file of HTML with data, script and style, and nothing from the network.

They are made as a run's report is (``moe_comm.observe.report``). What comes from a run or a file is text, never markup.
"""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from moe_comm.observe.report.page import USE, document, embedded


def make(script: str, title: str, heading: str, about: str, sections: Sequence[str], data: dict[str, Any]) -> str:
    """A page.

    Args:
        script: the file beside this one that draws ``data``. title, heading, about: any text. sections: HTML.

    Raises:
        MissingDependency: plotly is not installed.
    """
    return document(
        _asset("page.html"),
        {"page": _asset(script)},
        title=html.escape(title),
        heading=html.escape(heading),
        about=html.escape(f"{about} {USE}"),
        sections="\n".join(sections),
        data=embedded(data),
    )


def write(page: str, path: Path) -> None:
    """Write a page to ``path``; a file that is there is replaced at once.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".partial")
    fresh.write_text(page, encoding="utf-8")
    os.replace(fresh, path)


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
