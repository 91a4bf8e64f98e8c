"""Changes of the ranks and of the placement of experts while models are served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

from torch import nn

from moe_comm.comm.group_setup import channel_of
from moe_comm.comm.regroup import allow, decline, survivors
from moe_comm.comm.shared_channel import SharedChannel
from moe_comm.errors import PeerError
from moe_comm.integrations.checkpoint.load import load_parts
from moe_comm.integrations.hugging_face.move import move_experts
from moe_comm.integrations.hugging_face.swap import swapped_experts
from moe_comm.topology import Placement

_log = logging.getLogger(__name__)


class Recovery:
    """Moves the experts of models to other ranks between two calls of experts. All ranks make the same calls.

    Args:
        channel: of the group of the models.
        checkpoints: a folder or file for each model, from which experts are read that no rank has any more. None: the
            ranks do not go on after a failure.

    Attributes:
        channel: of the present group.
        failures: of ranks, after which the others went on.
    """

    def __init__(
        self, models: Sequence[nn.Module], channel: SharedChannel, checkpoints: Sequence[str | PathLike[str]] | None
    ) -> None:
        self.channel, self.failures = channel, list[PeerError]()
        self._models, self._checkpoints = models, checkpoints
        if checkpoints is not None:
            allow(channel.comm)

    @property
    def rank(self) -> int:
        """This rank in the present group."""
        return self.channel.rank

    def decline(self) -> None:
        """Report that this rank will not go on after a failure."""
        if self._checkpoints is not None:
            decline(self.channel.comm)

    def recover(self, error: PeerError, state: list[Any]) -> list[list[Any]]:
        """Go on without the ranks that have died. Collective over the others.

        Args:
            error: of the operation that has failed.
            state: of this rank, as JSON.

        Returns:
            The states of all ranks that go on.

        Raises:
            PeerError: ``error``, if the ranks cannot go on.
        """
        if self._checkpoints is None:
            raise error
        comm, timeout_s = self.channel.comm, self.channel.timeout_s
        states: dict[int, Any] = survivors(comm, error, [state, self._copies_are_current()], timeout_s)
        members = list(states)
        dead = [str(rank) for rank in range(comm.world) if rank not in states]
        _log.warning("serving goes on without rank %s of the group: %s", ", ".join(dead), error)
        self.failures.append(type(error)(*error.args))  # without frames, which refer to the group
        self.channel = channel_of(comm.subgroup(members, timeout_s))
        if self._checkpoints is not None:
            allow(self.channel.comm)
        copies = all(current for _, current in states.values())
        self._move(members, lambda old: old.restricted(members, copies), copies)
        return [of_rounds for of_rounds, _ in states.values()]

    def offer(self, number: int, placement: Placement) -> None:
        """Let the other ranks read ``placement`` in ``move(rank, number)``."""
        self.channel.comm.store.set(f"placement/{number}/{self.rank}", placement.to_json())

    def move(self, rank: int, number: int) -> None:
        """Move the experts as the other rank has offered. Collective."""
        text = self.channel.comm.store.get(f"placement/{number}/{rank}").decode()
        placement = Placement.from_json(text)
        self._move(range(self.channel.world), lambda _: placement, self._copies_are_current())

    def _move(self, members: Sequence[int], new_placement: Callable[[Placement], Placement], copies: bool) -> None:
        group = self.channel.comm.group
        lost = move_experts(self._models, group, members, new_placement, from_copies=copies)
        for model, path, parts in zip(self._models, self._checkpoints or (), lost, strict=False):
            load_parts(model, path, parts)

    def _copies_are_current(self) -> bool:
        """Return whether the copies of experts on this rank have their weights."""
        copies = [one.copies for model in self._models for one in swapped_experts(model).values()]
        return all(one is None or one.published for one in copies)
