"""``moe-comm plan --serve``: accelerators for attention and experts, for a trace of requests and latency bounds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_comm.cli.options import echo, load
from moe_comm.errors import ConfigError
from moe_comm.runtime.untrusted import parse_object, read_bounded

if TYPE_CHECKING:
    from moe_comm.layers.transformer.shape import ModelShape
    from moe_plan.machine.hardware import Cluster
    from moe_plan.serving.search import ServePlan


@dataclass(frozen=True)
class ServeOptions:
    """Options of ``plan --serve``. trace: a file, or ``poisson:...``. price: NAME=X of each ``--price``."""

    trace: str
    ttft_s: float
    tpot_s: float
    price: tuple[str, ...]
    top: int

    def prices(self) -> dict[str, float]:
        """Return the prices of accelerators by name, also those that are known."""
        from moe_plan.serving.search import PRICES

        prices = dict(PRICES)
        for text in self.price:
            name, _, value = text.partition("=")
            try:
                prices[name] = float(value)
            except ValueError:
                prices[name] = 0
            if not 0 < prices[name] < float("inf"):
                raise ConfigError(f"--price must be NAME=X with X above 0; got {text!r}")
        return prices


def plan_serving(
    shape: ModelShape, attention: Cluster, experts: Cluster, dtype: str, options: ServeOptions, json_out: str | None
) -> None:
    """Search, replay the trace on the best plan, and print and write the result."""
    from moe_plan.serving.cost import ServeModel
    from moe_plan.serving.replay import instances
    from moe_plan.serving.search import ServeRequest, enough_micro_batches
    from moe_plan.serving.trace import read_trace

    trace = read_trace(options.trace)
    # A request is decoded with its prompt and, on average, half of its output, in proportion to its steps.
    steps = sum(one.output_tokens for one in trace)
    context = sum(one.output_tokens * (one.prompt_tokens + one.output_tokens / 2) for one in trace) / steps
    model = ServeModel(shape, attention, experts, dtype)
    request = ServeRequest(model, context, options.tpot_s, options.prices())
    plans = request.best(options.top)
    best = plans[0]
    count, served = instances(model, best.mapping, trace, options.ttft_s, options.tpot_s)
    hosts, colocated = request.colocated()
    rows = [_row(plan) for plan in plans]
    result: dict[str, Any] = {
        "model": shape.name,
        "attention": attention.accelerator.name,
        "experts": experts.accelerator.name,
        "requests": len(trace),
        "mean_context": context,
        "plans": rows,
        "colocated": {"hosts": hosts, "tokens_per_s_per_price": colocated},
        "instances": count,
        "latency": served.summary(),
    }
    load("moe_comm.bench.common.report", "bench").write_json(result, json_out)
    err = json_out == "-"
    echo(f"{shape.name}: attention on {attention.accelerator.name}, experts on {experts.accelerator.name}", err)
    echo(f"{len(trace)} requests, {context:.0f} tokens of context, TPOT at most {options.tpot_s * 1e3:g} ms\n", err)
    echo("tp_a  n_a  tp_e   m  GPUs       batch  step ms  T_a/T_e/T_c us   idle a/e  tokens/s  per price", err)
    for plan, row in zip(plans, rows, strict=True):
        mapping, times = plan.mapping, plan.times
        idle = "/".join(f"{share:.0%}" for share in row["idle"])
        micro = "/".join(f"{one * 1e6:.0f}" for one in (times.attention_s, times.experts_s, times.transfer_s))
        gpus = "+".join(map(str, plan.gpus))
        nodes = f"{mapping.tp_a:4}{mapping.n_a:5}{mapping.tp_e:6}{mapping.m:4}  {gpus:9}{plan.batch:7,}"
        rates = f"{idle:>10}{plan.tokens_per_s:10,.0f}{plan.value:11,.1f}"
        echo(f"{nodes}{times.step_s * 1e3:9.1f}  {micro:15}{rates}", err)
    times = best.times
    enough = enough_micro_batches(times.transfer_s, times.slower_s)
    echo(f"\nneither pool waits with {enough} micro-batches if T_a = T_e", err)
    if hosts:
        echo(
            f"all on {attention.accelerator.name}, {hosts} host(s): {colocated:,.1f} tokens/s per price "
            f"(the plan: {best.value / colocated:.2f} times as many)",
            err,
        )
    latency = ", ".join(
        f"{name.removesuffix('_s').replace('_', ' ')} {value:.3f} s" for name, value in _latencies(result)
    )
    echo(f"the trace needs {count} instance(s) of the first plan: {latency}", err)


MOST_BYTES = 16 << 20
"""Largest result of ``bench serve`` that is read."""
NODES, MICRO_BATCHES = range(1, 5), range(1, 5)
"""Numbers of attention nodes and micro-batches that ``plan_measured`` predicts."""


def plan_measured(file: Path, options: ServeOptions, json_out: str | None) -> None:
    """Predict the latencies of the trace on the ranks that ``bench serve`` has measured, and on more attention ranks.

    file: the result of ``bench serve``.
    """
    from moe_plan.serving.cost import ServeMapping
    from moe_plan.serving.measured import MeasuredCosts
    from moe_plan.serving.replay import replay
    from moe_plan.serving.trace import read_trace

    trace = read_trace(options.trace)
    try:
        measured = parse_object(read_bounded(file, MOST_BYTES))
        values, most_tokens = measured["plan"]["costs"], int(measured["settings"]["batch_tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} is no result of bench serve with one attention rank: {error}") from None
    costs, rows = MeasuredCosts.from_dict(values), []
    for nodes in NODES:
        for m in MICRO_BATCHES:
            served = replay(costs, ServeMapping(1, 1, nodes, m), trace, most_tokens).summary()
            keeps = not (served["ttft_p99_s"] > options.ttft_s or served["tpot_p99_s"] > options.tpot_s)
            rows.append({"n_a": nodes, "m": m, "keeps_bounds": keeps} | served)
    result = {"requests": len(trace), "measured": str(file), "predicted": rows}
    load("moe_comm.bench.common.report", "bench").write_json(result, json_out)
    err = json_out == "-"
    echo(f"{len(trace)} requests, measured costs of {file}; each rank has its own cores\n", err)
    echo("n_a   m  TTFT p50 / p99 ms  TPOT p50 / p99 ms  tokens/s  bounds", err)
    for row in rows:
        times = (f"{row[f'{one}_p50_s'] * 1e3:.1f} / {row[f'{one}_p99_s'] * 1e3:.1f}" for one in ("ttft", "tpot"))
        kept = "kept" if row["keeps_bounds"] else "missed"
        echo(
            f"{row['n_a']:3}{row['m']:4}  {next(times):>17}  {next(times):>17}{row['tokens_per_s']:10,.0f}  {kept}", err
        )


def _latencies(result: dict[str, Any]) -> list[tuple[str, float]]:
    return [(name, value) for name, value in result["latency"].items() if name[:4] in ("ttft", "tpot")]


def _row(plan: ServePlan) -> dict[str, Any]:
    times = plan.times
    return {
        **asdict(plan.mapping),
        "gpus": plan.gpus,
        "price": plan.price,
        "batch": plan.batch,
        **asdict(times),
        "idle": times.idle(plan.mapping.m),
        "tokens_per_s": plan.tokens_per_s,
        "tokens_per_s_per_price": plan.value,
    }
