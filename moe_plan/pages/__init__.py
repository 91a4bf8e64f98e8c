"""The planner's HTML pages and traces: single files with data, script and style that need no network.

``moe_comm.observe.report`` renders them. Strings from runs and files are always escaped.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib import resources
from typing import Any

from moe_comm.observe.report.page import USE, document, embedded
from moe_comm.runtime.untrusted import printable_line


def make_page(script: str, title: str, heading: str, about: str, sections: Sequence[str], data: dict[str, Any]) -> str:
    """Return an HTML page.

    ``script`` is a file in this folder that draws ``data``. ``sections`` are HTML; all other arguments are text.
    """
    return document(
        _asset("page.html"),
        {"page": _asset(script)},
        title=html.escape(printable_line(title)),
        heading=html.escape(printable_line(heading)),
        about=html.escape(printable_line(f"{about} {USE}")),
        sections="\n".join(sections),
        data=embedded(data),
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
