"""The padding of a call of a Hugging Face model, for its experts.

Experts modules of transformers see flat tokens and no mask. Hooks before and after each model that contains them keep
the model's ``attention_mask`` while its forward pass runs:

    model(ids_BS, attention_mask)  ──before──▶ positions of the real tokens
        layers ─▶ experts(x_TD, ..)            T = B * S: removes padding
                   ◀──after──                  the mask of the call around this one, or none

In a recomputation by activation checkpointing, the model is not called. Its backward node tells which call it belongs
to: nodes are numbered in the order of their creation.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moe_comm.errors import InputError
from moe_comm.layers.moe.padding import RealTokens
from moe_comm.layers.parallel.recompute import recomputing

KEPT = 64
"""Forward passes with padding whose backward pass may still recompute layers."""


class PaddingMask:
    """The real tokens of the running call of a model. Use ``of`` to create it.

    Attributes:
        traced: while ``torch.compile`` traces, the mask of the running call, if it has one value for each token.
    """

    def __init__(self) -> None:
        self.traced: Tensor | None = None
        # By thread: models, tokens, real ones, first node. Not a threading.local, which cannot be copied.
        self._of_threads: dict[int, list[tuple[str, int, RealTokens | None, int]]] = {}
        self._past: deque[tuple[int, int, int, RealTokens]] = deque(maxlen=KEPT)  # first node, end, tokens, real ones
        self._forgotten = 0  # nodes before this one may belong to a call that is no longer kept

    @property
    def _calls(self) -> list[tuple[str, int, RealTokens | None, int]]:
        return self._of_threads.get(threading.get_ident(), [])

    @classmethod
    def of(cls, model: nn.Module, experts: Iterable[str]) -> tuple[PaddingMask, list[RemovableHandle]]:
        """Hook the models of transformers in ``model`` that contain the modules ``experts``.

        Returns:
            the mask, and the hooks.
        """
        from transformers import PreTrainedModel

        mask, handles = cls(), []
        names = {name[:end] for name in experts for end in _ends(name)}
        for name in sorted(names):
            module = model.get_submodule(name)
            parameters = list(inspect.signature(module.forward).parameters)
            if not (isinstance(module, PreTrainedModel) and "attention_mask" in parameters):
                continue
            before, after = _Before(mask, name, tuple(parameters)), _After(mask, name)
            # First of all hooks: swapped attention removes the mask in its own.
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(after, always_call=True))
        return mask, handles

    @torch._disable_dynamo
    def real_tokens(self, num_tokens: int) -> RealTokens | None:
        """Return the real tokens of the running call; None if it has no padding, or not ``num_tokens`` tokens.

        Raises:
            InputError: the tokens are recomputed, and their forward pass is too long ago.
        """
        if calls := self._calls:
            _, tokens, real, _ = calls[-1]
            return real if tokens == num_tokens else None
        if not self._past or not recomputing():
            return None
        node: Any = torch._C._current_autograd_node()
        number = node._sequence_nr()
        found = [call for call in self._past if call[0] <= number < call[1]]
        if not found and number < self._forgotten:
            raise InputError(
                f"activation checkpointing recomputes a forward pass with padding after {KEPT} others; run backward "
                "earlier"
            )
        if not found:
            return None
        _, _, tokens, real = max(found, key=lambda call: call[0])  # the innermost model
        return real if tokens == num_tokens else None

    @torch._disable_dynamo
    def begin(self, name: str, inputs: dict[str, Any]) -> None:
        """Begin the call of model ``name``. A call of the same model that has not ended was interrupted."""
        self.end(name)
        tokens, real = _real_tokens(inputs)
        # A model may pass its inner model another form of mask for the same tokens, such as one per kind of attention.
        calls = self._of_threads.setdefault(threading.get_ident(), [])
        if real is None and calls and calls[-1][1] == tokens:
            real = calls[-1][2]
        calls.append((name, tokens, real, torch.autograd._get_sequence_nr()))

    @torch._disable_dynamo
    def end(self, name: str) -> None:
        """End the call of model ``name``, and all calls inside of it."""
        calls = self._calls
        for index, (other, tokens, real, first) in enumerate(calls):
            if other == name:
                end = torch.autograd._get_sequence_nr()
                if real is not None and torch.is_grad_enabled() and end > first:
                    if len(self._past) == KEPT:
                        self._forgotten = max(self._forgotten, self._past[0][1])
                    self._past.append((first, end, tokens, real))
                del calls[index:]
                if not calls:  # the thread may have ended
                    del self._of_threads[threading.get_ident()]
                return


class _Before:
    """Forward pre-hook of a model. A class, because hooks must be copied and pickled with their model."""

    def __init__(self, mask: PaddingMask, name: str, parameters: tuple[str, ...]) -> None:
        self._mask, self._name, self._parameters = mask, name, parameters

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        if not torch.compiler.is_dynamo_compiling():
            self._mask.begin(self._name, inputs)
        elif (mask := _traced_mask(inputs)) is not None:
            self._mask.traced = mask


class _After:
    """Forward hook of a model, also called after an exception."""

    def __init__(self, mask: PaddingMask, name: str) -> None:
        self._mask, self._name = mask, name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            self._mask.traced = None
        else:
            self._mask.end(self._name)


def _traced_mask(inputs: dict[str, Any]) -> Tensor | None:
    """Return a 2-D mask of the tokens of a call without a key-value cache."""
    tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    tokens = inputs.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, Tensor) or not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    return mask if mask.shape == tokens.shape[:2] else None


def _ends(name: str) -> list[int]:
    """Return the lengths of the names of all modules around the module ``name``."""
    return [0, *(index for index, letter in enumerate(name) if letter == ".")]


def _real_tokens(inputs: dict[str, Any]) -> tuple[int, RealTokens | None]:
    """Return the number of tokens of a call, and the real ones if a 2-D mask marks padding."""
    tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    tokens = inputs.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return -1, None
    batch, length = tokens.shape[:2]
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] < length:
        return batch * length, None
    first = _first_column(inputs, mask.shape[1] - length)
    return batch * length, None if first is None else RealTokens.of(mask[:, first : first + length] != 0)


def _first_column(inputs: dict[str, Any], last: int) -> int | None:
    """Return the column of the mask for the first token of a call; None if it is not known.

    Columns are positions in the key-value cache. They end with the tokens of the call, at ``last``, unless the mask is
    as long as a cache of fixed size.
    """
    if not last:
        return 0
    position, cache = inputs.get("cache_position"), cast(Any, inputs.get("past_key_values"))
    if isinstance(position, Tensor) and position.numel():
        first = int(position.flatten()[0])
    elif hasattr(cache, "get_seq_length"):
        first = int(cache.get_seq_length())
    else:
        first = last
    return first if 0 <= first <= last else None
