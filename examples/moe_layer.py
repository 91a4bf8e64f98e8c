"""Build an expert-parallel MoE layer, train it for a few steps, and check its gradients.

    python examples/moe_layer.py
    torchrun --nproc-per-node 2 examples/moe_layer.py

Without torchrun, the script starts two ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from moe_comm import MoEConfig, MoELayer, RouterConfig, check_grads
from moe_comm.runtime.launch import init_ranks, launch

HIDDEN, TOKENS = 32, 64


def sum_gradients(layer: MoELayer) -> None:
    """Sum the gradients of replicated parameters over the ranks. Those of experts need no reduction."""
    for name, parameter in layer.named_parameters():
        if not name.startswith("experts."):
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)


def work() -> list[str]:
    """Run on each rank. Return the lines to print."""
    with init_ranks() as ranks:
        config = MoEConfig(
            hidden=HIDDEN,
            ffn=48,
            router=RouterConfig(num_experts=8, top_k=2, balance_loss=0.01),
            shared_ffn=16,
        )
        # The weights do not depend on the number of ranks: 8 experts on one rank, 4 + 4 on two, 3 + 3 + 2 on three.
        layer = MoELayer.build(config, dist.group.WORLD if ranks.world > 1 else None, seed=0, label="moe")
        lines = [f"rank {ranks.rank} of {ranks.world}: {layer.experts.num_experts} experts, {layer.dispatcher.name}"]

        generator = torch.Generator().manual_seed(ranks.rank)  # each rank has its own tokens
        x_TD = torch.randn(TOKENS, HIDDEN, generator=generator)
        target_TD = x_TD.roll(1, dims=1)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        for step in range(20):
            # The loss is divided by the number of tokens of all ranks, so gradients are summed, not averaged.
            loss = (layer(x_TD) - target_TD).square().sum() / (TOKENS * ranks.world)
            optimizer.zero_grad()
            loss.backward()
            if ranks.world > 1:
                sum_gradients(layer)
            optimizer.step()
            if step in (0, 19):
                lines.append(f"rank {ranks.rank} of {ranks.world}: step {step + 1}, local part of the loss {loss:.3f}")

        # Compare the output and all gradients with one rank that has all experts, and with float64.
        report = check_grads(layer, tokens=16, cases=("routed", "unequal tokens", "all to one expert"))
        if ranks.rank == 0:
            lines.append(str(report))
        if not report.ok:
            raise SystemExit(str(report))
        layer.dispatcher.close()
        return lines


if __name__ == "__main__":
    for lines in launch(work, ranks=2):
        print("\n".join(lines))
