"""The ranks of a run: who holds which experts, and small agreements between all ranks.

    4 ranks, ep 2:      experts 0..3   experts 4..7
        replica 0           rank 0         rank 1       <- expert-parallel group {0, 1}
        replica 1           rank 2         rank 3       <- expert-parallel group {2, 3}
                        expert-data-parallel groups {0, 2} and {1, 3}: the same experts, gradients summed

Every rank is also a data-parallel rank: it has its own sequences and a copy of everything that is not an expert.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.errors import ConfigError, PeerDied, PeerTimeout, RankMismatch


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of the run. Groups are None where they would have one member.

    ep_group: ranks that together hold one set of experts. edp_group: ranks that hold the same experts.
    """

    rank: int = 0
    world: int = 1
    ep: int = 1
    world_group: ProcessGroup | None = None
    ep_group: ProcessGroup | None = None
    edp_group: ProcessGroup | None = None

    @classmethod
    def make(cls, ep: int | None) -> Self:
        """The ranks of the default process group, or one rank where there is none. Collective.

        Raises:
            ConfigError: ``ep`` does not divide the number of ranks.
        """
        world = dist.get_world_size() if dist.is_initialized() else 1
        ep = world if ep is None else ep
        if world % ep:
            raise ConfigError(f"parallel.ep must divide the number of ranks ({world}); got {ep}")
        if world == 1:
            return cls()
        rank = dist.get_rank()
        ep_group = _subgroup([list(range(r, r + ep)) for r in range(0, world, ep)], rank)
        edp_group = _subgroup([list(range(r, world, ep)) for r in range(ep)], rank)
        return cls(rank, world, ep, _world_group(), ep_group, edp_group)

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


def _subgroup(members: list[list[int]], rank: int) -> ProcessGroup | None:
    """The group among ``members`` that ``rank`` is in; every rank must make every group, in the same order."""
    if len(members[0]) == 1:
        return None
    if len(members) == 1:
        return _world_group()
    groups = [dist.new_group(ranks) for ranks in members]
    mine: ProcessGroup = next(group for ranks, group in zip(members, groups, strict=True) if rank in ranks)
    return mine


def _world_group() -> ProcessGroup | None:
    world: Any = dist.group
    group: ProcessGroup | None = world.WORLD
    return group
