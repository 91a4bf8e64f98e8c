"""Replace generated blocks in documentation pages."""

from __future__ import annotations

import re
from pathlib import Path


def fill_block(page: Path, name: str, written: str) -> None:
    """Replace the block between the marks ``measured:name`` of ``page``. Exit unless there is exactly one block."""
    text, count = re.subn(
        rf"(<!-- measured:{name} -->\n).*?(<!-- /measured -->)",
        lambda match: f"{match[1]}{written}\n{match[2]}",
        page.read_text(),
        flags=re.DOTALL,
    )
    if count != 1:
        raise SystemExit(f"{page} has {count} blocks measured:{name}; expected 1")
    page.write_text(text)
