"""Types of options that several commands share, and the small things all commands need."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from enum import StrEnum
from types import ModuleType
from typing import Annotated, Any

import typer

from moe_comm.errors import ConfigError, MissingDependency


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


Ranks = Annotated[int, typer.Option(min=1, help="Ranks to start here; under torchrun its ranks are used.")]
Tokens = Annotated[int, typer.Option(min=0, help="Tokens of each rank.")]
Hidden = Annotated[int, typer.Option(min=1, help="Width of a token's row.")]
Experts = Annotated[int, typer.Option(min=1, help="Experts over all ranks together.")]
TopK = Annotated[int, typer.Option("--top-k", min=1, help="Experts of each token.")]
DtypeOf = Annotated[Dtype, typer.Option(help="Type of the rows.")]
Backend = Annotated[str, typer.Option(help="auto, local, shared_memory, all_to_all, all_gather or hierarchical.")]
DeviceOf = Annotated[Device, typer.Option(help="Where the tensors are.")]
Iterations = Annotated[int, typer.Option(min=0, help="Rounds to take the median of; 0: chosen by size.")]
Warmup = Annotated[int, typer.Option(min=0, help="Rounds to throw away first.")]
Seed = Annotated[int, typer.Option(min=0, help="Of tokens, routing and weights.")]
JsonOut = Annotated[
    str | None, typer.Option("--json", metavar="OUT", help="File for the result; - is standard output.")
]
Peers = Annotated[
    list[str] | None, typer.Option("--peer", help="Compare with this one; repeat for more. [default: all]")
]
Config = Annotated[
    str,
    typer.Argument(metavar="CONFIG", help="A .toml or .json file, or a ready configuration such as tiny or small."),
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="run.steps=200, and so on.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="The same as an option; repeat for more.")
]


def one_of(name: str, value: str, known: Sequence[str]) -> Any:
    """``value``, or a ConfigError where it is not known."""
    if value not in known:
        raise ConfigError(f"unknown {name} {value!r}; known: {', '.join(known)}")
    return value


def chosen(peers: list[str] | None, **values: Any) -> dict[str, Any]:
    """Settings to build a benchmark from; ``peers`` only where the user named some."""
    return values if peers is None else values | {"peers": tuple(peers)}


def load(module: str, extra: str) -> ModuleType:
    """Import one of our modules; a package that it needs and is not there becomes advice to install the extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] == "moe_comm":
            raise
        raise MissingDependency(f"{error.name} is not installed; run: pip install 'moe_comm[{extra}]'") from None
