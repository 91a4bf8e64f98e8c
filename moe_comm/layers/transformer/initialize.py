"""Initial weights that depend only on the seed and on parameter names, not on the parallel mapping.

Each matrix is generated in blocks of rows. Each block has its own generator, seeded by (seed, name, expert, block). A
rank generates the blocks that overlap with its part, so it needs memory for one block in addition to its parameters:

    full [E, rows, columns]        expert 0: block 0 block 1 ..       seed of expert 5, block 1:
                                   expert 1: block 0 block 1 ..       hash of "seed/layers.3.moe.experts.w13/5/1"

torch is not used for this because on the CPU it generates the same random numbers for all shards of a DTensor. One
random stream per rank would make the weights depend on the mapping.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from moe_comm.errors import ConfigError
from moe_comm.layers.parallel.module import shardings_of
from moe_comm.layers.transformer.model import Transformer
from moe_comm.topology import Box, Sharding

BLOCK_ELEMENTS = 1 << 22
"""Maximum elements per block, except for longer rows: 16 MB of fp32."""


def init_kind(name: str, sharding: Sharding) -> Literal["normal", "ones", "zeros"]:
    """Return how the parameter ``name`` is initialized: norms with ones, biases with zeros, matrices normally."""
    *path, leaf = name.split(".")
    if leaf in ("bias", "b13", "b2"):
        return "zeros"
    if leaf == "weight" and path and path[-1].endswith("norm"):
        return "ones"
    if len(sharding.shape) < 2:
        raise ConfigError(
            f"no initialization is defined for the vector {name} of shape {sharding.shape}; name it as a norm or a bias"
        )
    return "normal"


@torch.no_grad()
def initialize(
    model: Transformer, seed: int, place: Mapping[str, int] | None = None, sizes: Mapping[str, int] | None = None
) -> None:
    """Set all parameters of this rank's part of a model, and zero its buffers. Not collective.

    Call it before parameters are sharded further (FSDP). On the meta device nothing happens.

    Args:
        seed: seed of the weights.
        place: coordinates of this rank; None: those of the model's plan.
        sizes: sizes of the mesh axes; None: those of the model's plan.

    Raises:
        ConfigError: the shape of a parameter differs from its sharding.
    """
    place = model.plan.place if place is None else place
    sizes = model.plan.sizes if sizes is None else sizes
    for (name, sharding), parameter in zip(shardings_of(model).items(), model.parameters(), strict=True):
        if parameter.device.type != "meta":
            fill(parameter, model.origin_of(name), sharding, place, sizes, seed, model.config.init_std)
    for buffer in model.buffers():
        buffer.zero_()


@torch.no_grad()
def fill(
    local: Tensor,
    name: str,
    sharding: Sharding,
    place: Mapping[str, int],
    sizes: Mapping[str, int],
    seed: int,
    std: float = 0.02,
) -> None:
    """Set ``local``, the part of parameter ``name`` of the rank at ``place``; raise ConfigError for a wrong shape."""
    expected = sharding.local_shape(place, sizes)
    if tuple(local.shape) != expected:
        raise ConfigError(
            f"{name} has shape {tuple(local.shape)}, but by its sharding this rank holds {expected}; "
            "call initialize before FSDP shards the model"
        )
    kind = init_kind(name, sharding)
    if kind != "normal":
        local.fill_(1.0 if kind == "ones" else 0.0)
        return
    boxes = sharding.boxes(place, sizes)
    if len(sharding.shape) == 2:
        _fill_matrix(local, boxes, sharding.shape, f"{seed}/{name}/0", std)
        return
    experts, *shape = sharding.shape
    for expert in range(experts):
        expert_boxes = [box for box in boxes if box.full[0].start <= expert < box.full[0].stop]
        if expert_boxes:
            index = expert_boxes[0].local[0].start + expert - expert_boxes[0].full[0].start
            inner = [Box(box.local[1:], box.full[1:]) for box in expert_boxes]
            matrix_shape = (shape[0], math.prod(shape[1:]))
            _fill_matrix(local[index], inner, matrix_shape, f"{seed}/{name}/{expert}", std)


def _fill_matrix(local: Tensor, boxes: list[Box], shape: tuple[int, ...], seed: str, std: float) -> None:
    rows, columns = shape
    block_rows = max(1, BLOCK_ELEMENTS // max(columns, 1))
    for block, first in enumerate(range(0, rows, block_rows)):
        last = min(first + block_rows, rows)
        overlapping = [box for box in boxes if box.full[0].start < last and box.full[0].stop > first]
        if not overlapping:
            continue
        values = torch.empty(last - first, columns, dtype=torch.float32, device="cpu")
        values.normal_(std=std, generator=torch.Generator("cpu").manual_seed(_seed(f"{seed}/{block}")))
        for box in overlapping:
            full_rows, local_rows = box.full[0], box.local[0]
            low, high = max(full_rows.start, first), min(full_rows.stop, last)
            start = local_rows.start + low - full_rows.start
            local[start : start + high - low, box.local[1]] = values[low - first : high - first, box.full[1]]


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
