"""Replace the attention of a loaded Hugging Face model by tensor- and context-parallel attention.

    before, on every rank    norm ─▶ self_attn: all heads, all tokens ─▶ +
    after, tp 2              norm ─▶ self_attn: half of the heads ── sum over tp ─▶ +    the same tokens on both ranks
    after, cp 2              norm ─▶ self_attn: local to all tokens ─▶ +                 half of the tokens on each rank

All other code remains transformers' own: embeddings, norms, rotary tables, feed-forward and loss. Parameter names do
not change. ``swap_moe`` may be used on the same model, before or after.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from moe_comm.comm.group_setup import as_group
from moe_comm.errors import ConfigError, InputError, MoeCommError, UnsupportedModel
from moe_comm.integrations.hugging_face.families import Ties, require_transformers
from moe_comm.integrations.hugging_face.state import gather_full, refuse_save
from moe_comm.layers.attention.config import AttentionConfig, Context, MLAConfig, QKNorm, RopeConfig
from moe_comm.layers.attention.layer import Attention, FullNorm
from moe_comm.layers.attention.rope import RopeTable
from moe_comm.layers.attention.sequence import Documents, local_positions, shard_sequence, unshard_sequence
from moe_comm.layers.data_parallel.optimizers import mark_replaced
from moe_comm.layers.data_parallel.replicas import check_loaded
from moe_comm.layers.parallel.collectives import channel_of, gather_values, group_rank, group_size
from moe_comm.layers.parallel.hooks import refuse_hooks, take_call_hooks
from moe_comm.layers.parallel.linear import ColumnParallelLinear, RowParallelLinear
from moe_comm.runtime.groups import warn_if_alone
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
"""Supported attention classes of transformers. Others have unsupported features (sinks, gates, soft caps)."""

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
"""Names of the submodules of ``Attention`` in transformers."""

IMPLEMENTATION = "moe_comm"
"""Attention implementation of a swapped decoder. transformers creates no masks for unknown implementations."""

DOCUMENTS = "moe_comm_documents"
"""Keyword argument that passes the documents from the hook to the attention modules."""
IGNORED = -100

Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


class SwappedAttention(Attention):
    """``Attention`` with the parameter names and the forward signature of transformers.

    Args:
        attention: the module to replace. With one tp rank its parameters are reused, else the local shards are copied.
        tp_group, cp_group, context: see ``swap_attention``.
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
        self.sharding_of = _shardings(self)
        names = {name for name, _ in attention.named_parameters()}
        if other := sorted(names - self.sharding_of.keys()):
            raise UnsupportedModel(
                f"{type(attention).__name__} of layer {self.layer_idx} has the parameter {other[0]}, which swapped "
                "attention does not have. Merge adapters (LoRA) of attention first, or adapt other modules"
            )
        place, sizes = self._place()
        for name, sharding in self.sharding_of.items():
            parameter = attention.get_parameter(name)
            if group_size(tp_group) > 1:
                full = parameter.detach()
                shard = sharding.take(full, place, sizes) if sharding.splits else full.clone()
                parameter = nn.Parameter(shard, requires_grad=parameter.requires_grad)
            module, _, key = name.rpartition(".")
            self.get_submodule(module).register_parameter(key, parameter)
        self.train(attention.training)

    def __getattr__(self, name: str) -> Any:
        # Attention.forward reads self.q, which is registered as q_proj.
        return super().__getattr__(NAMES.get(name, name))

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention on the local tokens.

        Args:
            hidden_states: [B, S, D].
            position_embeddings: cosines and sines, [B or 1, S, head dimension].
            attention_mask: ignored. The hook before the decoder converts masks to documents.

        Returns:
            [B, S, D], and None in place of the attention weights.
        """
        half = position_embeddings[0].shape[-1] // 2
        table = RopeTable(*(values[..., :half] for values in position_embeddings))
        documents: Documents | None = kwargs.get(DOCUMENTS)
        return super().forward(hidden_states, table, documents), None

    def _place(self) -> tuple[dict[str, int], dict[str, int]]:
        return {"tp": group_rank(self.tp_group)}, {"tp": group_size(self.tp_group)}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Also accept full tensors of the unswapped model: each rank takes its shard.
        place, sizes = self._place()
        for name, sharding in self.sharding_of.items():
            full = state_dict.get(prefix + name)
            if full is not None and sharding.splits and sizes["tp"] > 1 and tuple(full.shape) == sharding.shape:
                state_dict[prefix + name] = sharding.take(full, place, sizes)
        super()._load_from_state_dict(state_dict, prefix, *args)


def parallelize_attention(
    model: nn.Module,
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    cp_group: ProcessGroup | DeviceMesh | None = None,
    context: Context = "ulysses",
) -> Any:
    """Make the attention of a loaded transformers model tensor- and context-parallel.

        model = swap_attention(AutoModelForCausalLM.from_pretrained(folder), cp_group=dist.group.WORLD, context="ring")
        loss = model(**shard_inputs(input_ids, labels=input_ids, cp_group=dist.group.WORLD, context="ring")).loss

    Every rank must pass a model with the same weights. Ranks of ``group`` run the same tokens, and each rank computes
    some of the heads. Their gradients need no reduction over ``group``. Ranks of ``cp_group`` run their shard of each
    sequence (``shard_inputs``). Their gradients must be summed over ``cp_group``, for example by
    ``sum_replicated_gradients``. The sequence length must be a multiple of cp, or of 2 * cp for a ring.

    ``attention_mask`` [B, S] marks padding. A new document begins where ``position_ids`` restart. There is no key-value
    cache: generate with ``use_cache=False`` and without ``cp_group``.

    Args:
        model: a ``PreTrainedModel`` with attention of ``ATTENTION_CLASSES``, or a module that contains its decoder.
            Changed in place.
        group: ranks that share the heads, or a ``DeviceMesh`` with dimensions "tp" and "cp". The numbers of heads and
            key-value heads must be divisible by the number of ranks. None: heads are not sharded.
        cp_group: ranks that share the sequence. None: sequences are not sharded. Without both groups, a warning says
            so if ``torch.distributed`` has several ranks.
        context: form of context parallelism: "ulysses" (the number of heads must be divisible by tp * cp), "ring" or
            "token_ring".

    Returns:
        ``model``.

    Raises:
        UnsupportedModel: the attention is of an unsupported class, has dropout, or shares its weights. The model is
            unchanged.
        ConfigError: the attention is already swapped, or the number of heads is not divisible. The model is unchanged.
        RankMismatch: the ranks of a group passed different weights. On every rank; the model is unchanged.
    """
    require_transformers()
    if isinstance(group, DeviceMesh) and cp_group is None and "cp" in (group.mesh_dim_names or ()):
        cp_group = group.get_group("cp")
        tp_group = group.get_group("tp") if "tp" in (group.mesh_dim_names or ()) else None
    else:
        tp_group = as_group(group, "tp")
    cp_group = as_group(cp_group, "cp")
    if tp_group is None and cp_group is None:
        warn_if_alone("swap_attention", "keeps all heads and whole sequences")
    fault: MoeCommError | None = None
    decoders, swapped = {}, {}
    try:
        decoders = _decoders(model)
        _refuse(model, decoders, group_size(tp_group))
        # Build all modules before the first one is replaced, so that an error leaves the model unchanged.
        swapped = {
            f"{name}.layers.{index}".lstrip("."): SwappedAttention(layer.self_attn, tp_group, cp_group, context)
            for name, decoder in decoders.items()
            for index, layer in enumerate(decoder.layers)
        }
    except MoeCommError as error:
        fault = error
    groups = [group for group in (tp_group, cp_group) if group is not None and group_size(group) > 1]
    # The last comparison, without weights, sends a fault of the second group to the other ranks of the first one.
    for compared, over in [*((model, over) for over in groups), *((nn.Module(), over) for over in groups[:-1])]:
        try:
            check_loaded(compared, channel_of(over), fault)
        except MoeCommError as error:
            fault = fault or error
    if fault is not None:
        raise fault
    for name, attention in swapped.items():
        layer: Any = model.get_submodule(name)
        for key in attention.sharding_of:
            old, new = layer.self_attn.get_parameter(key), attention.get_parameter(key)
            mark_replaced(old, new, f"{name}.self_attn.{key}", "swap_attention")
        take_call_hooks(attention, layer.self_attn)
        layer.self_attn = attention
    for decoder in decoders.values():
        decoder.config._attn_implementation = IMPLEMENTATION
        decoder.register_forward_pre_hook(prepare(cp_group, context), with_kwargs=True)
    if group_size(tp_group) > 1:
        refuse_save(model, "heads")
    return model


swap_attention = parallelize_attention
"""Short alias of ``parallelize_attention``."""


def _refuse(model: nn.Module, decoders: Mapping[str, Any], tp: int) -> None:
    """Raise UnsupportedModel if attention of the decoders has something that the swapped one would lose."""
    blocks = {
        f"{path}.layers.{index}.self_attn".lstrip("."): layer.self_attn
        for path, decoder in decoders.items()
        for index, layer in enumerate(decoder.layers)
    }
    if tp > 1:
        Ties(model).refuse(blocks, "swap_attention")
    for name, module in blocks.items():
        if "forward" in vars(module):
            raise UnsupportedModel(f"the forward of {name} was replaced, by device_map offloading or a kernel")
        replaced = module.named_parameters(name) if tp > 1 else ()  # else the parameters are kept
        refuse_hooks("swap_attention", [(name, module)], replaced, calls=False)
        refuse_hooks("swap_attention", [(f"{name}.{key}", child) for key, child in module.named_modules() if key], ())


def swapped_attention(model: nn.Module) -> dict[str, SwappedAttention]:
    """Return the swapped attention modules of ``model`` by name. Empty before ``swap_attention``."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SwappedAttention)}


def gather_attention(model: nn.Module) -> dict[str, Tensor]:
    """Return the full weights of the swapped attention by parameter name, on the CPU. Collective over ``tp_group``.

    To get the state dict of the unswapped model, update ``model.state_dict()`` or ``gather_state_dict(model)`` with
    the result.

    Raises:
        ConfigError: ``model`` has no swapped attention.
    """
    if not swapped_attention(model):
        raise ConfigError(f"{type(model).__name__} has no swapped attention; call swap_attention(model, ...) first")
    return {
        f"{prefix}.{name}".lstrip("."): gather_full(module.get_parameter(name), sharding, module.tp_group, name)
        for prefix, module in model.named_modules(remove_duplicate=False)  # layers may be shared
        if isinstance(module, SwappedAttention)
        for name, sharding in module.sharding_of.items()
    }


def shard_inputs(
    input_ids: Tensor,
    labels: Tensor | None = None,
    *,
    cp_group: ProcessGroup | None,
    context: Context = "ulysses",
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> dict[str, Any]:
    """Shard a batch for a model swapped over ``cp_group``: ``model(**shard_inputs(ids, ids, cp_group=group))``.

    Labels are shifted *before* the sequence is sharded, because a rank does not hold the token after its last one. The
    sum of the losses over the ranks is the loss of the full batch. The sum of the gradients is its gradient
    (``sum_replicated_gradients`` over ``cp_group``).

    Args:
        input_ids: [B, S], the full sequence, the same on every rank of ``cp_group``.
        labels: [B, S], not shifted; -100 marks positions without a target. None: no loss.
        cp_group: ranks that share the sequence.
        context: form of context parallelism; must match ``swap_attention``.
        position_ids: [B or 1, S]. A new document begins where positions restart. None: 0, 1, ..., S - 1.
        attention_mask: [B, S], 0 for padding.

    Returns:
        Keyword arguments of the model: ``input_ids``; ``position_ids`` and ``attention_mask`` if they were passed; with
        ``labels`` also ``labels``, ``shift_labels`` and ``num_items_in_batch``. The last is the number of targets in
        this batch. With data parallelism, replace it by its sum over the data-parallel ranks.

    Raises:
        InputError: the length of the sequence is not a multiple of cp (ulysses) or 2 * cp (ring).
    """
    cp, rank = group_size(cp_group), group_rank(cp_group)

    def shard(full: Tensor) -> Tensor:
        return shard_sequence(full, cp, rank, context).contiguous()

    inputs: dict[str, Any] = {"input_ids": shard(input_ids)}
    if position_ids is not None:
        inputs["position_ids"] = shard(position_ids)
    if attention_mask is not None:
        inputs["attention_mask"] = shard(attention_mask)
    if labels is not None:
        shifted = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        inputs["labels"] = inputs["shift_labels"] = shard(shifted)
        inputs["num_items_in_batch"] = (shifted != IGNORED).sum()
    return inputs


def prepare(cp_group: ProcessGroup | None, context: Context) -> Hook:
    """Return a forward pre-hook for the decoder of a swapped model."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = list(inspect.signature(module.forward).parameters)
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        if inputs.get("past_key_values") is not None or inputs.get("use_cache"):
            raise InputError(
                "a model with swapped attention has no key-value cache; pass use_cache=False, also to generate()"
            )
        # transformers creates a cache by default, also for training.
        inputs["use_cache"] = False
        tokens = inputs.get("input_ids")
        tokens = inputs.get("inputs_embeds") if tokens is None else tokens
        if tokens is not None:
            mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
            inputs[DOCUMENTS] = _documents(tokens, mask, positions, cp_group, context)
            inputs["attention_mask"] = None
            if positions is None:
                cp, rank = group_size(cp_group), group_rank(cp_group)
                positions = local_positions(tokens.shape[1] * cp, cp, rank, context)
                inputs["position_ids"] = positions.to(tokens.device).unsqueeze(0)
        return (), inputs

    return hook


def _documents(
    tokens: Tensor, mask: Tensor | None, positions: Tensor | None, cp_group: ProcessGroup | None, context: Context
) -> Documents | None:
    """Return the documents, or None if each row is one document without padding.

    Collective unless ``mask`` and ``positions`` are both None.
    """
    shape = tokens.shape[:2]
    if mask is not None:
        if mask.shape != shape:
            raise InputError(
                f"attention_mask must have shape {list(shape)} (the local sequence shard), 0 for padding; got "
                f"{list(mask.shape)}. Swapped attention does not support other masks."
            )
        documents = Documents.of(mask.bool().long(), cp_group, context)
        if bool((documents.ids_BS.diff(dim=1).clamp(min=0).sum(1) + documents.ids_BS[:, 0] > 1).any()):
            raise InputError(
                "attention_mask masks tokens in the middle of a row; swapped attention supports padding at the ends of "
                "a row only. To pack documents, omit the mask and pass position_ids that restart."
            )
    elif positions is not None:
        if positions.shape not in (shape, (1, shape[1])):
            raise InputError(
                f"position_ids must have shape {list(shape)} or [1, {shape[1]}]; got {list(positions.shape)}"
            )
        shards = gather_values(positions.contiguous(), cp_group, "an exchange of positions")
        full = unshard_sequence(list(shards), context)
        starts = torch.zeros_like(full)
        starts[:, 1:] = full[:, 1:] != full[:, :-1] + 1
        documents = Documents(starts.cumsum(1).expand(shape[0], -1))
    else:
        return None
    return documents if bool(documents.runs_BS[:, -1].any()) else None


def read_config(attention: Any) -> AttentionConfig:
    """Read the ``AttentionConfig`` of an attention module of transformers."""
    kind, config = type(attention).__name__, attention.config
    if kind not in ATTENTION_CLASSES:
        raise UnsupportedModel(
            f"attention of class {kind} is not supported; supported are {', '.join(ATTENTION_CLASSES)}"
        )
    if attention.attention_dropout:
        raise UnsupportedModel(
            f"{kind} has attention_dropout {attention.attention_dropout}, which swapped attention does not support; "
            "set it to 0 in the configuration"
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
    """Return the decoders of ``model`` by name. Raises the errors of ``swap_attention``."""
    swapped = swapped_attention(model)
    if swapped:
        raise ConfigError(f"the attention of {type(model).__name__} is already swapped ({next(iter(swapped))})")
    decoders: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and hasattr(module, "rotary_emb")
    }
    if not decoders:
        raise UnsupportedModel(
            f"{type(model).__name__} has no decoder of transformers (a module with layers and rotary_emb)"
        )
    for name, decoder in decoders.items():
        for index, layer in enumerate(decoder.layers):
            attention = getattr(layer, "self_attn", None)
            if attention is None:
                raise UnsupportedModel(f"{name}.layers.{index} ({type(layer).__name__}) has no self_attn")
            if "forward" in vars(attention):
                raise UnsupportedModel(
                    f"the forward of {name}.layers.{index}.self_attn was replaced, by device_map offloading or a "
                    "kernel; load the model without them"
                )
            if any(type(p) is not nn.Parameter for p in attention.parameters()):
                raise UnsupportedModel(f"{name}.layers.{index}.self_attn is already distributed or quantized")
    return decoders


def _shardings(attention: SwappedAttention) -> dict[str, Sharding]:
    """Return the sharding of each parameter by its name in transformers."""
    shardings = {name: Sharding(tuple(p.shape)) for name, p in attention.named_parameters()}
    for prefix, module in attention.named_children():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, FullNorm)):
            shardings.update({f"{prefix}.{name}": sharding for name, sharding in module.shardings().items()})
    return shardings
