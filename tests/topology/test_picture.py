"""What ``moe-comm mesh`` prints."""

from __future__ import annotations

import pytest

from moe_comm.topology import ParallelConfig, picture

EIGHT = """\
8 ranks
attention   tp 2 x cp 1 x dp 2 x pp 2
experts     etp 1 x ep 4 x edp 1 x pp 2

pipeline stage 0
rank    0  1  2  3
tp      0  1  0  1
dp      0  0  1  1
ep      0  1  2  3

pipeline stage 1
rank    4  5  6  7
tp      0  1  0  1
dp      0  0  1  1
ep      0  1  2  3

groups: ranks that differ on one axis
tp        2  0 1 | 2 3 | 4 5 | 6 7
dp        2  0 2 | 1 3 | 4 6 | 5 7
pp        2  0 4 | 1 5 | 2 6 | 3 7
ep        4  0 1 2 3 | 4 5 6 7

tp   share a layer's heads and columns, and the sequence between layers
dp   hold other sequences
pp   hold other layers
ep   share the experts

gradients are plain sums over
cut by tp (attention, dense FFN, embedding, head)
  cp x dp, 2 ranks: 0 2 | 1 3 | 4 6 | 5 7
replicated (norms, router, shared expert)
  tp x cp x dp, 4 ranks: 0 1 2 3 | 4 5 6 7
experts (cut by ep and etp)
  edp: no other rank holds the same
tied embedding (replicated on the first and last stage)
  also over those two stages: 0 4 | 1 5 | 2 6 | 3 7
"""


def test_the_picture_of_eight_ranks() -> None:
    assert picture(ParallelConfig(tp=2, dp=2, pp=2, ep=4)) == EIGHT


def test_a_small_world_shows_every_rank_of_every_stage_once() -> None:
    config = ParallelConfig(tp=2, cp=2, dp=8, pp=2, ep=4, etp=2)
    rows = [line.split()[1:] for line in picture(config).splitlines() if line.startswith("rank ")]
    assert [int(rank) for row in rows for rank in row] == list(range(64))


@pytest.mark.parametrize("world", [65, 128, 4096, 131_072])
def test_a_large_world_is_cut_short_and_says_how_much_is_left_out(world: int) -> None:
    config = ParallelConfig.of(world, pp=4 if world % 4 == 0 else 1)
    text = picture(config)
    assert len(text.splitlines()) < 60 and max(map(len, text.splitlines())) <= 140
    assert config.stage <= 32 or f"... {config.stage - 32} more ranks in this stage" in text
    assert config.pp == 1 or "... 3 more stages like it" in text


def test_one_rank_alone() -> None:
    text = picture(ParallelConfig())
    assert "no groups: one rank holds everything" in text and text.count("no other rank holds the same") == 3
