"""Dispatch and combine with the dispatcher only, for your own router and experts.

    python examples/dispatch_only.py
    torchrun --nproc-per-node 2 examples/dispatch_only.py

Without torchrun, the script starts two ranks. Each expert multiplies its rows by its id + 1, so that the values are
easy to follow.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from moe_comm import make_dispatcher
from moe_comm.runtime.launch import init_ranks, launch

HIDDEN, EXPERTS, TOP_K = 4, 4, 2


def work() -> str:
    """Run on each rank. Return a description of the result."""
    with init_ranks() as ranks:
        dispatcher = make_dispatcher(EXPERTS, dist.group.WORLD if ranks.world > 1 else None)

        # Each rank has its own tokens. Their number may differ between ranks and may be zero.
        num_tokens = 2 + ranks.rank
        generator = torch.Generator().manual_seed(ranks.rank)
        x_TD = torch.full((num_tokens, HIDDEN), float(ranks.rank + 1), requires_grad=True)
        ids_TK = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(num_tokens)])
        weights_TK = torch.full((num_tokens, TOP_K), 1 / TOP_K, requires_grad=True)

        # 1. Dispatch: this rank receives the rows of its experts, grouped by expert.
        dispatched = dispatcher.dispatch(x_TD, ids_TK, label="example")

        # 2. Your experts, on the grouped rows.
        scale_R = torch.repeat_interleave(
            torch.tensor([expert + 1.0 for expert in dispatcher.local_experts]),
            torch.tensor(dispatched.handle.rows_per_expert),
        )
        out_RD = dispatched.rows_RD * scale_R[:, None]

        # 3. Combine: the weighted sum of the K results of each token, on the rank of the token.
        y_TD = dispatcher.combine(out_RD, weights_TK, dispatched.handle)

        # Dispatch and combine support autograd.
        y_TD.sum().backward()

        expected_TD = x_TD.detach() * ((ids_TK + 1) * weights_TK.detach()).sum(1, keepdim=True)
        assert torch.equal(y_TD.detach(), expected_TD)
        assert x_TD.grad is not None
        assert weights_TK.grad is not None
        sources = (dispatched.rows_RD[:, 0].int() - 1).tolist()
        description = (
            f"rank {ranks.rank} ({dispatcher.name}) holds experts {list(dispatcher.local_experts)}\n"
            f"  tokens choose {ids_TK.tolist()}\n"
            f"  rows per expert {list(dispatched.handle.rows_per_expert)}, from ranks {sources}\n"
            f"  y[:, 0] {y_TD[:, 0].tolist()}, d loss / d weights {weights_TK.grad.tolist()}"
        )
        dispatcher.close()
        return description


if __name__ == "__main__":
    for description in launch(work, ranks=2):
        print(description)
