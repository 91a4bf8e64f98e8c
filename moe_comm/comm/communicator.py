"""The state of a process group in this process: one ``Communicator``, from the group's first use to its destruction.

``group_setup.communicator_of`` creates it, which is collective. Channels and dispatchers use it to transfer data.
"""

from __future__ import annotations

import atexit
import gc
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.distributed.distributed_c10d import _get_process_group_store  # no public way to a group's store

from moe_comm.comm.header import DESTROYED, GroupCalls
from moe_comm.comm.peers import Peers
from moe_comm.errors import ConfigError, PeerError, UnsupportedModel
from moe_comm.runtime.event_layout import NO_NAME
from moe_comm.runtime.events import EVENTS, add_lock
from moe_comm.runtime.seconds import seconds_of

if TYPE_CHECKING:
    from moe_comm import _C

T = TypeVar("T")
EXIT_PAUSE_S = 0.05
"""Seconds that ``_end`` waits for threads of gloo before the process exits."""


@dataclass(frozen=True)
class CollectiveOptions:
    """Options of the collectives of tensor, context and data parallelism.

    Args:
        timeout_s: seconds to wait for a live peer before ``PeerTimeout`` is raised.
        checked: compare operation, shape, dtype and call number between ranks before each collective, with one small
            exchange. Ranks that differ raise ``RankMismatch``; without the check they may get wrong results.
            Collectives through shared memory always compare, at no cost.
        shared_memory: use shared memory for CPU tensors of groups on one host.
    """

    timeout_s: float = 300.0
    checked: bool = False
    shared_memory: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeout_s", seconds_of("timeout_s", self.timeout_s))


class Communicator:
    """The state of one process group in this process, which all its dispatchers and channels share.

    It is closed when the process group is destroyed, and when the process exits.

    Attributes:
        rank, world: of this process in the group.
        ranks: global ranks of the members.
        span_group: ``group`` argument of ``EVENTS.span``.
        calls: sequence numbers of the group's operations.
        peers: processes of the members; None before setup.
        hosts: one number per member, equal for members on the same host.
        native: whether the native core (``moe_comm._C``) is built on all members.
        failed: error that made the group unusable. Later operations raise it again.
        num_operations: number of started operations of the group's torch backend.
        num_duplicates: number of groups that ``duplicate`` created.
        backends: name of the torch backend, by device type.
        core: communicator of the native core; None without shared memory.
        core_timeout_s: timeout that is currently set in ``core``.
        users: dispatchers of the group, whose ``release`` is called when the group is destroyed.
        retained: memory that peers may still read after an error; it is not reused.
        closed: whether the group has been destroyed.
    """

    def __init__(self, group: ProcessGroup, ranks: Sequence[int], store: Store) -> None:
        self.rank, self.world, self.ranks = group.rank(), group.size(), tuple(ranks)
        self.span_group = EVENTS.group(self.ranks) if EVENTS.enabled else NO_NAME
        self.calls = GroupCalls()
        self.peers: Peers | None = None
        self.hosts: tuple[int, ...] = ()
        self.native = False
        self.failed: PeerError | None = None
        self.num_operations = self.num_duplicates = 0
        self.backends = {device.type: group._get_backend(device).name() for device in group._device_types}
        self._group: ProcessGroup | None = group
        self._store: Store | None = PrefixStore("moe_comm", store)  # not the group's own object; see ``register``
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._objects: dict[Hashable, Any] = {}
        self.core: _C.Communicator | None = None
        self.core_timeout_s = 0.0
        self.retained: list[object] = []

    @property
    def closed(self) -> bool:
        return self._group is None

    @property
    def group(self) -> ProcessGroup:
        """The process group."""
        if self._group is None:
            raise ConfigError(DESTROYED)
        return self._group

    @property
    def store(self) -> Store:
        """The part of the group's store that this library uses; raises as ``group``."""
        if self._store is None:
            self.group  # noqa: B018 - raises
        assert self._store is not None
        return self._store

    def next_operation(self) -> int:
        """Count an operation of the group's torch backend and return its number.

        A rank that waits long in the operation writes a note with this number to the store (``Peers.note``).
        """
        self.num_operations += 1
        return self.num_operations

    def check(self) -> None:
        """Raise if the group is unusable."""
        if self.failed is None and self.calls.gave_up:
            self.failed = PeerError(f"an earlier operation failed: {self.calls.gave_up}. This group is unusable.")
        if self.failed is not None:
            raise type(self.failed)(*self.failed.args)
        if self._group is None:
            self.group  # noqa: B018 - raises

    def set_core_timeout(self, timeout_s: float) -> None:
        """Set the timeout of the next operations of the native core."""
        if timeout_s != self.core_timeout_s and self.core is not None:
            self.core.set_timeout(timeout_s)
            self.core_timeout_s = timeout_s

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the object for ``key``, created by ``make`` in the first call.

        It lives as long as the group. Its method ``close``, if it has one, is called at the end.
        """
        if key not in self._objects:
            created = make()
            if self.closed:
                self.group  # noqa: B018 - raises
            self._objects[key] = created
        result: T = self._objects[key]
        return result

    def get(self, key: Hashable) -> Any:
        """Return the object that ``keep`` has stored for ``key``; None if there is none."""
        return self._objects.get(key)

    def forget(self, key: Hashable) -> None:
        """Remove and close the object for ``key``, if any."""
        _close(self._objects.pop(key, None))

    def subgroup(self, members: Sequence[int], timeout_s: float) -> ProcessGroup:
        """Return a process group of some ranks of this group, including this rank. Collective over ``members``.

        torch.distributed does not register it. Other ranks need not call this, and the names of torch's groups do not
        change.
        """
        name = "part/" + "-".join(map(str, members))
        return self.keep(("subgroup", name), lambda: self._subgroup(name, members, timeout_s))

    def duplicate(self, timeout_s: float) -> ProcessGroup:
        """Return a new process group of the same ranks, as ``subgroup``: for another thread. Collective."""
        self.num_duplicates += 1
        name = f"duplicate/{self.num_duplicates}"
        return self.keep(("subgroup", name), lambda: self._subgroup(name, range(self.world), timeout_s))

    def close_part(self, part: ProcessGroup) -> None:
        """Close a group that ``subgroup`` or ``duplicate`` has returned, unless it is closed.

        No operation of it may be in flight. Not collective.
        """
        comm = registry.communicators.get(part)
        if comm is None:
            return
        comm.close()
        for key in [key for key, kept in self._objects.items() if kept is part or kept is comm]:
            del self._objects[key]

    def _subgroup(self, name: str, members: Sequence[int], timeout_s: float) -> ProcessGroup:
        store = PrefixStore(name, self.store)
        group = _group_like(self.group, store, members.index(self.rank), len(members), timedelta(seconds=timeout_s))
        comm = Communicator(group, [self.ranks[member] for member in members], store)
        registry.communicators[group] = comm
        self.keep(("communicator of subgroup", name), lambda: comm)
        return group

    def abandon(self, text: str) -> None:
        """Let ranks that wait for this one, in operations of the group or of its parts, raise ``PeerError``.

        Unlike ``Channel.give_up``, also if the group has failed here.
        """
        self.calls.gave_up = self.calls.gave_up or text
        if self.failed is not None:
            self.failed = type(self.failed)(*self.failed.args)  # without the frames that have raised it
        if self.peers is not None:
            self.peers.give_up(text)
        if self.core is not None:
            self.core.give_up()
        for part in self._objects.values():
            if isinstance(part, Communicator):
                part.abandon(text)

    def close(self) -> None:
        """Release all resources of the group: shared memory, connections, threads. Not collective."""
        group, self._group, self._store, self.core = self._group, None, None, None
        if group is not None:
            registry.communicators.pop(group, None)
        self.peers, self.calls.closed = None, True
        for user in list(self.users):
            user.release()
        while self._objects:
            _close(self._objects.popitem()[1])


def _close(resource: Any) -> None:
    close = getattr(resource, "close", None)
    if close is not None:
        close()


def _group_like(group: ProcessGroup, store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """Create a process group with the backends of ``group`` for ``size`` ranks."""
    created = ProcessGroup(store, rank, size)
    kinds = {"gloo": ProcessGroup.BackendType.GLOO, "nccl": ProcessGroup.BackendType.NCCL}
    backends: dict[str, Any] = {}
    for device in group._device_types:
        name = group._get_backend(device).name()
        if name not in kinds:
            raise ConfigError(f"a subgroup needs backend gloo or nccl for {device}; this group has {name}")
        if name not in backends:
            prefixed = PrefixStore(name, store)
            if name == "nccl":
                from torch.distributed import ProcessGroupNCCL  # missing in builds of torch for the CPU

                options = ProcessGroupNCCL.Options()
                options._timeout = timeout
                backends[name] = ProcessGroupNCCL(prefixed, rank, size, options)
            else:
                backends[name] = dist.ProcessGroupGloo(prefixed, rank, size, timeout=timeout)
        created._register_backend(device, kinds[name], backends[name])
    created._set_default_backend(kinds["nccl" if "nccl" in backends else "gloo"])
    return created


def refuse_pickling(owner: object) -> NoReturn:
    """Raise, because ``owner`` holds a process group or its buffers. torch would raise "cannot pickle ProcessGroup"."""
    raise UnsupportedModel(
        f"{type(owner).__name__} holds the means of communication of this process, and each rank holds only its own "
        "experts, so it cannot be pickled (torch.save(model), multiprocessing). To save the model, save its state "
        "dict: state = moe_comm.state_dict(model) on all ranks, then torch.save(state, path) on one. To load it, build "
        "the model on all ranks and call moe_comm.load_state_dict(model, state). To copy it, call copy.deepcopy"
    )


class _Registry:
    """Communicators of this process by group, and the options of collectives. used: whether one was ever registered."""

    lock: threading.Lock

    def __init__(self) -> None:
        self.communicators: dict[ProcessGroup, Communicator] = {}
        self.options = CollectiveOptions()
        add_lock(self, "lock")
        self.used = False


registry = _Registry()


def find_communicator(group: ProcessGroup) -> Communicator | None:
    """Return the communicator of ``group``; None before setup."""
    return registry.communicators.get(group)


def register(comm: Communicator) -> Communicator:
    """Register ``comm`` until its group is destroyed. Return the communicator that the group has now."""
    with registry.lock:
        registry.used = True
        registered = registry.communicators.setdefault(comm.group, comm)
    if registered is comm:
        # destroy_process_group gives no notice, but drops the store object. The finalizer also runs at exit.
        weakref.finalize(_get_process_group_store(comm.group), comm.close)
    return registered


def new_communicator(group: ProcessGroup) -> Communicator:
    """Create a communicator for ``group``, before setup."""
    try:
        ranks, store = dist.get_process_group_ranks(group), _get_process_group_store(group)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            "this process group was destroyed, or torch.distributed does not know it; use one created by "
            "dist.new_group or dist.init_process_group"
        ) from error
    return Communicator(group, ranks, store)


def communicators() -> list[Communicator]:
    """Return all communicators of this process."""
    return list(registry.communicators.values())


def close_all() -> None:
    """Close all communicators. No collective may be in flight. Process groups of torch stay open."""
    for comm in communicators():
        comm.close()


def _end() -> None:
    """Close all groups before the interpreter exits.

    A thread of gloo takes the GIL to free the tensors of a collective, possibly some time after the collective. If the
    interpreter exits meanwhile, it ends the thread, and the process aborts ("terminate called without an active
    exception"). A group joins its threads when it is freed. The pause is for groups that are still referenced.
    """
    close_all()
    gc.collect()  # frees groups in reference cycles
    if registry.used:
        time.sleep(EXIT_PAUSE_S)


atexit.register(_end)
