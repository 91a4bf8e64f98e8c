"""The state of this process's random number generators as JSON."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_comm.errors import CheckpointError


def rng_state() -> dict[str, Any]:
    """Return the state of torch's CPU generator, of the current GPU's if it is in use, and of Python's."""
    state: dict[str, Any] = {"torch": _text(torch.get_rng_state())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    version, words, gauss = random.getstate()
    state["python"] = [version, list(words), gauss]
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set the generators to the result of ``rng_state``.

    Raises:
        CheckpointError: ``state`` has another format.
    """
    try:
        version, words, gauss = state["python"]
        restored, cuda = _tensor(state["torch"]), state.get("cuda")
        if gauss is not None and not isinstance(gauss, float):
            raise ValueError("the cached number of Python's gauss() must be a float or null")
        previous = random.getstate()
        random.setstate((version, tuple(words), gauss))
        try:
            torch.set_rng_state(restored)
        except (TypeError, RuntimeError):
            random.setstate(previous)
            raise
        if cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_tensor(cuda))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"not a state of random number generators: {type(error).__name__}: {error}") from None


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
