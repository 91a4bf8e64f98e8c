"""``moe-comm place``: the placement of a run's experts, and what other settings would have done."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_comm.cli.options import JsonOut, load

if TYPE_CHECKING:
    from rich.table import Table

    from moe_plan.whatif.placement import PlacementStudy

app = typer.Typer()
EVERY, WINDOW, THRESHOLD, LIMITS = (20, 100), 5, (0.05,), (1.125,)
"""Settings that are replayed by default."""
DECISIONS = 10
"""Number of decisions of a layer in the text; the JSON has all."""


@app.command()
def place(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    ranks: Annotated[
        int | None, typer.Option(min=2, help="Expert-parallel ranks to place on.  [default: the run's]")
    ] = None,
    every: Annotated[
        list[int] | None, typer.Option(min=1, help="Steps between decisions; repeatable. [20, 100]")
    ] = None,
    window: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Last steps of an interval that a decision sees, at most --every; repeatable. [5]"),
    ] = None,
    threshold: Annotated[
        list[float] | None,
        typer.Option(min=0, max=0.99, help="Minimum share of the busiest rank's rows to save; repeatable. [0.05]"),
    ] = None,
    balance: Annotated[
        list[float] | None,
        typer.Option(min=1, max=1 << 20, help="Rows of a rank over the mean up to which to lend; repeatable. [1.125]"),
    ] = None,
    json_out: JsonOut = None,
) -> None:
    """Show expert loads and placement decisions of a run by layer, and replay its loads with other settings."""
    report, analysis = load("moe_comm.bench.common.report", "bench"), load("moe_plan.whatif.placement", "observe")
    report.check_writable(json_out)
    settings = load("moe_comm.topology.rebalance", "train").DecisionSettings
    chosen = [
        settings(every=steps, window=last, threshold=share)
        for steps in every or EVERY
        for last, share in product(window or (min(WINDOW, steps),), threshold or THRESHOLD)
    ]
    limits = list(dict.fromkeys(balance or LIMITS))
    study = analysis.study(run, list(dict.fromkeys(chosen)), ranks, limits)
    report.write_json(study.to_json(), json_out)
    report.show(_tables(study), json_out)


def _tables(study: PlacementStudy) -> list[Table]:
    from rich.table import Table  # rich is imported by commands that print tables only

    costs = "with" if study.costs else "no spans were recorded, so without"
    layers = Table(
        title=f"{Path(study.run).absolute().name}: rows of the busiest of {study.ranks} ranks over the mean",
        title_justify="left",
        caption="best: each step with the best placement found for its own loads",
        caption_justify="left",
    )
    for name in ("layer", "steps", "hottest expert", "fixed", "realised", "best"):
        layers.add_column(name, justify="left" if name == "layer" else "right")
    decisions = Table(title="decisions of the run", title_justify="left")
    for name in ("layer", "step", "before", "predicted", "realised", "decision"):
        decisions.add_column(name, justify="left" if name in ("layer", "decision") else "right")
    replays = Table(title=f"replays, {costs} the cost of switches", title_justify="left")
    for name in ("layer", "every", "window", "threshold", "ratio", "switches", "last decision"):
        replays.add_column(name, justify="left" if name in ("layer", "last decision") else "right")
    lending = Table(title="experts lent in each step (placement.balance)", title_justify="left")
    for name in (
        "layer",
        "limit",
        "before",
        "ratio",
        "copies a step",
        "resident",
        "MB a step",
        "MB before",
        "saved ms",
    ):
        lending.add_column(name, justify="left" if name == "layer" else "right")
    for layer in study.layers:
        for limit, lent in zip(study.limits, layer.lending, strict=True):
            figures = [f"{limit:g}", f"{lent.before:.3f}", f"{lent.ratio:.3f}", f"{lent.copies:.1f}"]
            figures.append(f"{lent.resident / lent.copies:.0%}" if lent.copies else "-")
            if study.expert_bytes is not None:  # without the widths of experts, a row has no time
                figures += [f"{sent / 1e6:.2f}" for sent in study.lending_bytes(lent)]
                figures.append(f"{lent.saved_s * 1e3:.3g}")
            lending.add_row(layer.layer, *figures)
        ratios = (layer.hottest, layer.fixed, layer.realised, layer.best)
        texts = ("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios)
        layers.add_row(layer.layer, str(len(layer.steps)), *texts)
        for line, realised in layer.decisions[-DECISIONS:]:
            values = (line.ratio_before, line.ratio_after, realised)
            text = f"switch: {line.reason}" if line.switched else f"keep: {line.reason}"
            decisions.add_row(layer.layer, str(line.step), *(f"{value:.3f}" for value in values), text)
        for replay, result in zip(study.settings, layer.replays, strict=True):
            reason = (
                result.decisions[-1][1].reason if result.decisions else f"the run has less than {replay.every} steps"
            )
            numbers = (str(replay.every), str(replay.window), f"{replay.threshold:g}")
            replays.add_row(layer.layer, *numbers, f"{result.ratio:.3f}", str(result.switches), reason)
    return [layers, *([decisions] if decisions.row_count else []), replays, lending]
