"""Running a step's micro-batches, through a pipeline or on one stage alone, behind one interface."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import get_schedule_class

from moe_comm.comm.channel import Channel
from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.layers.parallel.collectives import channel_of
from moe_comm.layers.parallel.interleave import StageInput
from moe_comm.plan.pipeline.schedules import check_micro_batches, find_schedule
from moe_comm.plan.pipeline.stages import StagePlan
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import COMMUNICATION, EVENTS, moving
from moe_comm.topology import ParallelMesh
from moe_comm.train.pipeline.batch import Activations, MicroBatch, check_batches, device_of
from moe_comm.train.pipeline.stage import AfterBackward, Stage, check_output
from moe_comm.train.pipeline.transfers import ACTIVATIONS, Transfers, between


class Runner(Protocol):
    """Forward and backward of a step; ``Accumulation`` and ``Pipeline`` are ones."""

    def step(self, batches: Sequence[MicroBatch], scale: float | Tensor = 1.0) -> Tensor: ...

    def forward_only(self, batches: Sequence[MicroBatch]) -> Tensor: ...

    def close(self) -> None: ...


class Accumulation:
    """One stage that is the whole model: micro-batches one after another, their gradients added up.

    Under FSDP gradients are reduced once, after the last micro-batch.

    Args:
        module: follows ``StageModule``.
        after_backward: called with it after each backward pass.
        interleave: two micro-batches at a time, forward and backward (``layers/parallel/interleave.py``): what one
            waits for travels while the other computes. A step takes an even number. Losses have the same bits;
            gradients of parameters are those of the first two plus those of the next two and so on, so with one pair
            they have, too.
    """

    def __init__(
        self, module: nn.Module, after_backward: AfterBackward | None = None, *, interleave: bool = False
    ) -> None:
        self._module: Any = module
        self._after_backward = after_backward
        self._together = 2 if interleave else 1

    def step(self, batches: Sequence[MicroBatch], scale: float | Tensor = 1.0) -> Tensor:
        """See ``Pipeline.step``.

        Raises:
            ConfigError: an odd number of micro-batches are to be interleaved, or the module's layers cannot be.
        """
        check_batches(batches)
        if len(batches) % self._together:
            raise ConfigError(f"micro-batches are interleaved two by two; a step has {len(batches)} of them")
        losses: list[Tensor] = []
        for place in range(0, len(batches), self._together):
            prepare_backward(self._module, place + self._together == len(batches))
            EVENTS.micro = place  # of two that are interleaved, the first
            with EVENTS.span(Kind.COMPUTE, "forward"):
                found = self._losses(batches[place : place + self._together])
            with EVENTS.span(Kind.COMPUTE, "backward"):
                torch.autograd.backward([loss * scale for loss in found])
                if self._after_backward is not None:
                    self._after_backward(self._module)
            losses += [loss.detach() for loss in found]
        EVENTS.micro = 0
        return torch.stack(losses).double()

    def forward_only(self, batches: Sequence[MicroBatch]) -> Tensor:
        """See ``Pipeline.forward_only``."""
        check_batches(batches)
        with torch.no_grad():
            losses = torch.stack([self._loss(batch) for batch in batches]).double()
        _reshard([self._module])
        return losses

    def close(self) -> None:
        """Nothing to do."""

    def _losses(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        if self._together == 1:
            return [self._loss(batch) for batch in batches]
        inputs = [StageInput(batch.ids_BS, batch.positions_BS, batch.documents) for batch in batches]
        outputs = self._module.forward_in_turns(inputs)
        return [self._module.loss(y, batch.targets_BS) for y, batch in zip(outputs, batches, strict=True)]

    def _loss(self, batch: MicroBatch) -> Tensor:
        hidden = self._module(batch.ids_BS, positions=batch.positions_BS, documents=batch.documents)
        loss: Tensor = self._module.loss(hidden, batch.targets_BS)
        return loss


@dataclass(frozen=True)
class _Built:
    """A torch schedule and its stages, for micro-batches of one number and shape."""

    key: tuple[Any, ...]
    schedule: Any
    stages: list[Stage]


class Pipeline:
    """This rank's stages and the schedule that runs them. Every rank of the pipeline makes one alike. Collective.

    All ranks of a stage run the same passes in the same order, so collectives inside stages (dispatch, tensor
    parallelism) match, with schedules that split the backward too. Stages exchange activations and their gradients
    over a process group of their own.

    Gradients are plain sums over micro-batches. Auxiliary losses reach them through ``attach_loss`` on whichever
    stage they arise; nothing is carried to the last one.

    Args:
        modules: this rank's stages, in the order of ``plan.stages_of``; each follows ``StageModule``. Under FSDP
            they must be wrapped already; gradients are then reduced once a step, after a stage's last backward, and
            schedules that split the backward keep a stage's parameters gathered from forward to backward.
        mesh: its ``pp`` axis is the pipeline.
        plan: which stage is where.
        schedule: a name of ``SCHEDULES``.
        activations: what travels between stages.
        timeout_s: seconds that a stage waits for another one. It must be longer than the slowest step.
        split_backward: False for models that compute whole layers again in backward (``torch.utils.checkpoint``):
            a split backward would compute them again for the input's gradient and for each module's weights. The
            schedule's order stays, but weights' gradients come with the input's.
        after_backward: called with a stage's module whenever a micro-batch's gradients have been added to its
            parameters (to add them up elsewhere in fp32, say). Schedules with a split backward run no hooks on
            parameters, but do call this.

    Raises:
        ConfigError: plan, schedule, mesh and modules do not fit each other.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: ParallelMesh,
        plan: StagePlan,
        schedule: str,
        activations: Activations,
        *,
        timeout_s: float = 600.0,
        split_backward: bool = True,
        after_backward: AfterBackward | None = None,
    ) -> None:
        self._name, self._plan, self._activations = schedule, plan, activations
        self._place = mesh.place["pp"]
        self._indices = plan.stages_of(self._place) if plan.pp == mesh.size("pp") else ()
        known = find_schedule(schedule)
        if plan.pp < 2 or plan.pp != mesh.size("pp"):
            raise ConfigError(f"the plan is for pp = {plan.pp}; the mesh has pp = {mesh.size('pp')}")
        fits = plan.virtual >= known.least and (known.most is None or plan.virtual <= known.most)
        if plan.style != known.style or not fits:
            raise ConfigError(
                f"{schedule} cannot run a plan of style {plan.style!r} with {plan.virtual} stages a rank; "
                "make it with plan_stages for this schedule"
            )
        if len(modules) != len(self._indices):
            raise ConfigError(
                f"pipeline rank {self._place} holds stages {self._indices}; got {len(modules)} modules for them"
            )
        self._modules = list(modules)
        self._split_backward = known.splits_backward and split_backward
        if self._split_backward:
            # torch looks for the parameters before the backward that would gather them again.
            for module in self._modules:
                if isinstance(module, FSDPModule):
                    module.set_reshard_after_forward(False)
        self._after_backward = after_backward
        self._device = device_of(self._modules, torch.device(mesh.device))
        # Its own: its deadline is that of a pipeline's long waits, and on NCCL nothing else stands in its queue.
        made = dist.new_group(mesh.ranks("pp"), timeout=timedelta(seconds=timeout_s), use_local_synchronization=True)
        self._group: ProcessGroup = made
        self._channel: Channel = channel_of(made)
        self._built: _Built | None = None
        self._transfers = Transfers()
        self._losses: list[Tensor] = []
        self._scale: float | Tensor = 1.0

    def step(self, batches: Sequence[MicroBatch], scale: float | Tensor = 1.0) -> Tensor:
        """Forward and backward of all micro-batches; gradients are added to what the parameters have. Collective.

        Args:
            batches: the step's micro-batches, of one shape; every stage of a pipeline gets the same.
            scale: what each loss is multiplied by before its backward, such as 1 / the step's number of tokens.
                Auxiliary losses are not (``MoELayer.aux_scale``).

        Returns:
            [N] float64: each micro-batch's loss as the last stage's module gave it, unscaled; zeros on ranks without
            that stage. So the sum over all ranks is that of the model.

        Raises:
            ConfigError: the schedule cannot run this many micro-batches. InputError: their shapes differ, or a
                stage's output has another shape or dtype than ``activations`` says.
            PeerDied, PeerTimeout: a stage is gone, or did not answer within ``timeout_s``.
        """
        check_batches(batches)
        check_micro_batches(self._name, self._plan.pp, len(batches))
        self._losses, self._scale = [], scale
        with self._explained("a pipeline step"):
            built = self._build(batches)
            for stage in built.stages:
                stage.batches = batches
            # The last stage's targets are numbers of micro-batches, which ``_loss`` looks up.
            numbers = {"target": torch.arange(len(batches))} if self._holds_last else {}
            with COMMUNICATION, self._transfers.step():  # the stages pause it while they compute
                built.schedule.step(**numbers, losses=[], return_outputs=False)
        for stage in built.stages:
            stage.batches = ()
        EVENTS.micro = 0
        return self._result(len(batches))

    def forward_only(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Losses without gradients, as ``step`` returns them; any number of micro-batches. Collective.

        Micro-batches go through the stages one behind the other, in one order for all ranks. Training mode is left
        as it is; switch the modules to ``eval`` first.

        Raises:
            InputError, PeerDied, PeerTimeout: as ``step``.
        """
        check_batches(batches)
        self._losses, self._scale = [], 1.0
        shape = self._activations.shape(batches[0].ids_BS)
        sends: list[tuple[Any, Tensor]] = []
        kept: Tensor | None = None
        with self._explained("an evaluation over the pipeline"), torch.no_grad():
            for EVENTS.micro, batch in enumerate(batches):
                for index, module in zip(self._indices, self._modules, strict=True):
                    before = None if index == 0 else self._plan.rank_of(index - 1)
                    if before is None:
                        x = batch.ids_BS
                    elif before == self._place:
                        assert kept is not None
                        x = kept
                    else:
                        x = torch.empty(shape, dtype=self._activations.dtype, device=self._device)
                        peer = dist.get_global_rank(self._group, before)
                        with moving(Kind.TRANSFER, f"receive {ACTIVATIONS}", layer=between(index - 1), peer=peer):
                            _p2p(dist.irecv, x, self._group, before).wait()
                    with EVENTS.span(Kind.COMPUTE, "forward", layer=f"stage {index}"):
                        kept = module(x, positions=batch.positions_BS, documents=batch.documents)
                    check_output(kept, index, shape, self._activations.dtype)
                    if self._plan.is_last(index):
                        self._add_loss(module, kept, batch)
                    elif (after := self._plan.rank_of(index + 1)) != self._place:
                        sent = kept.contiguous()
                        self._transfers.sent(
                            ACTIVATIONS, between(index), dist.get_global_rank(self._group, after), sent.nbytes
                        )
                        sends.append((_p2p(dist.isend, sent, self._group, after), sent))
            for work, _ in sends:
                work.wait()
        _reshard(self._modules)
        return self._result(len(batches))

    def close(self) -> None:
        """Give back the buffers. Not the process group: torch would name the next one like it, and gloo would then
        find what this one left in the store and wait for ever."""
        self._built = None

    @property
    def _holds_last(self) -> bool:
        return self._place == self._plan.last_rank

    def _build(self, batches: Sequence[MicroBatch]) -> _Built:
        """The schedule for batches like these; kept, with its buffers, until other ones come."""
        ids_BS = batches[0].ids_BS
        key = (len(batches), tuple(ids_BS.shape), ids_BS.dtype)
        if self._built is not None and self._built.key == key:
            return self._built
        self._built = None
        between = torch.empty(
            self._activations.shape(ids_BS), dtype=self._activations.dtype, device="meta", requires_grad=True
        )
        ids = torch.empty(ids_BS.shape, dtype=ids_BS.dtype, device="meta")
        stages = [
            Stage(
                module,
                index,
                self._plan.num_stages,
                between if index else ids,
                between,
                self._device,
                self._group,
                self._split_backward,
                self._after_backward,
                self._transfers,
            )
            for index, module in zip(self._indices, self._modules, strict=True)
        ]
        known = find_schedule(self._name)
        make: Any = get_schedule_class(known.torch_name)
        schedule = make(
            stages[0] if known.single else stages, n_microbatches=len(batches), loss_fn=self._loss, scale_grads=False
        )
        self._built = _Built(key, schedule, stages)
        return self._built

    def _loss(self, hidden: Tensor, number: Tensor) -> Tensor:
        assert self._built is not None
        last = self._built.stages[-1]
        label = f"stage {self._indices[-1]}"
        with COMMUNICATION.paused(), self._transfers.working("loss", label, int(number)):
            return self._add_loss(self._modules[-1], hidden, last.batches[int(number)])

    def _add_loss(self, module: Any, hidden: Tensor, batch: MicroBatch) -> Tensor:
        loss: Tensor = module.loss(hidden, batch.targets_BS)
        self._losses.append(loss.detach())
        return loss * self._scale

    def _result(self, number: int) -> Tensor:
        if not self._holds_last:
            return torch.zeros(number, dtype=torch.float64, device=self._device)
        losses, self._losses = self._losses, []
        return torch.stack(losses).double()

    @contextmanager
    def _explained(self, description: str) -> Iterator[None]:
        """Errors of ours as they were raised inside a stage, and the backend's about a peer as ``PeerError``."""
        self._channel.comm.check()
        begun = time.monotonic()
        try:
            yield
        except Exception as error:
            self._built = None  # it stands somewhere in the middle
            chain = list(_chain(error))
            ours = next((e for e in chain if isinstance(e, MoeCommError)), None)
            if ours is not None:
                if ours is error:
                    raise
                raise ours from error
            message = " ".join(str(e) for e in chain if isinstance(e, RuntimeError))
            found = self._channel.peer_error(message, time.monotonic() - begun, description) if message else None
            if found is None:
                raise
            self._channel.comm.failed = found
            raise found from error


def prepare_backward(module: nn.Module, last: bool) -> None:
    """Let FSDP reduce gradients in a step's ``last`` backward pass only. Before a micro-batch's forward pass.

    The runners do it themselves.
    """
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(last)
        module.set_requires_gradient_sync(last)


def _reshard(modules: Sequence[nn.Module]) -> None:
    """A forward leaves FSDP's root gathered for a backward; where none comes, gradients would seem to be missing."""
    for module in modules:
        for child in module.modules():
            if isinstance(child, FSDPModule):
                child.reshard()


def _p2p(call: Any, tensor: Tensor, group: ProcessGroup, peer: int) -> Any:
    return call(tensor, dist.get_global_rank(group, peer), group=group)


def _chain(error: BaseException) -> Iterator[BaseException]:
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__


def make_runner(
    modules: Sequence[nn.Module],
    mesh: ParallelMesh,
    plan: StagePlan,
    schedule: str,
    activations: Activations,
    *,
    timeout_s: float = 600.0,
    split_backward: bool = True,
    after_backward: AfterBackward | None = None,
    interleave: bool = False,
) -> Runner:
    """A ``Pipeline`` where there is one, else ``Accumulation``. Collective; see both for the arguments.

    Raises:
        ConfigError: ``interleave`` with a pipeline, whose schedule is an order of its own; and as ``Pipeline``.
    """
    if plan.num_stages == 1 and mesh.size("pp") == 1 and len(modules) == 1:
        return Accumulation(modules[0], after_backward, interleave=interleave)
    if interleave:
        raise ConfigError("micro-batches are interleaved on one stage that is the whole model, not in a pipeline")
    return Pipeline(
        modules,
        mesh,
        plan,
        schedule,
        activations,
        timeout_s=timeout_s,
        split_backward=split_backward,
        after_backward=after_backward,
    )
