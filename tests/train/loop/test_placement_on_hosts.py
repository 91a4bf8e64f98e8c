"""Experts that move between two hosts, which are network namespaces connected by a link."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moe_comm.bench.hosts.namespaces import Hosts, interface_bytes, unavailable_reason
from moe_comm.bench.hosts.ranks import run_on_hosts
from tests.train.common import Trained, session, train, whole
from tests.train.loop.test_placement import LONG, shuffled, train_moving

pytestmark = pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason() or "hosts can be created")


def train_and_switch(settings: list[str], wide: list[str]) -> tuple[Trained, Trained, int, int]:
    """Train with fixed experts, and with experts that move. Then switch the experts of another model.

    Returns:
        Both results, and the bytes of the last switch by the count of this rank and of its host's interface.
    """
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    fixed, (moving, sent) = train(rank, world, settings), train_moving(rank, world, settings)
    assert all(actual == formula > 0 for actual, formula in sent) and len(sent) == 3
    with session(wide) as active:
        state = active.trainer.train_state
        new = {name: shuffled(old, 1) for name, old in state.placements.by_layer.items()}
        before = interface_bytes().sent
        sent_bytes = state.placements.switch(new)
        assert state.optimizer.in_flight  # between hosts, the optimizer state moves during the next step
        state.optimizer.wait_state()
        return fixed, moving, sent_bytes, interface_bytes().sent - before


@pytest.mark.slow
def test_experts_that_move_between_hosts_keep_their_bits_and_are_what_is_sent(shared_settings: list[str]) -> None:
    settings = [*shared_settings, *LONG]
    with Hosts(2, link_gbit=1.0) as hosts:
        results = run_on_hosts(
            train_and_switch, (settings, [*settings, "model.hidden=64", "model.ffn=64"]), hosts, 1, 120
        )
    for fixed, moving, sent, on_link in results:
        assert (moving.losses, moving.norms, moving.validation) == (fixed.losses, fixed.norms, fixed.validation)
        assert sent > 500_000
        assert sent < on_link < 1.1 * sent + 65_536  # headers, agreements and the connection of the group
    weights, moved = (whole([result[at].parts for result in results]) for at in (0, 1))
    for name, value in moved.items():
        assert torch.equal(value, weights[name]), name
