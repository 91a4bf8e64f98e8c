"""``moe-comm plan``: choose a mapping for a model, a cluster and a batch, and predict the cost of a step."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from moe_comm.cli.options import JsonOut, echo, load
from moe_comm.cli.plan_inputs import OFFLOAD_RATE, document_lengths, memory_policy, recorded_loads
from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.layers.transformer.shape import Recompute
from moe_comm.topology.parallel import ShardingMode
from moe_comm.topology.pipeline import ScheduleName

if TYPE_CHECKING:
    from types import ModuleType

    from moe_plan.machine.hardware import Cluster
    from moe_plan.search.request import PlanCandidate, PlanRequest
    from moe_plan.search.search import SearchResult
    from moe_plan.step.simulate import SimulatedStep

app = typer.Typer()
TOP, RANKS = 10, 2
"""Defaults of ``--top`` and ``--ranks``."""
TTFT_S, TPOT_S = 5.0, 0.15
"""Defaults of ``--ttft`` and ``--tpot``."""
MOST, LONGEST = 1 << 20, 1 << 30
"""Upper bounds of accelerators and sequences, and of tokens per sequence."""


Dtype = Literal["bf16", "fp8", "fp32"]
Overlap = Literal["none", "outer", "inter", "all"]
LoadPlacement = Literal["fixed", "relocate", "balance"]
AnyDispatcher = Literal["auto", "all_to_all", "all_gather", "hierarchical"]


def _option(
    help: str, metavar: str | None = None, *, flags: str | None = None, by: str | bool = False, **settings: Any
) -> Any:
    """Return an option with default None. ``by`` describes the default in its help."""
    return typer.Option(*filter(None, [flags]), metavar=metavar, help=help, show_default=by, **settings)


@app.command()
def plan(
    model: Annotated[
        str | None, _option("Model name, config.json or its folder, or a configuration of train.", "NAME|FILE")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, max=MOST, help="Number of accelerators.")] = None,
    hardware: Annotated[
        str | None, _option("h100, b200, ..., this-machine, or a .json description.", "NAME|FILE")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, max=LONGEST, help="Tokens per sequence.")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, max=MOST, help="Sequences per step.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of matrix products.")] = "bf16",
    mapping: Annotated[
        str | None, _option("Mapping to predict, such as tp=2,pp=8,ep=8; without it, search.", "KEY=N,...")
    ] = None,
    folded: Annotated[
        bool | None,
        _option("Distribute experts independently of attention, or in dp.", flags="--folded/--coupled", by="both"),
    ] = None,
    overlap: Annotated[
        Overlap | None, _option("Overlap of gradients (outer), transfers (inter), tiles (all).", by="none")
    ] = None,
    capacity_factor: Annotated[
        float | None,
        _option("Slots of an expert divided by its mean load; other rows are dropped.", by="nothing is dropped"),
    ] = None,
    imbalance: Annotated[
        float | None,
        _option("Rows of the busiest rank's experts divided by the mean.", by="1.29; 1 with a capacity factor"),
    ] = None,
    loads: Annotated[
        Path | None, _option("Use the expert loads of a run instead of an imbalance.", "RUN", by="--imbalance")
    ] = None,
    placement: Annotated[
        LoadPlacement | None, _option("Placement of experts for these loads, with --loads.", by="fixed")
    ] = None,
    lengths: Annotated[
        str | None,
        _option(
            "Lengths of the documents: a histogram .json, prepared text, or a configuration of train.",
            "FILE|FOLDER",
            by="one document per sequence",
        ),
    ] = None,
    host_size: Annotated[int | None, _option("Accelerators per host.", by="the hardware's", min=1, max=MOST)] = None,
    micro_batch: Annotated[int | None, _option("Sequences per micro-batch.", by="the fastest", min=1)] = None,
    recompute: Annotated[Recompute | None, _option("Activations to recompute.", by="the least that fits")] = None,
    sharding: Annotated[
        ShardingMode | None, _option("Sharding of weights and optimizer.", by="search: all, --mapping: zero1")
    ] = None,
    schedule: Annotated[
        ScheduleName | None,
        _option("Pipeline schedule.", by="search: all but gpipe, --mapping: 1f1b, or interleaved by vpp"),
    ] = None,
    dispatcher: Annotated[AnyDispatcher, typer.Option(help="Dispatch backend; auto: the fastest.")] = "auto",
    offload_budget: Annotated[
        str | None, _option("Offload optimizer state, but for this memory of a rank.", "SIZE", by="it is in memory")
    ] = None,
    offload_activations: Annotated[
        str | None, _option("Offload activations, but for this memory of a rank.", "SIZE", by="they are in memory")
    ] = None,
    offload_weights: Annotated[
        bool,
        typer.Option("--offload-weights", help="Offload weights, gradients and state of fsdp to the host's memory."),
    ] = False,
    offload_rate: Annotated[
        float | None, _option("GB/s at which a rank reads and writes offloaded data.", by=f"{OFFLOAD_RATE:g}")
    ] = None,
    top: Annotated[int | None, _option("Number of mappings to report of a search.", by="10", min=1)] = None,
    slow: Annotated[
        list[str] | None, _option("Simulate a rank that is slower by this factor; repeatable.", "RANK=FACTOR")
    ] = None,
    config_out: Annotated[
        Path | None, _option("Write the mapping as a configuration of train.", "FILE", flags="--config")
    ] = None,
    trace: Annotated[Path | None, _option("Write the step as a Perfetto trace.", "FILE")] = None,
    page: Annotated[Path | None, _option("Write an HTML page.", "FILE")] = None,
    serve: Annotated[
        str | None,
        _option(
            "Plan inference of these requests instead: JSON lines, or poisson:rate=R,count=N,prompt=N,output=N,seed=N.",
            "TRACE",
        ),
    ] = None,
    ttft: Annotated[
        float | None, _option("With --serve: bound of the time to the first token, s.", by=f"{TTFT_S:g}", min=0)
    ] = None,
    tpot: Annotated[
        float | None, _option("With --serve: bound of the time per output token, s.", by=f"{TPOT_S:g}", min=0)
    ] = None,
    expert_hardware: Annotated[
        str | None, _option("With --serve: accelerators of the experts.", "NAME|FILE", by="--hardware")
    ] = None,
    price: Annotated[
        list[str] | None,
        _option("With --serve: price of an accelerator; repeatable.", "NAME=X", by="h20=1.85, l40s=1.08, others 1"),
    ] = None,
    measured: Annotated[
        Path | None,
        _option("With --serve: predict from the steps that bench serve measured, instead of --hardware.", "FILE"),
    ] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure this machine instead.")] = False,
    ranks: Annotated[int | None, _option("Ranks for --calibrate.", by="2", min=1)] = None,
    hardware_file: Annotated[Path | None, _option("Description of this machine.", "FILE", by="in the cache")] = None,
    json_out: JsonOut = None,
) -> None:
    """Choose a mapping of a model to accelerators, which need not be present, and predict the cost of a step."""
    outputs = _Outputs(json_out, config_out, trace, page, tuple(slow or ()))
    outputs.check()
    needed = {
        "--model": model,
        "--gpus": gpus,
        "--hardware": hardware,
        "--seq-len": seq_len,
        "--global-batch": global_batch,
    }
    if calibrate:
        other = {"--mapping": mapping, "--top": top, "--slow": slow, "--config": config_out, "--trace": trace}
        other |= {"--page": page, "--serve": serve}
        if used := [name for name, value in {**needed, **other}.items() if value is not None]:
            raise ConfigError(f"--calibrate cannot be combined with {used[0]}")
        _calibrate(ranks or RANKS, hardware_file, json_out)
        return
    if serve is not None:
        unused = {
            "--gpus": gpus,
            "--seq-len": seq_len,
            "--global-batch": global_batch,
            "--mapping": mapping,
            "--folded": folded,
            "--overlap": overlap,
            "--capacity-factor": capacity_factor,
            "--imbalance": imbalance,
            "--loads": loads,
            "--placement": placement,
            "--lengths": lengths,
            "--micro-batch": micro_batch,
            "--recompute": recompute,
            "--sharding": sharding,
            "--schedule": schedule,
            "--dispatcher": None if dispatcher == "auto" else dispatcher,
            "--offload-budget": offload_budget,
            "--offload-activations": offload_activations,
            "--offload-weights": offload_weights or None,
            "--offload-rate": offload_rate,
            "--slow": slow,
            "--config": config_out,
            "--trace": trace,
            "--page": page,
            "--ranks": ranks,
        }
        if used := [name for name, value in unused.items() if value is not None]:
            raise ConfigError(f"--serve cannot be combined with {used[0]}")
        from moe_comm.cli.plan_serve import ServeOptions, plan_measured, plan_serving

        bounds = TTFT_S if ttft is None else ttft, TPOT_S if tpot is None else tpot
        options = ServeOptions(serve, *bounds, tuple(price or ()), top or TOP)
        if measured is not None:
            others = {
                "--model": model,
                "--hardware": hardware,
                "--expert-hardware": expert_hardware,
                "--price": price,
                "--top": top,
                "--host-size": host_size,
                "--hardware-file": hardware_file,
            }
            if used := [name for name, value in others.items() if value is not None]:
                raise ConfigError(f"--measured cannot be combined with {used[0]}")
            plan_measured(measured, options, json_out)
            return
        if model is None or hardware is None:
            raise ConfigError(f"missing option {'--model' if model is None else '--hardware'}")
        shape = load("moe_comm.train.plan_config", "train").model_named(model)
        attention, experts = (
            _cluster(name, hardware_file, None, host_size) for name in (hardware, expert_hardware or hardware)
        )
        plan_serving(shape, attention, experts, dtype, options, json_out)
        return
    if any(value is not None for value in (expert_hardware, ttft, tpot, measured)) or price:
        raise ConfigError("--ttft, --tpot, --expert-hardware, --price and --measured apply to --serve")
    if ranks is not None:
        raise ConfigError("--ranks applies to --calibrate; --gpus is the number of accelerators to plan for")
    if capacity_factor is not None and not 0 < capacity_factor < math.inf:
        raise ConfigError(f"--capacity-factor must be a finite number above 0; got {capacity_factor}")
    if imbalance is not None and not 1 <= imbalance < math.inf:
        raise ConfigError(f"--imbalance must be a finite number of at least 1; got {imbalance}")
    if mapping is not None and top is not None:
        raise ConfigError("--top applies to a search; --mapping predicts one mapping")
    if model is None or gpus is None or hardware is None or seq_len is None or global_batch is None:
        raise ConfigError(f"missing option {next(name for name, value in needed.items() if value is None)}")

    from moe_plan.model.lending import Lending
    from moe_plan.model.load import Workload
    from moe_plan.search.request import PlanRequest
    from moe_plan.search.space import PartialMapping

    workload = Workload.assumed(seq_len, dtype, capacity_factor, imbalance)
    if loads is not None and imbalance is not None:
        raise ConfigError("--loads replaces --imbalance; pass one of them")
    if loads is None and placement is not None:
        raise ConfigError("--placement needs the expert loads of a run: --loads RUN")
    if lengths is not None:
        workload = replace(workload, lengths=document_lengths(lengths, seq_len, global_batch))
    shape = load("moe_comm.train.plan_config", "train").model_named(model)
    cluster = _cluster(hardware, hardware_file, gpus, host_size)
    if loads is not None:
        recorded = recorded_loads(loads, placement, Lending.of(shape, cluster, dtype))
        workload = replace(workload, imbalance=1.0, loads=recorded)
    budgets = {"--offload-budget": offload_budget, "--offload-activations": offload_activations}
    policy = memory_policy(budgets, offload_weights, offload_rate)
    offloads: dict[str, object] = budgets | {"--offload-weights": offload_weights}
    if any(offloads.values()) and placement not in (None, "fixed"):
        option = next(name for name, value in offloads.items() if value)
        raise ConfigError(f"{option} needs --placement fixed: experts with stored state cannot move")
    request = PlanRequest(shape, cluster, workload, global_batch, policy)
    settings = {
        "micro_batch": micro_batch,
        "recompute": recompute,
        "sharding": sharding,
        "overlap": overlap,
        "schedule": schedule,
        "dispatcher": None if dispatcher == "auto" else dispatcher,
    }
    if offload_weights:
        if sharding not in (None, "fsdp"):
            raise ConfigError(f"--offload-weights needs --sharding fsdp; got {sharding}")
        settings["sharding"] = "fsdp"
    fixed: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    if mapping is None:
        fixed |= {"replicas": 1} if offload_weights else {}
        _search(request, folded, fixed, top or TOP, outputs)
    else:
        outputs.write(request, PartialMapping(mapping, coupled=folded is False, **fixed).candidate(request))


@dataclass(frozen=True)
class _Outputs:
    """Outputs in addition to the terminal. slow: slow ranks of a simulation, as RANK=FACTOR."""

    json: str | None
    config: Path | None
    trace: Path | None
    page: Path | None
    slow: tuple[str, ...] = ()

    def check(self) -> None:
        """Check all paths before the computation. Raises OSError if a file cannot be written."""
        for path in (self.json, self.config, self.trace, self.page):
            _report().check_writable(None if path is None else str(path))

    def write(self, request: PlanRequest, candidate: PlanCandidate, result: SearchResult | None = None) -> None:
        """Print and write the requested outputs about ``candidate``, and the search that found it."""
        from moe_comm.cli import plan_text
        from moe_plan.search.plan_json import plan_json
        from moe_plan.step.simulate import parse_slow, simulate

        output = plan_json(request, candidate, result)
        simulated = simulate(request.model(candidate.mapping), parse_slow(self.slow)) if self.slow else None
        if simulated is not None:
            output["slow"] = {"step_s": simulated.seconds, "slowdown": simulated.slowdown}
        _report().write_json(output, self.json)
        to_stderr = self.json == "-"
        if result is not None:
            plan_text.show(lambda width: plan_text.search_parts(request, result, width), to_stderr)
        plan_text.show(lambda _: plan_text.mapping_parts(request, candidate, headed=result is None), to_stderr)
        if simulated is not None:
            echo(f"with {', '.join(self.slow)}: {simulated}", err=to_stderr)
        for path in self._files(request, candidate, result, simulated):
            echo(f"wrote {path} ({path.stat().st_size / 2**20:.2f} MiB)", err=to_stderr)

    def _files(
        self,
        request: PlanRequest,
        candidate: PlanCandidate,
        result: SearchResult | None,
        simulated: SimulatedStep | None,
    ) -> Iterator[Path]:
        if self.config is not None:
            from moe_comm.runtime.safe_files import write_file

            plan_config = load("moe_comm.train.plan_config", "train")
            write_file(self.config, plan_config.train_config(request, candidate))
            yield self.config
            for difference in plan_config.differences(request, candidate):
                echo(f"{self.config}: {difference}", err=self.json == "-")
        if self.trace is None and self.page is None:
            return
        from moe_plan.pages.plan_page import write_page
        from moe_plan.pages.timeline import timeline, write_trace

        step = timeline(request.model(candidate.mapping))
        if self.trace is not None:
            write_trace(step, self.trace)
            yield self.trace
        if self.page is not None:
            write_page(request, candidate, step, (candidate,) if result is None else result.best, self.page, simulated)
            yield self.page


def _report() -> ModuleType:
    return load("moe_comm.bench.common.report", "bench")


def _search(request: PlanRequest, folded: bool | None, fixed: dict[str, Any], top: int, outputs: _Outputs) -> None:
    from moe_comm.cli import plan_text
    from moe_plan.search.plan_json import plan_json
    from moe_plan.search.preference import common_mappings, preferred
    from moe_plan.search.search import search
    from moe_plan.search.space import SearchSpace

    result = search(request, SearchSpace.of(folded=folded, **fixed), keep=top)
    if result.best:
        common = common_mappings(request, {"folded": folded, **fixed})
        result = replace(result, best=preferred(result.best), common=common)
        outputs.write(request, result.best[0], result)
        return
    nearest = request.candidate(result.nearest[0].mapping)
    _report().write_json(plan_json(request, nearest, result), outputs.json)
    raise MoeCommError(plan_text.nothing_fits(request, result))


def _cluster(hardware: str, file: Path | None, gpus: int | None, host_size: int | None) -> Cluster:
    """Return the cluster with a name, from a description, or as measured on this machine."""
    from moe_plan.machine.hardware_table import THIS_MACHINE, cluster_named

    if hardware == THIS_MACHINE:
        measured = file or _measured_path()
        if not measured.is_file():
            raise ConfigError(
                f"{measured}: this machine has not been measured; run: moe-comm plan --calibrate --ranks N"
            )
        return cluster_named(str(measured), gpus, host_size)
    if file is not None:
        raise ConfigError(f"--hardware-file applies to {THIS_MACHINE}; use --hardware FILE for a description")
    return cluster_named(hardware, gpus, host_size)


def _measured_path() -> Path:
    """Return the description's path: ``moe_comm/hardware.json`` in XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_comm" / "hardware.json"


def _calibrate(ranks: int, file: Path | None, json_out: str | None) -> None:
    from moe_comm.cli import plan_text
    from moe_plan.machine.hardware_file import save, to_json

    path = file or _measured_path()
    _report().check_writable(str(path))
    cluster = load("moe_comm.bench.calibrate.machine", "train").calibrate(
        ranks, say=lambda text: echo(f"measuring {text}", err=True)
    )
    save(cluster, path)
    _report().write_json(to_json(cluster), json_out)
    for line in plan_text.cluster_lines(cluster):
        echo(line, err=json_out == "-")
    echo(f"wrote {path}; use it with: moe-comm plan --hardware this-machine ...", err=json_out == "-")
