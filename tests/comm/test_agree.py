"""An error of one rank is raised on every rank, and differing settings are named."""

from __future__ import annotations

from typing import Any

import pytest

from moe_comm.comm.agree import agree, compare, differences
from moe_comm.comm.channel import Channel
from moe_comm.comm.group_setup import communicator_of
from moe_comm.errors import CheckpointError, HeapError, RankMismatch
from tests.pool import on_ranks


def gather(own: str) -> list[str]:
    """The texts of three ranks, of which rank 1 has a typed error and rank 2 an error of Python."""
    return [own, "HeapError\nfull", "OSError\ndenied"]


def test_the_error_of_a_rank_is_raised_with_its_class() -> None:
    with pytest.raises(HeapError, match="rank 1: full"):
        agree("", gather)
    with pytest.raises(ZeroDivisionError):  # a rank with an error raises its own
        agree(ZeroDivisionError("here"), gather)
    with pytest.raises(CheckpointError, match="rank 1: OSError: denied"):
        agree("", lambda own: [own, gather("")[2]], CheckpointError)
    assert agree("a\nb", lambda own: [own, "\nc"]) == ["a\nb", "c"]


def test_only_differing_settings_are_named() -> None:
    assert differences(["a\t1\nb\t2", "a\t1\nb\t3"]) == "b: rank 0: 2, rank 1: 3"
    assert differences(["a\t1", "b\t1"]) == "a: rank 0: 1, rank 1: not given; b: rank 0: not given, rank 1: 1"


@on_ranks(2)
def test_a_setting_of_one_rank_only_raises_on_every_rank(rank: int, group: Any) -> None:
    channel = Channel(communicator_of(group), 60.0)
    with pytest.raises(RankMismatch, match="extra when building a test: rank 0: not given, rank 1: 1"):
        compare(channel, "a test", {"size": 3} | ({"extra": 1} if rank else {}))
