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

WIDTH = 140
"""Width of tables in files and pipes."""
NOISY = 1.25
"""Ratio of a median to the minimum above which a time is called noisy."""
SPREAD = "min-p90"


def check_writable(out: str | None) -> None:
    """Raise ``OSError`` before the measurement if ``write_json`` could not write ``out``."""
    if out is None or out == "-":
        return
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_replaceable(path)
    if not os.access(path.parent, os.W_OK | os.X_OK):  # a new file replaces an existing one
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


def _timed(median: float | None, least: float | None, p90: float | None = None) -> tuple[str, str]:
    """Format a median, and its spread: minimum to 90th percentile, marked if the median is far from the minimum."""
    if median is None or least is None:
        return _number(median), "-"
    spread = _number(least) if p90 is None else f"{_number(least)}-{_number(p90)}"
    return _number(median), f"{spread} noisy" if median > NOISY * least else spread


def _of(stats: dict[str, float] | None) -> tuple[str, str]:
    """Format the statistics of ``clock.summarize``, see ``_timed``."""
    return ("-", "-") if stats is None else _timed(stats["median_ms"], stats["min_ms"], stats["p90_ms"])


def _faster_or_slower(ratio: float, partner: str = "") -> str:
    """Format the ratio of a time to that of ``partner``, which is empty if the title of the column has it."""
    if abs(ratio - 1) < 0.005:
        return f"as fast as {partner}" if partner else "as fast"
    than = f" than {partner}" if partner else ""
    return f"{ratio:.3g}x slower{than}" if ratio > 1 else f"{1 / ratio:.3g}x faster{than}"


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


def _captions(*parts: str | None) -> str:
    """Return the lines below a table of times: the parts that are not empty, and what its spread means."""
    spread = f"times are medians; {SPREAD}: minimum and 90th percentile; noisy: the median is above {NOISY:g} x minimum"
    return "\n".join([*filter(None, parts), spread])


def _skipped(result: dict[str, Any]) -> str | None:
    return "\n".join(f"{name}: {reason}" for name, reason in result["skipped"].items()) or None


def dispatch_tables(result: dict[str, Any]) -> list[Table]:
    """Return the table of ``bench dispatch``: this library, the bare copies and the peers."""
    columns = ("dispatch ms", SPREAD, "combine ms", SPREAD, "than moe_comm")
    table = _table(_heading(result), "", *columns, caption=_captions(_skipped(result)))

    def times(name: str, suffix: str = "") -> tuple[str, ...]:
        stats = result["details"][name]
        return (*_of(stats.get(f"dispatch{suffix}")), *_of(stats.get(f"combine{suffix}")))

    table.add_row(f"moe_comm {result['backend']}", *times("moe_comm"), "")
    if result["dispatch_backward_ms"] is not None:
        table.add_row("  backward", *times("moe_comm", "_backward"), "")
    if result["limit_ratio"] is not None:
        table.add_row("bare copies", *times("limit"), _faster_or_slower(1 / result["limit_ratio"]))
        dispatch, combine = (_number(result["overhead_us"][phase], unit=" µs") for phase in ("dispatch", "combine"))
        table.add_row("  moe_comm minus these", dispatch, "", combine, "", "")
    for name, peer in result["peers"].items():
        table.add_row(name, *times(name), _faster_or_slower(peer["speedup"]))
    return [table]


def layer_tables(result: dict[str, Any]) -> list[Table]:
    """Return the table of ``bench layer``: times, GFLOP/s, fraction of the GEMM rate and memory of each layer."""
    columns = ("ms", "EP", "forward", "backward", "total", SPREAD, "GFLOP/s", "of GEMM", "MiB", "compared")
    gemm = f"torch.mm on all ranks at once: {result['gemm_gflops']:.0f} GFLOP/s per rank"
    table = _table(_heading(result), *columns, caption=_captions(gemm, _skipped(result)))
    for name, row in result["contestants"].items():
        speedup = row.get("speedup")
        table.add_row(
            name,
            str(row["ep"]),
            *(_number(row[f"{phase}_ms"]) for phase in ("forward", "backward")),
            *_timed(row["total_ms"], row["total_min_ms"], row["total_p90_ms"]),
            _number(row["gflops"]),
            f"{row['gemm_fraction']:.0%}",
            _number(row.get("peak_memory_mib")),
            "" if speedup is None else _faster_or_slower(speedup, row["speedup_of"]),
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
    caption = _captions(*breakdowns, gemm, _skipped(result))
    columns = ["tokens/s", "step ms", SPREAD, "MFU", "than moe_comm", "loss differs by"]
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
        times = _timed(row["step_ms"], row["step_min_ms"], row["step_p90_ms"])
        cells = [_number(row["tokens_per_s"]), *times, f"{row['mfu']:.0%}", compared, differs]
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
    worst, caption = result["slowest_case"], _captions(MESSAGES, HIDDEN)
    if worst is not None:
        where = f"{worst['op']}, {worst['direction']}, {worst['rows']} rows"
        least = f"{_faster_or_slower(result['slowest_vs_serial'])} than serial ({where}, ratio {worst['ratio']:g})"
        caption = f"smallest gain of overlapped: {least}\n{caption}"
    columns = (
        "ratio",
        "rows",
        "compute ms",
        "comm",
        "in chunks",
        "serial",
        "overlapped",
        SPREAD,
        "than serial",
        "hidden",
    )
    table = _table(heading, "", *columns, caption=caption)
    for row in result["results"]:
        times = [_number(row.get(f"{name}_ms")) for name in ("compute", "comm", "chunked_comm", "serial")]
        overlapped = _timed(row["overlapped_ms"], row.get("overlapped_min_ms"), row.get("overlapped_p90_ms"))
        case = (f"{row['op']}, {row['direction']}", f"{row['ratio']:g}", str(row["rows"]))
        gain = _faster_or_slower(row["vs_serial_paired"])
        table.add_row(*case, *times, *overlapped, gain, f"{row['hidden']:.2f}")
    return [table] * bool(result["results"]) + [_overlap_layers(result)] * bool(result["layer"])


def _overlap_layers(result: dict[str, Any]) -> Table:
    """Return the table of MoE layers: overlapped, serial, and Hugging Face."""
    s = result["settings"]
    experts = f"{s['experts']} experts" if s["experts"] else "8 experts per rank"
    heading = f"MoE layer: {s['tokens']} tokens per rank, D {s['hidden']}, {experts}, K {s['top_k']}"
    reasons = {row["skipped"] for row in result["layer"]} - {None}
    caption = _captions(MESSAGES, HIDDEN, *(f"Hugging Face's expert parallelism: {reason}" for reason in reasons))
    times_of = ("compute ms", "comm", "in chunks", "serial", "overlapped", SPREAD, "hf ep")
    columns = ("F", "", *times_of, "than serial", "than hf ep", "hidden")
    table = _table(heading, *columns, caption=caption)
    for row in result["layer"]:
        for phase in ("forward", "backward", "total"):
            keys = [f"{n}_ms" if phase == "total" else f"{n}_{phase}_ms" for n in _LAYER_PARTS]
            times = [row.get(key) for key in keys]
            serial, overlapped, hf = times[3:]
            gains = ["-" if other is None else _faster_or_slower(overlapped / other) for other in (serial, hf)]
            hidden = f"{row['hidden']:.2f}" if phase == "total" else ""
            spread = _timed(overlapped, row.get("overlapped_min_ms"), row.get("overlapped_p90_ms"))[1]
            cells = [*map(_number, times[:-1]), spread if phase == "total" else "", _number(hf)]
            table.add_row(str(row["ffn"]), phase, *cells, *gains, hidden)
    return table


MESSAGES = (
    "comm: the messages of serial alone, one per pair of ranks; in chunks: those of overlapped alone. Several messages "
    "use a link better than one, so comm may be longer than all of overlapped"
)
HIDDEN = (
    "hidden: time saved by overlap, compared with compute and then comm in chunks, as a fraction of the shorter of "
    "the two; 1 is all of it, below 0 is a loss"
)
_LAYER_PARTS = ("compute", "comm", "chunked_comm", "serial", "overlapped", "hf_ep")


def hierarchical_tables(result: dict[str, Any]) -> list[Table]:
    """Return the table of ``bench hierarchical``: times and inter-host bytes of each backend."""
    s = result["settings"]
    links = ", ".join(f"{rate:.2f}" for rate in result["link_gbit_measured"])
    heading = (
        f"{s['hosts']} hosts x {s['ranks_per_host']} ranks, links of {s['link_gbit']:g} Gbit/s (measured {links}), "
        f"{s['tokens']} tokens per rank, D {s['hidden']}, E {s['experts']}, K {s['top_k']}, float32; {_machine(result)}"
    )
    columns = ("forward ms", "backward ms", "total ms", SPREAD, "than all_to_all", "rows MB", "on the links MB")
    table = _table(
        heading, "", *columns, caption=_captions("MB: sent between hosts by all ranks, forward and backward")
    )
    for row in result["results"]:
        times = [_number(row[f"{phase}_ms"]) for phase in ("forward", "backward")]
        times += _timed(row["total_ms"], row["total_min_ms"], row["total_p90_ms"])
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
        SPREAD,
        "than fixed",
        "busiest / mean",
        "switches",
        "experts moved",
        "MB moved",
        "switch ms",
        "MB of copies",
    )
    equal = f"equal bits in {result['checked_steps']} compared steps; MB of copies are sent in each step"
    gain = "than fixed: by the mean of the steps, with the switches"
    caption = _captions(equal, gain)
    table = _table(heading, "", *columns, caption=caption)
    for name, row in (result["contestants"] | result["peers"]).items():
        if row.get("computed"):
            table.add_row(name, "-", "-", "-", f"{row['busiest_over_mean']:.2f}", *["-"] * 5)
            continue
        moved = (str(row["switches"]), str(row["moved_experts"]), f"{row['moved_bytes'] / 1e6:.1f}")
        spread = _timed(row["step_ms"], row["step_min_ms"], row["step_p90_ms"])
        times = (*spread, _faster_or_slower(1 / row["speedup"]), f"{row['busiest_over_mean']:.2f}")
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
