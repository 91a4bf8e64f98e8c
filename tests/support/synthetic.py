"""Write the folder of a synthetic run: any number of ranks and steps, with stragglers, slow links and faults.

Used to test reports and diagnosis: the correct result is known, and 1,000 ranks take seconds. Steps are synchronous:
each rank computes, and then waits for the slowest rank.

    rank 0  ██████░░░░░░▒▒      █ compute    ░ waits for rank 1    ▒ moves bytes
    rank 1  ████████████▒▒
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_comm.errors import ConfigError
from moe_comm.observe.faults import Injection
from moe_comm.observe.records import (
    ATTEMPTS,
    FAULTS,
    INJECTED,
    LOADS,
    METRICS,
    PLACEMENTS,
    RANKS,
    SPANS,
    Attempt,
    FaultRecord,
    LoadLine,
    PlacementLine,
    append,
    to_json,
)
from moe_comm.topology import ParallelConfig
from moe_comm.topology.placement import Placement
from moe_comm.topology.rebalance import DecisionSettings, decide
from moe_comm.train.offload.resident import OffloadReport
from moe_comm.train.parallel.parameters import WeightsReport
from tests.support.synthetic_spans import Step, spans_of

Floats = NDArray[np.float64]

BEGAN_S = 1_700_000_000.0
START_S, MOST_LINES, MOST_PEERS, LAST_STEP = 12.0, 120_000, 64, 2**31 - 1
PROBE_S, PROBE_EVERY = 0.002, 10


@dataclass(frozen=True)
class Straggler:
    """A rank whose compute is ``factor`` times longer from step ``first`` to step ``last``, inclusive."""

    rank: int
    factor: float = 1.5
    first: int = 1
    last: int = LAST_STEP


@dataclass(frozen=True)
class SlowLink:
    """A link between the hosts of two ranks that is ``factor`` times slower. -1: all ranks."""

    source: int
    destination: int
    factor: float = 4.0
    first: int = 1
    last: int = LAST_STEP


@dataclass(frozen=True)
class SyntheticFault:
    """A fault detected in ``step``. With ``action`` "restart", ranks restart ``down_s`` later, ``lost`` steps back."""

    step: int
    kind: str = "died"
    ranks: tuple[int, ...] = (0,)
    action: str = "restart"
    lost: int = 5
    down_s: float = 20.0
    noticed_s: float = 0.4
    injected: bool = False


@dataclass(frozen=True)
class SyntheticRun:
    """Settings of a synthetic run.

    Args:
        ep: expert-parallel size. None: the greatest common divisor of the ranks of a host and of a stage.
        step_s: seconds of compute per step.
        noise: relative spread of the compute time of each rank.
        rank_every: steps between the lines of a rank. 0: about 120,000 lines in total.
        checkpoint_every: steps between checkpoints. 0: none.
        span_steps: steps whose spans are written.
        offloads: metrics contain transfers of offloaded state and activations, and work of lengths.
    """

    ranks: int = 8
    steps: int = 100
    ranks_per_host: int = 8
    layers: int = 4
    experts: int = 16
    top_k: int = 2
    tokens: int = 8192
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int | None = None
    step_s: float = 1.0
    noise: float = 0.01
    rank_every: int = 0
    load_every: int = 10
    checkpoint_every: int = 25
    stragglers: tuple[Straggler, ...] = ()
    slow_links: tuple[SlowLink, ...] = ()
    faults: tuple[SyntheticFault, ...] = ()
    span_steps: tuple[int, ...] = ()
    offloads: bool = False
    seed: int = 0

    def mapping(self) -> ParallelConfig:
        """Return the mapping. Raises ``ConfigError`` if the degrees do not match the number of ranks."""
        stage = self.ranks // self.pp
        ep = self.ep or math.gcd(stage, self.ranks_per_host)
        return ParallelConfig.of(self.ranks, tp=self.tp, cp=self.cp, pp=self.pp, ep=ep)

    def host(self, rank: int) -> str:
        return f"host-{rank // self.ranks_per_host:03d}"


@dataclass
class _Timeline:
    done: list[Step] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    faults: list[FaultRecord] = field(default_factory=list)


def write_run(folder: Path, run: SyntheticRun) -> Path:
    """Write ``run`` into ``folder``, a new or empty one, and return it.

    Raises:
        ConfigError: the degrees do not match the number of ranks, or the folder is not empty.
    """
    mapping = run.mapping()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; pass a new folder")
    random = np.random.default_rng(run.seed)
    timeline = _simulate(run, mapping, random)
    for attempt in timeline.attempts:
        append(folder / ATTEMPTS, attempt)
    for fault in timeline.faults:
        append(folder / FAULTS, fault)
    for planned in run.faults:
        if planned.injected:
            record = next(one for one in timeline.faults if one.step == planned.step and one.kind == planned.kind)
            at_s = record.time_s - planned.noticed_s
            for rank in planned.ranks:
                key = f"{planned.kind}-{planned.step}-{rank}"
                append(folder / INJECTED, Injection(at_s, key, planned.kind, rank, planned.step, record.attempt, key))
    loads = _write_loads(folder, run, random)
    _write_placements(folder, mapping.ep, loads)
    _write_metrics(folder, run, timeline, loads, random)
    _write_ranks(folder, run, mapping, timeline, random)
    _write_spans(folder, run, mapping, timeline)
    return folder


def _simulate(run: SyntheticRun, mapping: ParallelConfig, random: np.random.Generator) -> _Timeline:
    """Return all steps in the order of execution, including lost and repeated steps."""
    timeline, now, step, number = _Timeline(), BEGAN_S, 1, 0
    pending_faults = sorted(run.faults, key=lambda fault: fault.step)
    hosts = [run.host(rank) for rank in range(run.ranks)]
    degrees = {name: int(size) for name, size in mapping.sizes.items()}

    def attempt(source: str, lost: int = 0) -> None:
        nonlocal now, number
        lost_steps = timeline.done[len(timeline.done) - lost :]
        last_s = timeline.done[-1].begin_s + timeline.done[-1].total_s if timeline.done else math.nan
        lost_s = sum(one.total_s for one in lost_steps)
        timeline.attempts.append(
            Attempt(number, run.ranks, now, now + START_S, step, source, degrees, hosts, last_s, lost, lost_s)
        )
        now += START_S
        number += 1

    attempt("fresh")
    while step <= run.steps:
        while pending_faults and pending_faults[0].step == step:
            fault = pending_faults.pop(0)
            now += fault.noticed_s
            timeline.faults.append(
                FaultRecord(
                    now, step, fault.kind, list(fault.ranks), fault.action, "made up", fault.noticed_s, number - 1
                )
            )
            if fault.action == "restart":
                now += fault.down_s
                lost = min(fault.lost, step - 1)
                step -= lost
                attempt("checkpoint", lost)
        done = _step(run, step, now, random)
        timeline.done.append(done)
        now += done.total_s
        step += 1
    return timeline


def _step(run: SyntheticRun, step: int, begin_s: float, random: np.random.Generator) -> Step:
    compute_R = run.step_s * (1 + run.noise * random.standard_normal(run.ranks)).clip(0.5)
    for slow in run.stragglers:
        if slow.first <= step <= slow.last:
            compute_R[slow.rank] *= slow.factor
    worst = max([one.factor for one in run.slow_links if one.first <= step <= one.last], default=1.0)
    data_R = run.step_s * 0.01 * random.random(run.ranks)
    saving = run.checkpoint_every and step % run.checkpoint_every == 0
    checkpoint_R = run.step_s * (0.2 if saving else 0.0) * (1 + random.random(run.ranks))
    own_R = compute_R + data_R + checkpoint_R
    moving_s = 0.15 * run.step_s * worst if run.ranks > 1 else 0.0
    loop_s = 0.005 * run.step_s
    total_s = float(own_R.max()) + moving_s + loop_s
    parts = {"compute": compute_R, "data": data_R, "checkpoint": checkpoint_R}
    return Step(step, begin_s, total_s, parts | {"communication": total_s - own_R - loop_s})


def _write_loads(folder: Path, run: SyntheticRun, random: np.random.Generator) -> dict[int, NDArray[np.int64]]:
    """Return drifting loads by step, [layers, experts], with one unused expert in the last layer."""
    logits_LE = random.standard_normal((run.layers, run.experts))
    loads = {}
    slots = run.tokens * run.top_k
    with (folder / LOADS).open("w", encoding="utf-8") as file:
        for step in range(1, run.steps + 1):
            logits_LE = 0.98 * logits_LE + 0.1 * random.standard_normal(logits_LE.shape)
            if step != 1 and step % run.load_every:
                continue
            share_LE = np.exp(logits_LE)
            if run.experts > 1:
                share_LE[-1, -1] = 0
            load_LE = np.floor(slots * share_LE / share_LE.sum(1, keepdims=True)).astype(np.int64)
            loads[step] = load_LE
            for layer, load_E in enumerate(load_LE):
                file.write(to_json(LoadLine(step, f"layers.{layer}.moe", load_E.tolist())) + "\n")
    return loads


def _write_placements(folder: Path, ep: int, loads: dict[int, NDArray[np.int64]]) -> None:
    """Write the decision of every layer after each step with loads, without the cost of switches."""
    for layer in range(len(next(iter(loads.values())))) if ep > 1 else ():
        current = Placement.contiguous(len(next(iter(loads.values()))[layer]), ep)
        for step, load_LE in loads.items():
            window = [load_LE[layer].tolist()]
            decision = decide(window, current, DecisionSettings(every=10, seconds_per_row=1e-6))
            append(folder / PLACEMENTS, PlacementLine.of(step, f"layers.{layer}.moe", decision, current))
            current = decision.placement or current


def _write_metrics(
    folder: Path,
    run: SyntheticRun,
    timeline: _Timeline,
    loads: dict[int, NDArray[np.int64]],
    random: np.random.Generator,
) -> None:
    last = {done.step: done for done in timeline.done}
    load: dict[str, Any] = {}
    with (folder / METRICS).open("w", encoding="utf-8") as file:
        for step, done in sorted(last.items()):
            if step in loads:
                load = _load_values(loads[step])
            times = {name: float(part[0]) for name, part in done.parts.items()} | {"total": done.total_s}
            values = {
                "step": step,
                "loss": 2.0 + 7.0 * math.exp(-3 * step / run.steps) + 0.03 * random.standard_normal(),
                "lr": 3e-3 * min(step / 20, 1),
                "grad_norm": 1.0 + 2.0 / step + 0.1 * random.random(),
                "tokens": run.tokens,
                "times": times,
                "memory_bytes": 4 << 30,
                "mfu": 0.45 * run.step_s / done.total_s,
                "skipped": "",
                "stop": "",
                "loop_s": done.total_s - sum(part[0] for part in done.parts.values()),
                "load": load,
                "tokens_per_s": run.tokens / done.total_s,
            }
            if run.offloads:
                read = int(2e8 * random.random())
                report = OffloadReport(1 << 30, 1 << 28, 1 << 28, read, read, update_s=0.3, waited_s=0.2, busy_s=0.25)
                values["lengths"] = {"static": [1.5, 0.5], "balanced": [1.0, 1.0]}
                values |= {"offload": asdict(report), "activations": asdict(report)}
                values["weights"] = asdict(WeightsReport(1 << 30, read, read // 2))
            file.write(to_json(values) + "\n")


def _load_values(load_LE: NDArray[np.int64]) -> dict[str, Any]:
    mean_L = load_LE.mean(1)
    share_LE = load_LE / load_LE.sum(1, keepdims=True)
    entropy_L = -(share_LE * np.log(np.where(share_LE > 0, share_LE, 1))).sum(1)
    dead_L = (load_LE == 0).sum(1)
    values = {
        "imbalance": load_LE.max(1) / mean_L,
        "least": load_LE.min(1) / mean_L,
        "mean": mean_L,
        "dead": dead_L,
        "dead_share": dead_L / load_LE.shape[1],
        "diversity": np.exp(entropy_L) / load_LE.shape[1],
        "dropped": np.zeros(len(load_LE)),
        "balance": np.full(len(load_LE), 2.0),
    }
    return {"layers": list(range(len(load_LE)))} | {name: one.tolist() for name, one in values.items()}


def _write_ranks(
    folder: Path, run: SyntheticRun, mapping: ParallelConfig, timeline: _Timeline, random: np.random.Generator
) -> None:
    every = run.rank_every or max(1, math.ceil(run.ranks * run.steps / MOST_LINES))
    lines: list[list[str]] = [[] for _ in range(run.ranks)]
    peers = [_peers(run, mapping, rank) for rank in range(run.ranks)]
    hosts = [json.dumps(run.host(rank)) for rank in range(run.ranks)]
    base_R = (3 << 30) + (random.random(run.ranks) * (1 << 30)).astype(np.int64)
    written = 0
    for done in timeline.done:
        saves = run.checkpoint_every and done.step % run.checkpoint_every == 0
        if done.step != 1 and done.step % every and not saves:
            continue
        probes = written % PROBE_EVERY == 0
        written += 1
        parts = {name: part.round(6).tolist() for name, part in done.parts.items()}
        for rank, rows in enumerate(lines):
            moving = parts["communication"][rank]
            links = _probes(run, rank, done.step) if probes and rank % run.ranks_per_host == 0 else {}
            # Formatted directly: a dataclass and an encoder would take half a minute for 100,000 lines.
            rows.append(
                f'{{"step":{done.step},"rank":{rank},"host":{hosts[rank]},"begin_s":{done.begin_s:.6f},'
                f'"total":{done.total_s:.6f},"compute":{parts["compute"][rank]},"communication":{moving},'
                f'"data":{parts["data"][rank]},"checkpoint":{parts["checkpoint"][rank]},'
                f'"memory_bytes":{base_R[rank] + min(done.step, 50) * (8 << 20)},'
                f'"waits":{{"dispatch":{moving * 0.4:.6f},"combine":{moving * 0.3:.6f},'
                f'"collective":{moving * 0.3:.6f}}},{peers[rank]},'
                f'"rows":{run.tokens * run.top_k * run.layers // run.ranks},"links":{json.dumps(links)}}}\n'
            )
    (folder / RANKS).mkdir()
    for rank, rows in enumerate(lines):
        (folder / RANKS / f"rank-{rank:05d}.jsonl").write_text("".join(rows), encoding="utf-8")


def _peers(run: SyntheticRun, mapping: ParallelConfig, rank: int) -> str:
    """Return the bytes of a step: rows to the ranks of the expert group, gradients to all ranks."""
    group = mapping.group_of(rank, "ep")
    bytes_per_peer = run.tokens * run.top_k * 2048 // max(run.ranks, 1) // len(group)
    rows = bytes_per_peer * (len(group) - 1) * run.layers
    peers = {str(peer): bytes_per_peer * run.layers * 2 for peer in group if peer != rank and len(group) <= MOST_PEERS}
    sent = {"dispatch": rows, "combine": rows, "collective": 2 << 20}
    return f'"sent":{json.dumps(sent)},"peers":{json.dumps(peers)}'


def _probes(run: SyntheticRun, rank: int, step: int) -> dict[str, float]:
    """Return the seconds from the first rank of every other host."""
    seconds = {}
    host = run.host(rank)
    for source in range(0, run.ranks, run.ranks_per_host):
        if source == rank:
            continue
        factor = 1.0
        for link in run.slow_links:
            if (
                link.first <= step <= link.last
                and (link.source < 0 or run.host(link.source) == run.host(source))
                and (link.destination < 0 or run.host(link.destination) == host)
            ):
                factor = max(factor, link.factor)
        seconds[str(source)] = PROBE_S * factor
    return seconds


def _write_spans(folder: Path, run: SyntheticRun, mapping: ParallelConfig, timeline: _Timeline) -> None:
    span_steps = set(run.span_steps)
    calls: dict[tuple[int, ...], int] = {}
    for done in timeline.done:
        if done.step in span_steps:
            for line in spans_of(mapping, run.layers, done, calls):
                append(folder / SPANS / f"rank-{line.rank:05d}.jsonl", line)
