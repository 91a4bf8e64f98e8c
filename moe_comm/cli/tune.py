"""``moe-comm tune``: measure the fastest execution of each operator, for ``Overlap("auto")``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moe_comm.cli.options import Device, DeviceOf, Dtype, DtypeOf, JsonOut, LinkGbit, Ranks, Rounds, Seed, Warmup, load

app = typer.Typer()


@app.command()
def tune(
    ranks: Ranks = 2,
    hosts: Annotated[
        int, typer.Option(min=1, max=64, help="1: this host; more: number of network namespaces, each a host.")
    ] = 1,
    ranks_per_host: Annotated[int, typer.Option(min=1, help="Ranks per host, with several hosts.")] = 1,
    link_gbit: LinkGbit = 1.0,
    operator: Annotated[list[str] | None, typer.Option(help="Operator to measure; repeatable. [default: all]")] = None,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows per rank; repeatable. [1, 16, 64, 256, 1024, 4096]")
    ] = None,
    sent: Annotated[int, typer.Option(min=1, help="Columns of the transferred rows.")] = 512,
    other: Annotated[int, typer.Option(min=1, help="The other width of the layer, which is not transferred.")] = 512,
    dtype: DtypeOf = Dtype.float32,
    device: DeviceOf = Device.cpu,
    warmup: Warmup = 2,
    rounds: Rounds = 7,
    seed: Seed = 0,
    cache: Annotated[
        Path | None, typer.Option(help="Folder for the result. [default: moe_comm/overlap in the user's cache]")
    ] = None,
    json_out: JsonOut = None,
) -> None:
    """Measure the fastest number of chunks or kernel of operators, and store it for Overlap("auto")."""
    module = load("moe_comm.bench.tune.measure", "bench")
    values: dict[str, Any] = {
        "hosts": hosts,
        "ranks_per_host": ranks if hosts == 1 else ranks_per_host,
        "link_gbit": link_gbit,
    }
    values |= {"sent": sent, "other": other, "dtype": dtype.value, "device": device.value}
    values |= {"warmup": warmup, "rounds": rounds, "seed": seed}
    several = {key: tuple(values_of) for key, values_of in (("operators", operator), ("rows", rows)) if values_of}
    module.main(module.Tune(**values, **several), json_out, cache)
