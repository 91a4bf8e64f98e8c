"""What the placement of experts cost a run, and what other settings would have cost, from its recorded loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.shape import MASTER, ModelShape
from moe_comm.observe.records import (
    ATTEMPTS,
    LOADS,
    METRICS,
    PLACEMENTS,
    RESOLVED,
    SPANS,
    Attempt,
    LoadLine,
    PlacementLine,
    read_lines,
)
from moe_comm.runtime.untrusted import parse_toml, read_bounded, table
from moe_comm.topology.assignment import Loads
from moe_comm.topology.balance import Balance
from moe_comm.topology.load_window import LoadWindow
from moe_comm.topology.placement import Placement
from moe_comm.topology.rebalance import (
    Decision,
    DecisionSettings,
    busiest_rows,
    over_mean,
    rebalance,
    replayed_ratio,
)
from moe_plan.model.files import MOST
from moe_plan.model.fixed_memory import Optimizer, moved_bytes
from moe_plan.model.lending import LendingReplay, replay_lending
from moe_plan.whatif.run_spans import EXPERTS, WAITS
from moe_plan.whatif.run_trace import read_run_trace

CONFIG_BYTES = 1 << 20
"""Limit of the size of a configuration."""
BYTES = ("bytes_in_step", "bytes_before_step")
"""Names of ``PlacementStudy.lending_bytes`` in JSON."""


@dataclass(frozen=True)
class PlacementReplay:
    """The result of ``replay``, for the steps with recorded loads.

    Attributes:
        steps: the steps.
        ratios: rows of the busiest rank over the mean, with the placement of the step.
        ratio: the same over all steps.
        decisions: (step, decision) of all decisions.
        placement: the last one.
        saved_rows: rows of the busiest rank that the steps saved against the first placement.
    """

    steps: tuple[int, ...]
    ratios: tuple[float, ...]
    ratio: float
    decisions: tuple[tuple[int, Decision], ...]
    placement: Placement
    saved_rows: int

    @property
    def switches(self) -> int:
        """Number of decisions that changed the placement."""
        return sum(decision.placement is not None for _, decision in self.decisions)


def replay(loads: Mapping[int, Loads], first: Placement, settings: DecisionSettings) -> PlacementReplay:
    """Return what the decisions of ``settings`` would have done in a run that began with ``first``.

    Args:
        loads: rows of each expert by step, in order. Steps can be missing; a decision is made after the first recorded
            step at or after its step.
    """
    if not loads:
        raise ConfigError("a replay needs the loads of at least one step")
    placement, window = first, LoadWindow(settings.window)
    ratios, decisions, busiest, saved, rows = [], [], 0, 0, 0
    due = settings.every
    for step, loads_E in loads.items():
        most = busiest_rows(loads_E, placement)
        ratios.append(over_mean(most, sum(loads_E), first.world))
        saved += busiest_rows(loads_E, first) - most
        busiest, rows = busiest + most, rows + sum(loads_E)
        window.add(loads_E)
        if step >= due:
            due = (step // settings.every + 1) * settings.every
            decision = window.decide(placement, settings)
            placement = decision.placement or placement
            decisions.append((step, decision))
    ratio = over_mean(busiest, rows, first.world)
    return PlacementReplay(tuple(loads), tuple(ratios), ratio, tuple(decisions), placement, saved)


def placed_ratio(loads: Iterable[Loads], placed: Iterable[Placement]) -> float:
    """Return the rows of the busiest rank over the mean for steps with the placement of each."""
    pairs = list(zip(loads, placed, strict=True))
    rows = sum(sum(loads_E) for loads_E, _ in pairs)
    busiest = sum(busiest_rows(loads_E, placement) for loads_E, placement in pairs)
    return over_mean(busiest, rows, pairs[0][1].world if pairs else 1)


def best_ratio(loads: Mapping[int, Loads], first: Placement) -> float:
    """Return the ratio if each step had the placement for its own loads: a bound for all forecasts."""
    return placed_ratio(loads.values(), [rebalance(loads_E, first) for loads_E in loads.values()])


@dataclass(frozen=True)
class LayerPlacement:
    """The placement of one layer's experts in a run.

    Attributes:
        layer: name of the layer.
        steps: steps with recorded loads.
        fixed: rows of the busiest rank over the mean, if the experts had kept their first placement.
        realised: the same with the placements of the run; None for another number of ranks than the run's.
        best: the same if each step had the best placement for its own loads that was found.
        hottest: rows of the busiest expert over the mean of a rank. No placement has a lower ratio.
        decisions: the recorded decisions; for each switch also the realised ratio until the next one.
        replays: the result of each setting.
        lending: the result of each limit of rows.
    """

    layer: str
    steps: tuple[int, ...]
    fixed: float
    realised: float | None
    best: float
    hottest: float
    decisions: tuple[tuple[PlacementLine, float], ...]
    replays: tuple[PlacementReplay, ...]
    lending: tuple[LendingReplay, ...] = ()


@dataclass(frozen=True)
class PlacementStudy:
    """Placements of a run, see ``study``.

    Attributes:
        costs: whether seconds are measured; without them, switches cost nothing.
        limits: limits of the rows of a rank over the mean, with lending.
        expert_bytes: bytes of the weights of an expert, and of its gradient. None: unknown.
    """

    run: str
    ranks: int
    costs: bool
    settings: tuple[DecisionSettings, ...]
    layers: tuple[LayerPlacement, ...]
    limits: tuple[float, ...] = ()
    expert_bytes: tuple[int, int] | None = None

    def lending_bytes(self, lent: LendingReplay) -> tuple[float, float]:
        """Return the bytes that all ranks send for copies, in a step and before it, if weights are sent.

        In a step, copies that are not resident receive weights in forward and backward, and all return a gradient.
        """
        weights, gradient = self.expert_bytes or (0, 0)
        return lent.copies * gradient + (lent.copies - lent.resident) * 2 * weights, lent.residents * weights

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain numbers and lists."""
        layers = []
        for one in self.layers:
            values: dict[str, Any] = {
                name: getattr(one, name) for name in ("layer", "steps", "fixed", "realised", "best", "hottest")
            }
            values["decisions"] = [vars(line) | {"realised": ratio} for line, ratio in one.decisions]
            values["replays"] = [
                {
                    "ratio": result.ratio,
                    "switches": result.switches,
                    "saved_rows": result.saved_rows,
                    "decisions": [
                        {"step": step, "switched": decision.placement is not None, "reason": decision.reason}
                        for step, decision in result.decisions
                    ],
                }
                for result in one.replays
            ]
            values["lending"] = [
                {"rows": limit, **asdict(result)}
                | (dict(zip(BYTES, self.lending_bytes(result), strict=True)) if self.expert_bytes else {})
                for limit, result in zip(self.limits, one.lending, strict=True)
            ]
            layers.append(values)
        settings = [asdict(one) for one in self.settings]
        head = {"run": self.run, "ranks": self.ranks, "costs": self.costs, "expert_bytes": self.expert_bytes}
        return {**head, "settings": settings, "layers": layers}


def read_loads(run: Path) -> dict[str, dict[int, Loads]]:
    """Return the recorded loads of a run by layer and step.

    Raises:
        ConfigError: ``run`` is not a run folder, or has no loads.
        CorruptFile: the file of loads is damaged.
    """
    if not any((run / name).exists() for name in (METRICS, LOADS, ATTEMPTS)):
        raise ConfigError(f"{run} is not a run folder: it has none of {METRICS}, {LOADS}, {ATTEMPTS}")
    loads: dict[str, dict[int, Loads]] = {}
    for line in read_lines(run / LOADS, LoadLine):
        loads.setdefault(line.layer, {})[line.step] = line.load
    if not loads:
        raise ConfigError(f"{run} has no expert loads ({LOADS}); train an MoE model with observe.loads=1")
    return {layer: dict(sorted(by_step.items())) for layer, by_step in loads.items()}


def study(
    run: Path, settings: Sequence[DecisionSettings], ranks: int | None = None, limits: Sequence[float] = ()
) -> PlacementStudy:
    """Return the placements of a run and the replays of other settings.

    Seconds of rows and of moves come from the spans of the run, if it has them. Real experts are the first
    ones in a layer's loads; zero-computation experts have no rows.

    Args:
        run: folder of the run.
        settings: settings to replay; their seconds are replaced by the measured ones.
        ranks: number of expert-parallel ranks; None: that of the run.
        limits: rows of a rank over the mean up to which to lend experts, on one host. Without the widths of experts,
            a copy costs nothing.

    Raises:
        ConfigError: ``run`` is no run folder, has no loads, or has one expert-parallel rank and ``ranks`` is not given.
        CorruptFile: a file of the run is damaged.
    """
    loads = read_loads(run)
    recorded: dict[str, list[PlacementLine]] = {}
    for line in read_lines(run / PLACEMENTS, PlacementLine):
        recorded.setdefault(line.layer, []).append(line)
    mapping = max(read_lines(run / ATTEMPTS, Attempt), key=lambda one: one.number, default=None)
    own = next((lines[0].world for lines in recorded.values()), mapping.mapping.get("ep", 1) if mapping else 1)
    world = ranks or own
    if world < 2:
        raise ConfigError(
            f"every rank of {run} held all experts (ep 1); pass the number of expert-parallel ranks to place them on"
        )
    seconds = _seconds(run, loads)
    if seconds is not None:
        per_row, to_move = seconds
        settings = [replace(one, seconds_per_row=per_row, seconds_to_move=to_move) for one in settings]
    experts, config = real_experts(run), _config(run)
    elements, size = _expert_elements(config), 2 if table(config, "model").get("dtype") == "bfloat16" else 4
    flops = 6 * elements / seconds[0] if seconds is not None and elements and seconds[0] else None
    lendings = []
    for limit in limits:
        measured = None if flops is None else min(max(flops, 1e6), 1e18)
        balance = Balance(rows=limit, worth=None if elements else 0, flops=measured)
        lendings.append((balance, balance.costs(elements or 0, size, 1)))
    layers = []
    for layer, by_step in loads.items():
        real = {step: load[:experts] for step, load in by_step.items()}
        decisions = recorded.get(layer, []) if world == own else None
        lending = tuple(replay_lending(list(real.values()), world, *one) for one in lendings)
        layers.append(replace(_layer(layer, real, world, decisions, settings), lending=lending))
    expert_bytes = None if elements is None else (elements * size, elements * MASTER)
    head = (str(run), world, seconds is not None, tuple(settings))
    return PlacementStudy(*head, tuple(layers), tuple(limits), expert_bytes)


def _layer(
    layer: str,
    loads: dict[int, Loads],
    world: int,
    lines: Sequence[PlacementLine] | None,
    settings: Sequence[DecisionSettings],
) -> LayerPlacement:
    """lines: the recorded decisions; None if they are for another number of ranks."""
    experts = len(next(iter(loads.values())))
    first = Placement.contiguous(experts, world)
    placed, current = [], first
    waiting = sorted(lines or (), key=lambda line: line.step)
    switches = [line for line in waiting if line.switched]
    for step in loads:
        while switches and switches[0].step < step:
            current = switches.pop(0).placement
        placed.append(current)
    decisions = []
    ends = [*(line.step for line in waiting[1:]), max(loads)]
    for line, end in zip(waiting, ends, strict=False):
        after = [load for step, load in loads.items() if line.step < step <= end]
        decisions.append((line, replayed_ratio(after, line.placement)))
    hottest = over_mean(sum(map(max, loads.values())), sum(map(sum, loads.values())), world)
    return LayerPlacement(
        layer=layer,
        steps=tuple(loads),
        fixed=replayed_ratio(list(loads.values()), first),
        realised=None if lines is None else placed_ratio(loads.values(), placed),
        best=best_ratio(loads, first),
        hottest=max(hottest, 1.0),
        decisions=tuple(decisions),
        replays=tuple(replay(loads, first, one) for one in settings),
    )


def _config(run: Path) -> dict[str, Any]:
    try:
        return parse_toml(read_bounded(run / RESOLVED, CONFIG_BYTES))
    except (OSError, ValueError):
        return {}


def real_experts(run: Path) -> int | None:
    """Return the number of real experts of a layer by the run's configuration; None if it is unknown."""
    return _count(table(_config(run), "model").get("experts"))


def _count(value: object) -> int | None:
    """Return ``value`` if it is a number of experts or a width that a model can have."""
    valid = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST
    return value if valid else None  # type: ignore[return-value]


def _seconds(run: Path, loads: dict[str, dict[int, Loads]]) -> tuple[float, float] | None:
    """Return the seconds of a row and of moving one expert; None without spans."""
    if not any((run / SPANS).glob("rank-*.jsonl")):
        return None
    table = (trace := read_run_trace(run).graph).table
    names = np.array(table.names)[table.name_N]
    steps = set(table.steps.tolist())
    rows = sum(sum(load) for by_step in loads.values() for step, load in by_step.items() if step in steps)
    computing = np.isin(names, EXPERTS)
    moving = np.array([name.startswith(WAITS[:2]) for name in names]) & (table.nbytes_N > 0)
    moved = _moved_bytes(_config(run))
    if not rows or not computing.any() or not moving.any() or moved is None:
        return None
    rate = table.nbytes_N[moving].sum() / trace.value_N[moving].sum()
    return float(trace.value_N[computing].sum()) / rows, float(moved / rate)


def _moved_bytes(config: Mapping[str, Any]) -> int | None:
    """Return the bytes of a moved expert; None if the configuration does not have the widths of experts."""
    elements, optimizer = _expert_elements(config), table(config, "optimizer")
    kind = optimizer.get("kind", "adamw")
    if elements is None or kind not in get_args(Optimizer):
        return None
    return elements * moved_bytes(kind, bool(optimizer.get("momentum")))


def _expert_elements(config: Mapping[str, Any]) -> int | None:
    """Return the elements of an expert; None if the configuration does not have the widths."""
    model = table(config, "model")
    hidden, ffn = _count(model.get("hidden")), _count(model.get("ffn"))
    if hidden is None or ffn is None or model.get("pretrained"):
        return None
    # The widths of experts are all that the count of their elements depends on.
    shape = ModelShape("run", 1, hidden, heads=1, kv_heads=1, head_dim=1, vocab=1, experts=1, top_k=1, ffn=ffn)
    return shape.parameters("moe")["experts"]
