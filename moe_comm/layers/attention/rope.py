"""Rotary position embedding (arXiv 2104.09864), with optional YaRN context extension (arXiv 2309.00071).

The numerics are those of transformers: angles in fp32, sine and cosine rounded to the activations' dtype, and the
rotation computed in that dtype.
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
    """Cosine and sine of each token's angles, [B or 1, S, d / 2] each, in the dtype of the activations."""

    cos: Tensor
    sin: Tensor


class Rope:
    """The rotation of one model: ``table`` runs once per micro-batch, ``rotate`` for each layer's queries and keys.

    Args:
        dim: width of the rotated part of a head, even.

    Raises:
        ConfigError: ``dim`` is odd, or a parameter is out of range.
    """

    def __init__(self, config: RopeConfig, dim: int) -> None:
        if dim < 2 or dim % 2:
            raise ConfigError(f"RoPE rotates pairs, so the width must be a positive even number; got {dim}")
        if config.theta <= 1:
            raise ConfigError(f"RoPE's theta must be more than 1; got {config.theta}")
        if config.yarn is not None and (config.yarn.factor < 1 or config.yarn.original_length < 1):
            raise ConfigError(f"YaRN's factor and original_length must be at least 1; got {config.yarn}")
        self.config = config
        self.dim = dim
        self._tables: dict[torch.device, Tensor] = {}

    @property
    def amplitude(self) -> float:
        """Factor of cosine and sine: YaRN's attention temperature, as DeepSeek applies it."""
        yarn = self.config.yarn
        if yarn is None:
            return 1.0
        if yarn.mscale and yarn.mscale_all_dim:
            return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
        return yarn_mscale(yarn.factor)

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the angle of each pair per token in radians, fp32 [dim / 2] on ``device``."""
        if device not in self._tables:
            with torch.no_grad():
                # Computed on the CPU, so that all devices rotate by the same bits.
                self._tables[device] = frequencies(self.config, self.dim).to(device)
        return self._tables[device]

    @torch.no_grad()
    def table(self, positions_BS: Tensor, dtype: torch.dtype) -> RopeTable:
        """Return the table for tokens at ``positions_BS``, [B or 1, S] integers, and activations of ``dtype``."""
        angles = positions_BS[..., None].float() * self.frequencies(positions_BS.device)
        return RopeTable((angles.cos() * self.amplitude).to(dtype), (angles.sin() * self.amplitude).to(dtype))

    def rotate(self, x_BSHd: Tensor, table: RopeTable) -> Tensor:
        """Rotate each token's heads in ``x_BSHd`` [B, S, heads, dim] by its angles.

        Interleaved pairs are returned as halves (all first members, then all second ones). The order does not change
        the product of queries and keys.
        """
        if not self.config.interleaved:
            return rotate_halves(x_BSHd, table.cos, table.sin)
        cos, sin = table.cos.unsqueeze(2), table.sin.unsqueeze(2)
        first, second = x_BSHd[..., 0::2], x_BSHd[..., 1::2]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's temperature for a context ``factor`` times longer (its equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(width: int, yarn: Yarn | None) -> float:
    """Return the scale of the scores of heads of ``width``. DeepSeek multiplies by YaRN's temperature squared."""
    scale: float = width**-0.5
    if yarn is not None and yarn.mscale_all_dim:
        scale *= yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2
    return scale


def frequencies(config: RopeConfig, dim: int) -> Tensor:
    """Return the angle of each pair per token in radians, fp32 [dim / 2], on the CPU."""
    powers = config.theta ** (torch.arange(0, dim, 2, dtype=torch.float, device="cpu") / dim)
    yarn = config.yarn
    if yarn is None:
        return 1.0 / powers

    def pair_rotating(rotations: float) -> float:
        """Return the pair, as a fraction of ``dim``, that rotates ``rotations`` times in the original length."""
        log_ratio = math.log(yarn.original_length / (rotations * 2 * math.pi))
        return dim * log_ratio / (2 * math.log(config.theta))

    low = max(math.floor(pair_rotating(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_rotating(yarn.beta_slow)), dim - 1)
    width = high - low if high != low else 0.001  # as in transformers, to avoid a division by zero
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float, device="cpu") - low) / width, 0, 1)
    keep = 1 - ramp
    # Fast pairs keep their frequency, slow pairs are interpolated, and a ramp connects them.
    return 1.0 / (yarn.factor * powers) * (1 - keep) + 1.0 / powers * keep
