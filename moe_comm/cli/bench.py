"""``moe-comm bench``: what things cost on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moe_comm.cli.options import (
    Backend,
    Device,
    DeviceOf,
    Dtype,
    DtypeOf,
    Experts,
    Hidden,
    Iterations,
    JsonOut,
    Peers,
    Preset,
    Ranks,
    Seed,
    Tokens,
    TopK,
    Warmup,
    chosen,
    load,
)

bench = typer.Typer(no_args_is_help=True, help="Measure dispatch, a whole MoE layer, training steps, overlap.")


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
    backward: Annotated[bool, typer.Option(help="Measure the two backward passes too.")] = True,
    peers: Peers = None,
    warmup: Warmup = 2,
    iterations: Iterations = 0,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Dispatch and combine against torch + gloo, MPICH, and the bare copy of the same bytes."""
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
        Preset | None, typer.Option(help="Shape to use instead: comm (many small experts) or compute (few wide ones).")
    ] = None,
    memory: Annotated[bool, typer.Option(help="Measure each contestant's peak memory too.")] = True,
    peers: Peers = None,
    warmup: Warmup = 2,
    iterations: Iterations = 0,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """A whole MoE layer, forward and backward, against Hugging Face and torchtitan."""
    settings = load("moe_comm.bench.common.settings", "bench")
    values = chosen(peers, ranks=ranks, tokens=tokens, hidden=hidden, experts=experts, top_k=top_k, dtype=dtype.value)
    values |= {"ffn": ffn, "backend": backend, "device": device.value, "memory": memory}
    values |= {"warmup": warmup, "iterations": iterations, "seed": seed}
    if preset is not None:
        values |= settings.LAYER_PRESETS[preset.value]
    load("moe_comm.bench.layer.benchmark", "bench").main(settings.LayerBench(**values), json_out)


@bench.command("train")
def bench_train(
    ranks: Ranks = 2,
    preset: Annotated[
        Preset, typer.Option(help="Shape: comm (many small experts) or compute (few wide ones).")
    ] = Preset.comm,
    layers: Annotated[int | None, typer.Option(min=1, help="Instead of the preset's.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=2, help="Tokens of a sequence, instead of the preset's.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences of a rank, instead of the preset's.")] = None,
    sharding: Annotated[str, typer.Option(help="Of ours: replicate, zero1 or fsdp.")] = "replicate",
    peers: Peers = None,
    warmup: Warmup = 2,
    steps: Annotated[int, typer.Option(min=1, help="Rounds to take the median of.")] = 7,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Whole training steps against Hugging Face (EP with FSDP2, FSDP2, DDP), DeepSpeed's AutoEP, and one process."""
    settings = load("moe_comm.bench.train.settings", "bench")
    given = {"layers": layers, "seq_len": seq_len, "batch": batch}
    values = chosen(peers, ranks=ranks, sharding=sharding, warmup=warmup, steps=steps, seed=seed)
    values |= settings.TRAIN_PRESETS[preset.value] | {key: value for key, value in given.items() if value is not None}
    load("moe_comm.bench.train.benchmark", "bench").main(settings.TrainBench(**values), json_out)


@bench.command("overlap")
def bench_overlap(
    hosts: Annotated[int, typer.Option(min=2, max=64, help="Network namespaces to make, each a host.")] = 2,
    ranks_per_host: Annotated[int, typer.Option(min=1, help="Ranks on each.")] = 1,
    link_gbit: Annotated[float, typer.Option(min=0.001, help="Rate of each host's link, Gbit/s.")] = 1.0,
    operator: Annotated[
        list[str] | None, typer.Option("--op", help="Only this operator; repeat for more. [all four]")
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows (tokens) of a rank; repeat for more. [2048]")
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Rows from 1 to 8192 at ratio 1, and no layer.")] = False,
    width: Annotated[int, typer.Option(min=1, help="Columns of what travels.")] = 512,
    ratio: Annotated[
        list[float] | None, typer.Option(min=0.01, help="Communication over compute; repeat for more. [0.5, 1, 2]")
    ] = None,
    chunks: Annotated[str, typer.Option(help="Parts in which a rank's rows travel; or auto.")] = "8",
    deterministic: Annotated[bool, typer.Option(help="Weight gradients with the same bits for any chunks.")] = True,
    layer: Annotated[bool, typer.Option(help="Measure whole MoE layers too.")] = True,
    hf: Annotated[bool, typer.Option(help="Hugging Face's expert parallelism beside them.")] = True,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each rank, of the layer.")] = 2048,
    hidden: Annotated[int, typer.Option(min=1, help="Width of the layer's rows.")] = 512,
    ffn: Annotated[
        list[int] | None, typer.Option(min=1, help="Width of its experts; repeat for more. [one that fits the link]")
    ] = None,
    experts: Annotated[int, typer.Option(min=0, help="Experts over all ranks; 0: 8 for each.")] = 0,
    top_k: TopK = 2,
    trace: Annotated[str | None, typer.Option(metavar="OUT", help="File for timelines, for Perfetto.")] = None,
    png: Annotated[str | None, typer.Option(metavar="OUT", help="File for timelines, a picture.")] = None,
    warmup: Warmup = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to take the median of.")] = 7,
    seconds: Annotated[float, typer.Option(min=0, help="More rounds while they fit in so many seconds.")] = 2.0,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """What the fused operators and MoE layers hide between hosts with a shaped link. Needs root and iproute2."""
    module = load("moe_comm.bench.overlap.benchmark", "bench")
    values: dict[str, Any] = {"hosts": hosts, "ranks_per_host": ranks_per_host, "link_gbit": link_gbit, "width": width}
    values |= {"chunks": int(chunks) if chunks.isdecimal() else chunks, "deterministic": deterministic}
    values |= {"layer": layer and not sweep, "peers": hf, "tokens": tokens, "hidden": hidden, "experts": experts}
    values |= {"top_k": top_k, "warmup": warmup, "rounds": rounds, "seconds": seconds, "seed": seed}
    if sweep:
        values |= {"rows": module.SWEEP, "ratios": (1.0,)}
    lists = (("operators", operator), ("rows", rows), ("ratios", ratio), ("ffn", ffn))
    values |= {key: tuple(given) for key, given in lists if given}
    module.main(module.OverlapBench(**values), json_out, trace, png)


@bench.command("hierarchical")
def bench_hierarchical(
    hosts: Annotated[int, typer.Option(min=2, max=64, help="Network namespaces to make, each a host.")] = 2,
    ranks_per_host: Annotated[int, typer.Option(min=2, help="Ranks on each.")] = 2,
    link_gbit: Annotated[float, typer.Option(min=0.001, help="Rate of each host's link, Gbit/s.")] = 1.0,
    tokens: Tokens = 1024,
    hidden: Hidden = 1024,
    experts: Experts = 64,
    top_k: TopK = 8,
    warmup: Warmup = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to take the median of.")] = 7,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Dispatch and combine in two levels against plain all-to-all, between hosts with a shaped link. Needs root."""
    module = load("moe_comm.bench.dispatch.hierarchical", "bench")
    values = {"hosts": hosts, "ranks_per_host": ranks_per_host, "link_gbit": link_gbit, "tokens": tokens}
    values |= {"hidden": hidden, "experts": experts, "top_k": top_k, "warmup": warmup, "rounds": rounds, "seed": seed}
    module.main(module.HierarchicalBench(**values), json_out)


@bench.command("plan")
def bench_plan(
    ranks: Annotated[
        list[int] | None, typer.Option(min=2, help="Only mappings on so many; repeat for more. [2, 4 and 8]")
    ] = None,
    hosts: Annotated[bool, typer.Option(help="Mappings over a shaped link too; needs root.")] = True,
    link_gbit: Annotated[float, typer.Option(min=0.001, help="Rate of the link, Gbit/s.")] = 1.0,
    warmup: Warmup = 1,
    steps: Annotated[int, typer.Option(min=1, help="Rounds to take the median of.")] = 5,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Steps of mappings on this machine, measured and predicted; and whether planning picks the fastest."""
    settings = load("moe_comm.bench.plan.settings", "bench")
    cases = tuple(case for case in settings.CASES if (not ranks or case.ranks in ranks) and (hosts or case.hosts == 1))
    values: dict[str, Any] = {"link_gbit": link_gbit, "warmup": warmup, "steps": steps, "seed": seed, "cases": cases}
    load("moe_comm.bench.plan.benchmark", "bench").main(settings.PlanBench(**values), json_out)
