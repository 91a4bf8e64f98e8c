"""Put a run together: the model's parts on this rank, and what runs and updates them."""

from __future__ import annotations

from pathlib import Path

import torch

from moe_comm.dispatch import DispatchOptions
from moe_comm.errors import ConfigError
from moe_comm.layers.data_parallel import leave_gradients
from moe_comm.layers.parallel.collectives import CollectiveOptions, configure_collectives
from moe_comm.layers.parallel.shard import shardings_of
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.model import Transformer
from moe_comm.layers.transformer.model_plan import ModelPlan
from moe_comm.overlap.options import Overlap
from moe_comm.plan.model.shape import ModelShape
from moe_comm.plan.pipeline.schedules import check_micro_batches
from moe_comm.plan.pipeline.stages import StagePlan, plan_stages
from moe_comm.topology import ParallelMesh, Sharding
from moe_comm.train.architecture import training_side, transformer_config
from moe_comm.train.config import TrainConfig
from moe_comm.train.loop.trainer import TrainState
from moe_comm.train.optim import OptimizerOptions, make_optimizer
from moe_comm.train.parallel import DataParallel, DataParallelOptions
from moe_comm.train.pipeline.batch import Activations
from moe_comm.train.pipeline.runner import make_runner

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FULL_PRECISION = ("*.router.weight",)
"""Parameters that compute in fp32 whatever the model's dtype: a router's logits decide, so rounding changes choices."""


def architecture_of(config: TrainConfig, vocab: int | None) -> TransformerConfig:
    """The model of ``config``, with the ids of a tokenizer that has ``vocab`` of them (None: not known yet).

    Raises:
        ConfigError: the model has fewer rows than the tokenizer has ids, or settings contradict each other.
    """
    if config.model.pretrained is not None:
        from moe_comm.integrations.hugging_face.architecture import from_hugging_face, read_config  # needs transformers

        made = training_side(from_hugging_face(read_config(config.model.pretrained)), config.model)
    else:
        rows = config.model.vocab or vocab
        if rows is None:
            raise ConfigError("the size of the vocabulary is not known: set model.vocab")
        made = transformer_config(config.model, rows, config.data.seq_len)
    if vocab is not None and made.vocab < vocab:
        raise ConfigError(f"the model's vocabulary ({made.vocab}) is smaller than the tokenizer's ({vocab})")
    return made


def stage_plan(config: TrainConfig, architecture: TransformerConfig) -> StagePlan:
    """Which layers each pipeline stage holds."""
    p = config.parallel
    return plan_stages(architecture.layers, p.pp, p.schedule, virtual=p.virtual, stage_layers=p.stage_layers)


def _dispatch_options(config: TrainConfig) -> DispatchOptions:
    wire_dtypes = config.payload.wire_dtypes()
    return DispatchOptions(
        config.parallel.timeout_s,
        deterministic=config.parallel.deterministic and wire_dtypes.invariant,
        wire_dtypes=wire_dtypes,
        checksums=config.guard.checksums,
    )


def _overlap(config: TrainConfig) -> Overlap | None:
    chunks = config.parallel.overlap_chunks
    return Overlap(chunks, executor=config.parallel.executor) if chunks else None


def build_stages(
    config: TrainConfig, architecture: TransformerConfig, mesh: ParallelMesh, device: str | None = None
) -> list[Transformer]:
    """This rank's parts of the model; weights are not set yet. Collective.

    Args:
        device: None: the mesh's; "meta" allocates nothing.
    """
    plan = stage_plan(config, architecture)
    return [
        Transformer(
            architecture,
            ModelPlan.of(
                mesh,
                layers=tuple(plan.layers_of(stage)),
                has_embedding=plan.is_first(stage),
                has_head=plan.is_last(stage),
                context=config.parallel.context,
                recompute=config.model.recompute,
                overlap=_overlap(config),
                backend=config.parallel.backend,
                options=_dispatch_options(config),
                dtype=torch.float32,
                device=device,
            ),
        )
        for stage in plan.stages_of(mesh.place["pp"])
    ]


def build(
    config: TrainConfig, architecture: TransformerConfig, mesh: ParallelMesh, peak_flops: float | None = None
) -> TrainState:
    """Everything that trains on this rank, with fresh weights that do not depend on the mapping. Collective.

    Raises:
        ConfigError: the mapping does not fit the model; says which two numbers.
    """
    if mesh.size("pp") > 1:
        check_micro_batches(config.parallel.schedule, mesh.size("pp"), config.data.micro_batches)
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
    data_parallel = DataParallel(
        list(stages),
        shardings,
        mesh,
        DataParallelOptions(
            strategy=config.parallel.sharding,
            dtype=dtype,
            full_precision=FULL_PRECISION,
            compress=config.parallel.compress,
        ),
        tied,
    )
    o = config.optimizer
    optimizer = make_optimizer(
        data_parallel.owned(),
        mesh,
        OptimizerOptions(
            o.kind,
            o.betas,
            o.eps,
            o.weight_decay,
            o.momentum_of_kind,
            nesterov=o.kind == "muon" and o.momentum_of_kind > 0,
        ),
    )
    runner = make_runner(
        stages,
        mesh,
        stage_plan(config, architecture),
        config.parallel.schedule,
        Activations(architecture.hidden, dtype, mesh.size("tp")),
        timeout_s=config.parallel.timeout_s,
        # Passes for inputs and for weights apart would each compute a whole layer again.
        split_backward=config.model.recompute != "full",
        interleave=config.parallel.interleave,
    )
    return TrainState(
        mesh=mesh,
        stages=list(stages),
        data_parallel=data_parallel,
        optimizer=optimizer,
        runner=runner,
        moe_names=tuple(f"layers.{layer}.moe" for layer in architecture.moe_layers),
        num_experts=architecture.moe.router.num_experts,
        top_k=architecture.moe.router.top_k,
        flops_per_token=ModelShape.of(architecture).model_flops(config.data.seq_len),
        peak_flops=peak_flops,
    )


@torch.no_grad()
def read_pretrained(stage: Transformer, folder: Path, mesh: ParallelMesh) -> None:
    """Fill a stage's parameters and routers' biases with this rank's parts of a Hugging Face model's weights.

    Raises:
        ConfigError, InputError: the folder's weights are missing or of another model.
    """
    from moe_comm.integrations.hugging_face.architecture import read_config  # needs transformers
    from moe_comm.integrations.hugging_face.weights import HubFolder, pieces, read_part  # needs transformers

    family = read_config(folder).model_type
    hub = HubFolder(folder)
    shardings = shardings_of(stage)
    wanted: dict[str, torch.Tensor] = dict(stage.named_parameters())
    wanted |= {name: buffer for name, buffer in stage.named_buffers() if name.endswith("correction_bias")}
    for name, tensor in wanted.items():
        sharding = shardings.get(name, Sharding(tuple(tensor.shape)))
        made_of = pieces(stage.config, family, stage.origin_of(name), hub)
        read_part(hub, made_of, tensor, sharding, mesh.place, mesh.sizes)


__all__ = ["architecture_of", "build", "build_stages", "read_pretrained", "stage_plan"]
