"""``python -m benchmarks.small``: overhead of dispatch and combine over memory copies for 1 to 64 tokens, in us."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import get_args

from benchmarks.sweep import small
from moe_comm.bench.common.settings import DispatchBench, Dtype
from moe_comm.errors import MoeCommError


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print tables. Return the exit status: 0, or 2 if the settings are invalid."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small", description=__doc__)
    base = DispatchBench(peers=())
    for name in ("ranks", "hidden", "experts", "top_k", "iterations", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(base, name))
    parser.add_argument("--dtype", choices=get_args(Dtype), default=base.dtype)
    parser.add_argument("--backend", default=base.backend)
    parser.add_argument("--json", metavar="OUT", help="write one JSON object; - is standard output")
    settings = vars(parser.parse_args(arguments))
    out = settings.pop("json")
    try:
        small(replace(base, **settings), out)
    except MoeCommError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
