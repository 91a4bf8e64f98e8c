"""What the planner answers, for programs: JSON of a mapping and of a search.

``moe-comm plan --json`` writes these; docs/plan.md has their keys. GB are 10**9 bytes, shares and MFU fractions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from moe_comm.plan.model.mapping import Mapping
from moe_comm.plan.search.explain import why_slower
from moe_comm.plan.search.fit import Change, Fit
from moe_comm.plan.search.question import Candidate, Question
from moe_comm.plan.search.search import Found, changes
from moe_comm.plan.step.blocks import LINKS
from moe_comm.plan.step.step import Step

GB = 1e9
COMPUTED = ("products", "memory passes")
"""Causes of a step's breakdown that are work of the accelerators' own."""
IDLE, UPDATE = "pipeline", "optimizer"
"""Those in which a rank waits for others of its pipeline, and in which weights are updated. The rest are transfers."""


def bubble_share(step: Step) -> float:
    """Share of a step in which the busiest pipeline rank has nothing to do."""
    return step.breakdown.get(IDLE, 0.0) / step.seconds


def exposed_share(step: Step) -> float:
    """Share of a step in which the busiest pipeline rank only moves bytes: what no computation hides."""
    rest = sum(seconds for cause, seconds in step.breakdown.items() if cause not in (*COMPUTED, IDLE, UPDATE))
    return rest / step.seconds


def answer(question: Question, candidate: Candidate, found: Found | None = None) -> dict[str, Any]:
    """Everything about ``candidate``, and with ``found`` about the search that found it.

    Keys of every answer: ``model``, ``hardware``, ``load``, ``mapping``, ``fits``, ``step_s``, ``tokens_per_s``,
    ``mfu`` (a fraction), ``memory_gb`` (of the fullest rank), ``memory``, ``bytes`` (by kind of link, then by operator:
    that a rank sends in a step), ``breakdown`` (seconds by cause, which add up to ``step_s``), ``hidden`` (seconds
    of transfers that are no part of it), ``bubble_share``,
    ``exposed_share``, ``would_fit`` (changes with which it fits; empty if it does). Of a search: ``candidates`` and
    ``search``.
    """
    shape, cluster, load = question.shape, question.cluster, question.load
    told: dict[str, Any] = {
        "model": {"name": shape.name, "params": shape.params, "active": shape.active},
        "hardware": {"name": cluster.accelerator.name, "gpus": cluster.gpus, "host_size": cluster.host_size},
        "load": {**asdict(load), "global_batch": question.global_batch},
        **_candidate(question, candidate),
        "memory": _memory(candidate.fit),
        "bytes": {
            link: {name: sent[link] for name, sent in candidate.step.sent.items() if sent[link]} for link in LINKS
        },
        "would_fit": [
            _change(question, one) for one in ([] if candidate.fit else changes(question, candidate.mapping))
        ],
    }
    if found is not None:
        told["candidates"] = [{**_candidate(question, one), "why_slower": why} for one, why in runners_up(found.best)]
        told["search"] = {
            "tried": found.tried,
            "replayed": found.replayed,
            "pruned": dict(found.pruned),
            "seconds": found.seconds,
            "complete": found.complete,
            "gpus_that_fit": cluster.gpus if found.best else found.gpus,
        }
    return told


def runners_up(best: Sequence[Candidate]) -> Iterator[tuple[Candidate, str | None]]:
    """Each with why it is slower than the first, which has None."""
    for place, one in enumerate(best):
        yield one, why_slower(best[0], one) if place else None


def _candidate(question: Question, one: Candidate) -> dict[str, Any]:
    step = one.step
    return {
        "mapping": _mapping(one.mapping, question.global_batch),
        "fits": bool(one.fit),
        "step_s": step.seconds,
        "tokens_per_s": step.tokens_per_s,
        "mfu": step.mfu,
        "memory_gb": one.fit.worst.total / GB,
        "breakdown": dict(step.breakdown),
        "hidden": dict(step.hidden),
        "bubble_share": bubble_share(step),
        "exposed_share": exposed_share(step),
    }


def degrees(mapping: Mapping) -> str:
    """As ``Mapping.parse`` reads them, and ``--mapping`` of the command."""
    p = mapping.parallel
    return f"tp={p.tp},cp={p.cp},dp={p.dp},pp={p.pp},vpp={mapping.virtual},ep={p.ep},etp={p.etp}"


def _mapping(mapping: Mapping, global_batch: int) -> dict[str, Any]:
    p = mapping.parallel
    return {
        **{axis: getattr(p, axis) for axis in ("tp", "cp", "dp", "pp")},
        "vpp": mapping.virtual,
        **{axis: getattr(p, axis) for axis in ("ep", "etp", "edp")},
        "micro_batch": mapping.micro_batch,
        "micro_batches": mapping.micro_batches(global_batch),
        "sharding": mapping.sharding,
        "recompute": mapping.recompute,
        "overlap": mapping.overlap,
        "schedule": mapping.schedule if p.pp > 1 else None,
        "dispatcher": mapping.dispatcher,
        "option": degrees(mapping),
    }


def _memory(fit: Fit) -> dict[str, Any]:
    worst = fit.worst
    terms = ("weights", "gradients", "optimizer", "activations", "buffers", "at_update")
    return {
        "available_gb": fit.available / GB,
        "missing_gb": fit.missing / GB,
        "position": worst.position,
        **{f"{term}_gb": getattr(worst, term) / GB for term in terms},
    }


def _change(question: Question, change: Change) -> dict[str, Any]:
    return {
        "change": change.what,
        "mapping": _mapping(change.mapping, question.global_batch),
        "memory_gb": change.fit.worst.total / GB,
    }
