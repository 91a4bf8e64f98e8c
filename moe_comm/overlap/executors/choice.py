"""Choice of the executor for a call of an expert-parallel layer."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.expert_call import ExpertCall, call_of, serial_call
from moe_comm.dispatch.peer_to_peer.overlapped import OverlappedPrimitives
from moe_comm.dispatch.pending import PendingDispatcher
from moe_comm.errors import ConfigError, InputError, MoeCommError
from moe_comm.kernels.native import TRITON_DEVICES
from moe_comm.overlap.executors.chunked_rows import ChunkedDispatch
from moe_comm.overlap.executors.device import DeviceCall, device_fault, fp8_fault
from moe_comm.overlap.executors.pipelined import PipelinedCall
from moe_comm.overlap.executors.shared_rows import SharedDispatch
from moe_comm.overlap.executors.transport import pipelined_fault
from moe_comm.overlap.options import CHUNKED, Overlap
from moe_comm.overlap.tuning.choose import choose, device_rates, rates_of
from moe_comm.overlap.tuning.cost import CHUNKS, DIRECTIONS, MARGIN, OperatorWork, predict
from moe_comm.overlap.tuning.device_cost import DeviceForecast, DeviceRates, DeviceWork, forecast

FIRST_GEMMS = 2
"""Number of GEMMs of width F before the last one: gate and up."""


def beside_columns(width: int, top_k: int) -> int:
    """Return ``OperatorWork.beside`` for a dense MLP of ``width`` over all tokens, which have K rows each."""
    return (FIRST_GEMMS + 1) * width // top_k


def dispatch_rows(
    dispatcher: Dispatcher,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    overlap: Overlap | None = None,
    *,
    width: int = 0,
    beside: tuple[int, int] = (0, 0),
    label: str = "",
    scaled: bool = False,
    in_place: bool = False,
    observed: bool = False,
    stacked: bool = False,
) -> ExpertCall:
    """Dispatch the rows of one call of a layer. Collective.

    Args:
        dispatcher: Moves the rows.
        x_TD: [T, D] as for ``Dispatcher.dispatch``.
        ids_TK: [T, K] as for ``Dispatcher.dispatch``.
        weights_TK: [T, K] routing weights.
        overlap: Executor and number of chunks; None: serial. Results and gradients have the same bits for every setting
            except the device executor with fp32.
        width: F of the experts, from which "auto" estimates the compute time; the same on every rank.
        beside: Work of the caller while rows, and later results, are in flight; "auto" uses it to hide transfers. See
            ``OperatorWork.beside``. The same on every rank.
        label: Name of the layer, for error messages.
        scaled: The experts have fp8 GEMMs (``ExpertMLP.gemm_dtype``), which the device executor does not support.
        in_place, observed: See ``serial_call``; executors that overlap ignore them.
        stacked: The experts are stacks of weights without adapters, so "auto" may select the device executor. The same
            on every rank.

    Returns:
        The call, with ``compute`` and ``combine``.

    Raises:
        ConfigError: the named executor does not support this dispatcher, or fp8 GEMMs.
        MissingDependency: Triton is not installed, for its kernels.
        InputError, RoutingError, RankMismatch: on every rank, before rows move.
        PeerDied, PeerTimeout: a rank failed or did not call in time.
    """
    serial = partial(
        serial_call,
        dispatcher,
        x_TD,
        ids_TK,
        weights_TK,
        label=label,
        scaled=scaled,
        in_place=in_place,
        observed=observed,
    )
    if overlap is None or overlap.executor == "serial":
        return serial()
    tokens = x_TD.shape[0] if isinstance(x_TD, Tensor) and x_TD.dim() else 0
    choice = _DeviceChoice.of(dispatcher, tokens) if stacked and not scaled and overlap.may_use_kernels else None
    x_TD, ids_TK, weights_TK = dispatcher.readable(label, x=x_TD, ids=ids_TK, weights=weights_TK)
    if choice is not None and (blocks := choice.blocks(x_TD, ids_TK, width)) is not None:
        overlap = replace(overlap, executor="device", programs=overlap.programs or blocks)
    fault: MoeCommError | None = pipelined_fault(dispatcher)
    if overlap.uses_kernels:
        fault = fp8_fault() if scaled else device_fault(dispatcher, x_TD)
    requested = overlap.uses_kernels or overlap.executor == "pipelined"
    if fault is not None and requested:
        dispatcher.refuse(fault, x_TD, label=label)
    if not requested and (
        fault is not None or (isinstance(dispatcher, PendingDispatcher) and overlap.chunks == "auto")
    ):
        return serial()
    _check_weights(dispatcher, x_TD, ids_TK, weights_TK, label)
    if overlap.uses_kernels:
        assert isinstance(dispatcher, OverlappedPrimitives)
        return DeviceCall(dispatcher, x_TD, ids_TK, weights_TK, overlap, label)
    if isinstance(dispatcher, AllToAllDispatcher):
        weights_grad = torch.is_grad_enabled() and weights_TK.requires_grad
        dispatch = ChunkedDispatch.open(
            dispatcher,
            x_TD,
            ids_TK,
            overlap,
            width=FIRST_GEMMS * width,
            width_back=width,
            beside=beside,
            weights_grad=weights_grad,
            label=label,
            scaled=scaled,
        )
        if dispatch.small and not requested:
            return call_of(dispatcher, dispatch.dispatch_at_once(x_TD), x_TD, ids_TK, weights_TK, observed)
        return PipelinedCall(dispatch, dispatch.send(x_TD.detach()), x_TD, weights_TK, scaled)
    assert isinstance(dispatcher, PendingDispatcher)
    shared, send = SharedDispatch.open(dispatcher, x_TD, ids_TK, overlap, label=label, scaled=scaled)
    if shared.chunks == 1 and not requested:
        at_once = shared.dispatch_at_once(send, x_TD, scaled)
        return call_of(dispatcher, at_once, x_TD, ids_TK, weights_TK, observed)
    return PipelinedCall(shared, send, x_TD, weights_TK, scaled)


AUTO_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes for which the device executor has the bits of serial execution."""


class _DeviceChoice:
    """The choice between the device executor and serial execution over ``peer_to_peer``.

    All ranks make the same one. They communicate only in the first call of a group, and in the first one with
    gradients. With gradients the choice depends on the tokens of that one, because a recomputed call must run as the
    first one did. Without, it depends on the rows of the last dispatch; before the first one it is serial execution.
    """

    def __init__(self, dispatcher: OverlappedPrimitives, rates: DeviceRates) -> None:
        self._dispatcher, self._rates = dispatcher, rates

    @classmethod
    def of(cls, dispatcher: Dispatcher, num_tokens: int) -> _DeviceChoice | None:
        """Return None for serial execution. Collective, before checks that may fail on one rank."""
        if not isinstance(dispatcher, OverlappedPrimitives) or choice_fault(dispatcher) is not None:
            return None
        channel = dispatcher.channel
        rates = device_rates(channel, dispatcher.device)
        if torch.is_grad_enabled() and dispatcher.trained_tokens is None:
            if channel is not None:
                own = torch.tensor([num_tokens], dtype=torch.int64, device=channel.control_device)
                num_tokens = int(channel.all_gather(own, "choosing the executor of experts").sum()) // dispatcher.world
            dispatcher.trained_tokens = num_tokens
        return None if rates is None else cls(dispatcher, rates)

    def blocks(self, x_TD: Tensor, ids_TK: Tensor, width: int) -> int | None:
        """Return the number of sending blocks with which the device executor is faster, or None."""
        dispatcher, gradients = self._dispatcher, torch.is_grad_enabled()
        rows = dispatcher.mean_rows
        if x_TD.dim() != 2 or ids_TK.dim() != 2 or x_TD.dtype not in AUTO_DTYPES:
            return None
        if gradients:
            assert dispatcher.trained_tokens is not None
            rows = dispatcher.trained_tokens * ids_TK.shape[1]
        if rows is None:
            return None
        if device_fault(dispatcher, x_TD) is not None:
            return None
        return _forecast(dispatcher, rows, (x_TD.shape[1], width), self._rates, gradients).blocks


def agree_on_choice(dispatcher: Dispatcher, num_tokens: int) -> None:
    """Share what "auto" chooses the device executor by, so that ``dispatch_rows`` needs no exchange. Collective.

    A layer calls it before all checks: a rank whose check fails raises its error on all ranks in dispatch, where the
    others must come. num_tokens: of this rank's call; 0 if they cannot be read.
    """
    _DeviceChoice.of(dispatcher, num_tokens)


def choice_fault(dispatcher: Dispatcher) -> ConfigError | None:
    """Return why "auto" never selects the device executor over ``peer_to_peer``, or None. The same on every rank."""
    if dispatcher.options.balance is not None:
        return ConfigError("the cost model does not know which experts a call lends (balance)")
    device = dispatcher.device if isinstance(dispatcher, OverlappedPrimitives) else None
    if device is None or device.type not in TRITON_DEVICES:
        return ConfigError("the device executor needs GPUs")
    return None


def _forecast(
    dispatcher: OverlappedPrimitives, rows: int, widths: tuple[int, int], rates: DeviceRates, gradients: bool
) -> DeviceForecast:
    """Return the prediction for 16-bit rows, their number rounded to a power of two. widths: D and F."""
    experts = -(-dispatcher.num_experts // dispatcher.world)
    rows = 1 << round(math.log2(rows)) if rows else 0
    work = DeviceWork(rows, *widths, 2, dispatcher.world, experts, gradients)
    return _predicted(work, rates)


_predicted = lru_cache(maxsize=1024)(forecast)


def explain_overlap(
    dispatcher: Dispatcher,
    *,
    tokens: int,
    top_k: int,
    hidden: int,
    ffn: int,
    shared_ffn: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    rates: DeviceRates | None = None,
) -> str:
    """Explain which executor ``overlap="auto"`` selects for a layer. Collective over the dispatcher's group.

    Args:
        dispatcher: The layer's dispatcher.
        tokens: Tokens of each rank.
        top_k: Experts of each token.
        hidden: D.
        ffn: F.
        shared_ffn: Width of the shared expert, which runs while rows are in flight.
        dtype: Dtype of rows and weights.
        device: Device of the rows.
        rates: Rates of the GPUs, to compare the device executor over ``peer_to_peer`` with serial execution. None:
            those that "auto" uses.

    Returns:
        Lines of text: predicted milliseconds of all four passes for each number of chunks, and the choice.
    """
    if (fault := pipelined_fault(dispatcher)) is not None:
        return f"serial: {fault}"
    if isinstance(dispatcher, OverlappedPrimitives):
        return _explain_kernels(dispatcher, tokens * top_k, (hidden, ffn), dtype, rates)
    if not isinstance(dispatcher, AllToAllDispatcher):
        return (
            "serial: the cores that compute also copy the rows between ranks that share memory, so no transfer can be "
            "hidden; Overlap() computes each peer's rows once they are complete, which helps if ranks differ in speed"
        )
    device, world = torch.device(device), dispatcher.world
    experts_per_rank = -(-dispatcher.num_experts // world)
    works = tuple(
        OperatorWork(operator, direction, tokens * top_k, hidden, width, dtype, world, experts_per_rank, beside)
        for operator, width, beside in (
            ("dispatch_matmul", FIRST_GEMMS * ffn, beside_columns(shared_ffn, top_k)),
            ("matmul_combine", ffn, 0),
        )
        for direction in DIRECTIONS
    )
    choice = choose(works, dispatcher.channel, device, (CHUNKED,))
    of_group = rates_of(dispatcher.channel, dtype, device)
    lines = [
        f"rates: {of_group.latency_s * 1e6:.0f} us per exchange, {of_group.bytes_per_s / 1e9:.2f} GB/s, "
        f"{of_group.hides:.0%} of a transfer can be hidden"
    ]
    for chunks in CHUNKS:
        total = sum(predict(work.bucket(), of_group, chunks) for work in works)
        lines.append(f"{'serial' if chunks == 1 else f'pipelined in {chunks} chunks'}: {total * 1e3:.3f} ms predicted")
    name = "serial" if choice.chunks == 1 else f"pipelined in {choice.chunks} chunks"
    lines.append(f"choice: {name}; more than one chunk must save {MARGIN:.0%}, predicted or measured by moe-comm tune")
    return "\n".join(lines)


def _explain_kernels(
    dispatcher: OverlappedPrimitives, rows: int, widths: tuple[int, int], dtype: torch.dtype, rates: DeviceRates | None
) -> str:
    given, fault = rates, choice_fault(dispatcher)
    if dtype not in AUTO_DTYPES:
        fault = ConfigError(f"rows must be of 16 bits for the device executor to have the bits of serial; got {dtype}")
    if given is None and fault is None:
        rates = device_rates(dispatcher.channel, dispatcher.device)
        fault = None if rates is not None else ConfigError("no rates are known for GPUs of this compute capability")
    lines = []
    if fault is not None:
        lines = [f"serial: {fault}; Overlap(executor='pipelined') computes each peer's rows once they are complete"]
    if rates is not None:
        for gradients in (False, True):
            found = _forecast(dispatcher, rows, widths, rates, gradients)
            lines += ["forward and backward:" if gradients else "forward:", *found.lines()]
    return "\n".join(lines)


def _check_weights(dispatcher: Dispatcher, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, label: str) -> None:
    if weights_TK.shape != ids_TK.shape or weights_TK.device != x_TD.device or weights_TK.is_complex():
        fault = InputError(
            f"weights must be real {tuple(ids_TK.shape)} on {x_TD.device}, like the ids; got {weights_TK.dtype} "
            f"{tuple(weights_TK.shape)} on {weights_TK.device}"
        )
        dispatcher.refuse(fault, x_TD, label=label)
