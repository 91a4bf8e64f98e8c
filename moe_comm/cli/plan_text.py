"""Terminal output of ``moe-comm plan``: a mapping with the breakdown of its time and bytes, and a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from moe_comm.runtime.untrusted import make_console
from moe_plan.machine.hardware import Cluster
from moe_plan.model.mapping import Mapping
from moe_plan.search.plan_json import (
    COMPUTED,
    GB,
    bubble_share,
    compared_lengths,
    exposed_share,
    place_among,
    runners_up,
)
from moe_plan.search.preference import CLOSE, STEP_ERROR, is_equal, why_slower
from moe_plan.search.request import PlanCandidate, PlanRequest, changes_that_fit
from moe_plan.search.search import SearchResult
from moe_plan.step.blocks import LINKS

WIDTH = 160
"""Width of tables in files and pipes."""
WIDE = 110
"""Minimum terminal width at which the table of a search has a column with reasons."""
LEGEND = (
    "common: the mappings of most published runs, with whole experts over a host, 1F1B and zero1\n"
    f"±: half of the published steps were predicted with a smaller error. =: within it of the fastest, so measure "
    f"these; those of them that leave {1 - CLOSE:.0%} of the memory are first"
)
_LINK_NAMES = {"inside": "in a host", "between": "between hosts", "across": "between pods"}


def show(parts: Callable[[int], Iterator[RenderableType]], stderr: bool) -> None:
    """Print the parts that ``parts`` returns for the width of the terminal."""
    console = make_console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    for part in parts(console.width):
        console.print(part)


def heading(request: PlanRequest) -> str:
    """Return the request in one line."""
    shape, cluster, load = request.shape, request.cluster, request.load
    capacity = "" if load.capacity is None else f", capacity factor {load.capacity:g}"
    uneven = "" if load.imbalance == 1 else f", imbalance {load.imbalance:g}"
    uneven = uneven if load.loads is None else ", recorded loads of experts"
    uneven += "" if load.lengths is None else f", documents of {load.lengths.mean(float):,.0f} tokens"
    return escape(
        f"{shape.name} ({_billions(shape.params)} parameters, {_billions(shape.active)} active) on {cluster.gpus:,} "
        f"{cluster.accelerator.name}, {cluster.host_size} per host: {request.global_batch:,} sequences of "
        f"{load.seq_len:,} tokens per step, {load.dtype}{capacity}{uneven}"
    )


def mapping_parts(request: PlanRequest, candidate: PlanCandidate, headed: bool = True) -> Iterator[RenderableType]:
    """Yield the report of one mapping. ``headed``: include the request."""
    yield heading(request) if headed else ""
    yield from _lines(request, candidate)
    yield _breakdown(candidate)
    if candidate.step.sent:
        yield _bytes(candidate)


def search_parts(request: PlanRequest, result: SearchResult, width: int = WIDTH) -> Iterator[RenderableType]:
    """Yield the table of a search. If ``width`` is small, reasons are below the table."""
    yield heading(request)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", justify="right")
    table.add_column("mapping", min_width=24)
    for name in ("step s", "tokens/s", "MFU", "GB", "bubble", "exposed"):
        table.add_column(name, justify="right", no_wrap=True)
    below = []
    if width >= WIDE:
        table.add_column("why it is slower")
    rows = [(str(rank), *row) for rank, row in enumerate(runners_up(result.best), 1)]
    for candidate in result.common:
        if place_among(candidate, result.best) is None:
            rows.append((f">{len(result.best)}", candidate, f"common: {why_slower(result.best[0], candidate)}"))
    for rank, candidate, why in rows:
        step, total = candidate.step, candidate.fit.fullest.total
        table.add_row(
            f"{rank}{' =' if is_equal(candidate, result.best) else '  '}",
            short(candidate.mapping),
            f"{step.seconds:.4g} ± {STEP_ERROR:.0%}",
            f"{step.tokens_per_s:,.0f}",
            f"{step.mfu:.1%}",
            f"{total / GB:.1f} ({total / candidate.fit.available:.0%})",
            f"{bubble_share(step):.1%}",
            f"{exposed_share(step):.1%}",
            *([escape(why or "")] if width >= WIDE else []),
        )
        if why and width < WIDE:
            below.append(escape(f"{rank:>2}  {why}"))
    yield table
    yield from below
    if result.best:
        yield LEGEND
    yield tried(result)


def tried(result: SearchResult) -> str:
    """Return the numbers of considered and pruned mappings, and the time."""
    pruned = "".join(f", {count:,} {reason}" for reason, count in result.pruned.items() if count)
    incomplete = "" if result.complete else "; the time limit was reached, so some of these may be faster"
    return escape(
        f"{result.tried:,} mappings tried in {result.seconds:.1f} s: {result.replayed:,} replayed{pruned}{incomplete}"
    )


def nothing_fits(request: PlanRequest, result: SearchResult) -> str:
    """Return a message for a search without result: the nearest mapping, and changes that would help."""
    nearest, cluster = result.nearest[0], request.cluster
    hints = [f"it fits with {' or '.join(change.what for change in nearest.changes)}"] if nearest.changes else []
    if result.gpus is not None:
        hints.append(f"{request.shape.name} fits {result.gpus:,} of them")
    return (
        f"none of {result.tried:,} mappings of {request.shape.name} fits {cluster.gpus:,} {cluster.accelerator.name}; "
        f"nearest is {short(nearest.mapping)}: {nearest.fit}; "
        f"{'; '.join(hints) or 'no change of one or two settings helps'}"
    )


def cluster_lines(cluster: Cluster) -> Iterator[str]:
    """Yield a description of a measured machine."""
    gpu = cluster.accelerator
    rates = ", ".join(
        f"{dtype} {rate * gpu.efficiency[dtype] / 1e9:,.1f} GFLOP/s at best" for dtype, rate in gpu.flops.items()
    )
    yield f"{gpu.name}: a rank has {rates}, memory at {gpu.memory_bytes_per_s * gpu.memory_reach / GB:.1f} GB/s"
    yield f"{cluster.gpus} ranks, {cluster.host_size} per host; start of a collective {cluster.start_s * 1e6:.0f} us"
    for name, link in (("inside a host", cluster.inside), ("between hosts", cluster.between)):
        yield f"{name}: {link.name}, {link.rate / GB:.2f} GB/s, {link.latency_s * 1e6:.1f} us per hop"


def _billions(count: float) -> str:
    return f"{count / 1e9:.1f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"


def short(mapping: Mapping) -> str:
    """Return a short description of a mapping, such as "tp2 pp4 mb1 zero1", without degrees of 1. mb: micro-batch."""
    p = mapping.parallel
    sizes = {axis: getattr(p, axis) for axis in ("tp", "cp", "dp", "pp")}
    sizes |= {"vpp": mapping.virtual, "ep": p.ep, "etp": p.etp}
    parts = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
    parts += [mapping.pipeline] if mapping.pipeline else []
    parts += [f"mb{mapping.micro_batch}", mapping.sharding]
    parts += [f"replicas{mapping.replicas}"] if mapping.replicas > 1 else []
    parts += ["balanced"] if mapping.lengths == "balanced" else []
    if mapping.recompute != "none":
        parts.append(f"recompute-{mapping.recompute}")
    if mapping.overlap != "none":
        parts.append(f"overlap-{mapping.overlap}")
    if mapping.dispatcher != "all_to_all":
        parts.append(mapping.dispatcher)
    return " ".join(parts)


def _lines(request: PlanRequest, candidate: PlanCandidate) -> Iterator[RenderableType]:
    step, p, fullest = candidate.step, candidate.mapping.parallel, candidate.fit.fullest
    lines = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    lines.add_column()
    lines.add_column(overflow="fold")
    mapping = candidate.mapping
    schedule = f" ({mapping.schedule})" if p.pp > 1 else ""
    modes = {} if request.load.lengths is None else compared_lengths(request, mapping)
    replicas = f" with {mapping.replicas} replicas" if mapping.replicas > 1 else ""
    lines.add_row(
        "mapping",
        f"attention tp {p.tp}, cp {p.cp}, dp {p.dp}; experts etp {p.etp}, ep {p.ep}, edp {p.edp}; pipeline pp {p.pp}, "
        f"vpp {mapping.virtual}{schedule}; {mapping.micro_batches(request.global_batch)} micro-batches of "
        f"{mapping.micro_batch}; {mapping.sharding}{replicas}, recompute {mapping.recompute}, overlap {mapping.overlap}"
        + (f", {mapping.lengths} lengths" if modes else "")
        + (f", dispatcher {mapping.dispatcher}" if p.ep * p.etp > 1 else ""),
    )
    if request.load.loads is not None:
        placed = request.load.loads.placed(p.ep)
        lines.add_row(
            "placement",
            f"[bold]{placed.kind}[/]: busiest rank {placed.before:.2f} -> {placed.ratio:.2f} times the mean; "
            f"first layer: {escape(placed.reason)}",
        )
    for mode, lengths in modes.items():
        sent = [f"{number / GB:.3g} GB {_LINK_NAMES[link]}" for link, number in lengths["bytes"].items() if number]
        lines.add_row(
            f"{mode} lengths",
            f"{lengths['step_s']:.4g} s; slowest rank {lengths['slowest']:.2f} times the mean work, idle share "
            f"{lengths['idle_share']:.1%}; a rank sends {', '.join(sent) or 'nothing'}",
        )
    lines.add_row(
        "step",
        f"[bold]{step.seconds:.4g} s[/] ± {STEP_ERROR:.0%}, {step.tokens_per_s:,.0f} tokens/s, MFU "
        f"[bold]{step.mfu:.1%}[/]; bubble {bubble_share(step):.1%}, exposed transfers {exposed_share(step):.1%}",
    )
    terms = ("weights", "gradients", "optimizer", "activations", "buffers")
    memory_terms = ", ".join(f"{term} {getattr(fullest, term) / GB:.1f}" for term in terms)
    lines.add_row(
        "memory",
        f"{fullest.total / GB:.1f} of {candidate.fit.available / GB:.1f} GB on the fullest rank, of pipeline position "
        f"{fullest.position}: {memory_terms}",
    )
    if not candidate.fit:
        lines.add_row("", f"[bold red]does not fit[/]: {candidate.fit.missing / GB:.1f} GB too much")
        options = changes_that_fit(request, candidate.mapping)
        for change in options:
            lines.add_row("", escape(f"would fit with {change.what}: {change.fit.fullest.total / GB:.1f} GB"))
        if not options:
            lines.add_row("", "no single change makes it fit; without --mapping, all are tried")
    yield lines


def _breakdown(candidate: PlanCandidate) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("where the time goes", min_width=24)
    table.add_column("s", justify="right")
    table.add_column("share", justify="right")
    parts = sorted(candidate.step.breakdown.items(), key=lambda item: (item[0] not in COMPUTED, -item[1]))
    for cause, seconds in parts:
        if seconds:
            name = "pipeline: waiting" if cause == "pipeline" else cause
            table.add_row(escape(name), f"{seconds:.4f}", f"{seconds / candidate.step.seconds:.1%}")
    return table


def _bytes(candidate: PlanCandidate) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("sent by a rank in a step, GB", min_width=24)
    used = [link for link in LINKS if any(sent[link] for sent in candidate.step.sent.values())]
    for link in used:
        table.add_column(_LINK_NAMES[link], justify="right")
    for name, sent in candidate.step.sent.items():
        table.add_row(escape(name), *(f"{sent[link] / GB:.2f}" if sent[link] else "-" for link in used))
    return table
