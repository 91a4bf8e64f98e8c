"""What ``moe-comm plan`` prints: a mapping with where its time and its bytes go, and the best of a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from moe_comm.plan.machine.hardware import Cluster
from moe_comm.plan.model.mapping import Mapping
from moe_comm.plan.search.answer import COMPUTED, GB, bubble_share, exposed_share, runners_up
from moe_comm.plan.search.question import Candidate, Question
from moe_comm.plan.search.search import Found, changes
from moe_comm.plan.step.blocks import LINKS

WIDTH = 160
"""Of tables in files and pipes."""
WIDE = 110
"""Columns from which reasons have one of their own."""
_LINK_NAMES = {"inside": "in a host", "between": "between hosts", "across": "between pods"}


def show(parts: Callable[[int], Iterator[RenderableType]], stderr: bool) -> None:
    """Print what ``parts`` makes for a terminal of so many columns, one after the other."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    for part in parts(console.width):
        console.print(part)


def heading(question: Question) -> str:
    """The question in one line."""
    shape, cluster, load = question.shape, question.cluster, question.load
    capacity = "" if load.capacity is None else f", capacity factor {load.capacity:g}"
    uneven = "" if load.imbalance == 1 else f", imbalance {load.imbalance:g}"
    return escape(
        f"{shape.name} ({_billions(shape.params)} parameters, {_billions(shape.active)} active) on {cluster.gpus:,} "
        f"{cluster.accelerator.name}, {cluster.host_size} a host: {question.global_batch:,} sequences of "
        f"{load.seq_len:,} tokens a step, {load.dtype}{capacity}{uneven}"
    )


def mapping_parts(question: Question, one: Candidate, headed: bool = True) -> Iterator[RenderableType]:
    """One mapping in full; headed: after the question."""
    yield heading(question) if headed else ""
    yield from _lines(question, one)
    yield _breakdown(one)
    if one.step.sent:
        yield _bytes(one)


def search_parts(question: Question, found: Found, width: int = WIDTH) -> Iterator[RenderableType]:
    """The best as a table, and how they were found. width: columns; with few, reasons stand below the table."""
    yield heading(question)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", justify="right")
    table.add_column("mapping", min_width=24)
    for name in ("step s", "tokens/s", "MFU", "GB", "bubble", "exposed"):
        table.add_column(name, justify="right", no_wrap=True)
    below = []
    if width >= WIDE:
        table.add_column("why it loses")
    for place, (one, why) in enumerate(runners_up(found.best), 1):
        step = one.step
        table.add_row(
            str(place),
            short(one.mapping),
            f"{step.seconds:.4g}",
            f"{step.tokens_per_s:,.0f}",
            f"{step.mfu:.1%}",
            f"{one.fit.worst.total / GB:.1f}",
            f"{bubble_share(step):.1%}",
            f"{exposed_share(step):.1%}",
            *([escape(why or "")] if width >= WIDE else []),
        )
        if why and width < WIDE:
            below.append(escape(f"{place:2}  {why}"))
    yield table
    yield from below
    yield tried(found)


def tried(found: Found) -> str:
    """How many mappings were looked at, which were not worth a prediction and why, and how long that took."""
    pruned = "".join(f", {count:,} {reason}" for reason, count in found.pruned.items() if count)
    hurried = "" if found.complete else "; there was no time to rule out that some of these are faster"
    told = f"{found.tried:,} mappings tried in {found.seconds:.1f} s: {found.replayed:,} replayed{pruned}{hurried}"
    return escape(told)


def nothing_fits(question: Question, found: Found) -> str:
    """Why a search found nothing: the mapping that lacks least, and what would help."""
    near, cluster = found.nearest[0], question.cluster
    help_with = [f"it would with {' or '.join(change.what for change in near.changes)}"] if near.changes else []
    if found.gpus is not None:
        help_with.append(f"{question.shape.name} fits {found.gpus:,} of them")
    return (
        f"none of {found.tried:,} mappings of {question.shape.name} fits {cluster.gpus:,} {cluster.accelerator.name}; "
        f"nearest is {short(near.mapping)}: {near.fit}; "
        f"{'; '.join(help_with) or 'no change of one or two settings helps'}"
    )


def cluster_lines(cluster: Cluster) -> Iterator[str]:
    """What a machine can, in a few lines."""
    gpu = cluster.accelerator
    rates = ", ".join(
        f"{dtype} {rate * gpu.efficiency[dtype] / 1e9:,.1f} GFLOP/s at best" for dtype, rate in gpu.flops.items()
    )
    yield f"{gpu.name}: a rank has {rates}, memory at {gpu.memory_bytes_per_s * gpu.memory_reach / GB:.1f} GB/s"
    yield f"{cluster.gpus} ranks, {cluster.host_size} a host; a collective begins after {cluster.start_s * 1e6:.0f} us"
    for name, link in (("inside a host", cluster.inside), ("between hosts", cluster.between)):
        yield f"{name}: {link.name}, {link.rate / GB:.2f} GB/s, {link.latency_s * 1e6:.1f} us a hop"


def _billions(count: float) -> str:
    return f"{count / 1e9:.1f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"


def short(mapping: Mapping) -> str:
    """In few letters: without degrees of 1, mb for the micro-batch."""
    p = mapping.parallel
    sizes = {axis: getattr(p, axis) for axis in ("tp", "cp", "dp", "pp")}
    sizes |= {"vpp": mapping.virtual, "ep": p.ep, "etp": p.etp}
    told = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
    told += [mapping.pipeline] if mapping.pipeline else []
    told += [f"mb{mapping.micro_batch}", mapping.sharding]
    if mapping.recompute != "none":
        told.append(f"recompute-{mapping.recompute}")
    if mapping.overlap != "none":
        told.append(f"overlap-{mapping.overlap}")
    if mapping.dispatcher != "all_to_all":
        told.append(mapping.dispatcher)
    return " ".join(told)


def _lines(question: Question, one: Candidate) -> Iterator[RenderableType]:
    step, p, worst = one.step, one.mapping.parallel, one.fit.worst
    lines = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    lines.add_column()
    lines.add_column(overflow="fold")
    mapping = one.mapping
    schedule = f" ({mapping.schedule})" if p.pp > 1 else ""
    lines.add_row(
        "mapping",
        f"attention tp {p.tp}, cp {p.cp}, dp {p.dp}; experts etp {p.etp}, ep {p.ep}, edp {p.edp}; pipeline pp {p.pp}, "
        f"vpp {mapping.virtual}{schedule}; {mapping.micro_batches(question.global_batch)} micro-batches of "
        f"{mapping.micro_batch}; {mapping.sharding}, recompute {mapping.recompute}, overlap {mapping.overlap}"
        + (f", dispatcher {mapping.dispatcher}" if p.ep * p.etp > 1 else ""),
    )
    lines.add_row(
        "step",
        f"[bold]{step.seconds:.4g} s[/], {step.tokens_per_s:,.0f} tokens/s, MFU [bold]{step.mfu:.1%}[/]; bubble "
        f"{bubble_share(step):.1%}, exposed transfers {exposed_share(step):.1%}",
    )
    terms = ("weights", "gradients", "optimizer", "activations", "buffers")
    held = ", ".join(f"{term} {getattr(worst, term) / GB:.1f}" for term in terms)
    lines.add_row(
        "memory",
        f"{worst.total / GB:.1f} of {one.fit.available / GB:.1f} GB on the fullest rank, of pipeline position "
        f"{worst.position}: {held}",
    )
    if not one.fit:
        lines.add_row("", f"[bold red]does not fit[/]: {one.fit.missing / GB:.1f} GB too much")
        options = changes(question, one.mapping)
        for change in options:
            lines.add_row("", escape(f"would fit with {change.what}: {change.fit.worst.total / GB:.1f} GB"))
        if not options:
            lines.add_row("", "no single change makes it fit; without --mapping, all are tried")
    yield lines


def _breakdown(one: Candidate) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("where the time goes", min_width=24)
    table.add_column("s", justify="right")
    table.add_column("share", justify="right")
    parts = sorted(one.step.breakdown.items(), key=lambda item: (item[0] not in COMPUTED, -item[1]))
    for cause, seconds in parts:
        if seconds:
            told = "pipeline: waiting" if cause == "pipeline" else cause
            table.add_row(escape(told), f"{seconds:.4f}", f"{seconds / one.step.seconds:.1%}")
    return table


def _bytes(one: Candidate) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("sent by a rank in a step, GB", min_width=24)
    used = [link for link in LINKS if any(sent[link] for sent in one.step.sent.values())]
    for link in used:
        table.add_column(_LINK_NAMES[link], justify="right")
    for name, sent in one.step.sent.items():
        table.add_row(escape(name), *(f"{sent[link] / GB:.2f}" if sent[link] else "-" for link in used))
    return table
