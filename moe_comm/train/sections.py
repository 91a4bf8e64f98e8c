"""Configuration sections of a training run, with defaults and bounds."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, field_validator, model_validator

from moe_comm.dispatch.wire_dtype import WireDtypeName, WireDtypes
from moe_comm.errors import ConfigError
from moe_comm.kernels.fp8 import GemmDtype
from moe_comm.topology import ParallelConfig, Placement
from moe_comm.topology.balance import Balance
from moe_comm.topology.parallel import ShardingMode
from moe_comm.topology.rebalance import KINDS, DecisionSettings, PlacementKind
from moe_comm.train.section_base import MOST, Section

MOST_LAYERS, MOST_EXPERTS, MOST_RANKS, MOST_STEPS = 1 << 12, 1 << 14, 1 << 20, 1 << 20
"""Largest accepted number of layers, of experts, of ranks, and of steps in a window."""
Family = Literal["qwen3_moe", "olmoe", "mixtral", "deepseek_v3"]
GradientOverlap = Literal["auto", "on", "off"]


class RunSection(Section):
    """Length, evaluation and output folder of a run. The folder is ``folder/name-date``.

    Attributes:
        name: name of the run.
        folder: folder of all runs.
        seed: seed of the initial weights and of the data order.
        steps: number of training steps.
        time_limit_s: training stops after the first step that ends past this limit. None: no limit.
        eval_every: steps between evaluations. 0: evaluate only at the end.
        eval_batches: validation batches per evaluation.
        sample_tokens: length of the text sample generated at the end. 0: no sample.
        temperature: sampling temperature of the text sample.
        log_every: steps between log lines when the output is not a terminal.
        nonfinite: action on a NaN or infinite loss or gradient, on all ranks. "stop" ends the run. "skip" discards
            the step. "rerun" repeats the step once and ends the run if the value is non-finite again.
        gc_every: steps between garbage collections, which all ranks run after the same step. 0: Python decides.
    """

    name: str = Field(default="train", min_length=1, pattern=r"^[\w.-]+$")
    folder: str = Field(default="runs", min_length=1)
    seed: int = Field(default=0, ge=0, lt=2**31)
    steps: int = Field(default=300, ge=1)
    time_limit_s: float | None = Field(default=None, gt=0)
    eval_every: int = Field(default=0, ge=0)
    eval_batches: int = Field(default=8, ge=1, le=MOST)
    sample_tokens: int = Field(default=400, ge=0, le=MOST)
    temperature: float = Field(default=0.7, gt=0)
    log_every: int = Field(default=20, ge=1)
    nonfinite: Literal["stop", "skip", "rerun"] = "stop"
    gc_every: int = Field(default=50, ge=0)


class ModelSection(Section):
    """Shape of the model. ``family`` names the published architecture and the Hugging Face export format.

    Attributes:
        family: architecture and export format.
        dense_ffn: width of the dense feed-forward blocks.
        pretrained: folder of a Hugging Face model of a known family. Training starts from its architecture and
            weights; of the other keys only losses, bias_rate, capacity, dtype and recomputation are used.
        hidden: hidden size.
        layers: number of layers.
        heads: number of attention heads.
        experts: number of experts of an MoE layer.
        top_k: experts per token.
        vocab: rows of the embedding. None: the number of tokenizer ids. A larger value leaves rows unused.
        kv_heads: None: same as ``heads``.
        head_dim: None: hidden / heads.
        rope_theta: base of the rotary embedding.
        window: attention window in tokens, including the token itself. None: full attention (mixtral only).
        ffn: width of one expert.
        shared_ffn: width of the shared expert. 0: none.
        first_dense: leading layers that have a dense feed-forward block of width ``dense_ffn`` instead of experts.
        expert_groups: number of expert groups (DeepSeek-V3's group-limited routing).
        top_groups: groups from which a token selects experts.
        route_scale: factor of the routing weights.
        q_rank: rank of the query projection (DeepSeek-V3's latent attention). None: no compression.
        kv_rank: rank of the key and value projection.
        nope_dim: head dimension of keys without rotary embedding.
        rope_dim: head dimension of keys with rotary embedding.
        v_dim: head dimension of values.
        tie: share the embedding with the output layer.
        parallel_block: run attention and feed-forward in parallel (MegaScale). Cannot be exported.
        shortcut: MoE layers have two attention and two dense blocks of width ``dense_ffn``, and dispatch overlaps with
            the dense blocks (LongCat-Flash). Cannot be exported.
        aux_loss: coefficient of the load-balancing loss of each MoE layer.
        z_loss: coefficient of the router z-loss.
        bias_rate: update rate of DeepSeek-V3's correction bias.
        capacity: slots per expert, relative to the mean load. None: drop nothing.
        capacity_scope: compute the capacity over a rank's tokens or over the whole micro-batch.
        init_std: standard deviation of the initial weights.
        dtype: dtype of the computation; master weights are fp32.
        recompute: activations that the backward pass recomputes.
        recompute_experts: save only the input rows of experts, for one extra matrix product in backward.
        expert_gemm_dtype: operands of the experts' forward GEMMs; see ``moe_comm.layers.MoEConfig``. "fp8" needs
            ``hidden`` to be a multiple of 128.
        max_length: maximum sequence length of the model. None: ``data.seq_len``.
    """

    family: Family = "qwen3_moe"
    pretrained: str | None = None
    vocab: int | None = Field(default=None, ge=1, le=MOST)
    hidden: int = Field(default=128, ge=2, le=MOST)
    layers: int = Field(default=4, ge=1, le=MOST_LAYERS)
    heads: int = Field(default=4, ge=1, le=MOST)
    kv_heads: int | None = Field(default=None, ge=1, le=MOST)
    head_dim: int | None = Field(default=None, ge=2, le=MOST)
    rope_theta: float = Field(default=10_000.0, gt=0)
    window: int | None = Field(default=None, ge=1, le=MOST)
    experts: int = Field(default=8, ge=1, le=MOST_EXPERTS)
    top_k: int = Field(default=2, ge=1, le=MOST_EXPERTS)
    ffn: int = Field(default=256, ge=1, le=MOST)
    shared_ffn: int = Field(default=0, ge=0, le=MOST)
    first_dense: int = Field(default=0, ge=0, le=MOST_LAYERS)
    dense_ffn: int = Field(default=0, ge=0, le=MOST)
    expert_groups: int = Field(default=1, ge=1, le=MOST_EXPERTS)
    top_groups: int = Field(default=1, ge=1, le=MOST_EXPERTS)
    route_scale: float = Field(default=1.0, gt=0)
    q_rank: int | None = Field(default=None, ge=1, le=MOST)
    kv_rank: int = Field(default=32, ge=1, le=MOST)
    nope_dim: int = Field(default=32, ge=1, le=MOST)
    rope_dim: int = Field(default=16, ge=2, le=MOST)
    v_dim: int = Field(default=32, ge=1, le=MOST)
    tie: bool = False
    parallel_block: bool = False
    shortcut: bool = False
    aux_loss: float = Field(default=0.01, ge=0)
    z_loss: float = Field(default=0.0, ge=0)
    bias_rate: float = Field(default=1e-3, ge=0)
    capacity: float | None = Field(default=None, gt=0)
    capacity_scope: Literal["rank", "batch"] = "rank"
    init_std: float = Field(default=0.02, gt=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_experts: bool = False
    expert_gemm_dtype: GemmDtype = "same"
    max_length: int | None = Field(default=None, ge=1, le=MOST)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.head_dim is None and self.hidden % (2 * self.heads):
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of 2 x heads ({self.heads}), or set head_dim")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.top_k > self.experts:
            raise ValueError(f"top_k ({self.top_k}) must not exceed experts ({self.experts})")
        if self.first_dense > self.layers:
            raise ValueError(f"first_dense ({self.first_dense}) must not exceed layers ({self.layers})")
        if self.first_dense and not self.dense_ffn:
            raise ValueError("first_dense requires dense_ffn, the width of the dense layers")
        if self.shortcut and not self.dense_ffn:
            raise ValueError("shortcut requires dense_ffn, the width of the dense blocks")
        if self.shortcut and self.parallel_block:
            raise ValueError("shortcut and parallel_block exclude each other; choose one")
        return self


class OptimizerOptions(Section):
    """The optimizer and its learning rate: linear warm-up over ``warmup`` steps, then ``schedule``.

    Attributes:
        kind: optimizer; Muon updates matrices, and AdamW the other parameters.
        lr: maximum learning rate.
        warmup: warm-up steps.
        final_lr: learning rate of the last step, relative to ``lr``.
        decay: decay steps of "wsd".
        schedule: "cosine" or "linear": decay to ``final_lr`` x lr at the last step. "wsd" (arXiv 2404.06395):
            constant, then linear decay over the last ``decay`` steps. "constant": no decay.
        betas, eps: parameters of AdamW and LAMB, also of the AdamW part of Muon.
        momentum: momentum of SGD, and of Muon with Nesterov. None: 0 for SGD and 0.95 for Muon.
        weight_decay: decoupled weight decay of matrices; SGD adds it to the gradient.
        clip: maximum global gradient norm. 0: no clipping.
    """

    kind: Literal["adamw", "sgd", "lamb", "muon"] = "adamw"
    lr: float = Field(default=3e-3, gt=0)
    warmup: int = Field(default=20, ge=0)
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    decay: int = Field(default=0, ge=0)
    final_lr: float = Field(default=0.1, ge=0, le=1)
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    eps: float = Field(default=1e-8, gt=0)
    momentum: float | None = Field(default=None, ge=0, lt=1)
    weight_decay: float = Field(default=0.1, ge=0)
    clip: float = Field(default=1.0, ge=0)

    @property
    def momentum_of_kind(self) -> float:
        """``momentum``, or the default of the optimizer."""
        return self.momentum if self.momentum is not None else 0.95 if self.kind == "muon" else 0.0

    @model_validator(mode="after")
    def _betas(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1); got {list(self.betas)}")
        return self


class DataParallelOptions(Section):
    """Data parallelism, the part of ``[parallel]`` that ``DataParallel`` reads.

    Attributes:
        sharding: "replicate" (no sharding), "zero1" (shard optimizer state and masters) or "fsdp" (shard everything; of
            experts that can have copies on other ranks, as "zero1").
        dp_replicate: with "fsdp", number of blocks of consecutive ranks, such as hosts, that each store all shards
            (HSDP). Weights are gathered within a block; gradients are summed within a block, then over the blocks. It
            must divide cp x dp, and edp unless that is 1.
        compress: send gradients as bf16 and sum them in fp32.
        overlap_gradients: reduce gradients during the last backward pass, and gather the weights of "zero1" during the
            next forward pass, with the same bits. "auto": between hosts and on GPUs.
        interleave: run two micro-batches at a time: the all-to-all of one overlaps with the computation of the other.
            A training run requires ``overlap_chunks`` and an even number of micro-batches. A pipeline treats two as
            one. With the schedule "dualpipev", the forward and the backward pass of each pair overlap in the same way,
            except with FSDP, which gathers all weights of a block for one pass of both micro-batches.
    """

    sharding: ShardingMode = "replicate"
    dp_replicate: int = Field(default=1, ge=1, le=MOST_RANKS)
    compress: bool = False
    overlap_gradients: GradientOverlap = "auto"
    interleave: bool = False

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.dp_replicate > 1 and self.sharding != "fsdp" and not self._chooses_sharding():
            raise ValueError('dp_replicate requires sharding = "fsdp"')
        return self

    def _chooses_sharding(self) -> bool:
        """Return whether the planner chooses ``sharding``."""
        return False


class ParallelSection(DataParallelOptions):
    """Parallelism and communication; see ``moe_comm.topology.ParallelConfig``.

    ``parallel = "auto"`` stands for a section with ``auto = true``.

    Attributes:
        auto: the planner chooses the degrees, schedule, virtual, sharding, dp_replicate, overlap_chunks and backend
            when the run starts. Those that are set here are kept.
        machine: the name of an accelerator or the path of a hardware description, as the planner takes them. With
            ``auto``: to plan for; None: measure the ranks when the run starts. With ``lengths`` "balanced": to compute
            the time of documents; None: their FLOPs.
        trials: with ``auto``, number of mappings with different degrees that are measured for four steps before the
            run, of the ten fastest predictions, if they differ by at most 25%. The fastest mapping is used. None: 3 if
            that is at most 5% of the steps of the run and ``machine`` is not given, else 0.
        ranks: processes that the command line starts. Under torchrun, its number of ranks: leave it unset, or set it
            to this number.
        tp: tensor-parallel size, with sequence parallelism.
        cp: context-parallel size.
        pp: pipeline-parallel size.
        etp: expert-tensor-parallel size.
        dp: data-parallel size. None: ranks / (tp x cp x pp).
        ep: expert-parallel size. None: the largest that fits.
        context: context parallelism over the cp ranks.
        lengths: "static": each sequence is split over the cp ranks. "balanced": each document of a micro-batch runs
            on as many of the cp x dp ranks as balance their work, short ones on a single rank. The batches and, up to
            rounding, the gradients stay the same. It requires ``context = "ring"``, ``data.documents = "separate"``,
            pp = 1, no ``interleave`` and no capacity.
        schedule: pipeline schedule.
        virtual: pipeline stages per rank (interleaved schedules).
        stage_layers: layers of each stage. None: even split.
        overlap_chunks: chunks in which communication overlaps with the matrix products of linear layers (with tp, or
            with cp and "ulysses") and experts. 0: no overlap. "auto": see ``moe_comm.overlap.options.Overlap``. None:
            "auto" for experts of a layer with a shared expert, a shortcut's dense branch or a parallel attention; 0
            otherwise.
        executor: executor of MoE layers with ``overlap_chunks``; see ``moe_comm.overlap.options.Overlap``.
        backend: dispatcher; see ``moe_comm.dispatch.BACKENDS``.
        deterministic: dispatch results have the same bits for every number of ranks. False allows some backends to
            send fewer bytes.
        timeout_s: seconds to wait for a peer.
    """

    auto: bool = False
    machine: str | None = Field(default=None, min_length=1)
    trials: NonNegativeInt | None = None
    ranks: int = Field(default=2, ge=1, le=MOST_RANKS)
    tp: int = Field(default=1, ge=1, le=MOST_RANKS)
    cp: int = Field(default=1, ge=1, le=MOST_RANKS)
    dp: int | None = Field(default=None, ge=1, le=MOST_RANKS)
    pp: int = Field(default=1, ge=1, le=MOST_LAYERS)
    ep: int | None = Field(default=None, ge=1, le=MOST_RANKS)
    etp: int = Field(default=1, ge=1, le=MOST_RANKS)
    context: Literal["ulysses", "ring", "token_ring"] = "ulysses"
    lengths: Literal["static", "balanced"] = "static"
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev"] = "1f1b"
    virtual: int | None = Field(default=None, ge=1, le=MOST_LAYERS)
    stage_layers: list[int] | None = Field(default=None, max_length=MOST_LAYERS)
    overlap_chunks: Annotated[int, Field(ge=0, le=MOST_LAYERS)] | Literal["auto"] | None = None
    executor: Literal["auto", "serial", "pipelined", "device"] = "auto"
    backend: Literal["auto", "local", "shared_memory", "peer_to_peer", "all_to_all", "all_gather", "hierarchical"] = (
        "auto"
    )
    deterministic: bool = True
    timeout_s: float = Field(default=300.0, gt=0)

    @model_validator(mode="after")
    def _check_machine(self) -> Self:
        for name, used in (("machine", self.auto or self.lengths == "balanced"), ("trials", self.auto)):
            if getattr(self, name) is not None and not used:
                raise ValueError(f"{name} requires auto, because only the planner uses it")
        return self

    def _chooses_sharding(self) -> bool:
        return self.auto and "sharding" not in self.model_fields_set

    def mapping(self, world: int) -> ParallelConfig:
        """Return the mapping of ``world`` ranks. Raises ``ConfigError`` if the sizes do not fit, or with ``auto``."""
        if self.auto:
            raise ConfigError("parallel.auto chooses the mapping when a run starts; use moe-comm train")
        result = ParallelConfig.of(world, tp=self.tp, cp=self.cp, dp=self.dp, pp=self.pp, ep=self.ep, etp=self.etp)
        result.check_replicas(self.dp_replicate)
        return result


class BalanceSection(Section):
    """When experts are lent to other ranks for one forward and backward pass; see ``moe_comm.Balance``.

    Attributes:
        rows: maximum rows of a rank, as a multiple of the mean, where lending pays.
        memory: maximum rows of a rank, as a multiple of the rows of the largest batch of a rank. None: no such limit.
        copies: slots for experts of other ranks on each rank, in each layer. None: as many as its experts.
        worth: rows of the busiest rank that each copy must save. None: from the size of an expert and the next two.
        flops: FLOP/s of a rank in the GEMMs of its experts. None: 5e10 on a CPU, 6e14 on a GPU.
        bytes_per_s: rate at which a rank receives weights. None: 5e9 on one host, 1.25e8 between hosts; for GPUs 4.5e11
            and 5e10.
    """

    rows: float = Field(default=1.125, ge=1, le=MOST_RANKS)
    memory: float | None = Field(default=None, ge=1, le=MOST_RANKS)
    copies: int | None = Field(default=None, ge=1, le=MOST_EXPERTS)
    worth: int | None = Field(default=None, ge=0, le=MOST)
    flops: float | None = Field(default=None, ge=1e6, le=1e18)
    bytes_per_s: float | None = Field(default=None, ge=1e6, le=1e18)

    def settings(self) -> Balance:
        """Return the settings of the layers."""
        return Balance(**self.model_dump())


class PlacementSection(Section):
    """Placement of experts on the expert-parallel ranks.

    Attributes:
        kind: "fixed": consecutive experts on each rank. "relocate": experts move between ranks when a few ranks get
            most of the rows. The model, its gradients and the checkpoints do not change.
        every: steps between decisions.
        window: a decision is made from the loads of the last ``window`` steps of the interval since the previous
            decision, and of the interval before it. After wrong switches, from those of up to 8 intervals.
        threshold: share of the busiest rank's rows that a switch must save.
        balance: with "fixed", lend experts to other ranks in passes in which their homes have too many rows:
            ``{rows = 1.125}``, and the other settings of ``moe_comm.Balance``. None: never.
    """

    kind: PlacementKind = "fixed"
    every: int = Field(default=100, ge=1)
    window: int = Field(default=5, ge=1, le=MOST_STEPS)
    threshold: float = Field(default=0.05, ge=0, lt=1)
    balance: BalanceSection | None = None

    @field_validator("kind", mode="before")
    @classmethod
    def _check_kind(cls, kind: object) -> object:
        if kind not in KINDS:
            raise ValueError(
                f"must be one of {', '.join(KINDS)}. For experts that several ranks compute, set placement.balance"
            )
        return kind

    @model_validator(mode="after")
    def _check_balance(self) -> Self:
        if self.balance is not None and self.kind != "fixed":
            raise ValueError(f'placement.balance chooses the copies, so it needs kind "fixed"; got {self.kind!r}')
        return self

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        DecisionSettings(every=self.every, window=self.window)  # raises ConfigError
        return self

    def first(self, num_experts: int, world: int) -> Placement:
        """Return the placement of the first step on ``world`` ranks."""
        first = Placement.contiguous(num_experts, world)
        return first if self.balance is None else self.balance.settings().placement(first)


class PayloadSection(Section):
    """Wire dtypes; see ``moe_comm.dispatch.WireDtypes``.

    Attributes:
        dispatch: wire dtype of tokens in dispatch.
        combine: wire dtype of expert outputs in combine.
        dispatch_backward: wire dtype of the gradients of dispatched tokens.
        combine_backward: wire dtype of the gradients of expert outputs.
    """

    dispatch: WireDtypeName = "same"
    combine: WireDtypeName = "same"
    dispatch_backward: WireDtypeName = "same"
    combine_backward: WireDtypeName = "same"

    def wire_dtypes(self) -> WireDtypes:
        """Return the wire dtypes for ``DispatchOptions``."""
        return WireDtypes(self.dispatch, self.combine, self.dispatch_backward, self.combine_backward)


class CheckpointSection(Section):
    """Checkpoints on disk and snapshots in memory.

    Attributes:
        every: steps between checkpoints. 0: only when the run stops.
        keep: number of complete checkpoints to keep; older ones are deleted.
        background: write checkpoints while training continues.
        resume: "no": start a new run. "auto": resume the newest run of this name if it has a checkpoint and remaining
            steps, else start a new run. Otherwise: the folder of the run or checkpoint to resume from.
        peer_every: steps between in-memory snapshots, on this host and on a peer rank, from which restarted ranks
            resume. 0: none.
    """

    every: int = Field(default=0, ge=0)
    keep: int = Field(default=2, ge=1)
    background: bool = True
    resume: str = Field(default="no", min_length=1)
    peer_every: int = Field(default=0, ge=0)


class WatchSection(Section):
    """Detection of hung and dead ranks; see ``moe_comm.runtime.watch``.

    Attributes:
        enabled: run a watcher thread on each rank.
        stuck_s: seconds without progress until a rank that others wait for is reported as hung, or ten times its
            longest pause so far if that is longer.
        start_s: the same limit until the rank's first step ends.
        end: kill a hung rank, so that the ranks exit and can be restarted. False: only report it.
    """

    enabled: bool = True
    stuck_s: float = Field(default=5.0, gt=0)
    start_s: float = Field(default=300.0, gt=0)
    end: bool = True


class GuardSection(Section):
    """Detection of corrupted rows, of weights that differ between ranks, and of spikes in loss and gradient norm.

    Attributes:
        checksums: verify checksums of dispatched rows; a step with a corrupted row is rerun.
        weights_every: steps between comparisons of the weights that several ranks hold, which are also compared when
            the run starts or resumes. A comparison reads the weights once. 0: only then.
        loss_spike, norm_spike: a loss or gradient norm above this multiple of its mean over the last ``window`` updates
            is a spike. None: no detection.
        window: updates in the mean of the spike detection. No spike is detected before this number of updates.
        on_spike: "warn": log it. "skip": discard the step. "rerun": rerun the step; if the second result differs, the
            first was a transient fault and the second is used.
    """

    checksums: bool = False
    weights_every: int = Field(default=0, ge=0)
    loss_spike: float | None = Field(default=None, gt=1)
    norm_spike: float | None = Field(default=None, gt=1)
    window: int = Field(default=32, ge=2, le=MOST_STEPS)
    on_spike: Literal["warn", "skip", "rerun"] = "warn"


class FaultsSection(Section):
    """Fault injection; see ``moe_comm.observe.faults``.

    Attributes:
        plan: fault specifications, such as "kill:rank=1,step=5".
        seed: seed of random faults.
    """

    plan: list[str] = Field(default=[])
    seed: int = Field(default=0, ge=0, lt=2**31)


class ObserveSection(Section):
    """Spans (recorded time intervals) and per-rank records in the run folder; see ``moe_comm.observe``.

    Attributes:
        events: record spans.
        records: capacity of each rank's ring buffer, in spans.
        every: the spans of every ``every``-th step are written to the run folder. 0: write spans only after faults.
        loads: steps between the expert loads written to the run folder. 0: as ``every``.
        series: maximum number of per-layer metrics written in one step.
    """

    events: bool = True
    records: int = Field(default=4096, ge=64, le=2**20)
    every: int = Field(default=20, ge=0)
    loads: int = Field(default=0, ge=0)
    series: int = Field(default=200, ge=0, le=MOST)
