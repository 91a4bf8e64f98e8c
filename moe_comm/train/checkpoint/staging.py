"""Copies of tensors in host memory, so that training can change the tensors while the copies are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_comm.train.checkpoint.entries import Entry


class Stager:
    """Copies boxes of entries to buffers, which are reused: new memory costs more than the copy.

    For tensors on a GPU, the buffers are page-locked. A separate stream copies them after the work that was enqueued on
    the caller's stream when ``mark`` was called.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._streams: dict[torch.device, Any] = {}
        self._ready: dict[torch.device, Any] = {}

    def mark(self, entries: Mapping[str, Entry]) -> None:
        """Record that the entries are complete after the work enqueued so far. Called by the training thread."""
        for device in {entry.tensor.device for entry in entries.values() if entry.tensor.is_cuda}:
            self._ready[device] = torch.cuda.current_stream(device).record_event()

    def stage(self, entries: Mapping[str, Entry], boxes: Sequence[tuple[str, int]]) -> Mapping[tuple[str, int], Tensor]:
        """Return CPU copies of the given boxes (name, index of the box). They are valid until the next call."""
        buffers: dict[tuple[str, int], Tensor] = {}
        used = set()
        for name, number in boxes:
            local_box = entries[name].local_box(number)
            buffer = self._buffers.pop((name, number), None)
            if buffer is None or (buffer.shape, buffer.dtype) != (local_box.shape, local_box.dtype):
                buffer = torch.empty(local_box.shape, dtype=local_box.dtype, pin_memory=local_box.is_cuda, device="cpu")
            if local_box.is_cuda:
                used.add(local_box.device)
                with torch.cuda.stream(self._stream(local_box.device)):
                    buffer.copy_(local_box, non_blocking=True)
            else:
                buffer.copy_(local_box)
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
