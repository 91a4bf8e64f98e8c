"""Collectives on small CPU values over all ranks of a run."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.agree import agree
from moe_comm.errors import PeerDied, PeerTimeout, RankMismatch
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import communication_span
from moe_comm.runtime.groups import group_of

POLL_S = 0.5
"""Seconds between two polls in ``run_on_some``."""


@dataclass(frozen=True)
class Ranks:
    """This rank and the group of all ranks of the run. ``world_group`` is None if there is one rank."""

    rank: int = 0
    world: int = 1
    world_group: ProcessGroup | None = None

    @classmethod
    def make(cls) -> Self:
        """Return the ranks of the default process group, or a single rank without one."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints, writes the run folder and generates the sample."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum ``values`` over all ranks, in place. Collective."""
        return all_sum(values, self.world_group)

    def broadcast_text(self, text: str) -> str:
        """Return rank 0's ``text`` on all ranks. Collective."""
        return self.gather_texts(text if self.is_first else "")[0]

    def gather_texts(self, text: str) -> list[str]:
        """Return each rank's ``text``, by rank. Collective."""
        if self.world_group is None:
            return [text]
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        sizes = torch.zeros(self.world, dtype=torch.int64, device="cpu")
        sizes[self.rank] = len(text.encode())
        self.sum(sizes)
        rows = torch.zeros(self.world, max(int(sizes.max()), 1), dtype=torch.uint8, device="cpu")
        rows[self.rank, : int(sizes[self.rank])] = data[: int(sizes[self.rank])]
        self.sum(rows)
        return [bytes(row[:size].numpy()).decode() for row, size in zip(rows, sizes.tolist(), strict=True)]

    def run_on_first(self, work: Callable[[], str]) -> str:
        """Run ``work`` on rank 0 and return its result on all ranks; see ``run_on_some``. Collective."""
        return self.run_on_some(work if self.is_first else None)[0]

    def run_on_some(self, work: Callable[[], str] | None) -> list[str]:
        """Run ``work`` on the ranks that pass it; return the results by rank, "" for the other ranks. Collective.

        ``work`` may take any time: the ranks poll for its end instead of waiting in one collective, which would time
        out. If ``work`` fails on one rank, all ranks raise: errors of this package with their own class.
        """
        if self.world_group is None:
            return [work() if work is not None else ""]
        outcome: list[str | BaseException] = [] if work is not None else [""]  # empty until ``work`` ends

        def run() -> None:
            try:
                assert work is not None
                outcome.append(work())
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=run, name="run-on-some", daemon=True)
        if work is not None:
            thread.start()
        ready = 0
        while ready < self.world:
            if not outcome:
                thread.join(POLL_S)
            ready = int(self.sum(torch.tensor([float(bool(outcome))], dtype=torch.float32, device="cpu")))
        return agree(outcome[0], self.gather_texts)

    def first_with_folder(self, folder: Path) -> int:
        """Return the lowest rank that shares ``folder`` with this rank, and can fill it for the others. Collective.

        Ranks of one host share the folder, and so do hosts that mount the same file system. The lowest rank creates a
        marker file, and each rank that sees it shares the folder; this repeats with the remaining ranks. If the marker
        cannot be created or is not visible in time (network file systems), a rank counts as alone. Therefore filling
        the folder must be atomic.
        """
        if self.world_group is None:
            return self.rank
        token = self.broadcast_text(uuid.uuid4().hex)
        first = -1
        while True:
            assigned = torch.zeros(self.world, dtype=torch.float32, device="cpu")
            assigned[self.rank] = first >= 0
            unassigned = (self.sum(assigned) == 0).nonzero()
            if not len(unassigned):
                return first
            candidate = int(unassigned[0])
            marker = folder / f".seen-{token}-{candidate}"
            with contextlib.suppress(OSError):  # a read-only folder may have been filled before
                if self.rank == candidate:
                    first = candidate
                    folder.mkdir(parents=True, exist_ok=True)
                    marker.touch(exist_ok=False)
            self.barrier()
            with contextlib.suppress(OSError):
                if first < 0 and marker.exists():
                    first = candidate
            self.barrier()
            if self.rank == candidate:
                with contextlib.suppress(OSError):
                    marker.unlink(missing_ok=True)

    def check_equal(self, what: str, text: str, advice: str) -> None:
        """Raise ``RankMismatch`` on all ranks unless ``text`` is equal on all ranks. Collective."""
        digests = self.gather_texts(hashlib.blake2b(text.encode(), digest_size=8).hexdigest())
        if len(set(digests)) > 1:
            shown = ", ".join(f"rank {rank}: {digest}" for rank, digest in enumerate(digests))
            raise RankMismatch(f"ranks disagree on {what} ({shown}); {advice}")

    def barrier(self) -> None:
        """Wait for all ranks. Raises the errors of ``all_sum``. Collective."""
        self.sum(torch.zeros(1, dtype=torch.float32, device="cpu"))


def all_sum(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum ``values`` over ``group`` in place. None: this rank alone.

    Raises:
        PeerDied, PeerTimeout: another rank failed, or did not respond within the group's timeout.
    """
    if group is None:
        return values
    try:
        nbytes = 2 * (group.size() - 1) * values.nbytes // group.size()
        with communication_span(Kind.COLLECTIVE, "sum of CPU values", group=group_of(group), nbytes=nbytes):
            dist.all_reduce(values, group=group)
    except RuntimeError as error:
        kind = PeerTimeout if "timed out" in str(error).lower() else PeerDied
        raise kind(f"a sum over {dist.get_world_size(group)} ranks did not complete: {error}") from error
    return values
