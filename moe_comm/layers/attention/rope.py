"""Rotary position embedding (arXiv 2104.09864), plain and stretched by YaRN (arXiv 2309.00071).

Numbers are those of transformers: angles in fp32, sine and cosine rounded to the activations' dtype, and the rotation
computed in it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moe_comm.errors import ConfigError
from moe_comm.kernels.rotate import rotate_halves
from moe_comm.layers.attention.config import RopeConfig, Yarn


class RopeTable(NamedTuple):
    """Cosine and sine of every token's angles, [B or 1, S, d / 2] each, in the dtype of the activations."""

    cos: Tensor
    sin: Tensor


class Rope:
    """The rotation of one model: ``table`` once for a micro-batch, ``rotate`` for each layer's queries and keys.

    Args:
        dim: width of the rotated part of a head, even.

    Raises:
        ConfigError: ``dim`` is odd, or the settings are out of range.
    """

    def __init__(self, config: RopeConfig, dim: int) -> None:
        if dim < 2 or dim % 2:
            raise ConfigError(f"RoPE rotates pairs, so the width must be even; got {dim}")
        if config.theta <= 1:
            raise ConfigError(f"RoPE's theta must be more than 1; got {config.theta}")
        if config.yarn is not None and (config.yarn.factor < 1 or config.yarn.original_length < 1):
            raise ConfigError(f"YaRN's factor and original_length must be at least 1; got {config.yarn}")
        self.config = config
        self.dim = dim
        self._tables: dict[torch.device, Tensor] = {}

    @property
    def amplitude(self) -> float:
        """What cosine and sine are multiplied by: YaRN's attention temperature, as DeepSeek splits it."""
        yarn = self.config.yarn
        if yarn is None:
            return 1.0
        if yarn.mscale and yarn.mscale_all_dim:
            return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
        return yarn_mscale(yarn.factor)

    def frequencies(self, device: torch.device) -> Tensor:
        """[d / 2] radians per token, fp32."""
        if device not in self._tables:
            with torch.no_grad():
                # On the host and then moved, so that every device rotates by the same bits.
                self._tables[device] = frequencies(self.config, self.dim).to(device)
        return self._tables[device]

    @torch.no_grad()
    def table(self, positions_BS: Tensor, dtype: torch.dtype) -> RopeTable:
        """The table for tokens at ``positions_BS``, [B or 1, S] integers, for activations of ``dtype``."""
        angles = positions_BS[..., None].float() * self.frequencies(positions_BS.device)
        return RopeTable((angles.cos() * self.amplitude).to(dtype), (angles.sin() * self.amplitude).to(dtype))

    def rotate(self, x_BSHd: Tensor, table: RopeTable) -> Tensor:
        """``x_BSHd`` [B, S, heads, dim], each token's heads rotated by its angles; the same shape.

        Interleaved pairs come out as halves (all first members, then all second): the order in which both queries and
        keys stand does not change their product.
        """
        if not self.config.interleaved:
            return rotate_halves(x_BSHd, table.cos, table.sin)
        cos, sin = table.cos.unsqueeze(2), table.sin.unsqueeze(2)
        first, second = x_BSHd[..., 0::2], x_BSHd[..., 1::2]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature for a context ``factor`` times longer (its equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(width: int, yarn: Yarn | None) -> float:
    """What scores of heads of ``width`` are multiplied by; DeepSeek adds YaRN's ``mscale_all_dim`` squared."""
    scale: float = width**-0.5
    if yarn is not None and yarn.mscale_all_dim:
        scale *= yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2
    return scale


def frequencies(config: RopeConfig, dim: int) -> Tensor:
    """[dim / 2] radians per token of each pair, fp32, on the host."""
    powers = config.theta ** (torch.arange(0, dim, 2, dtype=torch.float, device="cpu") / dim)
    yarn = config.yarn
    if yarn is None:
        return 1.0 / powers

    def pair_turning(times: float) -> float:
        """The pair, as a fraction of ``dim``, that turns ``times`` times within the original length."""
        turns = math.log(yarn.original_length / (times * 2 * math.pi))
        return dim * turns / (2 * math.log(config.theta))

    low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_turning(yarn.beta_slow)), dim - 1)
    width = high - low if high != low else 0.001  # as transformers avoids dividing by zero
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float, device="cpu") - low) / width, 0, 1)
    keep = 1 - ramp
    # Fast pairs keep their frequency, slow ones are stretched, and between them it fades.
    return 1.0 / (yarn.factor * powers) * (1 - keep) + 1.0 / powers * keep
