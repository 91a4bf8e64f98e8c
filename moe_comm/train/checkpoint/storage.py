"""Storage of torch's distributed checkpoint: safetensors, JSON, checksums and a completion marker, without pickle."""

from __future__ import annotations

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
from moe_comm.train.checkpoint.files import FileDigest
from moe_comm.train.checkpoint.metadata import CheckpointContent, ChunkLocation, encode
from moe_comm.train.checkpoint.reader import CheckpointReader


class _Storage:
    """The methods of torch's storage interfaces for which there is nothing to do."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class CheckpointStorageWriter(_Storage, StorageWriter):
    """Writes one checkpoint; one on every rank.

    Args:
        parent: the folder of the run's checkpoints.
        finished: returns the shared state and the state of each rank; called on the coordinator when all is written.

    Attributes:
        written: bytes of this rank's file.
        created: whether this rank has created the ``.partial`` folder.
    """

    def __init__(
        self, parent: Path, step: int, rank: int, finished: Callable[[], tuple[dict[str, Any], list[dict[str, Any]]]]
    ) -> None:
        self._parent, self._step, self._rank, self._finished = parent, step, rank, finished
        self.written = 0
        self.created = False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_global_plan(self, plans: Any) -> Any:
        # On the coordinator, when all ranks have a valid plan and before any rank writes.
        folder.check_version(self._parent, self._step)
        with _convert_os_errors(folder.partial_path(self._parent, self._step)):
            folder.create_partial(self._parent, self._step)
        self.created = True
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
                parts.append((f"{item.index.fqn}@{at}", tensor))
            with _convert_os_errors(path):
                if not path.parent.is_dir():
                    raise CheckpointError(
                        f"{path.parent} does not exist on rank {self._rank}, although rank 0 created it: the folder of "
                        f"the checkpoints must be on a file system that all ranks share"
                    )
                digest, starts = files.write_parts(path, parts, {"step": str(self._step)})
            self.written = digest.size
            for item, (_, tensor), start in zip(plan.items, parts, starts, strict=True):
                results.append(WriteResult(item.index, tensor.nbytes, (ChunkLocation(name, start), digest)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        locations, digests = {}, {}
        for result in (result for of_rank in results for result in of_rank):
            location, digest = result.storage_data
            locations[result.index] = location
            digests[location.file] = digest
        state, ranks = self._finished()
        saved = CheckpointContent(
            self._step, state, tuple(ranks), Metadata(metadata.state_dict_metadata, storage_data=locations)
        )
        with _convert_os_errors(folder.partial_path(self._parent, self._step)):
            written: dict[str, FileDigest] = dict(digests)
            path = folder.partial_path(self._parent, self._step) / folder.METADATA
            written[folder.METADATA] = files.write_json(path, encode(saved))
            partial = folder.complete(self._parent, self._step, written)
            # As a load does, before it replaces a checkpoint and others are deleted.
            CheckpointReader(partial).verify_sizes()
            folder.publish(self._parent, self._step)


class CheckpointStorageReader(_Storage, StorageReader):
    """Reads tensors of a checkpoint whose files have been verified, by a plan."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader

    def read_metadata(self, *args: Any, **_: Any) -> Metadata:
        return self._reader.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **_: Any) -> None:
        pass

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item)
            self._reader.copy_item(item, target)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


@contextmanager
def _convert_os_errors(path: Path) -> Iterator[None]:
    """Convert an OSError to a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {error.filename or path}: {error.strerror or error}") from None
