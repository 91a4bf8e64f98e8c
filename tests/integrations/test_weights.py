"""Conversion of weights between ``Transformer`` and Hugging Face folders, checked by logits and gradients."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from moe_comm.errors import CheckpointError, ConfigError, CorruptFile, InputError, UnsupportedModel
from moe_comm.integrations.checkpoint.files import INDEX, SINGLE, HubFolder, read_shard
from moe_comm.integrations.hugging_face.architecture import from_hugging_face, read_config, to_hugging_face
from moe_comm.integrations.hugging_face.weights import hub_slices, write_folder
from moe_comm.layers.parallel.module import shardings_of
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.model import Transformer
from moe_comm.topology import ParallelConfig, ParallelMesh, shard_slice
from moe_comm.train.loop.build import read_pretrained
from tests.integrations.models import VOCAB, assert_close, load, save_model


@dataclass(frozen=True)
class Variant:
    """A model of a family with unusual settings."""

    family: str
    changes: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> Path:
        return Path(save_model(self.family, folder, **self.changes))


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
VARIANTS = {
    "mixtral": Variant("mixtral"),
    "mixtral, windowed and tied": Variant(
        "mixtral", {"sliding_window": 3, "num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": True}
    ),
    "qwen3": Variant("qwen3_moe"),
    "qwen3, dense layer, biases, weights not normalised": Variant(
        "qwen3_moe",
        {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": False, "attention_bias": True},
    ),
    "qwen3, every other layer dense, stretched": Variant(
        "qwen3_moe", {"decoder_sparse_step": 2, "rope_parameters": YARN, "rms_norm_eps": 1e-3}
    ),
    "olmoe": Variant("olmoe"),
    "olmoe, clipped, weights normalised": Variant("olmoe", {"clip_qkv": 0.4, "norm_topk_prob": True}),
    "deepseek": Variant("deepseek_v3"),
    "deepseek, queries direct, stretched, biases, two shared experts": Variant(
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 1.0, "beta_fast": 8.0},
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,  # the norms of the latents do not use it
        },
    ),
}
variants = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Variant], Path]:
    """Return the folder of a variant's random model, which transformers writes on first use."""
    folders: dict[int, Path] = {}

    def folder(variant: Variant) -> Path:
        if id(variant) not in folders:
            folders[id(variant)] = variant.save(tmp_path_factory.mktemp("model"))
        return folders[id(variant)]

    return folder


def imported(folder: Path) -> Transformer:
    model = Transformer(from_hugging_face(read_config(folder)))
    read_pretrained(model, folder, ParallelMesh(ParallelConfig()))
    return model


def some_ids(seed: int = 3) -> Tensor:
    # Token 0 is padding: its row gets no gradient in transformers.
    return torch.randint(1, VOCAB, (2, 9), generator=torch.Generator().manual_seed(seed))


def named_tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from ((name, value) for name, value in model.named_buffers() if name.endswith("correction_bias"))


@variants
def test_imported_weights_give_the_logits_and_all_gradients_of_transformers(
    variant: Variant, folder_of: Callable[[Variant], Path]
) -> None:
    folder = folder_of(variant)
    ids = some_ids()
    hf_model, model = load(str(folder)), imported(folder)

    logits = hf_model(ids, use_cache=False).logits
    hidden = model(ids)
    assert_close(model.logits(hidden).detach(), logits.detach(), "logits")

    targets = ids.roll(-1, 1)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    model.loss(hidden, targets).backward()
    expected = dict(hf_model.named_parameters())
    compared = set()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        for piece in hub_slices(model.config, variant.family, name, expected):
            assert_close(parameter.grad[piece.place], expected[piece.name].grad, name, rtol=2e-5)
            compared.add(piece.name)
    assert compared == expected.keys()


@variants
def test_exported_weights_load_in_transformers_without_missing_or_unexpected_tensors(
    variant: Variant, folder_of: Callable[[Variant], Path], tmp_path: Path
) -> None:
    max_bytes = 20_000 if variant.changes else 4 << 30
    config = from_hugging_face(read_config(folder_of(variant)))
    model = random_model(config)
    out = tmp_path / "out"
    write_folder(out, config, variant.family, to_hugging_face(config, variant.family), named_tensors(model), max_bytes)
    assert (out / INDEX).exists() == (max_bytes < 1 << 30)
    assert not list(out.glob("part-*"))

    hf_model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    ids = some_ids()
    with torch.no_grad():
        assert_close(model.logits(model(ids)), hf_model(ids).logits, "logits")

    reimported = imported(out)
    for (name, value), (_, reimported_value) in zip(named_tensors(model), named_tensors(reimported), strict=True):
        assert torch.equal(value, reimported_value), name


@torch.no_grad()
def random_model(config: TransformerConfig) -> Transformer:
    model = Transformer(config)
    generator = torch.Generator().manual_seed(11)
    for name, value in named_tensors(model):
        start, spread = (1.0, 0.1) if "norm" in name else (0.0, 0.2)
        value.copy_(start + spread * torch.randn(value.shape, generator=generator))
    return model


@pytest.mark.parametrize(
    ("name", "mapping"),
    [
        ("qwen3, dense layer, biases, weights not normalised", ParallelConfig(tp=2, dp=2, ep=2, etp=2)),
        ("qwen3, dense layer, biases, weights not normalised", ParallelConfig(tp=2, cp=2, ep=4)),
        ("deepseek", ParallelConfig(tp=4, ep=4)),
        ("deepseek", ParallelConfig(dp=8, ep=8)),
        ("olmoe", ParallelConfig(dp=4, ep=1, etp=2)),
    ],
    ids=str,
)
def test_a_rank_reads_only_its_shards(name: str, mapping: ParallelConfig, folder_of: Callable[[Variant], Path]) -> None:
    folder, family = folder_of(VARIANTS[name]), VARIANTS[name].family
    whole = imported(folder)
    shardings = shardings_of(whole)
    hub = HubFolder(folder)
    for param_name, value in whole.named_parameters():
        sharding, slices = shardings[param_name], hub_slices(whole.config, family, param_name)
        for rank in range(mapping.world):
            coordinates, sizes = mapping.place(rank), mapping.sizes
            expected = sharding.take(value.detach(), coordinates, sizes)
            local = torch.full_like(expected, torch.nan)
            read_shard(hub, slices, local, sharding, coordinates, sizes)
            assert torch.equal(local, expected), (param_name, rank)
            for owners in (3, 7):
                share = shard_slice(expected.shape, 1, owners)
                part = torch.full(share.shape(expected.shape), torch.nan)
                read_shard(hub, slices, part, sharding, coordinates, sizes, share)
                assert torch.equal(part, share.of(expected)), (param_name, rank, share)


@pytest.mark.parametrize("name", ["mixtral, windowed and tied", "qwen3", "deepseek"])
def test_folders_with_fused_experts_are_read_too(
    name: str, folder_of: Callable[[Variant], Path], tmp_path: Path
) -> None:
    folder = folder_of(VARIANTS[name])
    hf_model = load(str(folder))
    state = {key: value.contiguous() for key, value in hf_model.state_dict().items()}
    if hf_model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    assert any(key.endswith("experts.gate_up_proj") for key in state)
    save_file(state, tmp_path / SINGLE)
    hf_model.config.save_pretrained(tmp_path)
    for (param_name, value), (_, expected) in zip(
        named_tensors(imported(tmp_path)), named_tensors(imported(folder)), strict=True
    ):
        assert torch.equal(value, expected), param_name


def test_half_precision_weights_are_widened_exactly(folder_of: Callable[[Variant], Path], tmp_path: Path) -> None:
    folder = folder_of(VARIANTS["olmoe"])
    state = load_file(folder / SINGLE)
    save_file({name: value.bfloat16() for name, value in state.items()}, tmp_path / SINGLE)
    read_config(folder).save_pretrained(tmp_path)
    weight = imported(tmp_path).state_dict()["layers.1.moe.experts.w2"]
    assert torch.equal(weight[5], state["model.layers.1.mlp.experts.5.down_proj.weight"].bfloat16().float())


EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


def damaged(folder: Path, out: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Copy ``folder`` to ``out`` with its tensors changed by ``change`` and split into two files."""
    state = load_file(folder / SINGLE)
    change(state)
    parts = {"a.safetensors": [n for n in state if "layers.1" in n], "b.safetensors": list(state)}
    parts["b.safetensors"] = [n for n in state if n not in parts["a.safetensors"]]
    for file, names in parts.items():
        save_file({n: state[n].contiguous() for n in names}, out / file)
    index = {"metadata": {}, "weight_map": {n: file for file, names in parts.items() for n in names}}
    (out / INDEX).write_text(json.dumps(index))
    read_config(folder).save_pretrained(out)
    return out


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda state: state.pop(EXPERT), InputError, [EXPERT]),
        (lambda state: state.update({EXPERT: state[EXPERT][1:]}), InputError, ["a.safetensors", EXPERT, "(23, 32)"]),
        (lambda state: state.update({EXPERT: state[EXPERT].T}), InputError, ["a.safetensors", EXPERT, "(24, 32)"]),
        (
            lambda state: state.update({EXPERT: state[EXPERT].to(torch.float8_e4m3fn)}),
            UnsupportedModel,
            ["a.safetensors", EXPERT, "F8_E4M3", "Dequantize"],
        ),
    ],
    ids=["missing", "too short", "transposed", "quantized"],
)
def test_a_wrong_tensor_is_named_with_its_file(
    change: Callable[[dict[str, Tensor]], Any],
    kind: type[Exception],
    words: list[str],
    folder_of: Callable[[Variant], Path],
    tmp_path: Path,
) -> None:
    folder = damaged(folder_of(VARIANTS["qwen3"]), tmp_path, change)
    with pytest.raises(kind) as caught:
        imported(folder)
    assert all(word in str(caught.value) for word in [str(tmp_path), *words]), caught.value


def test_errors_name_the_damaged_or_missing_file(folder_of: Callable[[Variant], Path], tmp_path: Path) -> None:
    folder = damaged(folder_of(VARIANTS["qwen3"]), tmp_path, lambda state: None)
    imported(folder)
    whole = (folder / "a.safetensors").read_bytes()
    for cut in (0, 5, 200, len(whole) - 1):
        (folder / "a.safetensors").write_bytes(whole[:cut])
        with pytest.raises(CorruptFile, match=r"a\.safetensors"):
            imported(folder)
    (folder / "a.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"a\.safetensors"):
        imported(folder)
    for text in (
        "{",
        "[]",
        '{"weight_map": 3}',
        '{"weight_map": {"x": "../a.safetensors"}}',
        '{"weight_map": {"x": 1}}',
    ):
        (folder / INDEX).write_text(text)
        with pytest.raises(CorruptFile, match=INDEX):
            HubFolder(folder)
    (folder / INDEX).unlink()
    with pytest.raises(ConfigError, match="only safetensors"):
        HubFolder(folder)


def test_missing_or_unknown_tensors_are_rejected_on_export(
    folder_of: Callable[[Variant], Path], tmp_path: Path
) -> None:
    config = from_hugging_face(read_config(folder_of(VARIANTS["deepseek"])))
    tensors = dict(named_tensors(random_model(config)))

    def write(name: str, **changes: Any) -> None:
        changed = {**tensors, **changes}
        present = ((key, value) for key, value in changed.items() if value is not None)
        write_folder(tmp_path / name, config, "deepseek_v3", to_hugging_face(config, "deepseek_v3"), present)
        assert (tmp_path / name / SINGLE).exists()

    bias = "layers.2.moe.router.correction_bias"
    with pytest.raises(CheckpointError, match=bias):
        write("missing", **{bias: None})
    assert not (tmp_path / "missing" / "config.json").exists()
    with pytest.raises(InputError, match=r"norm\.weight has shape \(31,\)"):
        write("shape", **{"norm.weight": tensors["norm.weight"][1:]})
    with pytest.raises(InputError, match=r"layers\.7\.moe"):
        write("layer", **{"layers.7.moe.router.weight": tensors["layers.1.moe.router.weight"]})
    with pytest.raises(InputError, match=r"layers\.1\.moe\.gate"):
        write("name", **{"layers.1.moe.gate": tensors["norm.weight"]})
    write("good")
    with pytest.raises(ConfigError, match="not empty"):
        write("good")


def test_a_last_stage_reads_a_tied_embedding_as_its_head(
    folder_of: Callable[[Variant], Path],
) -> None:
    folder = folder_of(VARIANTS["mixtral, windowed and tied"])
    config = from_hugging_face(read_config(folder))
    assert config.tie
    whole = imported(folder)
    stage = Transformer(config, replace(whole.plan, layers=(1,), has_embedding=False))
    read_pretrained(stage, folder, ParallelMesh(ParallelConfig()))
    assert torch.equal(stage.head.weight, whole.embed.weight)
    assert torch.equal(stage.get_parameter("layers.1.moe.experts.w13"), whole.get_parameter("layers.1.moe.experts.w13"))
