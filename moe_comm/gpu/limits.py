"""What a block of a kernel may take of a GPU, asked before ranks set anything up."""

from __future__ import annotations

import torch

from moe_comm.errors import ConfigError
from moe_comm.gpu.arguments import Packer, kernel_fields
from moe_comm.gpu.launch import block_threads, needed_shared_bytes

UNASKED = 48 << 10
"""Bytes of shared memory that any GPU gives a block."""


def shared_limit(device: torch.device) -> int | None:
    """Bytes of shared memory that a block may have on ``device``; None: any number, where kernels are emulated."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", UNASKED))


def check_shared(kernel: str, device: torch.device, what: str, **words: int) -> None:
    """That a block of ``kernel`` has the shared memory that it needs for ``words``; others count as 0.

    Args:
        what: of the caller's makes it large, as "max_tokens=20000".

    Raises:
        ConfigError: it has not.
    """
    limit = shared_limit(device)
    if limit is None:
        return
    fields = kernel_fields()
    packed = Packer(fields).pack(kernel, {**dict.fromkeys(fields[kernel], 0), **words})
    needed = needed_shared_bytes(kernel, block_threads(kernel), packed)
    if needed > limit:
        raise ConfigError(
            f"peer_to_peer with {what} needs {needed} bytes of shared memory in a block, and {device} has {limit}; "
            "take less, or another dispatcher"
        )
