"""Who makes a run slow: a rank, a link, a host's sending or receiving side; or nobody.

    own work of the ranks [S, W]          probes between hosts [H, H]        C4's reading (arXiv 2406.04594)
      . . # .   one column stands out       . . .    one cell: the link
      . . # .   of its pipeline stage       # # #    a row: the host's sending side
      . . # .                               . . .    a column: its receiving side

Ranks of a synchronous step all take as long as the slowest, so it is their own work, without waits, that is compared:
of ranks that do the same, which are those of one pipeline stage, and given the rows that came to each one's experts,
for a rank whose experts are popular is no slow computer. A rank or link is named if it stands out in size (``Limits``)
and beyond the noise among the others; how sure that is, is the share of resampled sets of steps (bootstrap) that name
it too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from moe_comm.observe.window import PARTS, Floats, Window

RESAMPLES = 200
_TINY = 1e-9


@dataclass(frozen=True)
class Limits:
    """What is too much.

    rank: a rank's own work over the median of its stage. link: a probe over the median of all. outlier: how many times
    the spread among the others. least_s: seconds a step that are worth a word. sure: least share of resamples.
    steps: fewest to judge by.
    """

    rank: float = 1.25
    link: float = 2.0
    outlier: float = 4.0
    least_s: float = 0.002
    sure: float = 0.8
    steps: int = 5


@dataclass(frozen=True)
class Finding:
    """kind: "slow rank", "slow link", "slow sender", "slow receiver", "slow host" (sends and receives slowly).

    ranks: the culprit, for a link both ends. sure: 0 to 1. factor: how many times slower than its like. lost_s: seconds
    of each step. why: in words.
    """

    kind: str
    ranks: tuple[int, ...]
    sure: float
    factor: float
    lost_s: float
    why: str


def diagnose(window: Window, limits: Limits | None = None) -> list[Finding]:
    """What is wrong in these steps, the dearest first; empty if nothing stands out."""
    limits = limits or Limits()
    if len(window.steps) < limits.steps:
        return []
    found = [*_slow_ranks(window, limits), *_slow_links(window, limits)]
    return sorted((one for one in found if one.sure >= limits.sure), key=lambda one: -one.lost_s)


def _slow_ranks(window: Window, limits: Limits) -> list[Finding]:
    """At most one a pipeline stage and kind of work."""
    found = []
    for part in PARTS:
        for stage in sorted(set(window.stage)):
            ranks = np.array([column for column, at in enumerate(window.stage) if at == stage])
            if len(ranks) < 2:
                continue
            own_SW, rows_SW = window.parts[part][:, ranks], window.rows_SW[:, ranks]
            whole = (np.isfinite(own_SW) & np.isfinite(rows_SW)).all(1)
            own_SW = own_SW[whole]
            if part == "compute":
                own_SW = _without_routing(own_SW, rows_SW[whole])
            if len(own_SW) < limits.steps:
                continue
            named = _outstanding(own_SW, limits)
            if named is None:
                continue
            again = _resampled(own_SW, limits, named)
            usual = np.median(np.delete(own_SW, named, 1))
            own = np.median(own_SW[:, named])
            lost = float(own - usual)
            factor = float(own / max(usual, _TINY))
            column = int(ranks[named])
            rank = window.ranks[column]
            why = (
                f"rank {rank} on {window.hosts[column]} spends {own * 1e3:.1f} ms of a step on {part}, "
                f"the others of its stage {usual * 1e3:.1f} ms"
            )
            found.append(Finding("slow rank", (rank,), again, factor, lost, why))
    return found


def _without_routing(own_SW: Floats, rows_SW: Floats) -> Floats:
    """Seconds as they would be with the mean number of rows on every rank.

    The price of a row is the slope of a rank's seconds over its own rows from step to step (the median over ranks), so
    that what a rank does slower than others in every step is not taken for the price of its rows.
    """
    if len(own_SW) < 5:
        return own_SW
    spread_W = rows_SW.std(0)
    if (spread_W <= 0.02 * np.maximum(rows_SW.mean(0), 1)).any():
        return own_SW  # hardly any difference to learn a price from
    rows = rows_SW - rows_SW.mean(0)
    slope_W = (rows * (own_SW - own_SW.mean(0))).sum(0) / (rows**2).sum(0)
    price = float(np.clip(np.median(slope_W), 0, None))
    mean = rows_SW.mean(1, keepdims=True)
    return np.asarray(own_SW - price * (rows_SW - mean), dtype=np.float64)


def _outstanding(own_SW: Floats, limits: Limits) -> int | None:
    """The column that is larger than all others beyond the limits, by medians over the steps."""
    typical_W = np.median(own_SW, 0)
    first = int(typical_W.argmax())
    others = np.delete(typical_W, first)
    usual = float(np.median(others))
    excess = typical_W[first] - usual
    if excess < limits.least_s or typical_W[first] < limits.rank * max(usual, _TINY):
        return None
    # The spread among the others says how unlike healthy ranks are, that of a step how sure a median is.
    between = float(np.median(np.abs(others - usual)))
    noise_W = 1.4826 * np.median(np.abs(own_SW - typical_W), 0) / np.sqrt(len(own_SW))
    if excess < limits.outlier * max(1.4826 * between, float(np.median(noise_W)), _TINY):
        return None
    second = float(others.max())
    return first if typical_W[first] - second >= 0.5 * excess else None


def _resampled(own_SW: Floats, limits: Limits, named: int) -> float:
    """The share of sets of as many steps, drawn with replacement, in which ``named`` is named."""
    generator = np.random.default_rng(0)
    draws = generator.integers(len(own_SW), size=(RESAMPLES, len(own_SW)))
    return sum(_outstanding(own_SW[draw], limits) == named for draw in draws) / RESAMPLES


def _slow_links(window: Window, limits: Limits) -> list[Finding]:
    ends, links_SWW = window.links.matrices()
    if not len(links_SWW) or len(ends) < 2:
        return []
    first = _hot(links_SWW, limits)
    if first is None:
        return []
    generator = np.random.default_rng(0)
    draws = generator.integers(len(links_SWW), size=(RESAMPLES, len(links_SWW)))
    votes = Counter(_hot(links_SWW[draw], limits) for draw in draws)
    kind, source, target = first
    seconds = _typical(links_SWW)
    rows = seconds[:, target] if source < 0 else seconds[source]
    slow = float(seconds[source, target] if kind == "slow link" else np.nanmedian(rows))
    usual = _usual(seconds)
    host_of = dict(zip(window.ranks, window.hosts, strict=True))
    name = [f"{host_of[rank]} (rank {rank})" for rank in ends]
    words = {
        "slow link": f"a probe from {name[source]} to {name[target]}",
        "slow sender": f"a probe from {name[source]} to any other host",
        "slow receiver": f"a probe to {name[target]} from any other host",
        "slow host": f"a probe from or to {name[source]}",
    }
    ranks = tuple(rank for rank in (source, target) if rank >= 0)
    why = f"{words[kind]} takes {slow * 1e3:.1f} ms, others {usual * 1e3:.1f} ms"
    share = votes[first] / RESAMPLES
    factor, lost = slow / max(usual, _TINY), slow - usual
    return [Finding(kind, tuple(ends[rank] for rank in ranks), share, factor, lost, why)]


def _hot(links_SWW: Floats, limits: Limits) -> tuple[str, int, int] | None:
    """The kind of what is slow, with its sending and receiving end; -1: all of them."""
    seconds_WW = _typical(links_SWW)
    off = ~np.eye(len(seconds_WW), dtype=bool) & np.isfinite(seconds_WW)
    if not off.any():
        return None
    usual = _usual(seconds_WW)
    hot_WW = off & (seconds_WW > limits.link * max(usual, _TINY)) & (seconds_WW - usual > limits.least_s)
    number = int(hot_WW.sum())
    if not number:
        return None
    size = len(seconds_WW)
    rows, columns = hot_WW.sum(1), hot_WW.sum(0)
    whole = size - 1
    if size > 2 and rows.max() == whole:
        host = int(rows.argmax())
        return ("slow host", host, -1) if columns[host] == whole else ("slow sender", host, -1)
    if size > 2 and columns.max() == whole:
        return "slow receiver", -1, int(columns.argmax())
    source, target = np.unravel_index(int(np.where(hot_WW, seconds_WW, -1).argmax()), seconds_WW.shape)
    return "slow link", int(source), int(target)


def _typical(links_SWW: Floats) -> Floats:
    """The median over the steps, NaN for what no step knows."""
    known_WW = np.isfinite(links_SWW).any(0)
    return np.where(known_WW, np.nanmedian(np.where(known_WW, links_SWW, 0.0), 0), np.nan)


def _usual(seconds_WW: Floats) -> float:
    """What a probe takes where nothing is wrong: the lower quartile, since one host's links are up to two thirds of all
    among three hosts; of two ends the faster direction."""
    off = seconds_WW[~np.eye(len(seconds_WW), dtype=bool)]
    off = off[np.isfinite(off)]
    return float(np.quantile(off, 0.25) if len(seconds_WW) > 2 else off.min())
