"""CUDA memory that is registered with NCCL, which then needs no staging copies to send from it and to receive into it.

    caching allocator ── MemPool with ncclMemAlloc ── segments, each registered with the group's communicator

Segments that the pool adds later are registered too. Registration is local (ncclCommRegister). Symmetric windows
(ncclCommWindowRegister) would be collective and need equal sizes, but ranks receive different numbers of rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_comm.comm.communicator import Communicator
from moe_comm.errors import MissingDependency

MIN_NCCL = (2, 19)
"""First version of NCCL with ncclMemAlloc and ncclCommRegister."""


def registration_problem() -> str:
    """Return why memory cannot be registered with NCCL here; "" if torch and NCCL support it."""
    if not dist.is_available() or not dist.is_nccl_available():
        return "this torch has no NCCL"
    version = tuple(torch.cuda.nccl.version())
    if version[:2] < MIN_NCCL:
        return f"NCCL {'.'.join(map(str, version))} is older than {'.'.join(map(str, MIN_NCCL))}"
    from torch.distributed import ProcessGroupNCCL  # missing in builds of torch for the CPU

    missing = [name for name in ("mem_allocator", "register_mem_pool") if not hasattr(ProcessGroupNCCL, name)]
    missing += [name for name in ("MemPool", "use_mem_pool") if not hasattr(torch.cuda, name)]
    return f"this torch has no {', '.join(missing)}" if missing else ""


class RegisteredMemory:
    """A memory pool registered with the communicator that a collective of ``group`` on ``device`` has created."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        if problem := registration_problem():
            raise MissingDependency(f"cannot register memory with NCCL: {problem}")
        self._device = device
        backend: Any = group._get_backend(device)
        self._backend: Any = backend
        self._pool: Any = torch.cuda.MemPool(backend.mem_allocator)
        with self.allocating():
            torch.empty(1, dtype=torch.uint8, device=device)  # raises here if NCCL cannot allocate
        backend.register_mem_pool(self._pool)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Context manager: new CUDA tensors of this thread are in registered memory."""
        with torch.cuda.use_mem_pool(self._pool, self._device):
            yield

    def close(self) -> None:
        """Deregister the memory. Tensors in it remain valid. May be called twice."""
        if self._pool is not None:
            with suppress(RuntimeError):  # the communicator may have been aborted
                self._backend.deregister_mem_pool(self._pool)
        self._pool = self._backend = None


def registered_memory(comm: Communicator) -> RegisteredMemory | None:
    """Return the registered memory of a communicator on this rank's GPU, after a collective there.

    Not collective. None if the group has no NCCL, or if torch and NCCL do not support it. If registration fails, the
    first call warns, and the result is None.
    """
    if comm.backends.get("cuda") != "nccl" or registration_problem():
        return None

    def make() -> RegisteredMemory | None:
        try:
            return RegisteredMemory(comm.group, torch.device("cuda", torch.cuda.current_device()))
        except (AttributeError, RuntimeError, TypeError) as error:
            warnings.warn(f"memory is not registered with NCCL, which copies rows: {error}", stacklevel=2)
            return None

    return comm.keep(("registered memory", torch.cuda.current_device()), make)
