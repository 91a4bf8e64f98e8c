"""Weights between ``layers.Transformer`` and the safetensors layouts on the Hugging Face hub.

One tensor of ours is one or several of theirs, each at a place in it:

    layers.3.moe.experts.w13 [E, 2F, D]    [e, 0:F]   model.layers.3.mlp.experts.{e}.gate_proj.weight [F, D]
                                           [e, F:2F]  model.layers.3.mlp.experts.{e}.up_proj.weight   [F, D]

``pieces`` is that table; reading (any part of a tensor, on any mapping) and writing both follow it. Folders in the
layout that transformers 5 has in memory, all experts of a layer in one tensor, are read too:

    layers.3.moe.experts.w13 [E, 2F, D]                model.layers.3.mlp.experts.gate_up_proj          [E, 2F, D]
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from moe_comm.errors import CheckpointError, ConfigError, CorruptFile, InputError, UnsupportedModel
from moe_comm.layers.parallel.shard import shardings_of
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.model import HEAD, Transformer
from moe_comm.layers.transformer.model_plan import ModelPlan
from moe_comm.topology import Sharding, Share

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_ATTENTION = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "q_norm": "q_norm",
    "k_norm": "k_norm",
    "q_a": "q_a_proj",
    "q_a_norm": "q_a_layernorm",
    "q_b": "q_b_proj",
    "kv_a": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
    "kv_b": "kv_b_proj",
}
_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_FUSED = {"experts.w13": "gate_up_proj", "experts.w2": "down_proj"}
_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Piece:
    """A tensor of theirs, and where in ours it stands: an index per leading dimension."""

    name: str
    place: tuple[slice | int, ...] = ()


def pieces(config: TransformerConfig, family: str, name: str, stored: Container[str] = ()) -> list[Piece]:
    """What our tensor ``name`` is made of in the ``family``'s layout.

    Args:
        stored: names in the folder that is to be read (a ``HubFolder``), which say whether its experts are fused; ():
            the layout of the hub.

    Raises:
        InputError: the layout has no such tensor.
    """
    if name in _TOP:
        return [Piece(_TOP[name])]
    found = _LAYER.fullmatch(name)
    if found is None:
        raise InputError(f"{family} has no tensor for {name!r}")
    prefix, rest = f"model.layers.{found[1]}", found[2]
    part, _, leaf = rest.partition(".")
    if part in _NORMS and leaf == "weight":
        return [Piece(f"{prefix}.{_NORMS[part]}.weight")]
    if part == "attention":
        module, _, kind = leaf.rpartition(".")
        if module in _ATTENTION:
            return [Piece(f"{prefix}.self_attn.{_ATTENTION[module]}.{kind}")]
    if part == "moe" and leaf in _FUSED and (fused := f"{prefix}.mlp.experts.{_FUSED[leaf]}") in stored:
        return [Piece(fused)]
    in_memory = f"{prefix}.mlp.gate.weight" in stored
    block = f"{prefix}.block_sparse_moe" if family == "mixtral" and not in_memory else f"{prefix}.mlp"
    if rest == "moe.router.weight":
        return [Piece(f"{block}.gate.weight")]
    if rest == "moe.router.correction_bias":
        return [Piece(f"{block}.gate.e_score_correction_bias")]
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    if part == "dense" and leaf in ("w13", "w2"):
        return _mlp(f"{prefix}.mlp", leaf, config.dense_ffn, gate, up, down)
    if part == "moe" and leaf in ("shared.w13", "shared.w2"):
        return _mlp(f"{block}.shared_experts", leaf[7:], config.moe.shared_ffn, gate, up, down)
    if part == "moe" and leaf in ("experts.w13", "experts.w2"):
        return [
            Piece(piece.name, (expert, *piece.place))
            for expert in range(config.moe.num_experts)
            for piece in _mlp(f"{block}.experts.{expert}", leaf[8:], config.moe.ffn, gate, up, down)
        ]
    raise InputError(f"{family} has no tensor for {name!r}")


def _mlp(prefix: str, leaf: str, ffn: int, gate: str, up: str, down: str) -> list[Piece]:
    if leaf == "w2":
        return [Piece(f"{prefix}.{down}.weight")]
    return [
        Piece(f"{prefix}.{gate}.weight", (slice(0, ffn),)),
        Piece(f"{prefix}.{up}.weight", (slice(ffn, 2 * ffn),)),
    ]


class HubFolder:
    """The safetensors of a model folder, read slice by slice. ``name in folder``: whether it has that tensor.

    Raises:
        ConfigError: the folder has no safetensors. CorruptFile: a file is damaged; names it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        if (folder / INDEX).exists():
            self._file_of = _read_index(folder / INDEX)
        elif (folder / SINGLE).exists():
            self._file_of = dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)
        else:
            raise ConfigError(f"{folder} holds neither {SINGLE} nor {INDEX}; models are read from safetensors only")

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def read(self, name: str, place: tuple[slice, ...], shape: tuple[int, ...]) -> Tensor:
        """The part ``place`` of tensor ``name``, which must be of ``shape``.

        Raises:
            InputError: there is no such tensor, or it has another shape. UnsupportedModel: it is quantised.
            CorruptFile: its file is damaged.
        """
        if name not in self._file_of:
            raise InputError(
                f"{self.folder} has no tensor {name!r}; is it of another model, or saved without its head?"
            )
        path = self.folder / self._file_of[name]
        try:
            stored = self._handle(path.name).get_slice(name)
            found, dtype = tuple(stored.get_shape()), stored.get_dtype()
            if found == shape and dtype in _DTYPES:
                part: Tensor = stored[place]
                return part
        except SafetensorError as error:
            raise CorruptFile(f"{path}: cannot read {name}: {error}") from error
        if found != shape:
            raise InputError(f"{path}: {name} has shape {found}, but the configuration makes it {shape}")
        raise UnsupportedModel(
            f"{path}: {name} is of dtype {dtype}; known are {', '.join(_DTYPES)}: dequantise the weights first"
        )

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self.folder / file
            try:
                self._open[file] = safe_open(path, "pt")
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {error}") from error
            except SafetensorError as error:
                raise CorruptFile(f"{path} is damaged, or no safetensors file: {error}") from error
        return self._open[file]


def _read_index(path: Path) -> dict[str, str]:
    try:
        file_of: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        # Names of files beside the index, and nothing that leads elsewhere.
        if all(isinstance(file, str) and Path(file).name == file for file in file_of.values()):
            return file_of
        problem = "its weight_map must name files beside it"
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise CorruptFile(f"{path} is damaged, or no index of safetensors files: {problem}")


@torch.no_grad()
def read_part(
    hub: HubFolder,
    made_of: list[Piece],
    local: Tensor,
    sharding: Sharding,
    place: Mapping[str, int],
    sizes: Mapping[str, int],
    share: Share | None = None,
) -> None:
    """Fill ``local``, a rank's part of a tensor, from the ``pieces`` it is made of; only these bytes are read.

    Args:
        share: ``local`` holds this share of the rank's part only; None: all of it.

    Raises:
        InputError, UnsupportedModel, CorruptFile: as ``HubFolder.read``.
    """
    for box in sharding.boxes(place, sizes, share):
        for piece in made_of:
            bounds = [_bounds(index, size) for index, size in zip(piece.place, sharding.shape, strict=False)]
            bounds += [(0, size) for size in sharding.shape[len(bounds) :]]
            low = [max(at, whole.start) for (at, _), whole in zip(bounds, box.whole, strict=True)]
            high = [min(end, whole.stop) for (_, end), whole in zip(bounds, box.whole, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            into = tuple(
                slice(a - whole.start + mine.start, b - whole.start + mine.start)
                for a, b, whole, mine in zip(low, high, box.whole, box.local, strict=True)
            )
            # A whole number indexes a dimension that the piece does not have.
            kept = [d for d in range(len(low)) if not (d < len(piece.place) and isinstance(piece.place[d], int))]
            shape = tuple(bounds[d][1] - bounds[d][0] for d in kept)
            part = hub.read(
                piece.name, tuple(slice(low[d] - bounds[d][0], high[d] - bounds[d][0]) for d in kept), shape
            )
            local[into] = part.view(local[into].shape).to(local.dtype)


def _bounds(index: slice | int, size: int) -> tuple[int, int]:
    if isinstance(index, int):
        return index, index + 1
    return index.indices(size)[:2]


def write_folder(
    folder: Path,
    config: TransformerConfig,
    family: str,
    hf_config: PreTrainedConfig,
    tensors: Iterable[tuple[str, Tensor]],
    max_bytes: int = 4 << 30,
) -> None:
    """Write ``tensors`` (our names, whole) as a folder that ``from_pretrained`` loads, in files of about ``max_bytes``.

    A tied output projection is not written: the configuration says that it is the embedding. config.json comes last.

    Args:
        tensors: one at a time, in any order; of each there is a copy until its file is written.

    Raises:
        ConfigError: the folder is not empty.
        InputError: a tensor that the model has not, or of another shape. CheckpointError: one that is missing, or a
            file that cannot be written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    missing = _shapes(config)
    waiting: dict[str, Tensor] = {}
    files: list[list[str]] = []
    held = total = 0

    def flush() -> None:
        nonlocal waiting, held
        if waiting:
            path = folder / _part(len(files))
            try:
                save_file(waiting, path, metadata={"format": "pt"})
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be written: {error}") from error
            files.append(list(waiting))
            waiting, held = {}, 0

    for name, whole in tensors:
        if config.tie and name == HEAD:
            continue
        made_of = pieces(config, family, name)
        expected = missing.pop(name, None)
        if expected != tuple(whole.shape):
            raise InputError(f"{name} has shape {tuple(whole.shape)}; the model has it once, with shape {expected}")
        for piece in made_of:
            part = whole[piece.place] if piece.place else whole
            waiting[piece.name] = part.detach().to("cpu", copy=True).contiguous()
            held += part.nbytes
            total += part.nbytes
            if held >= max_bytes:
                flush()
    flush()
    if missing:
        raise CheckpointError(f"{len(missing)} tensors of the model are missing, the first is {next(iter(missing))}")
    _name_files(folder, files, total)
    hf_config.architectures = [_ARCHITECTURE[family]]
    hf_config.save_pretrained(str(folder))


def _shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model that is written, by our name, with its whole shape."""
    model = Transformer(config, ModelPlan(device="meta"))
    shapes = {name: sharding.shape for name, sharding in shardings_of(model).items()}
    if config.moe.router.correction_bias:
        experts = (config.moe.router.num_experts,)
        shapes |= {f"layers.{layer}.moe.router.correction_bias": experts for layer in config.moe_layers}
    return shapes


_ARCHITECTURE = {
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


def _name_files(folder: Path, files: list[list[str]], total: int) -> None:
    """Give the parts the hub's names; several get an index."""
    if len(files) == 1:
        (folder / _part(0)).replace(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files):
        final = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / _part(number)).replace(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _part(number: int) -> str:
    """Name of a file while it is not known how many there will be."""
    return f"part-{number:05d}.safetensors"
