"""Write the table of docs/gpu.md from what the compiled kernels take, so that no number is typed by hand.

python -m benchmarks.cuda_resources --csrc csrc --json benchmarks/results/cuda-resources.json
python -m benchmarks.cuda_table
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.marked import fill

ROOT = Path(__file__).parents[1]
RESOURCES = ROOT / "benchmarks" / "results" / "cuda-resources.json"
PAGE = ROOT / "docs" / "gpu.md"


def block() -> str:
    """Registers, shared memory and spills of every kernel, one row each."""
    found = json.loads(RESOURCES.read_text())
    targets = list(dict.fromkeys(row["target"] for row in found["results"]))
    rows = {(row["kernel"], row["target"]): row for row in found["results"]}
    lines = ["| kernel | " + " | ".join(targets) + " |", "|---|" + "---:|" * len(targets)]
    for kernel in dict.fromkeys(row["kernel"] for row in found["results"]):
        cells = []
        for target in targets:
            row = rows[kernel, target]
            shared = f", {row['shared_bytes']} B" if row["shared_bytes"] else ""
            stack = f", {row['stack_bytes']} B of stack" if row["stack_bytes"] else ""
            spilled = f", {row['spill_bytes']} B spilled" if row["spill_bytes"] else ""
            cells.append(f"{row['registers']}{shared}{stack}{spilled}")
        lines.append(f"| `{kernel}` | " + " | ".join(cells) + " |")
    spills = "" if any(row["spill_bytes"] for row in found["results"]) else " None spills."
    lines.append("")
    lines.append(
        f"Registers a thread and static shared memory a block; nvcc {found['nvcc']}, compiled, not run.{spills}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    fill(PAGE, "cuda", block())
