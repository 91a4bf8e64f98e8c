"""The sections of a training run's configuration: what each setting means, its default and its bounds."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

from moe_comm.dispatch.wire_dtype import WireDtypeName, WireDtypes
from moe_comm.topology import ParallelConfig

Family = Literal["qwen3_moe", "olmoe", "mixtral", "deepseek_v3"]


class Section(BaseModel):
    """A group of settings: unknown keys, wrong types and NaN are refused, and nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunSection(Section):
    """What to run, for how long, and where its folder goes (``folder/name-date``).

    time_limit_s: training stops cleanly at the first step past it; None: no limit.
    eval_every: steps between measurements of the validation loss; 0: only at the end. eval_batches: batches of
        validation text in each.
    sample_tokens: length of the text sample at the end, 0 for none. temperature: of its sampling.
    log_every: steps between lines where the output is not a terminal.
    nonfinite: what a NaN or infinite loss or gradient does, on all ranks alike: end the run, leave out the step, or run
        it again in place: if it is there again the run ends, else it goes on with the second result.
    gc_every: steps between garbage collections, by all ranks after the same step; 0: whenever Python sees fit.
    """

    name: str = Field(default="train", min_length=1, pattern=r"^[\w.-]+$")
    folder: str = Field(default="runs", min_length=1)
    seed: int = Field(default=0, ge=0, lt=2**31)
    steps: int = Field(default=300, ge=1)
    time_limit_s: float | None = Field(default=None, gt=0)
    eval_every: int = Field(default=0, ge=0)
    eval_batches: int = Field(default=8, ge=1)
    sample_tokens: int = Field(default=400, ge=0)
    temperature: float = Field(default=0.7, gt=0)
    log_every: int = Field(default=20, ge=1)
    nonfinite: Literal["stop", "skip", "rerun"] = "stop"
    gc_every: int = Field(default=50, ge=0)


class DataSection(Section):
    """The text, and how it becomes batches.

    source: "pydoc" (the language reference inside every Python), "stdlib" (the source text of its standard library), a
        file, a folder or a glob pattern; or a list of these. weights: share of each source; None: by equal parts.
    format: of the files; "auto" goes by their suffix. field: key or column that holds the text in JSONL and Parquet.
    tokenizer: "bytes", "bpe" (trained from the text, ``vocab`` entries), or the path of a tokenizer.json.
    end_of_text: name of the token that ends a document in a tokenizer file; None: found by well-known names.
    cache: folder of prepared token files. workers: processes that tokenise; 0: by the amount of text.
    batch: sequences of ``seq_len`` tokens in one step, over all ranks together. micro_batches: parts in which a step
        takes them one after another; each part is spread over the data-parallel ranks.
    validation: the fraction at the end of each source that training never sees.
    shuffle: another order of the sequences in each epoch.
    packing: how documents fill sequences. documents: whether a token sees earlier documents of its sequence.
    verify: check every byte of the token files at the start, or each block when it is read.
    """

    source: str | list[str] = "pydoc"
    weights: list[float] | None = None
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    field: str = Field(default="text", min_length=1)
    tokenizer: str = Field(default="bytes", min_length=1)
    vocab: int = Field(default=4096, ge=257)
    end_of_text: str | None = None
    cache: str = Field(default="runs/data", min_length=1)
    workers: int = Field(default=0, ge=0)
    seq_len: int = Field(default=256, ge=2)
    batch: int = Field(default=16, ge=1)
    micro_batches: int = Field(default=1, ge=1)
    validation: float = Field(default=0.1, gt=0, lt=1)
    packing: Literal["contiguous", "best_fit", "random"] = "contiguous"
    documents: Literal["joined", "separate"] = "joined"
    shuffle: bool = True
    verify: Literal["all", "touched"] = "all"

    @model_validator(mode="after")
    def _parts(self) -> Self:
        if self.batch % self.micro_batches:
            raise ValueError(f"batch ({self.batch}) must be a multiple of micro_batches ({self.micro_batches})")
        if self.weights is not None and len(self.weights) != len(self.sources):
            raise ValueError(
                f"weights must hold one number for each of {len(self.sources)} sources; got {self.weights}"
            )
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,) if isinstance(self.source, str) else tuple(self.source)


class ModelSection(Section):
    """Shape of the model. ``family`` says which published architecture it is, and so what its weights export to.

    pretrained: folder of a Hugging Face model of a known family, whose architecture and weights training starts from;
        of the other keys only losses, bias_rate, capacity, dtype and recomputing then count.
    kv_heads: None: as many as ``heads``. head_dim: None: hidden / heads. rope_theta: base of the position angles.
    window: a token sees this many tokens, itself included; None: all before it (mixtral only).
    ffn: width of one expert. shared_ffn: width of the shared expert, 0 for none. first_dense: layers at the start that
        have a plain feed-forward block of width ``dense_ffn`` instead of experts.
    expert_groups, top_groups, route_scale: of DeepSeek-V3's group-limited routing.
    q_rank, kv_rank, nope_dim, rope_dim, v_dim: of its latent attention.
    tie: the output layer shares the embedding.
    parallel_block: attention and feed-forward side by side (MegaScale); no family to export to.
    shortcut: layers with experts have two attentions and two dense blocks of width ``dense_ffn``, beside which the
        experts' rows travel (LongCat-Flash); no family to export to.
    aux_loss: coefficient of the load-balancing loss of each MoE layer. z_loss: of the router's z-loss.
    bias_rate: step of DeepSeek-V3's correction bias after each update.
    capacity: slots per expert over the mean load; None drops nothing. capacity_scope: over a rank's tokens or the
        whole micro-batch.
    vocab: rows of the embedding; None: as many as the tokenizer has ids. More leaves rows unused.
    init_std: standard deviation of the initial weights. dtype: of the weights that compute; masters are fp32.
    recompute: what the backward pass computes again instead of keeping it. recompute_experts: experts then keep their
        rows alone, at the price of one matrix product more.
    max_length: longest text the model is for; None: ``data.seq_len``.
    """

    family: Family = "qwen3_moe"
    pretrained: str | None = None
    vocab: int | None = Field(default=None, ge=1)
    hidden: int = Field(default=128, ge=2)
    layers: int = Field(default=4, ge=1)
    heads: int = Field(default=4, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2)
    rope_theta: float = Field(default=10_000.0, gt=0)
    window: int | None = Field(default=None, ge=1)
    experts: int = Field(default=8, ge=1)
    top_k: int = Field(default=2, ge=1)
    ffn: int = Field(default=256, ge=1)
    shared_ffn: int = Field(default=0, ge=0)
    first_dense: int = Field(default=0, ge=0)
    dense_ffn: int = Field(default=0, ge=0)
    expert_groups: int = Field(default=1, ge=1)
    top_groups: int = Field(default=1, ge=1)
    route_scale: float = Field(default=1.0, gt=0)
    q_rank: int | None = Field(default=None, ge=1)
    kv_rank: int = Field(default=32, ge=1)
    nope_dim: int = Field(default=32, ge=1)
    rope_dim: int = Field(default=16, ge=2)
    v_dim: int = Field(default=32, ge=1)
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
    max_length: int | None = Field(default=None, ge=1)

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
            raise ValueError("first_dense needs dense_ffn, the width of those layers")
        if self.shortcut and not self.dense_ffn:
            raise ValueError("shortcut needs dense_ffn, the width of the dense blocks beside the experts")
        if self.shortcut and self.parallel_block:
            raise ValueError("shortcut and parallel_block are two forms of a layer; choose one")
        return self


class OptimizerSection(Section):
    """The optimizer, and its learning rate: linear warm-up over ``warmup`` steps, then ``schedule``.

    schedule: "cosine" or "linear" down to ``final_lr`` x lr at the last step; "wsd": constant, then linear over the
        last ``decay`` steps; "constant".
    betas, eps: AdamW and LAMB. momentum: SGD and Muon; None: 0 and 0.95. weight_decay: on matrices only.
    clip: largest global gradient norm, 0 for any.
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
        """``momentum``, or what is usual for the optimizer."""
        return self.momentum if self.momentum is not None else 0.95 if self.kind == "muon" else 0.0

    @model_validator(mode="after")
    def _betas(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1); got {list(self.betas)}")
        return self


class ParallelSection(Section):
    """How the work is spread; see ``moe_comm.topology.ParallelConfig``.

    ranks: processes the command line starts; under torchrun its own number counts.
    dp: None: what tp, cp and pp leave. ep: ranks that share one set of experts; None: the most that fit.
    context: how a sequence is spread over cp ranks. schedule: of the pipeline.
    virtual: pipeline stages on each rank (interleaved schedules). stage_layers: layers of each stage; None: even.
    sharding: what data-parallel ranks keep of the same weights: all ("replicate"), all but optimizer state ("zero1"),
        a part ("fsdp").
    compress: gradients travel as bf16 and are summed in fp32.
    overlap_chunks: parts in which tokens travel behind the products of linear layers (with tp, or with cp and
        "ulysses") and of experts; 0: before and after them. "auto": see ``moe_comm.overlap.options.Overlap``.
    executor: of whole expert layers, with ``overlap_chunks``; see ``moe_comm.overlap.options.Overlap``.
    interleave: two micro-batches at a time, which take turns: the rows of one travel while the other computes. They
        travel with ``overlap_chunks``; not with a pipeline, FSDP or full recomputing.
    backend: dispatcher; see ``moe_comm.dispatch.BACKENDS``.
    deterministic: its results have the same bits on any number of ranks; False lets some move fewer bytes.
    """

    ranks: int = Field(default=2, ge=1)
    tp: int = Field(default=1, ge=1)
    cp: int = Field(default=1, ge=1)
    dp: int | None = Field(default=None, ge=1)
    pp: int = Field(default=1, ge=1)
    ep: int | None = Field(default=None, ge=1)
    etp: int = Field(default=1, ge=1)
    context: Literal["ulysses", "ring", "token_ring"] = "ulysses"
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev"] = "1f1b"
    virtual: int | None = Field(default=None, ge=1)
    stage_layers: list[int] | None = None
    sharding: Literal["replicate", "zero1", "fsdp"] = "replicate"
    compress: bool = False
    overlap_chunks: NonNegativeInt | Literal["auto"] = 0
    executor: Literal["auto", "serial", "pipelined", "device"] = "auto"
    interleave: bool = False
    backend: Literal["auto", "local", "shared_memory", "peer_to_peer", "all_to_all", "all_gather", "hierarchical"] = (
        "auto"
    )
    deterministic: bool = True
    timeout_s: float = Field(default=300.0, gt=0)

    def mapping(self, world: int) -> ParallelConfig:
        """These degrees on ``world`` ranks.

        Raises:
            ConfigError: they do not fit.
        """
        return ParallelConfig.of(world, tp=self.tp, cp=self.cp, dp=self.dp, pp=self.pp, ep=self.ep, etp=self.etp)


class PayloadSection(Section):
    """What rows look like while they travel between the ranks that share experts; see ``moe_comm.dispatch.WireDtypes``.

    dispatch: tokens to their experts. combine: results back. dispatch_backward, combine_backward: their gradients.
    """

    dispatch: WireDtypeName = "same"
    combine: WireDtypeName = "same"
    dispatch_backward: WireDtypeName = "same"
    combine_backward: WireDtypeName = "same"

    def wire_dtypes(self) -> WireDtypes:
        """As ``DispatchOptions`` takes them."""
        return WireDtypes(self.dispatch, self.combine, self.dispatch_backward, self.combine_backward)


class CheckpointSection(Section):
    """Checkpoints, from which a run goes on.

    every: steps between them; 0: only when the run is told to stop. keep: newest complete ones that stay.
    background: write while training goes on.
    resume: "no": start afresh; "auto": go on with the newest run of this name if it left a checkpoint and has steps to
        do, or start; else the folder of a run, or of one of its checkpoints, to go on from.
    peer_every: steps between copies of the state into the memory of this host and of another rank, from which ranks
        that are started again go on; 0: none.
    """

    every: int = Field(default=0, ge=0)
    keep: int = Field(default=2, ge=1)
    background: bool = True
    resume: str = Field(default="no", min_length=1)
    peer_every: int = Field(default=0, ge=0)


class WatchSection(Section):
    """Ranks that watch each other; see ``moe_comm.runtime.watch``.

    enabled: a thread in each rank that says that it lives and looks at the others.
    stuck_s: seconds without a sign of progress from a rank for which others wait, until it is reported as stuck; ten
        times the longest pause it has made so far, if that is more. start_s: the same, before a rank's first step ends.
    end: whether a stuck rank is then killed, so that the ranks end and can be started again; False only reports.
    """

    enabled: bool = True
    stuck_s: float = Field(default=5.0, gt=0)
    start_s: float = Field(default=300.0, gt=0)
    end: bool = True


class GuardSection(Section):
    """Against numbers that are wrong without being NaN.

    checksums: rows are checked when they arrive at their experts; a step with a damaged row is run again.
    loss_spike, norm_spike: a loss or gradient norm of more than this many times its mean over the last ``window``
        updates is a spike; None: never.
    on_spike: "warn": say so; "skip": leave out the step; "rerun": run it again in place, and take the second result if
        it differs from the first, which was then a transient fault.
    """

    checksums: bool = False
    loss_spike: float | None = Field(default=None, gt=1)
    norm_spike: float | None = Field(default=None, gt=1)
    window: int = Field(default=32, ge=2)
    on_spike: Literal["warn", "skip", "rerun"] = "warn"


class FaultsSection(Section):
    """Faults on purpose; see ``moe_comm.observe.faults``.

    plan: each like "kill:rank=1,step=5". seed: of what is left to chance.
    """

    plan: list[str] = []
    seed: int = Field(default=0, ge=0, lt=2**31)


class ObserveSection(Section):
    """What a run writes down about itself beside its metrics; see ``moe_comm.observe``.

    events: record spans. records: spans that a rank's ring holds. every: steps between those whose spans are written to
        the run's folder; 0: none but on faults. series: most metrics of single layers and experts in one step.
    """

    events: bool = True
    records: int = Field(default=4096, ge=64, le=2**20)
    every: int = Field(default=20, ge=0)
    series: int = Field(default=200, ge=0)
