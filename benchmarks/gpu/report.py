"""Write the README.md of a result folder: the machine, the result of each part, and tables of the measurements."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import read

Row = dict[str, Any]


def latest(lines: Sequence[Row], part: str) -> list[Row]:
    """Return the rows and failures of the last attempt of a part."""
    of_part = [line for line in lines if line.get("part") == part]
    attempt = of_part[-1].get("attempt") if of_part else None
    return [line for line in of_part if line.get("attempt") == attempt]


def report(out: Path, trees: Mapping[str, str], command: str) -> str:
    """Return the Markdown text.

    Args:
        trees: the hash of the source files of each part, in the order of the tables.
    """
    lines = read(out / "results.jsonl")
    outcomes = json.loads((out / "parts.json").read_text())
    probe: Row = next(
        (line for line in latest(lines, "smoke") if line["operation"] == "probe" and "machine" in line), {}
    )
    machine = probe.get("machine", {})
    text = [f"# {machine.get('gpu', machine.get('cpu', 'unknown device'))}", ""]
    text += [f"- command: `{command}`", f"- commit: {_commit()}"]
    if probe:
        text += [f"- date: {machine['time']}", f"- packages: {_values(probe['packages'])}, Python {machine['python']}"]
        keys = ("capability", "multiprocessors", "memory_gib", "cuda", "nccl", "compiled_for")
        text += [f"- device: {_values({key: probe[key] for key in keys if key in probe})}, driver {_driver()}"]
    text += ["", "| part | result | seconds |", "|---|---|---:|"]
    for name, tree in trees.items():
        known = outcomes.get(name)
        if known is None:
            text.append(f"| {name} | not run | |")
            continue
        older = "" if known["tree"] == tree else f", with other files ({known['tree']}), {known['date']}"
        text.append(f"| {name} | {known['result']}{older} | {known['seconds']} |")
    by_part = {name: latest(lines, name) for name in trees}
    failures = [line for found in by_part.values() for line in found if line["event"] == "failed"]
    failures += [
        {**line, "error": f"CUDA graph: {line['graph_error']}"}
        for found in by_part.values()
        for line in found
        if "graph_error" in line
    ]
    if failures:
        text += ["", "Failed operations:", ""]
        text += [f"- {line['operation']}: {line['error'].splitlines()[0][:300]}" for line in failures]
    for name, found in by_part.items():
        rows = [line for line in found if line["event"] == "row" and "who" in line]
        if rows:
            text += ["", f"## {name}", "", *table(rows)]
    return "\n".join(text) + "\n"


COLUMNS = {
    "shape": ("shape", "{}"),
    "tokens": ("tokens", "{}"),
    "who": ("contestant", "{}"),
    "what": ("operation", "{}"),
    "device_us": ("device, us", "{:.1f}"),
    "kernels_us": ("kernels, us", "{:.1f}"),
    "graph_us": ("graph, us", "{:.1f}"),
    "host_us": ("host, us", "{:.1f}"),
    "serial_us": ("serial, us", "{:.1f}"),
    "gemms_us": ("GEMMs alone, us", "{:.1f}"),
    "hidden": ("hidden", "{:.2f}"),
    "launches": ("launches", "{:.0f}"),
    "calls": ("calls", "{:.1f}"),
    "package_calls": ("calls of the package", "{:.0f}"),
    "gb_s": ("GB/s", "{:.0f}"),
    "of_copy": ("of copy", "{:.0%}"),
    "tflop_s": ("TFLOP/s", "{:.1f}"),
    "peak_mib": ("peak MiB", "{:.0f}"),
    "max_error": ("largest error", "{:.1e}"),
    "skipped": ("skipped", "{}"),
}
"""Heading and format of the columns. A table has the columns that have a value in any of its rows."""


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows as a Markdown table."""
    shown = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    lines = ["| " + " | ".join(COLUMNS[key][0] for key in shown) + " |", "|" + "---|" * len(shown)]
    for row in rows:
        cells = ["" if row.get(key) is None else COLUMNS[key][1].format(row[key]) for key in shown]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def longest_kernels(lines: Sequence[Row], count: int = 3) -> list[str]:
    """Return the names of the kernels of ``peer_to_peer`` that take the longest in the part ``dispatch``."""
    times: dict[str, float] = {}
    for row in latest(lines, "dispatch"):
        if str(row.get("who", "")).startswith("peer_to_peer"):
            for name, us in (row.get("kernels") or {}).items():
                times[name] = max(times.get(name, 0.0), us)
    return sorted(times, key=lambda name: -times[name])[:count]


def _values(values: Row) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _output(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent, timeout=20
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@cache
def _commit() -> str:
    commit = _output("git", "rev-parse", "HEAD")
    if not commit:
        return "unknown"
    return commit + (" (with changes)" if _output("git", "status", "--porcelain", "--untracked-files=no") else "")


@cache
def _driver() -> str:
    shown = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return shown.splitlines()[0] if shown else "unknown"
