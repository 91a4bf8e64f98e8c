"""Copies of an MoE block on which it is tried: in fp32, with narrow experts, with random values if it is on meta.

Code that recognises or checks a block runs these copies only. Their experts have at most ``WIDTH`` activations, so
that a copy takes little memory beside the model:

    w1 [F, D] ─▶ the first WIDTH rows        w2 [D, F] ─▶ the first WIDTH columns

What complete experts compute is known from one of them (``recognise``). If a block does not run with narrow experts, as
its code has their width, it is tried with complete ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_comm.layers.moe.formula import ExpertFormula

WIDTH = 64
"""Largest width of experts in a trial."""
SEED = 0
TOLERANCE = 1e-4
"""Largest difference in a check, relative to the largest value of the original."""


@dataclass(frozen=True, eq=False)
class Trial:
    """How to copy a block. formula: of the experts in the copies. kept: see ``ExpertFormula.narrowed``."""

    block: nn.Module
    formula: ExpertFormula
    device: torch.device
    kept: Mapping[str, tuple[int, list[int]]]

    @classmethod
    def of(cls, block: nn.Module, formula: ExpertFormula, device: torch.device, narrow: bool) -> Trial:
        """Return a trial with narrow experts, or with complete ones."""
        if not narrow or formula.layout.ffn <= WIDTH:
            return cls(block, formula, device, {})
        narrowed, kept = formula.narrowed(WIDTH)
        return cls(block, narrowed, device, kept)

    def copy(self) -> nn.Module:
        """Return a copy, which is equal on all ranks."""
        kept = {
            name: (dim if "{}" in path else dim + 1, indices)
            for path, (dim, indices) in self.kept.items()
            for name in self.formula.names_of(path)
        }
        return materialized(self.block, self.device, torch.float32, kept)


def device_of(module: nn.Module, default: torch.device) -> torch.device:
    """Return the device of the first parameter that is not on meta, or ``default``."""
    return next((param.device for param in module.parameters() if not param.is_meta), default)


def materialized(
    module: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    kept: Mapping[str, tuple[int, list[int]]] | None = None,
) -> nn.Module:
    """Return a copy of ``module``. Tensors on meta get values, those of parameters, and of parameters that are 0, at
    random.

    Args:
        kept: dimension and indices of the elements to copy, by name of the parameter.
    """
    generator = torch.Generator("cpu").manual_seed(SEED)
    memo: dict[int, object] = {}
    for name, param in module.named_parameters():
        value: Tensor = param.detach()
        if kept is not None and name in kept:
            dim, indices = kept[name]
            value = value.index_select(dim, torch.tensor(indices, dtype=torch.int64, device=value.device))
        # Zeros, as of a layer at its initialisation, would hide what is computed with them.
        if value.is_meta or (value.is_floating_point() and not bool(value.any())):
            value = _random(value.shape, generator).to(device if value.is_meta else value.device, dtype)
        else:
            value = value.to(dtype if value.is_floating_point() else value.dtype, copy=True)
        memo[id(param)] = nn.Parameter(value, requires_grad=False)
    for buffer in module.buffers():
        if buffer.is_meta:
            # Ones neither hide a factor nor select among experts.
            memo[id(buffer)] = torch.ones(buffer.shape, dtype=buffer.dtype, device=device)
    copied = deepcopy(module, memo).to(dtype)
    return copied.to(device) if any(param.is_meta for param in module.parameters()) else copied


def _random(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return values with which linear layers keep the size of their inputs; near 1 for vectors."""
    values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return values / math.sqrt(max(shape[-2:])) if len(shape) > 1 else 1 + 0.1 * values


def difference(value: Tensor | None, reference: Tensor | None) -> str:
    """Return how much a value differs from the original's; "" if it does not."""
    if value is None or reference is None or value.shape != reference.shape:
        shapes = ("none" if x is None else str(list(x.shape)) for x in (value, reference))
        return f"has the shape {' instead of '.join(shapes)}"
    if not reference.numel():
        return ""
    value, reference = value.detach().double(), reference.detach().double()
    largest, most = float(reference.abs().max()), float((value - reference).abs().max())
    if most <= TOLERANCE * largest + 1e-7:
        return ""
    return f"differs by {most:.2g}, of at most {largest:.2g}"
