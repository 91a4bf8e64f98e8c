"""Batches of documents on the ranks that ``solve`` assigns them to.

    global micro-batch ──offsets──▶ documents ──solve──▶ ranks of each ──read──▶ this rank's tokens [1, T]

A micro-batch has the same documents as with static lengths, so that a step's loss and gradients differ in rounding
only. Lengths come from the offsets of the corpus: each rank computes the ranks of all documents and reads its own
tokens, in the thread that prefetches the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moe_comm.errors import ConfigError
from moe_comm.layers.attention.placed import DocumentPlacement
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.lengths.cost import LengthCost
from moe_comm.layers.transformer.lengths.loads import static_loads
from moe_comm.layers.transformer.lengths.solve import solve
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.train.config import TrainConfig
from moe_comm.train.data import Batch, Corpus, GlobalBatch
from moe_comm.train.data.packing import DocumentRun, Packing, document_runs, read_run
from moe_comm.train.data.sequences import document_lengths
from moe_comm.train.feed import CorpusFeed, LengthLoads, StepBatch
from moe_comm.train.pipeline.batch import MicroBatch


@dataclass(frozen=True)
class PlacedBatch(Batch):
    """This rank's tokens of a micro-batch, [1, T]. placement: the documents of all ranks. loads: their work."""

    placement: DocumentPlacement | None = None
    loads: LengthLoads | None = None


class BalancedFeed(CorpusFeed):
    """Batches of ``corpus`` for this rank of ``mesh``, with documents on the ranks that balance their work.

    Args:
        cost: work of a document.
        micro_batches: micro-batches per step.
        last: number of steps of the run.
    """

    def __init__(self, corpus: Corpus, mesh: ParallelMesh, cost: LengthCost, micro_batches: int, last: int) -> None:
        super().__init__(corpus, mesh, "ring", micro_batches, last)
        self._cost = cost
        self._world = mesh.size("cp", "dp")
        self._rank = mesh.place["dp"] * mesh.size("cp") + mesh.place["cp"]

    def _read(self, batch: GlobalBatch) -> list[Batch]:
        micro_batches = (batch.micro(i, self._micro_batches) for i in range(self._micro_batches))
        return [self._read_documents(micro_batch) for micro_batch in micro_batches]

    def _read_documents(self, batch: GlobalBatch) -> Batch:
        runs = documents_of(batch)
        lengths = [run.length for _, run in runs]
        assignment = solve(lengths, self._world, self._cost)
        placement = DocumentPlacement.of(lengths, assignment.ranks, self._world, self._mesh.size("tp"))
        dp, cp = self._mesh.size("dp"), self._mesh.size("cp")
        # With static lengths each rank of dp needs a sequence.
        static = static_work(batch, dp, cp, self._cost) if batch.rows >= dp else ()
        pieces, padding = placement.pieces[self._rank], placement.padding[self._rank]
        tokens = sum(piece.size for piece in pieces)
        # Token 0 is a valid id for padding: it has no target, and MoE layers skip it.
        ids_S, positions_S = torch.zeros(2, tokens + padding, dtype=torch.int64, device="cpu")
        targets_S = torch.full_like(ids_S, -100)
        at = 0
        for document, begin, size in pieces:
            part = slice(at, at + size)
            packing, run = runs[document]
            ids, targets = read_run(packing, run, begin, size)
            ids_S[part], targets_S[part] = torch.from_numpy(ids), torch.from_numpy(targets)
            positions_S[part] = torch.arange(begin, begin + size, device="cpu")
            at += size
        positions_S[tokens:] = torch.arange(padding, device="cpu")
        mask_S = torch.arange(tokens + padding, device="cpu") < tokens
        return PlacedBatch(
            ids_S[None],
            targets_S[None],
            positions_S[None],
            None,
            batch.num_targets,
            mask_S[None] if any(placement.padding) else None,
            placement,
            LengthLoads(static, assignment.loads),
        )

    def _step_batch(self, batches: list[Batch]) -> StepBatch:
        loads = [batch.loads for batch in batches if isinstance(batch, PlacedBatch) and batch.loads is not None]
        return replace(super()._step_batch(batches), lengths=LengthLoads.sum(loads))

    def _micro(self, batch: Batch) -> MicroBatch:
        assert isinstance(batch, PlacedBatch) and batch.placement is not None
        documents = batch.placement.documents(batch.ids_BS.device)
        return MicroBatch(batch.ids_BS, batch.targets_BS, batch.positions_BS, documents, batch.mask_BS)


def documents_of(batch: GlobalBatch) -> list[tuple[Packing, DocumentRun]]:
    """Return the documents of all sequences, without reading tokens. Padding is left out."""
    indices = zip(batch.indices.source_B.tolist(), batch.indices.index_B.tolist(), strict=True)
    return [
        (batch.packings[source], run)
        for source, index in indices
        for run in document_runs(batch.packings[source], index)
    ]


def static_work(batch: GlobalBatch, dp: int, cp: int, cost: LengthCost) -> tuple[int, ...]:
    """Return the work of each rank of dp and cp for a micro-batch with static lengths. dp is the slower axis."""
    sequences = document_lengths(batch.packings, batch.indices)
    by_rank = [sequences[batch.rows_of(dp_rank, dp)] for dp_rank in range(dp)]
    return static_loads(by_rank, batch.packings[0].seq_len, cp, cost).work


def open_feed(
    config: TrainConfig, corpus: Corpus, mesh: ParallelMesh, architecture: TransformerConfig, last: int
) -> CorpusFeed:
    """Return the batches of this rank for ``config.parallel.lengths``.

    Raises:
        ConfigError: the model cannot be trained with balanced lengths.
    """
    parallel, micro_batches = config.parallel, config.data.micro_batches
    if parallel.lengths == "static":
        return CorpusFeed(corpus, mesh, parallel.context, micro_batches, last)
    check_model(architecture)
    return BalancedFeed(corpus, mesh, cost_of(config, architecture, mesh.config), micro_batches, last)


def cost_of(config: TrainConfig, architecture: TransformerConfig, mapping: ParallelConfig) -> LengthCost:
    """Return the work of documents of a run, in time with ``parallel.machine``.

    Raises:
        ConfigError: the machine is unknown, or its description is invalid.
    """
    shape, half = ModelShape.of(architecture), config.model.dtype == "bfloat16"
    cost = LengthCost.of(shape, mapping.ep == 1, 2 if half else 4)
    if config.parallel.machine is None:
        return cost
    # The planner is not imported without a machine.
    from moe_plan.machine.hardware_table import cluster_named
    from moe_plan.step.lengths import measured_cost

    tokens = config.data.batch // config.data.micro_batches * config.data.seq_len // (mapping.dp * mapping.cp)
    cluster = cluster_named(config.parallel.machine, mapping.world)
    return measured_cost(cost, shape, cluster, "bf16" if half else "fp32", max(tokens, 1), mapping)


def check_model(architecture: TransformerConfig) -> None:
    """Raise ConfigError if results of the model depend on the sequences of a rank."""
    reasons: Sequence[tuple[bool, str]] = (
        (architecture.moe.capacity is not None, "a capacity of experts"),
        (
            architecture.moe.router.balance_form == "sequence" and architecture.moe.router.balance_loss > 0,
            "a balance loss of each sequence",
        ),
    )
    for applies, reason in reasons:
        if applies:
            raise ConfigError(f'parallel.lengths = "balanced" does not support {reason}: sequences are not kept whole')
