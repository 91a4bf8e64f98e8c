"""Add date, commit and command to the results of ``benchmarks/gpu.sh``, and print them as Markdown tables."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any


def layer_rows(result: dict[str, Any]) -> list[str]:
    """Return one row for each contestant of ``moe-comm bench layer``."""
    settings = result["settings"]
    shape = f"D {settings['hidden']}, F {settings['ffn']}, E {settings['experts']}, K {settings['top_k']}"
    rows = []
    for name, row in result["contestants"].items():
        times = f"{row['forward_ms']:.2f} | {row['backward_ms']:.2f} | {row['total_ms']:.2f}"
        speedup = f"{row['speedup']:.2f}x" if "speedup" in row else ""
        memory = f"{row['peak_memory_mib']:.0f}" if "peak_memory_mib" in row else ""
        gemm = f"{row['gflops'] / 1e3:.1f} | {row['gemm_fraction']:.0%}"
        where = f"{shape}, {settings['tokens']} tokens, {settings['dtype']}"
        rows.append(f"| {where} | {name} | {times} | {gemm} | {memory} | {speedup} |")
    return rows


def move_rows(result: dict[str, Any]) -> list[str]:
    """Return the rows of a result of ``gpu_bench.py dispatch``, ``few`` or ``virtual``."""
    rows = []
    for row in result["results"]:
        cells = [
            "| |"
            if f"{op}_ms" not in row
            else f"{row[f'{op}_ms'] * 1e3:.0f} | {row[f'{op}_gb_s']:.0f} | {row[f'{op}_gb_s'] / row['copy_gb_s']:.0%}"
            for op in ("dispatch", "combine")
        ]
        cells += [f"{row['both_ms'] * 1e3:.0f}", f"{row['max_error']:.1e}"]
        rows.append(f"| {row['tokens']} | {row['who']} | {' | '.join(cells)} |")
    return rows


def move_table(result: dict[str, Any]) -> list[str]:
    """Return the table of a result of ``gpu_bench.py dispatch``, ``few`` or ``virtual``, with the limits."""
    settings, limits = result["settings"], result["limits"]
    shape = f"D {settings['hidden']}, E {settings['experts']}, K {settings['top_k']}, {settings['dtype']}"
    return [
        f"\n{result['benchmark']}: {shape}; one rank; copy rate {limits['copy_gb_s']:.0f} GB/s, GEMM rate "
        f"{limits['gemm_tflop_s']:.0f} TFLOP/s\n",
        "| tokens | who | dispatch us | GB/s | of copy | combine us | GB/s | of copy | both us | largest error |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        *move_rows(result),
    ]


def host_table(result: dict[str, Any]) -> list[str]:
    """Return the table of ``gpu_bench.py host``."""
    rows = [
        f"| {row['tokens']} | {row['who']} | {row['host_us']:.0f} | {row['total_us']:.0f} |"
        for row in result["results"]
    ]
    return ["\n| tokens | what | host us | until completion us |", "|---:|---|---:|---:|", *rows]


def roofline(files: list[dict[str, Any]], path: Path) -> bool:
    """Draw the results in a roofline of copy and GEMM rate. Return False without matplotlib or results.

    The x coordinate is FLOPs per byte. Combine has one multiplication and addition per element. For layers, it is the
    FLOPs of the expert GEMMs over the bytes of the weights.
    """
    moves = [
        result for result in files if result.get("benchmark", "").startswith("gpu-") and "bytes" in result["results"][0]
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
    axes.loglog(across, [min(peak, bandwidth * x) / 1e12 for x in across], color="black", label="copy and GEMM rate")
    for result in moves:
        for row in [row for row in result["results"] if "combine_ms" in row]:
            flops = 2.0 * row["bytes"] / 2
            reached = flops / (row["combine_ms"] * 1e-3) / 1e12
            mark = "o" if row["who"].startswith("peer_to_peer") else "x"
            axes.plot(flops / row["bytes"], reached, mark, label=f"combine, {row['who']}, {row['tokens']} tokens")
    for result in files:
        if result.get("benchmark") == "layer":
            settings = result["settings"]
            weights = 3 * 2 * settings["experts"] * settings["hidden"] * settings["ffn"]
            flops = 18.0 * settings["tokens"] * settings["top_k"] * settings["hidden"] * settings["ffn"]
            for name, row in result["contestants"].items():
                where = f"{name}, D {settings['hidden']}, E {settings['experts']}"
                axes.plot(flops / (3 * weights), row["gflops"] / 1e3, "^", label=where)
    axes.set_xlabel("FLOPs per byte")
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
    args = parser.parse_args()
    rows: list[str] = []
    tables: list[str] = []
    files: list[dict[str, Any]] = []
    for path in sorted(args.folder.glob("*.json")):
        result = json.loads(path.read_text())
        result.setdefault("run", {"date": args.date, "commit": args.commit, "command": args.command})
        files.append(result)
        path.write_text(json.dumps(result, indent=2) + "\n")
        if result.get("benchmark") == "layer":
            rows += layer_rows(result)
        elif result.get("benchmark") in ("gpu-dispatch", "gpu-few", "gpu-virtual"):
            tables += move_table(result)
        elif result.get("benchmark") == "gpu-host":
            tables += host_table(result)
    if rows:
        print("\n| layer, forward and backward, one rank | who | forward ms | backward ms | total ms ", end="")
        print("| TFLOP/s | of GEMM rate | peak MiB | speedup of moe_comm |")
        print("|---|---|---|---|---|---|---|---|---|")
        print("\n".join(rows))
    print("\n".join(tables))
    if roofline(files, args.folder / "roofline.svg"):
        print("\n![roofline of the results](roofline.svg)")


if __name__ == "__main__":
    main()
