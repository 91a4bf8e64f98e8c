"""Choose and build a dispatcher by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.agree import compare
from moe_comm.comm.channel import Channel
from moe_comm.comm.group_setup import as_group, communicator_of
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.selection.choice import BackendChoice, GroupFacts, Traffic, choose
from moe_comm.dispatch.types import DispatchHandle, DispatchOptions
from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.runtime.groups import rank_and_size, warn_if_alone
from moe_comm.runtime.native_core import native_is_built
from moe_comm.topology import ExpertPlacement, Placement

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BACKENDS = ("auto", "local", "shared_memory", "peer_to_peer", "all_to_all", "all_gather", "hierarchical")


def make_dispatcher(
    num_experts: int,
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    backend: str = "auto",
    experts_per_rank: Sequence[int] | None = None,
    options: DispatchOptions | None = None,
    traffic: Traffic | None = None,
    device: torch.device | str | None = None,
    expert_placement: Placement | None = None,
) -> Dispatcher:
    """Build a dispatcher for ``num_experts`` experts over the ranks of ``group``. Collective over the group.

    Args:
        num_experts: global number of experts.
        group: expert-parallel process group. None means that this process holds every expert, as with a group of one
            rank; a warning says so if ``torch.distributed`` has several ranks.
        backend: one of ``BACKENDS``. ``auto`` takes the cheapest one that works for this group; see ``explain_choice``.
            A group of one rank always gets ``local``; the results are the same.
        experts_per_rank: number of experts of each rank; default: balanced.
        options: see ``DispatchOptions``.
        traffic: expected sizes, for the cost model of ``auto``. ``options`` replace those that it also has.
        device: device of the rows; default: CUDA if the group has NCCL, else the CPU.
        expert_placement: the placement by which the caller replaces expert ids by ids of slots. Ranks compare it here
            and in each dispatch.

    Raises:
        ConfigError: unknown backend, a backend that cannot work for this group, or inconsistent sizes; on every rank.
        RankMismatch: ranks pass different arguments; on every rank.
        PeerDied, PeerTimeout: a rank died, or did not call in time.
    """
    if group is None:
        warn_if_alone("make_dispatcher", "holds all experts and dispatches to itself")
    return new_dispatcher(
        num_experts,
        group,
        backend=backend,
        experts_per_rank=experts_per_rank,
        options=options,
        traffic=traffic,
        device=device,
        expert_placement=expert_placement,
    )


def new_dispatcher(
    num_experts: int,
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    backend: str = "auto",
    experts_per_rank: Sequence[int] | None = None,
    options: DispatchOptions | None = None,
    traffic: Traffic | None = None,
    device: torch.device | str | None = None,
    expert_placement: Placement | None = None,
) -> Dispatcher:
    """Return ``make_dispatcher(...)`` for a caller to which None means a group of one rank, without its warning."""
    options, group = options or DispatchOptions(), as_group(group, "ep")
    rank, world = rank_and_size(group)
    placement: ExpertPlacement | None = None
    fault: MoeCommError | None = None
    try:
        if backend not in BACKENDS:
            raise ConfigError(f"unknown dispatch backend {backend!r}; known: {', '.join(BACKENDS)}")
        placement = ExpertPlacement.of(num_experts, world, experts_per_rank)
        if options.balance is not None and (expert_placement is None or expert_placement.slots is None) and world > 1:
            raise ConfigError("DispatchOptions.balance is for layers that make their dispatcher and lend its experts")
    except ConfigError as error:
        fault = error
    if group is None or world == 1:
        if placement is None:
            raise fault or ConfigError("no placement")
        from moe_comm.dispatch.backends.local import local_dispatcher  # loads one backend

        local = local_dispatcher(placement, group, options)
        local.expert_placement = expert_placement
        return local
    same = {
        "backend": backend,
        "number of experts": num_experts,
        "experts per rank": None if experts_per_rank is None else tuple(experts_per_rank),
        "expected traffic": traffic,
        "placement of experts": 0 if expert_placement is None else expert_placement.digest,
    }
    choice = _compare(group, options, traffic, device, same, fault)
    assert placement is not None, "every rank raises a fault"
    name = choice.picked if backend == "auto" else backend
    if problem := choice.problem(name):
        raise ConfigError(f"backend {name!r} cannot be used here: {problem}")
    if backend == "auto":
        warn_no_peer_access(choice)
    dispatcher = _build(name, placement, group, rank, options, device)
    dispatcher.expert_placement, dispatcher.has_unknown_experts = expert_placement, True
    return dispatcher


def refuse_dispatcher(fault: MoeCommError, group: ProcessGroup | None, options: DispatchOptions | None) -> NoReturn:
    """Raise ``fault`` of this rank's arguments on every rank, in place of ``make_dispatcher``."""
    options = options or DispatchOptions()
    if rank_and_size(group)[1] > 1:
        assert group is not None
        compare(Channel(communicator_of(group, options.timeout_s), options.timeout_s), "a dispatcher", {}, {}, fault)
    raise fault


def explain_choice(
    group: ProcessGroup | None = None,
    *,
    options: DispatchOptions | None = None,
    traffic: Traffic | None = None,
    device: torch.device | str | None = None,
) -> str:
    """Return the table of ``auto``: for each backend, its cost or why it cannot be used. Collective over the group."""
    options = options or DispatchOptions()
    _, world = rank_and_size(group)
    if group is None or world == 1:
        facts = GroupFacts(1, 1, native_is_built(), torch.device(device or "cpu").type, "nothing")
        return str(choose(facts, _traffic(traffic, options)))
    return str(_compare(group, options, traffic, device, {"expected traffic": traffic}, None))


def _compare(
    group: ProcessGroup,
    options: DispatchOptions,
    traffic: Traffic | None,
    device: torch.device | str | None,
    same: dict[str, object],
    fault: MoeCommError | None,
) -> BackendChoice:
    """Compare the arguments of all ranks, exchange the facts that the choice depends on, and choose."""
    comm = communicator_of(group, options.timeout_s)
    channel = Channel(comm, options.timeout_s)
    rows_device = torch.device(device) if device is not None else channel.rows_device
    same = same | {
        "deterministic": int(options.deterministic),
        "rows on the CPU": int(rows_device.type == "cpu"),
        "wire_dtypes": options.wire_dtypes,
        "checked": int(options.checked),
        "checksums": int(options.checksums),
        "options of peer_to_peer": options.peer_to_peer,
    }
    words = {"GPU": 0, "access": 0}
    if rows_device.type == "cuda":
        from moe_comm.dispatch.peer_to_peer import access  # only needed on GPUs
        from moe_comm.gpu.blocks import device_word

        words = {"GPU": device_word(rows_device), "access": access.access_word(rows_device)}
    all_words = compare(channel, "a dispatcher", same, words, fault)
    facts = GroupFacts(
        comm.world,
        len(set(comm.hosts)),
        comm.native,
        rows_device.type,
        comm.backends.get(rows_device.type) or next(iter(comm.backends.values())),
        _host_by_host(comm.hosts),
        access.problem_of(all_words["GPU"], all_words["access"]) if rows_device.type == "cuda" else "",
        options.peer_to_peer.emulate,
    )
    return choose(facts, _traffic(traffic, options))


def _host_by_host(hosts: Sequence[int]) -> bool:
    if len(set(hosts)) == 1:
        return True
    from moe_comm.dispatch.hierarchical.relay_routes import HostMap  # only needed for several hosts

    try:
        HostMap.of(hosts)
    except ConfigError:
        return False
    return True


def _traffic(traffic: Traffic | None, options: DispatchOptions) -> Traffic:
    return replace(traffic or Traffic(), deterministic=options.deterministic, wire_dtypes=options.wire_dtypes)


def warn_no_peer_access(choice: BackendChoice) -> None:
    """Warn if GPUs of one host cannot access each other's memory. Python shows the warning once per call site."""
    facts = choice.facts
    if facts.device == "cuda" and facts.hosts == 1 and facts.peers:
        warnings.warn(f"auto takes {choice.picked!r} on these GPUs: {facts.peers}", RuntimeWarning, stacklevel=3)


def _build(
    name: str,
    placement: ExpertPlacement,
    group: ProcessGroup,
    rank: int,
    options: DispatchOptions,
    device: torch.device | str | None,
) -> Dispatcher:
    if name == "peer_to_peer":
        from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher  # loads one backend

        rows_device = device if device is not None else "cpu" if options.peer_to_peer.emulate else "cuda"
        return PeerToPeerDispatcher(placement, group, rank, options, rows_device)
    if name == "shared_memory":
        from moe_comm.dispatch.backends.native import SharedMemoryDispatcher  # loads one backend

        return SharedMemoryDispatcher(placement, group, rank, options)
    if name == "hierarchical":
        from moe_comm.dispatch.hierarchical.dispatcher import HierarchicalDispatcher  # loads one backend

        return HierarchicalDispatcher(placement, group, rank, options)
    if name == "all_gather":
        from moe_comm.dispatch.backends.all_gather import AllGatherDispatcher  # loads one backend

        return AllGatherDispatcher(placement, group, rank, options)
    from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher  # loads one backend

    return AllToAllDispatcher(placement, group, rank, options)


def shared_dispatcher(
    num_experts: int,
    group: ProcessGroup | DeviceMesh | None,
    device: torch.device,
    backend: str = "auto",
    options: DispatchOptions | None = None,
) -> Dispatcher:
    """Return the dispatcher over a group, which the first call with these arguments makes. That call is collective.

    Args:
        group: a process group, or a mesh of one dimension. None: this process has all experts.
        device, backend, options: see ``make_dispatcher``.
    """
    members, options = as_group(group), options or DispatchOptions()
    if members is None:
        return new_dispatcher(num_experts, backend=backend, options=options, device=device)
    dispatchers: dict[object, Dispatcher] = communicator_of(members, options.timeout_s).keep("shared dispatchers", dict)
    key = num_experts, device.type, backend, options
    if key not in dispatchers:
        dispatchers[key] = new_dispatcher(num_experts, members, backend=backend, options=options, device=device)
    return dispatchers[key]


class DeferredDispatcher(Dispatcher):
    """Placeholder for a dispatcher, without communication or memory. ``connect`` replaces it.

    Args:
        placement, group, rank, options: arguments of the dispatcher that replaces this one.
        make: creates that dispatcher for rows on a device. Collective over ``group``.
    """

    name = "deferred"

    def __init__(
        self,
        placement: ExpertPlacement,
        group: ProcessGroup | None,
        rank: int,
        options: DispatchOptions | None,
        make: Callable[[torch.device | str], Dispatcher],
    ) -> None:
        # Pass no group: ranks number the dispatchers of a group, and this one takes part in no operation.
        super().__init__(placement, None, rank, options)
        self._group = group
        self.make = make

    @property
    def group(self) -> ProcessGroup | None:
        return self._group

    def _refuse(self) -> NoReturn:
        raise ConfigError("this MoE layer is on the meta device and cannot run; build it on the device it will run on")

    def _send(self, x_TD: Tensor, ids_TK: Tensor) -> tuple[Tensor, DispatchHandle]:
        self._refuse()

    def _sum(self, rows_RD: Tensor, weights_TK: Tensor | None, handle: DispatchHandle) -> Tensor:
        self._refuse()

    def _spread(
        self, grad_TD: Tensor, rows_RD: Tensor | None, weights_TK: Tensor, handle: DispatchHandle
    ) -> tuple[Tensor, Tensor | None]:
        self._refuse()


def connect(dispatcher: Dispatcher, device: torch.device | str) -> Dispatcher:
    """Return the dispatcher for rows on ``device`` that replaces a deferred one, or ``dispatcher``. Collective."""
    if not isinstance(dispatcher, DeferredDispatcher):
        return dispatcher
    made = dispatcher.make(device)
    made.has_unknown_experts = dispatcher.has_unknown_experts
    return made
