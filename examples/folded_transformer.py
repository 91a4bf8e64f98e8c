"""Train a model folded onto four ranks (attention tp 2 x dp 2, experts ep 4) in a custom loop.

    python examples/folded_transformer.py
    torchrun --nproc-per-node 4 examples/folded_transformer.py

Without torchrun, the script starts four ranks. Folded means that attention and experts have different parallel mappings
on the same ranks. The losses do not depend on the mapping.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from moe_comm import MoEConfig, ParallelConfig, ParallelMesh, RouterConfig, Transformer, TransformerConfig
from moe_comm.layers import AttentionConfig, ModelPlan, initialize, shardings_of
from moe_comm.runtime.launch import init_ranks, launch

VOCAB, BATCH, LENGTH = 64, 8, 16
CONFIG = TransformerConfig(
    vocab=VOCAB,
    hidden=32,
    layers=2,
    attention=AttentionConfig(32, heads=4, kv_heads=2, head_dim=8),
    moe=MoEConfig(32, 48, RouterConfig(num_experts=8, top_k=2, balance_loss=0.01)),
    max_length=LENGTH,
)


def work(mapping: ParallelConfig) -> list[str]:
    """Run on each rank. Return the lines to print."""
    with init_ranks("cpu") as ranks:
        mesh = ParallelMesh(mapping)
        model = Transformer(CONFIG, ModelPlan.of(mesh))
        initialize(model, seed=0)
        shardings = shardings_of(model)

        # The sequences of the global batch are sharded over dp. The model shards them over tp.
        ids_BS = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
        local_BS = ids_BS.chunk(mapping.dp)[mesh.place["dp"]]
        experts = len(next(model.moe_layers()).local_experts)
        lines = [
            f"rank {ranks.rank}: tp {mesh.place['tp']}, dp {mesh.place['dp']}, ep {mesh.place['ep']}, {experts} experts"
        ]
        for step in range(3):
            loss = model.loss(model(local_BS[:, :-1]), local_BS[:, 1:]) / (BATCH * LENGTH)  # tokens of all ranks
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    assert parameter.grad is not None
                    group = mesh.sum_group(shardings[name])  # the ranks with the same shard
                    if group is not None:
                        dist.all_reduce(parameter.grad, group=group)
                    parameter -= 0.5 * parameter.grad
                total = loss.detach().clone()
                if mesh.world_group is not None:
                    dist.all_reduce(total)
            if ranks.rank == 0:
                lines.append(f"step {step + 1}: loss {total:.4f}")
        model.close()
        return lines


if __name__ == "__main__":
    for lines in launch(work, (ParallelConfig(tp=2, dp=2, ep=4),), ranks=4):
        print("\n".join(lines))
