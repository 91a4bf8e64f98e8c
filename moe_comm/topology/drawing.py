"""A parallel mapping as plain text: coordinates of each rank, its groups, and the groups that sum each gradient.

8 ranks
attention   tp 2 x cp 1 x dp 2 x pp 2
experts     etp 1 x ep 4 x edp 1 x pp 2

pipeline stage 0
rank    0  1  2  3
tp      0  1  0  1
dp      0  0  1  1
ep      0  1  2  3
...
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_comm.topology.parallel import ATTENTION_AXES, EXPERT_AXES, ParallelConfig
from moe_comm.topology.sharding import Sharding, Split

SMALL = 64
"""Largest world size that is drawn in full."""
COLUMNS = 16
"""Ranks per line."""
LISTED = 8
"""Largest number of ranks of a group that are listed one by one."""
WIDTH = 100

MEANINGS = {
    "tp": "split a layer's heads and columns, and the sequence between layers",
    "cp": "split a sequence",
    "dp": "process different sequences",
    "pp": "hold different layers",
    "etp": "split an expert",
    "ep": "hold different experts",
    "edp": "hold replicas of the same experts",
}
PARAMETERS = (
    ("split by tp", "attention, dense FFN, embedding, head", Sharding((1,), (Split(0, "tp"),))),
    ("replicated", "norms, router, shared expert", Sharding((1,))),
    ("experts", "split by ep and etp", Sharding((1, 1), (Split(0, "ep"), Split(1, "etp")), expert=True)),
)
"""Kinds of parameters: title, examples and sharding of each."""


def picture(config: ParallelConfig) -> str:
    """Return a plain-text drawing of the mapping, about 100 columns wide.

    For more than 64 ranks, only the first ranks of the first pipeline stage and the first groups are shown.
    """
    parts = [_title(config)]
    shown = range(config.pp if config.world <= SMALL else 1)
    parts += [_stage(config, stage) for stage in shown]
    if config.pp > len(shown):
        parts.append(f"... {config.pp - 1} more stages of the same form; stage s starts at rank s * {config.stage}")
    parts += [_groups(config), _gradients(config)]
    return "\n\n".join(parts) + "\n"


def _title(config: ParallelConfig) -> str:
    def product(grid: Sequence[str]) -> str:
        return " x ".join(f"{axis} {config.sizes[axis]}" for axis in grid)

    ranks = f"{config.world} rank" + "s" * (config.world > 1)
    return f"{ranks}\nattention   {product(ATTENTION_AXES)}\nexperts     {product(EXPERT_AXES)}"


def _stage(config: ParallelConfig, stage: int) -> str:
    """Draw one line per axis and one column per rank, in blocks of ``COLUMNS`` ranks."""
    first = stage * config.stage
    ranks = range(first, first + config.stage)
    shown = ranks if config.world <= SMALL else ranks[: 2 * COLUMNS]
    axes = [axis for axis in (*ATTENTION_AXES[:-1], *EXPERT_AXES[:-1]) if config.sizes[axis] > 1]
    width = len(str(config.world - 1)) + 2
    lines = [f"pipeline stage {stage}" if config.pp > 1 else "coordinates of each rank"]
    for start in range(0, len(shown), COLUMNS):
        block = shown[start : start + COLUMNS]
        places = [config.place(rank) for rank in block]
        lines += [""] * (start > 0)
        lines.append("rank  " + "".join(f"{rank:>{width}}" for rank in block))
        lines += [f"{axis:<6}" + "".join(f"{place[axis]:>{width}}" for place in places) for axis in axes]
    if len(shown) < len(ranks):
        lines.append(f"... {len(ranks) - len(shown)} more ranks in this stage")
    return "\n".join(lines)


def _groups(config: ParallelConfig) -> str:
    axes = [axis for axis in dict.fromkeys((*ATTENTION_AXES, *EXPERT_AXES)) if config.sizes[axis] > 1]
    if not axes:
        return "no groups: one rank holds everything"
    lines = ["groups: ranks that differ on one axis"]
    lines += [_listed(f"{axis:<5}{config.sizes[axis]:>6}  ", config.groups(axis)) for axis in axes]
    lines += ["", *(f"{axis:<5}{MEANINGS[axis]}" for axis in axes)]
    return "\n".join(lines)


def _gradients(config: ParallelConfig) -> str:
    lines = ["gradients are plain sums over"]
    for kind, what, sharding in PARAMETERS:
        over = " x ".join(sharding.sum_axes)
        groups = config.groups(*sharding.sum_axes)
        lines.append(f"{kind} ({what})")
        if len(groups[0]) == 1:
            lines.append(f"  {over}: no other rank holds the same part")
        else:
            lines.append(_listed(f"  {over}, {len(groups[0])} ranks: ", groups))
    if config.pp > 1:
        ends = [(pipeline[0], pipeline[-1]) for pipeline in config.groups("pp")]
        lines.append("tied embedding (replicated on the first and last stage)")
        lines.append(_listed("  summed over these two stages as well: ", ends))
    return "\n".join(lines)


def _listed(head: str, groups: Sequence[tuple[int, ...]]) -> str:
    """Append as many ``groups`` to ``head`` as fit on the line: 0 1 | 2 3 | ... 6 more"""
    text = head + _ranks(groups[0])
    for index, group in enumerate(groups[1:], 1):
        more = f" | ... {len(groups) - index} more"
        item = f" | {_ranks(group)}"
        if len(text) + len(item) + (len(more) if index + 1 < len(groups) else 0) > WIDTH:
            return text + more
        text += item
    return text


def _ranks(ranks: tuple[int, ...]) -> str:
    """Format a group as 0 1 2 3, and a long one as 0-63 or 0 8 16 24 ... 248."""
    if len(ranks) <= LISTED:
        return " ".join(map(str, ranks))
    if ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return " ".join(map(str, ranks[:4])) + f" ... {ranks[-1]}"
