"""Hooks of mkdocs: render the tutorials (Jupyter notebooks) as pages, and the Python API with whole docstrings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files


def source(cell: dict[str, Any]) -> str:
    """The text of a cell."""
    text = cell["source"]
    return text if isinstance(text, str) else "".join(text)


def output(found: dict[str, Any]) -> str:
    """One output of a cell as Markdown: an image, else text."""
    data = found.get("data", {})
    if "image/png" in data:
        return f"![output](data:image/png;base64,{''.join(data['image/png'].split())})"
    text = found.get("text") or data.get("text/plain") or ""
    text = re.sub(
        r"\x1b\[[0-9;]*m", "", text if isinstance(text, str) else "".join(text)
    ).rstrip()
    return f"```text\n{text}\n```" if text else ""


def markdown(path: Path) -> str:
    """A notebook as Markdown."""
    cells = json.loads(path.read_text())["cells"]
    parts = []
    for cell in cells:
        if cell["cell_type"] == "markdown":
            parts.append(source(cell))
        else:
            parts.append(f"```python\n{source(cell)}\n```")
            parts += filter(None, map(output, cell.get("outputs", [])))
    return "\n\n".join(parts) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Replace each notebook by a page."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            files.remove(file)
            path = Path(config["docs_dir"]) / file.src_uri
            name = file.src_uri.removesuffix(".ipynb") + ".md"
            files.append(File.generated(config, name, content=markdown(path)))
    return files


def on_page_markdown(text: str, **_: Any) -> str:
    """Point links to notebooks at their pages, and drop the mark of code that tests/test_docs.py only compiles.

    An entry of the Python API becomes that of mkdocstrings, which has the whole docstring.
    """
    text = re.sub(
        r"<!-- api: ([\w.]+) -->.*?<!-- /api -->",
        r"::: \1",
        text,
        flags=re.DOTALL,
    )
    text = text.replace("```python no-run\n", "```python\n")
    return re.sub(r"\]\(([\w/.]*)\.ipynb\)", r"](\1.md)", text)
