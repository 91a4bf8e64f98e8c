"""The ``moe-comm`` command. Each subcommand is one thin function.

Exit codes: 0 success; 1 failure, or ``doctor`` found a problem; 2 invalid request (options, configuration, unreadable
file, missing extra); 128 + n stopped by signal n.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

import moe_comm
from moe_comm.cli import bench, check, place, plan, records, serve, train
from moe_comm.cli.options import echo
from moe_comm.errors import ConfigError, MissingDependency, MoeCommError
from moe_comm.runtime import cpu_guard
from moe_comm.runtime.launch import Interrupted
from moe_comm.runtime.untrusted import printable

USAGE_ERROR = 2

app = typer.Typer(
    name="moe-comm",
    help="Mixture-of-Experts training and inference with expert parallelism.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _versions() -> str:
    """Return the versions without importing torch or other slow modules."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    try:
        from moe_comm import _C  # imported here because it may not be built
    except ImportError as error:
        core = f"no ({error})"
    else:
        core = f"yes ({_C.isa()})"
    return f"moe-comm {moe_comm.__version__}, torch {torch}, native core: {core}"


def _print_versions(requested: bool) -> None:
    if requested:
        echo(_versions())
        raise typer.Exit


@app.callback()
def _options_of_all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_versions, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    pass


app.add_typer(check.app)
app.add_typer(train.app)
app.add_typer(serve.app)
app.add_typer(bench.bench, name="bench")
app.add_typer(plan.app)
app.add_typer(bench.app)
app.add_typer(records.app)
app.add_typer(place.app)


def run(arguments: Sequence[str] | None = None, command: typer.Typer = app, name: str = "moe-comm") -> int:
    """Run a command and return its exit code. An error is printed as one line on standard error.

    Args:
        arguments: command line arguments; None: ``sys.argv``.
        command: another command that reports errors and exit codes in the same way.
        name: name of the command in help and errors.
    """
    cpu_guard.apply()
    try:
        code = command(args=None if arguments is None else list(arguments), prog_name=name, standalone_mode=False)
    except (ConfigError, MissingDependency) as error:
        return _fail(name, error, USAGE_ERROR)
    except Interrupted as error:
        return _fail(name, error, 128 + error.number)
    except (KeyboardInterrupt, typer.Abort):
        return _fail(name, "interrupted", 128 + signal.SIGINT)
    except MoeCommError as error:
        return _fail(name, error, 1)
    except OSError as error:
        if error.filename is None:
            raise
        return _fail(name, f"{error.filename}: {error.strerror}", USAGE_ERROR)
    except Exception as error:
        # Errors of click. typer may include its own copy of click. The message contains the option and click's "Did you
        # mean". It is empty if help was shown.
        if not hasattr(error, "format_message"):
            raise
        return _fail(name, error.format_message().replace("Value error, ", ""), USAGE_ERROR)
    if code == 128 + signal.SIGINT:  # typer's exit code for an interrupt
        return _fail(name, "interrupted", code)
    return code if isinstance(code, int) else 0


def _fail(name: str, error: object, code: int) -> int:
    if details := getattr(error, "details", ""):
        print(printable(details), file=sys.stderr)
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if text:
        print(printable(f"{name}: error: {text}"), file=sys.stderr)
    return code


def main() -> None:
    """Entry point of the ``moe-comm`` script."""
    sys.exit(run())
