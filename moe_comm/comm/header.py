"""The header that each rank sends before an operation, and its comparison between ranks.

If ranks differ (hidden size, dtype, top-k, order of calls), or a header has a fault (an error in its rank's input),
every rank raises the same typed error before any row moves. A header is an int64 vector of fixed size, so that ranks in
different operations exchange the same number of bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch

from moe_comm import errors

COLLECTIVE = "collective"
DISPATCH_FIXED = "dispatch_fixed"
"""The dispatch of ``peer_to_peer`` into a block of fixed size, whose header has no size of free memory."""
EXTRA, EXTRA_BACKWARD = "extra values", "extra values backward"
"""The separate transfers of the extra values of a dispatch, and of their gradients."""
DISPATCH_AGAIN = "dispatch again"
"""In a backward pass, the dispatch of rows that experts read in place."""
LEND, RETURN = "plan of lent experts", "gradients of lent experts"
"""Operations of ``peer_to_peer`` before a dispatch, and in its backward pass."""
OPS = (
    "dispatch",
    "combine",
    "combine backward",
    "dispatch backward",
    COLLECTIVE,
    DISPATCH_FIXED,
    EXTRA,
    EXTRA_BACKWARD,
    DISPATCH_AGAIN,
    LEND,
    RETURN,
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DTYPE_INDICES = {dtype: index for index, dtype in enumerate(DTYPES)}
FAULTS: tuple[type[errors.MoeCommError], ...] = (
    errors.InputError,
    errors.RoutingError,
    errors.ConfigError,
    errors.HeapError,
    errors.CorruptPayload,
    errors.PeerRaised,
    errors.UnsupportedModel,
)
"""Error classes that a header can report; its fault word is 1 + the index."""

NUM_COMPARED = 8
"""Number of words at the start of a header that must be equal on all ranks."""
FAULT_SLOT = NUM_COMPARED
TEXT_START = FAULT_SLOT + 1
TEXT_WORDS = 40
WORDS = TEXT_START + TEXT_WORDS
SHIFT = 32
"""Words with two fields have the second one above this bit."""
PLACEMENT_SHIFT = 6
"""The bits of a placement's digest are above this many flags."""
TRAINED = (
    "input weights",
    "output weights",
    "input biases",
    "output biases",
    "routing weights",
    "router",
    "adapters of input weights",
    "adapters of output weights",
)
ORDINAL_MASK = 0xFFF
"""Bits of a word that hold the ordinal of a dispatcher."""
COLLECTIVES = ORDINAL_MASK
"""Ordinal of a group's collectives, in place of a dispatcher's ordinal."""

DESTROYED = (
    "this process group was destroyed (dist.destroy_process_group), so its layers and dispatchers cannot be used; "
    "build new ones with a new group"
)

Words = npt.NDArray[np.int64]


@dataclass(eq=False)
class GroupCalls:
    """Sequence numbers of a group's operations, counted separately for each dispatcher and for the collectives.

    Ranks make the same calls in the same order, so their numbers are equal. After ranks made different calls and
    raised, each rank takes over the numbers in the headers of the others, so that all are equal again.

    most_experts: maximum number of experts of the group's dispatchers, which determines the handshake size.
    gave_up: why this rank takes part in no further operation; "" while it does. closed: the group was destroyed.
    """

    most_experts: int = 0
    gave_up: str = ""
    closed: bool = False
    _num_dispatchers: int = 0
    _last: dict[int, int] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def add_dispatcher(self) -> int:
        """Return the number of a new dispatcher (its ordinal). All ranks create dispatchers in the same order."""
        self._num_dispatchers += 1
        return self._num_dispatchers - 1

    def last(self, ordinal: int) -> int:
        """Return the number of the last operation of the dispatcher ``ordinal``, or of the collectives."""
        return self._last.get(ordinal & ORDINAL_MASK, 0)

    def next(self, ordinal: int, count: int = 1) -> int:
        """Count operations and return the number of the first one."""
        if self.closed:
            raise errors.ConfigError(DESTROYED)
        with self._lock:
            last = self._last[ordinal & ORDINAL_MASK] = self._last.get(ordinal & ORDINAL_MASK, 0) + count
        return last - count + 1

    def take_back(self, ordinal: int, number: int) -> None:
        """Undo ``next``, which returned ``number`` for an operation that has not started."""
        with self._lock:
            if self._last.get(ordinal & ORDINAL_MASK, 0) == number:
                self._last[ordinal & ORDINAL_MASK] = number - 1

    def catch_up(self, headers: Sequence[Words]) -> None:
        """Take over the numbers in ``headers``, which all ranks have sent."""
        with self._lock:
            for words in headers:
                ordinal = COLLECTIVES if words[0] == OPS.index(COLLECTIVE) else int(words[7]) & ORDINAL_MASK
                self._last[ordinal] = max(self.last(ordinal), int(words[1]))


@dataclass(slots=True, eq=False)  # created for every operation; a frozen dataclass takes longer to construct
class Header:
    """Describes the operation that a rank starts. Do not modify it.

    label: name of the layer. fault: error in this rank's input.
    of_call: sequence number (``seq``) of the dispatch of these rows; 0 for a dispatch.
    ordinal: number of the dispatcher in the group. maker: id of the dispatcher in this process; not compared.
    calls: the operations of the group; ``check`` updates them when ranks differ.
    scaled: whether a dispatch returns rows as values and scales.
    weights_grad: whether backward sends gradients of routing weights of a dispatch in chunks.
    flagged: whether kernels of a combine, or of a backward pass, set a flag for each part of the rows.
    in_place: whether the experts of a dispatch read the tokens in place.
    again: whether the backward of a combine also sends the tokens again.
    placement: digest of the placement of experts, whose slots the ids of a dispatch are, and of what is lent or when;
        0 for the default placement.
    extra, extra_grad, extra_int: number of extra values of each slot, and whether they require gradients, or are int32.
    trained: bits of a dispatch for a layer: which of ``TRAINED`` require gradients.
    agreed: whether all ranks have compared their headers and found no fault, so rows may be in flight. Not sent.
    """

    op: str
    seq: int
    hidden: int
    dtype: torch.dtype
    top_k: int
    num_experts: int
    requires_grad: bool
    label: str = ""
    fault: errors.MoeCommError | None = None
    of_call: int = 0
    ordinal: int = 0
    maker: int = 0
    calls: GroupCalls | None = field(default=None, repr=False, compare=False)
    scaled: bool = False
    placement: int = 0
    weights_grad: bool = False
    flagged: bool = False
    in_place: bool = False
    again: bool = False
    extra: int = 0
    extra_grad: bool = False
    extra_int: bool = False
    trained: int = 0
    agreed: bool = field(default=False, repr=False, compare=False)

    def compared(self) -> tuple[int, ...]:
        """Return the words that must be equal on all ranks. ``_FIELDS`` names their parts."""
        return (
            OPS.index(self.op),
            self.seq,
            self.hidden,
            _DTYPE_INDICES.get(self.dtype, -1),
            self.top_k | (self.extra << 2 | self.extra_int << 1 | self.extra_grad) << SHIFT,
            self.num_experts | self.trained << SHIFT,
            self.requires_grad
            | self.scaled << 1
            | self.weights_grad << 2
            | self.flagged << 3
            | self.in_place << 4
            | self.again << 5
            | self.placement << PLACEMENT_SHIFT,
            # Layer, dispatcher and dispatch (of_call) in one word. of_call differs if ranks combine the rows of several
            # dispatches in different orders.
            _origin_hash(self.label, self.ordinal) | (self.of_call & 0x7FFFFFFF) << SHIFT,
        )

    def pack(self) -> Words:
        """Return the header as ``WORDS`` int64."""
        words = np.zeros(WORDS, np.int64)
        words[:NUM_COMPARED] = self.compared()
        text = self.label
        words[FAULT_SLOT] = fault_word(self.fault)
        if self.fault is not None:
            text = str(self.fault)
        if text:
            raw = text.encode()[: TEXT_WORDS * 8]
            words[TEXT_START:].view(np.uint8)[: len(raw)] = np.frombuffer(raw, np.uint8)
        return words


def describe(header: Header) -> str:
    """Return text like ``dispatch (call 3) of layer 'moe.1'``."""
    return f"{header.op} (call {header.seq})" + (f" of layer {header.label!r}" if header.label else "")


def fault_word(fault: errors.MoeCommError | None) -> int:
    """Return the code of the class of ``fault`` in headers: 0 for None, else 1 + index in ``FAULTS``."""
    if fault is None:
        return 0
    return 1 + FAULTS.index(type(fault) if type(fault) in FAULTS else errors.InputError)


@lru_cache(maxsize=4096)
def _origin_hash(label: str, ordinal: int) -> int:
    return (zlib.crc32(f"{ordinal} {label}".encode()) & ~ORDINAL_MASK) | (ordinal & ORDINAL_MASK)


def _text(words: Words) -> str:
    return words[TEXT_START:].tobytes().rstrip(b"\0").decode(errors="replace")


def _item(names: Sequence[object], index: int) -> str:
    return str(names[index]).removeprefix("torch.") if 0 <= index < len(names) else f"unknown ({index})"


def _extra(value: int) -> str:
    dtype, grad = "int32" if value & 2 else "float32", " that require gradients" if value & 1 else ""
    return f"{value >> 2} in {dtype}{grad}" if value else "none"


def _placement(digest: int) -> str:
    return f"version {digest & 0xFFFF} ({digest >> 16:x})" if digest else "version 0 (contiguous)"


def _trained(value: int) -> str:
    return " and ".join(name for bit, name in enumerate(TRAINED) if value >> bit & 1) or "none"


_LOW = (1 << SHIFT) - 1
_SAME_CALLS = "Every rank of a group must make the same calls in the same order with the same settings."
_FIELDS: tuple[tuple[str, int, int, int, Callable[[int], object]], ...] = (
    ("operation", 0, 0, -1, lambda value: _item(OPS, value)),
    ("call number", 1, 0, -1, int),
    ("hidden size", 2, 0, -1, int),
    ("dtype", 3, 0, -1, lambda value: _item(DTYPES, value)),
    ("top-k", 4, 0, _LOW, int),
    ("extra values", 4, SHIFT, -1, _extra),
    ("experts", 5, 0, _LOW, int),
    ("which weights of experts require gradients", 5, SHIFT, -1, _trained),
    ("requires_grad", 6, 0, 1, bool),
    ("whether rows are scaled", 6, 1, 1, bool),
    ("whether routing weights require gradients", 6, 2, 1, bool),
    ("whether GEMMs overlap on the device", 6, 3, 1, bool),
    ("whether experts read tokens in place", 6, 4, 1, bool),
    ("whether the tokens are sent again", 6, 5, 1, bool),
    ("the placement of experts or their balance", 6, PLACEMENT_SHIFT, -1, _placement),
)
"""Fields of the compared words: name, word, lowest bit, mask, and the text of a value. The last word is the layer."""


def _difference(headers: Sequence[Words]) -> tuple[str, list[str]]:
    """Return the name of the first field that differs, and its value on each rank."""
    for name, word, shift, mask, text in _FIELDS:
        values = [int(words[word]) >> shift & mask for words in headers]
        if len(set(values)) > 1:
            return name, [str(text(value)) for value in values]
    origins = [int(words[NUM_COMPARED - 1]) for words in headers]
    return "layer, dispatcher or rows", [
        f"{_text(words)!r} (dispatcher {origin & ORDINAL_MASK}"
        + (f", rows of call {origin >> SHIFT})" if origin >> SHIFT else ")")
        for words, origin in zip(headers, origins, strict=True)
    ]


def check(headers: Sequence[Words], rank: int, own: Header) -> None:
    """Raise if a header has a fault or two headers differ. Every rank raises."""
    compared = [tuple(words[:NUM_COMPARED]) for words in headers]
    if own.calls is not None and len(set(compared)) > 1:
        own.calls.catch_up(headers)
    if own.fault is not None:
        raise own.fault
    for peer, words in enumerate(headers):
        if words[FAULT_SLOT]:
            kind, text = FAULTS[int(words[FAULT_SLOT]) - 1], f"rank {peer}: {_text(words)}"
            if kind is errors.PeerRaised:
                text += f". This rank was in {describe(own)}"
            raise kind(text)
    if own.op == COLLECTIVE and len(set(compared)) > 1:
        raise other_collective(rank, own.seq, own.label, _describe_others(headers, rank))
    if len(set(compared)) > 1:
        what, values = _difference(headers)
        by_rank = ", ".join(f"rank {peer}: {value}" for peer, value in enumerate(values))
        hint = _SAME_CALLS
        if what.startswith("which weights"):
            hint = (
                "Freeze the same parameters on every rank, and enable gradients on all ranks or none. To train "
                "some experts only, let a gradient hook of the parameter zero the rows of the others."
            )
        raise errors.RankMismatch(f"ranks disagree on {what} in {describe(own)}: {by_rank}. {hint}")


def _describe_others(headers: Sequence[Words], rank: int) -> str:
    """Describe the operations of ranks that are not in the collective of ``rank``."""
    others = []
    for peer, words in enumerate(headers):
        if (words[:NUM_COMPARED] != headers[rank][:NUM_COMPARED]).any():
            collective = f"{_text(words)} ({words[2]} bytes)"
            op = _item(OPS, int(words[0]))
            what = collective if op == COLLECTIVE else f"{op} of layer {_text(words)!r}"
            others.append(f"rank {peer} in call {words[1]}, {what}")
    return ", ".join(others)


def other_collective(rank: int, call: int, description: str, others: str) -> errors.RankMismatch:
    """Return the error of a rank whose peers are in another collective."""
    return errors.RankMismatch(
        f"rank {rank} is in call {call}, {description}, but {others}: "
        "ranks of a group must make the same calls in the same order with the same shapes"
    )


def failure(packed: Sequence[bytes], rank: int, own: Header) -> Exception:
    """Return the error that every rank raises after a failed handshake of the native core."""
    headers = [np.frombuffer(words, np.int64) for words in packed]
    try:
        check(headers, rank, own)
    except Exception as error:
        return error
    return RuntimeError("the native core reported a mismatch between ranks, but their headers are equal")
