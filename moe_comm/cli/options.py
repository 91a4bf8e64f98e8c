"""Option types and helpers that several commands share."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from enum import StrEnum
from types import ModuleType
from typing import Annotated, Any

import typer

from moe_comm.bench.common.peer_names import DISPATCH_PEERS, LAYER_PEERS, TRAIN_PEERS
from moe_comm.errors import ConfigError, MissingDependency, pip_install, suggestion
from moe_comm.runtime.printing import printable


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class Preset(StrEnum):
    comm = "comm"
    compute = "compute"


Ranks = Annotated[int, typer.Option(min=1, help="Ranks to start; under torchrun, the number of its ranks.")]
AnyHosts = Annotated[
    int, typer.Option(min=1, max=64, help="Number of hosts; several are network namespaces, which need root.")
]
CoresPerRank = Annotated[
    float | None,
    typer.Option(help="Processor time of each rank in cores, so that ranks that wait leave it idle; needs root."),
]
Hosts = Annotated[int, typer.Option(min=2, max=64, help="Number of hosts, each a network namespace.")]
LinkGbit = Annotated[float, typer.Option(min=0.001, help="Rate of each host's link, Gbit/s.")]
Tokens = Annotated[int, typer.Option(min=0, help="Tokens per rank.")]
Hidden = Annotated[int, typer.Option(min=1, help="Hidden size.")]
Experts = Annotated[int, typer.Option(min=1, help="Total number of experts.")]
TopK = Annotated[int, typer.Option("--top-k", min=1, help="Experts per token.")]
DtypeOf = Annotated[Dtype, typer.Option(help="Dtype of the rows.")]
Backend = Annotated[
    str, typer.Option(help="auto, local, shared_memory, all_to_all, all_gather, hierarchical, or peer_to_peer on CUDA.")
]
DeviceOf = Annotated[Device, typer.Option(help="Device of the tensors.")]
Iterations = Annotated[int, typer.Option(min=0, help="Number of measured rounds; 0: chosen by size.")]
Rounds = Annotated[int, typer.Option(min=1, help="Number of measured rounds; the median is reported.")]
Warmup = Annotated[int, typer.Option(min=0, help="Number of discarded rounds at the start.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of tokens, routing and weights.")]
JsonOut = Annotated[
    str | None, typer.Option("--json", metavar="OUT", help="File for the result; - is standard output.")
]

PEER_HELP = "Implementation to compare with: {}; repeatable. [default: all]"
DispatchPeers = Annotated[list[str] | None, typer.Option("--peer", help=PEER_HELP.format(", ".join(DISPATCH_PEERS)))]
LayerPeers = Annotated[list[str] | None, typer.Option("--peer", help=PEER_HELP.format(", ".join(LAYER_PEERS)))]
TrainPeers = Annotated[list[str] | None, typer.Option("--peer", help=PEER_HELP.format(", ".join(TRAIN_PEERS)))]
Config = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A .toml or .json file, or a preset such as tiny or small.")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides: run.steps=200, ...")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An override as an option; repeatable.")
]


def echo(text: object, err: bool = False) -> None:
    """Print a text, which may contain names from files, to standard output or standard error."""
    typer.echo(printable(str(text)), err=err)


def one_of(name: str, value: str, known: Sequence[str]) -> Any:
    """Return ``value``. Raise ConfigError if it is not in ``known``."""
    if value not in known:
        raise ConfigError(f"unknown {name} {value!r}{suggestion(value, known)}; known: {', '.join(known)}")
    return value


def chosen(peers: list[str] | None, **values: Any) -> dict[str, Any]:
    """Return settings of a benchmark, with ``peers`` only if the user selected some."""
    return values if peers is None else values | {"peers": tuple(peers)}


def read_config(config: str, overrides: list[str] | None, settings: list[str] | None, *more: str) -> Any:
    """Read and check a configuration; see ``moe_comm.train.config.load``."""
    return load("moe_comm.train.config", "train").load(config, [*(overrides or []), *(settings or []), *more])


def load(module: str, extra: str) -> ModuleType:
    """Import a module of this distribution. The error for a missing dependency names the extra to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] in ("moe_comm", "moe_plan"):
            raise
        raise MissingDependency(f"{error.name} is not installed; run: {pip_install(extra)}") from None
