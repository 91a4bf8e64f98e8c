"""``moe-comm plan``: from a model, a cluster and a batch, a mapping and what a step with it would cost; on paper."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_comm.cli.options import JsonOut, load
from moe_comm.errors import ConfigError, MoeCommError

if TYPE_CHECKING:
    from moe_comm.plan.search.question import Candidate, Question
    from moe_comm.plan.search.search import Found
    from moe_comm.plan.step.simulate import Simulated

app = typer.Typer()
TOP, RANKS = 10, 2
MOST, LONGEST = 1 << 20, 1 << 30
"""Of accelerators and of sequences, and tokens of a sequence: ten times what anybody has."""


class PlanDtype(StrEnum):
    bf16 = "bf16"
    fp8 = "fp8"
    fp32 = "fp32"


class Overlap(StrEnum):
    none = "none"
    outer = "outer"
    inter = "inter"
    all = "all"


class Recompute(StrEnum):
    none = "none"
    selective = "selective"
    full = "full"


class Schedule(StrEnum):
    gpipe = "gpipe"
    one_f_one_b = "1f1b"
    interleaved_1f1b = "interleaved_1f1b"
    zero_bubble = "zero_bubble"
    zbv = "zbv"
    dualpipev = "dualpipev"


class Sharding(StrEnum):
    replicate = "replicate"
    zero1 = "zero1"
    fsdp = "fsdp"


class PlanDispatcher(StrEnum):
    auto = "auto"
    all_to_all = "all_to_all"
    all_gather = "all_gather"
    hierarchical = "hierarchical"


def _option(
    help: str, metavar: str | None = None, *, flags: str | None = None, by: str | bool = False, **more: Any
) -> Any:
    """An option without a default of its own; by: what is taken instead, for its help."""
    return typer.Option(*filter(None, [flags]), metavar=metavar, help=help, show_default=by, **more)


@app.command()
def plan(
    model: Annotated[
        str | None, _option("A model's name, a config.json or its folder, a configuration of train.", "NAME|FILE")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, max=MOST, help="Accelerators.")] = None,
    hardware: Annotated[
        str | None, _option("h100, b200, ..., this-machine, or a description's .json.", "NAME|FILE")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, max=LONGEST, help="Tokens of a sequence.")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, max=MOST, help="Sequences of a step.")] = None,
    dtype: Annotated[PlanDtype, typer.Option(help="Of products.")] = PlanDtype.bf16,
    mapping: Annotated[
        str | None, _option("Predict this one, such as tp=2,pp=8,ep=8; without it, search.", "KEY=N,...")
    ] = None,
    folded: Annotated[
        bool | None,
        _option("Experts spread apart from attention, or inside dp.", flags="--folded/--coupled", by="both"),
    ] = None,
    overlap: Annotated[
        Overlap | None, _option("Gradients beside passes; transfers, too; and inside.", by="none")
    ] = None,
    capacity_factor: Annotated[
        float | None,
        _option("Slots of an expert over its mean load; what is more is dropped.", by="nothing is dropped"),
    ] = None,
    imbalance: Annotated[
        float | None,
        _option("Rows of the busiest rank's experts over the mean.", by="1.29; 1 with a capacity factor"),
    ] = None,
    host_size: Annotated[int | None, _option("Accelerators of a host.", by="the hardware's", min=1, max=MOST)] = None,
    micro_batch: Annotated[int | None, _option("Sequences at a time.", by="the fastest", min=1)] = None,
    recompute: Annotated[Recompute | None, _option("What backward does again.", by="the least that fits")] = None,
    sharding: Annotated[
        Sharding | None, _option("Of weights and optimizer.", by="search: all, --mapping: zero1")
    ] = None,
    schedule: Annotated[
        Schedule | None, _option("Of the pipeline.", by="search: all but gpipe, --mapping: 1f1b, or interleaved by vpp")
    ] = None,
    dispatcher: Annotated[
        PlanDispatcher, typer.Option(help="How rows get to their experts; auto: the fastest.")
    ] = PlanDispatcher.auto,
    top: Annotated[int | None, _option("Mappings to tell of a search.", by="10", min=1)] = None,
    slow: Annotated[
        list[str] | None, _option("A rank that computes so many times longer; repeat for more.", "RANK=FACTOR")
    ] = None,
    config_out: Annotated[
        Path | None, _option("Write the mapping as a configuration of train.", "FILE", flags="--config")
    ] = None,
    trace: Annotated[Path | None, _option("Write the step as a Perfetto trace.", "FILE")] = None,
    page: Annotated[Path | None, _option("Write a page of HTML about it.", "FILE")] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Instead: measure this machine.")] = False,
    ranks: Annotated[int | None, _option("To measure with.", by="2", min=1)] = None,
    hardware_file: Annotated[Path | None, _option("This machine's description.", "FILE", by="in the cache")] = None,
    json_out: JsonOut = None,
) -> None:
    """Choose how to spread a model over accelerators that need not be there, and predict what a step would cost."""
    outputs = _Outputs(json_out, config_out, trace, page, tuple(slow or ()))
    outputs.check()
    needed: dict[str, object] = {"--model": model, "--gpus": gpus, "--hardware": hardware, "--seq-len": seq_len}
    needed["--global-batch"] = global_batch
    if calibrate:
        others: dict[str, object] = {
            "--mapping": mapping,
            "--top": top,
            "--slow": slow,
            "--config": config_out,
            "--trace": trace,
            "--page": page,
        }
        _measure_only(needed | others)
    if not calibrate and ranks is not None:
        raise ConfigError("--ranks is for --calibrate; --gpus says how many accelerators to plan for")
    if calibrate:
        _calibrate(ranks or RANKS, hardware_file, json_out)
    else:
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise ConfigError(f"--capacity-factor must be a finite number above 0; got {capacity_factor}")
        if imbalance is not None and not 1 <= imbalance < math.inf:
            raise ConfigError(f"--imbalance must be a finite number from 1; got {imbalance}")
        if mapping is not None and top is not None:
            raise ConfigError("--top is for a search; --mapping predicts one mapping")
        if model is None or gpus is None or hardware is None or seq_len is None or global_batch is None:
            raise ConfigError(f"missing option {next(name for name, value in needed.items() if value is None)}")
        question = load("moe_comm.plan.search.question", "train").Question(
            load("moe_comm.plan.model.files", "train").model_named(model),
            _cluster(hardware, hardware_file, gpus, host_size),
            load("moe_comm.plan.model.load", "train").Load.assumed(seq_len, dtype.value, capacity_factor, imbalance),
            global_batch,
        )
        open_: dict[str, Any] = {"micro_batch": micro_batch, "recompute": recompute, "sharding": sharding}
        open_ |= {"overlap": overlap, "schedule": schedule}
        open_["dispatcher"] = None if dispatcher is PlanDispatcher.auto else dispatcher
        fixed = {name: getattr(value, "value", value) for name, value in open_.items() if value is not None}
        if mapping is None:
            _search(question, folded, fixed, top or TOP, outputs)
        else:
            given = load("moe_comm.plan.search.partial_mapping", "train").Given(
                mapping, coupled=folded is False, **fixed
            )
            outputs.write(question, given.candidate(question))


@dataclass(frozen=True)
class _Outputs:
    """Where what was found goes, beside the terminal. slow: ranks to replay the step with, as RANK=FACTOR."""

    json: str | None
    config: Path | None
    trace: Path | None
    page: Path | None
    slow: tuple[str, ...] = ()

    def check(self) -> None:
        """Before anything is computed. Raises OSError for what cannot be written."""
        for path in (self.json, self.config, self.trace, self.page):
            load("moe_comm.bench.common.report", "bench").check_writable(None if path is None else str(path))

    def write(self, question: Question, candidate: Candidate, found: Found | None = None) -> None:
        """Print and write all that is wanted of ``candidate``, and of the search that found it."""
        report, text = load("moe_comm.bench.common.report", "bench"), load("moe_comm.cli.plan_text", "train")
        answer = load("moe_comm.plan.search.answer", "train").answer(question, candidate, found)
        simulated = self._simulated(question, candidate)
        if simulated is not None:
            answer["slow"] = {"step_s": simulated.seconds, "slowdown": simulated.slowdown}
        report.write_json(answer, self.json)
        told = self.json == "-"
        if found is not None:
            text.show(lambda width: text.search_parts(question, found, width), told)
        text.show(lambda _: text.mapping_parts(question, candidate, headed=found is None), told)
        if simulated is not None:
            typer.echo(f"with {', '.join(self.slow)}: {simulated}", err=told)
        for path in self._files(question, candidate, found, simulated):
            typer.echo(f"wrote {path} ({path.stat().st_size / 2**20:.2f} MiB)", err=told)

    def _simulated(self, question: Question, candidate: Candidate) -> Simulated | None:
        """The step with slow ranks, if any are given."""
        if not self.slow:
            return None
        module = load("moe_comm.plan.step.simulate", "train")
        found: Simulated = module.simulate(question.model(candidate.mapping), module.parse_slow(self.slow))
        return found

    def _files(
        self, question: Question, candidate: Candidate, found: Found | None, simulated: Simulated | None
    ) -> Iterator[Path]:
        if self.config is not None:
            toml: str = load("moe_comm.train.plan_config", "train").train_config(question, candidate)
            self.config.write_text(toml, encoding="utf-8")
            yield self.config
            for difference in load("moe_comm.train.plan_config", "train").differences(question, candidate):
                typer.echo(f"{self.config}: {difference}", err=self.json == "-")
        if self.trace is None and self.page is None:
            return
        timeline = load("moe_comm.plan.pages.timeline", "train").timeline(question.model(candidate.mapping))
        if self.trace is not None:
            load("moe_comm.plan.pages.trace", "observe").write_trace(timeline, self.trace)
            yield self.trace
        if self.page is not None:
            others = (candidate,) if found is None else found.best
            write = load("moe_comm.plan.pages.plan_page", "observe").write_page
            write(question, candidate, timeline, others, self.page, simulated)
            yield self.page


def _search(question: Question, folded: bool | None, fixed: dict[str, Any], top: int, outputs: _Outputs) -> None:
    search, space = load("moe_comm.plan.search.search", "train"), load("moe_comm.plan.search.space", "train").Space
    found: Found = search.search(question, space.of(folded=folded, **fixed), keep=top)
    if found.best:
        outputs.write(question, found.best[0], found)
        return
    nearest = question.candidate(found.nearest[0].mapping)
    told = load("moe_comm.plan.search.answer", "train").answer(question, nearest, found)
    load("moe_comm.bench.common.report", "bench").write_json(told, outputs.json)
    raise MoeCommError(load("moe_comm.cli.plan_text", "train").nothing_fits(question, found))


def _cluster(hardware: str, file: Path | None, gpus: int, host_size: int | None) -> Any:
    """The cluster by name, by its description's path, or as it was measured here."""
    table = load("moe_comm.plan.machine.hardware_table", "train")
    if hardware == table.THIS_MACHINE:
        measured = file or _measured()
        if not measured.is_file():
            raise ConfigError(
                f"{measured}: this machine was not measured yet; run: moe-comm plan --calibrate --ranks N"
            )
        return table.cluster_named(str(measured), gpus, host_size)
    if file is not None:
        raise ConfigError(f"--hardware-file is of {table.THIS_MACHINE}; give another description as --hardware FILE")
    return table.cluster_named(hardware, gpus, host_size)


def _measured() -> Path:
    """Where the description of this machine is kept: ``moe_comm/hardware.json`` in XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_comm" / "hardware.json"


def _measure_only(refused: dict[str, object]) -> None:
    """Raise ConfigError if an option of planning was given beside ``--calibrate``."""
    given = [name for name, value in refused.items() if value is not None]
    if given:
        raise ConfigError(f"--calibrate does not go with {given[0]}")


def _calibrate(ranks: int, file: Path | None, json_out: str | None) -> None:
    path = file or _measured()
    load("moe_comm.bench.common.report", "bench").check_writable(str(path))
    description = load("moe_comm.plan.machine.hardware_file", "train")
    cluster = load("moe_comm.bench.calibrate.machine", "train").calibrate(
        ranks, say=lambda text: typer.echo(f"measuring {text}", err=True)
    )
    description.save(cluster, path)
    load("moe_comm.bench.common.report", "bench").write_json(description.to_json(cluster), json_out)
    for line in load("moe_comm.cli.plan_text", "train").cluster_lines(cluster):
        typer.echo(line, err=json_out == "-")
    typer.echo(f"wrote {path}; use it with: moe-comm plan --hardware this-machine ...", err=json_out == "-")
