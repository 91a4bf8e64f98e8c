"""Stamp the results of ``benchmarks/gpu.sh`` with when, what and how, and print them as a Markdown table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def layer_rows(found: dict[str, Any]) -> list[str]:
    """One row for each contestant of ``moe-comm bench layer``."""
    settings = found["settings"]
    shape = f"D {settings['hidden']}, F {settings['ffn']}, E {settings['experts']}, K {settings['top_k']}"
    rows = []
    for name, row in found["contestants"].items():
        times = f"{row['forward_ms']:.2f} | {row['backward_ms']:.2f} | {row['total_ms']:.2f}"
        speedup = f"{row['speedup']:.2f}x" if "speedup" in row else ""
        memory = f"{row['peak_memory_mib']:.0f}" if "peak_memory_mib" in row else ""
        gemm = f"{row['gflops'] / 1e3:.1f} | {row['gemm_fraction']:.0%}"
        where = f"{shape}, {settings['tokens']} tokens, {settings['dtype']}"
        rows.append(f"| {where} | {name} | {times} | {gemm} | {memory} | {speedup} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for name in ("date", "commit", "command"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args()
    rows: list[str] = []
    for path in sorted(given.folder.glob("*.json")):
        found = json.loads(path.read_text())
        found["run"] = {"date": given.date, "commit": given.commit, "command": given.command}
        path.write_text(json.dumps(found, indent=2) + "\n")
        if found.get("benchmark") == "layer":
            rows += layer_rows(found)
    if rows:
        print("\n| layer, forward and backward, one rank | who | forward ms | backward ms | total ms ", end="")
        print("| TFLOP/s | of GEMM rate | peak MiB | ours is faster |")
        print("|---|---|---|---|---|---|---|---|---|")
        print("\n".join(rows))


if __name__ == "__main__":
    main()
