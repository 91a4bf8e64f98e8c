"""Write the table of Triton kernel resources in docs/gpus.md.

python -m benchmarks.triton_resources --json benchmarks/results/triton-resources.json
python -m benchmarks.triton_table
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.fill_block import fill_block

ROOT = Path(__file__).parents[1]
RESOURCES = ROOT / "benchmarks" / "results" / "triton-resources.json"
PAGE = ROOT / "docs" / "gpus.md"


def block() -> str:
    """Return the table of registers, shared memory and spills, one row per kernel."""
    result = json.loads(RESOURCES.read_text())
    targets = list(dict.fromkeys(row["target"] for row in result["results"]))
    kernels = list(dict.fromkeys(row["kernel"] for row in result["results"]))
    rows = {(row["kernel"], row["target"]): row for row in result["results"]}
    lines = ["| kernel | threads | " + " | ".join(targets) + " |", "|---|---:|" + "---:|" * len(targets)]
    for kernel in kernels:
        cells = []
        for target in targets:
            if (kernel, target) not in rows:
                cells.append("")
                continue
            row = rows[kernel, target]
            stack = f", {row['stack_bytes']} B spilled" if row["stack_bytes"] else ""
            cells.append(f"{row['registers']}, {row['shared_bytes'] / 1024:.0f} KiB{stack}")
        threads = next(row["threads"] for (name, _), row in rows.items() if name == kernel)
        lines.append(f"| {kernel} | {threads} | " + " | ".join(cells) + " |")
    lines += ["", f"Registers per thread and shared memory per program; Triton {result['triton']}."]
    return "\n".join(lines)


if __name__ == "__main__":
    fill_block(PAGE, "triton", block())
