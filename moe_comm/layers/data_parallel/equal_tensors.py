"""Compare tensors between ranks by checksums.

Each rank reads its tensors once and sends 520 bytes. Only if the checksums differ, ranks send 16 bytes per tensor. The
checksum of a tensor is the sum of its 32-bit words, each times an odd factor of its position, modulo 2^64, computed on
the device of the tensor. So it covers all bits of every dtype, NaN included, and the order of elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_comm.comm.agree import compare, digest
from moe_comm.comm.channel import Channel
from moe_comm.comm.group_setup import channel_of
from moe_comm.errors import MoeCommError, RankMismatch
from moe_comm.layers.data_parallel.expert_shard import is_dtensor

NAMED = 3
"""Maximum number of tensors that an error names."""
TEXT_BYTES = 256
SAME_START = (
    "Give all ranks the same weights: call torch.manual_seed with one seed on all ranks before the model is built, "
    "load the same checkpoint, or broadcast the tensors of one rank, for example\n"
    "    for tensor in model.state_dict().values(): torch.distributed.broadcast(tensor, 0)"
)
DRIFTED = (
    "The ranks have changed their weights differently since the start: check that all ranks reduce and clip the same "
    "gradients and step the same optimizers, and load a checkpoint from before. "
    "moe_comm.skip_gradient_checks(model) disables this check, for loops such as local SGD"
)

BLOCK = 1 << 15
"""32-bit words that are multiplied by the same factors. On the CPU, the products of one block stay in the cache."""
BLOCKS = {"cpu": 1}
"""Blocks per operator, by type of the device; on others ``MANY_BLOCKS``, as a launch takes longer than a block."""
MANY_BLOCKS = 256
ALL_ZERO = 0x5851F42D4C957F2D
"""Checksum of zeros, and of no elements. The checksum 0 means that there is nothing to compare."""


def compare_tensors(
    tensors: Mapping[str, Tensor], channel: Channel, what: str, advice: str, fault: MoeCommError | None = None
) -> None:
    """Raise on all ranks unless they hold tensors of the same names, shapes, dtypes and bits. Collective.

    Args:
        tensors: of this rank; those that cannot be read are compared by name only.
        channel: of the ranks to compare.
        what: description of the tensors, for messages.
        advice: the end of the message of the error.
        fault: an error of this rank, which all ranks raise instead.

    Raises:
        RankMismatch: tensors differ. The message names the first ones and the ranks.
    """
    texts = [
        f"{name} {[] if is_lazy(tensor) else list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()
    ]
    sums = [checksum(tensor) for tensor in tensors.values()] if fault is None else []
    own = np.array([[digest(text) for text in texts], sums or [0] * len(texts)], np.int64).T.reshape(-1, 2)
    all_bits = int(np.bitwise_xor.reduce(own[:, 1] * (2 * np.arange(len(own)) + 1))) if len(own) else 0
    facts = {"tensors": len(own), "names": digest(texts), "bits": all_bits}
    by_rank = compare(channel, what, {}, facts, fault)
    if all(len(set(values)) == 1 for values in by_rank.values()):
        return
    padded = np.zeros((max(by_rank["tensors"]), 2), np.int64)
    padded[: len(own)] = own
    sent = torch.from_numpy(padded).to(channel.control_device)
    rows_WN2 = channel.all_gather(sent, f"comparing {what}").cpu().numpy()
    names_WN, sums_WN = rows_WN2[..., 0], rows_WN2[..., 1]
    if (unequal := (names_WN != names_WN[:1]).any(0)).any():
        raise _different_models(int(unequal.argmax()), texts, channel, what)
    readable_WN = sums_WN != 0
    first_N = readable_WN.argmax(0)  # the rank that the others are compared with
    unequal_WN = readable_WN & (sums_WN != np.take_along_axis(sums_WN, first_N[None], 0))
    unequal_N = unequal_WN.any(0).nonzero()[0]
    if unequal_N.size:
        differ = "; ".join(f"{texts[i]} ({_ranks(unequal_WN[:, i], first_N[i])})" for i in unequal_N[:NAMED])
        raise RankMismatch(
            f"{what} differ between ranks: {unequal_N.size} of {len(texts)} tensors, first {differ}. {advice}"
        )


def compare_replicas(replicas: Mapping[ProcessGroup, Mapping[str, Tensor]], channel: Channel, advice: str) -> None:
    """Raise RankMismatch on all ranks of ``channel`` unless experts that several of them hold are equal. Collective.

    Args:
        replicas: experts of this rank, by the group of the ranks with the same experts.
        advice: the end of the message of the error.
    """
    fault: RankMismatch | None = None
    for edp, tensors in replicas.items():
        try:
            compare_tensors(tensors, channel_of(edp), "the experts that several ranks hold", advice)
        except RankMismatch as error:  # compare the other groups too: their ranks do not know of this difference
            fault = fault or error
    differ = torch.tensor([fault is not None], dtype=torch.uint8, device=channel.control_device)
    differ_W = channel.all_gather(differ, "comparing experts that several ranks hold").flatten().tolist()
    if fault is not None:
        raise fault
    if any(differ_W):
        ranks = [rank for rank, value in enumerate(differ_W) if value]
        raise RankMismatch(
            f"the experts that several ranks hold differ between the ranks {ranks} of the group; they name the first "
            f"ones. {advice}"
        )


def _ranks(unequal_W: Any, first: int) -> str:
    ranks = [str(rank) for rank in unequal_W.nonzero()[0]]
    shown = ", ".join(ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown} of the group from rank {first}"


def _different_models(index: int, texts: list[str], channel: Channel, what: str) -> RankMismatch:
    """Return the error for ranks whose tensors have other names, shapes or dtypes from ``index`` on. Collective."""
    raw = texts[index].encode()[:TEXT_BYTES] if index < len(texts) else b"missing"
    sent = F.pad(torch.frombuffer(bytearray(raw), dtype=torch.uint8), (0, TEXT_BYTES - len(raw)))
    rows = channel.all_gather(sent.to(channel.control_device), f"comparing {what}").cpu().numpy()
    shown = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
    by_rank = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(shown))
    return RankMismatch(
        f"the ranks have different models: tensor {index} of {what} is {by_rank}. All ranks of the group must build "
        "the same model"
    )


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """Return a number that differs, except for one case in 2^63, between tensors with different bits; never 0.

    It does not depend on strides and device. Reads the tensor once.

    Returns:
        A signed 64-bit number; 0 if the tensor has no memory of its own to read (see ``replicas``).
    """
    if is_lazy(tensor):
        return 0
    if is_dtensor(tensor):
        if not all(placement.is_replicate() for placement in tensor.placements):
            return 0
        tensor = tensor.to_local()
    of_several: bool = is_traceable_wrapper_subclass(tensor)
    if of_several or isinstance(tensor, FakeTensor):
        return 0
    if tensor.device.type == "meta" or tensor.layout != torch.strided or tensor.is_quantized:
        return 0
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() and not tensor._is_zerotensor() and not tensor.untyped_storage().nbytes():
        return 0
    raw = tensor.clone() if tensor._is_zerotensor() else tensor.contiguous()
    raw = raw.reshape(-1)
    if raw.numel() and raw.stride(0) != 1:  # a tensor of one element may have any stride
        raw = raw.clone(memory_format=torch.contiguous_format)
    raw = raw.view(torch.uint8)
    if raw.storage_offset() % 4:
        raw = raw.clone()
    whole = raw.numel() // 4 * 4
    words = raw[:whole].view(torch.int32)
    if whole < raw.numel():
        words = torch.cat((words, F.pad(raw[whole:], (0, 4 - raw.numel() + whole)).view(torch.int32)))
    factors, step = _factors(words.device), BLOCK * BLOCKS.get(words.device.type, MANY_BLOCKS)
    sums = []
    for part in words.split(step):
        even = part.numel() // BLOCK * BLOCK
        if even:
            sums.append((part[:even].view(-1, BLOCK) * factors).sum(1))
        if even < part.numel():
            sums.append((part[even:] * factors[: part.numel() - even]).sum().view(1))
    if not sums:
        return ALL_ZERO
    by_block = torch.cat(sums)
    blocks = torch.arange(by_block.numel(), device=words.device)
    return int((by_block * _odd(blocks, 0xD1B54A32D192ED03)).sum() + ALL_ZERO) or 1


@lru_cache(maxsize=16)
def _factors(device: torch.device) -> Tensor:
    return _odd(torch.arange(BLOCK, device="cpu"), 0x9E3779B97F4A7C15).to(device)


def _odd(numbers: Tensor, factor: int) -> Tensor:
    """Return odd numbers for positions. Products are modulo 2^64."""
    mixed = numbers * (factor - (1 << 64))
    return (mixed ^ (mixed >> 29)) * (0xBF58476D1CE4E5B9 - (1 << 64)) | 1
