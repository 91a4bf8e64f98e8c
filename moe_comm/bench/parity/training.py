"""A training run without a folder, and what it leaves on one rank: for comparing one mapping with another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_comm.layers.moe.load import moe_layers
from moe_comm.layers.parallel.shard import shardings_of
from moe_comm.topology import Box, ParallelMesh, Sharding
from moe_comm.train.config import TrainConfig
from moe_comm.train.data import Corpus
from moe_comm.train.loop.build import architecture_of, build
from moe_comm.train.loop.feed import CorpusFeed
from moe_comm.train.loop.job import open_corpus
from moe_comm.train.loop.trainer import Trainer
from moe_comm.train.parallel.owned import named
from moe_comm.train.ranks import Ranks

Parts = dict[str, tuple[tuple[int, ...], list[tuple[Box, Tensor]]]]
"""By a tensor's name in the whole model: its whole shape, and pieces with their places in it."""


@dataclass(frozen=True)
class Session:
    """A trainer and what it works on, on this rank."""

    trainer: Trainer
    corpus: Corpus
    mesh: ParallelMesh

    @property
    def stages(self) -> list[Any]:
        """This rank's parts of the model (``layers.transformer.Transformer``)."""
        return list(self.trainer.machinery.stages)

    def parts(self, grads: bool = False) -> Parts:
        """What this rank's optimizer updates (masters, where weights compute in another dtype), or their gradients.

        Both copies of an embedding tied over a pipeline are pieces of the embedding.
        """
        found: Parts = {}
        for owned in self.trainer.machinery.data_parallel.owned():
            value = owned.value.grad if grads else owned.value.detach()
            assert value is not None, f"{owned.name} has no gradient"
            self._add(found, owned.name, owned.sharding.shape, value, owned.boxes(self.mesh))
        return found

    def copies(self) -> Parts:
        """What this rank's modules compute with: parameters that it holds whole, and routers' correction biases.

        FSDP's parameters are not among them: what it keeps of them is what it owns.
        """
        found: Parts = {}
        for stage in self.stages:
            shardings = shardings_of(stage)
            held: list[tuple[str, Tensor]] = [*named([stage])]
            for name, layer in moe_layers(stage):
                if layer.router.correction_bias is not None:
                    held.append((f"{name}.router.correction_bias", layer.router.correction_bias))
            for name, tensor in held:
                if not isinstance(tensor, DTensor):
                    sharding = shardings.get(name, Sharding(tuple(tensor.shape)))
                    boxes = sharding.boxes(self.mesh.place, self.mesh.sizes)
                    self._add(found, name, sharding.shape, tensor.detach(), boxes)
        return found

    def _add(self, found: Parts, name: str, shape: tuple[int, ...], value: Tensor, boxes: Sequence[Box]) -> None:
        pieces = found.setdefault(self.stages[0].origin_of(name), (shape, []))[1]
        # Clones: a view would take its whole storage along to another process.
        pieces += [(replace(box), value[box.local].clone()) for box in boxes]


@contextlib.contextmanager
def session(config: TrainConfig, **options: Any) -> Iterator[Session]:
    """Build ``config`` on all ranks of the default process group, or alone where there is none. Collective.

    Args:
        options: of ``Trainer``.

    Raises:
        ConfigError: the mapping does not fit the model or the ranks.
    """
    ranks = Ranks.make()
    mesh = ParallelMesh(config.parallel.mapping(ranks.world))
    corpus = open_corpus(config, ranks)
    machinery = build(config, architecture_of(config, corpus.vocab_size), mesh)
    feed = CorpusFeed(corpus, mesh, config.parallel.context, config.data.micro_batches, config.run.steps)
    with contextlib.ExitStack() as stack:
        stack.enter_context(feed)
        for stage in machinery.stages:
            stack.callback(stage.close)  # type: ignore[arg-type]
        stack.callback(machinery.runner.close)
        yield Session(Trainer(config, machinery, feed, ranks, **options), corpus, mesh)


@dataclass(frozen=True)
class Ended:
    """What one rank knows after training: the same numbers everywhere, and its own parts of the weights.

    losses, grad_norms: of each step. dropped: mean share of slots over steps and layers.
    """

    losses: list[float]
    grad_norms: list[float]
    dropped: float
    parts: Parts
    copies: Parts


def train(config: TrainConfig) -> Ended:
    """Train to the end. Collective."""
    with session(config) as here:
        here.trainer.fit()
        reports = here.trainer.reports
        dropped = [rate for report in reports for rate in report.load.dropped]
        return Ended(
            [report.loss for report in reports],
            [report.grad_norm for report in reports],
            sum(dropped) / max(len(dropped), 1),
            here.parts(),
            here.copies(),
        )


def assemble(parts_of_ranks: Sequence[Parts]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Whole tensors from every rank's parts, and how far copies of an element are apart.

    Returns:
        By name: the tensor, NaN where no rank has any of it, the first rank's where several have; and the largest
        difference of a copy from that, over the largest element of the tensor. 0: the copies are equal. NaN: one is.
    """
    whole: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    apart: dict[str, Tensor] = {}
    for parts in parts_of_ranks:
        for name, (shape, pieces) in parts.items():
            if name not in whole:
                dtype = pieces[0][1].dtype if pieces else torch.float32
                whole[name] = torch.full(shape, torch.nan, dtype=dtype)
                seen[name], apart[name] = torch.zeros(shape, dtype=torch.bool), torch.zeros(())
            for box, piece in pieces:
                before, known = whole[name][box.whole], seen[name][box.whole]
                if bool(known.any()):
                    apart[name] = torch.maximum(apart[name], (piece - before)[known].abs().max().float())
                whole[name][box.whole] = torch.where(known, before, piece)
                seen[name][box.whole] = True
    scales = {name: tensor.abs().max().clamp(min=torch.finfo(torch.float32).tiny) for name, tensor in whole.items()}
    return whole, {name: float(apart[name] / scales[name]) for name in whole}
