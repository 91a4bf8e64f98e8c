"""``moe-comm bench``: benchmarks on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moe_comm.cli.options import (
    AnyHosts,
    Backend,
    CoresPerRank,
    Device,
    DeviceOf,
    DispatchPeers,
    Dtype,
    DtypeOf,
    Experts,
    Hidden,
    Hosts,
    Iterations,
    JsonOut,
    LayerPeers,
    LinkGbit,
    Preset,
    Ranks,
    Rounds,
    Seed,
    Tokens,
    TopK,
    TrainPeers,
    Warmup,
    chosen,
    load,
)
from moe_comm.errors import ConfigError

bench = typer.Typer(no_args_is_help=True, help="Measure dispatch, MoE layers, training steps, and overlap.")


@bench.command("dispatch")
def bench_dispatch(
    ranks: Ranks = 2,
    tokens: Tokens = 4096,
    hidden: Hidden = 1024,
    experts: Experts = 64,
    top_k: TopK = 8,
    dtype: DtypeOf = Dtype.float32,
    backend: Backend = "auto",
    device: DeviceOf = Device.cpu,
    backward: Annotated[bool, typer.Option(help="Also measure both backward passes.")] = True,
    peers: DispatchPeers = None,
    warmup: Warmup = 2,
    iterations: Iterations = 0,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Compare dispatch and combine with torch + gloo, MPICH, and a plain copy of the same bytes."""
    settings = load("moe_comm.bench.common.settings", "bench")
    values = chosen(peers, ranks=ranks, tokens=tokens, hidden=hidden, experts=experts, top_k=top_k, dtype=dtype.value)
    values |= {"backend": backend, "device": device.value, "backward": backward}
    values |= {"warmup": warmup, "iterations": iterations, "seed": seed}
    load("moe_comm.bench.dispatch.benchmark", "bench").main(settings.DispatchBench(**values), json_out)


@bench.command("layer")
def bench_layer(
    ranks: Ranks = 2,
    tokens: Tokens = 4096,
    hidden: Hidden = 1024,
    ffn: Annotated[int, typer.Option(min=1, help="Width of each expert.")] = 512,
    experts: Experts = 64,
    top_k: TopK = 8,
    dtype: DtypeOf = Dtype.float32,
    backend: Backend = "auto",
    device: DeviceOf = Device.cpu,
    preset: Annotated[
        Preset | None, typer.Option(help="Replace the shape: comm (many small experts) or compute (few wide experts).")
    ] = None,
    memory: Annotated[bool, typer.Option(help="Also measure the peak memory of each implementation.")] = True,
    peers: LayerPeers = None,
    warmup: Warmup = 2,
    iterations: Iterations = 0,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Compare a complete MoE layer, forward and backward, with Hugging Face and torchtitan."""
    settings = load("moe_comm.bench.common.settings", "bench")
    values = chosen(peers, ranks=ranks, tokens=tokens, hidden=hidden, experts=experts, top_k=top_k, dtype=dtype.value)
    values |= {"ffn": ffn, "backend": backend, "device": device.value, "memory": memory}
    values |= {"warmup": warmup, "iterations": iterations, "seed": seed}
    if preset is not None:
        values |= settings.LAYER_PRESETS[preset.value]
    load("moe_comm.bench.layer.benchmark", "bench").main(settings.LayerBench(**values), json_out)


@bench.command("train")
def bench_train(
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks to start, over all hosts; torchrun's ranks are used under torchrun.  [default: 2, or hosts x "
            "ranks per host]",
        ),
    ] = None,
    hosts: AnyHosts = 1,
    ranks_per_host: Annotated[
        int | None, typer.Option(min=1, help="Ranks per host.  [default: 1 with several hosts]")
    ] = None,
    link_gbit: LinkGbit = 1.0,
    preset: Annotated[
        Preset, typer.Option(help="Shape: comm (many small experts) or compute (few wide experts).")
    ] = Preset.comm,
    layers: Annotated[int | None, typer.Option(min=1, help="Number of layers.  [default: the preset's]")] = None,
    seq_len: Annotated[int | None, typer.Option(min=2, help="Tokens per sequence.  [default: the preset's]")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences per rank.  [default: the preset's]")] = None,
    sharding: Annotated[str, typer.Option(help="Sharding in moe_comm: replicate, zero1 or fsdp.")] = "replicate",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override for moe_comm, such as parallel.ep=1; repeatable."),
    ] = None,
    variants: Annotated[
        list[str] | None,
        typer.Option(
            "--variant",
            metavar="NAME:KEY=VALUE,...",
            help="Another configuration of moe_comm to compare with, such as ep1:parallel.ep=1; repeatable.",
        ),
    ] = None,
    peers: TrainPeers = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="Calibrate this machine, and predict the steps of moe_comm.")
    ] = False,
    trace: Annotated[
        str | None, typer.Option(metavar="OUT", help="File for a Perfetto trace of one step of moe_comm.")
    ] = None,
    warmup: Warmup = 2,
    steps: Annotated[int, typer.Option(min=1, help="Number of measured rounds; the median is reported.")] = 7,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Compare training steps with Hugging Face (EP with FSDP2, FSDP2, DDP), DeepSpeed (AutoEP, ZeRO), and one process.

    With several hosts, also between hosts with a shaped link.
    """
    settings = load("moe_comm.bench.train.settings", "bench")
    if hosts > 1 or ranks_per_host is not None:
        world = hosts * (ranks_per_host or 1)
        if ranks not in (None, world):
            raise ConfigError(f"{hosts} hosts x {ranks_per_host or 1} ranks per host are {world}; got --ranks {ranks}")
        ranks = world
    shape = {"layers": layers, "seq_len": seq_len, "batch": batch}
    values = chosen(peers, ranks=ranks or 2, sharding=sharding, warmup=warmup, steps=steps, seed=seed)
    values |= {"hosts": hosts, "link_gbit": link_gbit, "settings": tuple(overrides or ())}
    values["variants"] = tuple(settings.Variant.parse(text) for text in variants or ())
    values |= settings.TRAIN_PRESETS[preset.value]
    values |= {key: value for key, value in shape.items() if value is not None}
    main = load("moe_comm.bench.train.benchmark", "bench").main
    main(settings.TrainBench(**values), json_out, trace, predict=predict)


@bench.command("overlap")
def bench_overlap(
    hosts: Hosts = 2,
    ranks_per_host: Annotated[int, typer.Option(min=1, help="Ranks per host.")] = 1,
    link_gbit: LinkGbit = 1.0,
    operator: Annotated[
        list[str] | None, typer.Option("--op", help="Operator to measure; repeatable. [all four]")
    ] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Rows (tokens) per rank; repeatable. [2048]")] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Measure 1 to 8192 rows at ratio 1, without layers.")] = False,
    width: Annotated[int, typer.Option(min=1, help="Columns of the transferred rows.")] = 512,
    ratio: Annotated[
        list[float] | None,
        typer.Option(min=0.01, help="Ratio of communication to computation; repeatable. [0.5, 1, 2]"),
    ] = None,
    chunks: Annotated[str, typer.Option(help="Number of chunks of a rank's rows, or auto.")] = "8",
    deterministic: Annotated[
        bool, typer.Option(help="Compute weight gradients with equal bits for any number of chunks.")
    ] = True,
    layer: Annotated[bool, typer.Option(help="Also measure complete MoE layers.")] = True,
    hf: Annotated[bool, typer.Option(help="Also measure Hugging Face's expert parallelism.")] = True,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per rank in the layer.")] = 2048,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size of the layer.")] = 512,
    ffn: Annotated[
        list[int] | None, typer.Option(min=1, help="Width of its experts; repeatable. [chosen for the link]")
    ] = None,
    experts: Annotated[int, typer.Option(min=0, help="Total number of experts; 0: 8 per rank.")] = 0,
    top_k: TopK = 2,
    trace: Annotated[
        str | None, typer.Option(metavar="OUT", help="File for a Perfetto trace of the timelines.")
    ] = None,
    png: Annotated[str | None, typer.Option(metavar="OUT", help="File for an image of the timelines.")] = None,
    warmup: Warmup = 2,
    rounds: Rounds = 7,
    seconds: Annotated[float, typer.Option(min=0, help="Add rounds for up to this many seconds.")] = 2.0,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Measure the overlap of fused operators and MoE layers between hosts with a shaped link. Needs root."""
    settings = load("moe_comm.bench.overlap.contest", "bench")
    values: dict[str, Any] = {"hosts": hosts, "ranks_per_host": ranks_per_host, "link_gbit": link_gbit, "width": width}
    values |= {"chunks": int(chunks) if chunks.isdecimal() else chunks, "deterministic": deterministic}
    values |= {"layer": layer and not sweep, "peers": hf, "tokens": tokens, "hidden": hidden, "experts": experts}
    values |= {"top_k": top_k, "warmup": warmup, "rounds": rounds, "seconds": seconds, "seed": seed}
    if sweep:
        values |= {"rows": settings.SWEEP, "ratios": (1.0,)}
    lists = (("operators", operator), ("rows", rows), ("ratios", ratio), ("ffn", ffn))
    values |= {key: tuple(selected) for key, selected in lists if selected}
    load("moe_comm.bench.overlap.benchmark", "bench").main(settings.OverlapBench(**values), json_out, trace, png)


@bench.command("hierarchical")
def bench_hierarchical(
    hosts: Hosts = 2,
    ranks_per_host: Annotated[int, typer.Option(min=2, help="Ranks per host.")] = 2,
    link_gbit: LinkGbit = 1.0,
    tokens: Tokens = 1024,
    hidden: Hidden = 1024,
    experts: Experts = 64,
    top_k: TopK = 8,
    warmup: Warmup = 2,
    rounds: Rounds = 7,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Compare hierarchical dispatch with all-to-all, between hosts with a shaped link. Needs root."""
    module = load("moe_comm.bench.dispatch.hierarchical", "bench")
    values = {"hosts": hosts, "ranks_per_host": ranks_per_host, "link_gbit": link_gbit, "tokens": tokens}
    values |= {"hidden": hidden, "experts": experts, "top_k": top_k, "warmup": warmup, "rounds": rounds, "seed": seed}
    module.main(module.HierarchicalBench(**values), json_out)


@bench.command("placement")
def bench_placement(
    ranks: Ranks = 4,
    tokens: Tokens = 512,
    hidden: Hidden = 256,
    ffn: Annotated[int, typer.Option(min=1, help="Width of each expert.")] = 512,
    experts: Experts = 32,
    top_k: TopK = 4,
    zipf: Annotated[float, typer.Option(min=0, help="Exponent of the popularity of experts; 0: uniform.")] = 1.0,
    drift: Annotated[
        int, typer.Option(min=0, help="Steps after which two experts exchange their popularity; 0: never.")
    ] = 0,
    every: Annotated[int, typer.Option(min=1, help="Steps between decisions.")] = 10,
    window: Annotated[
        int | None, typer.Option(min=1, help="Steps that each decision adds, at most --every. [5, or --every]")
    ] = None,
    threshold: Annotated[float, typer.Option(min=0, help="Minimum share of the busiest rank's rows to save.")] = 0.05,
    slots: Annotated[
        int, typer.Option(min=0, help="Copies of experts that each rank can hold with replicate; 0: without it.")
    ] = 1,
    hosts: AnyHosts = 1,
    link_gbit: LinkGbit = 1.0,
    cores_per_rank: CoresPerRank = None,
    warmup: Warmup = 10,
    steps: Annotated[int, typer.Option(min=1, help="Number of measured steps.")] = 30,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Compare an MoE layer with fixed experts, and with experts that move or have copies, by the rows of the ranks."""
    settings = load("moe_comm.bench.placement.settings", "bench").PlacementBench
    values: dict[str, Any] = {"ranks": ranks, "tokens": tokens, "hidden": hidden, "ffn": ffn, "experts": experts}
    values |= {"top_k": top_k, "zipf": zipf, "drift": drift, "every": every, "threshold": threshold}
    values |= {"window": min(5, every) if window is None else window}
    values |= {"slots": slots, "hosts": hosts, "link_gbit": link_gbit, "cores_per_rank": cores_per_rank}
    values |= {"warmup": warmup, "iterations": steps, "seed": seed}
    load("moe_comm.bench.placement.benchmark", "bench").main(settings(**values), json_out)


@bench.command("plan")
def bench_plan(
    ranks: Annotated[
        list[int] | None, typer.Option(min=2, help="Only mappings on this many ranks; repeatable. [2, 4 and 8]")
    ] = None,
    hosts: Annotated[bool, typer.Option(help="Also measure mappings over a shaped link; needs root.")] = True,
    link_gbit: LinkGbit = 1.0,
    warmup: Warmup = 1,
    steps: Annotated[int, typer.Option(min=1, help="Number of measured rounds; the median is reported.")] = 5,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Compare measured and predicted steps of mappings on this machine, and the planner's choice with the fastest."""
    settings = load("moe_comm.bench.plan.settings", "bench")
    cases = tuple(case for case in settings.CASES if (not ranks or case.ranks in ranks) and (hosts or case.hosts == 1))
    values: dict[str, Any] = {"link_gbit": link_gbit, "warmup": warmup, "steps": steps, "seed": seed, "cases": cases}
    load("moe_comm.bench.plan.benchmark", "bench").main(settings.PlanBench(**values), json_out)
