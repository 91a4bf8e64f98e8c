"""Resume a run from its newest valid snapshot in memory or checkpoint on disk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from moe_comm.errors import CheckpointError
from moe_comm.observe.records import FaultRecord
from moe_comm.train.checkpoint.exchange import PeerLost
from moe_comm.train.checkpoint.folder import complete_checkpoints
from moe_comm.train.ranks import Ranks


class StateLoader(Protocol):
    """The part of ``RunSaver`` that loads state."""

    def load_from_memory(self, least: int, log: Callable[[str], None]) -> int | None: ...

    def resume(self, path: Path) -> int: ...


def resume_run(
    saver: StateLoader,
    folder: Path,
    ranks: Ranks,
    log: Callable[[str], None],
    record_fault: Callable[[FaultRecord], None],
) -> tuple[int, str]:
    """Load the newest valid state. Collective.

    A snapshot in memory is preferred to a checkpoint of the same step. If a checkpoint cannot be used, the previous one
    is tried; the steps since then are repeated.

    Args:
        folder: folder of the checkpoints.
        record_fault: receives a record for each checkpoint that cannot be used.

    Returns:
        The number of completed steps and the source, as in ``Attempt``.

    Raises:
        CheckpointError: there are checkpoints, but none can be used. The error is that of the newest one.
    """

    def newest_first() -> str:
        checkpoints = reversed(complete_checkpoints(folder, lenient=True))
        return json.dumps([(str(saved.path), saved.step) for saved in checkpoints])

    text = ranks.run_on_first(newest_first)
    first_error: CheckpointError | None = None
    # The last pair stands for no checkpoint: then a snapshot of any step is accepted.
    for path, saved_step in [*json.loads(text), ("", 0)]:
        step = saver.load_from_memory(max(saved_step, 1), log)
        if step is not None:
            log(f"resumes after step {step} from memory")
            return step, "peer memory"
        if not path:
            break
        try:
            step = saver.resume(Path(path))
        except PeerLost:
            raise
        except CheckpointError as error:
            first_error = first_error or error
            record_fault(FaultRecord(time.time(), saved_step, "checkpoint", [], "restart", str(error)))
            log(f"{error}; trying an earlier checkpoint")
            continue
        log(f"resumes after step {step} from {path}")
        return step, "checkpoint"
    if first_error is not None:
        raise first_error
    return 0, "fresh"
