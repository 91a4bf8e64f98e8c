"""``moe-comm train CONFIG --dry-run``: check that a model builds, and count its parameters, FLOPs and memory.

A dry run needs one process and no GPU or data. It builds the stages of each pipeline position on the meta device, under
a fake process group with the world size of the mapping. All checks of a real build run; nothing is allocated or sent.
``moe_plan.model`` counts parameters, FLOPs and memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from moe_comm.errors import ConfigError
from moe_comm.layers.parallel.module import shardings_of
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.shape import FAMILY, MASTER, ModelShape
from moe_comm.topology import ParallelConfig, ParallelMesh, Sharding, picture
from moe_comm.topology.parallel import ShardingMode
from moe_comm.topology.pipeline import StagePlan, can_split
from moe_comm.train.architecture import family_of
from moe_comm.train.auto.choose import choose, described, resolved
from moe_comm.train.config import TrainConfig
from moe_comm.train.data import Corpus
from moe_comm.train.data.preparation import prepared
from moe_comm.train.data.sources import check_files
from moe_comm.train.data.tokenizer import ByteTokenizer, load_tokenizer
from moe_comm.train.lengths.predict import can_balance, predict_lengths
from moe_comm.train.loop.build import (
    DTYPES,
    FULL_PRECISION,
    architecture_of,
    build_stages,
    max_tokens,
    overlaps_experts,
    stage_plan,
)
from moe_comm.train.loop.run_folder import RunFolder
from moe_comm.train.optim import takes
from moe_comm.train.parallel.fsdp import DENSE_AXES, EXPERT_AXES
from moe_comm.train.parallel.parameters import OwnedParameter
from moe_plan.model.activations import ActivationMemory, split_gradient_bytes
from moe_plan.model.fixed_memory import FixedMemory, ParameterShard, StageContents, state_bytes
from moe_plan.model.memory import peak_saved, stored_activations
from moe_plan.orders import in_flight_peaks

GIB, MIB = 1 << 30, 1 << 20
_EMPTY = nn.Parameter(torch.empty(0, device="meta", dtype=torch.float32))

Coordinates = Mapping[str, int]


@dataclass(frozen=True)
class RankEstimate:
    """Bytes on one rank; ``activations`` is an estimate.

    moved, copied: transfers of offloaded activations, and of offloaded weights and gradients, in a step.
    """

    rank: int
    fixed: FixedMemory
    activations: int
    moved: float = 0.0
    copied: int = 0

    @property
    def total(self) -> int:
        """Peak bytes. The activations are freed before the weights are updated."""
        fixed = self.fixed
        return fixed.weights + fixed.gradients + fixed.optimizer + max(self.activations, fixed.at_update)


@dataclass(frozen=True)
class PipelinePosition:
    """The parameters (by full name) and the ranks of one pipeline position."""

    shardings: dict[str, Sharding]
    ranks: tuple[RankEstimate, ...]

    @property
    def fullest(self) -> RankEstimate:
        return max(self.ranks, key=lambda rank: rank.total)


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run. ``shape`` counts the parameters and FLOPs of the model."""

    name: str
    architecture: TransformerConfig
    shape: ModelShape
    mapping: ParallelConfig
    plan: StagePlan
    positions: tuple[PipelinePosition, ...]


def describe(config: TrainConfig) -> str:
    """Return the model, mapping and memory of ``config`` as plain text.

    With ``parallel.auto``, the mapping is planned for ``parallel.machine``, and the first line explains it.
    """
    line = ""
    if config.parallel.auto:
        world = config.parallel.ranks
        choice = choose(config, ModelShape.of(architecture_of(config, _vocab(config))), described(config, world))
        config, line = resolved(config, world, choice.settings), choice.text + "\n\n"
    result = examine(config)
    parameters = _parameters(result.shape, config.data.seq_len)
    parts = [_title(result, config), parameters, _mapping(result), _memory(result, config), *_lengths(result, config)]
    return line + "\n\n".join(parts) + "\n"


def examine(config: TrainConfig) -> DryRun:
    """Build all pipeline positions of ``config`` on the meta device, and compute the memory of all ranks."""
    if dist.is_initialized():
        raise ConfigError("a dry run requires one process without a process group; start it without torchrun")
    mapping = config.parallel.mapping(config.parallel.ranks)
    architecture = architecture_of(config, _vocab(config))
    plan = stage_plan(config, architecture)
    tokens = max_tokens(config, mapping)
    positions = []
    for pp in range(mapping.pp):
        shardings: dict[str, Sharding] = {}
        with fake_ranks(mapping.world, pp * mapping.stage):
            for stage in build_stages(config, architecture, ParallelMesh(mapping), device="meta"):
                shardings |= shardings_of(stage)
        activations, moved = _activations(config, architecture, plan, pp, tokens, mapping)
        positions.append(PipelinePosition(shardings, _ranks(config, mapping, pp, shardings, (activations, moved))))
    shape = ModelShape.of(architecture)
    return DryRun(config.run.name, architecture, shape, mapping, plan, tuple(positions))


@contextmanager
def fake_ranks(world: int, rank: int) -> Iterator[None]:
    """Initialize torch's fake process group, in which this process is ``rank`` of ``world``."""
    if world == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # a private module of torch

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _vocab(config: TrainConfig) -> int | None:
    """Return the number of tokenizer ids; None if the tokenizer file does not exist here."""
    kind = config.data.tokenizer
    if kind == "bytes":
        return ByteTokenizer.vocab_size
    if kind == "bpe":
        return config.data.vocab
    return load_tokenizer(kind, config.data.end_of_text).vocab_size if Path(kind).exists() else None


def _activations(
    config: TrainConfig,
    architecture: TransformerConfig,
    plan: StagePlan,
    pp: int,
    tokens: int,
    mapping: ParallelConfig,
) -> tuple[int, float]:
    """Estimate the activation bytes on each rank of pipeline position ``pp``, and those that a step moves.

    This is the sum of the peak of saved activations (``peak_saved``; twice with interleaved micro-batches), the
    recomputed activations of the largest layer, and the loss on the last stage. The backward pass of the loss follows
    immediately, except with gpipe.
    """
    parallel, n, model = config.parallel, config.data.micro_batches, config.model
    capacity = architecture.moe.capacity
    estimate = ActivationMemory(
        ModelShape.of(architecture),
        DTYPES[model.dtype].itemsize,
        mapping.tp,
        model.recompute,
        architecture.moe.recompute,
        rows=1.0 if capacity is None else min(1.0, capacity.factor),
        etp=mapping.etp,
        on_cpu=parallel.backend == "shared_memory" and not config.guard.checksums,
        outputs=architecture.moe.expert_gemm_dtype == "fp8",
    )
    stages = plan.stages_of(pp)
    contents = []
    for stage in stages:
        layers = plan.layers_of(stage)
        dense = sum(layer in architecture.dense_layers for layer in layers)
        contents.append(StageContents(dense, len(layers) - dense, plan.is_first(stage), plan.is_last(stage)))
    split = model.recompute != "full" and can_split(parallel.schedule, plan.pp)
    split_bytes = split_gradient_bytes(estimate, overlaps_experts(config, architecture)) if split else (0.0, 0.0)
    interleaved = 2 if parallel.interleave else 1
    in_flight = in_flight_peaks(parallel.schedule, plan.pp, plan.virtual, n // interleaved)[pp]
    saved = sum(peak_saved(estimate, contents, in_flight, split_bytes))
    recomputed = max(estimate.recomputed(content.dense, content.moe) for content in contents)
    losses = (n if parallel.schedule == "gpipe" and plan.pp > 1 else interleaved) if plan.is_last(stages[-1]) else 0
    if model.recompute == "full":  # layers of interleaved micro-batches are recomputed together
        recomputed *= interleaved
    total = round(tokens * (interleaved * saved + recomputed)) + losses * estimate.loss(tokens)
    if (budget := config.offload.activation_limit) is None:
        return total, 0.0
    stored = stored_activations(estimate, contents, in_flight, tokens * interleaved, n // interleaved)
    return total - round(stored.saved(budget)), stored.moved(budget)


def _ranks(
    config: TrainConfig,
    mapping: ParallelConfig,
    pp: int,
    shardings: dict[str, Sharding],
    activations: tuple[int, float],
) -> tuple[RankEstimate, ...]:
    storage = _ParameterStorage(config, mapping)
    ranks = range(pp * mapping.stage, (pp + 1) * mapping.stage)
    return tuple(
        RankEstimate(
            rank,
            storage.fixed(shardings, mapping.place(rank), mapping.sizes),
            *activations,
            storage.copied(shardings, mapping.place(rank), mapping.sizes),
        )
        for rank in ranks
    )


class _ParameterStorage:
    """How a run stores its parameters."""

    def __init__(self, config: TrainConfig, mapping: ParallelConfig) -> None:
        self.offloads = config.offload.weights == "host"
        several = mapping.world > 1 or self.offloads  # FSDP needs a process group
        self.strategy: ShardingMode = config.parallel.sharding if several else "replicate"
        self.replicas = config.parallel.dp_replicate
        self.itemsize = DTYPES[config.model.dtype].itemsize
        self.optimizer = config.optimizer
        self.micro_batches = config.data.micro_batches
        self.pipeline = mapping.pp > 1
        # For experts that are lent to a rank. Ranks read the weights of others in shared memory, but not fp8 copies.
        self.in_place = config.parallel.backend == "shared_memory" and config.model.expert_gemm_dtype != "fp8"
        self.slots = config.placement.first(config.model.experts, mapping.ep).slots or 0 if config.model.experts else 0
        self.budget = config.offload.limit

    def fixed(self, shardings: Mapping[str, Sharding], place: Coordinates, sizes: Coordinates) -> FixedMemory:
        """Return the parameter, gradient and optimizer memory of the rank with coordinates ``place``."""
        total = FixedMemory()
        gathered: dict[str, int] = {}
        counted: set[str] = set()  # parameters of experts
        partial = self.strategy == "fsdp" and self.micro_batches == 1 and not self.pipeline
        for name, sharding in shardings.items():
            strategy = self._strategy_of(sharding)
            memory = self._shard_of(name, sharding, place, sizes).fixed(strategy, partial and strategy == "fsdp")
            total += memory
            if sharding.expert and self.slots:
                homes, *expert = sharding.local_shape(place, sizes)
                in_expert = name.rpartition(".")[2]
                gradients = 0 if in_expert in counted else homes + self.slots  # those of one layer: a call returns them
                counted.add(in_expert)
                size = math.prod(expert)
                weights = 0 if self.in_place else self.itemsize * self.slots * size
                resident = weights if self.strategy == "fsdp" else 0
                total += FixedMemory(0, weights, MASTER * gradients * size, resident=resident)
            unit = ".".join(name.split(".")[:2]) if name.startswith("layers.") else ""
            gathered[unit] = gathered.get(unit, 0) + memory.weights - memory.resident
        if self.strategy == "fsdp" and not self.pipeline:
            root = gathered.pop("", 0)
            total = replace(total, weights=total.resident + root + sum(sorted(gathered.values())[-2:]))
        total = total.offloaded(self.budget)
        return total.on_host(partial) if self.offloads else total

    def copied(self, shardings: Mapping[str, Sharding], place: Coordinates, sizes: Coordinates) -> int:
        """Return the bytes of offloaded weights and gradients that a rank copies in a step.

        Shards are copied when their unit is gathered: a layer before each pass, the root once for each micro-batch, and
        everything once with a pipeline. Gradients are copied once.
        """
        total = 0
        for name, sharding in shardings.items() if self.offloads else ():
            gathers = 1 if self.pipeline else self.micro_batches * (2 if name.startswith("layers.") else 1)
            shard = self._shard_of(name, sharding, place, sizes).fixed("fsdp", True).gradients
            total += shard * (gathers + 1)
        return total

    def _strategy_of(self, sharding: Sharding) -> ShardingMode:
        return "zero1" if self.strategy == "fsdp" and sharding.expert and self.slots else self.strategy

    def _shard_of(self, name: str, sharding: Sharding, place: Coordinates, sizes: Coordinates) -> ParameterShard:
        splits = tuple(sorted((split.axis, place[split.axis], sizes[split.axis]) for split in sharding.splits))
        owners = sharding.sum_axes
        if self._strategy_of(sharding) == "fsdp":
            owners = EXPERT_AXES if sharding.expert else DENSE_AXES
        index = 0
        for axis in reversed(owners):
            index = index * sizes[axis] + place[axis]
        muon = takes(OwnedParameter(name, _EMPTY, sharding))
        return ParameterShard(
            _local_shape(sharding, splits),
            MASTER if _matches(name, FULL_PRECISION) else self.itemsize,
            state_bytes(self.optimizer.kind, self.optimizer.momentum_of_kind > 0, muon),
            summing=math.prod(sizes[axis] for axis in sharding.sum_axes),
            ranks=math.prod(sizes[axis] for axis in owners),
            index=index,
            replicas=self.replicas,
        )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@lru_cache(maxsize=65536)
def _local_shape(sharding: Sharding, splits: tuple[tuple[str, int, int], ...]) -> tuple[int, ...]:
    return sharding.local_shape({axis: index for axis, index, _ in splits}, {axis: size for axis, _, size in splits})


def _title(result: DryRun, config: TrainConfig) -> str:
    a, data = result.architecture, config.data
    expert = f"{a.moe.num_experts} experts, {a.moe.router.top_k} a token, in {len(a.moe_layers)} of {a.layers} layers"
    return (
        f"{result.name}: builds on {result.mapping.world} ranks\n"
        f"{family_of(config.model)}, hidden {a.hidden}, {expert}; sequences of {data.seq_len}, {data.batch} a step "
        f"in {data.micro_batches} micro-batches"
    )


def _parameters(shape: ModelShape, seq_len: int) -> str:
    lines = [f"{'parameters':<16}{'total':>12}{'for a token':>14}"]
    total, active = shape.parameters(), shape.active_parameters()
    for family in dict.fromkeys(FAMILY.values()):
        if family in total:
            lines.append(f"  {family:<14}{_short(total[family]):>12}{_short(active[family]):>14}")
    forward, training = sum(shape.flops_per_token(seq_len).values()), shape.model_flops(seq_len)
    lines.append(f"  {'all':<14}{_short(shape.params):>12}{_short(shape.active):>14}")
    lines.append(
        f"FLOPs per token: {_short(forward)} forward, {_short(training)} in training "
        f"(a token attends to {shape.context(seq_len):.0f} on average)"
    )
    return "\n".join(lines)


def _mapping(result: DryRun) -> str:
    sizes = picture(result.mapping).split("\n\n")[0].split("\n", 1)[1]
    return f"mapping\n{sizes}\n{result.plan}" if result.mapping.pp > 1 else f"mapping\n{sizes}"


def _memory(result: DryRun, config: TrainConfig) -> str:
    p, model = config.parallel, config.model
    fullest = max((position.fullest for position in result.positions), key=lambda rank: rank.total)
    head: tuple[str, ...] = ("pp", "rank", "parameters", "weights", "gradients", "masters+state", "activations*", "all")
    widths: tuple[int, ...] = (3, 6, 12, 9, 11, 15, 14, 9)
    tier = config.offload.optimizer
    if tier != "none":
        head, widths = (*head, f"in {tier}"), (*widths, 10)
    unit, size = ("GiB", GIB) if fullest.total >= GIB else ("MiB", MIB)

    def scaled(num_bytes: int) -> str:
        return f"{num_bytes / size:.2f}"

    lines = [
        f"memory in {unit} on the fullest rank of each pipeline position: {model.dtype}, {config.optimizer.kind}, "
        f"{p.sharding}, recompute {model.recompute}" + (f", {p.schedule}" if result.mapping.pp > 1 else ""),
        "".join(f"{title:>{width}}" for title, width in zip(head, widths, strict=True)),
    ]
    for pp, position in enumerate(result.positions):
        rank = position.fullest
        fixed = rank.fixed
        sizes: tuple[int, ...] = (fixed.weights, fixed.gradients, fixed.optimizer, rank.activations, rank.total)
        sizes += () if tier == "none" else (fixed.stored,)
        cells = [str(pp), str(rank.rank), _short(fixed.params), *map(scaled, sizes)]
        line = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        lines.append(line + ("  <- peak" if rank == fullest and len(result.positions) > 1 else ""))
    lines += [
        "* estimated activations saved by autograd, with even routing. Libraries, caches and communication buffers are",
        f"  not included. 'all' counts the larger of the activations and the buffers of the gradient reduction "
        f"({scaled(fullest.fixed.at_update)} on rank {fullest.rank}).",
    ]
    if tier != "none":
        moved = 2 * max(0, fullest.fixed.stored - config.offload.budget_bytes)
        counted = "the host's memory" if config.offload.weights == "host" else "'masters+state'"
        lines.append(
            f"  {counted} counts the offloaded state by its budget. A step moves about {scaled(moved)} {unit} on "
            f"rank {fullest.rank},\n  which takes {moved / 1e9:.2g} s at 1 GB/s."
        )
    if config.offload.weights == "host":
        largest = max((rank for position in result.positions for rank in position.ranks), key=lambda rank: rank.copied)
        lines.append(
            f"  The shards of weights, gradients, masters and state are in the host's memory: "
            f"{scaled(largest.fixed.host)} {unit} of rank {largest.rank}.\n  A step copies about "
            f"{scaled(largest.copied)} {unit} between host and device, which takes {largest.copied / 1e10:.2g} s at "
            "10 GB/s."
        )
    if (tier := config.offload.activations) != "none":
        most = max((rank for position in result.positions for rank in position.ranks), key=lambda rank: rank.moved)
        lines.append(
            f"  'activations' counts those offloaded to {tier} by their budget, and those of one layer. A step moves\n"
            f"  about {scaled(round(most.moved))} {unit} on rank {most.rank}, which takes {most.moved / 1e9:.2g} s at "
            "1 GB/s: if its passes take less, recompute instead."
        )
    return "\n".join(lines)


def _lengths(result: DryRun, config: TrainConfig) -> list[str]:
    """Return the prediction of ``parallel.lengths``, if an earlier run has prepared the text."""
    # Whether text is prepared is found by reading all of it.
    folders = prepared(config.data) if can_balance(config, result.mapping, result.architecture) else None
    if folders is None:
        return []
    corpus = Corpus.open(folders, config.data, config.run.seed)
    prediction = predict_lengths(config, corpus, result.mapping, result.architecture)
    return [] if prediction is None else [str(prediction)]


def _short(number: float) -> str:
    """Format ``number`` with one decimal and a unit, such as 671.0 B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"


def check_start(config: TrainConfig, world: int) -> None:
    """Check that a run of ``config`` on ``world`` ranks of this host can start.

    With ``parallel.auto``, the mapping is not known yet and not checked.

    Raises:
        ConfigError: the mapping does not fit the ranks or the model, a data-parallel rank would get no sequence, a data
            file, the tokenizer or the checkpoint to resume is missing, or a folder cannot be written.
        MissingDependency: a package for this kind of file or tokenizer is not installed.
    """
    mapping = None if config.parallel.auto else config.parallel.mapping(world)
    if mapping is not None:
        max_tokens(config, mapping)
    for source in config.data.sources:
        check_files(source)
    _check_model(config, mapping)
    RunFolder.check(config)
    if config.checkpoint.resume in ("no", "auto"):  # otherwise the run continues in the folder of that checkpoint
        _check_writable("run.folder", config.run.folder)
    if not Path(config.data.cache).expanduser().exists():  # a cache that cannot be written may have been filled before
        _check_writable("data.cache", config.data.cache)


def _check_model(config: TrainConfig, mapping: ParallelConfig | None) -> None:
    """Check the tokenizer, and build the first pipeline stage without memory."""
    kind = config.data.tokenizer
    if kind not in ("bytes", "bpe"):
        load_tokenizer(kind, config.data.end_of_text)  # must exist, unlike in a dry run
    # The vocabulary of a trained tokenizer may be smaller than ``data.vocab``.
    architecture = architecture_of(config, None if kind == "bpe" and config.model.vocab is not None else _vocab(config))
    if mapping is not None:
        with fake_ranks(mapping.world, 0):
            build_stages(config, architecture, ParallelMesh(mapping), device="meta")


def _check_writable(setting: str, folder: str) -> None:
    """Raise ConfigError if ``folder`` cannot be created or written."""
    path = Path(folder).expanduser()
    try:
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        problem = "" if existing.is_dir() else f"{str(existing)!r} is not a folder"
        if not problem and not os.access(existing, os.W_OK | os.X_OK):
            problem = f"no permission to write to {str(existing)!r}, or its file system is read-only"
    except OSError as error:
        problem = str(error.strerror or error)
    if problem:
        raise ConfigError(f"{setting}: cannot write to {folder!r}: {problem}")
