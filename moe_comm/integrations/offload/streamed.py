"""The MLPs of experts that are not in memory, for inference: each one is computed while its weights are leased.

Outputs have the bits of experts in memory, because those of a row do not depend on the other rows of a call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.integrations.offload.cache import ExpertCache
from moe_comm.kernels.expert_mlp import Alloc, ExpertForward, ExpertMLP, Part, Sizes
from moe_comm.kernels.fp8 import ScaledRows
from moe_comm.kernels.token_rows import Rows


@dataclass(frozen=True)
class OffloadedLayer:
    """The experts of one layer in a cache. ``transposed``: see ``ExpertsLayout``."""

    cache: ExpertCache
    number: int
    transposed: bool

    def mlp(self, mlp: ExpertMLP) -> ExpertMLP:
        """Return ``mlp``, whose tensors are on "meta", with the weights in the cache."""
        return StreamedMLP(mlp.tensors, mlp.activation, gemm_dtype=mlp.gemm_dtype, layer=self)

    def fault(self, *inputs: Tensor) -> MoeCommError | None:
        """Return the error of a call with gradients."""
        if torch.is_grad_enabled() and any(one.requires_grad for one in inputs):
            return ConfigError(
                "offloaded experts compute no gradients: call the model under torch.no_grad() or "
                "torch.inference_mode(), as generate does"
            )
        return None


@dataclass(frozen=True, eq=False)
class StreamedMLP(ExpertMLP):
    """An ``ExpertMLP`` whose tensors have shapes and dtypes only. layer: where their values are."""

    layer: OffloadedLayer | None = None

    @property
    def device(self) -> torch.device:
        assert self.layer is not None
        return self.layer.cache.device

    def forward(self, rows: Rows | ScaledRows, out_RD: Tensor, sizes: Sizes, keep: bool, alloc: Alloc) -> ExpertForward:
        return _StreamedForward(self, rows, out_RD, sizes, alloc)


class _StreamedForward(ExpertForward):
    def __init__(self, mlp: StreamedMLP, rows: Rows | ScaledRows, out_RD: Tensor, sizes: Sizes, alloc: Alloc) -> None:
        super().__init__(sizes)
        assert mlp.layer is not None
        self._mlp, self._layer, self._rows, self._out_RD, self._alloc = mlp, mlp.layer, rows, out_RD, alloc
        self._dtype = out_RD.dtype
        self.saved = out_RD, None, None  # without gradients, nothing reads it
        self._order = mlp.layer.cache.visit(mlp.layer.number, sizes)

    def all_rows(self) -> None:
        for expert in self._order:
            self._compute(self._part(slice(expert, expert + 1)))

    def _compute(self, part: Part) -> None:
        (count,) = part.sizes
        with self._layer.cache.lease(self._layer.number, part.expert) as values:
            inner = ExpertMLP(self._tensors(values), self._mlp.activation, gemm_dtype=self._mlp.gemm_dtype)
            inner.forward(self._rows[part.rows], self._out_RD[part.rows], (count,), False, self._alloc).all_rows()

    def _tensors(self, values: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
        """Return w13, w2 and biases, as ``expert_mlp`` does."""
        cast = {name: value.to(self._dtype) for name, value in values.items()}
        w13, w2 = cast["gate_up_proj"], cast["down_proj"]
        if self._layer.transposed:
            w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
        return w13, w2, cast.get("gate_up_proj_bias"), cast.get("down_proj_bias")
