"""Rounds: calls of the experts of all layers by all ranks, of which any number runs the model. See ``serving``.

The experts of all layers are called in *rounds*, in which every rank takes part. A rank that runs the model calls the
experts from its forward pass. The other ranks call them without tokens, from a thread, and compute the rows that they
receive:

    rank 0   vote: work    layer 0 ─ experts    layer 1 ─ experts    vote: work ...
    rank 1   vote: idle              experts              experts    vote: work    layer 0 ─ experts ...

A vote precedes each round. It is an all-gather of two words: what each rank does next, and the kind of round that it
needs, which is a model and the dtype of autocast. Ranks that need another kind take part without tokens. Without work
on any rank there is no round, and the ranks vote again after a pause.

Calls of a forward pass that skips layers, or raises, are completed without tokens. So a round always calls all experts
of the model, in the order of its modules, once each.

``MicroBatches`` has rounds for each micro-batch, so that a rank can run several forward passes at a time.

If a rank dies, the others can go on (``Recovery``). They may be in different calls then: the last call of a rank may
have ended before that of another one. All ranks repeat the calls from the first that a rank has not ended, without
tokens where they have their results.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from moe_comm.comm.agree import gather_texts
from moe_comm.comm.channel import needs_report, raised_text
from moe_comm.errors import ConfigError, PeerError, PeerRaised, mark_known
from moe_comm.integrations.hugging_face.swap import EPExperts, unwrapped_name
from moe_comm.integrations.recovery import Recovery
from moe_comm.topology import Placement

T = TypeVar("T")
_Tensors = tuple[Tensor, Tensor, Tensor]
IDLE, WORK, LEFT, CHANGE, ERROR = range(5)
"""What a rank votes for: another rank may have work; a round; it has left the context; another placement of the
experts; it has failed."""
AUTOCAST = (None, torch.bfloat16, torch.float16)
"""Dtypes of autocast."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 1e-3, 16e-3
"""Limits of the pause between votes while no rank has work."""
POLL_S = 10e-3
"""Interval at which the thread looks whether this rank still runs the model."""
GRACE, MOST_ROUNDS = 2.0, 2.0
"""The thread votes once the last round is ``GRACE`` times longer ago than the usual time between two rounds, but after
at most ``MOST_ROUNDS`` times the duration of a round: the other ranks wait for it."""
SHORTEST_GRACE_S = 0.5e-3


@dataclass(eq=False)
class _Model:
    """The experts of a model in the order of its modules, as they are called, and the number of experts per token."""

    calls: list[tuple[EPExperts, nn.Module]]
    top_k: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> _Model:
        calls = []
        for name, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, EPExperts):
                outer = model.get_submodule(unwrapped_name(name))  # with adapters
                calls.append((module, outer))
        return cls(calls)


class Parent(Protocol):
    """What rounds need of ``MicroBatches``."""

    wanted: Placement | None

    @property
    def runs_model(self) -> bool: ...

    def enter(self, number: int) -> None: ...

    def check(self) -> None: ...

    def fail(self, error: BaseException, number: int) -> None: ...

    def tell_hidden(self) -> None: ...

    def moved(self, own: bool) -> None: ...

    def refuse_wanted(self) -> None: ...


class Rounds:
    """The rounds of one micro-batch of the models of a group, in this process.

    One thread at a time, the *owner*, communicates: it votes, and calls experts in a round. A thread that runs a model
    is the owner from the first call of a round to the last.

    Args:
        number: of the micro-batch.
        parent: of these rounds.

    Attributes:
        error: why the rounds have ended before all ranks have left the context.
    """

    def __init__(self, models: Sequence[nn.Module], recovery: Recovery, number: int, parent: Parent) -> None:
        self.error: BaseException | None = None
        self._number, self._parent = number, parent
        self._recovery, self._models = recovery, [_Model.of(model) for model in models]
        self._device = self._models[0].calls[0][0].device
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._waiting = 0  # threads that want to run a model
        self._closing = False
        self._votes, self._kind, self._ended_calls = 0, -1, 0  # of the last vote: its number, its result; calls since
        self._report: BaseException | None = None  # an error of this rank that the others do not know
        self._began = self._ended = self._round_s = 0.0  # times and duration of the last round of this rank
        self._gap_s = 0.0  # usual time to the next
        self._last = -1  # kind of the last round
        self._all_left = self._empty = False
        self._empty_tensors: dict[tuple[object, ...], _Tensors] = {}
        self._of: dict[int, list[int]] = {}
        for index, one in enumerate(self._models):
            for experts, _ in one.calls:
                self._of.setdefault(id(experts), []).append(index)
        self._thread = threading.Thread(target=self._follow, name=f"moe_comm serving {number}", daemon=True)

    def start(self) -> None:
        """Start the thread that takes part in rounds of other ranks."""
        self._thread.start()

    # --- in the threads that run a model ---

    def call(self, experts: EPExperts, run: Callable[..., T], arguments: tuple[Tensor, Tensor, Tensor]) -> T:
        """Call experts from a forward pass: ``run`` dispatches their tokens. Begins a round if none has begun.

        arguments: of ``experts`` and ``run``.

        Raises:
            ConfigError: ``experts`` are those of a copied model, or gradients are enabled.
        """
        owns = self._owner == threading.get_ident()
        if owns and self._empty:
            return run(*arguments)
        candidates = self._of.get(id(experts))
        if candidates is None:
            raise ConfigError("a copy of a model in a serving context cannot run in it; copy the model before")
        if torch.is_grad_enabled():
            check_no_gradients(chain(arguments, experts.parameters()))
        if not owns:
            self.begin(candidates)
        calls, position = self._calls, self._ended_calls
        if position == len(calls) or calls[position][0] is not experts or (position == 0 and not self._fits_autocast()):
            position = self._position(experts)
            if position < 0:  # another model, a layer again, or autocast inside of the model
                self.finish()
                self.begin(candidates)
                position = self._position(experts)
            self._run_empty(position)
        try:
            self._agree_top_k(position, arguments[1].shape[1])
            result = run(*arguments)
        except PeerError as error:

            def step() -> T:
                self._agree_top_k(position, arguments[1].shape[1])
                return run(*arguments)

            result = self._repeated(step, error)
        except BaseException as error:
            self._fail(error)
            raise
        self._ended_calls = position + 1
        if self._ended_calls == len(self._calls):
            self._release()
        elif not self._parent.runs_model:
            self.finish()
        return result

    def runs_empty(self) -> bool:
        """Return whether this thread is in ``_run_empty``."""
        return self._empty and self.owns()

    def owns(self) -> bool:
        """Return whether a round runs in this thread."""
        return self._owner == threading.get_ident()

    @property
    def _calls(self) -> list[tuple[EPExperts, nn.Module]]:
        """The calls of this round, or of the last one."""
        return self._models[self._kind // len(AUTOCAST)].calls if self._kind >= 0 else []

    def _fits_autocast(self) -> bool:
        return self._kind % len(AUTOCAST) == _autocast_code(self._device.type)

    def _position(self, experts: EPExperts) -> int:
        if self._ended_calls == 0 and not self._fits_autocast():
            return -1
        calls = self._calls
        return next((i for i in range(self._ended_calls, len(calls)) if calls[i][0] is experts), -1)

    def begin(self, candidates: Sequence[int]) -> None:
        """Wait for the thread that communicates, and vote until a round of one of the models begins."""
        autocast = _autocast_code(self._device.type)
        kinds = [model * len(AUTOCAST) + autocast for model in candidates]
        try:
            self._own()
            gap_s = time.monotonic() - self._ended
            if gap_s < MOST_ROUNDS * self._round_s:  # else this rank was idle
                self._gap_s = max(gap_s, 0.75 * self._gap_s + 0.25 * gap_s)
            while self._vote(WORK, kinds[0]) not in kinds:
                self._run_empty()
        except BaseException:
            if not self.owns():
                raise
            with self._failing():  # Ctrl-C between these steps: the other ranks may be in the round
                raise
        self._began = time.monotonic()

    def _own(self) -> None:
        """Make this thread the owner, after the one that is."""
        with self._changed:
            self._waiting += 1
            try:
                while self._owner is not None:
                    self._changed.wait()
                self._parent.check()
                self._owner = threading.get_ident()
            finally:
                self._waiting -= 1

    def finish(self) -> None:
        """Complete the round of this thread without tokens."""
        if self.owns():
            self._run_empty()
            self._release()

    def _release(self) -> None:
        with self._changed:
            self._owner = None
            self._ended = time.monotonic()
            self._round_s = self._ended - self._began
            if self._waiting or self._closing:
                self._changed.notify_all()

    def tell(self, error: BaseException) -> None:
        """Let the thread report an error of this rank to the others, which ends these rounds on all ranks."""
        with self._changed:
            if self.error is None and self._report is None:
                self._report = error
                self._changed.notify_all()

    def notify(self) -> None:
        """Let the thread look whether it votes."""
        with self._changed:
            self._changed.notify_all()

    # --- in the thread of the context ---

    def _follow(self) -> None:
        """Take part in rounds of other ranks while no thread of this rank runs a model."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._parent.enter(self._number)
        pause_s = SHORTEST_PAUSE_S
        with suppress(BaseException):  # kept in ``error``
            while not self._all_left:
                with self._changed:
                    while (wait_s := self._wait_s()) > 0:
                        self._changed.wait(wait_s)
                    if self.error is not None:
                        return
                    self._owner = threading.get_ident()
                self._parent.tell_hidden()
                kind = self._vote(LEFT if self._closing else IDLE)
                self._run_empty()
                with self._changed:
                    self._owner = None
                    self._changed.notify_all()
                    if kind < 0 and not self._all_left:
                        self._changed.wait(pause_s)
                pause_s = SHORTEST_PAUSE_S if kind >= 0 else min(2 * pause_s, LONGEST_PAUSE_S)
            self._recovery.decline()

    def _wait_s(self) -> float:
        """Return the seconds until the thread should look again whether it votes; 0: it votes."""
        if self.error is not None:
            return 0
        if self._owner is not None or self._waiting:
            return POLL_S
        if self._closing or self._report is not None or self._parent.wanted is not None:
            return 0
        grace_s = max(min(GRACE * self._gap_s, MOST_ROUNDS * self._round_s), SHORTEST_GRACE_S)
        return self._ended + grace_s - time.monotonic()

    # --- in the owner ---

    def _vote(self, state: int, kind: int = -1) -> int:
        """Return the kind of the next round; -1 if no rank has work. Kinds take turns. Collective."""
        while True:
            with self._failing():
                number, wanted = self._votes, self._parent.wanted
                if wanted is not None:
                    self._recovery.offer(self._number, number, wanted)
                try:
                    states = [vote[0] for vote in self._try_vote(state if wanted is None else CHANGE, kind)]
                    if CHANGE in states:  # a rank may have died after its vote, and the move could not be repeated
                        self._recovery.channels[self._number].gather_values((0, 0), "before experts move")
                except PeerError as error:
                    self._recover(error)
                    if self._votes == number:
                        continue
                    return self._kind  # of this vote, which has ended on a rank
                if CHANGE in states:
                    self._recovery.move(self._number, states.index(CHANGE), number, self._parent.moved)
                    self._forget_top_k()
                    continue
            return self._kind

    def _try_vote(self, state: int, kind: int) -> list[list[int]]:
        report = self._report
        channel, state = self._recovery.channels[self._number], state if report is None else ERROR
        votes = channel.gather_values((state, kind), "a vote of ranks that serve")
        states = [vote[0] for vote in votes]
        if ERROR in states:
            self._raise_reported(report)
        self._all_left = states.count(LEFT) == len(states)
        kinds = [] if CHANGE in states else [vote[1] for vote in votes if vote[0] == WORK]
        if kinds:
            count = len(self._models) * len(AUTOCAST)
            self._last = min(kinds, key=lambda one: (one - self._last - 1) % count)
        self._votes, self._kind, self._ended_calls = self._votes + 1, self._last if kinds else -1, 0
        return votes

    def _forget_top_k(self) -> None:
        for one in self._models:  # a rank may know those of a call that others repeat
            one.top_k.clear()

    def _recover(self, error: PeerError) -> None:
        """Go on without the ranks that have died, and align this rank with the others. Collective.

        If the last vote has ended on another rank only, this rank takes its result. Calls that have not ended on all
        ranks are repeated here without tokens if they have ended here.
        """
        own = [self._votes, self._kind, self._ended_calls, self._all_left, self._last]
        states = self._recovery.recover(self._number, error, own)
        self._forget_top_k()
        self._parent.refuse_wanted()
        latest = max(states)
        if self._votes < latest[0]:
            self._votes, self._kind, _, self._all_left, self._last = latest
            self._ended_calls = 0
        end = self._ended_calls
        self._ended_calls = min(state[2] if state[0] == latest[0] else 0 for state in states)
        self._run_empty(end)

    def _repeated(self, step: Callable[[], T], error: PeerError | None = None) -> T:
        """Return the result of ``step``, a call of all ranks, which is repeated after ranks have died.

        error: of the first call.
        """
        with self._failing():
            while True:
                if error is not None:
                    self._recover(error)
                try:
                    return step()
                except PeerError as raised:
                    error = raised

    def _raise_reported(self, report: BaseException | None) -> None:
        """Raise the first error that a rank has reported. Collective."""
        text = "" if report is None else f"raised {type(report).__name__}: {report}"
        texts = gather_texts(self._recovery.channels[self._number], "the errors of ranks that serve", text)
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
        error = report or PeerRaised(f"rank {rank} {text}. Serving has ended on all ranks")
        mark_known(error)
        raise error

    def _run_empty(self, end: int | None = None) -> None:
        """Call the next experts of the round without tokens: until position ``end``, or all."""
        calls, autocast = self._calls, AUTOCAST[self._kind % len(AUTOCAST)]
        end = len(calls) if end is None else end
        if self._ended_calls >= end:
            return
        with torch.no_grad(), torch.autocast(self._device.type, autocast, enabled=autocast is not None):
            self._repeated(partial(self._call_until, end))

    def _call_until(self, end: int) -> None:
        while self._ended_calls < end:
            self._call_empty(self._ended_calls)
            self._ended_calls += 1

    def _call_empty(self, position: int) -> None:
        top_k = self._agree_top_k(position, 0)
        if not top_k:  # no rank calls this layer
            return
        experts, outer = self._calls[position]
        tensors = self._no_tokens(experts.layout.hidden, experts.down_proj.dtype, experts.device, top_k)
        # Hooks of the caller on experts do not run, but those of adapters: around experts, or of their layers.
        call = outer if outer is not experts or experts._modules else experts._run
        self._empty, active = True, experts.adapters  # of a call of these experts that waits for this one
        experts.adapters = {}
        try:
            call(*tensors)
        finally:
            self._empty, experts.adapters = False, active

    def _no_tokens(self, hidden: int, dtype: torch.dtype, device: torch.device, top_k: int) -> _Tensors:
        """Return tokens [0, D], ids and weights [0, K]."""
        tensors = self._empty_tensors.get(key := (hidden, dtype, device, top_k))
        if tensors is None:
            ids_TK = torch.zeros(0, top_k, dtype=torch.int64, device=device)
            x_TD = torch.zeros(0, hidden, dtype=dtype, device=device)
            tensors = self._empty_tensors[key] = x_TD, ids_TK, ids_TK.float()
        return tensors

    def _agree_top_k(self, position: int, top_k: int) -> int:
        """Return the number of experts per token of a layer; 0 if no rank calls it. Collective until it is known.

        top_k: of this rank's call; 0 without tokens.
        """
        known = self._models[self._kind // len(AUTOCAST)].top_k
        if position not in known:
            channel, what = self._recovery.channels[self._number], "the number of experts per token of ranks that serve"
            agreed = max(row[0] for row in channel.gather_values((top_k, 0), what))
            if not agreed:
                return 0
            known[position] = agreed
        return known[position]

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Context of what all ranks do: an exception ends the context."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        channel = self._recovery.channels[self._number]
        self._recovery.decline()
        if needs_report(error, channel.comm):  # Ctrl-C, too: the other ranks would wait until their deadline
            channel.give_up(f"rank {channel.rank} {raised_text(error, '')}")
        with self._changed:
            self.error = self.error or error
            self._owner = None
            self._changed.notify_all()
        self._parent.fail(error, self._number)

    def close(self) -> None:
        """Take part until all ranks have left the context, or until an error."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()


def check_no_gradients(tensors: Iterable[Tensor]) -> None:
    """Raise ConfigError if gradients are enabled and a tensor requires one."""
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        raise ConfigError("gradients are enabled in a serving context; run the model under torch.no_grad()")


def _autocast_code(device_type: str) -> int:
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if dtype not in AUTOCAST:
        raise ConfigError(f"autocast in a serving context must be to bfloat16 or float16; got {dtype}")
    return AUTOCAST.index(dtype)
