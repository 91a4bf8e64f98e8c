"""Convert weights between ``layers.Transformer`` and the safetensors layouts on the Hugging Face hub.

One parameter of ``Transformer`` consists of one or several hub tensors. Each is a slice of the parameter:

    layers.3.moe.experts.w13 [E, 2F, D]    [e, 0:F]   model.layers.3.mlp.experts.{e}.gate_proj.weight [F, D]
                                           [e, F:2F]  model.layers.3.mlp.experts.{e}.up_proj.weight   [F, D]

``hub_slices`` returns these slices, for reading (any shard of a parameter, on any mapping) and for writing. Reading
also supports the layout of transformers 5 in memory, which stores all experts of a layer in one tensor:

    layers.3.moe.experts.w13 [E, 2F, D]                model.layers.3.mlp.experts.gate_up_proj          [E, 2F, D]
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moe_comm.errors import CheckpointError, ConfigError, InputError
from moe_comm.integrations.checkpoint.files import INDEX, HubFolder as HubFolder, read_shard as read_shard
from moe_comm.integrations.checkpoint.plan import FilePlan, index_text, plan_files
from moe_comm.integrations.checkpoint.slices import HubSlice
from moe_comm.integrations.checkpoint.write import Target, create, nbytes, write_values
from moe_comm.integrations.hugging_face.attention import NAMES as ATTENTION_NAMES
from moe_comm.layers.parallel.module import shardings_of
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.model import HEAD, Transformer
from moe_comm.layers.transformer.model_plan import ModelPlan
from moe_comm.runtime.memory import materialized
from moe_comm.runtime.safe_files import move_file, write_file

_ATTENTION = {**ATTENTION_NAMES, "q_norm": "q_norm", "k_norm": "k_norm"}
_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_FUSED = {"experts.w13": "gate_up_proj", "experts.w2": "down_proj"}


def hub_slices(config: TransformerConfig, family: str, name: str, stored: Container[str] = ()) -> list[HubSlice]:
    """Return the hub tensors that the parameter ``name`` consists of.

    Args:
        family: ``model_type`` in transformers.
        name: parameter of ``Transformer``.
        stored: tensor names of the folder to read (a ``HubFolder``), which determine whether its experts are fused.
            Empty: the layout of the hub.

    Raises:
        InputError: the layout has no such tensor.
    """
    if name in _TOP:
        return [HubSlice(_TOP[name])]
    match = _LAYER.fullmatch(name)
    if match is None:
        raise InputError(f"{family} has no tensor for {name!r}")
    prefix, local_name = f"model.layers.{match[1]}", match[2]
    component, _, leaf = local_name.partition(".")
    if component in _NORMS and leaf == "weight":
        return [HubSlice(f"{prefix}.{_NORMS[component]}.weight")]
    if component == "attention":
        module, _, kind = leaf.rpartition(".")
        if module in _ATTENTION:
            return [HubSlice(f"{prefix}.self_attn.{_ATTENTION[module]}.{kind}")]
    if component == "moe" and leaf in _FUSED and (fused := f"{prefix}.mlp.experts.{_FUSED[leaf]}") in stored:
        return [HubSlice(fused)]
    in_memory = f"{prefix}.mlp.gate.weight" in stored
    block = f"{prefix}.block_sparse_moe" if family == "mixtral" and not in_memory else f"{prefix}.mlp"
    if local_name == "moe.router.weight":
        return [HubSlice(f"{block}.gate.weight")]
    if local_name == "moe.router.correction_bias":
        return [HubSlice(f"{block}.gate.e_score_correction_bias")]
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    if component == "dense" and leaf in ("w13", "w2"):
        return _mlp(f"{prefix}.mlp", leaf, config.dense_ffn, gate, up, down)
    if component == "moe" and leaf in ("shared.w13", "shared.w2"):
        return _mlp(f"{block}.shared_experts", leaf[7:], config.moe.shared_ffn, gate, up, down)
    if component == "moe" and leaf in ("experts.w13", "experts.w2"):
        return [
            HubSlice(mlp_slice.name, (expert, *mlp_slice.place))
            for expert in range(config.moe.num_experts)
            for mlp_slice in _mlp(f"{block}.experts.{expert}", leaf[8:], config.moe.ffn, gate, up, down)
        ]
    raise InputError(f"{family} has no tensor for {name!r}")


def _mlp(prefix: str, leaf: str, ffn: int, gate: str, up: str, down: str) -> list[HubSlice]:
    if leaf == "w2":
        return [HubSlice(f"{prefix}.{down}.weight")]
    return [
        HubSlice(f"{prefix}.{gate}.weight", (slice(0, ffn),)),
        HubSlice(f"{prefix}.{up}.weight", (slice(ffn, 2 * ffn),)),
    ]


def write_folder(
    folder: Path,
    config: TransformerConfig,
    family: str,
    hf_config: PreTrainedConfig,
    tensors: Iterable[tuple[str, Tensor]],
    max_bytes: int = 4 << 30,
) -> None:
    """Write a model as a folder that ``from_pretrained`` loads. config.json is written last.

    A tied output projection is not written. No more than one tensor is in memory at a time.

    Args:
        folder: new or empty folder.
        config, family, hf_config: the model, its ``model_type``, and its Hugging Face configuration.
        tensors: full parameters by their names in ``Transformer``, in any order. They are written in fp32.
        max_bytes: maximum size of a file; a larger tensor gets a separate file.

    Raises:
        ConfigError: the folder is not empty.
        InputError: the model does not have one of the tensors, or not with this shape.
        CheckpointError: a tensor is missing, or a file cannot be written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; pass a new folder")
    shapes = _shapes(config)
    stored = {
        piece.name: (piece.extents(shape), torch.float32)
        for name, shape in shapes.items()
        for piece in hub_slices(config, family, name)
    }
    files = plan_files(stored, max_bytes)
    try:
        with ExitStack() as stack:
            targets: dict[str, Target] = {}
            folder.mkdir(parents=True, exist_ok=True)
            for planned in files:
                create(folder / _part(planned), planned)
                file = stack.enter_context(open(folder / _part(planned), "r+b", buffering=0))
                targets |= {key: Target(file.fileno(), offset, *stored[key]) for key, offset in planned.offsets.items()}
            for name, full in tensors:
                if config.tie and name == HEAD:
                    continue
                pieces = hub_slices(config, family, name)
                expected = shapes.pop(name, None)
                if expected is None:
                    raise InputError(f"{name} was passed twice, or is not a tensor of the model")
                if expected != tuple(full.shape):
                    raise InputError(f"{name} has shape {tuple(full.shape)}; the model requires {expected}")
                for piece in pieces:
                    target = targets[piece.name]
                    values = materialized(full.detach()[piece.place] if piece.place else full.detach())
                    write_values(target, [slice(None)] * len(target.shape), values)
        if shapes:
            raise CheckpointError(f"{len(shapes)} tensors of the model are missing; the first is {next(iter(shapes))}")
        for planned in files:
            move_file(folder / _part(planned), folder / planned.name)
        if len(files) > 1:
            total = sum(nbytes(*of_tensor) for of_tensor in stored.values())
            write_file(folder / INDEX, index_text(files, {"total_size": total}))
        hf_config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
        hf_config.save_pretrained(str(folder))
    except OSError as error:
        raise CheckpointError(f"the model cannot be written to {folder}: {error}") from error


def _part(planned: FilePlan) -> str:
    """Return the name of a file that is not complete."""
    return f"part-{planned.name}"


def _shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Return the full shapes of the tensors to write, by their names in ``Transformer``."""
    model = Transformer(config, ModelPlan(device="meta"))
    shapes = {name: sharding.shape for name, sharding in shardings_of(model).items()}
    if config.moe.router.correction_bias:
        experts = (config.moe.router.num_choices,)
        shapes |= {f"layers.{layer}.moe.router.correction_bias": experts for layer in config.moe_layers}
    return shapes
