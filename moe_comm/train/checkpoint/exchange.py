"""Exchanges between ranks in which the failure of one rank becomes the same error on all ranks."""

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


SOME_RANK = "another rank has failed or did not join in time"


class PeerLost(CheckpointError):
    """A collective of the checkpoint's group failed: a rank has failed, and the group is unusable."""


def gather_or_raise(group: ProcessGroup | None, call: Callable[[], T]) -> list[T]:
    """Run ``call`` on every rank, and return the results of all ranks. If it fails on one, all raise. Collective.

    Raises:
        CheckpointError: with the same message on every rank, which names the ranks that failed.
    """
    answer: tuple[str, T | None]
    try:
        answer = ("", call())
    except Exception as error:
        answer = (describe_error(error), None)
    if group is None:
        answers = [answer]
    else:
        answers = [("", None)] * dist.get_world_size(group)
        try:
            dist.all_gather_object(answers, answer, group=group)
        except RuntimeError as error:
            raise PeerLost(lost_message(error)) from None
    failures = {rank: text for rank, (text, _) in enumerate(answers) if text}
    if failures:
        raise CheckpointError(merge_failures(failures))
    return [cast(T, value) for _, value in answers]


def run_torch(call: Callable[[], object]) -> None:
    """Call torch's ``save``, which sends failures of a rank to all ranks.

    Raises:
        CheckpointError: converted from torch's CheckpointException, which is not an Exception.
    """
    # Torch warns about a single process, which is valid here.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        call()
    except CheckpointException as error:
        failures: Mapping[int, tuple[BaseException, object]] = error.failures
        raise CheckpointError(
            merge_failures({rank: describe_error(cause) for rank, (cause, _) in failures.items()})
        ) from None
    except RuntimeError as error:
        # Local failures raise CheckpointException, as above. So the exchange itself has failed.
        raise PeerLost(lost_message(error)) from None
    except Exception as error:
        # For example an error that cannot be pickled. The other ranks still wait for this one in the exchange.
        raise PeerLost(describe_error(error)) from None


def merge_failures(failures: Mapping[int, str]) -> str:
    """Return one message for the failures of several ranks. Equal messages are merged."""
    texts: dict[str, list[int]] = {}
    for rank, text in sorted(failures.items()):
        texts.setdefault(text, []).append(rank)
    # One message from several ranks, or from rank 0, needs no rank number.
    if len(texts) == 1 and (len(failures) > 1 or next(iter(failures)) == 0):
        return next(iter(texts))
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in texts.items())


def describe_error(error: BaseException) -> str:
    """Return the message of an error. Errors of other libraries also get their type and location."""
    if isinstance(error, MoeCommError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1:]
    location = f" ({last[0].filename}:{last[0].lineno})" if last else ""
    return f"{type(error).__name__}: {error}{location}"


def lost_message(error: BaseException) -> str:
    return f"{SOME_RANK}: {str(error).strip().splitlines()[0]}"
