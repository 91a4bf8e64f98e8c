"""Write the measured tables of README.md and the docs from a folder of results, so that no number is typed by hand.

    python -m benchmarks.fill_readme benchmarks/results/cpu-amd-epyc-avx2 [BLOCK ...]

BLOCK is a key of ``BLOCKS``; without arguments, all blocks are written. The folder must contain these files:

    moe-comm bench           dispatch-2-ranks.json, dispatch-4-ranks.json, layer-comm.json, layer-compute.json,
                             layer-bf16.json, train-comm.json, train-compute.json, overlap.json,
                             overlap-layer.json, overlap-rows.json, hierarchical.json, plan.json
                             train-{comm,compute}-2-hosts-{1,10}-gbit.json (with a variant auto:parallel=auto)
    benchmarks.small         small.json
    moe-comm parity          parity.json
    moe-comm tune            tune-2-ranks.json, tune-2-hosts.json
    benchmarks.soak          soak.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.fill_block import fill_block
from moe_comm.bench.common.report import NOISY


def load(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object of one result file."""
    result: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return result


def where(result: dict[str, Any], folder: Path) -> str:
    """Return the machine and the folder of a result, which are stated below every table."""
    machine = result["machine"]
    torch = machine["versions"]["torch"]
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['isa']}, torch {torch}; `{folder}`"


def summary_block(folder: Path) -> str:
    """Return one row for each kind of measurement: moe_comm, the system it is compared with, and the factor."""
    lines = ["| measurement, 2 CPU ranks | moe_comm | compared with | result | factor |", "|---|---:|---|---:|---:|"]

    def shown(value: float) -> str:
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    def row(what: str, own_value: float, peer: str, peer_value: float, unit: str, factor: float) -> None:
        lines.append(f"| {what} | {shown(own_value)} {unit} | {peer} | {shown(peer_value)} {unit} | {factor:.2g}x |")

    dispatch = load(folder, "dispatch-2-ranks")
    own_value = dispatch["dispatch_ms"] + dispatch["combine_ms"]
    limit = dispatch["dispatch_limit_ms"] + dispatch["combine_limit_ms"]
    row("dispatch and combine", own_value, "bare copy of the same bytes", limit, "ms", limit / own_value)
    for name, text in (("torch_gloo", "torch permute + gloo"), ("torch_mpich_tuned", "MPICH, tuned")):
        peer_value = dispatch["peers"][name]["dispatch_ms"] + dispatch["peers"][name]["combine_ms"]
        row("dispatch and combine", own_value, text, peer_value, "ms", peer_value / own_value)
    for preset, what in (("comm", "MoE layer, 64 small experts"), ("compute", "MoE layer, 8 wide experts")):
        result = load(folder, f"layer-{preset}")["contestants"]
        own, peer = (result[name]["total_ms"] / 1e3 for name in ("moe_comm", "hf_all_to_all"))
        row(f"{what}, forward + backward", own, "Hugging Face expert parallelism", peer, "s", peer / own)
    for preset, what in (("comm", "training, 32 small experts"), ("compute", "training, 8 wide experts")):
        result = load(folder, f"train-{preset}")
        peer = result["peers"]["hf_ep_fsdp2"]["tokens_per_s"]
        text = "Hugging Face expert parallelism + FSDP2"
        row(what, result["tokens_per_s"], text, peer, "tokens/s", result["tokens_per_s"] / peer)
    s = dispatch["settings"]
    lines += [
        "",
        f"Dispatch: {s['tokens']} tokens per rank, D {s['hidden']}, E {s['experts']}, K {s['top_k']}, {s['dtype']}. "
        f"The factor is the speed of moe_comm relative to the other system. {where(dispatch, folder)}.",
    ]
    return "\n".join(lines)


def dispatch_block(folder: Path) -> str:
    """Return the milliseconds of dispatch and combine of moe_comm, the bare copies and the peers."""
    results = [load(folder, f"dispatch-{ranks}-ranks") for ranks in (2, 4)]
    lines = ["| ms | " + " | ".join(f"dispatch, {r} ranks | combine, {r} ranks" for r in (2, 4)) + " |"]
    lines += ["|---|" + "---:|" * 4]

    def row(name: str, cells: list[tuple[float, float]], against: bool = False) -> str:
        shown = []
        for (dispatch, combine), result in zip(cells, results, strict=True):
            for phase, value in (("dispatch", dispatch), ("combine", combine)):
                faster = f" ({value / result[f'{phase}_ms']:.0f}x)" if against else ""
                shown.append(f"{value:.3g}{faster}")
        return f"| {name} | " + " | ".join(shown) + " |"

    lines.append(row("**moe_comm**", [(r["dispatch_ms"], r["combine_ms"]) for r in results]))
    lines.append(row("bare copy of the same bytes", [(r["dispatch_limit_ms"], r["combine_limit_ms"]) for r in results]))
    for name, text in (
        ("torch_gloo", "torch permute + gloo `all_to_all_single`"),
        ("torch_gloo_tuned", "the same, buffers kept and passes fused"),
        ("torch_mpich", "torch permute + MPICH `Alltoallv`"),
        ("torch_mpich_tuned", "the same, buffers kept and passes fused"),
    ):
        if all(name in r["peers"] for r in results):
            peers = [r["peers"][name] for r in results]
            lines.append(row(text, [(p["dispatch_ms"], p["combine_ms"]) for p in peers], against=True))
    s = results[0]["settings"]
    ratios = " and ".join(f"{r['limit_ratio']:.2f}" for r in results)
    small = load(folder, "small")
    overheads = {
        way: [max(entry[phase] for entry in small[way]["overhead_us"].values()) for phase in ("dispatch", "combine")]
        for way in ("in_a_row", "after_a_barrier")
    }
    lines += [
        "",
        f"{s['tokens']} tokens per rank, D {s['hidden']}, E {s['experts']}, K {s['top_k']}, {s['dtype']}; in brackets, "
        f"the time relative to moe_comm. moe_comm takes {ratios} times as long as the bare copies on 2 and 4 ranks. "
        f"Batches of 1 to 64 tokens, 2 ranks: at most {overheads['in_a_row'][0]:.0f} µs (dispatch) and "
        f"{overheads['in_a_row'][1]:.0f} µs (combine) above the bare copy in consecutive calls, "
        f"{overheads['after_a_barrier'][0]:.0f} and {overheads['after_a_barrier'][1]:.0f} µs as single calls with "
        f"cold caches. {where(results[0], folder)}.",
    ]
    return "\n".join(lines)


def _spread(median: float, least: float, p90: float) -> str:
    """Return a median with the minimum and the 90th percentile, and whether it is noisy, as the commands print it."""
    noisy = ", noisy" if median > NOISY * least else ""
    return f"{median:,.0f} ({least:,.0f}-{p90:,.0f}{noisy})"


def layer_block(folder: Path) -> str:
    """Return times, rates and memory of MoE layers: moe_comm and its peers."""
    lines = [
        "| shape | layer | EP | forward + backward, ms (min-p90) | GFLOP/s per rank | of GEMM rate | peak MiB "
        "| it is slower than |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for preset in ("comm", "compute", "bf16"):
        result = load(folder, f"layer-{preset}")
        s = result["settings"]
        shape = f"{s['dtype']}, T {s['tokens']}, D {s['hidden']}, F {s['ffn']}, E {s['experts']}, K {s['top_k']}"
        for name, entry in result["contestants"].items():
            peak = entry.get("peak_memory_mib")
            speedup = entry.get("speedup")
            compared = f"{'moe_comm_ep1' if entry['ep'] == 1 else 'moe_comm'}: {speedup:.2f}x" if speedup else ""
            total = _spread(*(entry[f"total_{key}ms"] for key in ("", "min_", "p90_")))
            lines.append(
                f"| {shape} | {name} | {entry['ep']} | {total} | {entry['gflops']:.1f} | "
                f"{entry['gemm_fraction']:.0%} | {f'{peak:,.0f}' if peak else '-'} | {compared} |"
            )
    lines += ["", f"T tokens per rank, two ranks with one thread each, concurrently. {where(result, folder)}."]
    return "\n".join(lines)


def train_block(folder: Path) -> str:
    """Return the training throughput of moe_comm and its peers."""
    lines = [
        "| shape | trainer | tokens/s | MFU | ms per step (min-p90) | speedup of moe_comm over it |",
        "|---|---|---:|---:|---:|---:|",
    ]
    shares = []
    for preset in ("comm", "compute"):
        result = load(folder, f"train-{preset}")
        s = result["settings"]
        shape = f"D {s['hidden']}, F {s['ffn']}, E {s['experts']}, K {s['top_k']}, batch {s['ranks']} x {s['batch']}"
        for name, entry in {"**moe_comm**": result, **result["peers"]}.items():
            speedup = f"{entry['speedup']:.2f}x" if entry is not result else ""
            step_ms = _spread(*(entry[f"step_{key}ms"] for key in ("", "min_", "p90_")))
            numbers = f"{entry['tokens_per_s']:,.0f} | {entry['mfu']:.0%} | {step_ms}"
            lines.append(f"| {shape} | {name} | {numbers} | {speedup} |")
        step = result["step"]
        shares.append(
            f"{preset}: compute {step['compute']:.1%}, communication {step['communication']:.1%}, data "
            f"{step['data']:.2%}, loop {step['loop']:.2%}"
        )
    s = result["settings"]
    lines += [
        "",
        f"fp32, {s['ranks']} ranks with one thread each, {s['layers']} layers, sequences of {s['seq_len']} tokens, "
        "AdamW; medians of rounds in which the trainers alternate. Parts of a step of moe_comm: "
        f"{'; '.join(shares)}. {where(result, folder)}.",
    ]
    return "\n".join(lines)


def train_hosts_block(folder: Path) -> str:
    """Return the steps of moe_comm with parallel = "auto", of given mappings, and of the peers between two hosts."""
    lines = [
        '| link, shape | trainer | ms per step | exposed communication, ms | MB on the link | time over "auto" |',
        "|---|---|---:|---:|---:|---:|",
    ]
    for rate in (1, 10):
        for preset in ("comm", "compute"):
            result = load(folder, f"train-{preset}-2-hosts-{rate}-gbit")
            auto = result["variants"]["auto"]
            given = {name: entry for name, entry in result["variants"].items() if name != "auto"}
            own = {f'`parallel = "auto"`: {_mapping(auto)}': auto, f"given: {_mapping(result)}": result}
            own |= {f"given: `{name}`": entry for name, entry in given.items()}
            for name, entry in {**own, **result["peers"]}.items():
                exposed = entry.get("exposed_communication_ms")
                sent = max(entry["bytes_per_link"]["sent"]) / 1e6
                lines.append(
                    f"| {rate} Gbit/s, {preset} | {name} | {entry['step_ms']:,.0f} | "
                    f"{'-' if exposed is None else f'{exposed:,.0f}'} | {sent:,.0f} | "
                    f"{entry['step_ms'] / auto['step_ms']:.2f}x |"
                )
    lines += ["", f"Two simulated hosts with one rank each, the shapes of the table above. {where(result, folder)}."]
    return "\n".join(lines)


def train_scaling_block(folder: Path) -> str:
    """Return the steps of moe_comm with parallel = "auto" on one, two and four hosts of one rank each."""
    lines = ["| hosts | cores | mapping | ms per step | predicted, ms |", "|---:|---:|---|---:|---:|"]
    for hosts in (1, 2, 4):
        result = load(folder, f"train-comm-scaling-{hosts}")
        auto = result["variants"]["auto"]
        lines.append(
            f"| {hosts} | {min(hosts, result['machine']['cores'])} | {_mapping(auto)} | {auto['step_ms']:,.0f} | "
            f"{auto['predicted_ms']:,.0f} |"
        )
    link, where_measured = f"{result['settings']['link_gbit']:.0f} Gbit/s", where(result, folder)
    lines += ["", f"Shape `comm`, one rank per host, links of {link}, the same batch for each rank. {where_measured}."]
    return "\n".join(lines)


def _mapping(entry: dict[str, Any]) -> str:
    """Return the degrees of a mapping that are used."""
    degrees = entry["mapping"]
    return ", ".join(f"{axis} {size}" for axis, size in degrees.items() if axis in ("dp", "ep") or size > 1)


def parity_block(folder: Path) -> str:
    """Return the largest differences of training on every mapping from training in one process."""
    result = load(folder, "parity")
    rows: dict[tuple[str, int, str], dict[str, dict[str, Any]]] = {}
    for entry in result["mappings"]:
        rows.setdefault((entry["mapping"], entry["ranks"], entry["mode"]), {})[entry["optimizer"]] = entry
    optimizers = list(next(iter(rows.values())))
    lines = ["| mapping | ranks | mode | " + " | ".join(f"{o}: loss | norm | weights" for o in optimizers) + " |"]
    lines.append("|---|---:|---|" + "---:|---:|---:|" * len(optimizers))
    for (mapping, ranks, mode), by_optimizer in rows.items():
        keys = ("loss_rel_diff", "grad_norm_rel_diff", "param_rel_diff")
        cells = [f"{by_optimizer[o][key]:.0e}" for o in optimizers for key in keys]
        lines.append(f"| {mapping.replace('|', '/')} | {ranks} | {mode} | " + " | ".join(cells) + " |")
    copies = max(entry["replica_diff"] for entry in result["mappings"])
    note = (
        "Replicas of a parameter are equal in bits"
        if copies == 0
        else f"Replicas of a parameter differ by {copies:.0e}"
    )
    largest = [
        f"{optimizer}{capacity}: losses {max(one['loss_rel_diff'] for one in entries):.0e}, weights "
        f"{max(one['param_rel_diff'] for one in entries):.0e}"
        for optimizer in optimizers
        for capacity, mode in (("", "dropless"), (" with capacity limits", "capacity (batch)"))
        if (entries := [one for one in result["mappings"] if (one["optimizer"], one["mode"]) == (optimizer, mode)])
    ]
    lines += [
        "",
        f"{result['steps']} steps, fp32; largest relative differences ({'; '.join(largest)}). {note}. "
        f"`{folder}/parity.json`.",
    ]
    return "\n".join(lines)


def _gain(row: dict[str, Any]) -> str:
    """Return the cells "speedup over serial", by pairs of calls if they were measured, and "hidden" of a row."""
    hidden = f"{row['hidden']:.2f}" if "chunked_comm_ms" in row else "-"
    ratio = row.get("vs_serial_paired", row["overlapped_ms"] / row["serial_ms"])
    return f"{1 / ratio:.2f}x | {hidden}"


TIMES = ("compute", "comm", "chunked_comm", "serial", "overlapped")


def overlap_block(folder: Path) -> str:
    """Return times of overlapped operators and layers, and the fraction of the communication that they hide."""
    result, layers, rows = (load(folder, name) for name in ("overlap", "overlap-layer", "overlap-rows"))
    lines = [
        "| operator | communication / compute, requested (measured) | compute, ms | communication, ms "
        "| in chunks, ms | serial, ms | overlapped, ms | speedup over serial | hidden |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for entry in result["results"]:
        times = " | ".join(f"{entry[f'{name}_ms']:.0f}" for name in TIMES)
        ratio = f"{entry['ratio']:g} ({entry['ratio_measured']:.2f})"
        lines.append(f"| `{entry['op']}`, {entry['direction']} | {ratio} | {times} | {_gain(entry)} |")
    s, swept, slow = result["settings"], rows["settings"]["rows"], rows["slowest_case"]
    low, high = next(
        entry["vs_serial_range"]
        for entry in rows["results"]
        if all(entry[key] == slow[key] for key in ("op", "direction", "rows"))
    )
    lines += [
        "",
        f"{s['hosts']} hosts x {s['ranks_per_host']} rank, links of {s['link_gbit']:g} Gbit/s, "
        f"{result['results'][0]['rows']} rows per rank, {s['width']} transferred columns, fp32, {s['chunks']} "
        "chunks. "
        "Communication: the messages of serial, one per pair of ranks. In chunks: the messages of overlapped. gloo "
        "uses a link better with several messages than with one, so communication may be longer than all of "
        "overlapped. Speedup: the median of pairs of calls, one after the other. "
        "Hidden: (compute + communication in chunks - overlapped) / the smaller of the first two; -: not measured. "
        f"Over {len(swept)} numbers of rows from {min(swept)} to {max(swept)} "
        f"(`overlap-rows.json`, {rows['settings']['chunks']} chunks) the operators took at most "
        f"{rows['slowest_vs_serial']:.3f} times as long as the serial order (`{slow['op']}`, "
        f"{slow['direction']}, {slow['rows']} rows; by pairs of calls, between {low:.3f} and {high:.3f} with 95%).",
        "",
        "| MoE layer, forward and backward | experts alone, ms | communication, ms | in chunks, ms | serial, ms "
        "| overlapped, ms | speedup over serial | Hugging Face EP, ms | speedup over it | hidden |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for entry in layers["layer"]:
        shown = " | ".join(f"{entry[f'{name}_ms']:.0f}" for name in TIMES)
        hf = f"{entry['hf_ep_ms']:.0f} | {entry['speedup_vs_hf_ep']:.2f}x" if "hf_ep_ms" in entry else "- | -"
        speedup, hidden = _gain(entry).split(" | ")
        gains = f"{speedup} | {hf} | {hidden}"
        lines.append(f"| F {entry['ffn']} | {shown} | {gains} |")
    s = layers["settings"]
    experts = f"{s['experts']} experts" if s["experts"] else "8 experts per rank"
    lines += [
        "",
        f"{s['tokens']} tokens per rank, D {s['hidden']}, {experts}, K {s['top_k']}, the same hosts and link. "
        f"{where(result, folder)}.",
    ]
    return "\n".join(lines)


def hierarchical_block(folder: Path) -> str:
    """Return times and inter-host bytes of hierarchical dispatch and of the other backends."""
    result = load(folder, "hierarchical")
    lines = [
        "| | forward, ms | backward, ms | together, ms | speedup over all_to_all | MB by the formula "
        "| MB on the links |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for entry in result["results"]:
        times = " | ".join(f"{entry[f'{name}_ms']:.0f}" for name in ("forward", "backward", "total"))
        counted = "" if entry["counted_bytes"] is None else f"{entry['counted_bytes'] / 1e6:.0f}"
        name, speedup, links = entry["contestant"], entry["speedup"], entry["link_bytes"] / 1e6
        lines.append(f"| `{name}` | {times} | {speedup:.2f}x | {counted} | {links:.0f} |")
    s = result["settings"]
    lines += [
        "",
        f"{s['hosts']} hosts x {s['ranks_per_host']} ranks, links of {s['link_gbit']:g} Gbit/s, {s['tokens']} tokens "
        f"per rank, D {s['hidden']}, {s['experts']} experts, K {s['top_k']}, fp32. {where(result, folder)}.",
    ]
    return "\n".join(lines)


def tune_block(folder: Path) -> str:
    """Return the errors of the overlap cost model, and the times of the choices that it makes."""
    places = {"2 ranks of one host": load(folder, "tune-2-ranks"), "2 hosts": load(folder, "tune-2-hosts")}
    lines = [
        "| operator | "
        + " | ".join(f"{p}: error, median / worst | one chunk, ms | choice of the model | best" for p in places)
        + " |",
        "|---|" + "---:|" * 4 * len(places),
    ]
    names = list(dict.fromkeys(name for result in places.values() for name in result["errors_by_operator"]))
    for name in names:
        cells = []
        for result in places.values():
            error = result["errors_by_operator"].get(name)
            rows = [entry for entry in result["results"] if f"{entry['op']} {entry['direction']}" == name]
            if not error or not rows:
                cells.append("- | - | - | -")
                continue
            sums = [sum(entry[key] for entry in rows) for key in ("serial_ms", "model_ms", "best_ms")]
            cells.append(f"{error['median']:.0%} / {error['worst']:.0%} | " + " | ".join(f"{ms:.0f}" for ms in sums))
        lines.append(f"| `{name.split()[0]}`, {name.split()[1]} | {' | '.join(cells)} |")
    hosts = places["2 hosts"]
    s, of_all = hosts["settings"], [result["prediction_error"] for result in places.values()]
    errors = " and ".join(f"{error['median']:.0%} (worst {error['worst']:.0%})" for error in of_all)
    lines += [
        "",
        f"All together: {errors}. Times are sums over {len(s['rows'])} numbers of rows from {min(s['rows'])} to "
        f"{max(s['rows'])}; {s['sent']} transferred columns, other width {s['other']}; links between hosts have "
        f"{s['link_gbit']:g} Gbit/s. {where(hosts, folder)}.",
    ]
    return "\n".join(lines)


def plan_block(folder: Path) -> str:
    """Return predicted and measured step times of mappings on CPU ranks."""
    result = load(folder, "plan")
    lines = ["| ranks | mapping | measured, ms | predicted, ms | error |", "|---|---|---:|---:|---:|"]
    picks = []
    s = result["settings"]
    for group in result["groups"]:
        ranks = f"{group['ranks']}" + (f" on {group['hosts']} hosts" if group["hosts"] > 1 else "")
        for row in group["mappings"]:
            numbers = f"{row['step_ms']:,.0f} | {row['predicted_ms']:,.0f} | {row['error']:+.1%}"
            lines.append(f"| {ranks} | {row['mapping']} | {numbers} |")
        picks.append(f"{group['pick']} on {ranks} ({group['regret']:.1%} above the best)")
    lines += [
        "",
        f"Errors: {result['median_error']:.1%} in the median, {result['worst_error']:.1%} at worst, {result['within']} "
        f"of {result['mappings']} within 15%. Picked: {'; '.join(picks)}. {s['layers']} layers, D {s['hidden']}, F "
        f"{s['ffn']}, E {s['experts']}, K {s['top_k']}, {s['batch']} sequences of {s['seq_len']}, fp32; mb: sequences "
        f"of a micro-batch; hosts are joined at {s['link_gbit']:g} Gbit/s. {where(result, folder)}.",
    ]
    return "\n".join(lines)


def soak_block(folder: Path) -> str:
    """Return detection and recovery times of injected faults by kind."""
    result = load(folder, "soak")
    lines = [
        "| fault | count | detected, s: median | p99 | worst | recovered, s: median | p99 | worst |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, entry in sorted(result["kinds"].items(), key=lambda item: -item[1]["count"]):
        cells = [
            f"{entry[event][key]:.2f}" if entry[event] else ""
            for event in ("detected", "recovered")
            for key in ("median", "p99", "worst")
        ]
        lines.append(f"| `{kind}` | {entry['count']} | {' | '.join(cells)} |")
    bits = "had the bits of the run without faults" if result["identical"] else f"differed: {result['difference']}"
    left_behind = ", ".join(result["left_behind"]) or "nothing"
    lines += [
        "",
        f"{result['faults']:,} faults in one uninterrupted run of {result['seconds'] / 60:.0f} minutes, "
        f"{result['starts']} starts of {result['ranks']} ranks, {result['steps']:,} steps. The final weights {bits}, "
        f"and {left_behind} was left behind. The effective training time is {result['effective_time_ratio']:.0%}. "
        f"{where(result, folder)}.",
    ]
    return "\n".join(lines)


ROOT = Path(__file__).parent.parent
BLOCKS = {
    "summary": ("README.md", summary_block),
    "dispatch": ("docs/measure.md", dispatch_block),
    "layer": ("docs/measure.md", layer_block),
    "train": ("docs/measure.md", train_block),
    "train_hosts": ("docs/measure.md", train_hosts_block),
    "train_scaling": ("docs/measure.md", train_scaling_block),
    "parity": ("docs/parallelism.md", parity_block),
    "overlap": ("docs/overlap.md", overlap_block),
    "tune": ("docs/overlap.md", tune_block),
    "hierarchical": ("docs/layers.md", hierarchical_block),
    "plan": ("docs/plan.md", plan_block),
    "soak": ("docs/reliability.md", soak_block),
}


def main() -> None:
    """Replace the generated blocks in the pages."""
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(BLOCKS)
    for name in names:
        page, block = BLOCKS[name]
        fill_block(ROOT / page, name, block(folder))


if __name__ == "__main__":
    main()
