"""Small agreements between all ranks of a run. Values are on the host; they travel as the group takes them."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm import errors
from moe_comm.errors import MoeCommError, PeerDied, PeerTimeout, RankMismatch
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import moving
from moe_comm.runtime.group_names import group_of

ASK_S = 0.5
"""Seconds between two questions whether the ranks that work are done."""


@dataclass(frozen=True)
class Ranks:
    """This process among all ranks of the run. ``world_group`` is None where it is alone."""

    rank: int = 0
    world: int = 1
    world_group: ProcessGroup | None = None

    @classmethod
    def make(cls) -> Self:
        """The ranks of the default process group, or one rank where there is none."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        whole: Any = dist.group
        return cls(dist.get_rank(), dist.get_world_size(), whole.WORLD)

    @property
    def is_first(self) -> bool:
        """Rank 0 prints, writes the run folder, and draws the sample."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """``values`` summed over all ranks, in place."""
        return all_sum(values, self.world_group)

    def text_from_first(self, text: str) -> str:
        """Rank 0's ``text``, on every rank."""
        if self.world_group is None:
            return text
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        size = torch.tensor([len(text.encode())])
        dist.broadcast(size, 0)
        if not self.is_first:
            data = torch.empty(max(int(size), 1), dtype=torch.uint8)
        dist.broadcast(data, 0)
        return bytes(data[: int(size)].numpy()).decode()

    def texts(self, text: str) -> list[str]:
        """Every rank's ``text``, by rank. Collective."""
        if self.world_group is None:
            return [text]
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(text.encode())
        self.sum(sizes)
        rows = torch.zeros(self.world, max(int(sizes.max()), 1), dtype=torch.uint8)
        rows[self.rank, : int(sizes[self.rank])] = data[: int(sizes[self.rank])]
        self.sum(rows)
        return [bytes(row[:size].numpy()).decode() for row, size in zip(rows, sizes.tolist(), strict=True)]

    def while_first(self, work: Callable[[], str]) -> str:
        """What ``work`` returned on rank 0, on every rank, however long it takes. Collective."""
        return self.while_some(work if self.is_first else None)[0]

    def while_some(self, work: Callable[[], str] | None) -> list[str]:
        """What ``work`` returned, by rank ("" for those without any), however long it takes. Collective.

        The others do not sit in one collective, which has a deadline; they ask again and again. What failed on one
        rank is raised on all: an error of ours as one of its class.
        """
        if self.world_group is None:
            return [work() if work is not None else ""]
        found: list[str | BaseException] = [] if work is not None else [""]

        def run() -> None:
            try:
                assert work is not None
                found.append(work())
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=run, name="one-for-all", daemon=True)
        if work is not None:
            thread.start()
        ready = 0
        while ready < self.world:
            if not found:
                thread.join(ASK_S)
            ready = int(self.sum(torch.tensor([float(bool(found))])))
        mine = found[0]
        told = self.texts(f"{type(mine).__name__}\n{mine}" if isinstance(mine, BaseException) else f"\n{mine}")
        if isinstance(mine, BaseException):
            raise mine
        answers = [text.partition("\n") for text in told]
        for rank, (failed, _, message) in enumerate(answers):
            if failed:
                kind: Any = getattr(errors, failed, None)
                if kind is None:  # Python's own, or torch's
                    raise MoeCommError(f"rank {rank}: {failed}: {message}")
                raise kind(f"rank {rank}: {message}")
        return [text for _, _, text in answers]

    def first_with(self, folder: Path) -> int:
        """The first rank that has the same ``folder`` before it, which can fill it for the others. Collective.

        Ranks of one host share it, and so do hosts that have mounted it alike: the first one leaves a mark, the others
        look for it; the first one without looks after itself and leaves one too, and so on. Where no mark can be left
        or it is not seen in time (a network's file system), a rank is taken to be alone, so filling must be atomic.
        """
        if self.world_group is None:
            return self.rank
        run = self.text_from_first(uuid.uuid4().hex)
        first = -1
        while True:
            known = torch.zeros(self.world)
            known[self.rank] = first >= 0
            missing = (self.sum(known) == 0).nonzero()
            if not len(missing):
                return first
            at = int(missing[0])
            mark = folder / f".seen-{run}-{at}"
            with contextlib.suppress(OSError):  # what cannot be written to may have been filled before
                if self.rank == at:
                    first = at
                    folder.mkdir(parents=True, exist_ok=True)
                    mark.touch()
            self.barrier()
            with contextlib.suppress(OSError):
                if first < 0 and mark.exists():
                    first = at
            self.barrier()
            if self.rank == at:
                with contextlib.suppress(OSError):
                    mark.unlink(missing_ok=True)

    def check_equal(self, what: str, digest: int, advice: str) -> None:
        """Raise ``RankMismatch`` on every rank unless ``digest`` (below 2**63) is the same everywhere."""
        if self.world_group is None:
            return
        seen = torch.zeros(self.world, dtype=torch.int64)
        seen[self.rank] = digest
        found = self.sum(seen).tolist()
        if len(set(found)) > 1:
            shown = ", ".join(f"rank {r}: {value:x}" for r, value in enumerate(found))
            raise RankMismatch(f"ranks disagree on {what} ({shown}); {advice}")

    def barrier(self) -> None:
        """Wait for all ranks; one that is gone is an error of ours, as in ``sum``."""
        self.sum(torch.zeros(1))


def all_sum(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """``values`` summed over ``group`` in place; None: this rank alone.

    Raises:
        PeerDied, PeerTimeout: another rank has ended, or did not come within the group's timeout.
    """
    if group is None:
        return values
    try:
        nbytes = 2 * (group.size() - 1) * values.nbytes // group.size()
        with moving(Kind.COLLECTIVE, "sum of what ranks know", group=group_of(group), nbytes=nbytes):
            dist.all_reduce(values, group=group)
    except RuntimeError as error:
        kind = PeerTimeout if "timed out" in str(error).lower() else PeerDied
        raise kind(f"a sum over {dist.get_world_size(group)} ranks did not complete: {error}") from error
    return values


def digest(tensors: Iterable[Tensor]) -> int:
    """63 bits that depend on every bit of ``tensors``."""
    total = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(total.digest(), "little") >> 1
