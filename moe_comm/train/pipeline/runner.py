"""Run the micro-batches of a step, with or without a pipeline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import get_schedule_class

from moe_comm.comm.channel import Channel
from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.layers.parallel.collectives import channel_of
from moe_comm.layers.parallel.interleave import BackwardTurns
from moe_comm.layers.transformer.model import StageInput
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import COMMUNICATION, EVENTS, communication_span
from moe_comm.runtime.seconds import seconds_of
from moe_comm.topology import ParallelMesh
from moe_comm.topology.pipeline import StagePlan, check_micro_batches, find_schedule
from moe_comm.train.parallel.strategy import DataParallel
from moe_comm.train.pipeline.batch import ActivationShape, MicroBatch, check_batches
from moe_comm.train.pipeline.stage import (
    ACTIVATIONS,
    SPLITS_BACKWARD,
    PairedForward,
    Stage,
    StageContext,
    Transfers,
    between,
    check_output,
)


class Accumulation:
    """Gradient accumulation over micro-batches without a pipeline.

    With FSDP, gradients are reduced once, after the last micro-batch.

    Args:
        module: the whole model, with the methods of ``Transformer``; see ``Pipeline``.
        data_parallel: see ``Pipeline``.
        interleave: see ``Pipeline``.
    """

    def __init__(self, module: nn.Module, data_parallel: DataParallel | None = None, interleave: bool = False) -> None:
        self._module: Any = module
        self._data_parallel, self._together = data_parallel, 2 if interleave else 1

    def step(self, batches: Sequence[MicroBatch], scale: float | Tensor = 1.0) -> Tensor:
        """See ``Pipeline.step``.

        Raises:
            ConfigError: the number of interleaved micro-batches is odd, or the module does not support interleaving.
        """
        check_batches(batches, same_shape=self._together > 1)
        check_micro_batches("1f1b", 1, len(batches), interleave=self._together > 1)
        losses: list[Tensor] = []
        for start in range(0, len(batches), self._together):
            last = start + self._together == len(batches)
            prepare_backward(self._module, last)
            EVENTS.micro = start  # the first of two interleaved micro-batches
            with EVENTS.span(Kind.COMPUTE, "forward"):
                new_losses = self._losses(batches[start : start + self._together])
            with EVENTS.span(Kind.COMPUTE, "backward"):
                if last and self._data_parallel is not None:
                    self._data_parallel.begin_backward(self._module)
                torch.autograd.backward([loss * scale for loss in new_losses])
                if last and self._data_parallel is not None:
                    self._data_parallel.end_backward(self._module)
            losses += [loss.detach() for loss in new_losses]
        EVENTS.micro = 0
        return torch.stack(losses).double()

    def forward_only(self, batches: Sequence[MicroBatch]) -> Tensor:
        """See ``Pipeline.forward_only``."""
        check_batches(batches, same_shape=False)
        with torch.no_grad():
            losses = torch.stack([self._loss(batch) for batch in batches]).double()
        _reshard([self._module])
        return losses

    def close(self) -> None:
        """Nothing to do."""

    def _losses(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        if self._together == 1:
            return [self._loss(batch) for batch in batches]
        if self._data_parallel is not None:
            self._data_parallel.wait_weights()  # hooks of the module and its layers do not run
        inputs = [StageInput(batch.ids_BS, **batch.arguments) for batch in batches]
        outputs = self._module.forward_in_turns(inputs)
        return list(self._module.losses_in_turns(outputs, [batch.targets_BS for batch in batches]))

    def _loss(self, batch: MicroBatch) -> Tensor:
        hidden = self._module(batch.ids_BS, **batch.arguments)
        loss: Tensor = self._module.loss(hidden, batch.targets_BS)
        return loss


@dataclass(frozen=True)
class _Built:
    """A torch schedule and its stages for a given number and shape of micro-batches."""

    key: tuple[Any, ...]
    schedule: Any
    stages: list[Stage]


class Pipeline:
    """This rank's pipeline stages and their schedule. All ranks of the pipeline construct one. Collective.

    All ranks of a stage run the same passes in the same order, so collectives inside stages (dispatch, tensor
    parallelism) match, also with a split backward. Stages exchange activations and their gradients over a separate
    process group.

    Gradients are plain sums over micro-batches. Auxiliary losses enter on their own stage through ``attach_loss``.

    Args:
        modules: this rank's stages in the order of ``plan.stages_of``; each has the methods of ``Transformer``: its
            ``forward``, ``loss`` on the last stage, ``moe_layers``, and, for ``interleave``, ``forward_in_turns``,
            ``forward_steps``, ``losses_in_turns`` and ``turn_parameters``. With FSDP they must be wrapped already.
            Gradients are then reduced once per step, after the last backward of a stage, and schedules with a split
            backward keep the parameters gathered from forward to backward.
        mesh: the parallel mesh; its ``pp`` axis is the pipeline.
        plan: placement of layers and stages.
        schedule: a name of ``SCHEDULES``.
        activations: shape and dtype of the activations between stages.
        data_parallel: reduces gradients during the last backward pass of each stage in a step. With a split backward,
            the last pass is one of weight gradients. None: gradients are not reduced.
        interleave: run two micro-batches at a time (``layers/parallel/interleave.py``), so that the communication of
            one overlaps with the computation of the other. A step then requires an even number of micro-batches. A
            pipeline treats two consecutive ones as one: half of them must fit the schedule, whose bubble is that of
            half as many micro-batches. With "dualpipev", the forward pass of each pair also runs while transfers of its
            backward pass are in flight, except with FSDP. Losses and gradients have the same bits.
        split_backward: False for models that recompute whole layers in backward (``torch.utils.checkpoint``), which a
            split backward would recompute for input gradients and again for weight gradients. The order of the schedule
            is kept, but weight gradients are computed together with input gradients.
        timeout_s: seconds that a stage waits for another one. It must be longer than the slowest step.

    Raises:
        ConfigError: ``timeout_s`` is not a positive number, plan, schedule, mesh and modules do not fit each other, or
            this torch cannot split backward passes.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: ParallelMesh,
        plan: StagePlan,
        schedule: str,
        activations: ActivationShape,
        data_parallel: DataParallel | None = None,
        *,
        interleave: bool = False,
        split_backward: bool = True,
        timeout_s: float = 600.0,
    ) -> None:
        timeout_s = seconds_of("timeout_s", timeout_s)
        self._name, self._plan, self._activations = schedule, plan, activations
        self._together = 2 if interleave else 1
        self._data_parallel, self._split_backward = data_parallel, split_backward
        self._place = mesh.place["pp"]
        self._indices = plan.stages_of(self._place) if plan.pp == mesh.size("pp") else ()
        info = find_schedule(schedule)
        if plan.pp < 2 or plan.pp != mesh.size("pp"):
            raise ConfigError(f"the plan is for pp = {plan.pp}; the mesh has pp = {mesh.size('pp')}")
        fits = plan.virtual >= info.least and (info.most is None or plan.virtual <= info.most)
        if plan.style != info.style or not fits:
            raise ConfigError(
                f"{schedule} cannot run a plan of style {plan.style!r} with {plan.virtual} stages per rank; "
                "create the plan with plan_stages for this schedule"
            )
        if info.splits_backward and split_backward and not SPLITS_BACKWARD:
            raise ConfigError(
                f"{schedule} splits backward passes, which torch {torch.__version__} does incorrectly; use torch "
                ">= 2.12, or another schedule"
            )
        if len(modules) != len(self._indices):
            raise ConfigError(
                f"pipeline rank {self._place} has stages {self._indices}; got {len(modules)} modules for them"
            )
        self._modules: list[Any] = list(modules)
        if info.splits_backward and split_backward:
            # torch looks up the parameters before the backward pass that would gather them.
            for module in self._modules:
                if isinstance(module, FSDPModule):
                    module.set_reshard_after_forward(False)
        params = (param for module in self._modules for param in module.parameters())
        # Shards of offloaded weights are on the host.
        on_mesh = (param.device for param in params if param.device.type == mesh.device)
        self._device = next(on_mesh, torch.device(mesh.device))
        # A separate group: it has the pipeline's long timeout, and on NCCL its own stream.
        group = dist.new_group(mesh.ranks("pp"), timeout=timedelta(seconds=timeout_s), use_local_synchronization=True)
        self._group: ProcessGroup = group
        self._channel: Channel = channel_of(group)
        sharded = any(isinstance(module, FSDPModule) for module in self._modules)
        pairs = interleave and info.pairs_passes and not sharded
        self._backward_turns = BackwardTurns() if pairs else None
        if self._backward_turns is not None:
            for layer in self._moe_layers():
                if layer.in_flight_hook is not None:
                    raise ConfigError(
                        f"{schedule} with interleave sets in_flight_hook of the MoE layers, but a layer has one"
                    )
                layer.in_flight_hook = self._backward_turns.advance
        self._built: _Built | None = None
        self._transfers = Transfers()
        self._losses: list[Tensor] = []
        self._scale: float | Tensor = 1.0

    def step(self, batches: Sequence[MicroBatch], scale: float | Tensor = 1.0) -> Tensor:
        """Run forward and backward of all micro-batches, and accumulate the gradients. Collective.

        Args:
            batches: the micro-batches of the step, of one shape, the same on all stages of a pipeline.
            scale: factor of each loss before its backward, such as 1 / the number of tokens of the step. It does not
                apply to auxiliary losses (``MoELayer.aux_scale``).

        Returns:
            [N] float64: unscaled loss of each micro-batch; zeros on ranks without the last stage, so that the sum over
            all ranks is the loss of the model.

        Raises:
            ConfigError: the schedule cannot run this number of micro-batches.
            InputError: the shapes of the micro-batches differ, or a stage's output does not match ``activations``.
            PeerDied, PeerTimeout: a stage failed, or did not respond within ``timeout_s``.
        """
        check_batches(batches)
        check_micro_batches(self._name, self._plan.pp, len(batches), interleave=self._together > 1)
        passes = len(batches) // self._together
        self._losses, self._scale = [], scale
        with self._convert_errors("a pipeline step"):
            built = self._build(batches)
            for stage in built.stages:
                stage.begin(batches)
            # The last stage's targets are indices of passes, by which ``_loss`` looks up micro-batches.
            target = {"target": torch.arange(passes, device="cpu")} if self._holds_last else {}
            with COMMUNICATION, self._transfers.step():  # time counts as communication except while a stage computes
                built.schedule.step(**target, losses=[], return_outputs=False)
        for stage in built.stages:
            stage.batches = ()
        EVENTS.micro = 0
        return self._result(len(batches))

    def forward_only(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Compute losses without gradients for any number of micro-batches; return them as ``step``. Collective.

        Micro-batches pass the stages in the same order on all ranks. The training mode of the modules is not changed;
        call ``eval`` first.
        """
        check_batches(batches)
        self._losses, self._scale = [], 1.0
        shape = self._activations.shape(batches[0].ids_BS)
        sends: list[tuple[Any, Tensor]] = []
        y: Tensor | None = None
        with self._convert_errors("an evaluation over the pipeline"), torch.no_grad():
            for EVENTS.micro, batch in enumerate(batches):
                for index, module in zip(self._indices, self._modules, strict=True):
                    # The input comes from the batch, from a stage of this rank, or from the rank of the previous stage.
                    source = None if index == 0 else self._plan.rank_of(index - 1)
                    if source is None:
                        x = batch.ids_BS
                    elif source == self._place:
                        assert y is not None
                        x = y
                    else:
                        x = torch.empty(shape, dtype=self._activations.dtype, device=self._device)
                        peer = dist.get_global_rank(self._group, source)
                        with communication_span(
                            Kind.TRANSFER, f"receive {ACTIVATIONS}", layer=between(index - 1), peer=peer
                        ):
                            _p2p(dist.irecv, x, self._group, source).wait()
                    with EVENTS.span(Kind.COMPUTE, "forward", layer=f"stage {index}"):
                        y = module(x, **batch.arguments)
                    check_output(y, index, shape, self._activations.dtype)
                    if self._plan.is_last(index):
                        self._add_loss(module, y, batch)
                    elif (target := self._plan.rank_of(index + 1)) != self._place:
                        sent = y.contiguous()
                        self._transfers.sent(
                            ACTIVATIONS, between(index), dist.get_global_rank(self._group, target), sent.nbytes
                        )
                        sends.append((_p2p(dist.isend, sent, self._group, target), sent))
            # ``sends`` keeps the sent tensors alive until here.
            for work, _ in sends:
                work.wait()
        _reshard(self._modules)
        return self._result(len(batches))

    def close(self) -> None:
        """Release the buffers, and reset ``in_flight_hook`` of the MoE layers.

        The process group is kept: torch would reuse its name for the next group, and gloo would then hang on the
        entries that this group left in the store.
        """
        self._built = None
        if self._backward_turns is not None:
            for layer in self._moe_layers():
                layer.in_flight_hook = None

    def _moe_layers(self) -> list[Any]:
        return [layer for module in self._modules for layer in module.moe_layers()]

    @property
    def _holds_last(self) -> bool:
        return self._place == self._plan.last_rank

    def _build(self, batches: Sequence[MicroBatch]) -> _Built:
        """Return the schedule for the number and shape of ``batches``, cached with its buffers."""
        ids_BS = batches[0].ids_BS
        key = (len(batches), tuple(ids_BS.shape), ids_BS.dtype)
        if self._built is not None and self._built.key == key:
            return self._built
        self._built = None
        activation = torch.empty(
            self._activations.shape(ids_BS), dtype=self._activations.dtype, device="meta", requires_grad=True
        )
        ids = torch.empty(ids_BS.shape, dtype=ids_BS.dtype, device="meta")
        context = StageContext(
            num_stages=self._plan.num_stages,
            device=self._device,
            group=self._group,
            transfers=self._transfers,
            data_parallel=self._data_parallel,
            together=self._together,
            split_backward=self._split_backward,
        )
        stages = [
            Stage(module, index, activation if index else ids, activation, context)
            for index, module in zip(self._indices, self._modules, strict=True)
        ]
        info = find_schedule(self._name)
        schedule_class: Any = get_schedule_class(info.torch_name)
        schedule = schedule_class(
            stages[0] if info.single else stages,
            n_microbatches=len(batches) // self._together,
            loss_fn=self._loss,
            scale_grads=False,
        )
        self._built = _Built(key, schedule, stages)
        if self._backward_turns is not None:
            self._overlap_pairs(schedule, stages, self._backward_turns)
        return self._built

    def _overlap_pairs(self, schedule: Any, stages: Sequence[Stage], turns: BackwardTurns) -> None:
        """Run the forward pass of each pair of passes while transfers of its backward pass are in flight."""

        def wait(key: tuple[int, int]) -> None:
            works = schedule.fwd_recv_ops.get(key, [])
            for work in works:
                work.wait()
            works.clear()  # the schedule waits again, but gloo's transfers complete only once
            stage, chunk = key
            self._transfers.received(ACTIVATIONS, between(stage - 1), chunk * self._together)

        by_index = {stage.stage_index: stage for stage in stages}
        actions = schedule.pipeline_order_with_comms[self._place]
        for position, action in enumerate(actions):
            if action.sub_actions is None:
                continue
            forward, backward = action.sub_actions
            actions[position] = action._replace(sub_actions=(backward, forward))
            key = forward.stage_index, forward.microbatch_index
            run = partial(by_index[forward.stage_index].run_paired, forward.microbatch_index, turns)
            by_index[backward.stage_index].pair(backward.microbatch_index, PairedForward(partial(wait, key), run))

    def _loss(self, hidden: Tensor | tuple[Tensor, ...], index: Tensor) -> Tensor:
        assert self._built is not None
        micro = int(index) * self._together
        batches = self._built.stages[-1].batches[micro : micro + self._together]
        label, module = f"stage {self._indices[-1]}", self._modules[-1]
        with COMMUNICATION.paused(), self._transfers.working("loss", label, micro):
            if isinstance(hidden, Tensor):
                return self._add_loss(module, hidden, batches[0])
            losses = module.losses_in_turns(hidden, [batch.targets_BS for batch in batches])
            self._losses += [loss.detach() for loss in losses]
            total: Tensor = sum(loss * self._scale for loss in losses)
            return total

    def _add_loss(self, module: Any, hidden: Tensor, batch: MicroBatch) -> Tensor:
        loss: Tensor = module.loss(hidden, batch.targets_BS)
        self._losses.append(loss.detach())
        return loss * self._scale

    def _result(self, num_batches: int) -> Tensor:
        if not self._holds_last:
            return torch.zeros(num_batches, dtype=torch.float64, device=self._device)
        losses, self._losses = self._losses, []
        return torch.stack(losses).double()

    @contextmanager
    def _convert_errors(self, description: str) -> Iterator[None]:
        """Re-raise this package's errors from inside a stage unchanged, and backend errors as ``PeerError``."""
        self._channel.comm.check()
        started = time.monotonic()
        try:
            yield
        except Exception as error:
            self._built = None  # the schedule was interrupted and cannot be reused
            chain = list(_chain(error))
            library_error = next((e for e in chain if isinstance(e, MoeCommError)), None)
            if library_error is not None:
                if library_error is error:
                    raise
                raise library_error from error
            message = " ".join(str(e) for e in chain if isinstance(e, RuntimeError))
            failure = self._channel.peer_error(message, time.monotonic() - started, description) if message else None
            if failure is None:
                raise
            self._channel.comm.failed = failure
            raise failure from error


def prepare_backward(module: nn.Module, last: bool) -> None:
    """Make FSDP reduce gradients only in the last backward pass of a step. Call it before each forward pass.

    The runners call it themselves.
    """
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(last)
        module.set_requires_gradient_sync(last)


def _reshard(modules: Sequence[nn.Module]) -> None:
    """Reshard FSDP units. After a forward pass without backward, the root would stay gathered, without gradients."""
    for module in modules:
        for child in module.modules():
            if isinstance(child, FSDPModule):
                child.reshard()


def _p2p(call: Any, tensor: Tensor, group: ProcessGroup, peer: int) -> Any:
    return call(tensor, dist.get_global_rank(group, peer), group=group)


def _chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


Runner = Accumulation | Pipeline


def make_runner(
    modules: Sequence[nn.Module],
    mesh: ParallelMesh,
    plan: StagePlan,
    schedule: str,
    activations: ActivationShape,
    data_parallel: DataParallel | None = None,
    *,
    interleave: bool = False,
    split_backward: bool = True,
    timeout_s: float = 600.0,
) -> Runner:
    """Return a ``Pipeline``, or ``Accumulation`` without a pipeline; both document the arguments. Collective."""
    if plan.num_stages == 1 and mesh.size("pp") == 1 and len(modules) == 1:
        return Accumulation(modules[0], data_parallel, interleave)
    return Pipeline(
        modules,
        mesh,
        plan,
        schedule,
        activations,
        data_parallel,
        interleave=interleave,
        split_backward=split_backward,
        timeout_s=timeout_s,
    )
