"""Decode with few tokens: what a layer costs above its copies and GEMMs, and what a rank without requests costs.

    python -m benchmarks.decode layer [--tokens 8] [--hidden 1024] ...
    python -m benchmarks.decode idle [--tokens 8] [--hidden 256] ...

``layer``: experts of a swapped model on two ranks, with other work before each call (``bench dispatch --cold``),
interleaved with the bare copies of the same rows and with the GEMMs of the same rows alone.

``idle``: rank 0 generates for ``--tokens`` sequences. Rank 1 is idle in ``serving``; or, without votes, calls the
experts of each layer without tokens as often as rank 0. The two alternate in one run.
"""

from __future__ import annotations

import argparse
import time
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

import moe_comm
from benchmarks import decode  # of a module, not of __main__
from moe_comm import _C as native
from moe_comm.bench.common.clock import Clock, gather, summarize
from moe_comm.bench.common.inputs import RankInputs, make_inputs
from moe_comm.bench.common.ranks import on_ranks
from moe_comm.bench.common.settings import DispatchBench
from moe_comm.bench.dispatch.contestants import BareCopies, Contestant, TimedPhase, measure
from moe_comm.integrations.hugging_face.compute import expert_mlp
from moe_comm.integrations.hugging_face.swap import EPExperts, swapped_experts

RANKS, HEAD_DIM, VOCABULARY = 2, 32, 256


def model_of(args: argparse.Namespace, layers: int) -> Any:
    """Return a swapped model with random weights."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": args.hidden,
        "intermediate_size": args.ffn,
        "moe_intermediate_size": args.ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": args.hidden // HEAD_DIM,
        "num_key_value_heads": args.hidden // HEAD_DIM // 2,
        "head_dim": HEAD_DIM,
        "num_experts": args.experts,
        "num_experts_per_tok": args.top_k,
    }
    logging.set_verbosity_error()
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings)).to(getattr(torch, args.dtype)).eval()
    return moe_comm.swap_moe(model)


class Layer(Contestant):
    """The experts of a layer, in one native call."""

    name = "layer"

    def __init__(self, experts: EPExperts, inputs: RankInputs) -> None:
        self._experts, self._inputs = experts, (inputs.x_TD, inputs.ids_TK, inputs.weights_TK)

    def _call(self) -> None:
        self._experts(*self._inputs)

    def steps(self) -> list[TimedPhase]:
        return [("layer", self._call)]

    def check(self) -> dict[str, float]:
        return {}


class Gemms(Contestant):
    """The GEMMs of the rows of this rank's experts."""

    name = "gemms"

    def __init__(self, experts: EPExperts, inputs: RankInputs) -> None:
        sent = experts.dispatcher.dispatch(inputs.x_TD, inputs.ids_TK)
        self._rows_RD, self._sizes = sent.rows_RD.clone(), tuple(sent.handle.rows_per_expert)
        self._out_RD = torch.empty_like(self._rows_RD)
        self._mlp = expert_mlp(experts.layout, experts, self._rows_RD.dtype)

    def _run(self) -> None:
        def alloc(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(rows, width, dtype=dtype, device=device)

        self._mlp.forward(self._rows_RD, self._out_RD, self._sizes, False, alloc).all_rows()

    def steps(self) -> list[TimedPhase]:
        return [("gemms", self._run)]

    def check(self) -> dict[str, float]:
        return {}


@torch.no_grad()
def measure_layer(args: argparse.Namespace, threads: int) -> dict[str, float]:
    """Return the median of the slowest rank, in microseconds, by phase."""
    shape = {name: getattr(args, name) for name in ("tokens", "hidden", "experts", "top_k", "dtype")}
    settings = DispatchBench(**shape, ranks=RANKS, backward=False, cold=not args.warm, peers=(), iterations=args.rounds)
    inputs = make_inputs(settings, dist.get_rank())
    (experts,) = swapped_experts(model_of(args, 1)).values()
    clock = Clock("cpu")
    copies = BareCopies(native, settings, dist.get_rank(), inputs, threads)
    measure([Layer(experts, inputs), Gemms(experts, inputs), copies], clock, settings)
    stats = summarize(gather(dict(clock.times)))
    return {phase: values["median_ms"] * 1e3 for (_, phase), values in stats.items()}


@torch.no_grad()
def measure_idle(args: argparse.Namespace, threads: int) -> list[tuple[float, float]]:
    """Return the seconds of a step in ``serving`` and without votes, in each round."""
    model, rank, store = model_of(args, args.layers), dist.get_rank(), dist.distributed_c10d._get_default_store()
    every = list(swapped_experts(model).values())
    weight = every[0].down_proj
    ids_BS = torch.randint(VOCABULARY, (args.tokens, 4), device="cpu")
    empty = (
        torch.zeros(0, args.hidden, dtype=weight.dtype, device="cpu"),
        torch.zeros(0, args.top_k, dtype=torch.int64, device="cpu"),
        torch.zeros(0, args.top_k, dtype=torch.float32, device="cpu"),
    )

    def step_s() -> float:
        begin_s, length = time.perf_counter(), {"min_new_tokens": args.steps, "max_new_tokens": args.steps}
        model.generate(ids_BS, do_sample=False, pad_token_id=0, **length)
        seconds: float = (time.perf_counter() - begin_s) / args.steps
        return seconds

    times = []
    for number in range(args.rounds + 1):
        pair = [0.0, 0.0]
        for votes in (True, False) if number % 2 else (False, True):
            dist.barrier()
            if votes:
                with moe_comm.serving(model):
                    if rank == 0:
                        pair[0] = step_s()
                        store.set(f"round {number}", "")
                    else:
                        store.wait([f"round {number}"])
            elif rank == 0:
                pair[1] = step_s()
            else:
                for _ in range(args.steps):
                    for experts in every:
                        experts(*empty)
        if number:  # the first round only warms up
            times.append((pair[0], pair[1]))
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("layer", "idle"))
    sizes = {"tokens": 8, "hidden": 1024, "ffn": 512, "experts": 64, "top_k": 8, "layers": 4, "steps": 32, "rounds": 40}
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--warm", action="store_true", help="no other work before calls of layers")
    args = parser.parse_args()
    if args.what == "layer":
        us = on_ranks(decode.measure_layer, args, RANKS, "cpu") or {}
        above = us["layer"] - us["gemms"] - us["dispatch"] - us["combine"]
        print("   ".join(f"{phase} {value:.0f} us" for phase, value in us.items()))
        print(f"the layer takes {above:.0f} us more than its copies and GEMMs")
    else:
        times = on_ranks(decode.measure_idle, args, RANKS, "cpu") or []
        serving_s, alone_s = (median(values) for values in zip(*times, strict=True))
        low, ratio, high = quantiles([one / other - 1 for one, other in times])
        print(f"a step in serving {serving_s * 1e3:.2f} ms, without votes {alone_s * 1e3:.2f} ms")
        print(f"serving takes {ratio:+.1%} (median of {len(times)} pairs; quartiles {low:+.1%}, {high:+.1%})")


if __name__ == "__main__":
    main()
