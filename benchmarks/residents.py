"""Step time of a transformer block that lends experts, without residents, and with residents sent at the call or before
attention.

    python -m benchmarks.residents [--ranks 2] [--hosts 2 --link-gbit 1] [--json FILE] [--tokens 2048] ...

Weights change in each step and are sent by gloo, so each step sends those of all lent experts (without residents), or
of the residents when it begins. The contestants have equal weights, tokens and routing, whose popularity drifts by
about 20% in each step. They take turns, a step each, and their outputs must have equal bits. With ``--hosts``, ranks
are on simulated hosts (root), whose links have a rate, and which take no CPU time while they wait.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from functools import partial
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

import moe_comm
from benchmarks import residents  # of a module, not of __main__
from moe_comm.bench.common.clock import Clock, gather
from moe_comm.bench.common.inputs import WrongAnswer
from moe_comm.bench.common.interleave import run_rounds, slowest
from moe_comm.bench.common.ranks import on_hosts, on_ranks, run_benchmark
from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import configure_collectives
from moe_comm.dispatch import DispatchOptions
from moe_comm.layers.attention.config import AttentionConfig
from moe_comm.layers.moe.config import MoEConfig
from moe_comm.layers.moe.router import RouterConfig, Routing
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.model import Transformer
from moe_comm.layers.transformer.model_plan import ModelPlan
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.topology.balance import Balance

NONE, AT_CALL, PREFETCH = CONTESTANTS = ("no residents", "residents, sent at the call", "residents, before attention")


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark.

    Args:
        hosts: 1: this one.
        cores_per_rank: CPU time of a rank in cores; 0: no limit.
        tokens: of one sequence, on each rank.
        worth: see ``Balance``.
    """

    ranks: int = 2
    hosts: int = 1
    link_gbit: float = 1.0
    cores_per_rank: float = 0.0
    tokens: int = 1024
    hidden: int = 512
    ffn: int = 512
    heads: int = 8
    experts: int = 16
    top_k: int = 2
    rows: float = 1.0
    worth: int = 64
    warmup: int = 6
    steps: int = 30


class _Contestant:
    """A block with a forward and a backward pass."""

    def __init__(self, name: str, settings: Settings, mesh: ParallelMesh) -> None:
        s, self.name = settings, name
        router = RouterConfig(s.experts, s.top_k)
        attention = AttentionConfig(s.hidden, heads=s.heads, kv_heads=s.heads, head_dim=s.hidden // s.heads)
        config = TransformerConfig(1, s.hidden, 1, attention, MoEConfig(s.hidden, s.ffn, router), s.tokens)
        options = DispatchOptions(balance=Balance(rows=s.rows, worth=s.worth))
        plan = ModelPlan.of(mesh, has_embedding=False, has_head=False, backend="all_to_all", options=options)
        self.model = Transformer(config, plan)
        initialize(self.model, seed=1)
        (self.layer,) = self.model.moe_layers()
        if name == AT_CALL:
            self.layer.prefetch = lambda: None  # type: ignore[method-assign]
        self.ids_TK = torch.zeros(s.tokens, s.top_k, dtype=torch.int64, device="cpu")  # of the next step
        self.layer.router.forward = partial(self._route, self.layer.router.forward)  # type: ignore[method-assign]
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = 1, s.tokens, s.hidden
        self.x_BSD = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").requires_grad_()
        self.y_BSD = self.x_BSD

    def _route(self, forward: Any, *args: Any, **kwargs: Any) -> Routing:
        routing: Routing = forward(*args, **kwargs)
        return routing._replace(ids_TK=self.ids_TK)

    def forward(self) -> None:
        self.y_BSD = self.model(self.x_BSD)

    def backward(self) -> None:
        self.y_BSD.sum().backward()

    def end_step(self) -> None:
        """Change the weights, as an optimizer does."""
        assert self.layer.copies is not None
        moe_comm.sync_gradients(self.model)
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for param in self.model.parameters():
                param.mul_(0.999)
        if self.name == NONE:
            self.layer.copies.forget()


def measure(settings: Settings, threads: int) -> dict[str, Any]:
    """Measure on this rank. Collective."""
    s, mesh = settings, ParallelMesh(ParallelConfig(dp=settings.ranks, ep=settings.ranks))
    configure_collectives(CollectiveOptions(shared_memory=False))
    contestants, clock = [_Contestant(name, s, mesh) for name in CONTESTANTS], Clock()
    generator = torch.Generator().manual_seed(7)  # the same popularity on each rank
    log_E = torch.randn(s.experts, generator=generator, dtype=torch.float64, device="cpu")
    own = torch.Generator().manual_seed(dist.get_rank())

    def before(step: int) -> None:
        if step == s.warmup:
            for one in contestants:
                one.layer.take_lent(one.layer.copies)
        log_E.add_(0.2 * torch.randn(s.experts, generator=generator, dtype=torch.float64, device="cpu"))
        ids_TK = torch.multinomial(log_E.exp().expand(s.tokens, -1), s.top_k, generator=own)
        for one in contestants:
            one.ids_TK = ids_TK

    def step(one: _Contestant, _: int) -> None:
        clock.measure(one.name, ("forward", one.forward), ("backward", one.backward))
        one.end_step()

    def after(_: int) -> None:
        if not all(torch.equal(one.y_BSD, contestants[0].y_BSD) for one in contestants):
            raise WrongAnswer("the contestants have outputs with other bits")

    run_rounds(contestants, step, clock, s.warmup, s.steps, before=before, after=after)
    times, rows = gather(dict(clock.times)), {}
    totals_s = slowest(times, NONE)
    for one in contestants:
        counts = gather(one.layer.take_lent(one.layer.copies).tolist())
        lent, resident = counts[0][4:6]
        rows[one.name] = {
            **{f"{phase}_ms": median(slowest(times, one.name, phase)) * 1e3 for phase in ("forward", "backward")},
            "step_ms": median(slowest(times, one.name)) * 1e3,
            "step_mean_ms": mean(slowest(times, one.name)) * 1e3,
            "speedup": median(a / b for a, b in zip(totals_s, slowest(times, one.name), strict=True)),
            "lent": lent / s.steps,
            "resident_share": resident / lent if lent else None,
            "sent_mb": sum(one[6] for one in counts) / s.steps / 1e6,
        }
    return {"benchmark": "residents", "contestants": rows, "settings": asdict(s), "threads_per_rank": threads}


def tables(result: dict[str, Any]) -> list[Table]:
    """Return the table of all contestants."""
    s, table = result["settings"], Table(title="a block that lends experts; medians of the slowest rank")
    links = f"{s['hosts']} hosts, {s['link_gbit']:g} Gbit/s; " if s["hosts"] > 1 else ""
    table.caption = f"{links}{s['ranks']} ranks, T {s['tokens']}, D {s['hidden']}, F {s['ffn']}, E {s['experts']}"
    for name in ("", "step ms", "forward", "backward", "speed", "lent", "resident", "MB sent"):
        table.add_column(name, justify="right" if name else "left")
    for name, row in result["contestants"].items():
        figures = [f"{row[f'{phase}_ms']:.1f}" for phase in ("step", "forward", "backward")]
        share = "-" if row["resident_share"] is None else f"{row['resident_share']:.0%}"
        table.add_row(name, *figures, f"{row['speedup']:.3f}", f"{row['lent']:.1f}", share, f"{row['sent_mb']:.1f}")
    return [table]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.residents", description=__doc__)
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--json")
    values = vars(parser.parse_args())
    json_out, settings = values.pop("json"), residents.Settings(**values)
    run_benchmark(partial(_run, settings), tables, json_out)


def _run(settings: Settings) -> dict[str, Any] | None:
    cores = settings.cores_per_rank or None
    if settings.hosts == 1:
        return on_ranks(residents.measure, settings, settings.ranks, "cpu", cores)
    per_host = settings.ranks // settings.hosts
    result, links = on_hosts(residents.measure, settings, settings.hosts, per_host, settings.link_gbit, cores)
    return result | {"link_gbit_measured": links}


if __name__ == "__main__":
    main()
