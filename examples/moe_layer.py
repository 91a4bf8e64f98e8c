"""An MoE layer over the ranks of a group: build it, train a few steps, and check its gradients.

    python examples/moe_layer.py
    torchrun --nproc-per-node 2 examples/moe_layer.py

Started without torchrun, it starts two ranks itself.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from moe_comm import MoEConfig, MoELayer, RouterConfig, check_grads
from moe_comm.runtime.launch import init_ranks, launch

HIDDEN, TOKENS = 32, 64


def sum_gradients(layer: MoELayer) -> None:
    """Add up what each rank has of the replicated parameters' gradients. The experts' are complete already."""
    for name, parameter in layer.named_parameters():
        if not name.startswith("experts."):
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)


def work() -> list[str]:
    """What each rank does; returns what it has to say."""
    with init_ranks() as ranks:
        config = MoEConfig(
            hidden=HIDDEN,
            ffn=48,
            router=RouterConfig(num_experts=8, top_k=2, balance_loss=0.01),
            shared_ffn=16,
        )
        # The same weights whatever the number of ranks: 8 experts on one, 4 and 4 on two, 3, 3 and 2 on three.
        layer = MoELayer.build(config, dist.group.WORLD if ranks.world > 1 else None, seed=0, label="moe")
        says = [f"rank {ranks.rank} of {ranks.world}: {layer.experts.num_experts} experts, {layer.dispatcher.name}"]

        generator = torch.Generator().manual_seed(ranks.rank)  # each rank has its own tokens
        x_TD = torch.randn(TOKENS, HIDDEN, generator=generator)
        wanted_TD = x_TD.roll(1, dims=1)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        for step in range(20):
            # A sum over tokens, divided by the number of tokens of all ranks: then gradients are plain sums.
            loss = (layer(x_TD) - wanted_TD).square().sum() / (TOKENS * ranks.world)
            optimizer.zero_grad()
            loss.backward()
            if ranks.world > 1:
                sum_gradients(layer)
            optimizer.step()
            if step in (0, 19):
                says.append(f"rank {ranks.rank} of {ranks.world}: step {step + 1}, own part of the loss {loss:.3f}")

        # Output and every gradient against one rank that holds all experts, and against float64.
        report = check_grads(layer, tokens=16, cases=("routed", "unequal tokens", "all to one expert"))
        if ranks.rank == 0:
            says.append(str(report))
        if not report.ok:
            raise SystemExit(str(report))
        layer.dispatcher.close()
        return says


if __name__ == "__main__":
    for says in launch(work, ranks=2):
        print("\n".join(says))
