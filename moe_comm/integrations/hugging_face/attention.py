"""Replace the attention of a loaded Hugging Face model by one that is spread over ranks.

    before, on every rank    norm ─▶ self_attn: all heads, all tokens ─▶ +
    after, tp 2              norm ─▶ self_attn: half of the heads ── sum over tp ─▶ +      the same tokens on both
    after, cp 2              norm ─▶ self_attn: own tokens to all tokens ─▶ +              half of the tokens on each

Everything else stays transformers' own code: embeddings, norms, rotary tables (of any kind), feed-forward and loss.
Parameters keep their names. ``swap_moe`` may be used on the same model, before or after.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.errors import ConfigError, UnsupportedModel
from moe_comm.integrations.hugging_face.families import require_transformers
from moe_comm.integrations.hugging_face.sequence import DOCUMENTS, prepare
from moe_comm.layers.attention.config import AttentionConfig, Context, MLAConfig, QKNorm, RopeConfig
from moe_comm.layers.attention.layer import Attention, FullNorm
from moe_comm.layers.attention.rope import RopeTable
from moe_comm.layers.attention.sequence import Documents
from moe_comm.layers.parallel.collectives import gather_values, group_rank, group_size
from moe_comm.layers.parallel.linear import ColumnParallelLinear, RowParallelLinear
from moe_comm.topology import Sharding

ATTENTION_CLASSES = (
    "DeepseekV3Attention",
    "LlamaAttention",
    "MistralAttention",
    "MixtralAttention",
    "OlmoeAttention",
    "Qwen2Attention",
    "Qwen2MoeAttention",
    "Qwen3Attention",
    "Qwen3MoeAttention",
)
"""Of transformers. Others have what is not known here (sinks, gates, soft caps), and are refused."""

NAMES = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "q_a": "q_a_proj",
    "q_a_norm": "q_a_layernorm",
    "q_b": "q_b_proj",
    "kv_a": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
    "kv_b": "kv_b_proj",
}
"""Our names of submodules, and transformers'."""

IMPLEMENTATION = "moe_comm"
"""As the attention implementation of a swapped decoder, so that transformers makes no masks for it."""


class SwappedAttention(Attention):
    """``Attention`` under transformers' names and with its call.

    Args:
        attention: the module it replaces, whose parameters it takes: as they are with one tp rank, else copies of this
            rank's part.
    """

    def __init__(
        self,
        attention: Any,
        tp_group: ProcessGroup | None,
        cp_group: ProcessGroup | None,
        context: Context,
    ) -> None:
        config = read_config(attention)
        super().__init__(
            config,
            tp_group,
            cp_group,
            context=context,
            sequence_parallel=False,
            scale=attention.scaling,
            device="meta",
        )
        self._modules = {NAMES.get(name, name): child for name, child in self._modules.items() if child is not None}
        self.layer_idx = attention.layer_idx
        self.held = _shardings(self)
        place, sizes = self._place()
        for name, sharding in self.held.items():
            whole = attention.get_parameter(name)
            if group_size(tp_group) > 1:
                part = sharding.take(whole.detach(), place, sizes) if sharding.splits else whole.detach().clone()
                whole = nn.Parameter(part, requires_grad=whole.requires_grad)
            module, _, key = name.rpartition(".")
            self.get_submodule(module).register_parameter(key, whole)
        self.train(attention.training)

    def __getattr__(self, name: str) -> Any:
        # The layer's own code asks for q, which is registered as q_proj.
        return super().__getattr__(NAMES.get(name, name))

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """[B, S, D] to the same, and no attention weights. ``position_embeddings``: cosines and sines [B or 1, S, d].

        Masks are not looked at: the hook before the decoder has turned them into documents.
        """
        half = position_embeddings[0].shape[-1] // 2
        table = RopeTable(*(part[..., :half] for part in position_embeddings))
        documents: Documents | None = kwargs.get(DOCUMENTS)
        return super().forward(hidden_states, table, documents), None

    def _place(self) -> tuple[dict[str, int], dict[str, int]]:
        return {"tp": group_rank(self.tp_group)}, {"tp": group_size(self.tp_group)}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A checkpoint of the whole model loads too: each rank takes its own part out of the full tensors.
        place, sizes = self._place()
        for name, sharding in self.held.items():
            full = state_dict.get(prefix + name)
            if full is not None and sharding.splits and sizes["tp"] > 1 and tuple(full.shape) == sharding.shape:
                state_dict[prefix + name] = sharding.take(full, place, sizes)
        super()._load_from_state_dict(state_dict, prefix, *args)


def swap_attention(
    model: nn.Module,
    tp_group: ProcessGroup | None = None,
    cp_group: ProcessGroup | None = None,
    *,
    context: Context = "ulysses",
) -> Any:
    """Spread the attention of a loaded transformers model over ranks.

        model = swap_attention(AutoModelForCausalLM.from_pretrained(folder), cp_group=dist.group.WORLD, context="ring")
        loss = model(**shard_inputs(input_ids, labels=input_ids, cp_group=dist.group.WORLD, context="ring")).loss

    Every rank must hold the same weights before. Ranks of ``tp_group`` are fed the same tokens and each computes some
    of the heads; their gradients are complete, of the replicated parameters as of the own parts. Ranks of ``cp_group``
    are fed their part of each sequence (``shard_inputs``), and their gradients are summed over ``cp_group`` (for
    example by ``sum_replicated_gradients``). The sequence must be a multiple of cp, or of 2 * cp in a ring.

    ``attention_mask`` [B, S] marks padding, which is not attended to; positions that start again begin a new document.
    There is no key-value cache: generate with ``use_cache=False``, and without ``cp_group``.

    Args:
        model: a ``PreTrainedModel`` of a family in ``ATTENTION_CLASSES``, or a module that contains one's decoder;
            changed in place.
        tp_group: ranks that share the heads; None: none. Heads and key-value heads must divide by it.
        cp_group: ranks that share the sequence; None: none.
        context: how they do, "ulysses" (heads must divide by tp * cp), "ring" or "token_ring".

    Returns:
        ``model``.

    Raises:
        UnsupportedModel: no attention that is known, or dropout in it; nothing changed.
        ConfigError: already swapped, or heads do not divide; nothing changed.
    """
    require_transformers()
    decoders = _decoders(model)
    # All are built before the first is put in place, so that an error changes nothing.
    swapped = {
        f"{name}.layers.{index}".lstrip("."): SwappedAttention(layer.self_attn, tp_group, cp_group, context)
        for name, decoder in decoders.items()
        for index, layer in enumerate(decoder.layers)
    }
    for name, attention in swapped.items():
        model.get_submodule(name).self_attn = attention
    for decoder in decoders.values():
        decoder.config._attn_implementation = IMPLEMENTATION
        decoder.register_forward_pre_hook(prepare(cp_group, context), with_kwargs=True)
    if group_size(tp_group) > 1 and hasattr(model, "save_pretrained"):
        guard: Any = model
        guard.save_pretrained = partial(_refuse_save, type(model).__name__)
    return model


def swapped_attention(model: nn.Module) -> dict[str, SwappedAttention]:
    """The swapped attention modules of ``model`` by name; empty before ``swap_attention``."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SwappedAttention)}


def gather_attention(model: nn.Module) -> dict[str, Tensor]:
    """Full weights of the swapped attention, under the model's names, on the CPU. Collective over ``tp_group``.

    Put them into what ``model.state_dict()`` or ``gather_state_dict(model)`` gives to have the unswapped model's.

    Raises:
        ConfigError: ``model`` is not swapped.
    """
    modules = swapped_attention(model)
    if not modules:
        raise ConfigError(f"{type(model).__name__} has no swapped attention; call swap_attention(model, ...) first")
    full = {}
    for prefix, module in modules.items():
        tp = group_size(module.tp_group)
        for name, sharding in module.held.items():
            local = module.get_parameter(name).detach()
            if tp > 1 and sharding.splits:
                whole = local.new_empty(sharding.shape)
                for rank, part in enumerate(gather_values(local.contiguous(), module.tp_group, "gather_attention")):
                    for box in sharding.boxes({"tp": rank}, {"tp": tp}):
                        whole[box.whole] = part[box.local]
                local = whole
            full[f"{prefix}.{name}".lstrip(".")] = local.cpu()
    return full


def read_config(attention: Any) -> AttentionConfig:
    """What a module of transformers computes.

    Raises:
        UnsupportedModel: its class is not known, or it has dropout.
    """
    kind, config = type(attention).__name__, attention.config
    if kind not in ATTENTION_CLASSES:
        raise UnsupportedModel(
            f"{kind} is not an attention that can be swapped; those are {', '.join(ATTENTION_CLASSES)}"
        )
    if attention.attention_dropout:
        raise UnsupportedModel(
            f"{kind} has attention_dropout {attention.attention_dropout}, which swapped attention does not do; "
            "set it to 0 in the config"
        )
    if getattr(config, "layer_types", None):
        windowed = config.layer_types[attention.layer_idx] == "sliding_attention"
        window = config.sliding_window if windowed else None
    else:
        window = getattr(config, "sliding_window", None)
    output = attention.o_proj
    if hasattr(attention, "kv_a_proj_with_mqa"):
        return AttentionConfig(
            hidden=output.out_features,
            heads=attention.num_heads,
            kv_heads=attention.num_heads,
            head_dim=attention.qk_head_dim,
            rope=RopeConfig(interleaved=bool(config.rope_interleave)),
            window=window,
            bias=attention.kv_a_proj_with_mqa.bias is not None,
            out_bias=output.bias is not None,
            mla=MLAConfig(
                attention.q_lora_rank,
                attention.kv_lora_rank,
                attention.qk_nope_head_dim,
                attention.qk_rope_head_dim,
                attention.v_head_dim,
            ),
            norm_eps=attention.kv_a_layernorm.variance_epsilon,
        )
    width, norm = attention.head_dim, getattr(attention, "q_norm", None)
    qk_norm: QKNorm = "none" if norm is None else "full" if kind == "OlmoeAttention" else "head"
    return AttentionConfig(
        hidden=output.out_features,
        heads=attention.q_proj.out_features // width,
        kv_heads=attention.k_proj.out_features // width,
        head_dim=width,
        qk_norm=qk_norm,
        window=window,
        bias=attention.q_proj.bias is not None,
        out_bias=output.bias is not None,
        clip_qkv=getattr(config, "clip_qkv", None),
        norm_eps=1e-6 if norm is None else norm.variance_epsilon,
    )


def _decoders(model: nn.Module) -> dict[str, Any]:
    """Modules with layers of attention, by name.

    Raises:
        UnsupportedModel, ConfigError: see ``swap_attention``.
    """
    already = swapped_attention(model)
    if already:
        raise ConfigError(f"the attention of {type(model).__name__} is already swapped ({next(iter(already))})")
    found: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and hasattr(module, "rotary_emb")
    }
    if not found:
        raise UnsupportedModel(f"{type(model).__name__} has no decoder of transformers (layers beside a rotary_emb)")
    for name, decoder in found.items():
        for index, layer in enumerate(decoder.layers):
            attention = getattr(layer, "self_attn", None)
            if attention is None:
                raise UnsupportedModel(f"{name}.layers.{index} ({type(layer).__name__}) has no self_attn")
            if "forward" in vars(attention):
                raise UnsupportedModel(f"{name}.layers.{index}.self_attn has its forward replaced; load without that")
            if any(type(p) is not nn.Parameter for p in attention.parameters()):
                raise UnsupportedModel(f"{name}.layers.{index}.self_attn is already distributed, or quantized")
    return found


def _shardings(attention: SwappedAttention) -> dict[str, Sharding]:
    """Of every parameter, under transformers' names; those that no module cuts are replicated."""
    found = {name: Sharding(tuple(p.shape)) for name, p in attention.named_parameters()}
    for prefix, module in attention.named_children():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, FullNorm)):
            found.update({f"{prefix}.{name}": sharding for name, sharding in module.shardings().items()})
    return found


def _refuse_save(kind: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ConfigError(
        f"save_pretrained of this {kind} would write this rank's heads only. Pass "
        "{**model.state_dict(), **gather_attention(model)} as state_dict to type(model).save_pretrained(model, ...)."
    )
