"""Collectives of all ranks: preparation of the text on hosts without a shared folder, and long work."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm.errors import MoeCommError
from moe_comm.train import ranks as ranks_module
from moe_comm.train.data.tokenfile import META
from moe_comm.train.loop import job
from moe_comm.train.ranks import Ranks
from tests.pool import RankPool
from tests.train.common import TEXT, config_of

HOST_RANKS = 2


def _open(rank: int, world: int, hosts: list[list[str]]) -> dict[str, Any]:
    """Ranks 0 and 1 have the settings of the first host, ranks 2 and 3 those of the second."""
    settings = hosts[min(rank // HOST_RANKS, len(hosts) - 1)]
    prepared: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        prepare = job.prepare_all
        patch.setattr(job, "prepare_all", lambda data_settings: (prepared.append(rank), prepare(data_settings))[1])
        try:
            corpus = job.open_corpus(config_of(settings), Ranks.make())
        except MoeCommError as error:
            return {"prepared": bool(prepared), "error": type(error).__name__, "message": str(error)}
    batch = corpus.batch_of(1).micro(0, 1).local(0, 1)
    return {"prepared": bool(prepared), "path": corpus.files[0].path, "ids_BS": batch.ids_BS}


def _host(folder: Path, text: str = TEXT) -> list[str]:
    """Return the settings of a host with text and cache in ``folder``."""
    folder.mkdir()
    (folder / "text.txt").write_text(text)
    sizes = ["data.seq_len=16", "data.batch=4"]
    return [*sizes, f"data.source={folder / 'text.txt'}", f"data.cache={folder / 'cache'}"]


def test_one_rank_of_each_host_prepares_if_hosts_share_no_cache(pool4: RankPool, tmp_path: Path) -> None:
    hosts = [_host(tmp_path / "a"), _host(tmp_path / "b")]
    results = pool4.run(_open, hosts)
    assert [rank["prepared"] for rank in results] == [True, False, True, False]
    assert [rank["path"].parent for rank in results] == [tmp_path / host / "cache" for host in "aabb"]
    assert all(torch.equal(rank["ids_BS"], results[0]["ids_BS"]) for rank in results)
    assert all(
        [path.name for path in (tmp_path / host / "cache").iterdir()] == [results[0]["path"].name] for host in "ab"
    )


def test_the_first_rank_prepares_for_all_that_share_its_cache(pool4: RankPool, tmp_path: Path) -> None:
    results = pool4.run(_open, [_host(tmp_path / "a")])
    assert [rank["prepared"] for rank in results] == [True, False, False, False]
    assert len({rank["path"] for rank in results}) == 1


def test_hosts_with_different_text_raise_on_every_rank(pool4: RankPool, tmp_path: Path) -> None:
    other = TEXT.replace("line 399", "line 398")
    for rank in pool4.run(_open, [_host(tmp_path / "a"), _host(tmp_path / "b", other)]):
        assert rank["error"] == "RankMismatch"
        assert "ranks disagree on the prepared tokens" in rank["message"]
        assert "use the same text, tokenizer and versions on all hosts" in rank["message"]


@pytest.mark.parametrize(
    ("fault", "kind", "expected"),
    [
        ("text", "ConfigError", "text.txt"),
        ("cache", "ConfigError", "data.cache: cannot write to"),
        ("file", "CorruptFile", META),
    ],
)
def test_an_error_of_one_host_is_raised_on_every_rank(
    pool4: RankPool, tmp_path: Path, fault: str, kind: str, expected: str
) -> None:
    hosts = [_host(tmp_path / "a"), _host(tmp_path / "b")]
    if fault == "text":
        (tmp_path / "b" / "text.txt").unlink()
    elif fault == "cache":
        (tmp_path / "b" / "cache").write_text("no folder")
    else:
        pool4.run(_open, hosts)
        (meta,) = (tmp_path / "b" / "cache").glob(f"*/{META}")
        meta.write_text("{")
    for rank in pool4.run(_open, hosts):
        assert (rank["error"], expected in rank["message"], str(tmp_path / "b") in rank["message"]) == (
            kind,
            True,
            True,
        )


def _work(rank: int, world: int, what: str) -> tuple[list[str], int]:
    """The work of rank 1 ends after three polls. Return the results of all ranks and the number of polls."""
    ranks, polls = Ranks.make(), []
    polled_enough = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        all_sum = ranks_module.all_sum

        def counting_all_sum(values: torch.Tensor, group: Any) -> torch.Tensor:
            polls.append(1)
            if len(polls) >= 3:
                polled_enough.set()
            return all_sum(values, group)

        def long_work() -> str:
            assert polled_enough.wait(100)
            if what == "fails":
                raise ZeroDivisionError("a bug")
            return "done\nat last"

        patch.setattr(ranks_module, "all_sum", counting_all_sum)
        patch.setattr(ranks_module, "POLL_S", 0.01)
        try:
            return ranks.run_on_some(long_work if rank == 1 else None), len(polls)
        except (ZeroDivisionError, MoeCommError) as error:
            return [f"{type(error).__name__}: {error}"], len(polls)


def test_ranks_poll_for_long_work(pool2: RankPool) -> None:
    for results, num_polls in pool2.run(_work, "works"):
        assert results == ["", "done\nat last"]
        assert num_polls >= 3, "ranks must poll, because one collective has a deadline"


def test_work_that_fails_on_one_rank_fails_on_all(pool2: RankPool) -> None:
    (other, _), (own, _) = pool2.run(_work, "fails")
    assert own == ["ZeroDivisionError: a bug"]
    assert other == ["MoeCommError: rank 1: ZeroDivisionError: a bug"]


def test_a_single_rank_runs_all_work_itself(tmp_path: Path) -> None:
    alone = Ranks()
    assert alone.run_on_some(lambda: "done") == alone.gather_texts("done") == ["done"]
    assert alone.first_with_folder(tmp_path / "nowhere") == 0
