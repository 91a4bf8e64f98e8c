"""Train without a run folder and return the results of one rank, to compare mappings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_comm.layers.moe.load import moe_layers
from moe_comm.layers.parallel.module import shardings_of
from moe_comm.topology import Box, ParallelMesh, Sharding
from moe_comm.train.config import TrainConfig
from moe_comm.train.data import Corpus
from moe_comm.train.lengths.feed import open_feed
from moe_comm.train.loop.build import architecture_of, build
from moe_comm.train.loop.job import open_corpus
from moe_comm.train.loop.trainer import Trainer
from moe_comm.train.parallel.parameters import named_parameters
from moe_comm.train.ranks import Ranks

Parts = dict[str, tuple[tuple[int, ...], list[tuple[Box, Tensor]]]]
"""By tensor name in the full model: the full shape, and local slices with their positions."""


@dataclass(frozen=True)
class Session:
    """A trainer with its corpus and mesh, on this rank."""

    trainer: Trainer
    corpus: Corpus
    mesh: ParallelMesh

    @property
    def stages(self) -> list[Any]:
        """The pipeline stages of this rank (``layers.transformer.Transformer``)."""
        return list(self.trainer.train_state.stages)

    def parts(self, grads: bool = False) -> Parts:
        """Return the parameters that the optimizer of this rank updates, or their gradients.

        These are the master weights if the compute dtype differs. Both replicas of an embedding that is tied over
        pipeline stages have the name of the embedding.
        """
        parts: Parts = {}
        for owned in self.trainer.train_state.data_parallel.owned():
            value = owned.value.grad if grads else owned.value.detach()
            assert value is not None, f"{owned.name} has no gradient"
            self._add(parts, owned.name, owned.sharding.shape, value, owned.boxes(self.mesh))
        return parts

    def copies(self) -> Parts:
        """Return the parameters and correction biases that the modules of this rank use, except FSDP shards."""
        self.trainer.train_state.data_parallel.wait_weights()
        parts: Parts = {}
        for stage in self.stages:
            shardings = shardings_of(stage)
            tensors: list[tuple[str, Tensor]] = [*named_parameters([stage])]
            for name, layer in moe_layers(stage):
                if layer.router.correction_bias is not None:
                    tensors.append((f"{name}.router.correction_bias", layer.router.correction_bias))
            for name, tensor in tensors:
                if not isinstance(tensor, DTensor):
                    sharding = shardings.get(name, Sharding(tuple(tensor.shape)))
                    boxes = sharding.boxes(self.mesh.place, self.mesh.sizes)
                    self._add(parts, name, sharding.shape, tensor.detach(), boxes)
        return parts

    def _add(self, parts: Parts, name: str, shape: tuple[int, ...], value: Tensor, boxes: Sequence[Box]) -> None:
        slices = parts.setdefault(self.stages[0].origin_of(name), (shape, []))[1]
        # Clones: a view would be sent to another process with its full storage.
        slices += [(replace(box), value[box.local].clone()) for box in boxes]


@contextlib.contextmanager
def session(config: TrainConfig, **options: Any) -> Iterator[Session]:
    """Build a trainer on all ranks of the default process group, or on one rank without a group. Collective.

    Args:
        options: arguments of ``Trainer``.
    """
    ranks = Ranks.make()
    mesh = ParallelMesh(config.parallel.mapping(ranks.world))
    corpus = open_corpus(config, ranks)
    architecture = architecture_of(config, corpus.vocab_size)
    train_state = build(config, architecture, mesh)
    feed = open_feed(config, corpus, mesh, architecture, config.run.steps)
    with contextlib.ExitStack() as stack:
        stack.enter_context(feed)
        stack.callback(train_state.close)
        yield Session(Trainer(config, train_state, feed, ranks, **options), corpus, mesh)


@dataclass(frozen=True)
class TrainingResult:
    """Results of a training run on one rank.

    Attributes:
        losses, grad_norms: values of each step, the same on all ranks.
        dropped: mean fraction of dropped slots over steps and layers.
        parts, copies: see ``Session``.
    """

    losses: list[float]
    grad_norms: list[float]
    dropped: float
    parts: Parts
    copies: Parts


def train(config: TrainConfig) -> TrainingResult:
    """Train to the end. Collective."""
    with session(config) as training:
        training.trainer.fit()
        reports = training.trainer.reports
        dropped = [rate for report in reports for rate in report.load.dropped]
        return TrainingResult(
            [report.loss for report in reports],
            [report.grad_norm for report in reports],
            sum(dropped) / max(len(dropped), 1),
            training.parts(),
            training.copies(),
        )


def assemble(parts_of_ranks: Sequence[Parts]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Assemble full tensors from the slices of all ranks, and compare replicas.

    Returns:
        Full tensors by name, with NaN in elements that no rank has and the value of the first rank in replicated ones;
        and the largest difference between replicas by name, relative to the largest element of the tensor.
    """
    full: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    difference: dict[str, Tensor] = {}
    for parts in parts_of_ranks:
        for name, (shape, slices) in parts.items():
            if name not in full:
                dtype = slices[0][1].dtype if slices else torch.float32
                full[name] = torch.full(shape, torch.nan, dtype=dtype, device="cpu")
                filled[name], difference[name] = (
                    torch.zeros(shape, dtype=torch.bool, device="cpu"),
                    torch.zeros((), dtype=torch.float32, device="cpu"),
                )
            for box, values in slices:
                first, is_filled = full[name][box.full], filled[name][box.full]
                if bool(is_filled.any()):
                    largest = (values - first)[is_filled].abs().max().float()
                    difference[name] = torch.maximum(difference[name], largest)
                full[name][box.full] = torch.where(is_filled, first, values)
                filled[name][box.full] = True
    scales = {name: tensor.abs().max().clamp(min=torch.finfo(torch.float32).tiny) for name, tensor in full.items()}
    return full, {name: float(difference[name] / scales[name]) for name in full}
