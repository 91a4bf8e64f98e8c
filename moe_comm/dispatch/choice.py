"""Which backend ``auto`` takes, and why: what each can do for a group, and a rough cost in bytes.

Costs are bytes a token that one rank moves in dispatch and combine, forward, with K slots on W ranks, a row of
``hidden`` elements, and f = (W - 1) / W the share of rows that leave their rank:

    backend          over the wire                      copies in memory (read + write)
    shared_memory    0                                  2 K + (K + 1): one gather there, one weighted sum back
    peer_to_peer     0                                  the same, in the memory of the host's GPUs
    all_to_all       2 K f                              6 K + (5 K + 1): sort, exchange, reorder; and the way back
    all_gather       (W - 1) + K f                      2 W + 2 K + (5 K + 1)
      not            (W - 1) + (W - 1) * 4 / item       2 W + 2 K + 2 K + 4 (W + 1) / item
      deterministic
    hierarchical     H' + K h                           4 H' + 6 K + (5 K + 1) + 4: copies, slots, reorder; and back
      not            2 H'                               8 H' + 4 K + (3 K + 1) + 4
      deterministic

With H hosts, h = (H - 1) / H of the rows leave their host, and a token has experts on H' = (H - 1) (1 - (1 - 1 / H)^K)
other hosts, if routing is balanced. Of what crosses the wire, this goes between hosts: all of ``hierarchical``'s, whose
ranks of one host share memory (without the native core 2 K (f - h) more is on the wire, inside hosts); 2 K h of
``all_to_all``'s; and of ``all_gather``'s (W - 1) H / W for each collective, which goes round a ring, plus K h.

A wire_dtype makes the rows on the wire that much shorter; and where combine has one, ``all_gather`` sends rows back even
if it need not be deterministic. A wire byte counts as ``WIRE_BYTE`` bytes in memory, and one between hosts as
``BETWEEN_BYTE`` more. Only the order of the sums matters, and they are far apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moe_comm.dispatch.wire_dtype import AS_THEY_ARE, WireDtypes, bytes_per_row

WIRE_BYTE = 8.0
BETWEEN_BYTE = 16.0
"""What a byte between hosts costs beside ``WIRE_BYTE``: links of 10 to 100 Gbit/s are slower than loopback."""


@dataclass(frozen=True)
class GroupFacts:
    """What is known of a group when a backend is chosen; equal on all its ranks.

    hosts: number of hosts (that is, of /dev/shm) its ranks are on. native: every rank has the native core.
    device: "cpu" or "cuda", where the rows will be. transport: name of torch.distributed's backend.
    host_by_host: hosts have equal numbers of ranks, which are next to each other.
    peers: why kernels of one rank cannot reach the memory of another's GPU, "" if they can. emulate: CPU tensors may be
    moved by these kernels, on the CPU.
    """

    world: int
    hosts: int
    native: bool
    device: str
    transport: str
    host_by_host: bool = False
    peers: str = "nobody has looked whether its GPUs reach each other's memory"
    emulate: bool = False


@dataclass(frozen=True)
class Traffic:
    """What is expected to move. top_k None: not known yet, taken as 1, the least that can move.

    overlap: rows are to cross while experts compute. On GPUs ``auto`` then takes what can do that; on CPUs, where the
    cores that compute move rows too, it makes no difference.
    """

    top_k: int | None = None
    hidden: int = 1024
    item_bytes: int = 4
    deterministic: bool = True
    wire_dtypes: WireDtypes = AS_THEY_ARE
    overlap: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """One with ``item_bytes``."""
        return {2: torch.bfloat16, 8: torch.float64}.get(self.item_bytes, torch.float32)

    def wire_row(self, op: str) -> int:
        """Bytes of one row on the wire in ``op``."""
        return bytes_per_row(self.hidden, self.wire_dtypes.of(op), self.dtype)


@dataclass(frozen=True)
class Candidate:
    """One backend: why it cannot be used ("" if it can), what it moves, and its cost in memory bytes a token.

    wire_bytes: all that are sent; between_bytes: those of them that go to another host.
    """

    backend: str
    problem: str
    wire_bytes: float
    between_bytes: float
    copied_bytes: float
    if_asked: str = ""
    """Why ``auto`` does not take it though it can be used."""

    @property
    def cost(self) -> float:
        return WIRE_BYTE * self.wire_bytes + BETWEEN_BYTE * self.between_bytes + self.copied_bytes


@dataclass(frozen=True)
class Choice:
    """``picked`` is the cheapest usable candidate; ``str`` is the table."""

    picked: str
    facts: GroupFacts
    traffic: Traffic
    candidates: tuple[Candidate, ...]

    def problem(self, backend: str) -> str:
        """Why ``backend`` cannot be used here; "" if it can."""
        return next(c.problem for c in self.candidates if c.backend == backend)

    def __str__(self) -> str:
        facts, traffic = self.facts, self.traffic
        top_k = "unknown (1 assumed)" if traffic.top_k is None else str(traffic.top_k)
        lines = [
            f"{facts.world} rank(s) on {facts.hosts} host(s), {facts.device} tensors over {facts.transport}, "
            f"native core {'built' if facts.native else 'missing'}; top-k {top_k}, rows of "
            f"{traffic.hidden} x {traffic.item_bytes} bytes, {'' if traffic.deterministic else 'not '}deterministic"
            f"{', overlapped' if traffic.overlap else ''}",
            f"    {'backend':<14} {'wire KB/token':>13} {'to other hosts':>15} {'copied KB/token':>15} {'cost':>10}",
        ]
        for candidate in self.candidates:
            mark = "->" if candidate.backend == self.picked else "  "
            moved = (candidate.wire_bytes, candidate.between_bytes, candidate.copied_bytes, candidate.cost)
            wire, between, copied, cost = (v / 1e3 for v in moved)
            note = f"   no: {candidate.problem}" if candidate.problem else ""
            note = note or (f"   only if asked for: {candidate.if_asked}" if candidate.if_asked else "")
            lines.append(
                f" {mark} {candidate.backend:<14} {wire:13.1f} {between:15.1f} {copied:15.1f} {cost:10.1f}{note}"
            )
        return "\n".join(lines)


def choose(facts: GroupFacts, traffic: Traffic | None = None) -> Choice:
    """Judge every backend for a group."""
    traffic = traffic or Traffic()
    row = traffic.hidden * traffic.item_bytes
    world, slots = facts.world, traffic.top_k or 1
    away, abroad = slots * (world - 1) / world, slots * (facts.hosts - 1) / facts.hosts
    out, back = traffic.wire_row("dispatch"), traffic.wire_row("combine")
    in_place = (3 * slots + 1) * row
    found = [
        Candidate("local", "" if world == 1 else _LOCAL.format(world=world), 0, 0, in_place),
        Candidate("shared_memory", _shared_memory_problem(facts), 0, 0, in_place),
        _peer_to_peer(facts, in_place),
        Candidate("all_to_all", "", away * (out + back), abroad * (out + back), (11 * slots + 1) * row),
        _all_gather(facts, traffic, away, abroad),
        _hierarchical(facts, traffic, away, abroad),
    ]
    if traffic.overlap and facts.device == "cuda" and traffic.wire_dtypes.invariant:
        found = [c if c.backend in _OVERLAPS else replace(c, if_asked=c.if_asked or _SERIAL) for c in found]
    picked = min((c for c in found if not c.problem and not c.if_asked), key=lambda c: c.cost)
    return Choice(picked.backend, facts, traffic, tuple(found))


def _all_gather(facts: GroupFacts, traffic: Traffic, away: float, abroad: float) -> Candidate:
    row = traffic.hidden * traffic.item_bytes
    world, slots = facts.world, traffic.top_k or 1
    out, back = traffic.wire_row("dispatch"), traffic.wire_row("combine")
    ring = (world - 1) * facts.hosts / world if facts.hosts > 1 else 0
    if traffic.deterministic or traffic.wire_dtypes.of("combine").narrows(traffic.dtype):
        wire, between = (world - 1) * out + away * back, ring * out + abroad * back
        return Candidate("all_gather", "", wire, between, (2 * world + 7 * slots + 1) * row)
    wide = max(4, traffic.item_bytes) / traffic.item_bytes
    both = out + wide * row
    copied = (2 * world + 4 * slots + wide * (world + 1)) * row
    return Candidate("all_gather", "", (world - 1) * both, ring * both, copied)


def _hierarchical(facts: GroupFacts, traffic: Traffic, away: float, abroad: float) -> Candidate:
    row, slots = traffic.hidden * traffic.item_bytes, traffic.top_k or 1
    out, back = traffic.wire_row("dispatch"), traffic.wire_row("combine")
    others = (facts.hosts - 1) * (1 - (1 - 1 / facts.hosts) ** slots)
    if traffic.deterministic:
        between, copied = others * out + abroad * back, (4 * others + 11 * slots + 5) * row
    else:
        between, copied = others * (out + back), (8 * others + 7 * slots + 5) * row
    shares = facts.native and facts.device == "cpu"
    inside = 0 if shares else 2 * (away - abroad) * row
    if_asked = "" if facts.device == "cpu" else f"it has not been measured on {facts.device}"
    return Candidate("hierarchical", _hierarchical_problem(facts), between + inside, between, copied, if_asked)


_OVERLAPS = ("local", "all_to_all")
_SERIAL = "overlap is asked for, and its rows cross before and after the experts' products, not beside them"
_LOCAL = "this group has {world} ranks and 'local' sends nothing between them; use 'auto', or no group"


def _shared_memory_problem(facts: GroupFacts) -> str:
    if facts.world == 1:
        return "there is one rank; 'local' does the same without a heap to share"
    if facts.device != "cpu":
        return f"it moves rows in CPU memory and these are on {facts.device}; use 'all_to_all'"
    if facts.hosts > 1:
        return f"the ranks are on {facts.hosts} hosts; use 'all_to_all' between hosts, or 'hierarchical'"
    if not facts.native:
        return "the native core moe_comm._C is not built on every rank; run `pip install -e .`, or use 'all_to_all'"
    return ""


def _peer_to_peer(facts: GroupFacts, in_place: float) -> Candidate:
    if_asked = "on the CPU it emulates a GPU, for tests" if facts.device == "cpu" else ""
    return Candidate("peer_to_peer", _peer_to_peer_problem(facts), 0, 0, in_place, if_asked)


def _peer_to_peer_problem(facts: GroupFacts) -> str:
    if facts.world == 1:
        return "there is one rank; 'local' does the same without peers"
    if facts.device == "cpu" and not facts.emulate:
        return (
            "it moves rows between GPUs and these are on the CPU; use 'shared_memory', or, for tests, "
            "PeerToPeerOptions(emulate=True)"
        )
    if facts.device not in ("cpu", "cuda"):
        return f"it moves rows between NVIDIA GPUs and these are on {facts.device}; use 'all_to_all'"
    if facts.hosts > 1:
        return f"the ranks are on {facts.hosts} hosts; use 'all_to_all' between hosts, or 'hierarchical'"
    if not facts.native:
        return "the native core moe_comm._C is not built on every rank; run `pip install -e .`, or use 'all_to_all'"
    return f"{facts.peers}; use 'all_to_all'" if facts.device == "cuda" and facts.peers else ""


def _hierarchical_problem(facts: GroupFacts) -> str:
    if facts.hosts == 1:
        return "all ranks are on one host; use 'shared_memory' or 'all_to_all'"
    if not facts.host_by_host:
        return (
            "hosts have different numbers of ranks, or ranks of a host are not next to each other; number the ranks "
            "host by host, or use 'all_to_all'"
        )
    if facts.hosts == facts.world:
        return "every host has one rank, so there is nobody to forward to; use 'all_to_all'"
    return ""
