"""torch's checkpoint storage over our files: safetensors, JSON, checksums and a completion marker instead of pickle."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from moe_comm.errors import CheckpointError
from moe_comm.train.checkpoint import files, folder
from moe_comm.train.checkpoint.files import Digest, Part
from moe_comm.train.checkpoint.metadata import Place, Saved, encode
from moe_comm.train.checkpoint.reader import CheckpointReader


class Writer(StorageWriter):
    """Writes one checkpoint; one on every rank.

    Args:
        parent: the folder of the run's checkpoints.
        finished: the state and what each rank gave of its own, for the coordinator when all is written.

    Attributes:
        written: bytes of this rank's file.
    """

    def __init__(
        self, parent: Path, step: int, rank: int, finished: Callable[[], tuple[dict[str, Any], list[dict[str, Any]]]]
    ) -> None:
        self._parent, self._step, self._rank, self._finished = parent, step, rank, finished
        self.written = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        # Rank 0 plans before any rank writes, so its folder is there in time.
        if is_coordinator:
            with _named(folder.partial_path(self._parent, self._step)):
                folder.begin(self._parent, self._step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"rank-{self._rank:05d}.safetensors"
        path = folder.partial_path(self._parent, self._step) / name
        results = []
        if plan.items:
            parts = []
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                at = ",".join(map(str, item.index.offset or ()))
                parts.append(Part(f"{item.index.fqn}@{at}", tensor))
            with _named(path):
                if not path.parent.is_dir():
                    raise CheckpointError(
                        f"{path.parent} is not there on rank {self._rank}, but rank 0 made it: the folder of the "
                        f"checkpoints must be on a file system that all ranks share"
                    )
                digest, starts = files.write_parts(path, parts, {"step": str(self._step)})
            self.written = digest.size
            for item, part, start in zip(plan.items, parts, starts, strict=True):
                results.append(WriteResult(item.index, part.tensor.nbytes, (Place(name, start), digest)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places, digests = {}, {}
        for result in (result for of_rank in results for result in of_rank):
            place, digest = result.storage_data
            places[result.index] = place
            digests[place.file] = digest
        state, ranks = self._finished()
        saved = Saved(self._step, state, tuple(ranks), Metadata(metadata.state_dict_metadata, storage_data=places))
        with _named(folder.partial_path(self._parent, self._step)):
            written: dict[str, Digest] = dict(digests)
            path = folder.partial_path(self._parent, self._step) / folder.METADATA
            written[folder.METADATA] = files.write_json(path, encode(saved))
            folder.publish(self._parent, self._step, written)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Reader(StorageReader):
    """Reads by a plan from a checkpoint whose files have been verified."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **_: Any) -> Metadata:
        return self._reader.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **_: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item)
            self._reader.copy_item(item, target)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turns an OSError into a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {error.filename or path}: {error.strerror or error}") from None
