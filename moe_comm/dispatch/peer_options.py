"""Options of the ``peer_to_peer`` dispatcher."""

from __future__ import annotations

from dataclasses import dataclass

from moe_comm.errors import ConfigError


@dataclass(frozen=True)
class PeerToPeerOptions:
    """Options of ``peer_to_peer``.

    Args:
        heap_bytes: size of each rank's device memory for dispatched rows, expert outputs and gradients that exist at
            the same time. ``gpu.heap.heap_bytes`` computes it. None: 2 GiB on CUDA, 16 MiB in emulation.
        num_blocks: maximum number of thread blocks of the kernels that move rows; None: two per multiprocessor. A
            smaller number, such as 16, leaves multiprocessors to other kernels. Does not change results.
        relay: send a token's row once to each rank and copy it there, instead of once to each of its experts.
        capacity_rows: number of rows that ``dispatch_fixed`` has room for.
        own_stream: run operations on a separate stream, which the caller's stream waits for.
        emulate: take CPU tensors and run the same kernels on the CPU. For tests: it is slow.
        bulk_copies: dispatch copies rows with cp.async.bulk, which needs few multiprocessors. Only on GPUs that have it
            (sm_90 and newer), and not for rows that the kernel encodes as fp8. Does not change results.
        fast_combine: each rank adds its rows of a token before they move, so combine moves one row per token and rank
            instead of one per slot. These partial sums are rounded to the row dtype. The output differs in rounding
            from that of other backends and depends on the placement of experts, so this needs
            ``DispatchOptions(deterministic=False)``. Gradients are computed as without this option. The heap needs room
            for a copy of the experts' outputs, and 16 bytes per row.
    """

    heap_bytes: int | None = None
    num_blocks: int | None = None
    relay: bool = False
    capacity_rows: int | None = None
    own_stream: bool = False
    emulate: bool = False
    bulk_copies: bool = False
    fast_combine: bool = False

    def __post_init__(self) -> None:
        for name in ("heap_bytes", "num_blocks", "capacity_rows"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"PeerToPeerOptions.{name} must be a positive integer or None; got {value!r}")
