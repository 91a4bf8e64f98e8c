"""Hooks of models that are served, and their managers of continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any, Protocol, Self, TypeVar

from torch import nn

from moe_comm.integrations.hugging_face.cut_batch import Managers, divided
from moe_comm.integrations.hugging_face.swap import EPExperts

T = TypeVar("T")


class Batches(Protocol):
    """What cuts batches into micro-batches.

    Attributes:
        count: most micro-batches of a batch.
    """

    count: int

    def smallest(self) -> int: ...

    def generate(self, model: nn.Module, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...


class ModelHooks:
    """Calls functions before and after forward passes, and remembers managers of continuous batching.

    Args:
        models: with all their experts, each also inside of inner models.
        before: forward pre-hook.
        after: forward hook, which is also called after an exception and after Ctrl-C, without the results.
        batches: cuts batches; None: they are not cut.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        before: Callable[..., None],
        after: Callable[..., None],
        batches: Batches | None = None,
    ) -> None:
        self._after, self._batches = after, batches
        self._handles: list[Any] = []
        self._managers: list[Any] = []
        self._patched: list[tuple[nn.Module, str, Any]] = []
        for model in models:
            self._hook(model, before)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # of a model

    def _hook(self, model: nn.Module, before: Callable[..., None]) -> None:
        inside = [name for name, module in model.named_modules() if isinstance(module, EPExperts)]
        for name, module in model.named_modules():
            # The model, and inner ones with all experts that users may call.
            if all(one.startswith(f"{name}." if name else "") for one in inside):
                self._handles.append(module.register_forward_pre_hook(before, prepend=True))
                self._handles.append(module.register_forward_hook(self._after, always_call=True))
                self._patch(module, "_call_impl", partial(self._interruptible, module, module._call_impl))
                if (compiled := module._compiled_call_impl) is not None:
                    self._patch(module, "_compiled_call_impl", partial(self._interruptible, module, compiled))
            if self._batches is not None and hasattr(module, "generate"):
                self._patch(module, "generate", partial(self._batches.generate, module, module.generate))
            if hasattr(module, "init_continuous_batching"):
                # A bound method of the model inside adapters, if ``module`` is PEFT's wrapper of it.
                make: Any = module.init_continuous_batching
                self._patch(module, "init_continuous_batching", partial(self._make_manager, make))

    def _patch(self, module: nn.Module, name: str, value: Any) -> None:
        self._patched.append((module, name, vars(module).get(name)))
        vars(module)[name] = value

    def _interruptible(self, model: nn.Module, run: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Replace the call of a model: after Ctrl-C, torch runs no hooks, and the round would not end."""
        try:
            return run(*args, **kwargs)
        except Exception:
            raise
        except BaseException:
            self._after(model)
            raise

    def _make_manager(
        self,
        make: Callable[..., Any],
        config: Any = None,
        continuous_batching_config: Any = None,
        *args: Any,
        **more: Any,
    ) -> Any:
        """Replace ``init_continuous_batching`` of a model: remember the manager, and those of micro-batches."""
        config, cache, count = more.pop("generation_config", config), continuous_batching_config, 1
        if self._batches is not None:
            count = self._batches.count
            cache = divided(count, cache)
        manager = make(config, copy(cache), *args, **more)
        if manager not in self._managers:  # else it is kept for several calls of ``generate_batch``
            managers = [manager, *(make(config, copy(cache), *args, **more) for _ in range(count - 1))]
            self._managers += managers
            if self._batches is not None:
                Managers(managers, self._batches.smallest)
        return manager

    def hidden_errors(self) -> Iterator[BaseException]:
        """Yield the errors that ended the threads of managers, which hide them."""
        for manager in self._managers:
            try:
                error = getattr(getattr(manager, "background_thread_status", None), "fatal_error", None)
            except Exception as raised:
                error = raised
            if error is not None:
                yield error

    def stop_managers(self) -> None:
        """Stop the managers that still run: after the context, their calls of experts would be in no round."""
        for manager in reversed(self._managers):
            with suppress(Exception):
                if manager.is_running():
                    paused = getattr(manager.background_thread_status, "is_pause_requested", bool)
                    while paused():  # a manager that is paused does not stop
                        manager.background_thread_status.release_pause()
                    manager.stop(block=True, hard_stop=True)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        for module, name, before in self._patched:
            vars(module).pop(name, None)
            if before is not None:
                vars(module)[name] = before
