"""Divide the sequences of ``generate``, and the requests of continuous batching, into micro-batches.

    generate(ids_BS)        rows 0 1 ─▶ generate ─╮       manager.add_request   ─▶ manager 0 ─╮
                            rows 2 3 ─▶ generate ─┴▶ rows                       ─▶ manager 1 ─┴▶ results

Each part is one call of transformers in its own thread, with its own KV cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from moe_comm.errors import ConfigError

SMALLEST_BATCH = 2
ROWS_DEPEND = (
    "do_sample",  # draws of all rows are from one generator
    "return_dict_in_generate",
    "penalty_alpha",
    "prompt_lookup_num_tokens",
    "max_time",
    "cache_implementation",  # other caches than the default may be shared between calls
)
"""Settings of ``generate`` with which rows are not generated independently of each other, or not merged here."""


def num_parts(batch: int, most: int, smallest: int) -> int:
    """Return the number of micro-batches for ``batch`` sequences: 1 if they are fewer than ``smallest``, else at most
    ``most``, with at least half of ``smallest`` each."""
    return 1 if batch < smallest else max(1, min(most, 2 * batch // smallest))


def cut_generate(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], most: int, smallest: int
) -> list[dict[str, Any]]:
    """Return the arguments of ``generate`` for each micro-batch; one if the batch cannot be cut with equal results."""
    whole = dict(kwargs) if not args else {"inputs": args[0], **kwargs}
    ids = whole.get("inputs", whole.get("input_ids"))
    if len(args) > 1 or not isinstance(ids, Tensor) or ids.dim() != 2 or not _rows_are_independent(model, whole):
        return [whole]
    batch = ids.shape[0]
    parts = num_parts(batch, most, smallest)
    of_rows = {name for name, value in whole.items() if isinstance(value, Tensor)}
    if parts == 1 or any(not whole[name].dim() or whole[name].shape[0] != batch for name in of_rows):
        return [whole]
    cut: list[dict[str, Any]] = []
    bounds = [batch * part // parts for part in range(parts + 1)]
    for low, high in pairwise(bounds):
        cut.append({name: value[low:high] if name in of_rows else value for name, value in whole.items()})
    return cut


def merge(model: Any, arguments: Mapping[str, Any], results: Sequence[Tensor]) -> Tensor:
    """Return the sequences of all micro-batches, padded to the longest, as one call of ``generate`` returns them."""
    pad, ends = _setting(model, arguments, "pad_token_id"), _setting(model, arguments, "eos_token_id")
    if pad is None and ends is not None:
        pad = torch.as_tensor(ends, device="cpu").flatten()[0].item()
    length = max(one.shape[1] for one in results)
    shape = sum(one.shape[0] for one in results), length
    merged = torch.full(shape, pad or 0, dtype=results[0].dtype, device=results[0].device)
    row = 0
    for one in results:
        merged[row : row + one.shape[0], : one.shape[1]] = one
        row += one.shape[0]
    return merged


def _rows_are_independent(model: Any, arguments: Mapping[str, Any]) -> bool:
    from transformers import GenerationConfig

    if any(_setting(model, arguments, name) for name in ROWS_DEPEND):
        return False
    if any((_setting(model, arguments, name) or 1) > 1 for name in ("num_beams", "num_return_sequences")):
        return False
    known = vars(GenerationConfig())
    return all(
        value is None or isinstance(value, Tensor) or name == "generation_config" or name in known
        for name, value in arguments.items()
    )


def _setting(model: Any, arguments: Mapping[str, Any], name: str) -> Any:
    """Return a setting of ``generate``: an argument, or of the configuration that is passed, or of the model's."""
    if arguments.get(name) is not None:
        return arguments[name]
    for config in (arguments.get("generation_config"), getattr(model, "generation_config", None)):
        if (value := getattr(config, name, None)) is not None:
            return value
    return None


def divided(count: int, cache: Any) -> Any:
    """Return the ``ContinuousBatchingConfig`` of each of ``count`` managers, which divide the KV cache.

    Raises:
        ConfigError: the size of the cache is not set.
    """
    if cache is None or cache.num_blocks is None:
        raise ConfigError(
            "micro-batches divide the KV cache of continuous batching, so its size must be set: pass a "
            "ContinuousBatchingConfig with num_blocks and max_batch_tokens"
        )
    if cache.num_blocks < count:
        raise ConfigError(f"num_blocks must be at least the number of micro-batches, {count}; got {cache.num_blocks}")
    part = copy(cache)
    part.num_blocks //= count
    return part


class Managers:
    """Managers of continuous batching that divide their requests. The first one is the caller's.

    Its methods act on all, and its results are those of all. A request goes to the manager with the fewest, of as many
    managers as ``num_parts`` returns for the requests that run.

    Args:
        smallest: returns the fewest requests that are divided.
    """

    def __init__(self, managers: Sequence[Any], smallest: Callable[[], int]) -> None:
        self._managers, self._smallest = managers, smallest
        self._of: dict[str, int] = {}  # requests that run
        self._own: dict[str, list[Any]] = {}
        first = managers[0]
        for number, manager in enumerate(managers):
            manager.output_router = _router(manager.output_router, first.output_router, self._of)
            assert number == 0 or not manager.is_running()
        for name in ("add_request", "cancel_request", "start", "stop", "pause"):
            self._own[name] = [getattr(manager, name) for manager in managers]
            setattr(first, name, getattr(self, f"_{name}"))

    def _add_request(self, input_ids: Any, request_id: str | None = None, *args: Any, **kwargs: Any) -> str | None:
        first = self._managers[0]
        with first._request_lock:
            if request_id is None:
                request_id = f"req_{first._request_counter}"
                first._request_counter += 1
            running = Counter(self._of.values())
            parts = num_parts(running.total() + 1, len(self._managers), self._smallest())
            number = min(range(parts), key=lambda one: running[one])
            self._of[request_id] = number
        added: str | None = self._own["add_request"][number](input_ids, request_id, *args, **kwargs)
        if added is None:
            self._of.pop(request_id, None)
        return added

    def _cancel_request(self, request_id: str) -> None:
        number = self._of.pop(request_id, None)
        for cancel in self._own["cancel_request"] if number is None else [self._own["cancel_request"][number]]:
            cancel(request_id)

    def _start(self) -> None:
        for start in self._own["start"]:
            start()

    def _stop(self, *args: Any, **kwargs: Any) -> None:
        for stop in reversed(self._own["stop"]):  # the first one restores the attention
            stop(*args, **kwargs)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        with ExitStack() as stack:
            for pause in self._own["pause"]:
                stack.enter_context(pause())
            yield


def _router(own: Any, first: Any, running: dict[str, int]) -> Any:
    """Return a router that delivers results as ``first``, and removes requests that have ended from ``running``."""

    class Router(type(own)):  # type: ignore[misc]
        def deliver(self, output: Any) -> None:
            self._remove(output)
            super().deliver(output)

        def deliver_batch(self, outputs: list[Any]) -> None:
            for output in outputs:
                self._remove(output)
            super().deliver_batch(outputs)

        def _remove(self, output: Any) -> None:
            if output.is_finished() or output.error is not None:
                running.pop(output.request_id, None)

    router = Router()
    for name in ("output_queue", "result_handlers", "_lock"):
        setattr(router, name, getattr(first, name))
    return router
