"""``bench overlap`` end to end at tiny sizes, between real network namespaces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_comm.bench import overlap
from moe_comm.bench.hosts import why_not
from moe_comm.errors import ConfigError

TINY = overlap.OverlapBench(rows=(1, 32), width=32, ratios=(1.0,), chunks=2, warmup=0, rounds=1)


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")
def test_every_operator_is_checked_and_timed_in_both_directions(tmp_path: Path) -> None:
    returned = overlap.main(TINY, str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text())["results"] == returned["results"]
    operators = [(row["op"], row["direction"]) for row in returned["results"]]
    both = [(op, d) for op in ("gather_matmul", "matmul_scatter") for d in ("forward", "backward")]
    assert operators == [one for one in both for _ in TINY.rows]
    for row in returned["results"]:
        smaller = min(row["compute_ms"], row["comm_ms"])
        assert row["hidden"] == pytest.approx((row["serial_ms"] - row["overlapped_ms"]) / smaller)


def test_without_the_means_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_comm.bench.hosts.os.geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="root"):
        overlap.main(TINY)
