"""Output of benchmark results: tables and one JSON object."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from moe_comm.runtime.printing import make_console
from moe_comm.runtime.safe_files import check_replaceable, write_file

WIDTH = 120
"""Width of tables in files and pipes."""


def check_writable(out: str | None) -> None:
    """Raise ``OSError`` before the measurement if ``write_json`` could not write ``out``."""
    if out is None or out == "-":
        return
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_replaceable(path)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), out)


def write_json(result: dict[str, Any], out: str | None) -> None:
    """Write one JSON object to the file ``out``. ``-`` is standard output; None writes nothing."""
    if out is None:
        return
    text = json.dumps(result, indent=2) + "\n"
    if out == "-":
        sys.stdout.write(text)
        return
    path = Path(out)
    write_file(path, text)


def show(tables: list[Table], json_out: str | None = None) -> None:
    """Print tables, to standard error if the JSON object is written to standard output."""
    console = make_console(stderr=json_out == "-")
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


def _faster_or_slower(ratio: float) -> str:
    """Format the ratio of a time to the time it is compared with."""
    if abs(ratio - 1) < 0.005:
        return "as fast"
    return f"{ratio:.3g}x slower" if ratio > 1 else f"{1 / ratio:.3g}x faster"


def _heading(result: dict[str, Any], tokens: bool = True) -> str:
    s = result["settings"]
    per_rank = f"{s['tokens']} tokens per rank, " if tokens else ""
    ffn = f", F {s['ffn']}" if "ffn" in s else ""
    return (
        f"{s['ranks']} ranks, {per_rank}D {s['hidden']}{ffn}, E {s['experts']}, K {s['top_k']}, "
        f"{s['dtype']}; {_machine(result)}"
    )


def _machine(result: dict[str, Any]) -> str:
    m = result["machine"]
    return f"{m.get('gpu', m['cpu'])}, {m['cores']} cores, {m['isa']}"


def _skipped(result: dict[str, Any]) -> str | None:
    return "\n".join(f"{name}: {reason}" for name, reason in result["skipped"].items()) or None


def dispatch_tables(result: dict[str, Any]) -> list[Table]:
    """Return the table of ``bench dispatch``: this library, the bare copies and the peers."""
    table = _table(_heading(result), "", "dispatch ms", "combine ms", "than moe_comm", caption=_skipped(result))
    table.add_row(f"moe_comm {result['backend']}", _number(result["dispatch_ms"]), _number(result["combine_ms"]), "")
    if result["dispatch_backward_ms"] is not None:
        table.add_row("  backward", _number(result["dispatch_backward_ms"]), _number(result["combine_backward_ms"]), "")
    if result["limit_ratio"] is not None:
        ratio = _faster_or_slower(1 / result["limit_ratio"])
        table.add_row("bare copies", _number(result["dispatch_limit_ms"]), _number(result["combine_limit_ms"]), ratio)
        overhead = result["overhead_us"]
        table.add_row(
            "  moe_comm minus these", *(_number(overhead[p], unit=" µs") for p in ("dispatch", "combine")), ""
        )
    for name, peer in result["peers"].items():
        table.add_row(
            name, _number(peer["dispatch_ms"]), _number(peer["combine_ms"]), _faster_or_slower(peer["speedup"])
        )
    return [table]


def layer_tables(result: dict[str, Any]) -> list[Table]:
    """Return the table of ``bench layer``: times, GFLOP/s, fraction of the GEMM rate and memory of each layer."""
    columns = ("ms", "EP", "forward", "backward", "total", "GFLOP/s", "of GEMM", "MiB", "than moe_comm")
    gemm = f"torch.mm on all ranks at once: {result['gemm_gflops']:.0f} GFLOP/s per rank"
    caption = "\n".join(filter(None, (gemm, _skipped(result))))
    table = _table(_heading(result), *columns, caption=caption)
    for name, row in result["contestants"].items():
        speedup = row.get("speedup")
        table.add_row(
            name,
            str(row["ep"]),
            *(_number(row[f"{phase}_ms"]) for phase in ("forward", "backward", "total")),
            _number(row["gflops"]),
            f"{row['gemm_fraction']:.0%}",
            _number(row.get("peak_memory_mib")),
            "" if speedup is None else _faster_or_slower(speedup),
        )
    return [table]


def train_tables(result: dict[str, Any]) -> list[Table]:
    """Return the table of ``bench train``: throughput of each loop, and the breakdown of this library's step.

    With several hosts, also the exposed communication and the bytes that a host sends.
    """
    s, m = result["settings"], result["machine"]
    heading = (
        f"{s['ranks']} ranks, {s['batch']} x {s['seq_len']} tokens per rank, {s['layers']} layers, D {s['hidden']}, "
        f"F {s['ffn']}, E {s['experts']}, K {s['top_k']}, {s['dtype']}; {m['cpu']}, {m['cores']} cores, {m['isa']}"
    )
    variants = result.get("variants", {})
    rows = {"moe_comm": result | {"speedup": None}, **variants, **result["peers"]}
    parts = ("compute", "communication", "data", "checkpoint", "loop")
    breakdowns = [
        f"step of {name}: " + ", ".join(f"{part} {rows[name]['step'][part]:.1%}" for part in parts)
        for name in ("moe_comm", *variants)
    ]
    gemm = f"torch.mm on all ranks at once: {result['gemm_gflops']:.0f} GFLOP/s in total"
    caption = "\n".join(filter(None, (*breakdowns, gemm, _skipped(result))))
    columns = ["tokens/s", "step ms", "MFU", "than moe_comm", "loss differs by"]
    if hosts := result.get("hosts"):
        links = ", ".join(f"{rate:.2f}" for rate in result["link_gbit_measured"])
        heading = (
            f"{hosts} hosts x {result['ranks_per_host']} rank(s), links of {result['link_gbit']:g} Gbit/s "
            f"(measured {links}); {heading}"
        )
        columns += ["exposed ms", "sent MB"]
        caption += "\nexposed: communication in the step, where it was measured; sent: bytes of a host on its link"
    predicted = any(row.get("predicted_ms") is not None for row in rows.values())
    columns += ["predicted ms"] if predicted else []
    table = _table(heading, "", *columns, caption=caption)
    for name, row in rows.items():
        compared = "" if row["speedup"] is None else _faster_or_slower(row["speedup"])
        differs = f"{row['loss_rel_diff']:.0e}" if "loss_rel_diff" in row else ""
        cells = [_number(row["tokens_per_s"]), _number(row["step_ms"]), f"{row['mfu']:.0%}", compared, differs]
        if hosts:
            cells += [_number(row.get("exposed_communication_ms")), f"{max(row['bytes_per_link']['sent']) / 1e6:.1f}"]
        table.add_row(name, *cells, *([_number(row.get("predicted_ms"))] if predicted else []))
    return [table]


def overlap_tables(result: dict[str, Any]) -> list[Table]:
    """Return the tables of ``bench overlap``: times of each operator and of its parts, and the hidden fraction."""
    s = result["settings"]
    links = ", ".join(f"{rate:.2f}" for rate in result["link_gbit_measured"])
    heading = (
        f"{s['hosts']} hosts x {s['ranks_per_host']} rank(s), links of {s['link_gbit']:g} Gbit/s (measured {links}), "
        f"at most {s['chunks']} chunks; {_machine(result)}"
    )
    worst, caption = result["slowest_case"], HIDDEN
    if worst is not None:
        where = f"{worst['op']}, {worst['direction']}, {worst['rows']} rows"
        least = f"{_faster_or_slower(result['slowest_vs_serial'])} than serial ({where}, ratio {worst['ratio']:g})"
        caption = f"smallest gain of overlapped: {least}\n{HIDDEN}"
    columns = ("ratio", "rows", "compute ms", "comm", "(wire)", "serial", "overlapped", "than serial", "hidden")
    table = _table(heading, "", *columns, caption=caption)
    for row in result["results"]:
        times = [_number(row[f"{name}_ms"]) for name in ("compute", "comm", "wire", "serial", "overlapped")]
        case = (f"{row['op']}, {row['direction']}", f"{row['ratio']:g}", str(row["rows"]))
        table.add_row(*case, *times, _faster_or_slower(row["vs_serial"]), f"{row['hidden']:.2f}")
    return [table] * bool(result["results"]) + [_overlap_layers(result)] * bool(result["layer"])


def _overlap_layers(result: dict[str, Any]) -> Table:
    """Return the table of MoE layers: overlapped, serial, and Hugging Face."""
    s = result["settings"]
    experts = f"{s['experts']} experts" if s["experts"] else "8 experts per rank"
    heading = f"MoE layer: {s['tokens']} tokens per rank, D {s['hidden']}, {experts}, K {s['top_k']}"
    reasons = {row["skipped"] for row in result["layer"]} - {None}
    caption = "\n".join([HIDDEN, *(f"Hugging Face's expert parallelism: {reason}" for reason in reasons)])
    columns = ("F", "", "compute ms", "comm", "serial", "overlapped", "hf ep", "than serial", "than hf ep", "hidden")
    table = _table(heading, *columns, caption=caption)
    for row in result["layer"]:
        for phase in ("forward", "backward", "total"):
            keys = [f"{n}_ms" if phase == "total" else f"{n}_{phase}_ms" for n in _LAYER_PARTS]
            times = [row.get(key) for key in keys]
            serial, overlapped, hf = times[2:]
            gains = ["-" if other is None else _faster_or_slower(overlapped / other) for other in (serial, hf)]
            hidden = f"{row['hidden']:.2f}" if phase == "total" else ""
            table.add_row(str(row["ffn"]), phase, *(_number(time) for time in times), *gains, hidden)
    return table


HIDDEN = (
    "hidden: time saved by overlap, compared with compute and then the same messages, as a fraction of the shorter of "
    "the two; 1 is all of it, below 0 is a loss"
)
_LAYER_PARTS = ("compute", "comm", "serial", "overlapped", "hf_ep")


def hierarchical_tables(result: dict[str, Any]) -> list[Table]:
    """Return the table of ``bench hierarchical``: times and inter-host bytes of each backend."""
    s = result["settings"]
    links = ", ".join(f"{rate:.2f}" for rate in result["link_gbit_measured"])
    heading = (
        f"{s['hosts']} hosts x {s['ranks_per_host']} ranks, links of {s['link_gbit']:g} Gbit/s (measured {links}), "
        f"{s['tokens']} tokens per rank, D {s['hidden']}, E {s['experts']}, K {s['top_k']}, float32; {_machine(result)}"
    )
    columns = ("forward ms", "backward ms", "total ms", "than all_to_all", "rows MB", "on the links MB")
    table = _table(heading, "", *columns, caption="MB: sent between hosts by all ranks, forward and backward")
    for row in result["results"]:
        times = [_number(row[f"{phase}_ms"]) for phase in ("forward", "backward", "total")]
        sizes = ("" if row[key] is None else f"{row[key] / 1e6:.1f}" for key in ("counted_bytes", "link_bytes"))
        table.add_row(row["contestant"], *times, _faster_or_slower(1 / row["speedup"]), *sizes)
    return [table]


def placement_tables(result: dict[str, Any]) -> list[Table]:
    """Return the table of ``bench placement``: steps, switches and rows of the busiest rank of each contestant."""
    s = result["settings"]
    drift = f", two experts exchanged every {s['drift']} steps" if s["drift"] else ""
    hosts = f"; {s['hosts']} hosts, {s['link_gbit']:g} Gbit/s" if s["hosts"] > 1 else ""
    hosts += f"; {s['cores_per_rank']:g} cores per rank" if s["cores_per_rank"] else ""
    heading = f"{_heading(result)}{hosts}; Zipf {s['zipf']:g}{drift}; decisions every {s['every']} steps"
    columns = (
        "step ms",
        "than fixed",
        "busiest / mean",
        "switches",
        "experts moved",
        "MB moved",
        "switch ms",
        "MB of copies",
    )
    caption = f"equal bits in {result['checked_steps']} compared steps; MB of copies are sent in each step"
    table = _table(heading, "", *columns, caption=caption)
    for name, row in (result["contestants"] | result["peers"]).items():
        if row.get("computed"):
            table.add_row(name, "-", "-", f"{row['busiest_over_mean']:.2f}", *["-"] * 5)
            continue
        moved = (str(row["switches"]), str(row["moved_experts"]), f"{row['moved_bytes'] / 1e6:.1f}")
        times = (_number(row["step_ms"]), _faster_or_slower(1 / row["speedup"]), f"{row['busiest_over_mean']:.2f}")
        table.add_row(name, *times, *moved, _number(row["move_ms"]), f"{row['published_bytes'] / 1e6:.1f}")
    return [table]


def small_tables(results: list[dict[str, Any]]) -> list[Table]:
    """Return the table of small batches: this library, the bare copies, and the difference."""
    columns = ("tokens", "dispatch µs", "bare", "overhead", "combine µs", "bare", "overhead")
    in_a_row = results[0]["settings"]["in_a_row"]
    how = f"mean of {in_a_row} consecutive calls" if in_a_row > 1 else "one call after a barrier"
    table = _table(f"{_heading(results[0], tokens=False)}; {how}", *columns, caption=_skipped(results[0]))
    for result in results:
        cells = []
        for phase in ("dispatch", "combine"):
            for key in (f"{phase}_ms", f"{phase}_limit_ms"):
                cells.append(_number(None if result[key] is None else result[key] * 1e3))
            cells.append(_number(result["overhead_us"][phase] if result["overhead_us"] else None))
        table.add_row(str(result["settings"]["tokens"]), *cells)
    return [table]


def _error(result: dict[str, float]) -> str:
    return f"{result['median']:.0%} (median), {result['worst']:.0%} (worst)"


def tune_tables(result: dict[str, Any]) -> list[Table]:
    """Return the table of ``tune``: the best choice of each case, and the prediction of the cost model."""
    s, error = result["settings"], result["prediction_error"]
    one_host = s["hosts"] == 1
    where = f"{s['ranks_per_host']} ranks" if one_host else f"{s['hosts']} hosts x {s['ranks_per_host']} rank(s)"
    link = "" if one_host else f", links of {s['link_gbit']:g} Gbit/s"
    fallback_rows = result["fallback_rows"].items()
    fallbacks = "".join(f"\none chunk is best up to {rows} rows: {name}" for name, rows in fallback_rows)
    by_operator = "".join(f"\n    {name}: {_error(row)}" for name, row in result["errors_by_operator"].items() if row)
    errors = f"error of the cost model over all candidates: {_error(error)}{by_operator}"
    caption = f"{errors}{fallbacks}\nstored in {result['stored']}"
    heading = f"{where}{link}, {s['sent']} x {s['other']}, {s['dtype']}; {_machine(result)}"
    columns = ("rows", "1 chunk ms", "best ms", "choice", "predicted ms", "error", "model's choice ms")
    table = _table(heading, "", *columns, caption=caption)
    for row in result["results"]:
        times = [_number(row[key]) for key in ("serial_ms", "best_ms")]
        modelled = row["error"] is not None
        predicted = (_number(row["predicted_ms"]), f"{row['error']:.0%}") if modelled else ("-", "-")
        prediction = (row["choice"], *predicted, _number(row["model_ms"]))
        table.add_row(f"{row['op']}, {row['direction']}", str(row["rows"]), *times, *prediction)
    return [table]
