"""How ``auto`` chooses a backend: it takes the cheapest one that works for the group, by a rough cost in bytes.

Costs are bytes per token that one rank moves in forward dispatch and combine. There are K slots per token and W ranks.
A row has ``hidden`` elements of ``item`` bytes, and f = (W - 1) / W is the fraction of rows that leave their rank.
Numbers in the table are rows:

    backend          over the wire                      copies in memory (read + write)
    shared_memory    0                                  2 K + (K + 1): one gather, one weighted sum
    peer_to_peer     0                                  the same, in the memory of the host's GPUs
    all_to_all       2 K f                              6 K + (5 K + 1): sort, exchange, reorder; and in reverse
    all_gather       (W - 1) + K f                      2 W + 2 K + (5 K + 1)
    all_gather (*)   (W - 1) + (W - 1) * 4 / item       2 W + 2 K + 2 K + 4 (W + 1) / item
    hierarchical     H' + K h                           4 H' + 6 K + (5 K + 1) + 4: copies, slots, reorder; reverse
    hierarchical (*) 2 H'                               8 H' + 4 K + (3 K + 1) + 4

(*) if ``DispatchOptions.deterministic`` is False.
With H hosts and balanced routing, h = (H - 1) / H of the rows leave their host, and a token has experts on
H' = (H - 1) (1 - (1 - 1 / H)^K) other hosts. Bytes between hosts are: for ``hierarchical`` all wire bytes, because the
ranks of a host share memory (without the native core, 2 K (f - h) more wire bytes stay inside hosts); for
``all_to_all`` 2 K h; for ``all_gather`` (W - 1) H / W per ring collective, plus K h.

A wire dtype makes the rows on the wire shorter. If combine has one, ``all_gather`` returns rows and not partial sums,
even if it need not be deterministic. A byte on the wire costs as much as ``WIRE_BYTE`` bytes copied in memory, and a
byte between hosts costs ``BETWEEN_BYTE`` more. The costs of backends differ by far more than the error of this model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moe_comm.dispatch.wire_dtype import UNCHANGED, WireDtypes, bytes_per_row

WIRE_BYTE = 8.0
BETWEEN_BYTE = 16.0
"""Additional cost of a byte between hosts: links of 10 to 100 Gbit/s are slower than loopback."""


@dataclass(frozen=True)
class GroupFacts:
    """Properties of a group that the choice depends on; equal on all its ranks.

    Attributes:
        world: number of ranks.
        hosts: number of hosts. Ranks with different /dev/shm, such as in two containers, count as different hosts.
        native: whether every rank has the native core.
        device: device type of the rows, "cpu" or "cuda".
        transport: name of torch.distributed's backend.
        host_by_host: whether hosts have equal numbers of ranks with adjacent numbers.
        peers: reason why the GPUs cannot access each other's memory; "" if they can.
        emulate: whether the ``peer_to_peer`` kernels may run on the CPU.
    """

    world: int
    hosts: int
    native: bool
    device: str
    transport: str
    host_by_host: bool = False
    peers: str = "it was not checked whether its GPUs can access each other's memory"
    emulate: bool = False


@dataclass(frozen=True)
class Traffic:
    """Expected sizes of dispatch, for the cost model of ``auto``.

    Args:
        top_k: K; None if unknown, which assumes 1.
        hidden: D.
        item_bytes: bytes per element of a row.
        deterministic, wire_dtypes: as in ``DispatchOptions``.
        overlap: rows are transferred while experts compute. On GPUs ``auto`` then takes a backend that supports it.
            On CPUs it has no effect, because the computing cores also move the rows.
        fused: the device executor is requested, whose kernels need ``peer_to_peer``. As ``overlap``, only on GPUs.
        scaled: dispatch returns rows as values and scales (``Dispatcher.dispatch``).
    """

    top_k: int | None = None
    hidden: int = 1024
    item_bytes: int = 4
    deterministic: bool = True
    wire_dtypes: WireDtypes = UNCHANGED
    overlap: bool = False
    fused: bool = False
    scaled: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """A dtype with ``item_bytes``."""
        return {2: torch.bfloat16, 8: torch.float64}.get(self.item_bytes, torch.float32)

    def wire_row(self, op: str) -> int:
        """Return the bytes of one row on the wire in ``op``."""
        return bytes_per_row(self.hidden, self.wire_dtypes.of(op), self.dtype)


@dataclass(frozen=True)
class BackendCost:
    """Usability and cost of one backend.

    Attributes:
        backend: its name.
        problem: reason why it cannot be used; "" if it can.
        wire_bytes: bytes per token sent to other ranks.
        between_bytes: those of them sent to other hosts.
        copied_bytes: bytes per token read and written in memory.
        if_asked: reason why ``auto`` does not take it although it works; "" if ``auto`` may take it.
    """

    backend: str
    problem: str
    wire_bytes: float
    between_bytes: float
    copied_bytes: float
    if_asked: str = ""

    @property
    def cost(self) -> float:
        return WIRE_BYTE * self.wire_bytes + BETWEEN_BYTE * self.between_bytes + self.copied_bytes


@dataclass(frozen=True)
class BackendChoice:
    """Result of ``choose``. ``picked`` is the cheapest usable backend. ``str`` gives the table."""

    picked: str
    facts: GroupFacts
    traffic: Traffic
    candidates: tuple[BackendCost, ...]

    def problem(self, backend: str) -> str:
        """Return why ``backend`` cannot be used here; "" if it can."""
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
            note = note or (f"   on request only: {candidate.if_asked}" if candidate.if_asked else "")
            lines.append(
                f" {mark} {candidate.backend:<14} {wire:13.1f} {between:15.1f} {copied:15.1f} {cost:10.1f}{note}"
            )
        return "\n".join(lines)


def choose(facts: GroupFacts, traffic: Traffic | None = None) -> BackendChoice:
    """Evaluate every backend for a group and pick one."""
    traffic = traffic or Traffic()
    row = traffic.hidden * traffic.item_bytes
    world, slots = facts.world, traffic.top_k or 1
    remote_slots, off_host_slots = slots * (world - 1) / world, slots * (facts.hosts - 1) / facts.hosts
    both_ways = traffic.wire_row("dispatch") + traffic.wire_row("combine")
    in_place = (3 * slots + 1) * row
    # The terms of the table in the module docstring.
    candidates = [
        BackendCost("local", "" if world == 1 else _LOCAL.format(world=world), 0, 0, in_place),
        BackendCost("shared_memory", _shared_memory_problem(facts), 0, 0, in_place),
        BackendCost(
            "peer_to_peer",
            _peer_to_peer_problem(facts),
            0,
            0,
            in_place,
            "on the CPU it emulates a GPU, for tests" if facts.device == "cpu" else "",
        ),
        BackendCost("all_to_all", "", remote_slots * both_ways, off_host_slots * both_ways, (11 * slots + 1) * row),
        _all_gather(facts, traffic, remote_slots, off_host_slots),
        _hierarchical(facts, traffic, remote_slots, off_host_slots),
    ]
    if traffic.overlap and facts.device == "cuda" and traffic.wire_dtypes.invariant:
        fused = traffic.fused and any(c.backend == "peer_to_peer" and not c.problem for c in candidates)
        overlaps, reason = (_FUSED, _NOT_FUSED) if fused else (_OVERLAPS, _SERIAL)
        candidates = [c if c.backend in overlaps else replace(c, if_asked=c.if_asked or reason) for c in candidates]
    picked = min((c for c in candidates if not c.problem and not c.if_asked), key=lambda c: c.cost)
    return BackendChoice(picked.backend, facts, traffic, tuple(candidates))


def _all_gather(facts: GroupFacts, traffic: Traffic, remote_slots: float, off_host_slots: float) -> BackendCost:
    row = traffic.hidden * traffic.item_bytes
    world, slots = facts.world, traffic.top_k or 1
    dispatch_bytes, combine_bytes = traffic.wire_row("dispatch"), traffic.wire_row("combine")
    # Rows that cross hosts in a ring collective, per token: W - 1 steps, in which H of the W links are between hosts.
    ring = (world - 1) * facts.hosts / world if facts.hosts > 1 else 0
    if traffic.deterministic or traffic.wire_dtypes.of("combine").narrows(traffic.dtype):
        wire = (world - 1) * dispatch_bytes + remote_slots * combine_bytes
        between = ring * dispatch_bytes + off_host_slots * combine_bytes
        return BackendCost("all_gather", "", wire, between, (2 * world + 7 * slots + 1) * row)
    wide = max(4, traffic.item_bytes) / traffic.item_bytes
    sent_row = dispatch_bytes + wide * row  # a gathered row, and a partial sum
    copied = (2 * world + 4 * slots + wide * (world + 1)) * row
    return BackendCost("all_gather", "", (world - 1) * sent_row, ring * sent_row, copied)


def _hierarchical(facts: GroupFacts, traffic: Traffic, remote_slots: float, off_host_slots: float) -> BackendCost:
    row, slots = traffic.hidden * traffic.item_bytes, traffic.top_k or 1
    dispatch_bytes, combine_bytes = traffic.wire_row("dispatch"), traffic.wire_row("combine")
    other_hosts = (facts.hosts - 1) * (1 - (1 - 1 / facts.hosts) ** slots)
    if traffic.deterministic:
        between = other_hosts * dispatch_bytes + off_host_slots * combine_bytes
        copied = (4 * other_hosts + 11 * slots + 5) * row
    else:
        between = other_hosts * (dispatch_bytes + combine_bytes)
        copied = (8 * other_hosts + 7 * slots + 5) * row
    shares_memory = facts.native and facts.device == "cpu"
    inside = 0 if shares_memory else 2 * (remote_slots - off_host_slots) * row
    if_asked = "" if facts.device == "cpu" else f"it has not been measured on {facts.device}"
    problem = _hierarchical_problem(facts)
    if traffic.scaled and traffic.wire_dtypes.of("dispatch").format == "fp8":
        problem = problem or "it decodes fp8 rows, but the experts need their values and scales; use 'all_to_all'"
    return BackendCost("hierarchical", problem, between + inside, between, copied, if_asked)


_OVERLAPS = ("local", "all_to_all", "peer_to_peer")
_FUSED = ("local", "peer_to_peer")
_NOT_FUSED = "the device executor is requested, and its kernels need peer_to_peer"
_SERIAL = "overlap is requested, and it cannot transfer rows while the experts compute"
_LOCAL = "this group has {world} ranks and 'local' sends nothing between them; use 'auto', or no group"


def _one_host_problem(facts: GroupFacts) -> str:
    if facts.hosts > 1:
        return f"the ranks are on {facts.hosts} hosts; use 'all_to_all' between hosts, or 'hierarchical'"
    if not facts.native:
        return "the native core moe_comm._C is not built on every rank; run `pip install -e .`, or use 'all_to_all'"
    return ""


def _shared_memory_problem(facts: GroupFacts) -> str:
    if facts.world == 1:
        return "the group has one rank; 'local' does the same without a heap to share"
    if facts.device != "cpu":
        return f"it moves rows in CPU memory and these are on {facts.device}; use 'all_to_all'"
    return _one_host_problem(facts)


def _peer_to_peer_problem(facts: GroupFacts) -> str:
    if facts.world == 1:
        return "the group has one rank; 'local' does the same without peers"
    if facts.device == "cpu" and not facts.emulate:
        return (
            "it moves rows between GPUs and these are on the CPU; use 'shared_memory', or, for tests, "
            "PeerToPeerOptions(emulate=True)"
        )
    if facts.device not in ("cpu", "cuda"):
        return f"it moves rows between NVIDIA GPUs and these are on {facts.device}; use 'all_to_all'"
    no_access = f"{facts.peers}; use 'all_to_all'" if facts.device == "cuda" and facts.peers else ""
    return _one_host_problem(facts) or no_access


def _hierarchical_problem(facts: GroupFacts) -> str:
    if facts.hosts == 1:
        return "all ranks are on one host; use 'shared_memory' or 'all_to_all'"
    if not facts.host_by_host:
        return (
            "hosts have different numbers of ranks, or ranks of a host are not next to each other; number the ranks "
            "host by host, or use 'all_to_all'"
        )
    if facts.hosts == facts.world:
        return "every host has one rank, so it could not forward rows inside a host; use 'all_to_all'"
    return ""
