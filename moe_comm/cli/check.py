"""Commands that inspect and compare: ``doctor``, ``mesh``, ``check-grads``, ``parity``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, get_args

import typer

from moe_comm.bench.common.settings import Backend, DeviceOf, Experts, Hidden, Seed, TopK
from moe_comm.bench.parity.cases import QUICK
from moe_comm.cli.options import Config, JsonOut, Overrides, Settings, echo, load, one_of, read_config
from moe_comm.runtime.launch import init_ranks, launch, ranks_to_use

if TYPE_CHECKING:
    from moe_comm.layers.check import CheckGradsConfig, GradReport

app = typer.Typer()


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Inspect this machine: hardware, the state of each backend, and how to install missing parts."""
    # These import torch, which takes seconds; help and other commands do not need it.
    from moe_comm.dispatch.selection.doctor import examine_gpus, report_choices
    from moe_comm.runtime import doctor as examination

    report = examination.examine([examine_gpus, report_choices])
    if as_json:
        echo(report.to_json())
    else:
        examination.show(report)
    if not report.healthy:
        raise typer.Exit(1)


@app.command()
def mesh(
    config: Config,
    overrides: Overrides = None,
    settings: Settings = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Number of ranks.  [default: parallel.ranks]")] = None,
) -> None:
    """Show the attention and expert coordinates of each rank in a folded mapping, and the gradient groups."""
    from moe_comm.topology import picture  # imports torch

    parallel = read_config(config, overrides, settings).parallel
    echo(picture(parallel.mapping(ranks or parallel.ranks)))


@app.command("check-grads")
def check_grads(
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks to start.  [default: 2; under torchrun, its ranks]")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per rank.")] = 37,
    hidden: Hidden = 64,
    ffn: Annotated[int, typer.Option(min=1, help="Width of each expert.")] = 96,
    experts: Experts = 8,
    top_k: TopK = 2,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    backend: Backend = "auto",
    device: DeviceOf = "cpu",
    score: Annotated[str, typer.Option(help="Router score: softmax, sigmoid or topk_softmax.")] = "softmax",
    shared_ffn: Annotated[int, typer.Option(min=0, help="Width of a shared expert; 0: none.")] = 0,
    deterministic: Annotated[bool, typer.Option(help="Require equal bits for any number of ranks.")] = True,
    tolerance: Annotated[float | None, typer.Option(help="Largest difference, relative to the largest value.")] = None,
    cases: Annotated[list[str] | None, typer.Option("--case", help="Case to check; repeatable.")] = None,
    seed: Seed = 0,
) -> None:
    """Compare an expert-parallel layer's output and all gradients with those of one rank and of float64."""
    # Both import torch.
    from moe_comm.layers.check import CASES, CheckGradsConfig
    from moe_comm.layers.moe.router import Score

    config = CheckGradsConfig(
        hidden=hidden,
        ffn=ffn,
        num_experts=experts,
        top_k=top_k,
        tokens=tokens,
        backend=backend,
        dtype=dtype,
        device=device,
        score=one_of("score", score, get_args(Score)),
        shared_ffn=shared_ffn,
        deterministic=deterministic,
        tolerance=tolerance,
        seed=seed,
        cases=tuple(one_of("case", case, CASES) for case in cases or CASES),
    )
    loaded = ("torch", "moe_comm.layers.check")
    report = launch(_check_grads_rank, (config,), ranks_to_use(ranks, default=2), preload=loaded)[0]
    if report is None:  # under torchrun only the first rank reports
        return
    echo(str(report))
    if not report.ok:
        raise typer.Exit(1)


def _check_grads_rank(config: CheckGradsConfig) -> GradReport | None:
    # Only ranks import torch, not the process that starts them.
    import torch.distributed as dist

    from moe_comm.layers.check import run_check_grads

    with init_ranks(config.device) as ranks:
        report = run_check_grads(config, dist.group.WORLD if ranks.world > 1 else None)
    return report if ranks.rank == 0 or not report.ok else None


@app.command()
def parity(
    steps: Annotated[int, typer.Option(min=1, help="Steps per training run.")] = 20,
    mappings: Annotated[
        list[str] | None, typer.Option("--mapping", help="Name of a mapping in the table; repeatable.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only one mapping of each kind.")] = False,
    optimizers: Annotated[
        list[str] | None, typer.Option("--optimizer", help="sgd, adamw, lamb or muon; repeatable. [sgd, adamw]")
    ] = None,
    settings: Settings = None,
    json_out: JsonOut = None,
) -> None:
    """Train the same model on one process and on all mappings, and compare losses, gradient norms and weights."""
    names = [*(mappings or []), *(QUICK if quick else ())]
    module = load("moe_comm.bench.parity.compare", "train")
    chosen = [one_of("optimizer", name, tuple(module.SETTINGS)) for name in optimizers or module.OPTIMIZERS]
    if not module.main(json_out, steps=steps, names=names, optimizers=chosen, settings=settings or []):
        raise typer.Exit(1)
