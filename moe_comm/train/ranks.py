"""Small agreements between all ranks of a run. Values are on the host; they travel as the group takes them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.errors import MoeCommError, PeerDied, PeerTimeout, RankMismatch
from moe_comm.runtime.meter import COMMUNICATION

ASK_S = 0.5
"""Seconds between two questions whether the first rank is done."""


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

    def while_first(self, work: Callable[[], str]) -> str:
        """What ``work`` returned on rank 0, on every rank, however long it takes. Collective.

        The others do not sit in one collective, which has a deadline; they ask again and again.
        """
        if self.world_group is None:
            return work()
        found: list[str | BaseException] = []

        def run() -> None:
            try:
                found.append(work())
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=run, name="first-rank", daemon=True)
        if self.is_first:
            thread.start()
        done = torch.zeros(1)
        while not done:
            if self.is_first:
                thread.join(ASK_S)
            done = self.sum(torch.tensor([float(bool(found))]))
        mine = found[0] if found else ""
        failed = isinstance(mine, BaseException)
        told = self.text_from_first(f"{'-' if failed else '+'}{mine}")
        if isinstance(mine, BaseException):
            raise mine
        if told.startswith("-"):
            raise MoeCommError(f"rank 0 failed: {told[1:]}")
        return told[1:]

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
        if self.world_group is not None:
            dist.barrier()


def all_sum(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """``values`` summed over ``group`` in place; None: this rank alone.

    Raises:
        PeerDied, PeerTimeout: another rank has ended, or did not come within the group's timeout.
    """
    if group is None:
        return values
    try:
        with COMMUNICATION:
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
