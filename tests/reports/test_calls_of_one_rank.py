"""A rank that calls a layer alone, as in generation on rank 0 only, gets an error that says so."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moe_comm import DispatchOptions, make_dispatcher
from moe_comm.errors import PeerError
from tests.pool import on_ranks


@on_ranks(2)
@pytest.mark.parametrize("backend", ["shared_memory", "all_to_all"])
def test_the_error_of_a_rank_that_dispatches_alone_says_that_all_ranks_must_call(rank: int, backend: str) -> None:
    dispatcher = make_dispatcher(4, dist.new_group(), backend=backend, options=DispatchOptions(timeout_s=1.0))
    x_TD, ids_TK = torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int64)
    dispatcher.dispatch(x_TD, ids_TK)
    if rank == 0:
        with pytest.raises(PeerError, match=r"(?i)all ranks must call a layer equally often, also in generate"):
            dispatcher.dispatch(x_TD, ids_TK)
