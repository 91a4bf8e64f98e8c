"""Shard attention and a feed-forward block over two tensor-parallel ranks, and compare with the unsharded modules.

    python examples/tensor_parallel.py
    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Without torchrun, the script starts two ranks. Between the two blocks, each rank has half of each sequence (sequence
parallelism), so the gradients of the norm between them are summed over the ranks.
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
    """Attention and a feed-forward block. The modules may be sharded or not."""

    def __init__(self, attention: Attention, norm: RMSNorm, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.attention, self.norm, self.up, self.down = attention, norm, up, down

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(x_BSD)
        return x_BSD + self.down(torch.relu(self.up(self.norm(x_BSD))))


def work() -> str:
    """Run on each rank. Return a description of the result."""
    with init_ranks("cpu") as ranks:
        group = dist.group.WORLD if ranks.world > 1 else None
        torch.manual_seed(0)  # the same weights on every rank
        full_block = Block(Attention(CONFIG), RMSNorm(HIDDEN), nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN))

        attention = Attention(CONFIG, tp_group=group)
        block = Block(
            attention,
            copy.deepcopy(full_block.norm),
            ColumnParallelLinear.from_linear(full_block.up, group, sequence_dim=1),
            RowParallelLinear.from_linear(full_block.down, group, sequence_dim=1),
        )
        # shardings_of returns how each parameter is sharded. It selects this rank's shard of a full weight or gradient.
        place, sizes = {"tp": ranks.rank, "cp": 0, "dp": 0}, {"tp": ranks.world, "cp": 1, "dp": 1}
        shardings, full = shardings_of(block), dict(full_block.named_parameters())
        with torch.no_grad():
            for name, parameter in block.named_parameters():
                parameter.copy_(shardings[name].take(full[name], place, sizes))

        x_BSD = torch.randn(BATCH, LENGTH, HIDDEN)
        local = slice(ranks.rank * LENGTH // ranks.world, (ranks.rank + 1) * LENGTH // ranks.world)
        expected_BSD = full_block(x_BSD)
        expected_BSD.square().sum().backward()
        y_BSD = block(x_BSD[:, local])  # local tokens in, local tokens out
        y_BSD.square().sum().backward()
        torch.testing.assert_close(y_BSD, expected_BSD[:, local])

        for name, parameter in block.named_parameters():
            grad = parameter.grad
            assert grad is not None and full[name].grad is not None
            if group is not None and "tp" in shardings[name].sum_axes:  # not sharded: each rank has a partial sum
                dist.all_reduce(grad)
            torch.testing.assert_close(grad, shardings[name].take(full[name].grad, place, sizes), rtol=1e-4, atol=1e-4)
        heads = attention.q.weight.shape[0] // CONFIG.head_dim
        return f"rank {ranks.rank} of {ranks.world}: {heads} heads, output and gradients match"


if __name__ == "__main__":
    for description in launch(work, ranks=2):
        print(description)
