"""Copies of tensors in host memory, so that training may change the originals while the copies go to the disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_comm.train.checkpoint.entries import Entry


class Stager:
    """Copies boxes of entries to buffers that are kept from save to save: fresh memory costs more than the copy.

    From a GPU the buffers are page-locked and a stream of its own does the copies, after what the caller's stream had
    been given when ``mark`` was called.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._streams: dict[torch.device, Any] = {}
        self._ready: dict[torch.device, Any] = {}

    def mark(self, entries: Mapping[str, Entry]) -> None:
        """The entries are as the work enqueued up to here leaves them. Called by the thread that trains."""
        for device in {entry.tensor.device for entry in entries.values() if entry.tensor.is_cuda}:
            self._ready[device] = torch.cuda.current_stream(device).record_event()

    def stage(
        self, entries: Mapping[str, Entry], wanted: Sequence[tuple[str, int]]
    ) -> Mapping[tuple[str, int], Tensor]:
        """CPU copies of the boxes ``wanted`` (name, number of the box); returns when they are complete.

        They stay as they are until the next call.
        """
        buffers: dict[tuple[str, int], Tensor] = {}
        used = set()
        for name, number in wanted:
            piece = entries[name].piece(number)
            buffer = self._buffers.pop((name, number), None)
            if buffer is None or (buffer.shape, buffer.dtype) != (piece.shape, piece.dtype):
                buffer = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=piece.is_cuda)
            if piece.is_cuda:
                used.add(piece.device)
                with torch.cuda.stream(self._stream(piece.device)):
                    buffer.copy_(piece, non_blocking=True)
            else:
                buffer.copy_(piece)
            buffers[name, number] = buffer
        for device in used:
            self._stream(device).synchronize()
        self._buffers = buffers
        return buffers

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        if device in self._ready:
            self._streams[device].wait_event(self._ready.pop(device))
        return self._streams[device]
