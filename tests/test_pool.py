"""The rank pool: results by rank, failures with their rank, deadlines with stacks, and restarts."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import RankFailure, RankPool, on_ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def add_up(rank: int, world: int, arg: int) -> torch.Tensor:
    total = torch.tensor([rank + arg])
    dist.all_reduce(total)
    return total


def fail_on_one(rank: int, world: int, arg: Any) -> None:
    if rank == 1:
        raise ValueError("only here")
    dist.barrier()


def hang(rank: int, world: int, arg: Any) -> None:
    dist.barrier()
    if rank == 0:
        dist.barrier()


def die(rank: int, world: int, signal_number: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal_number)
    return "alive"


def test_results_come_by_rank(pool: RankPool) -> None:
    assert [int(total) for total in pool.run(add_up, 10)] == [21, 21]


def test_an_error_of_a_rank_ends_the_run_before_the_deadline(pool: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        pool.run(fail_on_one, timeout=60, grace=0.5)
    assert failure.value.errors[1] == ("ValueError", "only here")
    assert "fail_on_one" in str(failure.value)
    assert [int(total) for total in pool.run(add_up, 1)] == [3, 3]


def test_the_deadline_prints_stacks_and_the_pool_starts_again(
    pool: RankPool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_for_one(pipes: list[Any], seconds: float) -> list[Any]:
        """Wait for rank 1 however long it takes on a busy machine. The deadline applies to the rank that hangs."""
        return wait(pipes, 60 if len(pipes) == 2 else seconds)

    monkeypatch.setattr("tests.pool.wait", wait_for_one)
    with pytest.raises(RankFailure) as failure:
        pool.run(hang, timeout=3)
    assert failure.value.errors.keys() == {0} and failure.value.errors[0][0] == "Deadline"
    assert "in hang" in str(failure.value) and "in hang" in capfd.readouterr().err
    assert [int(total) for total in pool.run(add_up, 1)] == [3, 3]


def test_an_unexpected_death_is_a_failure(pool: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        pool.run(die, signal.SIGKILL, timeout=60)
    assert failure.value.errors == {1: ("ProcessDied", "exit code -9")}


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_expected_death_is_not_a_failure(pool: RankPool, signal_number: int) -> None:
    assert pool.run(die, signal_number, timeout=60, expect_dead={1}) == ["alive", None]
    assert len(set(pool.pids)) == 2


@on_ranks(2)
@pytest.mark.parametrize("case", ["passes", "fails", "skips", "skips on one rank"])
def body(rank: int, case: str) -> None:
    assert case != "fails" or rank == 0
    if case == "skips" or (case == "skips on one rank" and rank == 1):
        pytest.skip("why")


def test_a_body_on_ranks_fails_if_one_rank_fails_or_skips_alone(pools: dict[int, RankPool]) -> None:
    run = functools.partial(body, pools=pools, ranks=2)  # type: ignore[call-arg]
    run(case="passes")
    with pytest.raises(pytest.skip.Exception, match="why"):
        run(case="skips")
    with pytest.raises(RankFailure, match="rank 1: AssertionError"):
        run(case="fails")
    with pytest.raises(AssertionError, match="some ranks skipped"):
        run(case="skips on one rank")
