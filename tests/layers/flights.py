"""What of a model computes while rows of experts are under way: the order of events on one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from torch import Tensor, nn

from moe_comm.comm.channel import Channel, PendingTensor


@dataclass
class Flights:
    """events: what computed, in order, each with the number of transfers that were under way then."""

    events: list[tuple[str, int]] = field(default_factory=list)
    started: int = 0
    under_way: int = 0

    def computed(self, what: str) -> None:
        self.events.append((what, self.under_way))

    def of(self, what: str) -> list[int]:
        """Transfers under way at each ``what``."""
        return [count for name, count in self.events if name == what]

    def watch(self, name: str, module: nn.Module) -> None:
        """Note when ``module`` computes, and, as ``name`` backward, when its output's gradient is there."""

        def noted(_: nn.Module, inputs: Any, output: Tensor) -> None:
            self.computed(name)
            if output.requires_grad:
                output.register_hook(lambda _: self.computed(f"{name} backward"))

        module.register_forward_hook(noted)


@contextlib.contextmanager
def recorded() -> Iterator[Flights]:
    """Count this process's exchanges between their start and the first wait for them."""
    flights = Flights()
    start = Channel.start_all_to_all

    def noting(
        self: Channel,
        rows: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        description: str,
        out: Tensor | None = None,
    ) -> PendingTensor:
        pending = start(self, rows, send, receive, description, out)
        flights.started += 1
        flights.under_way += 1
        waited: list[bool] = []

        def take() -> Tensor:
            if not waited:
                waited.append(True)
                flights.under_way -= 1
            return pending()

        return replace(pending, take=take)

    with mock.patch.object(Channel, "start_all_to_all", noting):
        yield flights
