"""Arguments of kernels by name, and constants shared by host and device code."""

from __future__ import annotations

import os
import struct
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from moe_comm.comm import header
from moe_comm.dispatch.peer_to_peer import access as peer_access
from moe_comm.dispatch.peer_to_peer.rows import RowFormat
from moe_comm.dispatch.wire_dtype import WireDtype
from moe_comm.errors import ConfigError, HeapError, MissingDependency
from moe_comm.gpu import launch, nvrtc, protocol
from moe_comm.gpu.arguments import Packer, kernel_fields
from moe_comm.gpu.blocks import SHARING
from moe_comm.runtime.memory import DTYPE_CODES
from tests.pool import RankPool

core = pytest.importorskip("moe_comm._C", reason="the native core is not built")
FIELDS = {"add": ("a_at", "b_at", "count")}


def test_words_go_into_the_struct_in_the_order_of_their_names() -> None:
    assert Packer(FIELDS).pack("add", {"count": -3, "a_at": 1, "b_at": 2**62}) == struct.pack("=3q", 1, 2**62, -3)


@pytest.mark.parametrize(
    ("kernel", "words", "said"),
    [
        ("sub", {}, "unknown kernel 'sub'; known: add"),
        ("add", {"a_at": 1, "b_at": 2}, r"missing words \['count'\]"),
        ("add", {"a_at": 1, "b_at": 2, "cuont": 3}, r"missing words \['count'\], unknown words \['cuont'\]"),
        ("add", {"a_at": 1, "b_at": 2, "count": 2**63}, "does not fit in int64"),
        ("add", {"a_at": 1, "b_at": 2, "count": 0.5}, "does not fit in int64"),
    ],
)
def test_wrong_words_are_an_error_before_a_launch(kernel: str, words: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Packer(FIELDS).pack(kernel, words)


def test_every_kernel_begins_with_the_words_of_the_group() -> None:
    group = kernel_fields()["done"]
    assert group[0] == "world" and group[-1] == "timeout_ns"
    assert all(names[: len(group)] == group for names in kernel_fields().values())


def test_the_host_counts_as_the_device_code_does() -> None:
    constants = core.p2p_constants()
    ours = {
        "header_words": header.WORDS,
        "compared_words": header.NUM_COMPARED,
        "fault_word": header.FAULT_SLOT,
        "bad_ids_word": protocol.BAD_IDS_WORD,
        "offer_words": len(protocol.Offer._fields),
        "nowhere": protocol.NOWHERE,
        "max_parts": protocol.MAX_PARTS,
        "max_slices": protocol.MAX_SLICES,
        "slice_columns": protocol.SLICE_COLUMNS,
        "tile_rows": protocol.TILE_ROWS,
        "tile_flags": protocol.TILE_FLAGS,
        "order_words": protocol.ORDER_WORDS,
        "send_tile_words": protocol.SEND_TILE_WORDS,
        "rows_at": protocol.Offer._fields.index("rows"),
        "block_at": protocol.Offer._fields.index("block"),
        "scales_at": protocol.Offer._fields.index("scales"),
        "links_at": protocol.Offer._fields.index("links"),
        "room": protocol.Offer._fields.index("room"),
        "fault_timed_out": protocol.TIMED_OUT,
        "fault_aborted": protocol.ABORTED,
        "fault_disagree": protocol.DISAGREE,
        "fault_bad_ids": protocol.BAD_IDS,
        "fault_no_room": protocol.NO_ROOM,
        "wait_posted": protocol.POSTED,
        "wait_done": protocol.DONE,
        "wait_arrived": protocol.ARRIVED,
        "wait_sent": protocol.SENT,
        "wait_results": protocol.RESULTS,
        "wait_staged": protocol.STAGED,
        "row_link_bytes": 8 * protocol.ROW_LINK_WORDS,
        "format_same": protocol.SAME,
        "format_block_scales": protocol.BLOCK_SCALES,
        "format_row_scales": protocol.ROW_SCALES,
        "report_words": len(protocol.REPORT_WORDS),
    }
    assert {name: constants[name] for name in ours} == ours
    assert protocol.HEADER_WORDS == header.WORDS and protocol.FAULT_WORD == header.FAULT_SLOT


@pytest.mark.parametrize("offsets", [(0, 1), (0, 3, 3, 8), (0, 32, 64, 96, 128)])
def test_the_control_area_is_as_large_as_the_kernels_take_it(offsets: tuple[int, ...]) -> None:
    shape = protocol.GroupShape(0, offsets)
    control = core.p2p_control(shape.world, shape.experts, shape.local_experts)
    assert shape.control_bytes == control["bytes"]


@pytest.mark.parametrize("wire_dtype", ["same", "fp8_token", "fp8_block"])
@pytest.mark.parametrize("hidden", [1, 33, 128, 7168])
def test_rows_are_as_long_as_the_kernels_write_them(hidden: int, wire_dtype: str) -> None:
    for dtype, code in DTYPE_CODES.items():
        form = RowFormat(hidden, dtype, WireDtype.named(wire_dtype), False)
        assert core.p2p_row_bytes(hidden, code, form.packing) == (form.row_bytes, 4 * form.scales)


def test_slots_are_cut_into_whole_tokens() -> None:
    for tokens, top_k in ((0, 2), (1, 8), (37, 3), (4096, 8), (100_000, 8), (1000, 600)):
        chunk = protocol.chunk_of(tokens, top_k)
        assert chunk % top_k == 0 and chunk <= max(top_k, protocol.MOST_SLOTS)
        assert tokens * top_k <= chunk * protocol.COUNT_BLOCKS or chunk + top_k > protocol.MOST_SLOTS


@pytest.mark.parametrize(
    ("capability", "archs", "newest", "road"),
    [
        ((9, 0), ("sm_80", "sm_90a"), None, "nvcc"),
        ((8, 9), ("sm_80", "sm_90a"), None, "nvcc"),
        ((12, 0), ("sm_80", "sm_100a"), None, "nvcc"),
        ((7, 5), ("sm_80", "sm_90a"), (75, 80, 90), "nvrtc"),
        ((7, 5), ("sm_80", "sm_90a"), None, ""),
        ((7, 0), ("sm_80", "sm_90a"), (75, 80, 90), ""),
        ((9, 0), (), (75, 80, 90), "nvrtc"),
        ((9, 0), (), None, ""),
    ],
)
def test_a_launcher_with_kernels_for_the_gpu_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    archs: tuple[str, ...],
    newest: tuple[int, ...] | None,
    road: str,
) -> None:
    def find() -> nvrtc.Nvrtc:
        if newest is None:
            raise MissingDependency("no NVRTC")
        return nvrtc.Nvrtc("libnvrtc.so", (13, 0), newest, None)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(launch, "compiled_archs", lambda: archs)
    monkeypatch.setattr(nvrtc, "find", find)
    monkeypatch.setattr(launch, "NativeLauncher", lambda machine, device: f"{machine} {device.index}")
    monkeypatch.setattr(launch, "nvrtc_launcher", lambda index: f"nvrtc {index}")
    device = torch.device("cuda", 3)
    assert launch.cuda_kernels_at_hand(device) == bool(road)
    if road == "nvcc":
        assert str(launch.cuda_launcher(device)) == "cuda 3", "not the current device"
    elif road:
        assert str(launch.cuda_launcher(device)) == "nvrtc 3"


def test_compiled_archs_need_no_device() -> None:
    assert launch.compiled_archs() == tuple(filter(None, core.cuda_archs().split(",")))


@pytest.mark.parametrize("leave", ["1", "0", None])
def test_the_access_word_includes_sharing(monkeypatch: pytest.MonkeyPatch, leave: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(launch, "cuda_kernels_at_hand", lambda device: True)
    monkeypatch.delenv(SHARING, raising=False)
    if leave is not None:
        monkeypatch.setenv(SHARING, leave)
    word = peer_access.access_word(torch.device("cuda", 0))
    assert word == peer_access.REACHES + peer_access.MAY_SHARE * (leave == "1")
    assert bool(peer_access.problem_of([7, 7], [word, word])) == (leave != "1")


class NVMLError(Exception):
    pass


class Nvml(SimpleNamespace):
    """NVML of a host with GPUs a, b and c, where ``cut`` cannot access the others."""

    NVMLError, NVML_P2P_STATUS_OK, NVML_P2P_CAPS_INDEX_READ, NVML_P2P_CAPS_INDEX_WRITE = NVMLError, 0, 0, 1
    uuids, cut = ("GPU-a", "GPU-b", "GPU-c"), ""

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        if uuid.decode() not in self.uuids:
            raise NVMLError
        return uuid.decode()

    def nvmlDeviceGetCount(self) -> int:
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self.uuids[index]

    def nvmlDeviceGetUUID(self, gpu: str) -> str:
        return gpu

    def nvmlDeviceGetP2PStatus(self, one: str, other: str, caps: int) -> int:
        return int(self.cut in (one, other) and caps == self.NVML_P2P_CAPS_INDEX_WRITE)


@pytest.mark.parametrize(
    ("uuid", "nvml", "state"),
    [
        ("a", Nvml(), peer_access.REACHES),
        ("a", Nvml(cut="GPU-c"), peer_access.BLOCKED),
        ("a", Nvml(uuids=("GPU-a",)), peer_access.ALONE),
        ("unknown", Nvml(), peer_access.ALONE),
        ("a", None, peer_access.ALONE),
    ],
)
def test_ranks_that_each_see_one_gpu_ask_nvml_for_their_access(
    monkeypatch: pytest.MonkeyPatch, uuid: str, nvml: Nvml | None, state: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuid))
    monkeypatch.setattr(launch, "cuda_kernels_at_hand", lambda device: True)
    monkeypatch.delenv(SHARING, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    word = peer_access.access_word(torch.device("cuda", 0))
    assert word == state
    assert bool(peer_access.problem_of([7, 8], [word, word])) == (state != peer_access.REACHES)


def any_device_index(rank: int, world: int, shared: bool) -> tuple[str, str | None, str | None]:
    """Return the error of ``any_device_index`` on this rank, and the variable inside and after it."""
    from moe_comm.gpu import blocks

    blocks.device_word = lambda device: 1 if shared else 1 + rank  # type: ignore[assignment]
    os.environ.pop(SHARING, None)
    inside = None
    try:
        with blocks.any_device_index(dist.group.WORLD, torch.device("cpu")):  # type: ignore[arg-type]
            inside = os.environ.get(SHARING)
    except HeapError as error:
        return str(error), inside, os.environ.get(SHARING)
    return "", inside, os.environ.get(SHARING)


def test_gpus_are_told_apart_by_uuid_not_by_index() -> None:
    with RankPool(2) as pool:
        assert pool.run(any_device_index, False) == [("", "1", None)] * 2
        for error, inside, after in pool.run(any_device_index, True):
            assert "ranks share a GPU" in error and (inside, after) == (None, None)
