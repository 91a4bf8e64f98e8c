"""Read batches of a corpus, sharded over data-parallel and context-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Protocol, Self

import torch

from moe_comm.layers.attention.config import Context
from moe_comm.layers.attention.sequence import Documents, shard_sequence
from moe_comm.topology import ParallelMesh
from moe_comm.train.data import Batch, Corpus, GlobalBatch, Prefetch
from moe_comm.train.pipeline.batch import MicroBatch


@dataclass(frozen=True)
class LengthLoads:
    """Predicted work of each rank of dp and cp, with static lengths and with balanced ones, relative to the mean.

    static: () if there are fewer sequences than ranks of dp.
    """

    static: tuple[float, ...]
    balanced: tuple[float, ...]

    @classmethod
    def sum(cls, loads: Sequence[LengthLoads]) -> LengthLoads:
        """Return the work of several micro-batches together."""
        totals = [
            [*map(sum, zip(*one, strict=True))] for one in zip(*((x.static, x.balanced) for x in loads), strict=True)
        ]
        return cls(*(tuple(round(load * len(one) / max(sum(one), 1), 4) for load in one) for one in totals))


@dataclass(frozen=True)
class StepBatch:
    """This rank's micro-batches of one step, and the number of targets over all ranks.

    lengths: work of the ranks, if lengths are balanced.
    """

    micro: list[MicroBatch]
    num_targets: int
    lengths: LengthLoads | None = None


class Feed(Protocol):
    """Source of batches. A batch depends only on its step."""

    def train(self, step: int) -> StepBatch: ...

    def validation(self, count: int) -> Iterable[StepBatch]: ...


class CorpusFeed:
    """Batches of ``corpus`` for this rank of ``mesh``, with prefetch of the next step.

    Args:
        micro_batches: micro-batches per step.
        last: number of steps of the run.
    """

    def __init__(self, corpus: Corpus, mesh: ParallelMesh, context: Context, micro_batches: int, last: int) -> None:
        self._corpus, self._mesh, self._context = corpus, mesh, context
        self._micro_batches = micro_batches
        self._prefetch: Prefetch[list[Batch]] = Prefetch(self._read_step, last)
        cp = mesh.size("cp")
        self._shard = None if cp == 1 else partial(shard_sequence, cp=cp, rank=mesh.place["cp"], context=context)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._prefetch.close()

    def train(self, step: int) -> StepBatch:
        """Return the batch of ``step`` (from 0). Collective over the cp group if documents are separate."""
        return self._step_batch(self._prefetch.get(step))

    def validation(self, count: int) -> Iterator[StepBatch]:
        """Yield ``count`` validation batches, the same for every mapping. Collective as ``train``."""
        for batch in self._corpus.validation_batches(count):
            yield self._step_batch(self._read(batch))

    def _read_step(self, step: int) -> list[Batch]:
        return self._read(self._corpus.batch_of(step))

    def _read(self, batch: GlobalBatch) -> list[Batch]:
        dp_rank, dp = self._mesh.place["dp"], self._mesh.size("dp")
        micro_batches = (batch.micro(i, self._micro_batches) for i in range(self._micro_batches))
        return [micro_batch.local(dp_rank, dp, self._shard) for micro_batch in micro_batches]

    def _step_batch(self, batches: list[Batch]) -> StepBatch:
        device = torch.device(self._mesh.device)
        return StepBatch([self._micro(batch.to(device)) for batch in batches], batches[0].num_targets)

    def _micro(self, batch: Batch) -> MicroBatch:
        documents = None
        if batch.documents_BS is not None:
            documents = Documents.of(batch.documents_BS, self._mesh.group("cp"), self._context)
        return MicroBatch(batch.ids_BS, batch.targets_BS, batch.positions_BS, documents, batch.mask_BS)
