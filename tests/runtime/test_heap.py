"""The shared heap: freed tensors return their blocks, a full /dev/shm is an error, and no segment is left."""

from __future__ import annotations

import fcntl
import gc
import os
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_C = pytest.importorskip("moe_comm._C", reason="the native core is not built")

from moe_comm.errors import HeapError, PeerError  # noqa: E402
from moe_comm.runtime.memory import block  # noqa: E402

SHM = Path("/dev/shm")
MIB = 1 << 20


@pytest.fixture
def prefix() -> Iterator[str]:
    """Yield a prefix of segment names that is unique to this test."""
    name = f"moe_comm_test_{secrets.token_hex(6)}"
    yield name
    for path in SHM.glob(f"{name}*"):
        path.unlink()


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    return child.pid


def test_a_block_returns_when_its_tensor_dies() -> None:
    heap = _C.Heap("")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = block(heap, 3, 5, dtype)
        assert x.shape == (3, 5) and x.dtype == dtype and x.is_contiguous() and x.data_ptr() % 64 == 0
        assert heap.owns(x.data_ptr(), x.numel() * x.element_size())
        assert heap.blocks == 1 and heap.used == 64
        del x
        assert heap.blocks == 0 and heap.used == 0
    assert heap.peak == 64


def test_a_block_lives_as_long_as_any_view_or_storage_of_it() -> None:
    heap = _C.Heap("")
    x = block(heap, 4, 16, torch.float32).fill_(7)
    view, storage = x[1:3].t(), x.untyped_storage()
    del x
    assert heap.blocks == 1
    assert torch.equal(view, torch.full((16, 2), 7.0))
    del view
    assert heap.blocks == 1
    del storage
    assert heap.blocks == 0


def test_an_unused_capsule_returns_its_block() -> None:
    heap = _C.Heap("")
    capsule = heap.tensor(2, 3, 0)
    assert heap.blocks == 1
    del capsule
    assert heap.blocks == 0


def test_blocks_may_die_on_any_thread_and_outlive_the_heap_object() -> None:
    heap = _C.Heap("")
    tensors = [block(heap, 1 + i % 7, 33, torch.bfloat16) for i in range(200)]

    def drop(first: int) -> None:
        for i in range(first, 200, 4):
            tensors[i] = torch.empty(0)

    threads = [threading.Thread(target=drop, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heap.blocks == 0 and heap.used == 0

    last = block(heap, 8, 8, torch.float32).fill_(3)
    del heap
    gc.collect()
    assert torch.equal(last, torch.full((8, 8), 3.0))


def test_autograd_releases_blocks() -> None:
    heap = _C.Heap("")
    x = block(heap, 8, 8, torch.float32).fill_(2).requires_grad_()
    y = (x * x).sum()
    y.backward()
    assert heap.blocks == 1
    del x, y
    gc.collect()
    assert heap.blocks == 0


@pytest.mark.parametrize("size", [(1 << 40, 1), (1 << 62, 1), (-1, 4)])
def test_impossible_sizes_are_a_heap_error(size: tuple[int, int]) -> None:
    heap = _C.Heap("")
    with pytest.raises(HeapError):
        heap.tensor(*size, 0)
    assert heap.blocks == 0


def test_sizes_that_overflow_64_bits_are_a_heap_error() -> None:
    heap = _C.Heap("")
    with pytest.raises(HeapError):
        heap.tensor(1 << 62, 1 << 62, 0)
    with pytest.raises(HeapError):
        heap.tensor((1 << 62) + 1, 1, 0)  # its size in bytes overflows to 4
    assert heap.blocks == 0


def test_a_heap_grows_up_to_its_reserved_size_and_then_raises(prefix: str) -> None:
    heap = _C.Heap(f"/{prefix}", 64, 0, 8 * MIB)
    assert heap.size == 2 * MIB
    first = block(heap, 1, MIB, torch.float32)  # 4 MiB
    assert heap.size >= 4 * MIB
    with pytest.raises(HeapError, match="at most 8388608 bytes"):
        heap.tensor(2, MIB, 0)
    del first
    block(heap, 1, MIB, torch.float32)
    assert heap.size <= 8 * MIB


def test_a_segment_is_private_to_its_user_and_is_removed_with_its_heap(prefix: str) -> None:
    path = SHM / prefix
    heap = _C.Heap(f"/{prefix}", 64, 0, 8 * MIB)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == heap.size
    with pytest.raises(HeapError, match="File exists"):
        _C.Heap(f"/{prefix}", 64, 0, 8 * MIB)
    assert path.exists(), "a failed second creation must not remove the segment of the first heap"
    del heap
    assert not path.exists()


def test_an_unlinked_segment_still_works(prefix: str) -> None:
    heap = _C.Heap(f"/{prefix}", 64, 0, 32 * MIB)
    heap.unlink()
    heap.unlink()
    assert not (SHM / prefix).exists()
    assert block(heap, 4, MIB, torch.float32).fill_(1).sum() == 4 * MIB


FULL = """
import sys, torch
from moe_comm import _C
from moe_comm.errors import HeapError
from moe_comm.runtime.memory import block
heap = _C.Heap("/moe_comm_full", 64, 0, 1 << 30)
kept = []
try:
    for _ in range(64):
        kept.append(block(heap, 1, 1 << 18, torch.float32).fill_(1))
except HeapError as error:
    assert "/dev/shm is full" in str(error), error
else:
    sys.exit("no error on a full /dev/shm")
assert 2 <= len(kept) <= 8, len(kept)
size = heap.size
kept.clear()
x = block(heap, 1, 1 << 18, torch.float32).fill_(2)      # memory that was already allocated still works
assert x.sum() == 2 << 18 and heap.size == size
try:
    _C.Heap("/moe_comm_second", 64, 8 << 20, 1 << 30)
except HeapError:
    pass
else:
    sys.exit("no error on a full /dev/shm")
import os
assert os.listdir("/dev/shm") == ["moe_comm_full"], os.listdir("/dev/shm")
"""


def test_a_full_dev_shm_is_an_error_and_not_a_sigbus() -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make a mount namespace")
    mount = "mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "
    command = ["unshare", "-m", "sh", "-c", mount + '"$0" "$@"', sys.executable, "-c", FULL]
    process = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120)
    if "mount:" in process.stderr:
        pytest.skip(f"cannot mount a tmpfs: {process.stderr.strip()}")
    assert process.returncode == 0, f"{process.returncode}: {process.stderr}"


def test_sweep_removes_only_segments_of_dead_processes(prefix: str) -> None:
    dead, own = dead_pid(), os.getpid()
    names = {
        f"{prefix}.{dead}.a": False,
        f"{prefix}.{dead}.b": False,
        f"{prefix}.{own}.a": True,
        f"{prefix}.1.a": True,
        f"{prefix}.x.a": True,
        f"{prefix}_other.{dead}.a": True,
        f"{prefix}.{dead}.locked": True,  # a living process in another pid namespace holds it
    }
    for name in names:
        (SHM / name).touch(0o600)
    with open(SHM / f"{prefix}.{dead}.locked") as locked_file:
        fcntl.flock(locked_file, fcntl.LOCK_SH)
        assert _C.sweep_stale(prefix) == 2
    assert {name: (SHM / name).exists() for name in names} == names
    assert _C.sweep_stale(prefix) == 1  # the lock was released


def test_a_living_heap_is_not_swept_even_if_its_pid_seems_dead(prefix: str) -> None:
    heap = _C.Heap(f"/{prefix}.{dead_pid()}.x", 64, 0, 8 * MIB)
    assert _C.sweep_stale(prefix) == 0
    del heap
    assert not list(SHM.glob(f"{prefix}*"))


def test_the_sweep_removes_the_segment_of_a_killed_process(prefix: str) -> None:
    code = (
        "import os, signal; from moe_comm import _C;"
        f"h = _C.Heap(f'/{prefix}.{{os.getpid()}}.x', 64, 0, 8 << 20); os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=120)
    assert process.returncode == -9
    assert len(list(SHM.glob(f"{prefix}*"))) == 1
    assert _C.sweep_stale(prefix) == 1
    assert not list(SHM.glob(f"{prefix}*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_segment_of_another_user_is_refused(prefix: str) -> None:
    heaps = [_C.Heap(f"/{prefix}.{rank}", _C.Communicator.control_bytes(), 0, 8 * MIB) for rank in range(2)]
    ranks = [_C.Communicator(heap, rank, 2, 1.0, 0.0) for rank, heap in enumerate(heaps)]
    os.chown(SHM / f"{prefix}.1", 65534, 65534)
    with pytest.raises(HeapError, match="rank 1 is not a segment of this group"):
        ranks[0].attach([heap.name for heap in heaps])


def test_a_forked_child_does_not_free_blocks_or_segments_of_its_parent(prefix: str) -> None:
    heap = _C.Heap(f"/{prefix}", _C.Communicator.control_bytes(), 0, 8 * MIB)
    rank = _C.Communicator(heap, 0, 1, 1.0, 0.0)
    private = _C.Heap("")
    x, y = block(heap, 8, 8, torch.float32).fill_(5), block(private, 8, 8, torch.float32).fill_(6)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            del x
            y.fill_(9)
            del y
            assert private.blocks == 0  # the child's own copy
            try:
                heap.tensor(8, 8, 0)
            except HeapError:
                code = 2
            try:
                rank.check_peers()
            except PeerError:
                code = 0 if code == 2 else 3
            del rank, heap, private
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert heap.blocks == 1 and private.blocks == 1
    assert (SHM / prefix).exists()
    assert torch.equal(x, torch.full((8, 8), 5.0)) and torch.equal(y, torch.full((8, 8), 6.0))
    del rank
