"""Typed errors. Each says what was given, what was expected and what to do.

Errors about input are raised on *every* rank of the group, before rows move: a rank that finds its own
input bad tells its peers in the handshake that starts each operation, and all raise the same class.
"""

from __future__ import annotations


class MoeCommError(RuntimeError):
    """Base of everything this library raises on purpose.

    details: the traceback on the rank that raised it, where ``launch`` was asked for tracebacks; else "".
    """

    details: str = ""


def mark_known(error: BaseException) -> None:
    """Note on ``error`` that the other ranks of the group know of it: they raise, too."""
    error._known_to_peers = True  # type: ignore[attr-defined]


def known_to_peers(error: BaseException) -> bool:
    """Return whether ``error`` or its cause came from an operation, or was passed to ``abort``."""
    while not getattr(error, "_known_to_peers", False):
        if error.__cause__ is None:
            return False
        error = error.__cause__
    return True


class ConfigError(MoeCommError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class InputError(MoeCommError, ValueError):
    """A tensor has the wrong shape, dtype or device for the operation."""


class RoutingError(InputError):
    """Expert ids are out of range, or router logits are NaN or all -Inf for a token."""


class RankMismatch(MoeCommError):
    """Ranks of one group disagree: on hidden size, dtype, top-k, experts, or on the order of calls."""


class PeerRaised(MoeCommError):
    """Another rank raised an exception between two operations; the message has its type and text."""


class PeerError(MoeCommError):
    """Another rank cannot take part any more; this group is unusable afterwards."""


class PeerDied(PeerError):
    """A peer's process has ended."""


class PeerTimeout(PeerError):
    """A peer did not arrive before the deadline."""


FROM_PEERS = (PeerError, PeerRaised)
"""What a rank raises because of another one, which has the cause."""


class HeapError(MoeCommError, MemoryError):
    """Shared memory is exhausted or could not be reserved."""


class UnsupportedModel(MoeCommError, ValueError):
    """A model has no MoE block, or one whose structure is not known."""


class MissingDependency(MoeCommError, ImportError):
    """An optional package is needed for this; the message names the extra that brings it."""


class KernelError(MoeCommError):
    """A GPU kernel could not be compiled, loaded or launched; its text has the compiler's or the driver's words."""


class NonFiniteLoss(MoeCommError, ArithmeticError):
    """The loss or its gradient is NaN or infinite; raised on every rank before the weights change."""


class GradientMismatch(MoeCommError):
    """Gradients of experts and of replicated parameters do not belong together; raised before the optimizer steps."""


class UnsettledStep(MoeCommError, ArithmeticError):
    """A step gave bad numbers, and other bad ones when it was run again; the message names the ranks that differed."""


class CorruptPayload(MoeCommError):
    """Rows that arrived are not those that were sent, by their checksums."""


class CheckpointError(MoeCommError):
    """A checkpoint could not be written, or does not hold what is wanted from it; the message names the file."""


class CorruptFile(MoeCommError):
    """A file on disk is truncated, or its bytes do not match their checksum; the message names the file."""
