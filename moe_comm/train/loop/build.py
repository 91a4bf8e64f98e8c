"""Build the model, optimizer and pipeline runner of this rank from a configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from moe_comm.dispatch import DispatchOptions, PeerToPeerOptions
from moe_comm.errors import ConfigError
from moe_comm.layers.data_parallel import leave_gradients
from moe_comm.layers.parallel.collectives import CollectiveOptions, configure_collectives
from moe_comm.layers.parallel.module import shardings_of
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.lengths.solve import CAPACITY
from moe_comm.layers.transformer.model import Transformer
from moe_comm.layers.transformer.model_plan import ModelPlan
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.overlap.options import Overlap
from moe_comm.topology import ParallelConfig, ParallelMesh, Sharding
from moe_comm.topology.pipeline import StagePlan, check_micro_batches, plan_stages
from moe_comm.train.architecture import transformer_config, with_training_settings
from moe_comm.train.config import TrainConfig
from moe_comm.train.loop.placement import ExpertPlacements
from moe_comm.train.offload.activations import ActivationOffload
from moe_comm.train.optim import Optimizer, make_optimizer
from moe_comm.train.parallel import DataParallel
from moe_comm.train.pipeline.batch import ActivationShape
from moe_comm.train.pipeline.runner import Runner, make_runner
from moe_comm.train.resilience.guard import History

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FULL_PRECISION = ("*.router.weight",)
"""Parameters that compute in fp32 for every model dtype. Rounding router logits would change the selected experts."""


@dataclass(frozen=True)
class TrainState:
    """The model on this rank, and the objects that train it. ``build`` constructs it.

    Attributes:
        stages: pipeline stages of this rank.
        moe_names: names of the MoE layers of the whole model.
        flops_per_token: forward and backward FLOPs per token of the whole model.
        peak_flops: matrix-product FLOP/s of all ranks together; None if not measured.
        placements: the ranks of the experts of each layer.
        activations: stores activations between forward and backward; None: they stay in memory.
        history: loss and gradient norm of the last updates, for spike detection. It is saved in checkpoints.
    """

    mesh: ParallelMesh
    stages: list[nn.Module]
    data_parallel: DataParallel
    optimizer: Optimizer
    runner: Runner
    moe_names: tuple[str, ...]
    num_experts: int
    top_k: int
    flops_per_token: float
    placements: ExpertPlacements
    peak_flops: float | None = None
    activations: ActivationOffload | None = None
    history: History = field(default_factory=History)

    def close(self) -> None:
        """Release process groups, threads and shared memory. Collective."""
        self.optimizer.wait_state()
        self.data_parallel.finish()
        self.data_parallel.close()
        self.optimizer.close()
        if self.activations is not None:
            self.activations.close()
        for stage in self.stages:
            stage.close()  # type: ignore[operator]
        self.runner.close()


def architecture_of(config: TrainConfig, vocab: int | None) -> TransformerConfig:
    """Return the architecture of ``config`` for a tokenizer with ``vocab`` ids (None: unknown)."""
    if config.model.pretrained is not None:
        from moe_comm.integrations.hugging_face.architecture import from_hugging_face, read_config  # needs transformers

        architecture = with_training_settings(from_hugging_face(read_config(config.model.pretrained)), config.model)
    else:
        rows = config.model.vocab or vocab
        if rows is None:
            raise ConfigError("the vocabulary size is unknown: set model.vocab")
        architecture = transformer_config(config.model, rows, config.data.seq_len)
    if vocab is not None and architecture.vocab < vocab:
        raise ConfigError(f"the model's vocabulary ({architecture.vocab}) is smaller than the tokenizer's ({vocab})")
    return architecture


def stage_plan(config: TrainConfig, architecture: TransformerConfig) -> StagePlan:
    """Return the layers of each pipeline stage."""
    p = config.parallel
    return plan_stages(architecture.layers, p.pp, p.schedule, virtual=p.virtual, stage_layers=p.stage_layers)


def overlaps_experts(config: TrainConfig, architecture: TransformerConfig) -> bool:
    """Return whether MoE layers may overlap.

    By default they may if other modules can run while rows are in flight: a shared expert, or a branch in parallel with
    the experts. The cost model then decides. A fault that flips bits needs whole dispatches.
    """
    if config.parallel.overlap_chunks is not None:
        return config.parallel.overlap_chunks != 0
    has_other_work = bool(architecture.moe.shared_ffn) or architecture.shortcut or architecture.parallel_block
    return has_other_work and not any(fault.partition(":")[0] == "flip_bit" for fault in config.faults.plan)


def max_tokens(config: TrainConfig, mapping: ParallelConfig) -> int:
    """Check the micro-batches, and return the maximum number of tokens per rank in one."""
    data, parallel = config.data, config.parallel
    rows = data.batch // data.micro_batches
    if rows < mapping.dp:
        raise ConfigError(
            f"a micro-batch has {rows} sequences (data.batch {data.batch} / data.micro_batches {data.micro_batches}) "
            f"for {mapping.dp} data-parallel ranks; each needs at least one: raise data.batch or lower "
            "data.micro_batches"
        )
    if parallel.lengths == "balanced":
        return math.ceil(CAPACITY * rows * data.seq_len / (mapping.cp * mapping.dp * mapping.tp))
    chunks = mapping.cp * (2 if parallel.context != "ulysses" and mapping.cp > 1 else 1)
    if data.seq_len % chunks or data.seq_len // mapping.cp % mapping.tp:
        raise ConfigError(
            f"data.seq_len ({data.seq_len}) must be divisible into {chunks} chunks for cp {mapping.cp} "
            f"({parallel.context}), and each rank's tokens into {mapping.tp} for tp"
        )
    check_micro_batches(parallel.schedule, mapping.pp, data.micro_batches, interleave=parallel.interleave)
    return math.ceil(rows / mapping.dp) * data.seq_len // (mapping.cp * mapping.tp)


def _dispatch_options(config: TrainConfig, architecture: TransformerConfig, mesh: ParallelMesh) -> DispatchOptions:
    wire_dtypes, section = config.payload.wire_dtypes(), config.placement.balance
    balance, rows = None if section is None else section.settings(), config.peer_to_peer.capacity_rows
    if rows == "memory":
        assert balance is not None, "the configuration has been checked"
        rows = balance.most_rows(max_tokens(config, mesh.config) * architecture.moe.router.top_k)
    return DispatchOptions(
        config.parallel.timeout_s,
        checked=rows is None,
        peer_to_peer=PeerToPeerOptions(config.peer_to_peer.heap_bytes, capacity_rows=rows),
        deterministic=config.parallel.deterministic and wire_dtypes.invariant,
        wire_dtypes=wire_dtypes,
        checksums=config.guard.checksums,
        balance=balance,
    )


def build_stages(
    config: TrainConfig, architecture: TransformerConfig, mesh: ParallelMesh, device: str | None = None
) -> list[Transformer]:
    """Build this rank's pipeline stages with uninitialized weights. Collective."""
    plan, parallel = stage_plan(config, architecture), config.parallel
    overlap = Overlap(parallel.overlap_chunks, executor=parallel.executor) if parallel.overlap_chunks else None
    expert_overlap = Overlap("auto", executor=parallel.executor) if overlaps_experts(config, architecture) else None
    # With balanced lengths, attention sends keys between all ranks that have different tokens.
    cp_group = mesh.group("cp", "dp") if parallel.lengths == "balanced" else mesh.group("cp")
    return [
        Transformer(
            architecture,
            replace(
                ModelPlan.of(
                    mesh,
                    layers=tuple(plan.layers_of(stage)),
                    has_embedding=plan.is_first(stage),
                    has_head=plan.is_last(stage),
                    context=parallel.context,
                    recompute=config.model.recompute,
                    overlap=overlap,
                    expert_overlap=overlap or expert_overlap,
                    backend=parallel.backend,
                    options=_dispatch_options(config, architecture, mesh),
                    dtype=torch.float32,
                    device=device,
                ),
                cp_group=cp_group,
                # FSDP moves one unit at a time to the device.
                weights_device="cpu" if config.offload.weights == "host" and device is None else None,
            ),
        )
        for stage in plan.stages_of(mesh.place["pp"])
    ]


def build(
    config: TrainConfig, architecture: TransformerConfig, mesh: ParallelMesh, peak_flops: float | None = None
) -> TrainState:
    """Build the train state of this rank. The initial weights do not depend on the mapping. Collective.

    Args:
        peak_flops: matrix-product FLOP/s of all ranks together, for the MFU; None: unknown.

    Raises:
        ConfigError: the mapping does not fit the model.
    """
    if mesh.size("pp") > 1:
        check_micro_batches(
            config.parallel.schedule,
            mesh.size("pp"),
            config.data.micro_batches,
            interleave=config.parallel.interleave,
        )
    configure_collectives(CollectiveOptions(timeout_s=config.parallel.timeout_s))
    stages = build_stages(config, architecture, mesh)
    for stage in stages:
        leave_gradients(stage)
    shardings: dict[str, Sharding] = {}
    tied: tuple[str, ...] = ()
    for stage in stages:
        shardings |= shardings_of(stage)
        tied = stage.tied_names or tied
        initialize(stage, config.run.seed, mesh.place, mesh.sizes)
        if config.model.pretrained is not None:
            read_pretrained(stage, Path(config.model.pretrained), mesh)
    dtype = DTYPES[config.model.dtype]
    parallel = config.parallel
    if any(fault.partition(":")[0] == "nan_grad" for fault in config.faults.plan):
        # The fault is injected into gradients between backward and reduction.
        parallel = parallel.model_copy(update={"overlap_gradients": "off"})
    data_parallel = DataParallel(
        list(stages),
        shardings,
        mesh,
        parallel,
        tied,
        dtype=dtype,
        full_precision=FULL_PRECISION,
        keep_gradients="rerun" in (config.run.nonfinite, config.guard.on_spike),
        offload_weights=config.offload.weights == "host",
    )
    activations = None if config.offload.activations == "none" else ActivationOffload(config.offload, stages, mesh)
    if activations is not None:
        activations.start()
    try:
        optimizer = make_optimizer(data_parallel.owned(), mesh, config.optimizer, config.offload)
    except BaseException:
        if activations is not None:
            activations.close()
        raise
    # With full recomputation, both halves of a split backward would recompute the whole layer.
    split_backward = config.model.recompute != "full"
    runner = make_runner(
        stages,
        mesh,
        stage_plan(config, architecture),
        parallel.schedule,
        ActivationShape(architecture.hidden, dtype, mesh.size("tp")),
        data_parallel,
        interleave=parallel.interleave,
        split_backward=split_backward,
        timeout_s=parallel.timeout_s,
    )
    moe_names = tuple(f"layers.{layer}.moe" for layer in architecture.moe_layers)
    num_experts = architecture.moe.num_experts
    return TrainState(
        mesh=mesh,
        stages=list(stages),
        data_parallel=data_parallel,
        optimizer=optimizer,
        runner=runner,
        moe_names=moe_names,
        num_experts=architecture.moe.router.num_choices,
        top_k=architecture.moe.router.top_k,
        flops_per_token=ModelShape.of(architecture).model_flops(config.data.seq_len),
        placements=ExpertPlacements(config.placement, stages, moe_names, num_experts, data_parallel, optimizer),
        peak_flops=peak_flops,
        activations=activations,
    )


@torch.no_grad()
def read_pretrained(stage: Transformer, folder: Path, mesh: ParallelMesh) -> None:
    """Load this rank's shards of a Hugging Face model's weights and router biases into ``stage``."""
    from moe_comm.integrations.checkpoint.files import HubFolder, read_shard
    from moe_comm.integrations.hugging_face.architecture import read_config  # needs transformers
    from moe_comm.integrations.hugging_face.weights import hub_slices  # needs transformers

    family = read_config(folder).model_type
    hub = HubFolder(folder)
    shardings = shardings_of(stage)
    targets: dict[str, torch.Tensor] = dict(stage.named_parameters())
    targets |= {name: buffer for name, buffer in stage.named_buffers() if name.endswith("correction_bias")}
    for name, tensor in targets.items():
        sharding = shardings.get(name, Sharding(tuple(tensor.shape)))
        slices = hub_slices(stage.config, family, stage.origin_of(name), hub)
        read_shard(hub, slices, tensor, sharding, mesh.place, mesh.sizes)


__all__ = ["TrainState", "architecture_of", "build", "build_stages", "max_tokens", "read_pretrained", "stage_plan"]
