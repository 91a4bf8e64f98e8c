"""``bench hierarchical`` end to end at tiny sizes, between real network namespaces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_comm.bench.dispatch import hierarchical
from moe_comm.bench.hosts.namespaces import why_not
from moe_comm.errors import ConfigError

TINY = hierarchical.HierarchicalBench(tokens=64, hidden=256, experts=8, top_k=4, warmup=0, rounds=1)


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")
def test_every_way_is_checked_timed_and_its_bytes_counted(tmp_path: Path) -> None:
    returned = hierarchical.main(TINY, str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text())["results"] == returned["results"]
    found = {row["contestant"]: row for row in returned["results"]}
    assert list(found) == list(hierarchical.CONTESTANTS)
    for row in found.values():
        assert row["speedup"] == found["all_to_all"]["total_ms"] / row["total_ms"]
    counted = [found[name]["counted_bytes"] for name in ("hierarchical_sums", "hierarchical", "all_to_all")]
    assert counted == sorted(counted)
    for name in ("all_to_all", "hierarchical", "hierarchical_sums"):
        # Headers of packets and handshakes, a few percent, come on top.
        assert 1 <= found[name]["link_bytes"] / found[name]["counted_bytes"] < 1.3
    assert [name for name, row in found.items() if row["auto"]] == ["hierarchical"], "between real hosts"


def test_without_the_means_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_comm.bench.hosts.namespaces.os.geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="root"):
        hierarchical.main(TINY)


@pytest.mark.parametrize("wrong", [{"hosts": 1}, {"ranks_per_host": 1}, {"rounds": 0}, {"top_k": 65}])
def test_settings_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        hierarchical.HierarchicalBench(**wrong)
