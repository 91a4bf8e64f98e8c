"""Checks whether the GPUs of a group can access each other's memory, and selects what launches kernels on them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from moe_comm.errors import ConfigError
from moe_comm.gpu.blocks import SHARING

if TYPE_CHECKING:
    from moe_comm.gpu.launch import Launcher

NO_KERNELS, ALONE, REACHES, BLOCKED = range(4)
"""States of a rank.

NO_KERNELS: there are no kernels for its GPU. ALONE: CUDA shows no other GPU and there is no NVML, so its access is
unknown. REACHES: it can access all other GPUs that CUDA, or else NVML, shows. BLOCKED: it cannot access some of them.
"""
MAY_SHARE = 4
"""Added to the state if torch allows ranks on the same GPU to use symmetric memory."""


def access_word(device: torch.device) -> int:
    """Return the access state of this rank's GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return NO_KERNELS
    from moe_comm.gpu.launch import cuda_kernels_at_hand  # loads CUDA's libraries

    if not cuda_kernels_at_hand(device):
        return NO_KERNELS
    index = torch.cuda.current_device() if device.index is None else device.index
    # torch checks for the value 1.
    may_share = MAY_SHARE * (os.environ.get(SHARING) == "1")
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    if others:
        reaches: bool | None = all(torch.cuda.can_device_access_peer(index, other) for other in others)
    else:
        reaches = _reaches_by_nvml(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
    return (ALONE if reaches is None else REACHES if reaches else BLOCKED) + may_share


def _reaches_by_nvml(uuid: str) -> bool | None:
    """Return whether a GPU can read and write the memory of all others of the host, or None if this is not known.

    Launchers often let each rank see one GPU (CUDA_VISIBLE_DEVICES). CUDA can map the memory of the others
    nevertheless, but only NVML shows them.
    """
    try:
        import pynvml  # optional: package nvidia-ml-py
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            own = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
            gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            others = [gpu for gpu in gpus if _text(pynvml.nvmlDeviceGetUUID(gpu)) != uuid]
            caps = pynvml.NVML_P2P_CAPS_INDEX_READ, pynvml.NVML_P2P_CAPS_INDEX_WRITE
            ok = pynvml.NVML_P2P_STATUS_OK
            if not others:
                return None
            return all(pynvml.nvmlDeviceGetP2PStatus(own, gpu, cap) == ok for gpu in others for cap in caps)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def problem_of(devices: Sequence[int], access: Sequence[int]) -> str:
    """Return why ranks cannot access each other's memory; "" if they can.

    Args:
        devices, access: ``device_word`` and ``access_word`` of all ranks.
    """
    may_share = [word >= MAY_SHARE for word in access]
    access = [word % MAY_SHARE for word in access]
    if NO_KERNELS in access or 0 in devices:
        rank = next(rank for rank, word in enumerate(access) if word == NO_KERNELS or not devices[rank])
        return f"rank {rank} has no kernels for a GPU: neither compiled in by nvcc, nor available from NVRTC"
    if len(set(devices)) < len(devices) and not all(may_share):
        rank = next(rank for rank, device in enumerate(devices) if device in devices[:rank])
        return (
            f"ranks {list(devices).index(devices[rank])} and {rank} share a GPU, and rank {may_share.index(False)} does"
            f" not allow it for torch's symmetric memory (for tests, set {SHARING}=1 on every rank)"
        )
    if len(set(devices)) == 1:
        return ""
    if BLOCKED in access:
        return f"the GPU of rank {list(access).index(BLOCKED)} cannot reach the memory of every other GPU of its host"
    if ALONE in access:
        return (
            f"rank {list(access).index(ALONE)} sees only its own GPU, so its access to the others cannot be checked "
            "(pip install nvidia-ml-py, or list all GPUs of the host in CUDA_VISIBLE_DEVICES and select one with "
            "torch.cuda.set_device)"
        )
    return ""


def launcher_for(device: torch.device, emulate: bool = False) -> Launcher:
    """Return the launcher of kernels on ``device``."""
    from moe_comm.gpu.launch import NativeLauncher, cuda_launcher  # loads CUDA's libraries

    if device.type == "cuda":
        return cuda_launcher(device)
    if device.type != "cpu" or not emulate:
        raise ConfigError(
            f"peer_to_peer moves rows between GPUs and these are on {device}; PeerToPeerOptions(emulate=True) runs its "
            "kernels on CPU tensors, for tests"
        )
    return NativeLauncher("cpu")
