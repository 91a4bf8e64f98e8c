"""``serving``: inference with an expert-parallel model in which each rank runs any number of forward passes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from moe_comm.comm.agree import compare
from moe_comm.comm.group_setup import channel_of
from moe_comm.dispatch import Dispatcher
from moe_comm.errors import ConfigError, MoeCommError, PeerError, UnsupportedModel
from moe_comm.integrations.hugging_face.attention import swapped_attention
from moe_comm.integrations.hugging_face.cut_batch import SMALLEST_BATCH
from moe_comm.integrations.hugging_face.linears import swapped_linears
from moe_comm.integrations.hugging_face.swap import swapped_experts
from moe_comm.integrations.micro_batches import MicroBatches
from moe_comm.integrations.recovery import Recovery
from moe_comm.topology import Placement

Checkpoint: TypeAlias = str | PathLike[str] | Sequence[str | PathLike[str]] | None
"""A folder with safetensors, or one for each model."""
MOST_MICRO_BATCHES = 4
LARGEST_CALIBRATED, CALIBRATION_RUNS = 256, 3


class Serving:
    """What ``serving`` yields: changes of the ranks that have the experts, and of the micro-batches.

    Attributes:
        failures: errors of ranks that have died, after which the others went on; see ``checkpoint``.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        rounds: MicroBatches | None,
        recovery: Recovery | None,
        num_experts: Sequence[int],
    ) -> None:
        self._models, self._rounds, self._recovery, self._num_experts = models, rounds, recovery, num_experts
        self.failures: Sequence[PeerError] = () if recovery is None else recovery.failures

    @property
    def smallest_batch(self) -> int:
        """The fewest sequences, or requests that run, that this rank divides into micro-batches, at least 2.

        With more of them, each micro-batch has at least half as many.
        """
        return SMALLEST_BATCH if self._rounds is None else self._rounds.smallest_batch

    @smallest_batch.setter
    def smallest_batch(self, value: int) -> None:
        if value < SMALLEST_BATCH:
            raise ConfigError(f"smallest_batch must be at least {SMALLEST_BATCH}; got {value}")
        if self._rounds is not None:
            self._rounds.smallest_batch = value

    def calibrate(self, prompt: int = 16, length: int = 8) -> int:
        """Measure from which batch size on two micro-batches generate faster than one. Called on any ranks.

        The first model generates from random prompts, with batch sizes of 2, 4, 8 ... 256, until two are faster.

        Args:
            prompt: tokens of a prompt.
            length: tokens that are generated.

        Returns:
            ``smallest_batch``, which is set to that size, or to 512 if one is always faster.

        Raises:
            ConfigError: the first model has no ``generate``.
        """
        model: Any = self._models[0]
        if not hasattr(model, "generate"):
            raise ConfigError(f"{type(model).__name__} has no generate; set smallest_batch instead")
        if self._rounds is None or self._rounds.count == 1:
            return self.smallest_batch
        vocab, batch = model.config.get_text_config().vocab_size, SMALLEST_BATCH
        generator = torch.Generator().manual_seed(0)
        while batch <= LARGEST_CALIBRATED:
            ids_BS = torch.randint(vocab, (batch, prompt), generator=generator, device="cpu")
            whole_s = divided_s = math.inf
            for _ in range(CALIBRATION_RUNS):  # alternately, so that other work on the machine affects both
                self.smallest_batch = batch + 1
                whole_s = min(whole_s, _seconds(model, ids_BS, length))
                self.smallest_batch = batch
                divided_s = min(divided_s, _seconds(model, ids_BS, length))
            if divided_s < whole_s:
                break
            batch *= 2
        self.smallest_batch = batch
        return batch

    def place(self, placement: Placement | Sequence[int]) -> None:
        """Move the experts to other ranks, between two forward passes. Called on one rank, which waits for it.

        The ranks get weights from each other, and requests and caches stay. So experts can be given to more or fewer
        ranks, or the placement follow the load: ``topology.placement_from_routing`` computes one from recorded routing,
        also with copies. Outputs keep their bits.

        Args:
            placement: the ranks that hold each expert; or the number of experts of each rank.

        Raises:
            ConfigError: it does not fit the models or the ranks, experts have adapters, or a forward pass runs in this
                thread.
            PeerRaised, PeerError: serving has ended.
        """
        if self._rounds is None or self._recovery is None:
            raise ConfigError("one rank has all experts; there is no other placement")
        (count, *others) = self._num_experts
        if others:
            raise ConfigError(f"the layers of these models have different numbers of experts, {self._num_experts}")
        world = self._recovery.channels[0].world
        if not isinstance(placement, Placement):
            placement = Placement.contiguous(count, world, placement)
        placement = placement.fitting(count, world)
        if placement.has_copies and any(map(_lends, self._models)):
            raise ConfigError("balance chooses the copies of experts; pass a placement without copies")
        if any(map(_is_offloaded, self._models)):
            raise ConfigError("offloaded experts cannot be moved to other ranks")
        self._rounds.place(placement)


def _seconds(model: Any, ids_BS: Tensor, length: int) -> float:
    """Return the seconds to generate ``length`` tokens after each of the prompts."""
    start = time.perf_counter()
    model.generate(ids_BS, do_sample=False, min_new_tokens=length, max_new_tokens=length, pad_token_id=0)
    return time.perf_counter() - start


@contextmanager
def serving(*models: nn.Module, checkpoint: Checkpoint = None, micro_batches: int = 1) -> Iterator[Serving]:
    """Run swapped models for inference with any number of calls on each rank, also none. Collective.

        with moe_comm.serving(model):               # every rank
            for prompt in prompts_of_this_rank:     # may be empty
                model.generate(prompt)

    Inside the context, a rank never waits for one that does not run a model: a thread of that rank takes part in the
    communication of the experts. ``generate`` needs no ``synced_gpus``, and ``generate_batch`` and
    ``init_continuous_batching`` work with the requests of each rank. At its end, a rank takes part until all ranks have
    reached theirs. Managers of continuous batching that still run at its end are stopped, without their requests.

    If a rank raises in a model, in a manager or in the context, the context ends on all ranks: their next forward pass,
    or the end of the context, raises ``PeerRaised``.

    Args:
        models: models after ``swap_moe`` over one group, in the same order on every rank. Pass all models that a rank
            uses at the same time, such as the assistant of assisted generation if it has experts.
        checkpoint: a folder with the safetensors of the model, or one for each of ``models``. If a rank dies, the
            others then go on: its experts are read from there, by the ranks with the fewest, or its copies on other
            ranks are used. Forward passes that run continue with the same results. None: they raise ``PeerDied``.
        micro_batches: forward passes that run at the same time on a rank, 1 to 4, the same on every rank: one computes
            while another one waits for its experts. ``generate`` divides the sequences of its batch among them, and
            continuous batching its requests and its KV cache (``num_blocks``). One forward pass is not divided.

    Yields:
        An object that moves experts to other ranks.

    Raises:
        ConfigError: a model is not swapped or already in such a context, models have different groups, or gradients are
            enabled in a call, or ``micro_batches`` is out of range.
        UnsupportedModel: a model is also sharded by FSDP2, ``swap_attention`` or ``swap_linears``, or is in
            DistributedDataParallel with ``broadcast_buffers``, or there is a ``checkpoint`` and experts have adapters
            or are offloaded, or several micro-batches on a GPU, or with ``DispatchOptions.balance``.
        RankMismatch: ranks pass different models.
        PeerRaised: another rank raised, as above.
        PeerError: Ctrl-C has interrupted an operation on another rank.
        PeerDied, PeerTimeout: another rank failed, and there is no ``checkpoint``, or the ranks could not go on.
    """
    counts = sorted({one.num_experts for model in models for one in swapped_experts(model).values()})
    recovery = _open(models, checkpoint, micro_batches)
    if recovery is None:  # one rank
        yield Serving(models, None, None, counts)
        return
    rounds = MicroBatches(models, recovery)
    try:
        yield Serving(models, rounds, recovery, counts)
    except BaseException as error:
        rounds.close(error)
        raise
    rounds.close(None)
    rounds.check()


def serve_experts(*models: nn.Module, checkpoint: Checkpoint = None, micro_batches: int = 1) -> None:
    """Compute the experts of this rank until the other ranks have left ``serving``. Collective.

    For ranks that keep only experts:

        model = moe_comm.swap_moe(model, placement=[0, 0, 8])   # 2 ranks run the model, 1 has the 8 experts
        if dist.get_rank() == 2:
            moe_comm.serve_experts(model)
        else:
            with moe_comm.serving(model):
                model.generate(prompt)

    Arguments and errors are those of ``serving``, which does the same in an empty context.
    """
    with serving(*models, checkpoint=checkpoint, micro_batches=micro_batches):
        pass


def _open(models: Sequence[nn.Module], checkpoint: Checkpoint, micro_batches: int) -> Recovery | None:
    """Check ``models``; return None if they are not distributed."""
    if not 1 <= micro_batches <= MOST_MICRO_BATCHES:
        raise ConfigError(f"micro_batches must be 1 to {MOST_MICRO_BATCHES}; got {micro_batches}")
    groups: dict[int, Dispatcher] = {}
    for model in models:
        experts = list(swapped_experts(model).values())
        if not experts:
            raise ConfigError(f"{type(model).__name__} has no experts of swap_moe; call moe_comm.swap_moe first")
        groups |= {id(one.dispatcher.comm): one.dispatcher for one in experts}
    if len(groups) != 1:
        raise ConfigError(
            "serving takes models that swap_moe distributed over the same group; "
            + (f"these have {len(groups)}. Open one context for each group" if groups else "it got no model")
        )
    (dispatcher,) = groups.values()
    if dispatcher.comm is None or dispatcher.world == 1:
        return None
    channel = channel_of(dispatcher.comm.group)
    folders = [checkpoint] if isinstance(checkpoint, str | PathLike) else checkpoint
    fault = _fault(models, micro_batches)
    if isinstance(fault, ConfigError):  # the other ranks may be in the context already
        raise fault
    if folders is not None and fault is None:
        fault = _cannot_recover(models, folders)
    labels = [[one.label for one in swapped_experts(model).values()] for model in models]
    same = {
        "experts of the models": labels,
        "a checkpoint": int(folders is not None),
        "micro-batches": micro_batches,
    }
    compare(channel, "serving", same, fault=fault)
    return Recovery(models, channel, folders, micro_batches)


def _cannot_recover(models: Sequence[nn.Module], checkpoints: Sequence[str | PathLike[str]]) -> MoeCommError | None:
    if len(checkpoints) != len(models):
        return ConfigError(f"serving needs one checkpoint for each model; got {len(checkpoints)} for {len(models)}")
    if any(experts._modules for model in models for experts in swapped_experts(model).values()):
        return UnsupportedModel("experts with adapters cannot be read from a checkpoint; pass none")
    if any(map(_is_offloaded, models)):
        return UnsupportedModel("offloaded experts cannot be moved to other ranks after a failure; pass no checkpoint")
    missing = next((path for path in checkpoints if not Path(path).exists()), None)
    return None if missing is None else ConfigError(f"the checkpoint {missing} does not exist")


def _lends(model: nn.Module) -> bool:
    """Return whether a model lends experts (``DispatchOptions.balance``)."""
    return any(one.dispatcher.options.balance is not None for one in swapped_experts(model).values())


def _is_offloaded(model: nn.Module) -> bool:
    return any(one.offloaded is not None for one in swapped_experts(model).values())


def _fault(models: Sequence[nn.Module], micro_batches: int) -> MoeCommError | None:
    for model in models:
        name = type(model).__name__
        if micro_batches > 1 and any(parameter.is_cuda for parameter in model.parameters()):
            return UnsupportedModel(
                "micro-batches run in threads of a rank, which would share the stream of its GPU; use one on GPUs"
            )
        if micro_batches > 1 and _lends(model):
            return UnsupportedModel(
                "calls of micro-batches have no order, so they cannot send weights of experts: use one micro-batch "
                "with DispatchOptions.balance"
            )
        if any(one.rounds is not None and not one.rounds.ended for one in swapped_experts(model).values()):
            return ConfigError(f"this {name} is already in a serving context; pass all models to one context")
        if any(isinstance(one, DistributedDataParallel) and one.broadcast_buffers for one in model.modules()):
            return UnsupportedModel(
                "serving cannot take DistributedDataParallel, which broadcasts buffers in each forward pass; pass its "
                "module, and run that"
            )
        sharded = swapped_attention(model) or swapped_linears(model)
        if sharded or any(isinstance(module, FSDPModule) for module in model.modules()):
            by = "swap_attention or swap_linears" if sharded else "fully_shard"
            return UnsupportedModel(
                f"serving takes models of which only experts are distributed; {by} changed this {name}, so that a rank "
                "waits for others in its layers"
            )
    return None
