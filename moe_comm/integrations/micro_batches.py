"""``MicroBatches``: the forward passes that a rank runs at the same time. See ``serving``.

Each has a number, and its own rounds, process group and dispatcher, so calls of one do not wait for those of another:

    attention rank   attention 0 │ attention 1 │ attention 0 │ attention 1 │ ...
    expert rank                  │   experts 0 │   experts 1 │   experts 0 │ ...
    in flight                 rows 0 ═▶     rows 1 ═▶
                                          ◀═ results 0    ◀═ results 1

A rank computes for one micro-batch at a time: a forward pass holds a lock except while it waits for experts, and so do
the experts of a rank except while they wait for rows.

With one micro-batch, forward passes of several threads run one after the other.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from moe_comm.dispatch.expert_call import ExpertCall
from moe_comm.errors import ConfigError, MoeCommError, known_to_peers
from moe_comm.integrations.hugging_face.cut_batch import SMALLEST_BATCH, cut_generate, merge
from moe_comm.integrations.hugging_face.swap import EPExperts, swapped_experts
from moe_comm.integrations.model_hooks import ModelHooks
from moe_comm.integrations.recovery import Recovery
from moe_comm.integrations.rounds import POLL_S, Rounds, check_no_gradients
from moe_comm.topology import Placement

T = TypeVar("T")
_NOTHING = nullcontext()


class _Running(threading.local):
    """Forward passes of this thread.

    Attributes:
        models: whose forward passes run, the outermost first.
        handled: the exception that was handled before the first.
        number: of the micro-batch whose round runs; -1 without one.
        last: number of the last one.
        computes: whether this thread holds the lock of the rank.
        is_part: whether ``generate`` of a micro-batch runs.
    """

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.handled: BaseException | None = None
        self.number = -1
        self.last = 0
        self.computes = self.is_part = False


class MicroBatches:
    """The micro-batches of the models of one group, in this process.

    Attributes:
        count: number of micro-batches.
        smallest_batch: the fewest sequences of a batch that is cut.
        error: the first error that has ended the context before all ranks have left it.
        ended: whether this rank has left the context; copies of its models still refer to it.
        wanted: the placement to which this rank moves the experts.
    """

    def __init__(self, models: Sequence[nn.Module], recovery: Recovery) -> None:
        self.error: BaseException | None = None
        self.ended = False
        self.wanted: Placement | None = None
        self._refused: Placement | None = None  # for ranks that have died since
        self._recovery, self._models = recovery, models
        self._experts: list[EPExperts] = [one for model in models for one in swapped_experts(model).values()]
        self._changed = threading.Condition()
        self.count, self.smallest_batch = recovery.count, SMALLEST_BATCH
        self._workers = ThreadPoolExecutor(max(1, self.count - 1), "moe_comm micro-batch")
        self._users = [0] * recovery.count  # threads that run, or want to run, each micro-batch
        self._lock = threading.Lock() if recovery.count > 1 else None
        self._running = _Running()
        self.rounds = [Rounds(models, recovery, number, self) for number in range(recovery.count)]
        for experts in self._experts:
            experts.rounds = self
        self._numbers: dict[int, list[int]] = {}  # of the models that contain a module
        for index, model in enumerate(models):
            for module in model.modules():
                self._numbers.setdefault(id(module), []).append(index)
        self._hooks = ModelHooks(models, self._before, self._after, self if self.count > 1 else None)
        for one in self.rounds:
            one.start()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # ``Rounds.call`` refuses the experts of copies

    @property
    def number(self) -> int:
        """The micro-batch of this thread."""
        return max(self._running.number, 0)

    @property
    def runs_model(self) -> bool:
        """Whether a forward pass runs in this thread."""
        return bool(self._running.models)

    def enter(self, number: int) -> None:
        """Let this thread take part in the rounds of micro-batch ``number`` only."""
        self._running.number = number

    # --- in the threads that run a model ---

    def call(self, experts: EPExperts, run: Callable[..., T], arguments: tuple[Tensor, Tensor, Tensor]) -> T:
        """Call ``Rounds.call`` of the micro-batch of this thread, or of the one with the fewest threads."""
        if self.ended:  # a copy of a model, after the context
            return run(*arguments)
        running = self._running
        if running.number < 0:
            self._enter_any()
        elif self.rounds[running.number].runs_empty():
            return run(*arguments)
        computed = self._lock is not None and self._stop_computing()
        try:
            return self.rounds[running.number].call(experts, run, arguments)
        finally:
            self._leave()
            if computed:
                self._compute()

    def _enter_any(self) -> None:
        """Take the micro-batch with the fewest threads for this thread."""
        running = self._running
        with self._changed:
            numbers = range(len(self._users))
            running.number = min(numbers, key=lambda one: (self._users[one], one != running.last, one))
            running.last = running.number
            self._users[running.number] += 1

    def computing(self, call: ExpertCall) -> AbstractContextManager[Any]:
        """Return the context in which experts compute the rows of ``call``."""
        # Executors that overlap wait for rows of other ranks, which may compute another micro-batch.
        alone = self._lock is not None and type(call) is ExpertCall and call.handle.num_rows
        return self._lock if alone and self._lock is not None else _NOTHING

    def _leave(self) -> None:
        """Release the micro-batch of this thread, unless its round goes on."""
        running = self._running
        if running.number >= 0 and not self.rounds[running.number].owns():
            with self._changed:
                self._users[running.number] -= 1
            running.number = -1

    def _compute(self) -> None:
        if self._lock is not None and not self._running.computes:
            self._lock.acquire()
            self._running.computes = True

    def _stop_computing(self) -> bool:
        computes, self._running.computes = self._running.computes, False
        if computes and self._lock is not None:
            self._lock.release()
        return computes

    def _runs_empty(self) -> bool:
        number = self._running.number
        return self.ended or (number >= 0 and self.rounds[number].runs_empty())

    @torch._disable_dynamo
    def _before(self, model: nn.Module, _: Any) -> None:
        """Forward pre-hook. A call of the same model that has not ended was interrupted."""
        if self._runs_empty():  # of an adapter around experts; of a copy, after the context
            return
        models = self._running.models
        if model in models:
            del models[models.index(model) :]
        if not models:
            self._running.handled = sys.exc_info()[1]
        models.append(model)
        check_no_gradients(model.parameters())
        if len(models) == 1:  # now, so that the other ranks get ready while this one computes the first layers
            if self._running.number < 0:
                self._enter_any()
            self.rounds[self._running.number].begin(self._numbers[id(model)])
        self._compute()

    @torch._disable_dynamo
    def _after(self, model: nn.Module, *_: Any) -> None:
        """Forward hook, also called after an exception."""
        if self._runs_empty():
            return
        models = self._running.models
        if model in models:
            del models[models.index(model) :]
        if models:
            return
        self._stop_computing()
        self._finish()
        error = sys.exc_info()[1]
        # One that was handled before the call, in whose ``except`` block the caller runs the model, is not of the call.
        if error is not None and error is not self._running.handled:
            self.tell(error)

    def _finish(self) -> None:
        """Complete the round of this thread without tokens."""
        if self._running.number >= 0:
            try:
                self.rounds[self._running.number].finish()
            finally:
                self._leave()

    # --- batches ---

    def smallest(self) -> int:
        """Return ``smallest_batch``, which may change."""
        return self.smallest_batch

    def generate(self, model: nn.Module, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace ``generate`` of a model: run micro-batches at the same time, the first one in this thread."""
        running = self._running
        parts = []
        if not running.is_part and not running.models:
            parts = cut_generate(model, args, kwargs, self.count, self.smallest_batch)
        if len(parts) < 2:
            return generate(*args, **kwargs)
        run, context = partial(self._part, generate), _context()
        futures = [self._workers.submit(copy_context().run, run, context, part) for part in parts[1:]]
        try:
            results = [run(nullcontext, parts[0]), *(future.result() for future in futures)]
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C: the others would go on
                self.tell(error)
            wait(futures)
            raise
        return merge(model, parts[0], results)

    def _part(self, generate: Callable[..., Any], context: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        self._running.is_part = True
        try:
            with context():
                return generate(**arguments)
        finally:
            self._running.is_part = False

    # --- placements ---

    def place(self, placement: Placement) -> None:
        """Move the experts of all models before the next round. Called on one rank; returns when it is done."""
        if any(experts._modules for experts in self._experts):
            raise ConfigError("experts with adapters cannot move to other ranks")
        if self._running.number >= 0:
            raise ConfigError("experts cannot move during a forward pass; change the placement between two")
        with self._changed:
            while self.wanted is not None:
                self._changed.wait(POLL_S)
                self.check()
            self.wanted = placement
        for one in self.rounds:
            one.notify()
        with self._changed:
            while self.wanted is placement:
                self._changed.wait(POLL_S)
                self.check()
            if self._refused is placement:
                self._refused = None
                raise ConfigError("a rank died before the experts moved; pass a placement for the other ranks")

    def moved(self, own: bool) -> None:
        """Continue with another placement. own: it is ``wanted``."""
        if own:
            with self._changed:
                self.wanted = None
                self._changed.notify_all()

    def refuse_wanted(self) -> None:
        """Let ``place`` raise if its placement is not for the present ranks."""
        with self._changed:
            if self.wanted is not None and self.wanted.world != self._recovery.channels[0].world:
                self.wanted, self._refused = None, self.wanted
                self._changed.notify_all()

    # --- errors and the end of the context ---

    def check(self) -> None:
        """Raise the error that has ended the context, if any."""
        error = self.error
        if isinstance(error, MoeCommError):
            raise type(error)(*error.args) from error
        if error is not None:
            raise error

    def tell(self, error: BaseException) -> None:
        """Report an error of this rank to the others in all micro-batches, unless they know it."""
        if not known_to_peers(error):
            for one in self.rounds:
                one.tell(error)

    def tell_hidden(self) -> None:
        """Report the errors that managers hide."""
        for error in self._hooks.hidden_errors():
            self.tell(error)

    def fail(self, error: BaseException, number: int) -> None:
        """End all micro-batches, as ``number`` has failed."""
        with self._changed:
            self.error = self.error or error
        for one in self.rounds:
            if one is not self.rounds[number]:
                one.tell(error)

    def close(self, error: BaseException | None) -> None:
        """Take part until all ranks have left the context, or until an error. ``error``: that has left it here."""
        with suppress(Exception):
            self._stop_computing()
            self._finish()  # of a call that Ctrl-C has interrupted
        if error is not None:
            self.tell(error)
        try:
            self._hooks.stop_managers()
            self._close_rounds()
        except BaseException as interrupt:
            self.tell(interrupt)
            self._close_rounds()
            raise
        finally:
            self._recovery.decline()
            self._detach()

    def _close_rounds(self) -> None:
        for one in reversed(self.rounds):  # the first one last: then all ranks have ended the others
            one.close()

    def _detach(self) -> None:
        self.ended = True
        self._workers.shutdown()
        self._hooks.remove()
        for experts in self._experts:
            experts.rounds, experts.dispatchers = None, experts.dispatchers[:1]
        if self.error is None:
            self._recovery.close()


def _context() -> Callable[[], AbstractContextManager[None]]:
    """Return what makes contexts with the modes of torch of this thread, for other ones."""
    inference, grad, device = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), "cpu"
    autocast, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    @contextmanager
    def context() -> Iterator[None]:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), torch.autocast(device, dtype, autocast):
            yield

    return context
