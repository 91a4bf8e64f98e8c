"""The handshake before each operation, over any backend of torch.distributed.

Ranks exchange the following int64 words with one all-gather. E is the largest number of experts of the group's
dispatchers, so that ranks which call different dispatchers exchange the same number of bytes:

    header.WORDS    tokens    device    invalid ids    first invalid slot    its id    | rows for each expert [E]

Every rank then checks all headers, and computes all sizes from the counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_comm.comm import header as head
from moe_comm.comm.channel import Channel
from moe_comm.comm.header import GroupCalls, Header, check, describe
from moe_comm.dispatch.slots import plain
from moe_comm.dispatch.types import peers_routing_error, routing_error
from moe_comm.errors import MoeCommError, RankMismatch, mark_known
from moe_comm.topology import ExpertPlacement

EXTRA = 5
"""Number of words between the header and the rows for each expert."""
DEVICES = ("cpu", "cuda", "xpu", "mps", "meta")

Words = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Counts:
    """Numbers of rows that all ranks will send, on the CPU.

    rows_WE: rows of each rank for each expert. tokens_W: tokens of each rank. num_dropped: dropped slots of this rank.
    """

    rows_WE: Words
    tokens_W: tuple[int, ...]
    num_dropped: int


class Handshake:
    """The exchange that starts every operation of one dispatcher."""

    def __init__(self, channel: Channel, placement: ExpertPlacement, calls: GroupCalls) -> None:
        self._channel = channel
        self._num_experts = placement.num_experts
        # All ranks have compared their settings before, so the handshakes of the group grow at the same call.
        calls.most_experts = max(calls.most_experts, placement.num_experts)
        self._calls = calls

    def exchange(self, header: Header, ids_TK: Tensor | None, device: torch.device) -> Counts:
        """Exchange headers and counts. If a header has a fault or two differ, raise the same error on every rank."""
        try:
            counts = self._exchange(header, ids_TK, device)
        except MoeCommError as error:
            mark_known(error)
            raise
        header.agreed = True
        return counts

    def _exchange(self, header: Header, ids_TK: Tensor | None, device: torch.device) -> Counts:
        words = torch.from_numpy(np.concatenate((header.pack(), np.zeros(EXTRA + self._calls.most_experts, np.int64))))
        words[head.WORDS + 1] = DEVICES.index(device.type) if device.type in DEVICES else len(DEVICES)
        words = words.to(self._channel.control_device, non_blocking=True)
        counts = None
        if ids_TK is not None and header.fault is None:
            words[head.WORDS] = ids_TK.shape[0]
            counts = plain.count_slots(ids_TK, self._num_experts).to(words.device)
            words[head.WORDS + 2 : head.WORDS + EXTRA] = counts[self._num_experts + 1 :]
            words[head.WORDS + EXTRA : head.WORDS + EXTRA + self._num_experts] = counts[: self._num_experts]
        rows: Words = self._channel.all_gather(words, describe(header)).cpu().numpy()
        check(list(rows[:, : head.WORDS]), self._channel.rank, header)
        extra = rows[:, head.WORDS : head.WORDS + EXTRA]
        if len(set(extra[:, 1].tolist())) > 1:
            devices = ", ".join(
                f"rank {rank}: {(*DEVICES, 'another')[int(value)]}" for rank, value in enumerate(extra[:, 1])
            )
            raise RankMismatch(f"ranks disagree on the device of the rows in {describe(header)}: {devices}")
        self._check_ids(extra, ids_TK, header)
        rows_WE = rows[:, head.WORDS + EXTRA : head.WORDS + EXTRA + self._num_experts]
        slots = ids_TK.numel() if ids_TK is not None else 0
        dropped = slots - int(rows_WE[self._channel.rank].sum())
        return Counts(rows_WE, tuple(int(v) for v in extra[:, 0]), dropped)

    def _check_ids(self, extra: Words, ids_TK: Tensor | None, header: Header) -> None:
        if not extra[:, 2].any():
            return
        if ids_TK is not None and extra[self._channel.rank, 2]:
            raise routing_error(ids_TK, self._num_experts)
        rank = int(extra[:, 2].nonzero()[0][0])
        bad, slot, value = (int(v) for v in extra[rank, 2:])
        raise peers_routing_error(rank, bad, slot, value, header.top_k, self._num_experts)
