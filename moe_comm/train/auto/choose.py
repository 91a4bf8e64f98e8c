"""Choose the parallel settings of a run with the planner.

    given keys of [parallel] ──▶ constraints of the search ─┐
    model, batch, dtype ──▶ PlanRequest ◀── measured ranks, or parallel.machine
                                 │ moe_plan.search
                                 ▼
                 the fastest mappings ──▶ a few measured steps of each, if predictions are close
                                 ▼
                 resolved [parallel], and one line that says why

The planner never chooses settings that change results beyond the mapping: compressed gradients, wire dtypes and
``deterministic = false`` are priced with the settings of the configuration. If one of them would save time, the line
says how much, and how to set it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping as Table, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, get_args

from moe_comm.dispatch.wire_dtype import WireDtypeName, WireDtypes, bytes_per_row
from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.topology import ParallelConfig
from moe_comm.topology.parallel import ShardingMode
from moe_comm.topology.pipeline import find_schedule
from moe_comm.train.auto.rates import DTYPES, measure_cluster, rates_text
from moe_comm.train.config import CHOSEN, TrainConfig
from moe_comm.train.pipeline.stage import SPLITS_BACKWARD
from moe_comm.train.plan_config import DTYPES as DTYPE_NAMES, parallel_settings
from moe_comm.train.ranks import Ranks
from moe_comm.train.sections import ParallelSection
from moe_plan.machine.hardware import Cluster
from moe_plan.machine.hardware_table import cluster_named
from moe_plan.model.load import Workload
from moe_plan.model.mapping import Dispatcher, OverlapMode, PlacedMapping
from moe_plan.model.memory import MemoryPolicy
from moe_plan.search.preference import why_slower
from moe_plan.search.request import RESERVE, PlanCandidate, PlanRequest
from moe_plan.search.search import search
from moe_plan.search.space import SearchSpace

DEGREES = ("tp", "cp", "dp", "pp", "ep", "etp")
WORTH = 0.05
"""A setting that changes results is mentioned if it would save at least this share of a step."""
CLOSE = 0.05
"""Predictions that differ by less count as equal, because errors are larger. The mapping with the fewest axes wins."""
TRIED = 0.25
"""Mappings are tried if they are predicted to be slower than the fastest one by at most this share."""
TRIALS, TRIAL_STEPS = 3, 4
"""Mappings that are tried in a long run, and steps of each. The first step is not counted."""
LONG = 20
"""A run is long if it has at least this many times the steps of the trials."""
PREFIX = 'parallel "auto": '
FP8_ROWS: WireDtypeName = "fp8_block"


@dataclass(frozen=True)
class ParallelChoice:
    """The chosen values of ``CHOSEN`` that are not defaults, by key, and one line that explains the choice.

    candidates: settings and a description of the chosen mapping, and of others that may be as fast.
    """

    settings: Table[str, Any]
    text: str
    candidates: tuple[tuple[Table[str, Any], str], ...] = ()


StepSeconds = Callable[[TrainConfig, int], Sequence[float]]
"""Runs a number of steps of a configuration, and returns the seconds of each on this rank. Collective."""


def resolve_parallel(
    config: TrainConfig,
    shape: ModelShape,
    ranks: Ranks,
    device: str,
    earlier: Callable[[], TrainConfig | None],
    step_seconds: StepSeconds,
) -> tuple[TrainConfig, str]:
    """Return ``config`` with explicit parallel settings, and the line to log. Collective; the same on all ranks.

    Args:
        config: a configuration with ``parallel.auto``.
        device: "cpu" or "cuda".
        earlier: called on rank 0; returns the configuration of the run that is resumed, if any. Its settings are kept
            if they fit the number of ranks and the given keys.
        step_seconds: measures steps, see ``parallel.trials``.
    """
    kept = json.loads(ranks.run_on_first(lambda: json.dumps(_kept(config, earlier(), ranks.world))))
    if kept is not None:
        return resolved(config, ranks.world, kept), f"{PREFIX}keeps the settings of the resumed run"
    load = workload(config, shape)
    cluster = None
    if config.parallel.machine is None:
        tokens = config.data.batch * config.data.seq_len // (config.data.micro_batches * ranks.world)
        cluster = measure_cluster(ranks, shape, load.dtype, tokens, device)

    def chosen() -> str:
        choice = choose(config, shape, cluster or described(config, ranks.world))
        return json.dumps([choice.settings, choice.text, choice.candidates])

    settings, text, candidates = json.loads(ranks.run_on_first(chosen))
    candidates = candidates[: _trials(config)]
    if len(candidates) > 1:
        measured_s = [
            _slowest_median(step_seconds(resolved(config, ranks.world, tried), TRIAL_STEPS)[1:], ranks)
            for tried, _ in candidates
        ]
        results = sorted(zip(measured_s, candidates, strict=True), key=lambda result: result[0])
        settings, fastest = results[0][1]
        measured = "; ".join(f"{name}: {seconds:.3g} s" for seconds, (_, name) in results)
        text = f"{PREFIX}{fastest}. Steps measured: {measured}. Predicted: {text.removeprefix(PREFIX)}"
    return resolved(config, ranks.world, settings), text


def _trials(config: TrainConfig) -> int:
    """Return the largest number of mappings to try."""
    trials = config.parallel.trials
    if trials is None:
        measured = config.parallel.machine is None
        trials = TRIALS if measured and config.run.steps >= LONG * TRIALS * TRIAL_STEPS else 0
    return trials


def _slowest_median(seconds: Sequence[float], ranks: Ranks) -> float:
    """Return the median of ``seconds`` on the rank where it is largest. Collective."""
    return max(map(float, ranks.gather_texts(repr(median(seconds)))))


def described(config: TrainConfig, world: int) -> Cluster:
    """Return ``world`` ranks of the machine that ``parallel.machine`` names or describes."""
    if config.parallel.machine is None:
        raise ConfigError(
            "parallel.auto measures the ranks when a run starts; set parallel.machine to plan without them"
        )
    return cluster_named(config.parallel.machine, world)


def choose(config: TrainConfig, shape: ModelShape, cluster: Cluster) -> ParallelChoice:
    """Return the fastest parallel settings of ``config`` on all ranks of ``cluster``."""
    request = PlanRequest(
        shape,
        cluster,
        workload(config, shape),
        config.data.batch,
        MemoryPolicy(
            config.optimizer.kind,
            bool(config.optimizer.momentum_of_kind),
            offload=config.offload.limit,
            activations=config.offload.activation_limit,
            weights=config.offload.weights == "host",
        ),
        min(RESERVE, cluster.accelerator.memory_bytes // 8),
    )
    space = search_space(config)
    try:
        result = search(request, space)
    except ConfigError as error:
        raise ConfigError(f"parallel.auto: {error}; given: {_given_text(config.parallel)}") from None
    if not result.best:
        nearest = result.nearest[0]
        raise ConfigError(
            f"parallel.auto: no mapping fits memory; given: {_given_text(config.parallel)}. "
            f"Nearest: {nearest.mapping}, {nearest.fit}"
        )
    best = min(result.best, key=partial(_rank_of, result.best[0].step.seconds))
    others = [candidate for candidate in result.best if candidate is not best]
    settings = _settings(config, request, best)
    text = f"{PREFIX}{_describe(best, settings)}: {_seconds(best)} a step predicted"
    text += f" ({rates_text(cluster, request.load.dtype)})"
    for other in others[:1]:
        described_other = _describe(other, _settings(config, request, other))
        text += f". Next best: {described_other}: {_seconds(other)} ({why_slower(best, other)})"
    for option, share in _offers(config, request, space, result.best[0].step.seconds):
        text += f". {option} would save {share:.0%}"
    candidates = []
    for candidate in _with_other_degrees(best, result.best):
        its_settings = _settings(config, request, candidate)
        candidates.append((its_settings, _describe(candidate, its_settings)))
    return ParallelChoice(settings, text, tuple(candidates))


def _with_other_degrees(best: PlanCandidate, found: Sequence[PlanCandidate]) -> list[PlanCandidate]:
    """Return ``best``, and the fastest candidate of each other mapping that may be as fast."""
    fastest: dict[ParallelConfig, PlanCandidate] = {best.mapping.parallel: best}
    for candidate in found:
        if candidate.step.seconds <= found[0].step.seconds * (1 + TRIED):
            fastest.setdefault(candidate.mapping.parallel, candidate)
    return list(fastest.values())


def _rank_of(fastest_s: float, candidate: PlanCandidate) -> tuple[bool, int, float]:
    """Return the sort key of a candidate: close to the fastest, then few axes besides dp and ep, then fast."""
    p, seconds = candidate.mapping.parallel, candidate.step.seconds
    return seconds > fastest_s * (1 + CLOSE), sum(size > 1 for size in (p.tp, p.cp, p.pp, p.etp)), seconds


def workload(config: TrainConfig, shape: ModelShape) -> Workload:
    """Return the workload of a step of ``config``."""
    dtype = next(name for name, trained in DTYPE_NAMES.items() if trained == config.model.dtype)
    wire_dtypes = config.payload.wire_dtypes()
    load = Workload.assumed(config.data.seq_len, dtype, config.model.capacity)
    return replace(
        load,
        deterministic=config.parallel.deterministic and wire_dtypes.invariant,
        wire=_wire(shape.hidden, dtype, wire_dtypes),
        gradient_bytes=2 if config.parallel.compress else 4,
        overlap_gradients=config.parallel.overlap_gradients != "off",
    )


def search_space(config: TrainConfig) -> SearchSpace:
    """Return the mappings that satisfy the given keys of ``config``. Micro-batches and recomputation are not chosen."""
    parallel, given = config.parallel, _given(config.parallel)
    if parallel.stage_layers is not None and "pp" not in given:
        raise ConfigError("parallel.auto: stage_layers requires pp, because it has the layers of each stage")
    fixed = {axis: given[axis] for axis in DEGREES if axis in given}
    sharding: tuple[ShardingMode, ...] = (given["sharding"],) if "sharding" in given else get_args(ShardingMode)
    several = config.placement.kind == "fixed" and config.offload.weights == "none"
    replicas = given.get("dp_replicate", None if several else 1)
    overlap: tuple[OverlapMode, ...] = ("none", "chunks")
    if "overlap_chunks" in given:
        overlap = ("chunks",) if given["overlap_chunks"] else ("none",)
    if parallel.context != "ulysses":  # the planner prices only Ulysses
        fixed.setdefault("cp", 1)
    if parallel.interleave:
        overlap = ("all",)
    backend = given.get("backend", "auto")
    dispatchers: tuple[Dispatcher, ...] = get_args(Dispatcher)
    if backend != "auto":  # backends that access peers' memory are modelled as all_to_all
        dispatchers = (backend,) if backend in dispatchers else ("all_to_all",)
    more: dict[str, Any] = {"schedule": (given["schedule"],)} if "schedule" in given else {}
    split = SPLITS_BACKWARD or config.model.recompute == "full"
    if not more and not split:
        more["schedule"] = tuple(name for name in SearchSpace.schedule if not find_schedule(name).splits_backward)
    more |= {"virtual": (given["virtual"],)} if "virtual" in given else {}
    return SearchSpace(
        overlap=overlap,
        recompute=(config.model.recompute,),
        sharding=sharding,
        dispatcher=dispatchers,
        steps=config.data.micro_batches,
        interleave=parallel.interleave,
        fixed=tuple(fixed.items()),
        replicas=replicas,
        **more,
    )


def resolved(config: TrainConfig, world: int, settings: Table[str, Any]) -> TrainConfig:
    """Return ``config`` with ``settings`` in [parallel] and without "auto"."""
    planned = {"auto", "trials"} | (set() if config.parallel.lengths == "balanced" else {"machine"})
    parallel = config.parallel.model_dump(exclude=planned) | dict(settings) | {"ranks": world}
    tree = config.model_dump() | {"parallel": parallel}
    try:
        return TrainConfig.model_validate(tree)
    except ValueError as error:
        raise ConfigError(f"parallel.auto: {error}") from error


def _given(parallel: ParallelSection) -> dict[str, Any]:
    """Return the keys of ``CHOSEN`` that the configuration sets."""
    names = [name for name in CHOSEN if name in parallel.model_fields_set]
    return {name: getattr(parallel, name) for name in names if getattr(parallel, name) is not None}


def _given_text(parallel: ParallelSection) -> str:
    return ", ".join(f"{name} = {value}" for name, value in _given(parallel).items()) or "nothing"


def _kept(config: TrainConfig, earlier: TrainConfig | None, world: int) -> dict[str, Any] | None:
    """Return the settings of ``earlier``; None if they contradict the number of ranks or the given keys."""
    if earlier is None:
        return None
    settings = {name: getattr(earlier.parallel, name) for name in CHOSEN}
    given = _given(config.parallel)
    if earlier.parallel.ranks != world or any(settings[name] != value for name, value in given.items()):
        return None
    return settings


def _settings(config: TrainConfig, request: PlanRequest, candidate: PlanCandidate) -> dict[str, Any]:
    """Return the values of ``CHOSEN`` for a planned mapping. Given values are kept."""
    mapping = candidate.mapping
    settings = {name: value for name, value in parallel_settings(request, mapping).items() if name in CHOSEN}
    crosses_hosts = PlacedMapping(mapping, request.cluster).spans["ep"].hosts > 1
    if mapping.dispatcher == "all_to_all" and crosses_hosts:
        settings["backend"] = "all_to_all"
    return settings | _given(config.parallel)


def _describe(candidate: PlanCandidate, settings: Table[str, Any]) -> str:
    p = candidate.mapping.parallel
    parts = [f"{axis} {getattr(p, axis)}" for axis in DEGREES if axis in ("dp", "ep") or getattr(p, axis) > 1]
    parts += [str(settings["schedule"])] if p.pp > 1 else []
    parts.append(candidate.mapping.sharding)
    parts += [f"dp_replicate {candidate.mapping.replicas}"] if candidate.mapping.replicas > 1 else []
    parts += [f"overlap_chunks {settings['overlap_chunks']}"] if settings.get("overlap_chunks") else []
    return ", ".join([*parts, f"backend {settings.get('backend', 'auto')}"])


def _seconds(candidate: PlanCandidate) -> str:
    return f"{candidate.step.seconds:.3g} s"


def _offers(config: TrainConfig, request: PlanRequest, space: SearchSpace, fastest_s: float) -> list[tuple[str, float]]:
    """Return the settings that change results and would save time, with the share of the step that they save.

    fastest_s: seconds of the fastest mapping without them.
    """
    load = request.load
    loads: dict[str, Workload] = {}
    if not config.parallel.compress:
        loads["bf16 gradients (parallel.compress = true)"] = replace(load, gradient_bytes=2)
    if load.wire == 1 and request.shape.moe_layers:
        wire = _wire(request.shape.hidden, load.dtype, WireDtypes(FP8_ROWS, FP8_ROWS, FP8_ROWS, FP8_ROWS))
        option = f'fp8 rows (payload.dispatch, combine, dispatch_backward and combine_backward = "{FP8_ROWS}")'
        loads[option] = replace(load, wire=wire)
    if load.deterministic:
        loads["sums in combine (parallel.deterministic = false)"] = replace(load, deterministic=False)
    result = []
    for option, changed in loads.items():
        found = search(replace(request, load=changed), space, keep=1, limit_s=5.0).best
        share = 1 - found[0].step.seconds / fastest_s if found else 0.0
        if share >= WORTH:
            result.append((option, share))
    return result


def _wire(hidden: int, dtype: str, wire_dtypes: WireDtypes) -> float:
    """Return the bytes of a row in transfer over its bytes in memory, on average over all four directions."""
    operations = ("dispatch", "combine", "dispatch_backward", "combine_backward")
    torch_dtype = DTYPES[dtype]
    sent = sum(bytes_per_row(hidden, wire_dtypes.of(name), torch_dtype) for name in operations)
    return min(1.0, sent / (len(operations) * hidden * torch_dtype.itemsize))
