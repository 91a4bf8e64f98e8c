"""Compare the time of moe_comm.clip_grad_norm_ with torch.nn.utils.clip_grad_norm_.

    python -m benchmarks.clip_norm --json benchmarks/results/clip_norm.json

Each rank has half of the experts and all replicated parameters, with ``--params`` elements over all ranks. The
functions alternate in one run, and the slowest rank counts. "torch" is torch's function on the plain local gradients.
It does not communicate, so its norm is wrong here and it is the lower bound. "torch, all ranks" is torch's function on
the gradients after backward. ``overhead`` is the median ratio of moe_comm to "torch" over adjacent calls, minus 1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import moe_comm
from moe_comm.bench.common import report
from moe_comm.bench.common.interleave import PairedRatio
from moe_comm.bench.common.machine import machine_info
from moe_comm.runtime.launch import init_ranks, launch

HIDDEN, FFN, EXPERTS = 256, 512, 8


class Model(nn.Module):
    """MoE layers and linear layers, each with about half of the parameters."""

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
    """Measure on this rank. Return the result, the same on every rank."""
    with init_ranks() as ranks:
        model = Model(params, dist.group.WORLD if ranks.world > 1 else None)
        model(torch.randn(16, HIDDEN)).sum().backward()
        moe_comm.sync_gradients(model)
        parameters = list(model.parameters())
        marked = [parameter.grad for parameter in parameters]
        plain = [getattr(grad, "local", lambda grad=grad: grad)() for grad in marked]

        def torch_clip(grads: list[Any]) -> None:
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)

        calls: dict[str, Callable[[], Any]] = {
            "torch": lambda: torch_clip(plain),
            "ours": lambda: moe_comm.clip_grad_norm_(model, 1.0),
            "torch, all ranks": lambda: torch_clip(marked),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds + 3):
            for name, call in calls.items() if number % 2 else reversed(calls.items()):
                if ranks.world > 1:
                    dist.barrier()
                start = time.perf_counter()
                call()
                seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
                if ranks.world > 1:
                    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
                if number >= 3:
                    times[name].append(float(seconds))
        pairs = PairedRatio.of(times["torch"], times["ours"])
        local = sum(parameter.numel() for parameter in parameters)
        experts = sum(p.numel() for one in model.experts for p in one.parameters())
        return {
            "ranks": ranks.world,
            "params": local + experts * (ranks.world - 1),
            "ms": {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()},
            "overhead": pairs.ratio - 1,
            **asdict(pairs),
        }


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--params", type=float, default=1e8, help="number of parameters over all ranks")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json")
    args = parser.parse_args()
    result = launch(measure, (int(args.params), args.rounds), args.ranks)[0]
    result["machine"] = machine_info("cpu")
    times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in result["ms"].items())
    print(f"{result['params']:.3g} parameters on {result['ranks']} ranks: {times}; overhead {result['overhead']:.1%}")
    report.write_json(result, args.json)


if __name__ == "__main__":
    main()
