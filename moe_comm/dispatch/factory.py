"""Choose and build a dispatcher by name."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import Channel
from moe_comm.comm.meeting import communicator_of, compare
from moe_comm.dispatch.backends.local import LocalDispatcher
from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.choice import Choice, GroupFacts, Traffic, choose
from moe_comm.dispatch.types import DispatchOptions
from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.runtime.group_place import place_in
from moe_comm.runtime.memory import native_is_built
from moe_comm.topology import ExpertPlacement

BACKENDS = ("auto", "local", "shared_memory", "peer_to_peer", "all_to_all", "all_gather", "hierarchical")


def make_dispatcher(
    num_experts: int,
    group: ProcessGroup | None = None,
    backend: str = "auto",
    *,
    experts_per_rank: Sequence[int] | None = None,
    options: DispatchOptions | None = None,
    traffic: Traffic | None = None,
    device: torch.device | str | None = None,
) -> Dispatcher:
    """Build a dispatcher for ``num_experts`` experts over the ranks of ``group``. Collective over the group.

    Args:
        group: the expert-parallel process group; None means this process holds every expert.
        backend: one of ``BACKENDS``; ``auto`` takes the cheapest that works for this group, see ``explain_choice``.
            A group of one rank gets ``local`` whatever is asked: the bits are the same.
        experts_per_rank: how many experts each rank holds; balanced if not given.
        traffic: what is expected to move; ``auto`` weighs ``all_to_all``, ``all_gather`` and ``hierarchical`` with it.
        device: where rows will be; if not given, CUDA where the group has NCCL, else the CPU.

    Raises:
        ConfigError: unknown backend, one that cannot work for this group, or sizes that do not add up; on every rank.
        RankMismatch: ranks ask for different things; on every rank.
        PeerDied, PeerTimeout: a rank does not take part.
    """
    options = options or DispatchOptions()
    rank, world = place_in(group)
    placement: ExpertPlacement | None = None
    fault: MoeCommError | None = None
    try:
        if backend not in BACKENDS:
            raise ConfigError(f"unknown dispatch backend {backend!r}; known: {', '.join(BACKENDS)}")
        placement = ExpertPlacement.of(num_experts, world, experts_per_rank)
    except ConfigError as error:
        fault = error
    if group is None or world == 1:
        if placement is None:
            raise fault or ConfigError("no placement")
        return _local(placement, group, options)
    same = {
        "backend": backend,
        "number of experts": num_experts,
        "experts per rank": None if experts_per_rank is None else tuple(experts_per_rank),
        "expected traffic": traffic,
    }
    choice = _compare(group, options, traffic, device, same, fault)
    assert placement is not None, "a fault is raised by every rank"
    picked = choice.picked if backend == "auto" else backend
    if problem := choice.problem(picked):
        raise ConfigError(f"backend {picked!r} cannot be used here: {problem}")
    if backend == "auto":
        warn_of_gpus(choice)
    return _build(picked, placement, group, rank, options, device)


def explain_choice(
    group: ProcessGroup | None = None,
    *,
    options: DispatchOptions | None = None,
    traffic: Traffic | None = None,
    device: torch.device | str | None = None,
) -> str:
    """The table by which ``auto`` chooses: each backend, why it cannot be used or what it would cost. Collective."""
    options = options or DispatchOptions()
    _, world = place_in(group)
    if group is None or world == 1:
        facts = GroupFacts(1, 1, native_is_built(), torch.device(device or "cpu").type, "nothing")
        return str(choose(facts, traffic or _traffic(options)))
    return str(_compare(group, options, traffic, device, {"expected traffic": traffic}, None))


def _compare(
    group: ProcessGroup,
    options: DispatchOptions,
    traffic: Traffic | None,
    device: torch.device | str | None,
    same: dict[str, object],
    fault: MoeCommError | None,
) -> Choice:
    """Learn from every rank what the choice depends on, and choose alike."""
    comm = communicator_of(group, options.timeout_s)
    channel = Channel(comm, options.timeout_s)
    where = torch.device(device) if device is not None else channel.rows_device
    same = {**same, "deterministic": int(options.deterministic), "rows on the CPU": int(where.type == "cpu")}
    same["wire_dtypes"] = options.wire_dtypes
    same["checked"] = int(options.checked)
    same["checksums"] = int(options.checksums)
    same["options of peer_to_peer"] = options.peer_to_peer
    told = {"GPU": 0, "access": 0}
    if where.type == "cuda":
        from moe_comm.dispatch.peer_to_peer import access  # only GPUs have peers

        told = {"GPU": access.device_word(where), "access": access.access_word(where)}
    found = compare(channel, "a dispatcher", same, told, fault)
    facts = GroupFacts(
        comm.world,
        len(set(comm.hosts)),
        comm.native,
        where.type,
        dist.get_backend(group),
        _host_by_host(comm.hosts),
        access.problem_of(found["GPU"], found["access"]) if where.type == "cuda" else "",
        options.peer_to_peer.emulate,
    )
    return choose(facts, traffic or _traffic(options))


def _host_by_host(hosts: Sequence[int]) -> bool:
    if len(set(hosts)) == 1:
        return True
    from moe_comm.dispatch.hierarchical.relay_routes import HostMap  # only several hosts need a map

    try:
        HostMap.of(hosts)
    except ConfigError:
        return False
    return True


def _traffic(options: DispatchOptions) -> Traffic:
    return Traffic(deterministic=options.deterministic, wire_dtypes=options.wire_dtypes)


def _local(placement: ExpertPlacement, group: ProcessGroup | None, options: DispatchOptions) -> Dispatcher:
    if not native_is_built():
        return LocalDispatcher(placement, group, 0, options)
    from moe_comm.dispatch.backends.local_native import NativeLocalDispatcher  # loads one backend

    return NativeLocalDispatcher(placement, group, 0, options)


def warn_of_gpus(choice: Choice) -> None:
    """Warn that GPUs of one host cannot use each other's memory. Python shows it once for each line that builds."""
    facts = choice.facts
    if facts.device == "cuda" and facts.hosts == 1 and facts.peers:
        warnings.warn(f"auto takes {choice.picked!r} on these GPUs: {facts.peers}", RuntimeWarning, stacklevel=3)


def _build(
    picked: str,
    placement: ExpertPlacement,
    group: ProcessGroup,
    rank: int,
    options: DispatchOptions,
    device: torch.device | str | None,
) -> Dispatcher:
    if picked == "peer_to_peer":
        from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher  # loads one backend

        where = device if device is not None else "cpu" if options.peer_to_peer.emulate else "cuda"
        return PeerToPeerDispatcher(placement, group, rank, options, where)
    if picked == "shared_memory":
        from moe_comm.dispatch.backends.shared_memory import SharedMemoryDispatcher  # loads one backend

        return SharedMemoryDispatcher(placement, group, rank, options)
    if picked == "hierarchical":
        from moe_comm.dispatch.hierarchical.dispatcher import HierarchicalDispatcher  # loads one backend

        return HierarchicalDispatcher(placement, group, rank, options)
    if picked == "all_gather":
        from moe_comm.dispatch.backends.all_gather import AllGatherDispatcher  # loads one backend

        return AllGatherDispatcher(placement, group, rank, options)
    from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher  # loads one backend

    return AllToAllDispatcher(placement, group, rank, options)
