"""The parts of pages that scripts write, between marks, so that no number is typed by hand."""

from __future__ import annotations

import re
from pathlib import Path


def fill(page: Path, name: str, written: str) -> None:
    """Put ``written`` between the marks ``measured:name`` of ``page``; exits unless there is just one such block."""
    text, count = re.subn(
        rf"(<!-- measured:{name} -->\n).*?(<!-- /measured -->)",
        lambda found: f"{found[1]}{written}\n{found[2]}",
        page.read_text(),
        flags=re.DOTALL,
    )
    if count != 1:
        raise SystemExit(f"{page} has {count} blocks measured:{name}, not one")
    page.write_text(text)
