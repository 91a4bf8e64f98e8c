"""Balance of the rows of one step: which rows of an expert are computed on another rank than its home.

    rows of each expert ──plan_rows──▶ (expert, rank, rows) to lend      no rank computes more than ``limit`` rows

    homes {0 1} {2 3}, rows 9 3 1 1, limit 7:   12 2 without lending, 7 7 with 5 rows of expert 0 on rank 1

Rows of an expert are ordered by (source rank, token, slot) and cut into consecutive intervals: the home's first, then
those of the other ranks in ascending order. Integers only, so all ranks compute the same plan from the same counts. The
native core and the GPU kernels have the same function (csrc/planner.h); this module is its reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from moe_comm.errors import ConfigError
from moe_comm.topology.placement import Placement

PARTS = 1000
"""Ratios are compared in thousandths."""
LIMITS = 8
"""A plan is chosen from those of this many limits."""
PASSES = 16
"""Passes of ``share_rows``, after which the differences have become small."""
RATES = {"cpu": (5e10, 5e9, 125e6), "cuda": (6e14, 4.5e11, 5e10)}
"""Assumed FLOP/s of a rank in GEMMs, and bytes/s of weights on one host and between hosts, by type of device: a core
and 1 Gbit/s; GEMMs of 16 bits on an H100, NVLink and 400 Gbit/s."""
COPY_NS = 50_000
"""Assumed time of the transfers of a copy and of its gradient, without their bytes."""
_ODD, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class Lent(NamedTuple):
    """Rows of an expert that a rank computes, which is not its home."""

    expert: int
    rank: int
    rows: int


class Limits(NamedTuple):
    """Limits of the rows of a rank in one step, and costs.

    rows: at least the mean; lend to keep to it, where that pays. memory: never exceeded. row_ns, copy_ns: costs of a
    row and of a copy that is not resident. copies: slots for copies on each rank.
    """

    rows: int
    memory: int
    row_ns: int
    copy_ns: int
    copies: int


@dataclass(frozen=True)
class Balance:
    """Lend experts to other ranks in steps in which their homes have too many rows.

    In each forward pass the ranks exchange their row counts before the rows. A rank with more rows than the limit lends
    experts: other ranks receive their weights and compute some of their rows, and backward returns the gradients to the
    home. The outputs and the gradients of tokens and routing weights keep their bits.

    Args:
        rows: maximum rows of a rank, as a multiple of the mean. Even random routing varies, so 1.0 lends in nearly
            every step. Precise to thousandths.
        memory: maximum rows of a rank, as a multiple of the (token, slot) pairs of the rank that has the most. It also
            applies where lending does not pay. None: no such limit.
        copies: experts of other ranks that a rank computes with at most. Their weights take memory, unless ranks
            dispatch through shared memory, in which they read them. None: as many as the rank with the most experts
            has, which are enough for any routing. With fewer, steps may exceed ``rows``.
        worth: rows of the busiest rank that each copy must save: the cost of sending an expert's weights and gradient,
            divided by that of a row. None: from the size of an expert, ``flops`` and ``bytes_per_s``.
        flops: FLOP/s of a rank in the GEMMs of its experts. None: 5e10 on a CPU, 6e14 on a GPU.
        bytes_per_s: rate at which a rank receives weights. None: 5e9 on one host, 1.25e8 between hosts; for GPUs 4.5e11
            and 5e10.

    Raises:
        ConfigError: a value is out of range.
    """

    rows: float = 1.125
    memory: float | None = None
    copies: int | None = None
    worth: int | None = None
    flops: float | None = None
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "memory"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 1 <= value <= 2**20):
                raise ConfigError(f"Balance.{name} must be a multiple of at least 1; got {value!r}")
        for name, least in (("copies", 1), ("worth", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not least <= value < 2**31):
                raise ConfigError(f"Balance.{name} must be an integer of at least {least}; got {value!r}")
        for name in ("flops", "bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 1e6 <= value <= 1e18):
                raise ConfigError(f"Balance.{name} must be from 1e6 to 1e18; got {value!r}")

    def placement(self, homes: Placement) -> Placement:
        """Return ``homes`` with slots for copies.

        Raises:
            ConfigError: ``homes`` has copies or slots for them; or ``memory`` is set, and the ranks have too few slots
                to keep to it with any routing.
        """
        if homes.world == 1:
            return homes
        most = max(homes.homes_per_rank)
        if self.memory is not None and self.copies is not None and self.copies < most:
            raise ConfigError(
                f"Balance(memory={self.memory}) holds for any routing only with copies of at least {most}, the largest "
                f"number of experts of a rank; got copies={self.copies}"
            )
        slots = most if self.copies is None else min(self.copies, most)
        if homes.has_copies or homes.slots not in (None, slots):
            raise ConfigError("balance chooses the copies of experts; pass a placement without copies and slots")
        return replace(homes, slots=slots)

    def costs(self, weights: int, size: int, hosts: int, device: str = "cpu") -> tuple[int, int]:
        """Return the nanoseconds of a row and of a copy in forward and backward.

        A copy receives its weights in both passes, and returns its gradient in fp32.

        Args:
            weights: elements of an expert. size: bytes of each. hosts: number of hosts of the ranks. device: its type.
        """
        if self.worth is not None:
            return 1, self.worth
        flops, on_host, between_hosts = RATES.get(device, RATES["cpu"])
        rate = self.bytes_per_s or (on_host if hosts == 1 else between_hosts)
        row = min(max(1, round(6e9 * weights / (self.flops or flops))), 2**31)
        return row, min(COPY_NS + round((2 * size + 4) * 1e9 * weights / rate), 2**48)

    def limits(self, rows: int, slots: int, world: int, copies: int, costs: tuple[int, int]) -> Limits:
        """Return the limits of a step.

        Args:
            rows: rows of all ranks.
            slots: (token, slot) pairs of the rank that has the most.
            copies: slots for copies on each rank.
            costs: see above.
        """
        even = -(-rows // world)
        limit = max(even, rows * round(self.rows * PARTS) // (PARTS * world))
        memory = rows if self.memory is None else max(even, self.most_rows(slots))
        return Limits(min(limit, memory), memory, *costs, copies)

    def most_rows(self, slots: int) -> int:
        """Return the maximum rows of a rank by ``memory``, which must be set. slots: see ``limits``."""
        assert self.memory is not None
        return -(-slots * round(self.memory * PARTS) // PARTS)

    def words(self) -> tuple[int, ...]:
        """Return the settings but costs as integers, which all ranks compare."""
        memory = 0 if self.memory is None else round(self.memory * PARTS)
        return round(self.rows * PARTS), memory, self.copies or 0


def plan_rows(
    loads_E: Sequence[int], home_E: Sequence[int], world: int, limits: Limits, residents: Iterable[tuple[int, int]] = ()
) -> tuple[Lent, ...]:
    """Return the rows to lend, by expert and rank; () if no rank has too many rows, or lending does not pay.

    A plan costs the rows of its busiest rank, and the copies that a rank sends or receives at most. The cheapest of the
    plans of several limits, from ``limits.rows`` up to the busiest rank's rows, is chosen. With too few slots for
    copies, a limit has no plan.

    Args:
        loads_E: rows of each expert.
        home_E: home of each expert.
        residents: (expert, rank) of copies whose weights are on the rank already; they are used first.
    """
    present = set(residents)
    copies_E = Counter(expert for expert, _ in present)
    residents = sorted(present, key=lambda one: (copies_E[one[0]], -loads_E[one[0]], one))
    total_W = rows_of_ranks(loads_E, home_E, world, ())
    busiest = max(total_W)
    end = min(busiest, limits.memory + 1)
    required, least, best = busiest > limits.memory, busiest * limits.row_ns, tuple[Lent, ...]()
    for limit in range(limits.rows, end, max(1, (end - limits.rows) // LIMITS)):
        if not required and limit * limits.row_ns + (0 if residents else limits.copy_ns) >= least:
            break
        lent = _within(loads_E, home_E, total_W, limit, limits.copies, residents)
        if lent is None:
            continue
        cost = limits.row_ns * max(rows_of_ranks(loads_E, home_E, world, lent))
        sent = [(home_E[expert], rank) for expert, rank, _ in lent if (expert, rank) not in present]
        cost += limits.copy_ns * busiest_transfers(sent)
        if cost < least or required:
            required, least, best = False, cost, lent
    return best


def share_rows(loads_E: Sequence[int], placement: Placement) -> tuple[Lent, ...]:
    """Return the rows that the copies of ``placement`` compute, so that the ranks have as even rows as they allow.

    Each pass moves half of the difference between the home and the rank of each copy. This reaches ranks that have
    copies of others' experts, and whose own have copies.
    """
    homes, left_E = placement.homes, list(loads_E)
    moved = {(expert, rank): 0 for expert, ranks in enumerate(placement.owners) for rank in ranks[1:]}
    total_W = rows_of_ranks(loads_E, homes, placement.world, ())
    for _ in range(PASSES if moved else 0):
        for (expert, rank), rows in moved.items():
            home = homes[expert]
            more = max(-rows, min(left_E[expert], int((total_W[home] - total_W[rank]) / 2)))
            moved[expert, rank] += more
            left_E[expert] -= more
            total_W[home] -= more
            total_W[rank] += more
    return tuple(Lent(*pair, rows) for pair, rows in sorted(moved.items()) if rows)


def intervals(
    lent: Iterable[Lent], loads_E: Sequence[int], before_E: Sequence[int], own_E: Sequence[int]
) -> dict[int, list[int]]:
    """Return for each lent expert how many of a rank's rows its home and each rank of ``lent`` compute, in order.

    Args:
        loads_E: rows of each expert.
        before_E, own_E: those of the source ranks before this one, and of this rank.
    """
    result: dict[int, list[int]] = {}
    for one in lent:
        result.setdefault(one.expert, []).append(one.rows)
    for expert, lengths in result.items():
        end, first = 0, before_E[expert]
        lengths.insert(0, loads_E[expert] - sum(lengths))
        for owner, length in enumerate(lengths):
            start, end = end, end + length
            lengths[owner] = max(0, min(end, first + own_E[expert]) - max(start, first))
    return result


def digest(lent: Iterable[Lent]) -> int:
    """Return a 64-bit hash of a plan; 0 for the empty plan."""
    total = 0
    for one in lent:
        value = 0
        for word in one:
            value = (value ^ word + 1) * _ODD & _MASK
            value ^= value >> 32
        total += value
    return total & _MASK


def busiest_transfers(pairs: Iterable[tuple[int, int]]) -> int:
    """Return the largest number of experts that one rank sends or receives. pairs: (source, destination) of each."""
    return max(Counter(side for pair in pairs for side in enumerate(pair)).values(), default=0)


def rows_of_ranks(loads_E: Sequence[int], home_E: Sequence[int], world: int, lent: Iterable[Lent]) -> list[int]:
    """Return the rows that each rank computes."""
    total_W = [0] * world
    for load, home in zip(loads_E, home_E, strict=True):
        total_W[home] += load
    for expert, rank, rows in lent:
        total_W[home_E[expert]] -= rows
        total_W[rank] += rows
    return total_W


def _within(
    loads_E: Sequence[int],
    home_E: Sequence[int],
    total_W: Sequence[int],
    limit: int,
    copies: int,
    residents: Sequence[tuple[int, int]],
) -> tuple[Lent, ...] | None:
    """Return a plan in which no rank has more than ``limit`` rows, or None if a rank has too few slots for copies."""
    left_E = list(loads_E)
    moved: dict[tuple[int, int], int] = {}
    surplus, room = [max(one - limit, 0) for one in total_W], [max(limit - one, 0) for one in total_W]
    for expert, rank in residents:
        if rows := min(surplus[home_E[expert]], room[rank], left_E[expert]):
            moved[expert, rank] = rows
            left_E[expert] -= rows
            surplus[home_E[expert]] -= rows
            room[rank] -= rows
    pairs = []
    while max(surplus):
        donor, taker = surplus.index(max(surplus)), room.index(max(room))
        rows = min(surplus[donor], room[taker])
        pairs.append((donor, taker, rows))
        surplus[donor] -= rows
        room[taker] -= rows
    lent = _experts_of(pairs, left_E, home_E, moved)
    if _most(lent) > copies:  # a plan with one donor for each rank needs at most as many slots as it has experts
        lent = _experts_of(_even(total_W), list(loads_E), home_E, {})
    return lent if _most(lent) <= copies else None


def _even(total_W: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (donor, taker, rows) after which all ranks have equal rows, up to one. Each taker has one donor."""
    world, pairs = len(total_W), []
    base, extra = divmod(sum(total_W), world)
    over_W = [rows - base - (rank < extra) for rank, rows in enumerate(total_W)]
    while max(over_W) > 0:
        donor, taker = over_W.index(max(over_W)), over_W.index(min(over_W))
        pairs.append((donor, taker, -over_W[taker]))
        over_W[donor] += over_W[taker]
        over_W[taker] = 0
    return pairs


def _experts_of(
    pairs: Iterable[tuple[int, int, int]], left_E: list[int], home_E: Sequence[int], moved: dict[tuple[int, int], int]
) -> tuple[Lent, ...]:
    """Choose the experts of ``pairs``, the most rows first: the smallest expert that is enough, or else the largest."""
    for donor, taker, rows in sorted(pairs, key=lambda pair: (pair[0], -pair[2], pair[1])):
        own = [expert for expert, home in enumerate(home_E) if home == donor]
        while rows:
            enough = [expert for expert in own if left_E[expert] >= rows]
            expert = min(enough, key=left_E.__getitem__) if enough else max(own, key=left_E.__getitem__)
            part = min(left_E[expert], rows)
            moved[expert, taker] = moved.get((expert, taker), 0) + part
            left_E[expert] -= part
            rows -= part
    return tuple(Lent(*pair, rows) for pair, rows in sorted(moved.items()))


def _most(lent: Iterable[Lent]) -> int:
    return max(Counter(one.rank for one in lent).values(), default=0)
