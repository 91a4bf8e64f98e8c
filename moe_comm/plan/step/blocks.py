"""What stages are made of, priced once for all mappings that run it alike: layers of two kinds, embedding and head."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from moe_comm.plan.arrays import Floats
from moe_comm.plan.machine.collectives import Moved
from moe_comm.plan.machine.hardware import Cluster
from moe_comm.plan.model.load import Load
from moe_comm.plan.model.mapping import Mapping, Place
from moe_comm.plan.model.shape import ModelShape
from moe_comm.plan.step.operators import Operation, Operators, Pass
from moe_comm.plan.step.overlap_model import hide
from moe_comm.plan.step.split_backward import halves

LINKS = ("inside", "between", "across")
RECOMPUTED = {"none": (), "selective": ("memory",), "full": ("product", "memory", "transfer")}
"""Kinds of operators that backward does again."""
CAUSES = {"product": "products", "memory": "memory passes"}
BLOCKS = ("embedding", "dense", "moe", "head")
"""What stages are made of: layers of two kinds, and what the first and the last have more."""


@dataclass(frozen=True)
class Work:
    """One of ``BLOCKS`` in one kind of pass of one micro-batch, summed up by operator."""

    seconds: float
    causes: dict[str, float]
    hidden: dict[str, float]
    sent: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Priced:
    """One of ``BLOCKS`` for one micro-batch. work: by ``PassKind``; of the halves nothing where none are run."""

    operations: Pass
    work: tuple[Work, ...]


@dataclass(frozen=True)
class _Key:
    """What blocks depend on; ``place`` is one of those that they are the same for."""

    shape: ModelShape
    cluster: Cluster
    load: Load
    degrees: tuple[int, int, int, int]
    settings: tuple[int, str, str, str, bool]
    place: Place = field(compare=False)


def priced(shape: ModelShape, place: Place, load: Load) -> dict[str, Priced]:
    """All of ``BLOCKS``, by name."""
    mapping, p = place.mapping, place.mapping.parallel
    settings = (mapping.micro_batch, mapping.recompute, mapping.overlap, mapping.dispatcher, mapping.splits)
    return _priced(_Key(shape, place.cluster, load, (p.tp, p.cp, p.ep, p.etp), settings, place))


def seconds_of(blocks: dict[str, Priced]) -> Floats:
    """[blocks, kinds of passes]."""
    return np.array([[work.seconds for work in blocks[name].work] for name in BLOCKS])


def links(moved: Moved) -> dict[str, float]:
    """Bytes by kind of link."""
    return {link: getattr(moved, link) for link in LINKS}


@lru_cache(maxsize=2048)
def _priced(key: _Key) -> dict[str, Priced]:
    shape, operators = key.shape, Operators(key.shape, key.place, key.load)
    mapping, empty = key.place.mapping, Pass((), ())
    every = {
        "embedding": _whole(operators.embedding()),
        "dense": _again(operators.layer("dense"), mapping) if shape.dense_layers else empty,
        "moe": _again(operators.layer("moe"), mapping) if shape.moe_layers else empty,
        "head": _whole(hide(operators.head(), 0, mapping.overlap)),
    }
    return {name: Priced(one, tuple(map(_summed_up, one.kinds))) for name, one in every.items()}


def _whole(one: Pass) -> Pass:
    """The input's half is all of backward."""
    return replace(one, input=one.backward)


def _again(layer: Pass, mapping: Mapping) -> Pass:
    """With what is done again before backward, and what is hidden; and the halves of that."""
    kinds = RECOMPUTED[mapping.recompute]
    again = tuple(one for one in layer.forward if one.kind in kinds)
    whole = Pass(layer.forward, again + layer.backward)
    found = hide(whole, len(again), mapping.overlap)
    if not mapping.splits:
        return _whole(found)
    first, second = halves(whole.backward, len(again), mapping.fuses)
    return replace(found, input=hide(Pass((), first), len(again), mapping.overlap).backward, weight=second)


def _summed_up(operations: tuple[Operation, ...]) -> Work:
    causes: dict[str, float] = {}
    hidden: dict[str, float] = {}
    sent: dict[str, dict[str, float]] = {}
    for each in operations:
        moves = each.kind == "transfer"
        name = each.name.removesuffix(" again") if moves else CAUSES[each.kind]
        causes[name] = causes.get(name, 0.0) + each.shown
        if each.hidden:
            hidden[name] = hidden.get(name, 0.0) + each.hidden
        if moves:
            into = sent.setdefault(name, dict.fromkeys(LINKS, 0.0))
            for link, count in links(each.moved).items():
                into[link] += count
    return Work(sum(one.shown for one in operations), causes, hidden, sent)
