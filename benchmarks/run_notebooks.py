"""Execute notebooks and save copies with their outputs. If a cell raises, the exit code is 1.

python -m benchmarks.run_notebooks docs/tutorials build/tutorials
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

CELL_TIMEOUT_S = 240


def main() -> None:
    """Execute every notebook of a folder, each in its own working directory below the output folder."""
    folder, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for path in sorted(folder.glob("*.ipynb")):
        start = time.monotonic()
        work = out / path.stem
        work.mkdir(parents=True, exist_ok=True)
        notebook = nbformat.read(path, as_version=4)
        resources = {"metadata": {"path": str(work)}}
        NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources=resources).execute()
        nbformat.write(notebook, out / path.name)
        print(f"{path.name}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
