"""A pipeline stage for torch's schedules, and spans of the transfers between stages.

    rank    [forward 0][~~~~ receive activations ~~~~][forward 1][~ receive gradients ~][backward 0][~ between passes ~]
                        ▲ send activations: no duration

Between two passes a schedule only starts transfers and waits for them. The time before a pass is therefore named after
the transfer that the pass receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, _backward
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight  # no public names

from moe_comm.errors import InputError
from moe_comm.layers.parallel.interleave import BackwardTurns, Steps, TurnParameters
from moe_comm.layers.transformer.model import StageInput
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import COMMUNICATION, EVENTS, Open
from moe_comm.train.parallel.parameters import master_dtype
from moe_comm.train.parallel.strategy import DataParallel
from moe_comm.train.pipeline.batch import MicroBatch

ACTIVATIONS, GRADIENTS = "activations", "gradients"
SPLITS_BACKWARD = hasattr(_backward, "_autograd_grad_for_inputs")
"""Whether this torch can split a backward pass of operators in Python. torch 2.11 cannot: it frees them after the first
half, and sums the gradients of their outputs."""


class Transfers:
    """Spans of all pipeline stages of this rank."""

    def __init__(self) -> None:
        self._gap: Open | None = None  # the open span between two passes
        # Global rank to receive from, by (what, edge, micro-batch).
        self._expected: dict[tuple[str, str, int], int] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of one run of a schedule."""
        self._expected.clear()
        self._open()
        try:
            yield
        finally:
            self._close()

    @contextmanager
    def working(self, name: str, layer: str, micro: int, what: str = "", between: str = "") -> Iterator[None]:
        """Context of a pass of stage ``layer`` on a micro-batch, which receives ``what`` over the edge ``between``."""
        EVENTS.micro = micro
        self._name_gap(what, between, micro)
        in_step = self._gap is not None
        self._close()
        try:
            with EVENTS.span(Kind.COMPUTE, name, layer=layer):
                yield
        finally:
            if in_step:
                self._open()

    def received(self, what: str, between: str, micro: int) -> None:
        """End the span of the wait for ``what``, which was received before its pass, and begin the next one."""
        EVENTS.micro = micro
        if self._name_gap(what, between, micro):
            self._close()
            self._open()

    def receives(self, what: str, between: str, micro: int, ops: Sequence[Any]) -> None:
        """Record torch's receive operations of ``what``."""
        for op in ops:
            self._expected[what, between, micro] = op.peer
            if self._gap is not None and self._gap.peer < 0:
                EVENTS.micro = micro
                self._gap.put(name=f"receive {what}", layer=between, peer=op.peer)

    def sends(self, what: str, between: str, micro: int, ops: Sequence[Any]) -> None:
        """Record torch's send operations of ``what``."""
        previous, EVENTS.micro = EVENTS.micro, micro
        for op in ops:
            self.sent(what, between, op.peer, op.tensor.nbytes)
        EVENTS.micro = previous

    def sent(self, what: str, between: str, peer: int, nbytes: int) -> None:
        """Record a send of ``what`` to the global rank ``peer``."""
        with EVENTS.span(Kind.TRANSFER, f"send {what}", layer=between, peer=peer, nbytes=nbytes):
            pass

    def _name_gap(self, what: str, between: str, micro: int) -> bool:
        """Name the open span after an expected receive of ``what``, and return whether there is one."""
        peer = self._expected.pop((what, between, micro), -1)
        if peer < 0 or self._gap is None:
            return False
        self._gap.put(name=f"receive {what}", layer=between, peer=peer)
        return True

    def _open(self) -> None:
        self._gap = EVENTS.span(Kind.TRANSFER, "between passes").__enter__()
        receive = next(iter(self._expected.items()), None)
        if receive is not None:  # the oldest pending receive is most likely the next one to wait for
            (what, between, _), peer = receive
            self._gap.put(name=f"receive {what}", layer=between, peer=peer)

    def _close(self) -> None:
        gap, self._gap = self._gap, None
        if gap is not None:
            gap.__exit__()


def between(stage: int) -> str:
    """Return the name of the edge between stage ``stage`` and the next one in spans."""
    return f"stages {stage}-{stage + 1}"


@dataclass(frozen=True, eq=False)
class StageContext:
    """State that the stages of a rank share.

    num_stages: stages of the pipeline. device, group: of the activations between stages. transfers: records spans of
    transfers and passes. data_parallel, split_backward: see ``Pipeline``. together: micro-batches of a pass.
    """

    num_stages: int
    device: torch.device
    group: ProcessGroup
    transfers: Transfers
    data_parallel: DataParallel | None
    together: int
    split_backward: bool


@dataclass(frozen=True)
class PairedForward:
    """A forward pass that runs while transfers of a backward pass are in flight.

    wait: waits until its input is received. run: runs it and the given backward pass.
    """

    wait: Callable[[], None]
    run: Callable[[Callable[[], None]], None]


class Stage(PipelineStage):
    """A stage with given shapes, so that no forward pass for shape inference runs the model's collectives.

    The inputs of a micro-batch are looked up in ``batches`` and do not pass through the schedule, which only splits
    tensors into equal chunks and would treat a document index as an activation.

    With ``interleave``, the schedule treats two consecutive micro-batches as one. Their activations are sent as
    two tensors, and they are interleaved in forward and backward (``layers/parallel/interleave.py``).

    A schedule only sends, receives and waits, except in ``forward_one_chunk`` and ``backward_..._one_chunk``. All time
    outside of these counts as communication.

    Args:
        x: meta tensor of the input of a micro-batch (token ids on the first stage).
        y: meta tensor of its output.

    Attributes:
        batches: micro-batches of the current step.
    """

    def __init__(self, module: nn.Module, index: int, x: Tensor, y: Tensor, context: StageContext) -> None:
        self._together, self._split_backward = context.together, context.split_backward
        self._data_parallel = context.data_parallel
        xs, ys = (x,) * self._together, (y,) * self._together
        super().__init__(
            module, index, context.num_stages, context.device, input_args=xs, output_args=ys, group=context.group
        )
        self.batches: Sequence[MicroBatch] = ()
        self._shape, self._dtype = tuple(y.shape), y.dtype
        self._full_backward: set[int] = set()  # micro-batches whose weight gradients are already computed
        self._backwards = self._chunk = 0
        self._pairs: dict[int, PairedForward] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}  # outputs of forward passes that ran inside a backward pass
        self._transfers = context.transfers
        self._label, self._before, self._after = f"stage {index}", between(index - 1), between(index)

    def begin(self, batches: Sequence[MicroBatch]) -> None:
        """Begin a step with these micro-batches."""
        self.batches, self._backwards = batches, 0

    def pair(self, bwd_chunk_id: int, forward: PairedForward) -> None:
        """Run ``forward`` while transfers of this stage's backward pass on ``bwd_chunk_id`` are in flight."""
        self._pairs[bwd_chunk_id] = forward

    def run_paired(self, chunk: int, turns: BackwardTurns, backward: Callable[[], None]) -> None:
        """Alternate between the forward pass on ``chunk`` and ``backward``.

        The schedule runs ``forward_one_chunk`` later, which returns the outputs.
        """
        self._outputs[chunk] = turns.run(self._steps(chunk), backward)

    def _steps(self, chunk: int) -> Steps[tuple[Tensor, ...]]:
        """Run the forward pass on ``chunk`` inside of another pass, with separate spans."""
        module: Any = self.submod
        args = self._ids(chunk) if self.is_first else self._retrieve_recv_activations(chunk)
        with closing(module.forward_steps(self._inputs(args, chunk))) as steps:
            while True:
                outer = EVENTS.micro
                try:
                    with self._working("forward", chunk):
                        next(steps)
                except StopIteration as end:
                    outputs: tuple[Tensor, ...] = end.value
                    return outputs
                finally:
                    EVENTS.micro = outer
                yield

    def _inputs(self, args: Sequence[Tensor], chunk: int) -> list[StageInput]:
        """Return the inputs of interleaved micro-batches."""
        if self._data_parallel is not None:
            self._data_parallel.wait_weights()  # hooks of the module and its layers do not run
        return [StageInput(x, **b.arguments) for x, b in zip(args, self._batches_of(chunk), strict=True)]

    def _batches_of(self, chunk: int) -> Sequence[MicroBatch]:
        return self.batches[chunk * self._together : (chunk + 1) * self._together]

    def _ids(self, chunk: int) -> tuple[Tensor, ...]:
        return tuple(batch.ids_BS for batch in self._batches_of(chunk))

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, *more: Any, **options: Any) -> Tensor:
        self._chunk = fwd_chunk_id
        inputs = self._ids(fwd_chunk_id) if self.is_first else ()
        has_run = fwd_chunk_id in self._outputs
        working = nullcontext() if has_run else self._working("forward", fwd_chunk_id, ACTIVATIONS, self._before)
        with COMMUNICATION.paused(), working:
            y: Tensor = super().forward_one_chunk(fwd_chunk_id, inputs, {}, *more, **options)
        return y

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        if self._together == 1:
            (batch,) = self._batches_of(self._chunk)
            y = super().forward_maybe_with_nosync(*args, **batch.arguments)
            return self._checked(y, args)
        outputs = self._outputs.pop(self._chunk, None)
        if outputs is None:
            module: Any = self.submod
            outputs = module.forward_in_turns(self._inputs(args, self._chunk))
        return tuple(self._checked(y, args) for y in outputs)

    def _checked(self, y: Tensor, args: Sequence[Any]) -> Tensor:
        check_output(y, self.stage_index, self._shape, self._dtype)
        # A sent tensor must be dense. torch detaches it in place, so it must be neither a view nor the stage's input.
        y = y.contiguous()
        return y.clone() if y._is_view() or any(y is x for x in args) else y

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not full_backward and not self._split_backward:
            self._full_backward.add(bwd_chunk_id)
            full_backward = True
        received = (GRADIENTS, self._after)
        backward = partial(super().backward_one_chunk, bwd_chunk_id, loss, full_backward, last_backward)
        pair = self._pairs.get(bwd_chunk_id)
        if pair is not None:
            pair.wait()
        with COMMUNICATION.paused(), self._working("backward", bwd_chunk_id, *received):
            if pair is None:
                backward()
            else:
                pair.run(backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if bwd_chunk_id in self._full_backward:
            self._full_backward.remove(bwd_chunk_id)
            return
        with COMMUNICATION.paused(), self._working("backward of weights", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        # The order of weight gradients depends on the schedule, so the passes are counted.
        last = False
        if backward_type != "input":
            self._backwards += 1
            last = self._data_parallel is not None and self._backwards * self._together == len(self.batches)
        if last:
            self._data_parallel.begin_backward(self.submod)  # type: ignore[union-attr]
        if backward_type == "weight":
            self._sum_in_fp32()
        if self._together > 1 and backward_type != "full":
            gradients, groups = self._split_backward_in_turns(backward_type, bwd_kwargs)
        else:
            gradients, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type != "weight":
            # autograd.grad can return strided gradients; a sent tensor must be dense.
            gradients = tuple(g.contiguous() if isinstance(g, Tensor) else g for g in gradients)
        if last:
            self._data_parallel.end_backward(self.submod)  # type: ignore[union-attr]
        return gradients, groups

    def _split_backward_in_turns(self, backward_type: str, bwd_kwargs: Any) -> tuple[Any, Any]:
        """Run one half of a backward pass, as the base class does, but with the leaves of all micro-batches."""
        if isinstance(self.submod, FSDPModule):
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        turns: TurnParameters = self.submod.turn_parameters  # type: ignore[assignment]
        weights = [*self.submod.parameters(), *turns.leaves()]
        if backward_type == "input":
            outputs, grads, inputs = (bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))
            return stage_backward_input(outputs, grads, inputs, iter(weights))
        with turns.assigned():
            return stage_backward_weight(iter(weights), bwd_kwargs["param_groups"]), None

    def _sum_in_fp32(self) -> None:
        """Give 16-bit weights of FSDP fp32 gradients, to which a split backward pass adds its own.

        Otherwise it would sum the weight gradients of successive micro-batches in 16 bits.
        """
        if isinstance(self.submod, FSDPModule):
            for param in self.submod.parameters():
                if param.requires_grad and param.grad is None and param.dtype != master_dtype(param):
                    param.grad_dtype = None
                    param.grad = torch.zeros_like(param, dtype=master_dtype(param))

    def _working(self, name: str, chunk: int, what: str = "", between: str = "") -> AbstractContextManager[None]:
        return self._transfers.working(name, self._label, chunk * self._together, what, between)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        ops = super().get_fwd_recv_ops(fwd_chunk_id)
        self._transfers.receives(ACTIVATIONS, self._before, fwd_chunk_id * self._together, ops)
        return ops

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        ops = super().get_bwd_recv_ops(bwd_chunk_id)
        self._transfers.receives(GRADIENTS, self._after, bwd_chunk_id * self._together, ops)
        return ops

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        self._transfers.sends(ACTIVATIONS, self._after, fwd_chunk_id * self._together, ops)
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        self._transfers.sends(GRADIENTS, self._before, bwd_chunk_id * self._together, ops)
        return ops

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        # Before torch 2.13, the lowest stage of a V-shaped schedule also connects to itself, which gloo rejects.
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


def check_output(y: Tensor, stage: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ``InputError`` if the output ``y`` of ``stage`` does not have the expected shape and dtype."""
    if tuple(y.shape) != shape or y.dtype != dtype:
        raise InputError(
            f"the output of stage {stage} must be {shape} {dtype}; its module returned {tuple(y.shape)} {y.dtype}"
        )
