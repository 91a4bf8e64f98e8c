"""Inputs that broke other libraries and that no other test covers. tests/security/inputs.md has the whole list."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_comm import make_dispatcher


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [33, 64, 1024])
def test_rows_that_are_not_aligned_to_a_vector_have_the_same_bits(hidden: int, dtype: torch.dtype) -> None:
    """The rows are contiguous but start one element into their storage, so only elements are aligned."""
    g = torch.Generator().manual_seed(hidden)
    x_TD = torch.randn(19, hidden, generator=g).to(dtype)
    moved_TD = torch.empty(19 * hidden + 1, dtype=dtype)[1:].view(19, hidden).copy_(x_TD)
    assert moved_TD.data_ptr() % 16 and moved_TD.is_contiguous()
    ids_TK = torch.randint(-1, 6, (19, 3), generator=g)
    weights_TK = torch.rand(19, 3, generator=g)
    results = []
    for input_TD in (x_TD, moved_TD):
        dispatcher = make_dispatcher(6, backend="local")
        input_TD = input_TD.detach().requires_grad_()
        sent = dispatcher.dispatch(input_TD, ids_TK)
        y_TD = dispatcher.combine(sent.rows_RD * 2, weights_TK, sent.handle)
        y_TD.float().sum().backward()
        results.append((sent.rows_RD.detach(), y_TD.detach(), input_TD.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_tokens_beyond_2_to_the_31_elements_are_dispatched_correctly(tmp_path: Path) -> None:
    """Map a sparse file of 4 GiB. Only three rows of it are used."""
    hidden = 4096
    tokens = 2**31 // hidden + 2
    with (tmp_path / "rows").open("wb") as file:
        file.truncate(tokens * hidden * 2)
    x_TD = torch.from_file(str(tmp_path / "rows"), shared=True, size=tokens * hidden, dtype=torch.bfloat16)
    x_TD = x_TD.view(tokens, hidden)
    used_tokens = (0, tokens - 2, tokens - 1)
    ids_TK = torch.full((tokens, 1), -1, dtype=torch.int32)
    for n, token in enumerate(used_tokens):
        x_TD[token] = n + 1
        ids_TK[token] = n
    assert x_TD[tokens - 2].storage_offset() >= 2**31
    rows_RD = make_dispatcher(3).dispatch(x_TD, ids_TK).rows_RD
    assert torch.equal(rows_RD, torch.arange(1, 4, dtype=torch.bfloat16)[:, None].expand(3, hidden))
