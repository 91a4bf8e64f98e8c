"""Packing of documents into sequences of a fixed length, for each packing method."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from moe_comm.train.data.packing import IGNORE, BestFit, Contiguous, Packing, RandomWindows, TokenRange, read_row
from tests.train.data.common import token_file

EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
LENGTHS = st.lists(st.integers(1, 14), min_size=1, max_size=12)


def rows_of(packing: Packing) -> list[tuple[list[int], list[int], list[int], list[int]]]:
    rows = [read_row(packing, index) for index in range(packing.sequences)]
    for row in rows:
        assert len(row.ids_S) == len(row.targets_S) == len(row.positions_S) == len(row.documents_S) == packing.seq_len
    counted = packing.valid_targets(np.arange(packing.sequences))
    assert counted.tolist() == [int((row.targets_S != IGNORE).sum()) for row in rows]
    return [
        (row.ids_S.tolist(), row.targets_S.tolist(), row.positions_S.tolist(), row.documents_S.tolist()) for row in rows
    ]


def test_contiguous_packing_by_hand(tmp_path: Path) -> None:
    file = token_file(tmp_path, [4, 6, 3])
    view = TokenRange(file, 0, 13)
    joined = rows_of(Contiguous(view, 5, separate=False))
    assert joined[0] == ([1, 2, 3, 4, 5], [2, 3, 4, 5, 6], [0, 1, 2, 3, 4], [0] * 5)
    assert joined[2] == ([11, 12, 0, 0, 0], [12, 13, IGNORE, IGNORE, IGNORE], [0, 1, 2, 3, 4], [0] * 5)
    separate = rows_of(Contiguous(view, 5, separate=True))
    assert separate[0] == ([1, 2, 3, 4, 5], [2, 3, 4, IGNORE, 6], [0, 1, 2, 3, 0], [0, 0, 0, 0, 1])
    assert separate[1] == ([6, 7, 8, 9, 10], [7, 8, 9, 10, IGNORE], [0, 1, 2, 3, 4], [0] * 5)
    assert separate[2] == ([11, 12, 0, 0, 0], [12, 13, IGNORE, IGNORE, IGNORE], [0, 1, 0, 1, 2], [0, 0, 1, 1, 1])


def test_best_fit_packing_by_hand(tmp_path: Path) -> None:
    file = token_file(tmp_path, [4, 6, 1, 2])  # 6 is cut into 5 and 1
    view = TokenRange(file, 0, 13)
    separate = rows_of(BestFit(view, 5, separate=True))
    assert separate == [
        ([5, 6, 7, 8, 9], [6, 7, 8, 9, 10], [0, 1, 2, 3, 4], [0] * 5),
        ([1, 2, 3, 4, 10], [2, 3, 4, IGNORE, IGNORE], [0, 1, 2, 3, 0], [0, 0, 0, 0, 1]),
        ([12, 13, 11, 0, 0], [13, IGNORE, IGNORE, IGNORE, IGNORE], [0, 1, 0, 0, 1], [0, 0, 1, 2, 2]),
    ]
    joined = rows_of(BestFit(view, 5, separate=False))
    assert joined[1][:3] == ([1, 2, 3, 4, 10], [2, 3, 4, 10, IGNORE], [0, 1, 2, 3, 4])
    assert joined[2][:3] == ([12, 13, 11, 0, 0], [13, 11, IGNORE, IGNORE, IGNORE], [0, 1, 2, 3, 4])


@EXAMPLES
@given(LENGTHS, st.integers(1, 9))
def test_an_epoch_of_contiguous_sequences_has_every_token_once(
    tmp_path: Path, lengths: list[int], seq_len: int
) -> None:
    total = sum(lengths)
    view = TokenRange(token_file(tmp_path, lengths), 0, total)
    rows = rows_of(Contiguous(view, seq_len, separate=False))
    assert [i for ids, *_ in rows for i in ids if i] == list(range(1, total))
    assert [t for _, targets, *_ in rows for t in targets if t != IGNORE] == list(range(2, total + 1))


@EXAMPLES
@given(LENGTHS, st.integers(1, 9), st.data())
def test_separate_documents_only_lose_targets_in_other_documents(
    tmp_path: Path, lengths: list[int], seq_len: int, data: st.DataObject
) -> None:
    """The range of tokens may start and end inside documents."""
    total = sum(lengths)
    file = token_file(tmp_path, lengths)
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    view = TokenRange(file, start, stop)
    document = np.repeat(np.arange(len(lengths)), lengths)  # of token t at position t - 1
    expected_targets = {t for t in range(start + 2, stop + 1) if document[t - 1] == document[t - 2]}
    for packing in (Contiguous(view, seq_len, separate=True), BestFit(view, seq_len, separate=True)):
        all_targets: list[int] = []
        for ids, targets, positions, documents in rows_of(packing):
            for index, (i, t, p, d) in enumerate(zip(ids, targets, positions, documents, strict=True)):
                assert t == IGNORE or t == i + 1
                starts_document = index == 0 or documents[index - 1] != d
                assert p == (0 if starts_document else positions[index - 1] + 1)
                if not starts_document and i:
                    assert i == ids[index - 1] + 1 and document[i - 1] == document[i - 2]
            all_targets += [t for t in targets if t != IGNORE]
        assert sorted(all_targets) == sorted(expected_targets)


@EXAMPLES
@given(LENGTHS, st.integers(1, 9), st.booleans())
def test_best_fit_has_every_token_once_and_only_cuts_documents_longer_than_a_sequence(
    tmp_path: Path, lengths: list[int], seq_len: int, separate: bool
) -> None:
    view = TokenRange(token_file(tmp_path, lengths), 0, sum(lengths))
    packing = BestFit(view, seq_len, separate)
    rows = rows_of(packing)
    assert sorted(i for ids, *_ in rows for i in ids if i) == list(range(1, sum(lengths) + 1))
    starts = {start for row in range(packing.sequences) for start, _ in packing.segments(row)}
    ends = np.cumsum(lengths)
    expected = {int(e - n + k) for e, n in zip(ends, lengths, strict=True) for k in range(0, n, seq_len)}
    assert starts == expected
    # No two sequences would fit into one, so their number is less than twice the minimum.
    used = sorted(sum(n for _, n in packing.segments(row)) for row in range(packing.sequences))
    assert len(used) < 2 or used[0] + used[1] > seq_len


def test_joined_best_fit_is_one_text_with_a_target_at_every_token_but_the_last(tmp_path: Path) -> None:
    view = TokenRange(token_file(tmp_path, [3, 7, 2, 2, 5]), 0, 19)
    for ids, targets, positions, _ in rows_of(BestFit(view, 6, separate=False)):
        filled = sum(1 for i in ids if i)
        for index in range(filled - 1):
            assert targets[index] in (ids[index + 1], ids[index] + 1)
        assert positions == list(range(6))


def test_random_windows_depend_only_on_key_and_number_and_reach_both_ends(tmp_path: Path) -> None:
    view = TokenRange(token_file(tmp_path, [5, 6, 9]), 3, 15)
    packing = RandomWindows(view, 4, False, (7, 0))
    rows = [read_row(packing, n) for n in range(200)]
    for row in rows:
        assert row.targets_S.tolist() == [i + 1 for i in row.ids_S.tolist()]
    assert {int(row.ids_S[0]) for row in rows} == set(range(4, 12))
    again = RandomWindows(view, 4, False, (7, 0))
    assert np.array_equal(read_row(again, 123).ids_S, rows[123].ids_S)
    others = [read_row(RandomWindows(view, 4, False, (8, 0)), n).ids_S[0] for n in range(200)]
    assert others != [row.ids_S[0] for row in rows]
    assert packing.valid_targets(np.arange(5)).tolist() == [4] * 5
    separate = RandomWindows(view, 4, True, (7, 0))
    counted = separate.valid_targets(np.arange(50)).tolist()
    assert counted == [int((read_row(separate, n).targets_S != IGNORE).sum()) for n in range(50)]


@pytest.mark.parametrize("separate", [False, True])
def test_a_padding_sequence_has_no_targets(separate: bool, tmp_path: Path) -> None:
    row = read_row(Contiguous(TokenRange(token_file(tmp_path, [5]), 0, 5), 4, separate), -1)
    assert row.ids_S.tolist() == [0] * 4
    assert row.targets_S.tolist() == [IGNORE] * 4
    assert row.positions_S.tolist() == [0, 1, 2, 3]
