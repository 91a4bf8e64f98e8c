"""``python -m benchmarks.plan_validation``: errors of predicted operators and steps."""

from __future__ import annotations

import sys

import typer

from benchmarks.plan_validation import json_report, published_step, validate
from moe_comm import cli
from moe_comm.bench.common import report
from moe_comm.cli.options import JsonOut

NAME = "python -m benchmarks.plan_validation"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def plan_validation(json_out: JsonOut = None) -> None:
    """Predict every row of the published tables and print errors and rankings."""
    report.check_writable(json_out)
    result = validate.validate(published_step.predict_step)
    report.write_json(json_report.validation(result), json_out)
    typer.echo(result.text(), err=json_out == "-")


if __name__ == "__main__":
    sys.exit(cli.run(command=app, name=NAME))
