"""Placement of experts: the ranks that hold each expert, and the layout of a rank's slots. Needs no process group."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain

from moe_comm.errors import ConfigError


@dataclass(frozen=True)
class ExpertPlacement:
    """Contiguous ranges of global expert ids, one per rank of the expert-parallel group.

        7 experts on 3 ranks, balanced:   rank 0: 0 1 2   rank 1: 3 4   rank 2: 5 6

    Args:
        experts_per_rank: number of experts of each rank; zero is allowed, and the numbers may differ.
    """

    experts_per_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.experts_per_rank or min(self.experts_per_rank) < 0 or sum(self.experts_per_rank) < 1:
            raise ConfigError(
                "experts_per_rank must have at least one rank, at least one expert and no negative count; "
                f"got {self.experts_per_rank}"
            )

    @classmethod
    def balanced(cls, num_experts: int, world: int) -> ExpertPlacement:
        """Divide ``num_experts`` evenly over ``world`` ranks; the first ``num_experts % world`` ranks hold one more."""
        if num_experts < 1 or world < 1:
            raise ConfigError(f"num_experts and world must be at least 1; got num_experts={num_experts}, world={world}")
        base, extra = divmod(num_experts, world)
        return cls(tuple(base + (r < extra) for r in range(world)))

    @classmethod
    def of(cls, num_experts: int, world: int, experts_per_rank: Sequence[int] | None = None) -> ExpertPlacement:
        """Return the placement with ``experts_per_rank``, or a balanced one if that is None.

        Raises:
            ConfigError: ``experts_per_rank`` does not fit ``num_experts`` and ``world``.
        """
        if experts_per_rank is None:
            return cls.balanced(num_experts, world)
        if len(experts_per_rank) != world or sum(experts_per_rank) != num_experts:
            raise ConfigError(
                f"experts_per_rank must hold {world} counts that add up to {num_experts}; "
                f"got {list(experts_per_rank)} ({len(experts_per_rank)} counts, sum {sum(experts_per_rank)})"
            )
        return cls(tuple(experts_per_rank))

    @property
    def num_experts(self) -> int:
        """Number of experts of all ranks."""
        return sum(self.experts_per_rank)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.experts_per_rank)

    @property
    def offsets(self) -> tuple[int, ...]:
        """``world + 1`` ids; rank ``r`` holds ``range(offsets[r], offsets[r + 1])``."""
        return (0, *accumulate(self.experts_per_rank))

    def sliced(self, parts: int) -> ExpertPlacement:
        """Return the placement of expert slices, where ``parts`` adjacent ranks divide the experts of one rank of this
        placement.

        Each slice has its own id. Three experts on two ranks, in two slices each:

            rank             0        1        2        3          4 = 2 * 2 ranks
            slice ids        0 1      2 3      4        5
            slices           0a 1a    0b 1b    2a       2b         first half a, second half b
        """
        return ExpertPlacement(tuple(count for count in self.experts_per_rank for _ in range(parts)))

    def slice_ids(self, parts: int) -> list[list[int]]:
        """Return the ids in ``sliced(parts)`` of the ``parts`` slices of each expert."""
        ids = []
        for start, count in zip(self.offsets, self.experts_per_rank, strict=False):
            ids += [[parts * start + part * count + e for part in range(parts)] for e in range(count)]
        return ids

    def local_range(self, rank: int) -> range:
        """Return the global ids of the experts that ``rank`` holds."""
        offsets = self.offsets
        return range(offsets[rank], offsets[rank + 1])

    def owner(self, expert: int) -> int:
        """Return the rank that holds ``expert``."""
        if not 0 <= expert < self.num_experts:
            raise ConfigError(f"expert id {expert} is outside 0..{self.num_experts - 1}")
        return bisect_right(self.offsets, expert) - 1


@dataclass(frozen=True)
class Placement:
    """Which ranks of the expert-parallel group hold each expert, in any assignment.

        owners ((0,), (1, 0), (0,), (1,)) on 2 ranks    rank 0: 0 1 2   rank 1: 1 3   home of expert 1: rank 1

    A rank stores the experts that it is the home of, then copies in ascending order of their global ids.

    Args:
        owners: for each expert the ranks that hold it. The first rank is the expert's home, which holds the parameters
            and the optimizer state; the others hold copies.
        world: number of ranks.
        version: number of switches since the start of training.
        slots: slots for copies on each rank, which may be empty. A layer can switch between placements with equal
            ``slots``. None: each rank has as many slots as copies.
        order: for each rank the experts that it is the home of, in the order in which it stores them. None: ascending,
            as one rank must.

    Raises:
        ConfigError: there is no expert; an expert has no owner, has one owner twice or has an owner outside the world;
            a rank has more copies than slots; ``order`` does not fit ``owners``.
    """

    owners: tuple[tuple[int, ...], ...]
    world: int
    version: int = 0
    slots: int | None = None
    order: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if not self.owners or self.world < 1 or self.version < 0:
            raise ConfigError(
                "a placement needs at least one expert, at least one rank and a version of at least 0; "
                f"got {len(self.owners)} experts, {self.world} ranks, version {self.version}"
            )
        for expert, ranks in enumerate(self.owners):
            if not ranks:
                raise ConfigError(f"expert {expert} of {len(self.owners)} has no owner")
            if len(set(ranks)) < len(ranks):
                raise ConfigError(f"expert {expert} has an owner twice: ranks {list(ranks)}")
            if min(ranks) < 0 or max(ranks) >= self.world:
                raise ConfigError(f"expert {expert} has owners {list(ranks)}, but the ranks are 0..{self.world - 1}")
        # With uneven homes, the rank with the fewest can hold more copies than the others.
        most = self.num_experts - min(self.homes_per_rank)
        if self.slots is not None and not max(self.copies_per_rank) <= self.slots <= most:
            raise ConfigError(
                f"the ranks have {list(self.copies_per_rank)} copies of other ranks' experts, and {self.slots} slots "
                f"for them each; slots must hold all copies, and be at most the {most} experts of other ranks"
            )
        if self.order is not None:
            ascending = self._ascending_homes
            if tuple(tuple(sorted(experts)) for experts in self.order) != ascending:
                raise ConfigError(f"the ranks are the homes of the experts {ascending}; got them as {self.order}")
            if self.order == ascending:
                object.__setattr__(self, "order", None)  # equal placements compare as equal
            elif self.world == 1:
                raise ConfigError(
                    f"one rank stores all experts in ascending order, in which state dicts list them; got {self.order}"
                )

    @classmethod
    def contiguous(
        cls, num_experts: int, world: int, experts_per_rank: Sequence[int] | None = None, slots: int | None = None
    ) -> Placement:
        """Return the placement of ``ExpertPlacement.of``: consecutive experts on each rank, and no copies."""
        return replace(cls.of_layout(ExpertPlacement.of(num_experts, world, experts_per_rank)), slots=slots)

    @classmethod
    def of_layout(cls, layout: ExpertPlacement) -> Placement:
        """Return the placement of consecutive experts with the counts of ``layout``."""
        counts = layout.experts_per_rank
        return cls(tuple((rank,) for rank, count in enumerate(counts) for _ in range(count)), layout.world)

    def fitting(self, num_experts: int, world: int) -> Placement:
        """Return this placement.

        Raises:
            ConfigError: it is for another number of experts or ranks.
        """
        if (self.num_experts, self.world) != (num_experts, world):
            raise ConfigError(
                f"the placement is for {self.num_experts} experts on {self.world} ranks; this layer has {num_experts} "
                f"experts on {world} expert-parallel ranks"
            )
        return self

    def with_owners(self, owners: Sequence[Sequence[int]]) -> Placement:
        """Return the next version, with other owners.

        Experts that keep their home keep their position on it, and the others fill the free positions. So a switch
        moves only experts that change their rank.

        Raises:
            ConfigError: as the constructor.
        """
        new = replace(self, owners=tuple(map(tuple, owners)), version=self.version + 1, order=None)
        if new.homes_per_rank != self.homes_per_rank:
            return new
        order = []
        for rank, stored in enumerate(new._ascending_homes):
            old = self.homes_of(rank)
            arriving = iter([expert for expert in stored if expert not in old])
            order.append(tuple(expert if expert in stored else next(arriving) for expert in old))
        return replace(new, order=tuple(order))

    def restricted(self, ranks: Sequence[int], copies: bool = True) -> Placement:
        """Return the next version, on some of the ranks, which are numbered from 0 in this order.

            owners ((0,), (1, 2), (1,), (2,)) on ranks 0 and 2: ((0,), (1,), (0,), (1,))

        An expert whose home is not among them has its home at its first copy. If it has none, its home is the rank
        with the fewest experts, among those that have any.

        copies: keep copies. Otherwise experts are on their homes only.
        """
        position = {rank: index for index, rank in enumerate(ranks)}
        kept = [[position[rank] for rank in (of if copies else of[:1]) if rank in position] for of in self.owners]
        counts = [sum(of[:1] == [index] for of in kept) for index in range(len(ranks))]
        holders = [index for index, rank in enumerate(ranks) if self.homes_per_rank[rank]] or range(len(ranks))
        for of in kept:
            if not of:
                of.append(min(holders, key=counts.__getitem__))
                counts[of[0]] += 1
        return Placement(tuple(map(tuple, kept)), len(ranks), self.version + 1)

    @property
    def num_experts(self) -> int:
        """Number of experts, each counted once."""
        return len(self.owners)

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """The home of each expert."""
        return tuple(ranks[0] for ranks in self.owners)

    @cached_property
    def has_copies(self) -> bool:
        """Whether an expert has more than one owner."""
        return any(len(ranks) > 1 for ranks in self.owners)

    @cached_property
    def homes_per_rank(self) -> tuple[int, ...]:
        """Number of experts that each rank is the home of."""
        return tuple(map(self.homes.count, range(self.world)))

    @cached_property
    def copies_per_rank(self) -> tuple[int, ...]:
        """Number of copies that each rank holds."""
        copies = [rank for ranks in self.owners for rank in ranks[1:]]
        return tuple(map(copies.count, range(self.world)))

    @cached_property
    def slots_per_rank(self) -> tuple[int, ...]:
        """Number of slots of each rank: for the experts that it is the home of, and for copies."""
        return tuple(
            homes + (copies if self.slots is None else self.slots)
            for homes, copies in zip(self.homes_per_rank, self.copies_per_rank, strict=True)
        )

    @property
    def layout(self) -> ExpertPlacement:
        """The layout of the ranks' slots, in which the slots of a rank have consecutive ids."""
        return ExpertPlacement(self.slots_per_rank)

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether the id of each slot is the id of its expert."""
        return sum(self.slots_per_rank) == self.num_experts and self.homes_are_consecutive

    @property
    def homes_are_consecutive(self) -> bool:
        """Whether each rank is the home of consecutive experts, in ascending order."""
        return self.order is None and list(self.homes) == sorted(self.homes)

    @cached_property
    def _ascending_homes(self) -> tuple[tuple[int, ...], ...]:
        homes: list[list[int]] = [[] for _ in range(self.world)]
        for expert, ranks in enumerate(self.owners):
            homes[ranks[0]].append(expert)
        return tuple(map(tuple, homes))

    def homes_of(self, rank: int) -> tuple[int, ...]:
        """Return the global ids of the experts that ``rank`` is the home of, in the order in which it stores them."""
        return (self.order or self._ascending_homes)[rank]

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Return the global ids of the experts that ``rank`` holds: ``homes_of``, then the copies, ascending."""
        return self.homes_of(rank) + tuple(expert for expert, ranks in enumerate(self.owners) if rank in ranks[1:])

    def slot_ids(self) -> list[list[int]]:
        """Return for each expert the ids of its slots in ``layout``, in the order of its owners."""
        position = {
            (expert, rank): offset + place
            for rank, offset in enumerate(self.layout.offsets[:-1])
            for place, expert in enumerate(self.experts_of(rank))
        }
        return [[position[expert, rank] for rank in ranks] for expert, ranks in enumerate(self.owners)]

    @cached_property
    def digest(self) -> int:
        """40-bit hash of all fields but the version, and 16-bit version.

        The same in every process. ``Header`` packs it into one word with its flags. 0 for the contiguous placement of
        version 0 without slots for copies.
        """
        if self.is_contiguous and not self.version:
            return 0
        fields = json.dumps((self.owners, self.slots_per_rank, self.order)).encode()
        hashed = int.from_bytes(hashlib.blake2b(fields, digest_size=8).digest(), "little")
        return hashed >> 24 << 16 | self.version & 0xFFFF

    def to_json(self) -> str:
        """Return the placement as a JSON object."""
        value = {"owners": self.owners, "world": self.world, "version": self.version}
        options = {"slots": self.slots, "order": self.order}
        return json.dumps(value | {name: one for name, one in options.items() if one is not None})

    @classmethod
    def from_json(cls, text: str) -> Placement:
        """Return the placement that ``to_json`` wrote.

        Raises:
            ConfigError: ``text`` is not such an object.
        """
        try:
            value = json.loads(text)
            owners, world, version = tuple(map(tuple, value["owners"])), value["world"], value["version"]
            slots, order = value.get("slots"), value.get("order")
            order = None if order is None else tuple(map(tuple, order))
            numbers = (world, version, *chain(*owners, *(order or ())), *(() if slots is None else (slots,)))
            if any(type(number) is not int for number in numbers):
                raise TypeError("owners, world, version, slots and order must be integers")
            return cls(owners, world, version, slots, order)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"not a placement: {text[:200]!r} ({type(error).__name__}: {error})") from error
