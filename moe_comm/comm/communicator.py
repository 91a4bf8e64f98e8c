"""What this process keeps for a process group: one ``Communicator``, from the group's first use to its destruction.

``meeting.communicator_of`` makes it, which is collective; ``channel.Channel`` and the dispatchers move data with it.
"""

from __future__ import annotations

import atexit
import gc
import math
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.distributed.distributed_c10d import _get_process_group_store  # no public way to a group's store

from moe_comm.comm.header import DESTROYED, GroupCalls
from moe_comm.comm.peers import Peers
from moe_comm.errors import ConfigError, PeerError
from moe_comm.runtime.event_layout import NO_NAME
from moe_comm.runtime.events import EVENTS

if TYPE_CHECKING:
    from moe_comm import _C

T = TypeVar("T")
LAST_S = 0.05
"""How long the end of the process waits for threads of gloo."""


@dataclass(frozen=True)
class CollectiveOptions:
    """How collectives wait and check.

    timeout_s: seconds to wait for a peer that lives but does not arrive before ``PeerTimeout``.
    checked: compare operation, shape, dtype and number of the call over the group before each one, at the price of a
        small exchange; ranks that differ get ``RankMismatch`` instead of a wrong answer. Through shared memory calls
        are always compared, at no price.
    shared_memory: CPU tensors of a group whose ranks are all on one host travel through shared memory.
    """

    timeout_s: float = 300.0
    checked: bool = False
    shared_memory: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s must be a positive, finite number of seconds; got {self.timeout_s}")


class Releases(Protocol):
    """What holds things of a group."""

    def release(self) -> None:
        """Let go of them: the group is destroyed."""


class Communicator:
    """The state of one process group in this process. Every dispatcher and channel of the group uses the same one.

    Destroying the process group closes it, and so does the end of the process.

    Attributes:
        rank, world: of this process in the group.
        ranks: global ranks of the group's members. span_group: what ``EVENTS.span`` takes as ``group``.
        calls: numbers of the group's operations.
        peers: the members' processes; None before they have met.
        hosts: a number for each member, equal for those of one host.
        native: whether all members have the native core.
        failed: what made the group unusable; every later operation raises it again.
        core: the native core's part, once the ranks share memory.
        users: what is told when the group is destroyed.
        left_behind: memory that peers may still be reading after an error; it is not used again.
        closed: whether it has been.
    """

    def __init__(self, group: ProcessGroup, ranks: Sequence[int], store: Store) -> None:
        self.rank, self.world, self.ranks = group.rank(), group.size(), tuple(ranks)
        self.span_group = EVENTS.group(self.ranks) if EVENTS.enabled else NO_NAME
        self.calls = GroupCalls()
        self.peers: Peers | None = None
        self.hosts: tuple[int, ...] = ()
        self.native = False
        self.failed: PeerError | None = None
        self.places = 0
        self.backends = {device.type: group._get_backend(device).name() for device in group._device_types}
        self._group: ProcessGroup | None = group
        self._store: Store | None = PrefixStore("moe_comm", store)  # an object of our own, see ``register``
        self.users: weakref.WeakSet[Releases] = weakref.WeakSet()
        self._kept: dict[Hashable, Any] = {}
        self.core: _C.Communicator | None = None
        self.limit_s = 0.0
        self.left_behind: list[object] = []

    @property
    def closed(self) -> bool:
        return self._group is None

    @property
    def group(self) -> ProcessGroup:
        """The process group.

        Raises:
            ConfigError: it has been destroyed.
        """
        if self._group is None:
            raise ConfigError(DESTROYED)
        return self._group

    @property
    def store(self) -> Store:
        """A part of the group's store that is ours; raises as ``group``."""
        if self._store is None:
            self.group  # noqa: B018 - raises
        assert self._store is not None
        return self._store

    def next_place(self) -> int:
        """Count an operation of the group's backend; ranks that wait leave notes by this number."""
        self.places += 1
        return self.places

    def use(self, core: _C.Communicator) -> None:
        """Let the operations of the native core on this group meet by ``core``."""
        self.core, self.limit_s = core, 0.0

    def check(self) -> None:
        """Raise what made the group unusable, if anything.

        Raises:
            PeerError: the error of the operation that failed. ConfigError: the group was destroyed.
        """
        if self.failed is None and self.calls.gave_up:
            self.failed = PeerError(f"an earlier operation failed: {self.calls.gave_up}. This group is unusable.")
        if self.failed is not None:
            raise type(self.failed)(*self.failed.args)
        if self._group is None:
            self.group  # noqa: B018 - raises

    def limit(self, timeout_s: float) -> None:
        """Set how long the next operations of the native core wait for a peer: ``limit_s``, from then on."""
        if timeout_s != self.limit_s and self.core is not None:
            self.core.set_timeout(timeout_s)
            self.limit_s = timeout_s

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` gave for ``key`` on the first call. It lives as long as the group. If it has a method
        ``close``, that is called at the end."""
        if key not in self._kept:
            made = make()
            if self.closed:
                self.group  # noqa: B018 - raises
            self._kept[key] = made
        found: T = self._kept[key]
        return found

    def kept(self, key: Hashable) -> Any:
        """What ``keep`` has for ``key``; None if nothing."""
        return self._kept.get(key)

    def forget(self, key: Hashable) -> None:
        """Close what is kept for ``key``, if anything."""
        _close(self._kept.pop(key, None))

    def part(self, members: Sequence[int], timeout_s: float) -> ProcessGroup:
        """A process group of the ranks ``members`` of this one, this rank among them; made once. Collective over them.

        Torch does not know it, so ranks that make none need not take part, and the names that torch gives to other
        groups do not depend on it.
        """
        chosen = tuple(members)
        return self.keep(("part", chosen), lambda: self._part(chosen, timeout_s))

    def _part(self, members: tuple[int, ...], timeout_s: float) -> ProcessGroup:
        name = "-".join(map(str, members))
        store = PrefixStore(f"part/{name}", self.store)
        made = _group_like(self.group, store, members.index(self.rank), len(members), timedelta(seconds=timeout_s))
        part = Communicator(made, [self.ranks[member] for member in members], store)
        _registry.made[made] = part
        self.keep(("communicator of part", members), lambda: part)
        return made

    def close(self) -> None:
        """Let go of all that the group has here: shared memory, connections, threads. Not collective."""
        group, self._group, self._store, self.core = self._group, None, None, None
        if group is not None:
            _registry.made.pop(group, None)
        self.peers, self.calls.closed = None, True
        for user in list(self.users):
            user.release()
        while self._kept:
            _close(self._kept.popitem()[1])


def _close(kept: Any) -> None:
    close = getattr(kept, "close", None)
    if close is not None:
        close()


def _group_like(group: ProcessGroup, store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """A group of fewer ranks with the backends of ``group``."""
    made = ProcessGroup(store, rank, size)
    kinds = {"gloo": ProcessGroup.BackendType.GLOO, "nccl": ProcessGroup.BackendType.NCCL}
    backends: dict[str, Any] = {}
    for device in group._device_types:
        name = group._get_backend(device).name()
        if name not in kinds:
            raise ConfigError(f"a group of some ranks of this one needs gloo or nccl for {device}; it has {name}")
        if name not in backends:
            prefixed = PrefixStore(name, store)
            if name == "nccl":
                from torch.distributed import ProcessGroupNCCL  # builds of torch for the CPU have none

                options = ProcessGroupNCCL.Options()
                options._timeout = timeout
                backends[name] = ProcessGroupNCCL(prefixed, rank, size, options)
            else:
                backends[name] = dist.ProcessGroupGloo(prefixed, rank, size, timeout=timeout)
        made._register_backend(device, kinds[name], backends[name])
    made._set_default_backend(kinds["nccl" if "nccl" in backends else "gloo"])
    return made


class _Registry:
    """Of this process: its communicators by group, and the options of their collectives. used: there has been one."""

    def __init__(self) -> None:
        self.made: dict[ProcessGroup, Communicator] = {}
        self.options = CollectiveOptions()
        self.lock = threading.Lock()
        self.used = False


_registry = _Registry()


def known(group: ProcessGroup) -> Communicator | None:
    """The communicator of ``group``, if its ranks have met."""
    return _registry.made.get(group)


def register(comm: Communicator) -> Communicator:
    """Keep ``comm`` for its group, from now on until the group is destroyed."""
    with _registry.lock:
        _registry.used = True
        found = _registry.made.setdefault(comm.group, comm)
    if found is comm:
        # destroy_process_group drops this object, and nothing else that can be noticed. The process's end counts, too.
        weakref.finalize(_get_process_group_store(comm.group), comm.close)
    return found


def unmet(group: ProcessGroup) -> Communicator:
    """A communicator for ``group`` whose ranks have yet to meet.

    Raises:
        ConfigError: the group was destroyed.
    """
    try:
        ranks, store = dist.get_process_group_ranks(group), _get_process_group_store(group)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            "this process group was destroyed, or torch.distributed does not know it; use one that dist.new_group or "
            "dist.init_process_group has made"
        ) from error
    return Communicator(group, ranks, store)


def collective_options() -> CollectiveOptions:
    """Those of this process."""
    return _registry.options


def set_collective_options(options: CollectiveOptions) -> None:
    """Set those of this process."""
    _registry.options = options


def communicators() -> list[Communicator]:
    """All of this process."""
    return list(_registry.made.values())


def close_all() -> None:
    """Close the communicators of all groups, whose collectives are over. Groups that torch knows live on."""
    for comm in communicators():
        comm.close()


def _end() -> None:
    """Before the interpreter ends.

    A thread of gloo takes the interpreter's lock to let go of the tensors of a collective, which may be a while after
    the collective is over. If the interpreter is ending by then, the thread is ended in the middle of it, and that
    aborts the process ("terminate called without an active exception"). A group joins its threads when it is freed; the
    pause is for groups that something else still refers to.
    """
    close_all()
    gc.collect()  # or groups in cycles would stay
    if _registry.used:
        time.sleep(LAST_S)


atexit.register(_end)
