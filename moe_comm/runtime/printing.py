"""Printing of text from files: names and messages in them cannot control the terminal.

Control characters in a text move the cursor, set the title of a window, write the clipboard or hide lines; format
characters reverse the order of what is shown. They are printed as escape sequences, such as ``\\x1b``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Return ``text`` with escape sequences for control and format characters other than tab and newline."""
    return _UNSAFE.sub(_escape, text)


def printable_line(text: str) -> str:
    """Return ``printable(text)`` as one line, with escape sequences for newlines and tabs too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def make_console(**settings: Any) -> Console:
    """Return a console of rich that prints strings, also in tables, as ``printable`` returns them.

    A string with invalid markup, such as "[/x]", is printed without markup. ``settings``: those of ``rich.Console``.
    """
    from rich.console import Console  # rich is in the extras of the commands, and takes long to import
    from rich.errors import MarkupError

    class PrintableConsole(Console):
        def render_str(self, text: str, **options: Any) -> Any:
            text = printable(text)
            try:
                return super().render_str(text, **options)
            except MarkupError:
                return super().render_str(text, **options | {"markup": False})

    return PrintableConsole(emoji=False, **settings)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
