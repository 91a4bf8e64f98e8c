"""Attention and a feed-forward block on two tensor-parallel ranks, made from ordinary ones and compared with them.

    python examples/tensor_parallel.py
    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Started without torchrun, it starts two ranks itself. Between the two blocks each rank has its own half of every
sequence (sequence parallelism), so gradients of what stands there are summed over the ranks.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_comm.layers import Attention, AttentionConfig, ColumnParallelLinear, RMSNorm, RowParallelLinear, shardings_of
from moe_comm.runtime.launch import init_ranks, launch

BATCH, LENGTH, HIDDEN, FFN = 2, 16, 32, 64
CONFIG = AttentionConfig(HIDDEN, heads=4, kv_heads=2, head_dim=8)


class Block(nn.Module):
    """Attention, then a feed-forward block; the modules may be spread over ranks or not."""

    def __init__(self, attention: Attention, norm: RMSNorm, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.attention, self.norm, self.up, self.down = attention, norm, up, down

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(x_BSD)
        return x_BSD + self.down(torch.relu(self.up(self.norm(x_BSD))))


def work() -> str:
    """What each rank does; returns what it saw."""
    with init_ranks("cpu") as ranks:
        group = dist.group.WORLD if ranks.world > 1 else None
        torch.manual_seed(0)  # the same weights on every rank
        whole = Block(Attention(CONFIG), RMSNorm(HIDDEN), nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN))

        attention = Attention(CONFIG, tp_group=group)
        block = Block(
            attention,
            copy.deepcopy(whole.norm),
            ColumnParallelLinear.from_linear(whole.up, group, sequence_dim=1),
            RowParallelLinear.from_linear(whole.down, group, sequence_dim=1),
        )
        # What each parameter is a part of: a new module's weights can be set from whole ones, and gradients compared.
        place, sizes = {"tp": ranks.rank, "cp": 0, "dp": 0}, {"tp": ranks.world, "cp": 1, "dp": 1}
        shardings, full = shardings_of(block), dict(whole.named_parameters())
        with torch.no_grad():
            for name, parameter in block.named_parameters():
                parameter.copy_(shardings[name].take(full[name], place, sizes))

        x_BSD = torch.randn(BATCH, LENGTH, HIDDEN)
        own = slice(ranks.rank * LENGTH // ranks.world, (ranks.rank + 1) * LENGTH // ranks.world)
        expected_BSD = whole(x_BSD)
        expected_BSD.square().sum().backward()
        y_BSD = block(x_BSD[:, own])  # this rank's tokens in, this rank's tokens out
        y_BSD.square().sum().backward()
        torch.testing.assert_close(y_BSD, expected_BSD[:, own])

        for name, parameter in block.named_parameters():
            grad = parameter.grad
            assert grad is not None and full[name].grad is not None
            if group is not None and "tp" in shardings[name].sum_axes:  # not cut: a part of the sum on each rank
                dist.all_reduce(grad)
            torch.testing.assert_close(grad, shardings[name].take(full[name].grad, place, sizes), rtol=1e-4, atol=1e-4)
        heads = attention.q.weight.shape[0] // CONFIG.head_dim
        return f"rank {ranks.rank} of {ranks.world}: {heads} heads, output and gradients match"


if __name__ == "__main__":
    for seen in launch(work, ranks=2):
        print(seen)
