"""``bench hierarchical`` end to end with tiny sizes, between network namespaces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_comm.bench.common.settings import HierarchicalBench
from moe_comm.bench.dispatch import hierarchical
from moe_comm.bench.hosts.namespaces import unavailable_reason
from moe_comm.errors import ConfigError

TINY = HierarchicalBench(tokens=64, hidden=256, experts=8, top_k=4, warmup=0, rounds=1)


@pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason() or "hosts can be created")
def test_every_backend_is_checked_and_timed_and_its_bytes_are_counted(tmp_path: Path) -> None:
    returned = hierarchical.main(TINY, str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text())["results"] == returned["results"]
    rows = {row["contestant"]: row for row in returned["results"]}
    assert list(rows) == list(hierarchical.CONTESTANTS)
    for row in rows.values():
        assert row["speedup"] == rows["all_to_all"]["total_ms"] / row["total_ms"]
    counted = [rows[name]["counted_bytes"] for name in ("hierarchical_sums", "hierarchical", "all_to_all")]
    assert counted == sorted(counted)
    for name in ("all_to_all", "hierarchical", "hierarchical_sums"):
        # Packet headers and handshakes add a few percent.
        assert 1 <= rows[name]["link_bytes"] / rows[name]["counted_bytes"] < 1.3
    assert [name for name, row in rows.items() if row["auto"]] == ["hierarchical"]


def test_missing_privileges_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_comm.bench.hosts.namespaces.os.geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="root"):
        hierarchical.main(TINY)


@pytest.mark.parametrize("wrong", [{"hosts": 1}, {"ranks_per_host": 1}, {"rounds": 0}, {"top_k": 65}])
def test_impossible_settings_are_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        HierarchicalBench(**wrong)
