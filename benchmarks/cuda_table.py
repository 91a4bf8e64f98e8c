"""Write the table of CUDA kernel resources in docs/gpus.md.

python -m benchmarks.cuda_resources --csrc csrc --json benchmarks/results/cuda-resources.json
python -m benchmarks.cuda_table
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.fill_block import fill_block

ROOT = Path(__file__).parents[1]
RESOURCES = ROOT / "benchmarks" / "results" / "cuda-resources.json"
PAGE = ROOT / "docs" / "gpus.md"


def block() -> str:
    """Return the table of registers, shared memory and spills, one row per kernel."""
    result = json.loads(RESOURCES.read_text())
    targets = list(dict.fromkeys(row["target"] for row in result["results"]))
    rows = {(row["kernel"], row["target"]): row for row in result["results"]}
    lines = ["| kernel | " + " | ".join(targets) + " |", "|---|" + "---:|" * len(targets)]
    for kernel in dict.fromkeys(row["kernel"] for row in result["results"]):
        cells = []
        for target in targets:
            row = rows.get((kernel, target))
            if row is None:
                cells.append("")
                continue
            shared = f", {row['shared_bytes']} B" if row["shared_bytes"] else ""
            stack = f", {row['stack_bytes']} B of stack" if row["stack_bytes"] else ""
            spilled = f", {row['spill_bytes']} B spilled" if row["spill_bytes"] else ""
            cells.append(f"{row['registers']}{shared}{stack}{spilled}")
        lines.append(f"| `{kernel}` | " + " | ".join(cells) + " |")
    spills = "" if any(row["spill_bytes"] for row in result["results"]) else " No kernel spills."
    lines += [
        "",
        f"Registers per thread and static shared memory per block; nvcc {result['nvcc']}.{spills}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    fill_block(PAGE, "cuda", block())
