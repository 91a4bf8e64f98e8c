"""Build the ``TransformerConfig`` of a ``[model]`` section.

             attention                   router                                      feed-forward
mixtral      GQA, window                 softmax, weights sum to 1                   experts
qwen3_moe    GQA, QK-norm per head       softmax, weights sum to 1                   experts
olmoe        MHA, QK-norm of full width  softmax, weights sum to 1                   experts
deepseek_v3  MLA                         sigmoid, groups, correction bias, scale     shared + experts, dense first
"""

from __future__ import annotations

from dataclasses import replace

from moe_comm.dispatch.slots.capacity import Capacity
from moe_comm.layers.attention.config import AttentionConfig, MLAConfig, RopeConfig
from moe_comm.layers.moe.layer import MoEConfig
from moe_comm.layers.moe.router import RouterConfig
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.train.sections import ModelSection

NORM_EPS = {"mixtral": 1e-5, "qwen3_moe": 1e-6, "olmoe": 1e-5, "deepseek_v3": 1e-6}


def transformer_config(section: ModelSection, vocab: int, seq_len: int) -> TransformerConfig:
    """Return the model of ``section`` with ``vocab`` embedding rows and sequences of up to ``seq_len`` tokens."""
    eps = NORM_EPS[section.family]
    return TransformerConfig(
        vocab=vocab,
        hidden=section.hidden,
        layers=section.layers,
        attention=_attention(section, eps),
        moe=MoEConfig(
            hidden=section.hidden,
            ffn=section.ffn,
            router=_router(section),
            shared_ffn=section.shared_ffn,
            capacity=_capacity(section),
            recompute=section.recompute_experts,
            expert_gemm_dtype=section.expert_gemm_dtype,
        ),
        max_length=section.max_length or seq_len,
        dense_layers=tuple(range(section.first_dense)),
        dense_ffn=section.dense_ffn,
        norm_eps=eps,
        parallel_block=section.parallel_block,
        shortcut=section.shortcut,
        tie=section.tie,
        init_std=section.init_std,
    )


def _attention(section: ModelSection, eps: float) -> AttentionConfig:
    latent = section.family == "deepseek_v3"
    mla = MLAConfig(section.q_rank, section.kv_rank, section.nope_dim, section.rope_dim, section.v_dim)
    qk_norm: dict[str, str] = {"qwen3_moe": "head", "olmoe": "full"}
    return AttentionConfig(
        hidden=section.hidden,
        heads=section.heads,
        kv_heads=section.heads if latent else section.kv_heads or section.heads,
        head_dim=section.head_dim or section.hidden // section.heads,
        rope=RopeConfig(section.rope_theta, interleaved=latent),
        qk_norm=qk_norm.get(section.family, "none"),  # type: ignore[arg-type]
        window=section.window,
        mla=mla if latent else None,
        norm_eps=eps,
    )


def _router(section: ModelSection) -> RouterConfig:
    grouped = section.family == "deepseek_v3"
    return RouterConfig(
        num_experts=section.experts,
        top_k=section.top_k,
        score="sigmoid" if grouped else "softmax",
        normalize=True,
        scale=section.route_scale,
        num_groups=section.expert_groups,
        top_groups=section.top_groups,
        correction_bias=grouped,
        balance_loss=section.aux_loss,
        balance_form="sequence" if grouped else "batch",
        z_loss=section.z_loss,
    )


def with_training_settings(architecture: TransformerConfig, section: ModelSection) -> TransformerConfig:
    """Return ``architecture`` with the losses, capacity, recomputation and GEMM dtype of ``section``."""
    router = replace(architecture.moe.router, balance_loss=section.aux_loss, z_loss=section.z_loss)
    moe = replace(
        architecture.moe,
        router=router,
        capacity=_capacity(section),
        recompute=section.recompute_experts,
        expert_gemm_dtype=section.expert_gemm_dtype,
    )
    return replace(architecture, moe=moe)


def _capacity(section: ModelSection) -> Capacity | None:
    return None if section.capacity is None else Capacity(section.capacity, scope=section.capacity_scope)


def family_of(section: ModelSection) -> str:
    """Return the Hugging Face model type to export to."""
    if section.pretrained is None:
        return section.family
    # Imports transformers, which takes a second.
    from moe_comm.integrations.hugging_face.architecture import read_config

    family: str = read_config(section.pretrained).model_type
    return family
