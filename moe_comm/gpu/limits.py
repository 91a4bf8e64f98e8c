"""Checks of shared memory per thread block, before ranks set anything up."""

from __future__ import annotations

import torch

from moe_comm.errors import ConfigError
from moe_comm.gpu.arguments import Packer, kernel_fields, native_core

UNASKED = 48 << 10
"""Bytes of shared memory per thread block that a kernel gets on every GPU without asking for more."""


def shared_limit(device: torch.device) -> int | None:
    """Return the maximum bytes of shared memory per thread block on ``device``; None without a limit (emulation)."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", UNASKED))


def check_shared(kernel: str, device: torch.device, what: str, **words: int) -> None:
    """Check that a thread block of ``kernel`` gets the shared memory that it needs for the arguments ``words``.

    Args:
        what: the caller's setting that determines the size, such as "max_tokens=20000".
        words: arguments of the kernel that determine the size; others count as 0.

    Raises:
        ConfigError: the kernel needs more than the device has.
    """
    limit = shared_limit(device)
    if limit is None:
        return
    fields = kernel_fields()
    packed = Packer(fields).pack(kernel, {**dict.fromkeys(fields[kernel], 0), **words})
    core = native_core()
    needed = core.p2p_shared_bytes(kernel, core.p2p_threads()[kernel], packed)
    if needed > limit:
        raise ConfigError(
            f"peer_to_peer with {what} needs {needed} bytes of shared memory per thread block, and {device} has "
            f"{limit}; use a smaller value, or another dispatcher"
        )
