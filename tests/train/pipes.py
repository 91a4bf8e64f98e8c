"""A small transformer split into pipeline stages, its micro-batches, and a single-process reference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_comm.layers.moe.layer import MoEConfig, MoELayer
from moe_comm.layers.moe.router import RouterConfig
from moe_comm.topology import ParallelMesh
from moe_comm.topology.parallel import ShardingMode
from moe_comm.train.parallel import GradientOverlap
from moe_comm.train.pipeline import ActivationShape, MicroBatch, StagePlan, make_runner, plan_stages

VOCAB, HIDDEN, FFN, EXPERTS, LENGTH = 19, 8, 12, 4, 6
MOE = MoEConfig(HIDDEN, FFN, RouterConfig(EXPERTS, 2, balance_loss=0.5, z_loss=0.1), shared_ffn=8, shared_gate=True)
SCALE = 0.125
"""Factor of the loss before backward."""
AUX_SCALE = 0.25
TIED = ("embed", "head")
EVALUATED = 3
"""Maximum number of micro-batches of an evaluation."""


@dataclass(frozen=True)
class Case:
    """One pipeline. dense: layers without experts. batch: sequences of a global micro-batch."""

    schedule: str = "1f1b"
    micro_batches: int = 4
    pp: int = 2
    dp: int = 1
    ep: int = 1
    layers: int = 4
    virtual: int | None = None
    stage_layers: tuple[int, ...] | None = None
    dense: tuple[int, ...] = (1,)
    tie: bool = False
    batch: int = 2
    strategy: ShardingMode = "replicate"
    overlap: GradientOverlap = "auto"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.ep > 1 else torch.float64  # shared memory moves no float64

    @property
    def plan(self) -> StagePlan:
        return plan_stages(self.layers, self.pp, self.schedule, virtual=self.virtual, stage_layers=self.stage_layers)


def drawn(case: Case, name: str, *shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return nn.Parameter((torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.4).to(case.dtype))


class Layer(nn.Module):
    """Add positions and documents to the input, then apply an MoE or dense block."""

    def __init__(self, case: Case, layer: int, group: Any) -> None:
        super().__init__()
        dense = layer in case.dense
        self.mix = drawn(case, f"mix{layer}", HIDDEN, HIDDEN)
        self.norm = drawn(case, f"norm{layer}", HIDDEN)
        self.up = drawn(case, f"up{layer}", HIDDEN, HIDDEN) if dense else None
        self.moe = None if dense else MoELayer.build(MOE, group, seed=layer, dtype=case.dtype)
        if self.moe is not None:
            self.moe.reset_parameters(layer, std=0.4)
            self.moe.aux_scale = AUX_SCALE

    def forward(self, x: Tensor, positions: Tensor, documents: Any) -> Tensor:
        x = x + torch.tanh(x @ self.mix.t()) * (1 + 0.1 * positions.to(x.dtype)).unsqueeze(-1)
        x = x * documents.weight_BS.to(x.dtype).unsqueeze(-1)
        normal = F.rms_norm(x, (HIDDEN,), self.norm)
        return x + (self.moe(normal) if self.moe is not None else F.silu(normal @ self.up.t()))


class Part(nn.Module):
    """Some layers of a small transformer, with the interface of a stage module."""

    def __init__(self, case: Case, layers: Iterable[int], first: bool, last: bool, group: Any = None) -> None:
        super().__init__()
        self.embed = drawn(case, "embed", VOCAB, HIDDEN) if first else None
        self.layers = nn.ModuleDict({str(i): Layer(case, i, group) for i in layers})
        self.norm = drawn(case, "norm", HIDDEN) if last else None
        self.head = drawn(case, "embed" if case.tie else "head", VOCAB, HIDDEN) if last else None

    @property
    def moe_layers(self) -> list[MoELayer]:
        return [layer.moe for layer in self.layers.values() if layer.moe is not None]

    def forward(self, x: Tensor, *, positions: Tensor, documents: Any) -> Tensor:
        if self.embed is not None:
            x = F.embedding(x, self.embed)
        elif self.layers:
            x = torch.cat((x, x.detach()), -1)[..., :HIDDEN]  # so that the gradient of x is not dense
        for layer in self.layers.values():
            x = layer(x, positions, documents)
        return x.view(x.shape) if self.layers else x  # a view, which cannot be detached in place

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = F.rms_norm(hidden, (HIDDEN,), self.norm) @ self.head.t()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def batches_of(case: Case, index: int = 0, parts: int = 1) -> list[MicroBatch]:
    """Return the micro-batches of data-parallel rank ``index``. Documents are not of a tensor type."""
    generator = torch.Generator().manual_seed(7)
    batches = []
    for _ in range(case.micro_batches):
        ids, targets, positions = (
            torch.randint(VOCAB, (case.batch, LENGTH), generator=generator).chunk(parts)[index] for _ in range(3)
        )
        weight = torch.rand(case.batch, LENGTH, generator=generator, dtype=torch.float64).chunk(parts)[index]
        batches.append(MicroBatch(ids, targets, positions, SimpleNamespace(weight_BS=0.5 + weight)))
    return batches


def reference(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Return losses and gradients of the whole model in one process."""
    model = Part(case, range(case.layers), True, True)
    if case.tie:
        model.head = model.embed
    losses = []
    for batch in batches_of(case):
        hidden = model(batch.ids_BS, positions=batch.positions_BS, documents=batch.documents)
        loss = model.loss(hidden, batch.targets_BS)
        (loss * SCALE).backward()
        losses.append(loss.detach())
    gradients = {name: p.grad for name, p in model.named_parameters()}
    if case.tie:
        gradients["head"] = gradients["embed"]
    return torch.stack(losses).double(), gradients


def build(case: Case, mesh: ParallelMesh) -> list[Part]:
    """Build this rank's stages."""
    plan = case.plan
    parts = [
        Part(case, plan.layers_of(stage), plan.is_first(stage), plan.is_last(stage), mesh.group("etp", "ep"))
        for stage in plan.stages_of(mesh.place["pp"])
    ]
    for part in parts:
        for moe in part.moe_layers:  # the balance loss is that of the whole micro-batch
            moe.router.group = mesh.group("tp", "cp", "dp")
    return parts


def make(case: Case, parts: list[Part], mesh: ParallelMesh, **options: Any) -> Any:
    activations = ActivationShape(HIDDEN, case.dtype)
    return make_runner(parts, mesh, case.plan, case.schedule, activations, timeout_s=60, **options)
