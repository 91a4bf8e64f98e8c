"""Write the table of docs/triton.md from what the compiled kernels take, so that no number is typed by hand.

python -m moe_comm.overlap.triton.ahead --json benchmarks/results/triton-resources.json
python -m benchmarks.triton_table
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.marked import fill

ROOT = Path(__file__).parents[1]
RESOURCES = ROOT / "benchmarks" / "results" / "triton-resources.json"
PAGE = ROOT / "docs" / "triton.md"


def block() -> str:
    """Registers, shared memory and spills of every kernel, one row each."""
    found = json.loads(RESOURCES.read_text())
    targets = list(dict.fromkeys(row["target"] for row in found["results"]))
    kernels = list(dict.fromkeys(row["kernel"] for row in found["results"]))
    rows = {(row["kernel"], row["target"]): row for row in found["results"]}
    lines = ["| kernel | threads | " + " | ".join(targets) + " |", "|---|---:|" + "---:|" * len(targets)]
    for kernel in kernels:
        cells = []
        for target in targets:
            row = rows[kernel, target]
            stack = f", {row['stack_bytes']} B spilled" if row["stack_bytes"] else ""
            cells.append(f"{row['registers']}, {row['shared_bytes'] / 1024:.0f} KiB{stack}")
        lines.append(f"| {kernel} | {rows[kernel, targets[0]]['threads']} | " + " | ".join(cells) + " |")
    lines.append("")
    lines.append(f"Registers a thread and shared memory a program; Triton {found['triton']}, compiled, not run.")
    return "\n".join(lines)


if __name__ == "__main__":
    fill(PAGE, "triton", block())
