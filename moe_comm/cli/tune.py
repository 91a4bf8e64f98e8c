"""``moe-comm tune``: measure how each operator is fastest here, for ``Overlap("auto")``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moe_comm.cli.options import Device, DeviceOf, Dtype, DtypeOf, JsonOut, Ranks, Seed, Warmup, load

app = typer.Typer()


@app.command()
def tune(
    ranks: Ranks = 2,
    hosts: Annotated[
        int, typer.Option(min=1, max=64, help="1: this host; more: network namespaces to make, each a host.")
    ] = 1,
    ranks_per_host: Annotated[int, typer.Option(min=1, help="Ranks on each, with several hosts.")] = 1,
    link_gbit: Annotated[float, typer.Option(min=0.001, help="Rate of each host's link, Gbit/s.")] = 1.0,
    operator: Annotated[
        list[str] | None, typer.Option(help="Measure this one; repeat for more. [default: all]")
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows of a rank; repeat for more. [1, 16, 64, 256, 1024, 4096]")
    ] = None,
    sent: Annotated[int, typer.Option(min=1, help="Columns of what travels.")] = 512,
    other: Annotated[int, typer.Option(min=1, help="Columns of what does not: the layer's other width.")] = 512,
    dtype: DtypeOf = Dtype.float32,
    device: DeviceOf = Device.cpu,
    warmup: Warmup = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to take the median of.")] = 7,
    seed: Seed = 0,
    cache: Annotated[
        Path | None, typer.Option(help="Folder to keep it in. [default: moe_comm/overlap in the user's cache]")
    ] = None,
    json_out: JsonOut = None,
) -> None:
    """Measure in how many chunks, or with which kernel, operators are fastest here; store it for Overlap("auto")."""
    module = load("moe_comm.bench.tune.measure", "bench")
    values: dict[str, Any] = {
        "hosts": hosts,
        "ranks_per_host": ranks if hosts == 1 else ranks_per_host,
        "link_gbit": link_gbit,
    }
    values |= {"sent": sent, "other": other, "dtype": dtype.value, "device": device.value}
    values |= {"warmup": warmup, "rounds": rounds, "seed": seed}
    several = {key: tuple(given) for key, given in (("operators", operator), ("rows", rows)) if given}
    module.main(module.Tune(**values, **several), json_out, cache)
