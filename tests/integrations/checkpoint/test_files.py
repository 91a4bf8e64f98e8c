"""``HubFolder``: any slice into any layout, and files that are not what they claim to be."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file

from moe_comm.errors import CorruptFile
from moe_comm.integrations.checkpoint import files
from moe_comm.integrations.checkpoint.files import SINGLE, HubFolder

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


@st.composite
def _slices(draw: st.DrawFn, size: int) -> slice:
    start = draw(st.integers(0, size))
    return slice(start, draw(st.integers(start, size)), draw(st.sampled_from([None, 1, 1, 2, 3])))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_slice_is_read_into_any_layout(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=4)))
    stored, kept = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))
    full = torch.randint(0, 2 if torch.bool in (stored, kept) else 100, shape).to(stored)
    index = tuple(slice(None) if data.draw(st.booleans()) else data.draw(_slices(size)) for size in shape)
    order = data.draw(st.permutations(range(len(shape))))
    part = full[index]
    target = torch.zeros([part.shape[d] for d in order], dtype=kept).permute(torch.tensor(order).argsort().tolist())
    assert target.shape == part.shape
    folder = tmp_path_factory.mktemp("slices")
    save_file({"other": torch.ones(3), "full": full}, folder / SINGLE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BUFFER_BYTES", data.draw(st.sampled_from([16, 64, 4096])))
        patch.setattr(files, "SHORT_RUN", data.draw(st.sampled_from([0, 8, 64])))
        hub = HubFolder(folder)
        hub.read_into(hub.stored("full"), index, target)
    assert torch.equal(target, part.to(kept))


def _file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def _tensor(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 4,
        _file({}, length=1 << 62),
        _file(b"{"),
        _file(b"[]"),
        _file(b'{"a":' * 2000),
        _file(b'{"a": {}, "a": {}}'),
        _file({"a": 3}),
        _file(_tensor(), b"\0" * 7),
        _file(_tensor(), b"\0" * 9),
        _file(_tensor(data_offsets=[4, 12]), b"\0" * 8),
        _file(_tensor(data_offsets=[8, 0]), b"\0" * 8),
        _file(_tensor(data_offsets=[0, 8, 8]), b"\0" * 8),
        _file(_tensor(data_offsets="08"), b"\0" * 8),
        _file(_tensor(shape=[2, 1 << 70]), b"\0" * 8),
        _file(_tensor(shape=[-1, -2]), b"\0" * 8),
        _file(_tensor(shape=[True, 2]), b"\0" * 8),
        _file(_tensor(shape="2"), b"\0" * 8),
        _file(_tensor(dtype=["F32"]), b"\0" * 8),
        _file(_tensor(dtype="F16"), b"\0" * 8),
    ],
)
def test_headers_that_do_not_fit_the_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(CorruptFile, match=SINGLE):
        HubFolder(tmp_path)
