"""Changes of the ranks and of the placement of experts while models are served.

The micro-batches of a rank communicate in threads of their own. Before the ranks or the experts change, all of them
stop between two calls of experts, and the last one makes the change for all:

    micro-batch 0   call ─ vote: change ─ waits                   ─▶ vote ...
    micro-batch 1   call ─ call ─ call ─ vote: change ─ the move  ─▶ vote ...
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, TypeVar

from torch import nn

from moe_comm.comm.communicator import Communicator
from moe_comm.comm.group_setup import channel_of
from moe_comm.comm.regroup import allow, begin, decline, survivors
from moe_comm.comm.shared_channel import SharedChannel
from moe_comm.errors import PeerError
from moe_comm.integrations.checkpoint.load import load_parts
from moe_comm.integrations.hugging_face.move import add_dispatchers, move_experts
from moe_comm.integrations.hugging_face.swap import swapped_experts
from moe_comm.topology import Placement

_log = logging.getLogger(__name__)
T = TypeVar("T")


class _Meeting:
    """Lets the last of ``count`` threads act for all. Threads with different reasons raise."""

    def __init__(self, count: int) -> None:
        self._count, self._changed = count, threading.Condition()
        self._values: dict[int, Any] = {}
        self._why: str | None = None
        self._round = 0
        self._result: Any = None
        self._error: PeerError | None = None

    def fail(self) -> None:
        """Let the threads that wait raise: one of the others does not come."""
        with self._changed:
            self._error = PeerError("serving has ended in another micro-batch of this rank")
            self._changed.notify_all()

    def join(self, why: str, number: int, value: Any, act: Callable[[dict[int, Any]], T]) -> T:
        """Return the result of ``act`` for the values of all threads, which one of them calls."""
        with self._changed:
            if self._why not in (None, why):
                self._error = self._error or PeerError("a rank died while experts were about to move")
                self._changed.notify_all()
            self._why, round_ = why, self._round
            self._values[number] = value
            while len(self._values) < self._count and self._round == round_ and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise type(self._error)(*self._error.args)
            if self._round != round_:
                result: T = self._result
                return result
        try:
            result = act(self._values)
        except BaseException:
            self.fail()
            raise
        with self._changed:
            self._values, self._why, self._result, self._round = {}, None, result, self._round + 1
            self._changed.notify_all()
        return result


class Recovery:
    """Moves the experts of models to other ranks between two calls of experts. All ranks make the same calls.

    Args:
        channel: of the group of the models.
        checkpoints: a folder or file for each model, from which experts are read that no rank has any more. None: the
            ranks do not go on after a failure.
        count: number of micro-batches.

    Attributes:
        channels: of the present group, for each micro-batch. They have the same ranks.
        failures: of ranks, after which the others went on.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        channel: SharedChannel,
        checkpoints: Sequence[str | PathLike[str]] | None,
        count: int,
    ) -> None:
        self.count, self.failures = count, list[PeerError]()
        self._models, self._checkpoints, self._meeting = models, checkpoints, _Meeting(count)
        self._parts: list[tuple[Communicator, Any]] = []
        self.channels = self._channels(channel)
        add_dispatchers(models, [one.comm.group for one in self.channels[1:]])
        self.publish_copies()

    def _channels(self, first: SharedChannel) -> list[SharedChannel]:
        """Return the channels of all micro-batches; ``first`` is that of the group. Collective."""
        if self._checkpoints is not None:
            allow(first.comm)
        groups = [first.comm.duplicate(first.timeout_s) for _ in range(self.count - 1)]
        self._parts += [(first.comm, group) for group in groups]
        return [first, *map(channel_of, groups)]

    @property
    def rank(self) -> int:
        """This rank in the present group."""
        return self.channels[0].rank

    def decline(self) -> None:
        """Report that this rank will not go on after a failure."""
        self._meeting.fail()
        if self._checkpoints is not None:
            decline(self.channels[0].comm)

    def close(self) -> None:
        """Release the groups of micro-batches. No rank uses them any more."""
        for comm, group in self._parts:
            comm.close_part(group)
        self._parts.clear()

    def recover(self, number: int, error: PeerError, state: list[Any]) -> list[list[Any]]:
        """Go on without the ranks that have died. Collective over the others, in all micro-batches.

        Args:
            number: of the micro-batch.
            error: of the operation that has failed.
            state: of this rank's micro-batch, as JSON.

        Returns:
            The states of all ranks that go on.

        Raises:
            PeerError: ``error``, if the ranks cannot go on.
        """
        if self._checkpoints is None:
            raise error
        begin(self.channels[0].comm, error)
        try:
            states = self._meeting.join("recover", number, state, lambda states: self._recover(error, states))
        except PeerError as ended:
            raise error from ended
        return [of_rank[number] for of_rank in states]

    def _recover(self, error: PeerError, own: dict[int, list[Any]]) -> list[list[list[Any]]]:
        channel = self.channels[0]
        comm, timeout_s, state = channel.comm, channel.timeout_s, [own[number] for number in range(self.count)]
        states: dict[int, Any] = survivors(comm, error, [state, self._copies_are_current()], timeout_s)
        members = list(states)
        dead = [str(rank) for rank in range(comm.world) if rank not in states]
        _log.warning("serving goes on without rank %s of the group: %s", ", ".join(dead), error)
        self.failures.append(type(error)(*error.args))  # without frames, which refer to the group
        self.channels = self._channels(channel_of(comm.subgroup(members, timeout_s)))
        copies = all(current for _, current in states.values())
        self._move(members, lambda old: old.restricted(members, copies), copies)
        return [of_numbers for of_numbers, _ in states.values()]

    def offer(self, number: int, vote: int, placement: Placement) -> None:
        """Let the other ranks read ``placement``, if this is the first micro-batch."""
        if number == 0:
            self.channels[0].comm.store.set(f"placement/{vote}/{self.rank}", placement.to_json())

    def move(self, number: int, rank: int, vote: int, moved: Callable[[bool], None]) -> None:
        """Move the experts as a rank has offered to the first micro-batch. Collective, in all micro-batches.

        moved: called before micro-batches go on, with whether this rank has offered the placement.
        """

        def act(offers: dict[int, tuple[int, int]]) -> None:
            rank, vote = offers[0]
            text = self.channels[0].comm.store.get(f"placement/{vote}/{rank}").decode()
            placement = Placement.from_json(text)
            self._move(range(self.channels[0].world), lambda _: placement, self._copies_are_current())
            moved(rank == self.rank)

        self._meeting.join("move", number, (rank, vote), act)

    def _move(self, members: Sequence[int], new_placement: Callable[[Placement], Placement], copies: bool) -> None:
        groups = [channel.comm.group for channel in self.channels]
        lost = move_experts(self._models, groups, members, new_placement, from_copies=copies)
        for model, path, parts in zip(self._models, self._checkpoints or (), lost, strict=False):
            load_parts(model, path, parts)
        self.publish_copies()

    def publish_copies(self) -> None:
        """Send the weights of copies of experts if those of a rank have changed. Collective.

        The ranks are in different calls afterwards, and calls of micro-batches have no order.
        """
        every = {one: None for model in self._models for one in swapped_experts(model).values()}
        changed = any(one.copies is not None and one.copies.changed for one in every)
        if any(row[0] for row in self.channels[0].gather_values((changed, 0), "whether copies of experts are current")):
            for experts in every:
                experts.publish_copies()

    def _copies_are_current(self) -> bool:
        """Return whether the copies of experts on this rank have their weights."""
        copies = [one.copies for model in self._models for one in swapped_experts(model).values()]
        return all(one is None or not one.changed for one in copies)
