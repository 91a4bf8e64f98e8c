"""What clipping by the norm of all ranks costs: moe_comm.clip_grad_norm_ against torch.nn.utils.clip_grad_norm_.

    python -m benchmarks.clip_norm --json benchmarks/results/clip_norm.json

Each rank has half of the experts and all replicated parameters, ``--params`` elements over all ranks together. The two
take turns in one run; of each turn the slowest rank counts. "torch" is torch's function on plain gradients, without
communication: the norm of one rank, which is wrong here and costs the least. "torch, all ranks" is torch's function on
the gradients as backward leaves them. ``overhead`` is the median over pairs of neighbouring turns of ours over "torch",
minus one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import moe_comm
from moe_comm.bench.common.machine import facts
from moe_comm.bench.common.race import Pairs
from moe_comm.runtime.launch import init_ranks, launch

HIDDEN, FFN, EXPERTS = 256, 512, 8


class Model(nn.Module):
    """MoE layers and linears, about half of the parameters each."""

    def __init__(self, params: int, group: Any) -> None:
        super().__init__()
        expert = 3 * HIDDEN * FFN * EXPERTS
        layers = max(1, params // (2 * expert))
        router = moe_comm.RouterConfig(EXPERTS, 2)
        config = moe_comm.MoEConfig(hidden=HIDDEN, ffn=FFN, router=router)
        built = [moe_comm.MoELayer.build(config, group, seed=layer) for layer in range(layers)]
        self.experts: list[nn.Module] = [layer.experts for layer in built]
        self.moe = nn.ModuleList(built)
        self.dense = nn.ModuleList(nn.Linear(HIDDEN, expert // HIDDEN, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for moe, dense in zip(self.moe, self.dense, strict=True):
            x = x + moe(x) + dense(x).mean(-1, keepdim=True)
        return x


def measure(params: int, rounds: int) -> dict[str, Any]:
    """On each rank; the same everywhere."""
    with init_ranks() as ranks:
        model = Model(params, dist.group.WORLD if ranks.world > 1 else None)
        model(torch.randn(16, HIDDEN)).sum().backward()
        moe_comm.sync_gradients(model)
        parameters = list(model.parameters())
        marked = [parameter.grad for parameter in parameters]
        plain = [getattr(grad, "local", lambda grad=grad: grad)() for grad in marked]

        def torchs(grads: list[Any]) -> None:
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)

        turns: dict[str, Callable[[], Any]] = {
            "torch": lambda: torchs(plain),
            "ours": lambda: moe_comm.clip_grad_norm_(model, 1.0),
            "torch, all ranks": lambda: torchs(marked),
        }
        times: dict[str, list[float]] = {name: [] for name in turns}
        for number in range(rounds + 3):
            for name, call in turns.items() if number % 2 else reversed(turns.items()):
                if ranks.world > 1:
                    dist.barrier()
                start = time.perf_counter()
                call()
                taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
                if ranks.world > 1:
                    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
                if number >= 3:
                    times[name].append(float(taken))
        pairs = Pairs.of(times["torch"], times["ours"])
        held = sum(parameter.numel() for parameter in parameters)
        experts = sum(p.numel() for one in model.experts for p in one.parameters())
        return {
            "ranks": ranks.world,
            "params": held + experts * (ranks.world - 1),
            "ms": {name: 1e3 * statistics.median(taken) for name, taken in times.items()},
            "overhead": pairs.ratio - 1,
            **asdict(pairs),
        }


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--params", type=float, default=1e8, help="over all ranks together")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = launch(measure, (int(given.params), given.rounds), given.ranks)[0]
    found["machine"] = facts("cpu")
    shown = ", ".join(f"{name} {ms:.2f} ms" for name, ms in found["ms"].items())
    print(f"{found['params']:.3g} parameters on {found['ranks']} ranks: {shown}; overhead {found['overhead']:.1%}")
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
