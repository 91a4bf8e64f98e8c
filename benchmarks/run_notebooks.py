"""Execute notebooks. Store the outputs in those whose code has changed. If a cell raises, the exit code is 1.

python -m benchmarks.run_notebooks docs/tutorials build/tutorials            # the cells write files in the second
python -m benchmarks.run_notebooks docs/tutorials build/tutorials --store    # store all outputs
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

CELL_TIMEOUT_S = 240
KEY = "executed"
"""Metadata of a notebook: SHA-256 of the code that its stored outputs belong to."""


def code_hash(cells: list[dict[str, Any]]) -> str:
    """Return the hash of the code cells of a notebook."""
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def tidied(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return outputs as a terminal shows them in the end: one text per print, without colours and without stderr."""
    merged: list[dict[str, Any]] = []
    for output in outputs:
        if output["output_type"] != "stream":
            merged.append(output)
        elif output["name"] == "stdout":
            if merged and merged[-1]["output_type"] == "stream":
                merged[-1]["text"] += output["text"]
            else:
                merged.append(output)
    for output in merged:
        if output["output_type"] == "stream":
            text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output["text"]).replace("\r\n", "\n")
            output["text"] = re.sub(r"[^\n]*\r", "", text)  # a progress bar writes its line again
    return merged


def main() -> None:
    """Execute every notebook of a folder, each in its own working directory below the second folder."""
    import nbformat
    from nbclient import NotebookClient

    folder, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for path in sorted(folder.glob("*.ipynb")):
        start = time.monotonic()
        work = out / path.stem
        work.mkdir(parents=True, exist_ok=True)
        notebook = nbformat.read(path, as_version=4)
        resources = {"metadata": {"path": str(work)}}
        NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources=resources, record_timing=False).execute()
        code, stored = code_hash(notebook.cells), notebook.metadata.get(KEY)
        if code != stored or "--store" in sys.argv[3:]:
            notebook.metadata[KEY] = code
            for cell in notebook.cells:
                if cell.cell_type == "code":
                    cell.outputs = tidied(cell.outputs)
            notebook.metadata.language_info = {"name": "python"}  # not the version of this Python
            nbformat.write(notebook, path)
        print(f"{path.name}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
