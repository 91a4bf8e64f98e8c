"""Settings of the ``peer_to_peer`` dispatcher."""

from __future__ import annotations

from dataclasses import dataclass

from moe_comm.errors import ConfigError


@dataclass(frozen=True)
class PeerToPeerOptions:
    """How ``peer_to_peer`` dispatches and what it may take of the device.

    heap_bytes: each rank's memory for rows that peers write or read: rows of dispatches, experts' outputs and gradients
        that live at the same time. ``gpu.heap.heap_bytes`` reckons it. None: 2 GiB on CUDA, 16 MiB in emulation.
    num_blocks: blocks of the kernels that move rows; None: two for each multiprocessor. Bits do not depend on it.
    relay: a token's row goes once to each rank and is copied there; else once for each of its experts.
    capacity_rows: rows that ``dispatch_fixed`` has room for.
    own_stream: operations run on a stream of their own, which the caller's waits for.
    emulate: take CPU tensors and run the same kernels on the CPU. For tests: it is slow.
    """

    heap_bytes: int | None = None
    num_blocks: int | None = None
    relay: bool = False
    capacity_rows: int | None = None
    own_stream: bool = False
    emulate: bool = False

    def __post_init__(self) -> None:
        for name in ("heap_bytes", "num_blocks", "capacity_rows"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"PeerToPeerOptions.{name} must be a positive integer or None; got {value!r}")
