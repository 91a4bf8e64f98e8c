"""Train your own experts module over a dispatcher, with the gradients of one process.

    python examples/own_experts.py
    torchrun --nproc-per-node 2 examples/own_experts.py

Without torchrun, the script starts two ranks. ``mark_experts`` declares which parameters belong to this rank's experts.
Without it, ``sync_gradients`` would sum the gradients of different experts, and raises.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moe_comm
from moe_comm.runtime.launch import init_ranks, launch

HIDDEN, EXPERTS, TOP_K, TOKENS = 16, 5, 2, 32


def new_expert(expert: int) -> nn.Module:
    """Return expert number ``expert``. Its weights do not depend on the rank that holds it."""
    torch.manual_seed(1 + expert)
    return nn.Linear(HIDDEN, HIDDEN)


class MoE(nn.Module):
    """A block with its own router and experts."""

    def __init__(self, dispatcher: moe_comm.Dispatcher) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        torch.manual_seed(0)  # the same router on every rank
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(map(new_expert, dispatcher.local_experts))
        moe_comm.mark_experts(self.experts, dispatcher)

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, ids_TK = self.router(x_TD).softmax(-1).topk(TOP_K)
        sent = self.dispatcher.dispatch(x_TD, ids_TK)
        parts = sent.rows_RD.split(list(sent.handle.rows_per_expert))
        out_RD = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return x_TD + self.dispatcher.combine(F.silu(out_RD), weights_TK, sent.handle)


def work() -> list[str]:
    """Run on each rank. Return what it would print."""
    with init_ranks() as ranks:
        dispatcher = moe_comm.make_dispatcher(EXPERTS, torch.distributed.group.WORLD)
        model = MoE(dispatcher)
        optimizer, lines = torch.optim.SGD(model.parameters(), 0.1), []
        lines.append(f"rank {ranks.rank} holds experts {list(dispatcher.local_experts)}")
        generator = torch.Generator().manual_seed(1 + ranks.rank)
        for _ in range(3):
            x_TD = torch.randn(TOKENS, HIDDEN, generator=generator)
            loss = (model(x_TD) - x_TD.roll(1, -1)).square().sum() / (TOKENS * ranks.world)
            loss.backward()
            moe_comm.sync_gradients(model)
            norm = moe_comm.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        state = moe_comm.state_dict(model, rank0_only=True, cpu=True)  # collective; rank 0 gets all experts
        if state:
            lines.append(f"norm {norm:.2f}, {sum(name.endswith('weight') for name in state) - 1} experts saved")
        return lines


if __name__ == "__main__":
    for lines in launch(work, ranks=2):
        print("\n".join(lines))
