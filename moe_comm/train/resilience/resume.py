"""Where ranks that are started again go on: the newest state that is whole, in memory or on the disk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from moe_comm.errors import CheckpointError
from moe_comm.observe.records import FaultRecord
from moe_comm.train.checkpoint.exchange import PeerLost
from moe_comm.train.checkpoint.folder import complete
from moe_comm.train.ranks import Ranks


class Source(Protocol):
    """As ``RunSaver``."""

    def recall(self, least: int, say: Callable[[str], None]) -> int | None: ...

    def resume(self, path: Path) -> int: ...


def go_on(
    saver: Source, folder: Path, ranks: Ranks, say: Callable[[str], None], noticed: Callable[[FaultRecord], None]
) -> tuple[int, str]:
    """The steps done, and where from, as in ``Attempt``. Collective.

    The newest checkpoint, or what memory holds if that is no older. A checkpoint that cannot be used is passed over for
    the one before it; the steps since are done again.

    Args:
        folder: of the checkpoints. noticed: takes what was passed over.

    Raises:
        CheckpointError: of the newest one, where there are some and none can be used.
    """
    found = [(str(one.path), one.step) for one in reversed(complete(folder, lenient=True))] if ranks.is_first else []
    checkpoints: list[tuple[str, int]] = json.loads(ranks.text_from_first(json.dumps(found)))
    first: CheckpointError | None = None
    for path, saved in checkpoints:
        kept = saver.recall(max(saved, 1), say)
        if kept is not None:
            say(f"goes on after step {kept} from memory")
            return kept, "peer memory"
        try:
            step = saver.resume(Path(path))
        except PeerLost:
            raise
        except CheckpointError as error:
            first = first or error
            noticed(FaultRecord(time.time(), saved, "checkpoint", [], "restart", str(error)))
            say(f"{error}; looks for an earlier one")
            continue
        say(f"goes on after step {step} from {path}")
        return step, "checkpoint"
    kept = saver.recall(1, say)
    if kept is not None:
        say(f"goes on after step {kept} from memory")
        return kept, "peer memory"
    if first is not None:
        raise first
    return 0, "fresh"
