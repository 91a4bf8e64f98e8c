"""Measure and plot how dispatch and combine scale with tokens (up to 65,536 per rank) and with the hidden size.

    python -m benchmarks.scaling --ranks 2 --out benchmarks/results/scaling

Writes OUT_tokens.{json,svg,html} and OUT_hidden.{json,svg,html}. The largest points transfer 134 MB per rank.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks import plot, sweep
from moe_comm.bench.common import report
from moe_comm.bench.common.settings import DispatchBench

SWEEPS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "tokens": (sweep.TOKENS, {"hidden": 64}),
    "hidden": (sweep.HIDDEN, {"tokens": 1024}),
}


def main() -> None:
    """Run both sweeps and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--iterations", type=int, default=9)
    parser.add_argument("--peers", nargs="*", default=["torch_gloo"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scaling"))
    args = parser.parse_args()
    for axis, (values, fixed) in SWEEPS.items():
        base = DispatchBench(
            ranks=args.ranks,
            dtype=args.dtype,
            backend=args.backend,
            iterations=args.iterations,
            peers=tuple(args.peers),
            **fixed,
        )
        result = sweep.run(sweep.Sweep(base, axis, values))
        if not result:
            continue
        stem = args.out.with_name(f"{args.out.name}_{axis}")
        report.write_json(result, str(stem.with_suffix(".json")))
        print(f"{axis}: " + ", ".join(map(str, plot.write(result, stem))))
        for name, line in result["linearity"].items():
            print(f"  {name}: slope {line['log_slope']:.2f}, unit cost last/first {line['unit_cost_ratio']:.2f}")


if __name__ == "__main__":
    main()
