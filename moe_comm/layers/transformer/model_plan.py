"""``ModelPlan``: the part of a transformer on this rank, its process groups and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.dispatch import DispatchOptions
from moe_comm.errors import ConfigError
from moe_comm.layers.attention.config import Context
from moe_comm.layers.attention.sequence import check_context, local_positions
from moe_comm.layers.transformer.shape import Recompute
from moe_comm.overlap.options import Overlap
from moe_comm.topology import ParallelConfig, ParallelMesh


@dataclass(frozen=True, eq=False)
class ModelPlan:
    """The part of a model on this rank, and how it runs. The default is the full model on one rank.

    Args:
        place: coordinates of this rank on the seven axes of the mapping (``ParallelConfig``).
        sizes: sizes of the axes.
        tp_group: ranks that share heads and vocabulary; None: one rank.
        cp_group: ranks that share sequences; None: one rank.
        sequence_group: ranks of tp and cp together.
        stage_group: all ranks of the pipeline stage.
        expert_group: the etp * ep ranks that share one set of experts, etp fastest.
        layers: ascending global ids of the layers of this stage, possibly none. None: all layers.
        has_embedding, has_head: this is the first or the last pipeline stage.
        context: form of context parallelism.
        recompute: activation recomputation, see ``recompute.py``.
        overlap: overlap of linear layers with transfers over tp_group, and of MoE layers with dispatch and combine;
            None: no overlap.
        expert_overlap: overlap of MoE layers instead of ``overlap``; None: the same.
        backend, options: dispatch of MoE layers, see ``make_dispatcher``.
        dtype: dtype of parameters and activations; None: torch's default.
        device: device of the parameters; "meta" allocates no memory.
        weights_device: another device on which parameters and buffers are allocated, to move later; None: ``device``.
    """

    place: Mapping[str, int] = field(default_factory=lambda: ParallelConfig().place(0))
    sizes: Mapping[str, int] = field(default_factory=lambda: ParallelConfig().sizes)
    tp_group: ProcessGroup | None = None
    cp_group: ProcessGroup | None = None
    sequence_group: ProcessGroup | None = None
    stage_group: ProcessGroup | None = None
    expert_group: ProcessGroup | None = None
    layers: tuple[int, ...] | None = None
    has_embedding: bool = True
    has_head: bool = True
    context: Context = "ulysses"
    recompute: Recompute = "none"
    overlap: Overlap | None = None
    expert_overlap: Overlap | None = None
    backend: str = "auto"
    options: DispatchOptions | None = None
    dtype: torch.dtype | None = None
    device: torch.device | str = "cpu"
    weights_device: torch.device | str | None = None

    def __post_init__(self) -> None:
        check_context(self.context)
        if self.recompute not in get_args(Recompute):
            raise ConfigError(f"recompute must be one of {', '.join(get_args(Recompute))}; got {self.recompute!r}")
        if self.layers is not None and list(self.layers) != sorted(set(self.layers)):
            raise ConfigError(f"the layers of a stage must be strictly ascending; got {self.layers}")

    @classmethod
    def of(
        cls,
        mesh: ParallelMesh,
        *,
        layers: Sequence[int] | None = None,
        has_embedding: bool = True,
        has_head: bool = True,
        context: Context = "ulysses",
        recompute: Recompute = "none",
        overlap: Overlap | None = None,
        expert_overlap: Overlap | None = None,
        backend: str = "auto",
        options: DispatchOptions | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> ModelPlan:
        """Return the plan of this rank of ``mesh``. The other arguments are those of ``ModelPlan``.

        Args:
            mesh: the mesh, which provides the groups.
            device: None: the device of the mesh.
        """
        return cls(
            place=mesh.place,
            sizes=mesh.sizes,
            tp_group=mesh.group("tp"),
            cp_group=mesh.group("cp"),
            sequence_group=mesh.group("tp", "cp"),
            stage_group=mesh.group("tp", "cp", "dp"),
            expert_group=mesh.group("etp", "ep"),
            layers=None if layers is None else tuple(layers),
            has_embedding=has_embedding,
            has_head=has_head,
            context=context,
            recompute=recompute,
            overlap=overlap,
            expert_overlap=expert_overlap,
            backend=backend,
            options=options,
            dtype=dtype,
            device=mesh.device if device is None else device,
        )

    @property
    def is_meta(self) -> bool:
        """Whether the model is built on the meta device."""
        return torch.device(self.device).type == "meta"

    def token_index(self, batch: int, length: int, device: torch.device | None = None) -> Tensor:
        """Return [batch, length] int64 positions of this rank's tokens in the global micro-batch, ordered by sequence.

            B 2, S 8 over dp 2, cp 2 (ring: 0 1 6 7 | 2 3 4 5), tp 2      dp 1, cp 0, tp 1 holds  6 7 of sequence 1
                                                                          index                  14 15

        Args:
            batch: sequences on each data-parallel rank.
            length: tokens of each sequence on this rank, S / (cp * tp).
        """
        tp, cp = self.sizes["tp"], self.sizes["cp"]
        full = length * tp * cp
        positions = local_positions(full, cp, self.place["cp"], self.context)
        local = positions[self.place["tp"] * length : (self.place["tp"] + 1) * length]
        rows = self.place["dp"] * batch + torch.arange(batch, device="cpu")
        return (rows.unsqueeze(1) * full + local).to(device)
