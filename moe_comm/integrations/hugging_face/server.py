"""The server of ``transformers serve``, with a model that is in memory, in a thread of this process.

transformers' server asks its model manager for the model of each request. ``start`` replaces the class of the manager
while the server is built, by one that returns the model it is given. Requests, continuous batching, streaming and the
OpenAI-compatible API are those of transformers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from socket import socket
from typing import Any

import torch
from torch import Tensor

from moe_comm.errors import MissingDependency, UnsupportedModel, pip_install
from moe_comm.integrations.hugging_face.families import require_transformers

FORCE_S = 5.0
"""Time for open connections after the end of the server."""


def require_server() -> None:
    """Raise MissingDependency if transformers or a package that its server needs is not installed."""
    require_transformers()
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise MissingDependency(
            f"the server of transformers needs fastapi, uvicorn and openai; run: {pip_install('serve')}"
        )


class ModelServer:
    """``transformers serve`` in a thread, for one model.

    Args:
        model: a model of transformers.
        name: its name in requests, and the folder, or the name on the hub, of its tokenizer.
        listening: a socket that listens; the server closes it.
        settings: further options of ``transformers.cli.serve.Serve``.
        longest: tokens for which the KV cache of batched requests has space.
    """

    def __init__(
        self, model: Any, name: str, listening: socket, settings: Mapping[str, Any], longest: int | None = None
    ) -> None:
        from transformers import AutoProcessor

        self._model, self._stopping, self._longest = model, threading.Event(), longest
        self._managers: list[Any] = []
        processor = AutoProcessor.from_pretrained(name)
        self._before = {one: vars(model).get(one) for one in ("generate", "init_continuous_batching")}
        model.generate = partial(_generate, model.generate, self._stopping)
        model.init_continuous_batching = partial(self._make_manager, model.init_continuous_batching)
        self._serve = _build(model, processor, name, listening, settings)

    @property
    def ended(self) -> str:
        """The reason why the server, or its continuous batching, has ended without ``close``; "" if it runs."""
        for manager in self._managers:
            if (error := manager.background_thread_status.fatal_error) is not None:
                return f"the continuous batching of transformers has ended with {type(error).__name__}: {error}"
        return (
            "" if self._serve._thread.is_alive() else "the server of transformers has ended unexpectedly; see its log"
        )

    def close(self) -> None:
        """End the server. Requests end with the tokens that they have so far, or with an error if they are batched."""
        self._stopping.set()
        for manager in self._managers:
            if manager.is_running():
                manager.stop(timeout=FORCE_S, hard_stop=True)
        self._serve.kill_server()
        self._serve.server.force_exit = True  # connections that are still open
        self._serve._thread.join(FORCE_S)
        for name, value in self._before.items():
            if value is None:
                delattr(self._model, name)
            else:
                setattr(self._model, name, value)

    def _make_manager(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace ``init_continuous_batching`` of the model: remember the manager, which the server does not stop."""
        manager = make(*args, **kwargs)
        manager.add_request = partial(self._add_request, manager, manager.add_request)
        self._managers.append(manager)
        return manager

    def _add_request(
        self, manager: Any, add: Callable[..., Any], input_ids: Sequence[int], request_id: str, **options: Any
    ) -> Any:
        """Replace ``add_request`` of a manager: refuse a request that its cache cannot hold, which would end it."""
        prompt, new = len(input_ids), options.get("max_new_tokens") or 0
        if prompt > 0 and (self._longest is None or prompt + new <= self._longest):
            return add(input_ids, request_id, **options)
        manager.output_router.result_handlers.pop(request_id, None)  # transformers has added one
        if prompt == 0:
            raise _refused("the prompt has no tokens")
        raise _refused(
            f"the prompt has {prompt} tokens and max_tokens is {new}, but the KV cache has space for {self._longest}. "
            "Shorten the prompt, lower max_tokens, or start the server with more --kv-tokens"
        )


def _refused(detail: str) -> Exception:
    from fastapi import HTTPException

    return HTTPException(status_code=400, detail=detail)


def _generate(generate: Callable[..., Any], stopping: threading.Event, *args: Any, **kwargs: Any) -> Any:
    """Replace ``generate`` of the model: end it between two forward passes when the server ends.

    Raises:
        HTTPException: the prompt is empty. The model would raise, and an exception of a model ends all ranks.
    """
    if stopping.is_set():
        raise RuntimeError("the server ends")
    if kwargs["input_ids"].shape[1] == 0:
        raise _refused("the prompt has no tokens")

    def stop(ids_BS: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.full((ids_BS.shape[0],), stopping.is_set(), dtype=torch.bool, device=ids_BS.device)

    return generate(*args, stopping_criteria=[stop], **kwargs)


def _build(model: Any, processor: Any, name: str, listening: socket, settings: Mapping[str, Any]) -> Any:
    """Return a running server of transformers for ``model``.

    Raises:
        UnsupportedModel: this version of transformers loads the model by itself.
    """
    import transformers
    from transformers.cli import serve
    from transformers.cli.serving import model_manager

    made = []

    class Loaded(model_manager.ModelManager):
        def load_model_and_processor(self, model_id_and_revision: str, *_: Any, **options: Any) -> tuple[Any, Any]:
            made.append(self)
            if model_id_and_revision != self.process_model_name(name):
                raise ValueError(f"this server has only the model {name}; got {model_id_and_revision}")
            if report := options.get("progress_callback"):
                report({"status": "ready", "model": model_id_and_revision, "cached": True})
            return model, processor

        @staticmethod
        def get_gen_models(cache_dir: str | None = None) -> list[dict[str, Any]]:  # type: ignore[override]
            return [{"id": name, "object": "model", "owned_by": "", "created": 0}]

    class Serve(serve.Serve):
        def start_server(self) -> None:
            if not made:
                raise UnsupportedModel(
                    f"the server of transformers {transformers.__version__} loads the model by itself; moe_comm knows "
                    "those of 5.16.1 to 5.23"
                )
            run = self.server.serve
            self._thread = threading.Thread(
                target=lambda: asyncio.run(run(sockets=[listening])), name="transformers serve", daemon=True
            )
            self._thread.start()

    with _replaced(model_manager, "ModelManager", Loaded):
        return Serve(force_model=name, non_blocking=True, **settings)


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
