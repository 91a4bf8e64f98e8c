"""Threads of a process that share a dispatcher with one rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moe_comm.dispatch import make_dispatcher

EXPERTS, HIDDEN, ROUNDS = 8, 16, 300


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_with_other_numbers_of_choices_keep_their_operations() -> None:
    dispatcher = make_dispatcher(EXPERTS, None)

    def work(top_k: int) -> None:
        generator = torch.Generator().manual_seed(top_k)
        x_TD = torch.randn(5, HIDDEN, generator=generator)
        ids_TK = torch.stack([torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(5)])
        weights_TK = torch.full((5, top_k), 1.0 / top_k)
        for _ in range(ROUNDS):
            sent = dispatcher.dispatch(x_TD, ids_TK)
            assert sent.handle.top_k == top_k
            torch.testing.assert_close(dispatcher.combine(sent.rows_RD, weights_TK, sent.handle), x_TD)

    with ThreadPoolExecutor(3) as threads:
        for future in [threads.submit(work, top_k) for top_k in (1, 2, 4)]:
            future.result()
