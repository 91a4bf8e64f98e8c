"""What ranks tell each other about a checkpoint, and how a failure of one becomes the same error on all."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from moe_comm.errors import CheckpointError, MoeCommError

T = TypeVar("T")


class PeerLost(CheckpointError):
    """A collective of the checkpoint's group failed: a rank is gone, and the group is of no use any more."""


def agree(group: ProcessGroup | None, own: Callable[[], T]) -> list[T]:
    """Run ``own`` on every rank and return the results by rank; where it fails on one, all raise. Collective.

    Raises:
        CheckpointError: the same text on every rank, naming the ranks that failed.
    """
    answer: tuple[str, T | None]
    try:
        answer = ("", own())
    except Exception as error:
        answer = (describe(error), None)
    if group is None:
        answers = [answer]
    else:
        answers = [("", None)] * dist.get_world_size(group)
        try:
            dist.all_gather_object(answers, answer, group=group)
        except RuntimeError as error:
            raise PeerLost(lost(error)) from None
    failures = {rank: text for rank, (text, _) in enumerate(answers) if text}
    if failures:
        raise CheckpointError(together(failures))
    return [cast(T, value) for _, value in answers]


def run_torch(call: Callable[[], object]) -> None:
    """Call torch's ``save`` or ``load``, which tell every rank what failed on one.

    Raises:
        CheckpointError: for what torch raises, which is no Exception.
    """
    # It warns of a single process, which is no mistake here.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        call()
    except CheckpointException as error:
        failures: Mapping[int, tuple[BaseException, object]] = error.failures
        raise CheckpointError(together({rank: describe(cause) for rank, (cause, _) in failures.items()})) from None
    except RuntimeError as error:
        # What fails on a rank's own account it tells the others, as above: this is the exchange itself.
        raise PeerLost(lost(error)) from None
    except Exception as error:
        # Such as an error that cannot be sent: the others wait for it in vain.
        raise PeerLost(describe(error)) from None


def together(failures: Mapping[int, str]) -> str:
    """One text for what failed on several ranks; what all say alike is said once."""
    texts: dict[str, list[int]] = {}
    for rank, text in sorted(failures.items()):
        texts.setdefault(text, []).append(rank)
    if len(texts) == 1 and (len(failures) > 1 or next(iter(failures)) == 0):
        return next(iter(texts))
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in texts.items())


def describe(error: BaseException) -> str:
    """Our own errors speak for themselves; of any other the type and place matter too."""
    if isinstance(error, MoeCommError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({last[0].filename}:{last[0].lineno})" if last else ""
    return f"{type(error).__name__}: {error}{place}"


def lost(error: BaseException) -> str:
    return f"another rank is gone, or did not come before the deadline: {str(error).strip().splitlines()[0]}"
