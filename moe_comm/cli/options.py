"""Option types and helpers that several commands share."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import fields
from inspect import Parameter, Signature, signature
from types import ModuleType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.models import OptionInfo

from moe_comm.bench.common.settings import options_of
from moe_comm.errors import ConfigError, MissingDependency, pip_install, suggestion
from moe_comm.runtime.untrusted import printable

Preset = Literal["comm", "compute"]
JsonOut = Annotated[
    str | None, typer.Option("--json", metavar="OUT", help="File for the result; - is standard output.")
]

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


def settings_command(
    app: typer.Typer, name: str, settings: type, without: Sequence[str] = ()
) -> Callable[[Callable[..., None]], None]:
    """Register a command whose options are those of a settings class, and the keyword parameters of the function.

    The function gets a dictionary of the values of the settings that were selected, as its first argument. A parameter
    of the function replaces the option of the same name.

    Args:
        settings: dataclass with options, see ``moe_comm.bench.common.settings``.
        without: options to leave out.
    """

    def register(function: Callable[..., None]) -> None:
        _, *parameters = signature(function, eval_str=True).parameters.values()
        own = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
        names = {parameter.name for parameter in own}
        defaults = {field.name: field.default for field in fields(settings)}
        derived = [
            _parameter(field, hint, option, defaults[field])
            for field, (hint, option) in options_of(settings).items()
            if field not in names and field not in without
        ]

        def command(**values: Any) -> None:
            arguments = {name: values.pop(name) for name in names}
            selected = {key: value for key, value in values.items() if value is not None}
            function({key: tuple(v) if isinstance(v, list) else v for key, v in selected.items()}, **arguments)

        command.__signature__ = Signature([*derived, *own])  # type: ignore[attr-defined]
        command.__doc__ = function.__doc__
        app.command(name)(command)

    return register


def _parameter(name: str, hint: Any, option: OptionInfo, default: Any) -> Parameter:
    """Return the parameter of an option. Repeatable options and those without a default are None if not given."""
    if get_origin(hint) is tuple:
        hint, default = list[get_args(hint)[0]] | None, None  # type: ignore[misc]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, option])


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
