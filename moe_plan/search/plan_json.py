"""Convert a planned mapping and the result of a search to JSON.

``moe-comm plan --json`` writes the JSON object, and docs/plan.md documents its keys. 1 GB is 10**9 bytes. Shares and
MFU are fractions of 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from moe_plan.model.load import Workload
from moe_plan.model.mapping import Mapping
from moe_plan.search.preference import STEP_ERROR, is_equal, why_slower
from moe_plan.search.request import Fit, MappingChange, PlanCandidate, PlanRequest, changes_that_fit
from moe_plan.search.search import SearchResult
from moe_plan.search.space import SearchSpace
from moe_plan.step.blocks import LINKS
from moe_plan.step.lengths import LAUNCHES, UNEVEN
from moe_plan.step.step import StepPrediction

GB = 1e9
COMPUTED = ("products", "memory passes")
"""Keys of a step's breakdown that are computation."""
IDLE, UPDATE = "pipeline", "optimizer"
"""Keys of the waiting time for other pipeline ranks and of the weight update. All other keys but those of
documents are transfers."""


def bubble_share(step: StepPrediction) -> float:
    """Return the fraction of a step in which the busiest pipeline rank is idle."""
    return step.breakdown.get(IDLE, 0.0) / step.seconds


def exposed_share(step: StepPrediction) -> float:
    """Return the fraction of a step in which the busiest pipeline rank only communicates."""
    exposed_s = sum(
        seconds for cause, seconds in step.breakdown.items() if cause not in (*COMPUTED, IDLE, UPDATE, LAUNCHES, UNEVEN)
    )
    return exposed_s / step.seconds


def plan_json(request: PlanRequest, candidate: PlanCandidate, search: SearchResult | None = None) -> dict[str, Any]:
    """Return the JSON object of ``candidate``, and of the search that selected it if ``search`` is not None.

    Keys: ``model``, ``hardware``, ``load``, ``mapping``, ``fits``, ``step_s``, ``tokens_per_s``, ``mfu``, ``memory_gb``
    (peak of the rank with the highest peak), ``memory``, ``bytes`` (sent by a rank in a step, by kind of link and by
    operator), ``breakdown`` (seconds by cause; the sum is ``step_s``), ``hidden`` (seconds of overlapped transfers,
    which are not part of ``step_s``), ``step_error`` (median error of predicted steps, a fraction), ``bubble_share``,
    ``exposed_share``, and ``would_fit`` (changes that make the mapping fit into memory; empty if it fits). With
    recorded loads also ``placement`` (``PlacedLoads``), with documents ``lengths``
    (``compared_lengths``). With a search also ``candidates`` and ``search``.
    """
    shape, cluster, load = request.shape, request.cluster, request.load
    result: dict[str, Any] = {
        "model": {"name": shape.name, "params": shape.params, "active": shape.active},
        "hardware": {"name": cluster.accelerator.name, "gpus": cluster.gpus, "host_size": cluster.host_size},
        "load": {**_load(load), "global_batch": request.global_batch},
        **_candidate(request, candidate),
        "memory": _memory(candidate.fit),
        "bytes": {
            link: {name: sent[link] for name, sent in candidate.step.sent.items() if sent[link]} for link in LINKS
        },
        "would_fit": [
            _change(request, change)
            for change in ([] if candidate.fit else changes_that_fit(request, candidate.mapping))
        ],
    }
    if load.lengths is not None:
        result["lengths"] = compared_lengths(request, candidate.mapping)
    if search is not None:
        result["candidates"] = [
            {**_candidate(request, other), "equal": is_equal(other, search.best), "why_slower": why}
            for other, why in runners_up(search.best)
        ]
        result["common"] = [
            {
                **_candidate(request, other),
                "equal": is_equal(other, search.best),
                "place": place_among(other, search.best),
                "why_slower": why_slower(search.best[0], other),
            }
            for other in search.common
        ]
        result["search"] = {
            "tried": search.tried,
            "replayed": search.replayed,
            "pruned": dict(search.pruned),
            "seconds": search.seconds,
            "complete": search.complete,
            "gpus_that_fit": cluster.gpus if search.best else search.gpus,
        }
    return result


def compared_lengths(request: PlanRequest, mapping: Mapping) -> dict[str, dict[str, Any]]:
    """Return the predictions of ``mapping`` by setting of lengths; one if it cannot balance them."""
    result: dict[str, dict[str, Any]] = {}
    for mode in SearchSpace().length_modes(request, mapping):
        model = request.model(replace(mapping, lengths=mode))
        assert model.documents is not None
        step, documents = model.predict(), model.documents
        result[mode] = {
            "step_s": step.seconds,
            "slowest": documents.slowest,
            "idle_share": documents.idle,
            "bytes": {link: sum(sent[link] for sent in step.sent.values()) for link in LINKS},
            "key_bytes": sum(step.sent.get("document keys", {}).values()),
        }
    return result


def place_among(candidate: PlanCandidate, best: Sequence[PlanCandidate]) -> int | None:
    """Return the position of a mapping among the best of a search, from 1. None if it is not among them."""
    return next((at for at, other in enumerate(best, 1) if other.mapping == candidate.mapping), None)


def runners_up(best: Sequence[PlanCandidate]) -> Iterator[tuple[PlanCandidate, str | None]]:
    """Yield each candidate and the reason why it is slower than the first candidate; None for the first."""
    for index, candidate in enumerate(best):
        yield candidate, why_slower(best[0], candidate) if index else None


def _candidate(request: PlanRequest, candidate: PlanCandidate) -> dict[str, Any]:
    step = candidate.step
    return {
        "mapping": _mapping(candidate.mapping, request.global_batch),
        "fits": bool(candidate.fit),
        "step_s": step.seconds,
        "step_error": STEP_ERROR,
        "tokens_per_s": step.tokens_per_s,
        "mfu": step.mfu,
        "memory_gb": candidate.fit.fullest.total / GB,
        "memory_share": candidate.fit.fullest.total / candidate.fit.available,
        "breakdown": dict(step.breakdown),
        "hidden": dict(step.hidden),
        "bubble_share": bubble_share(step),
        "exposed_share": exposed_share(step),
        **(
            {}
            if (loads := request.load.loads) is None
            else {"placement": asdict(loads.placed(candidate.mapping.parallel.ep))}
        ),
    }


def _load(load: Workload) -> dict[str, Any]:
    values = asdict(replace(load, loads=None, lengths=None))
    del values["loads"], values["lengths"]
    return values


def _mapping(mapping: Mapping, global_batch: int) -> dict[str, Any]:
    p = mapping.parallel
    return {
        **{axis: getattr(p, axis) for axis in ("tp", "cp", "dp", "pp")},
        "vpp": mapping.virtual,
        **{axis: getattr(p, axis) for axis in ("ep", "etp", "edp")},
        "micro_batch": mapping.micro_batch,
        "micro_batches": mapping.micro_batches(global_batch),
        "sharding": mapping.sharding,
        "replicas": mapping.replicas,
        "recompute": mapping.recompute,
        "overlap": mapping.overlap,
        "schedule": mapping.schedule if p.pp > 1 else None,
        "dispatcher": mapping.dispatcher,
        "lengths": mapping.lengths,
        "option": mapping.degrees,
    }


def _memory(fit: Fit) -> dict[str, Any]:
    fullest = fit.fullest
    terms = ("weights", "gradients", "optimizer", "activations", "buffers", "at_update", "host")
    return {
        "available_gb": fit.available / GB,
        "missing_gb": fit.missing / GB,
        "position": fullest.position,
        **{f"{term}_gb": getattr(fullest, term) / GB for term in terms},
    }


def _change(request: PlanRequest, change: MappingChange) -> dict[str, Any]:
    return {
        "change": change.what,
        "mapping": _mapping(change.mapping, request.global_batch),
        "memory_gb": change.fit.fullest.total / GB,
    }
