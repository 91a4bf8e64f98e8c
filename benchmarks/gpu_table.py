"""Stamp the results of ``benchmarks/gpu.sh`` with when, what and how, and print them as a Markdown table."""

from __future__ import annotations

import argparse
import importlib.util
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


def move_rows(found: dict[str, Any]) -> list[str]:
    """One row for each number of tokens and contestant of ``gpu_bench.py dispatch``, ``few`` and ``virtual``."""
    rows = []
    for row in found["results"]:
        cells = [
            "| |"
            if f"{op}_ms" not in row
            else f"{row[f'{op}_ms'] * 1e3:.0f} | {row[f'{op}_gb_s']:.0f} | {row[f'{op}_gb_s'] / row['copy_gb_s']:.0%}"
            for op in ("dispatch", "combine")
        ]
        cells += [f"{row['both_ms'] * 1e3:.0f}", f"{row['max_error']:.1e}"]
        rows.append(f"| {row['tokens']} | {row['who']} | {' | '.join(cells)} |")
    return rows


def move_table(found: dict[str, Any]) -> list[str]:
    """The table of one such file, with what it was measured against."""
    settings, limits = found["settings"], found["limits"]
    shape = f"D {settings['hidden']}, E {settings['experts']}, K {settings['top_k']}, {settings['dtype']}"
    return [
        f"\n{found['benchmark']}: {shape}; one rank; a copy moves {limits['copy_gb_s']:.0f} GB/s and a matrix product "
        f"runs at {limits['gemm_tflop_s']:.0f} TFLOP/s here\n",
        "| tokens | who | dispatch us | GB/s | of copy | combine us | GB/s | of copy | both us | largest error |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        *move_rows(found),
    ]


def host_table(found: dict[str, Any]) -> list[str]:
    """The table of ``gpu_bench.py host``."""
    rows = [
        f"| {row['tokens']} | {row['who']} | {row['host_us']:.0f} | {row['total_us']:.0f} |" for row in found["results"]
    ]
    return ["\n| tokens | what | host us | until it is done us |", "|---:|---|---:|---:|", *rows]


def roofline(files: list[dict[str, Any]], path: Path) -> bool:
    """Draw what was reached against the copy's and the matrix product's rate; False without matplotlib or numbers.

    A point's place is its FLOPs a byte: moving rows has about none (one multiplication and addition an element in
    combine), layers have those of their experts' products over the weights, read once.
    """
    moves = [
        found for found in files if found.get("benchmark", "").startswith("gpu-") and "bytes" in found["results"][0]
    ]
    if not moves or importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    limits = moves[0]["limits"]
    bandwidth, peak = limits["copy_gb_s"] * 1e9, limits["gemm_tflop_s"] * 1e12
    figure, axes = pyplot.subplots(figsize=(8, 5))
    across = [2.0**power for power in range(-4, 15)]
    axes.loglog(
        across, [min(peak, bandwidth * x) / 1e12 for x in across], color="black", label="copy and matrix product"
    )
    for found in moves:
        for row in [row for row in found["results"] if "combine_ms" in row]:
            flops = 2.0 * row["bytes"] / 2
            reached = flops / (row["combine_ms"] * 1e-3) / 1e12
            mark = "o" if row["who"].startswith("peer_to_peer") else "x"
            axes.plot(flops / row["bytes"], reached, mark, label=f"combine, {row['who']}, {row['tokens']} tokens")
    for found in files:
        if found.get("benchmark") == "layer":
            settings = found["settings"]
            weights = 3 * 2 * settings["experts"] * settings["hidden"] * settings["ffn"]
            flops = 18.0 * settings["tokens"] * settings["top_k"] * settings["hidden"] * settings["ffn"]
            for name, row in found["contestants"].items():
                where = f"{name}, D {settings['hidden']}, E {settings['experts']}"
                axes.plot(flops / (3 * weights), row["gflops"] / 1e3, "^", label=where)
    axes.set_xlabel("FLOPs a byte")
    axes.set_ylabel("TFLOP/s")
    axes.legend(fontsize=5)
    figure.tight_layout()
    figure.savefig(path)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for name in ("date", "commit", "command"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args()
    rows: list[str] = []
    tables: list[str] = []
    files: list[dict[str, Any]] = []
    for path in sorted(given.folder.glob("*.json")):
        found = json.loads(path.read_text())
        found.setdefault("run", {"date": given.date, "commit": given.commit, "command": given.command})
        files.append(found)
        path.write_text(json.dumps(found, indent=2) + "\n")
        if found.get("benchmark") == "layer":
            rows += layer_rows(found)
        elif found.get("benchmark") in ("gpu-dispatch", "gpu-few", "gpu-virtual"):
            tables += move_table(found)
        elif found.get("benchmark") == "gpu-host":
            tables += host_table(found)
    if rows:
        print("\n| layer, forward and backward, one rank | who | forward ms | backward ms | total ms ", end="")
        print("| TFLOP/s | of GEMM rate | peak MiB | ours is faster |")
        print("|---|---|---|---|---|---|---|---|---|")
        print("\n".join(rows))
    print("\n".join(tables))
    if roofline(files, given.folder / "roofline.svg"):
        print("\n![what was reached of what the machine can do](roofline.svg)")


if __name__ == "__main__":
    main()
