"""Typed errors. Each message states what was given, what was expected and how to fix it.

Errors about input are raised on *every* rank of the group, before rows move. A rank that detects invalid input reports
it to its peers in the handshake that starts each operation, and all ranks raise the same class.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MoeCommError(RuntimeError):
    """Base class of all errors that this library raises on purpose.

    Attributes:
        details: the traceback of the rank that raised the error, if ``launch`` collects tracebacks; else "".
    """

    details: str = ""


ANY = "any group"
"""In place of a communicator: the error is known to the ranks of all groups of this rank."""


def mark_known(error: BaseException, comm: object = ANY) -> None:
    """Mark ``error`` as known to the other ranks, which raise as well. comm: communicator of these ranks."""
    error._known_to_peers = [*getattr(error, "_known_to_peers", ()), comm]  # type: ignore[attr-defined]


def known_to_peers(error: BaseException | None, comm: object = ANY) -> bool:
    """Return whether ``error`` or one of its causes was raised by an operation or passed to ``abort``."""
    while error is not None:
        known = getattr(error, "_known_to_peers", ())
        if ANY in known or comm in known:
            return True
        error = error.__cause__
    return False


def pip_install(extra: str) -> str:
    """Return the command that installs an extra. The package is on no index, so that pip needs the checkout."""
    return f"pip install '.[{extra}]' in the checkout of moe_comm"


class ConfigError(MoeCommError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class InputError(MoeCommError, ValueError):
    """A tensor has the wrong shape, dtype or device for the operation."""


class RoutingError(InputError):
    """Expert ids are out of range, or router logits are NaN or all -Inf for a token."""


class RankMismatch(MoeCommError):
    """Ranks of one group disagree on hidden size, dtype, top-k, experts, the order of calls, or initial weights."""


class PeerRaised(MoeCommError):
    """Another rank raised an exception between two operations; the message contains its type and text."""


class PeerError(MoeCommError):
    """Another rank can no longer take part; the group is unusable afterwards."""


class PeerDied(PeerError):
    """The process of a peer has exited."""


class PeerTimeout(PeerError):
    """A peer did not reach the operation before the deadline."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'tiny'?)" for the nearest of ``known``; "" if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


FROM_PEERS = (PeerError, PeerRaised)
"""Errors that another rank caused."""


class HeapError(MoeCommError, MemoryError):
    """Shared memory is exhausted or could not be reserved."""


class UnsupportedModel(MoeCommError, ValueError):
    """A model has no MoE block, or an MoE block with an unknown structure."""


class MissingDependency(MoeCommError, ImportError):
    """An optional package is required; the message says how to install it."""


class StaleCore(MoeCommError):
    """The native core was built from other sources than the Python code; the message says how to build it again."""


class KernelError(MoeCommError):
    """A GPU kernel could not be compiled, loaded or launched; the message contains the compiler or driver output."""


class NonFiniteLoss(MoeCommError, ArithmeticError):
    """The loss or its gradient is NaN or infinite; raised on every rank before the weights change."""


class GradientMismatch(MoeCommError):
    """Gradients of expert and replicated parameters were reduced inconsistently; raised before the optimizer step."""


class UnsettledStep(MoeCommError, ArithmeticError):
    """A step produced invalid numbers, and different ones when it was repeated; the message names the ranks."""


class CorruptPayload(MoeCommError):
    """Received rows do not match the checksums of the rows that were sent."""


class CheckpointError(MoeCommError):
    """A checkpoint could not be written, or does not contain the requested data; the message names the file."""


class CorruptFile(MoeCommError):
    """A file on disk is truncated, or its content does not match its checksum; the message names the file."""


class StoreFull(MoeCommError, MemoryError):
    """Offloaded state does not fit on its disk or in its memory; the message has the bytes needed and available."""


class StoreIOError(MoeCommError):
    """Offloaded state could not be read or written in time; the message has the cause and the position."""
