"""``moe-comm bench`` and ``tune``: measurements on this machine. Most options are fields of a class of settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moe_comm.bench.common.settings import (
    LAYER_PRESETS,
    AnyHosts,
    DispatchBench,
    HierarchicalBench,
    LayerBench,
    OverlapBench,
    Ranks,
    Tune,
)
from moe_comm.bench.placement.settings import PlacementBench
from moe_comm.bench.plan.settings import CASES, PlanBench
from moe_comm.bench.serve.settings import ServeBench
from moe_comm.bench.train.settings import TRAIN_PRESETS, TrainBench, Variant
from moe_comm.cli.options import JsonOut, Preset, load, settings_command
from moe_comm.errors import ConfigError

app = typer.Typer()
bench = typer.Typer(no_args_is_help=True, help="Measure dispatch, MoE layers, training steps, and overlap.")
SWEEP = tuple(2**power for power in range(14))
"""Rows from 1 to 8192."""


def _run(name: str, *arguments: Any, **options: Any) -> None:
    load(f"moe_comm.bench.{name}", "bench").main(*arguments, **options)


@settings_command(bench, "dispatch", DispatchBench)
def bench_dispatch(values: dict[str, Any], json_out: JsonOut = None) -> None:
    """Compare dispatch and combine with torch + gloo, MPICH, and a plain copy of the same bytes."""
    _run("dispatch.benchmark", DispatchBench(**values), json_out)


@settings_command(bench, "layer", LayerBench)
def bench_layer(
    values: dict[str, Any],
    context: typer.Context,
    preset: Annotated[
        Preset | None,
        typer.Option(
            help="Shape, except for options that are given: comm (many small experts) or compute (few wide experts)."
        ),
    ] = None,
    json_out: JsonOut = None,
) -> None:
    """Compare a complete MoE layer, forward and backward, with Hugging Face and torchtitan."""
    given = {name for name in values if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    shape = LAYER_PRESETS[preset] if preset else {}
    values |= {name: value for name, value in shape.items() if name not in given}
    _run("layer.benchmark", LayerBench(**values), json_out)


@settings_command(bench, "train", TrainBench)
def bench_train(
    values: dict[str, Any],
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
    preset: Annotated[
        Preset, typer.Option(help="Shape: comm (many small experts) or compute (few wide experts).")
    ] = "comm",
    layers: Annotated[int | None, typer.Option(min=1, help="Number of layers.  [default: the preset's]")] = None,
    seq_len: Annotated[int | None, typer.Option(min=2, help="Tokens per sequence.  [default: the preset's]")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences per rank.  [default: the preset's]")] = None,
    variants: Annotated[
        list[str] | None,
        typer.Option(
            "--variant",
            metavar="NAME:KEY=VALUE,...",
            help="Another configuration of moe_comm to compare with, such as ep1:parallel.ep=1; repeatable.",
        ),
    ] = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="Calibrate this machine, and predict the steps of moe_comm.")
    ] = False,
    trace: Annotated[
        str | None, typer.Option(metavar="OUT", help="File for a Perfetto trace of one step of moe_comm.")
    ] = None,
    json_out: JsonOut = None,
) -> None:
    """Compare training steps with Hugging Face (EP with FSDP2, FSDP2, DDP), DeepSpeed (AutoEP, ZeRO), and one process.

    With several hosts, also between hosts with a shaped link.
    """
    if hosts > 1 or ranks_per_host is not None:
        world = hosts * (ranks_per_host or 1)
        if ranks not in (None, world):
            raise ConfigError(f"{hosts} hosts x {ranks_per_host or 1} ranks per host are {world}; got --ranks {ranks}")
        ranks = world
    shape = {"layers": layers, "seq_len": seq_len, "batch": batch}
    values |= TRAIN_PRESETS[preset] | {key: value for key, value in shape.items() if value is not None}
    values |= {"ranks": ranks or 2, "hosts": hosts, "variants": tuple(map(Variant.parse, variants or ()))}
    _run("train.benchmark", TrainBench(**values), json_out, trace, predict=predict)


@settings_command(bench, "overlap", OverlapBench)
def bench_overlap(
    values: dict[str, Any],
    sweep: Annotated[bool, typer.Option("--sweep", help="Measure 1 to 8192 rows at ratio 1, without layers.")] = False,
    chunks: Annotated[str, typer.Option(help="Number of chunks of a rank's rows, or auto.")] = "8",
    trace: Annotated[
        str | None, typer.Option(metavar="OUT", help="File for a Perfetto trace of the timelines.")
    ] = None,
    png: Annotated[str | None, typer.Option(metavar="OUT", help="File for an image of the timelines.")] = None,
    json_out: JsonOut = None,
) -> None:
    """Measure the overlap of fused operators and MoE layers between hosts with a shaped link. Needs root."""
    if sweep:
        values = {"rows": SWEEP, "ratios": (1.0,)} | values | {"layer": False}
    values["chunks"] = int(chunks) if chunks.isdecimal() else chunks
    _run("overlap.benchmark", OverlapBench(**values), json_out, trace, png)


@settings_command(bench, "hierarchical", HierarchicalBench)
def bench_hierarchical(values: dict[str, Any], json_out: JsonOut = None) -> None:
    """Compare hierarchical dispatch with all-to-all, between hosts with a shaped link. Needs root."""
    _run("dispatch.hierarchical", HierarchicalBench(**values), json_out)


@settings_command(bench, "placement", PlacementBench, without=("dtype", "device", "iterations"))
def bench_placement(
    values: dict[str, Any],
    window: Annotated[
        int | None, typer.Option(min=1, help="Steps that each decision adds, at most --every. [5, or --every]")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of measured steps.")] = 30,
    json_out: JsonOut = None,
) -> None:
    """Compare an MoE layer with fixed experts, and with experts that move or have copies, by the rows of the ranks."""
    values["window"] = min(5, values["every"]) if window is None else window
    _run("placement.benchmark", PlacementBench(**values, iterations=steps), json_out)


@settings_command(bench, "plan", PlanBench)
def bench_plan(
    values: dict[str, Any],
    ranks: Annotated[
        list[int] | None, typer.Option(min=2, help="Only mappings on this many ranks; repeatable. [2, 4 and 8]")
    ] = None,
    hosts: Annotated[bool, typer.Option(help="Also measure mappings over a shaped link; needs root.")] = True,
    json_out: JsonOut = None,
) -> None:
    """Compare measured and predicted steps of mappings on this machine, and the planner's choice with the fastest."""
    cases = tuple(case for case in CASES if (not ranks or case.ranks in ranks) and (hosts or case.hosts == 1))
    _run("plan.benchmark", PlanBench(**values, cases=cases), json_out)


@settings_command(bench, "serve", ServeBench)
def bench_serve(values: dict[str, Any], json_out: JsonOut = None) -> None:
    """Compare TTFT, TPOT and throughput of experts on ranks of their own, on all ranks, and of unswapped replicas."""
    _run("serve.benchmark", ServeBench(**values), json_out)


@settings_command(app, "tune", Tune)
def tune(
    values: dict[str, Any],
    ranks: Ranks = 2,
    ranks_per_host: Annotated[int, typer.Option(min=1, help="Ranks per host, with several hosts.")] = 1,
    cache: Annotated[
        Path | None, typer.Option(help="Folder for the result. [default: moe_comm/overlap in the user's cache]")
    ] = None,
    json_out: JsonOut = None,
) -> None:
    """Measure the fastest number of chunks or kernel of operators, and store it for Overlap("auto")."""
    values["ranks_per_host"] = ranks if values["hosts"] == 1 else ranks_per_host
    load("moe_comm.bench.tune", "bench").main(Tune(**values), json_out, cache)
