"""Ping-pong between a rank with attention and one with experts, on two hosts, with 1 to 4 micro-batches.

    python -m benchmarks.ping_pong [--link-gbit 0.6] [--batch 256] [--ffn 1920] ...      # root

The hosts are network namespaces, and each rank has a core of its own. One model decodes the same batch with each number
of micro-batches in turn. A rank is idle while it computes for no micro-batch: neither experts, nor attention and the
rest of the model. T_a, T_e and T_c are times of a layer with one micro-batch: attention and the rest of the model,
experts, and the way between them, in one direction, with votes.

The formula is that of MegaScale-Infer, for times in proportion to the rows of a micro-batch: a layer of all of them
takes the largest of T_a, T_e and (T_a + T_e + 2 T_c) / m.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

import moe_comm
from benchmarks import ping_pong  # of a module, not of __main__
from moe_comm.bench.hosts.namespaces import Hosts
from moe_comm.bench.hosts.ranks import run_on_hosts
from moe_comm.bench.serve.requests import Interval, covered

HEAD_DIM, VOCABULARY, TIMEOUT_S = 64, 256, 118.0


class TimedLock:
    """The lock that a rank holds while it computes, with the times in which it was held."""

    def __init__(self) -> None:
        self._lock, self._begin_s = threading.Lock(), 0.0
        self.held: list[Interval] = []

    def acquire(self) -> None:
        self._lock.acquire()
        self._begin_s = time.monotonic()

    def release(self) -> None:
        self.held.append((self._begin_s, time.monotonic()))
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def model_of(args: argparse.Namespace) -> Any:
    """Return the model, with random weights."""
    torch.manual_seed(0)
    heads = args.hidden // HEAD_DIM
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": args.hidden,
        "intermediate_size": args.ffn,
        "moe_intermediate_size": args.ffn,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": HEAD_DIM,
        "num_experts": args.experts,
        "num_experts_per_tok": args.top_k,
    }
    config = Qwen3MoeConfig(**settings)
    return Qwen3MoeForCausalLM(config).eval()


def serve(args: argparse.Namespace) -> list[tuple[int, float, float]]:
    """Return the runs of this rank: micro-batches, and the seconds of a step, and those in which the rank computes."""
    rank = dist.get_rank()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    model = moe_comm.swap_moe(model_of(args), backend=args.backend, placement=[0, args.experts])
    ids_BS = torch.randint(VOCABULARY, (args.batch, args.prompt), device="cpu")
    runs = []
    for number in range(args.rounds + 1):
        for m in args.micro_batches:
            window, lock = (0.0, 0.0), TimedLock()
            with moe_comm.serving(model, micro_batches=m) as serving:
                rounds: Any = serving._rounds
                rounds._lock = lock  # no public attribute tells when a rank computes
                if rank == 0:
                    begin_s, length = time.monotonic(), {"min_new_tokens": args.tokens, "max_new_tokens": args.tokens}
                    model.generate(ids_BS, do_sample=False, pad_token_id=0, **length)
                    window = begin_s, time.monotonic()
            windows: list[Any] = [None, None]
            dist.all_gather_object(windows, window)
            begin_s, end_s = windows[0]
            if number:  # the first round only warms up
                runs.append((m, (end_s - begin_s) / args.tokens, covered(lock.held, windows[:1]) / args.tokens))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--link-gbit", type=float, default=0.6)
    parser.add_argument("--backend", default="all_to_all")
    sizes = {"layers": 4, "hidden": 1536, "ffn": 1920, "experts": 2, "top_k": 1}
    for name, value in (sizes | {"batch": 256, "prompt": 1, "tokens": 8, "rounds": 3}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 3, 4])
    args = parser.parse_args()
    with Hosts(2, args.link_gbit) as hosts:
        ranks = run_on_hosts(ping_pong.serve, (args,), hosts, 1, TIMEOUT_S)
    rows = {}
    for m in args.micro_batches:
        step_s = median(step for one, step, _ in ranks[0] if one == m)
        rows[m] = step_s, *(median(busy / step for one, step, busy in runs if one == m) for runs in ranks)
    whole_s, *busy = rows[args.micro_batches[0]]
    layer_s = whole_s / args.layers
    t_a, t_e = (share * layer_s for share in busy)
    t_c = (layer_s - t_a - t_e) / 2
    print(f"a layer: T_a {t_a * 1e3:.1f} ms, T_e {t_e * 1e3:.1f} ms, T_c {t_c * 1e3:.1f} ms")
    print(" m  step ms  throughput  formula  idle: attention  experts")
    for m, (step_s, *busy) in rows.items():
        formula = layer_s / max(t_a, t_e, layer_s / m)
        shares = "".join(f"{1 - share:9.0%}" for share in busy)
        print(f"{m:2d} {step_s * 1e3:8.1f} {whole_s / step_s:10.2f}x {formula:7.2f}x        {shares}")


if __name__ == "__main__":
    main()
