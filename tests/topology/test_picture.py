"""``picture``, the text that ``moe-comm mesh`` prints."""

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

tp   split a layer's heads and columns, and the sequence between layers
dp   process different sequences
pp   hold different layers
ep   hold different experts

gradients are plain sums over
split by tp (attention, dense FFN, embedding, head)
  cp x dp, 2 ranks: 0 2 | 1 3 | 4 6 | 5 7
replicated (norms, router, shared expert)
  tp x cp x dp, 4 ranks: 0 1 2 3 | 4 5 6 7
experts (split by ep and etp)
  edp: no other rank holds the same part
tied embedding (replicated on the first and last stage)
  summed over these two stages as well: 0 4 | 1 5 | 2 6 | 3 7
"""


def test_the_picture_of_eight_ranks() -> None:
    assert picture(ParallelConfig(tp=2, dp=2, pp=2, ep=4)) == EIGHT


def test_a_small_world_shows_every_rank_of_every_stage_once() -> None:
    config = ParallelConfig(tp=2, cp=2, dp=8, pp=2, ep=4, etp=2)
    rows = [line.split()[1:] for line in picture(config).splitlines() if line.startswith("rank ")]
    assert [int(rank) for row in rows for rank in row] == list(range(64))


@pytest.mark.parametrize("world", [65, 128, 4096, 131_072])
def test_a_large_world_is_shortened_and_the_number_of_omitted_ranks_is_shown(world: int) -> None:
    config = ParallelConfig.of(world, pp=4 if world % 4 == 0 else 1)
    text = picture(config)
    assert len(text.splitlines()) < 60 and max(map(len, text.splitlines())) <= 140
    assert config.stage <= 32 or f"... {config.stage - 32} more ranks in this stage" in text
    assert config.pp == 1 or "... 3 more stages of the same form" in text


def test_the_picture_of_one_rank_has_no_groups() -> None:
    text = picture(ParallelConfig())
    assert "no groups: one rank holds everything" in text and text.count("no other rank holds the same part") == 3
