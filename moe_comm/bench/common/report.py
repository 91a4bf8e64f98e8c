"""Results for people (tables) and for programs (one JSON object)."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 120
"""Of tables in files and pipes."""


def check_writable(out: str | None) -> None:
    """Before a measurement of minutes: raise the ``OSError`` that ``write_json`` would end it with."""
    if out is None or out == "-":
        return
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), out)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), out)


def write_json(found: dict[str, Any], out: str | None) -> None:
    """Write one JSON object to the file ``out``; ``-`` is standard output, None is nowhere."""
    if out is None:
        return
    text = json.dumps(found, indent=2) + "\n"
    if out == "-":
        sys.stdout.write(text)
        return
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def show(tables: list[Table], json_out: str | None = None) -> None:
    """Print tables; to standard error where standard output carries JSON."""
    console = Console(stderr=json_out == "-")
    if not console.is_terminal:
        console.width = WIDTH
    for table in tables:
        console.print(table)


def _table(title: str, *columns: str, caption: str | None = None) -> Table:
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _number(value: float | None, digits: int = 3, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}g}{unit}" if value < 1000 else f"{value:,.0f}{unit}"


def _against(ratio: float) -> str:
    """``ratio`` of a time to the one it is compared with, so that no reader has to know which is above the line."""
    if abs(ratio - 1) < 0.005:
        return "as fast"
    return f"{ratio:.3g}x slower" if ratio > 1 else f"{1 / ratio:.3g}x faster"


def _heading(found: dict[str, Any], tokens: bool = True) -> str:
    s = found["settings"]
    per_rank = f"{s['tokens']} tokens a rank, " if tokens else ""
    ffn = f", F {s['ffn']}" if "ffn" in s else ""
    return (
        f"{s['ranks']} ranks, {per_rank}D {s['hidden']}{ffn}, E {s['experts']}, K {s['top_k']}, "
        f"{s['dtype']}; {_machine(found)}"
    )


def _machine(found: dict[str, Any]) -> str:
    m = found["machine"]
    return f"{m.get('gpu', m['cpu'])}, {m['cores']} cores, {m['isa']}"


def _skipped(found: dict[str, Any]) -> str | None:
    return "\n".join(f"{name}: {reason}" for name, reason in found["skipped"].items()) or None


def dispatch_tables(found: dict[str, Any]) -> list[Table]:
    """Ours, the limit and the peers: milliseconds forward, and how each compares with ours."""
    table = _table(_heading(found), "", "dispatch ms", "combine ms", "than moe_comm", caption=_skipped(found))
    table.add_row(f"moe_comm {found['backend']}", _number(found["dispatch_ms"]), _number(found["combine_ms"]), "")
    if found["dispatch_backward_ms"] is not None:
        table.add_row("  backward", _number(found["dispatch_backward_ms"]), _number(found["combine_backward_ms"]), "")
    if found["limit_ratio"] is not None:
        ratio = _against(1 / found["limit_ratio"])
        table.add_row("bare copies", _number(found["dispatch_limit_ms"]), _number(found["combine_limit_ms"]), ratio)
        above = found["overhead_us"]
        table.add_row("  ours above them", *(_number(above[p], unit=" µs") for p in ("dispatch", "combine")), "")
    for name, peer in found["peers"].items():
        table.add_row(name, _number(peer["dispatch_ms"]), _number(peer["combine_ms"]), _against(peer["speedup"]))
    return [table]


def layer_tables(found: dict[str, Any]) -> list[Table]:
    """Forward and backward of every contestant, its GFLOP/s, share of the GEMM rate, and memory."""
    columns = ("ms", "EP", "forward", "backward", "total", "GFLOP/s", "of GEMM", "MiB", "than moe_comm")
    gemm = f"torch.mm alone, all ranks at once: {found['gemm_gflops']:.0f} GFLOP/s a rank"
    caption = "\n".join(filter(None, (gemm, _skipped(found))))
    table = _table(_heading(found), *columns, caption=caption)
    for name, one in found["contestants"].items():
        speedup = one.get("speedup")
        table.add_row(
            name,
            str(one["ep"]),
            *(_number(one[f"{phase}_ms"]) for phase in ("forward", "backward", "total")),
            _number(one["gflops"]),
            f"{one['gemm_fraction']:.0%}",
            _number(one.get("peak_memory_mib")),
            "" if speedup is None else _against(speedup),
        )
    return [table]


def train_tables(found: dict[str, Any]) -> list[Table]:
    """Tokens a second of every contestant, how it compares with ours, and where our step's time goes."""
    s, m = found["settings"], found["machine"]
    heading = (
        f"{s['ranks']} ranks, {s['batch']} x {s['seq_len']} tokens a rank, {s['layers']} layers, D {s['hidden']}, "
        f"F {s['ffn']}, E {s['experts']}, K {s['top_k']}, {s['dtype']}; {m['cpu']}, {m['cores']} cores, {m['isa']}"
    )
    parts = ("compute", "communication", "data", "checkpoint", "loop")
    split = "our step: " + ", ".join(f"{part} {found['step'][part]:.1%}" for part in parts)
    gemm = f"torch.mm alone, all ranks at once: {found['gemm_gflops']:.0f} GFLOP/s in all"
    caption = "\n".join(filter(None, (split, gemm, _skipped(found))))
    table = _table(heading, "", "tokens/s", "step ms", "MFU", "than moe_comm", "loss differs by", caption=caption)
    for name, one in {"moe_comm": found | {"speedup": None}, **found["peers"]}.items():
        compared = "" if one["speedup"] is None else _against(one["speedup"])
        differs = f"{one['loss_rel_diff']:.0e}" if "loss_rel_diff" in one else ""
        table.add_row(
            name, _number(one["tokens_per_s"]), _number(one["step_ms"]), f"{one['mfu']:.0%}", compared, differs
        )
    return [table]


def overlap_tables(found: dict[str, Any]) -> list[Table]:
    """Times of each operator alone and together, and what it hides."""
    s = found["settings"]
    links = ", ".join(f"{rate:.2f}" for rate in found["link_gbit_measured"])
    heading = (
        f"{s['hosts']} hosts x {s['ranks_per_host']} rank(s), links of {s['link_gbit']:g} Gbit/s (measured {links}), "
        f"at most {s['chunks']} chunks; {_machine(found)}"
    )
    worst, caption = found["slowest_case"], HIDDEN
    if worst is not None:
        where = f"{worst['op']}, {worst['direction']}, {worst['rows']} rows"
        least = f"{_against(found['slowest_vs_serial'])} than serial ({where}, ratio {worst['ratio']:g})"
        caption = f"overlapped gains least where it is {least}\n{HIDDEN}"
    columns = ("ratio", "rows", "compute ms", "comm", "(wire)", "serial", "overlapped", "than serial", "hidden")
    table = _table(heading, "", *columns, caption=caption)
    for row in found["results"]:
        times = [_number(row[f"{name}_ms"]) for name in ("compute", "comm", "wire", "serial", "overlapped")]
        asked = (f"{row['op']}, {row['direction']}", f"{row['ratio']:g}", str(row["rows"]))
        table.add_row(*asked, *times, _against(row["vs_serial"]), f"{row['hidden']:.2f}")
    return [table] * bool(found["results"]) + [_overlap_layers(found)] * bool(found["layer"])


def _overlap_layers(found: dict[str, Any]) -> Table:
    """Whole MoE layers with overlap, without, and Hugging Face's."""
    s = found["settings"]
    experts = f"{s['experts']} experts" if s["experts"] else "8 experts a rank"
    heading = f"MoE layer: {s['tokens']} tokens a rank, D {s['hidden']}, {experts}, K {s['top_k']}"
    reasons = {row["skipped"] for row in found["layer"]} - {None}
    caption = "\n".join([HIDDEN, *(f"Hugging Face's expert parallelism: {reason}" for reason in reasons)])
    columns = ("F", "", "compute ms", "comm", "serial", "overlapped", "hf ep", "than serial", "than hf ep", "hidden")
    table = _table(heading, *columns, caption=caption)
    for row in found["layer"]:
        for phase in ("forward", "backward", "total"):
            keys = [f"{n}_ms" if phase == "total" else f"{n}_{phase}_ms" for n in _LAYER_PARTS]
            times = [row.get(key) for key in keys]
            serial, overlapped, hf = times[2:]
            gains = ["-" if other is None else _against(overlapped / other) for other in (serial, hf)]
            hidden = f"{row['hidden']:.2f}" if phase == "total" else ""
            shown = [_number(time) for time in times] + gains
            table.add_row(str(row["ffn"]), phase, *shown, hidden)
    return table


HIDDEN = "hidden: share of the shorter of compute and comm that overlapping saves; 1 is all of it, below 0 is a loss"
_LAYER_PARTS = ("compute", "comm", "serial", "overlapped", "hf_ep")


def hierarchical_tables(found: dict[str, Any]) -> list[Table]:
    """Times and bytes between hosts of each way to move rows."""
    s = found["settings"]
    links = ", ".join(f"{rate:.2f}" for rate in found["link_gbit_measured"])
    heading = (
        f"{s['hosts']} hosts x {s['ranks_per_host']} ranks, links of {s['link_gbit']:g} Gbit/s (measured {links}), "
        f"{s['tokens']} tokens a rank, D {s['hidden']}, E {s['experts']}, K {s['top_k']}, float32; {_machine(found)}"
    )
    columns = ("forward ms", "backward ms", "total ms", "than all_to_all", "rows MB", "on the links MB")
    table = _table(heading, "", *columns, caption="MB: sent between hosts by all ranks, forward and backward")
    for row in found["results"]:
        times = [_number(row[f"{phase}_ms"]) for phase in ("forward", "backward", "total")]
        sizes = ("" if row[key] is None else f"{row[key] / 1e6:.1f}" for key in ("counted_bytes", "link_bytes"))
        table.add_row(row["contestant"], *times, _against(1 / row["speedup"]), *sizes)
    return [table]


def small_tables(results: list[dict[str, Any]]) -> list[Table]:
    """Microseconds of small batches: ours, the bare copy, and the overhead above it."""
    columns = ("tokens", "dispatch µs", "bare", "overhead", "combine µs", "bare", "overhead")
    in_a_row = results[0]["settings"]["in_a_row"]
    how = f"{in_a_row} calls in a row, each" if in_a_row > 1 else "one call after a barrier"
    table = _table(f"{_heading(results[0], tokens=False)}; {how}", *columns, caption=_skipped(results[0]))
    for found in results:
        cells = []
        for phase in ("dispatch", "combine"):
            for key in (f"{phase}_ms", f"{phase}_limit_ms"):
                cells.append(_number(None if found[key] is None else found[key] * 1e3))
            cells.append(_number(found["overhead_us"][phase] if found["overhead_us"] else None))
        table.add_row(str(found["settings"]["tokens"]), *cells)
    return [table]


def _error(found: dict[str, float]) -> str:
    return f"{found['median']:.0%} (median), {found['worst']:.0%} (worst)"


def tune_tables(found: dict[str, Any]) -> list[Table]:
    """What was best for each operator and number of rows, and what the cost model says of it."""
    s, error = found["settings"], found["prediction_error"]
    one_host = s["hosts"] == 1
    where = f"{s['ranks_per_host']} ranks" if one_host else f"{s['hosts']} hosts x {s['ranks_per_host']} rank(s)"
    link = "" if one_host else f", links of {s['link_gbit']:g} Gbit/s"
    few = "".join(f"\none chunk is best up to {rows} rows: {name}" for name, rows in found["fallback_rows"].items())
    each = "".join(f"\n    {name}: {_error(one)}" for name, one in found["errors_by_operator"].items() if one)
    caption = (
        f"error of the cost model over all that was tried: {_error(error)}{each}{few}\nstored in {found['stored']}"
    )
    heading = f"{where}{link}, {s['sent']} x {s['other']}, {s['dtype']}; {_machine(found)}"
    columns = ("rows", "1 chunk ms", "best ms", "choice", "predicted ms", "error", "model's choice ms")
    table = _table(heading, "", *columns, caption=caption)
    for row in found["results"]:
        times = [_number(row[key]) for key in ("serial_ms", "best_ms")]
        modelled = row["error"] is not None
        predicted = (_number(row["predicted_ms"]), f"{row['error']:.0%}") if modelled else ("-", "-")
        told = (row["choice"], *predicted, _number(row["model_ms"]))
        table.add_row(f"{row['op']}, {row['direction']}", str(row["rows"]), *times, *told)
    return [table]
