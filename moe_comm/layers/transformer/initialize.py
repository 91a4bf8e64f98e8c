"""Initial weights that depend on the seed and a parameter's name alone, never on how the model is spread over ranks.

Every matrix is drawn in blocks of rows, each with a generator of its own, seeded by (seed, name, expert, block). A rank
draws the blocks of which it holds a part and keeps that part, so what it needs beside its own parameters is one block,
however large the model is:

    whole [E, rows, columns]       expert 0: block 0 block 1 ..       seed of expert 5, block 1:
                                   expert 1: block 0 block 1 ..       hash of "seed/layers.3.moe.experts.w13/5/1"

Torch's own random numbers over a DTensor are alike on all shards on the CPU, and drawing each rank's part from one
stream makes the weights, and so the run, depend on the mapping.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe_comm.errors import ConfigError
from moe_comm.layers.parallel.shard import shardings_of
from moe_comm.layers.transformer.model import Transformer
from moe_comm.topology import Box, Sharding

BLOCK_ELEMENTS = 1 << 22
"""Largest block, unless one row is longer: 16 MB of fp32."""

Kind = Literal["normal", "ones", "zeros"]


@dataclass(frozen=True)
class Draw:
    """Which weights: of ``seed``, normal with standard deviation ``std`` where they are matrices."""

    seed: int
    std: float = 0.02


def kind_of(name: str, sharding: Sharding) -> Kind:
    """How the parameter ``name`` starts: norms at one, biases at zero, matrices and tables normal.

    Raises:
        ConfigError: a vector that is neither a norm's weight nor a bias.
    """
    *path, leaf = name.split(".")
    if leaf in ("bias", "b13", "b2"):
        return "zeros"
    if leaf == "weight" and path and path[-1].endswith("norm"):
        return "ones"
    if len(sharding.shape) < 2:
        raise ConfigError(f"it is not known how {name} of shape {sharding.shape} is to start")
    return "normal"


@torch.no_grad()
def initialize(
    model: Transformer, seed: int, place: Mapping[str, int] | None = None, sizes: Mapping[str, int] | None = None
) -> None:
    """Set every parameter of this rank's part of a model, and zero its buffers. No communication.

    Before the parameters are spread further (FSDP). On the meta device nothing happens.

    Args:
        place, sizes: of this rank; None: those of the model's plan.

    Raises:
        ConfigError: a parameter has another shape than its sharding says.
    """
    place = model.plan.place if place is None else place
    sizes = model.plan.sizes if sizes is None else sizes
    draw = Draw(seed, model.config.init_std)
    shardings = shardings_of(model)
    for (name, sharding), parameter in zip(shardings.items(), model.parameters(), strict=True):
        if parameter.device.type != "meta":
            fill(parameter, model.origin_of(name), sharding, draw, place, sizes)
    for buffer in model.buffers():
        buffer.zero_()


@torch.no_grad()
def fill(
    local: Tensor, name: str, sharding: Sharding, draw: Draw, place: Mapping[str, int], sizes: Mapping[str, int]
) -> None:
    """Set ``local``, the part of parameter ``name`` that the rank at ``place`` holds.

    Raises:
        ConfigError: it has another shape than ``sharding`` says.
    """
    expected = sharding.local_shape(place, sizes)
    if tuple(local.shape) != expected:
        raise ConfigError(
            f"{name} has shape {tuple(local.shape)}, but its sharding {sharding.shape} leaves this rank {expected}; "
            "weights are set before FSDP spreads them"
        )
    kind = kind_of(name, sharding)
    if kind != "normal":
        local.fill_(1.0 if kind == "ones" else 0.0)
        return
    boxes = sharding.boxes(place, sizes)
    if len(sharding.shape) == 2:
        _fill_matrix(local, boxes, sharding.shape, f"{draw.seed}/{name}/0", draw.std)
        return
    experts, *shape = sharding.shape
    for expert in range(experts):
        # Boxes of one expert are those of a matrix.
        mine = [box for box in boxes if box.whole[0].start <= expert < box.whole[0].stop]
        if mine:
            at = mine[0].local[0].start + expert - mine[0].whole[0].start
            inner = [Box(box.local[1:], box.whole[1:]) for box in mine]
            _fill_matrix(local[at], inner, (shape[0], math.prod(shape[1:])), f"{draw.seed}/{name}/{expert}", draw.std)


def _fill_matrix(local: Tensor, boxes: list[Box], shape: tuple[int, ...], seed: str, std: float) -> None:
    rows, columns = shape
    block_rows = max(1, BLOCK_ELEMENTS // max(columns, 1))
    for block, first in enumerate(range(0, rows, block_rows)):
        last = min(first + block_rows, rows)
        touched = [box for box in boxes if box.whole[0].start < last and box.whole[0].stop > first]
        if not touched:
            continue
        drawn = torch.empty(last - first, columns, dtype=torch.float32, device="cpu")
        drawn.normal_(std=std, generator=torch.Generator("cpu").manual_seed(_seed(f"{seed}/{block}")))
        for box in touched:
            whole, into = box.whole[0], box.local[0]
            low, high = max(whole.start, first), min(whole.stop, last)
            start = into.start + low - whole.start
            local[start : start + high - low, box.local[1]] = drawn[low - first : high - first, box.whole[1]]


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
