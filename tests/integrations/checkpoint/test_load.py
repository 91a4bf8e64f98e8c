"""``from_pretrained`` and ``load_checkpoint`` against transformers' loading of the whole model."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import moe_comm
from moe_comm import LoadReport, Placement
from moe_comm.bench.common.machine import peak_rss_mib, reset_peak_rss, rss_mib
from moe_comm.errors import (
    CheckpointError,
    ConfigError,
    CorruptFile,
    InputError,
    MoeCommError,
    RankMismatch,
    UnsupportedModel,
)
from moe_comm.integrations.checkpoint.files import INDEX, SINGLE
from moe_comm.integrations.checkpoint.optimizer import load_optimizer, save_optimizer
from moe_comm.integrations.hugging_face import shard_inputs
from moe_comm.layers.moe.config import MoEGroups
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.model import ModelPlan, Transformer
from moe_comm.topology import ParallelConfig, ParallelMesh
from tests.integrations.blocks.styles import EXPERTS, DeepSeek, Mixtral, Model, Torchtitan
from tests.integrations.loops import TrainingCase, launched, make_trainer
from tests.integrations.models import SMALL, VOCAB, batch, ep_group, new_model, randomise
from tests.layers.tiny import LATENT
from tests.pool import RankPool

CHANGES: dict[str, dict[str, Any]] = {
    "mixtral": {"tie_word_embeddings": True},
    "olmoe": {"num_experts": 7},
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a random model of a family, in several files as on the hub."""
    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            model = new_model(family, **CHANGES.get(family, {}))
            randomise(model, 0)
            if family == "qwen3_moe":
                model.bfloat16()
            model.save_pretrained(folders[family], max_shard_size="40KB")
            assert (folders[family] / INDEX).exists()
        return folders[family]

    return folder


def _equal(model: nn.Module, expected: nn.Module) -> None:
    """Compare parameters, buffers, attributes and logits of two swapped models."""
    others = dict(expected.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == others[name].dtype, name
        assert torch.equal(parameter, others[name]), name
        assert parameter.requires_grad == others[name].requires_grad
    buffers = dict(expected.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert len(others) == len(dict(model.named_parameters()))
    ids = batch()[dist.get_rank() if dist.is_initialized() else 0]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)


def sharded(model: Any) -> Any:
    """Shard experts over 2 ranks, each of which FSDP2 shards over 2 more, as all other parameters over 4."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    moe_comm.prepare_fsdp(model, mp_policy=policy)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def _loaded(rank: int, world: int, job: tuple[str, int, dict[str, Any]]) -> LoadReport:
    folder, ranks, settings = job
    group = ep_group(ranks) if world > 1 else None
    swap = {name: settings[name] for name in ("placement",) if name in settings}
    own = {name: value for name, value in settings.items() if name not in swap}
    expected = moe_comm.swap_moe(AutoModelForCausalLM.from_pretrained(folder, **own), group, **swap)
    model = moe_comm.from_pretrained(folder, group, **settings)
    _equal(model, expected)
    assert type(model) is type(expected) and model.config.to_dict() == expected.config.to_dict()
    assert model.config.name_or_path == expected.config.name_or_path
    assert model.generation_config == expected.generation_config
    modules = (*model.modules(), *expected.modules())
    assert len({type(module.dispatcher) for module in modules if hasattr(module, "dispatcher")}) == 1
    report: LoadReport = model.load_report
    held = {id(p): p.nbytes for p in model.parameters()} | {
        id(b): b.nbytes for name, b in model.named_buffers() if "rotary" not in name
    }
    assert report.kept == sum(held.values())
    return report


@pytest.mark.parametrize("family", SMALL)
def test_families_have_the_bits_of_transformers(
    family: str, folder_of: Callable[[str], Path], pool: RankPool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(folder_of(family))
    with caplog.at_level(logging.INFO, "moe_comm.integrations.checkpoint.load"):
        alone = _loaded(0, 1, (folder, 1, {}))
    assert alone.kept == alone.whole and str(alone) in caplog.text
    for report in pool.run(_loaded, (folder, 2, {"dtype": torch.bfloat16})):
        assert report.kept < report.whole
    for report in pool.run(_loaded, (folder, 4, {"attn_implementation": "eager"})):
        assert report.kept < report.whole == alone.whole
    if family == "qwen3_moe":
        placement = Placement(tuple((home,) for home in (3, 0, 1, 2, 1, 1, 0, 3)), 4)
        pool.run(_loaded, (folder, 4, {"placement": placement, "dtype": "float16"}))


def _sequence_parallel(rank: int, world: int, folder: str) -> None:
    ep, (cp, _) = ep_group(2), dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    expected = moe_comm.swap_moe(AutoModelForCausalLM.from_pretrained(folder), ep)
    expected = moe_comm.swap_attention(expected, cp_group=cp, context="ring")
    model = moe_comm.from_pretrained(folder, ep, cp_group=cp, context="ring")
    ids = torch.randint(3, VOCAB, (2, 16), generator=torch.Generator().manual_seed(rank % 2))
    inputs = shard_inputs(input_ids=ids, cp_group=cp, context="ring")
    assert torch.equal(model(**inputs).logits, expected(**inputs).logits)


def test_context_parallel_attention(folder_of: Callable[[str], Path], pool: RankPool) -> None:
    pool.run(_sequence_parallel, str(folder_of("mixtral")))


def _sharded(rank: int, world: int, folder: str) -> None:
    ep, tp = ep_group(2), dist.group.WORLD
    tp, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    expected = moe_comm.swap_moe(AutoModelForCausalLM.from_pretrained(folder), ep)
    expected = moe_comm.swap_linears(moe_comm.swap_attention(expected, tp), tp)
    model = moe_comm.from_pretrained(folder, ep, tp_group=tp)
    ids = batch()[rank % 2]
    others = dict(expected.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, others[name]), name
    assert torch.equal(model(ids).logits, expected(ids).logits)
    if rank == 3:
        folder += "/missing"
    with pytest.raises(ConfigError, match="missing"):
        moe_comm.load_checkpoint(model, folder)
    with pytest.raises(ConfigError, match="missing"):
        moe_comm.from_pretrained(folder, ep, tp_group=tp)


def _with_copies(rank: int, world: int, folder: str) -> None:
    placement = Placement(((0, 1), (1,), (1, 0), *((expert % 2,) for expert in range(5))), 2)
    results = []
    for model in (
        moe_comm.from_pretrained(folder, ep_group(2), placement=placement, overlap=None),
        moe_comm.swap_moe(AutoModelForCausalLM.from_pretrained(folder), ep_group(2), placement=placement),
    ):
        for tensor in model.parameters():  # the bits of matrix products may depend on the alignment of a mapped file
            tensor.data = tensor.data.clone()
        with torch.no_grad():
            results.append(model(batch()[rank]).logits)
    assert torch.equal(*results)


def test_copies_of_experts_have_the_loaded_weights(folder_of: Callable[[str], Path], pool: RankPool) -> None:
    pool.run(_with_copies, str(folder_of("qwen2_moe")))


def _peaks(rank: int, world: int, folder: Path) -> tuple[dict[str, float], float, float]:
    """Return the peak memory of each step over that before it, what loading states to need, and what it keeps."""
    with torch.device("meta"):
        model = moe_comm.swap_moe(new_model("mixtral", **LARGE), ep_group(2))
    peaks: dict[str, float] = {}

    def measure(name: str, call: Callable[..., Any], *args: Any) -> Any:
        assert reset_peak_rss()
        before = rss_mib()
        result = call(*args)
        peaks[name] = peak_rss_mib() - before
        return result

    out, group = folder / str(rank // 2), ep_group(2)
    moe_comm.save_checkpoint(moe_comm.swap_moe(new_model("mixtral"), group), out, group=group)  # imports modules
    report = measure("load", moe_comm.load_checkpoint, model, folder)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    measure("save", partial(moe_comm.save_checkpoint, group=group), model, out)
    measure("save optimizer", save_optimizer, model, optimizer, out / "optimizer.pt", group)
    optimizer.state.clear()
    measure("load optimizer", load_optimizer, model, optimizer, out / "optimizer.pt", group)
    return peaks, report.transient / 2**20, report.kept / 2**20


LARGE = {"hidden_size": 256, "intermediate_size": 4096, "num_hidden_layers": 1, "vocab_size": 512}


def test_no_more_memory_is_used_than_stated(pool: RankPool, tmp_path: Path) -> None:
    model = new_model("mixtral", **LARGE).bfloat16()  # loaded as fp32, through buffers
    model.save_pretrained(tmp_path)
    whole = sum(4 * parameter.numel() for parameter in model.parameters()) / 2**20
    for peaks, transient, kept in pool.run(_peaks, tmp_path):
        assert peaks["load"] < kept + transient + 4 < whole - 8, (peaks, transient, kept, whole)
        assert max(peaks["save"], peaks["save optimizer"], peaks["load optimizer"] - kept) < 6, (peaks, kept)


def _resume_optimizer(rank: int, world: int, folder: Path) -> str:
    from moe_comm.integrations.hugging_face.trainer import MoETrainerMixin

    trainer = SimpleNamespace(model=moe_comm.swap_moe(new_model("mixtral"), dist.group.WORLD))
    with pytest.raises(CheckpointError) as raised:
        MoETrainerMixin._load_optimizer_and_scheduler(trainer, str(folder / str(min(rank, 1))))
    return str(raised.value)


def test_files_of_the_optimizer_that_some_ranks_do_not_find_raise_on_all(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    for name in ("optimizer.pt", "scheduler.pt"):
        (tmp_path / "0" / name).touch()
    assert all("ranks [1, 2, 3] do not find" in message for message in pool.run(_resume_optimizer, tmp_path))


def test_the_state_of_an_optimizer_with_numpy_scalars_is_read(tmp_path: Path) -> None:
    model, path = nn.Linear(2, 2), tmp_path / "optimizer.pt"
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step + 1))
    lr = optimizer.param_groups[0]["lr"]
    assert isinstance(lr, np.float64)
    save_optimizer(model, optimizer, path, None)
    optimizer.param_groups[0]["lr"] = 0.0
    load_optimizer(model, optimizer, path, None)
    assert optimizer.param_groups[0]["lr"] == lr


def test_the_cache_of_the_hub(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    cached = tmp_path / "models--somebody--a-model"
    shutil.copytree(folder_of("mixtral"), cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    model = moe_comm.from_pretrained("somebody/a-model", cache_dir=tmp_path, num_experts_per_tok=1)
    expected = AutoModelForCausalLM.from_pretrained(folder_of("mixtral"), num_experts_per_tok=1)
    _equal(model, moe_comm.swap_moe(expected))
    file = _saved({name: value.clone() for name, value in expected.state_dict().items()}, tmp_path / "a.safetensors")
    again = moe_comm.from_pretrained(file, config=expected.config, model_class=type(expected), device_map="cpu")
    _equal(again, expected)


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "deepseek_v3"])
def test_tensor_parallel_attention_and_linears(family: str, folder_of: Callable[[str], Path], pool: RankPool) -> None:
    pool.run(_sharded, str(folder_of(family)))


def _trained(rank: int, world: int, job: tuple[str, Path]) -> None:
    folder, out = job
    models = (
        moe_comm.from_pretrained(folder, ep_group(2)),
        moe_comm.swap_moe(AutoModelForCausalLM.from_pretrained(folder), ep_group(2)),
    )
    results: list[list[Tensor]] = []
    for index, model in enumerate(models):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ddp = nn.parallel.DistributedDataParallel(model)
        ids = batch()[rank]
        results.append([])
        for _ in range(2):
            loss = ddp(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            results[-1].append(loss.detach())
        moe_comm.save_swapped(model, out / str(index))
        state = moe_comm.gather_state_dict(model)
        results[-1] += [state[name] for name in sorted(state)]
        moe_comm.prepare_fsdp(model)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        loss = model(ids, labels=ids).loss
        loss.backward()
        state = moe_comm.gather_state_dict(model)
        results[-1] += [loss.detach(), *(state[name] for name in sorted(state))]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with launched(rank, world):
        trained = []
        for model in (
            moe_comm.from_pretrained(folder, ep_group(2)),
            moe_comm.swap_moe(AutoModelForCausalLM.from_pretrained(folder), ep_group(2)),
        ):
            make_trainer(TrainingCase(folder), world, model.train()).train()
            trained.append(dict(model.named_parameters()))
    assert all(torch.equal(parameter, trained[1][name]) for name, parameter in trained[0].items())


def test_a_loaded_model_trains_as_a_swapped_one(
    folder_of: Callable[[str], Path], pool: RankPool, tmp_path: Path
) -> None:
    pool.run(_trained, (str(folder_of("mixtral")), tmp_path))
    saved = [load_file(tmp_path / str(index) / SINGLE) for index in range(2)]
    assert all(torch.equal(value, saved[1][name]) for name, value in saved[0].items())


def test_layouts_in_memory_and_with_other_prefixes(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folder_of("mixtral")
    expected = AutoModelForCausalLM.from_pretrained(folder)
    state = {name: value.clone() for name, value in expected.state_dict().items()}  # with both names of tied weights
    hub = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    without = {name.removeprefix("model."): value for name, value in hub.items()}
    for tensors in (state, without):
        save_file(tensors, tmp_path / SINGLE)
        model = _on_meta()
        moe_comm.load_checkpoint(moe_comm.swap_moe(model), tmp_path / SINGLE)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        _equal(model.eval(), moe_comm.swap_moe(AutoModelForCausalLM.from_pretrained(folder)))
    state["lm_head.weight"] += 1
    save_file(state, tmp_path / SINGLE)
    with pytest.raises(InputError, match="tie_word_embeddings=False"):
        moe_comm.load_checkpoint(_on_meta(), tmp_path)


def _on_meta() -> Any:
    with torch.device("meta"):
        return new_model("mixtral", **CHANGES["mixtral"])


def test_fp8_is_dequantized(tmp_path: Path) -> None:
    shape = {"hidden_size": 160, "moe_intermediate_size": 136, "kv_lora_rank": 136, "num_hidden_layers": 2}
    model = new_model("deepseek_v3", **shape)
    randomise(model, 0)
    model.save_pretrained(tmp_path)
    state, expected = load_file(tmp_path / SINGLE), {}
    stored: dict[str, Tensor] = {}
    for name, value in state.items():
        stored[name] = expected[name] = value
        if "experts" in name or "kv_b_proj" in name:
            rows, columns = (-(-size // 128) for size in value.shape)
            scale = torch.rand(rows, columns) + 0.5
            full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: value.shape[0], : value.shape[1]]
            scale_name = f"{name}_scale_inv"
            stored[name], stored[scale_name] = (value / full).to(torch.float8_e4m3fn), scale
            expected[name] = stored[name].float() * full
    save_file(stored, tmp_path / SINGLE)
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    loaded = moe_comm.from_pretrained(tmp_path)
    plain = new_model("deepseek_v3", **shape)
    moe_comm.load_checkpoint(plain, _saved(expected, tmp_path / "plain.safetensors"))
    _equal(loaded, moe_comm.swap_moe(plain.eval()))
    rounded = moe_comm.from_pretrained(tmp_path, dtype="bfloat16")
    for name, parameter in rounded.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name).bfloat16())
    save_file(stored | {scale_name: torch.ones(3, 3)}, tmp_path / SINGLE)
    with pytest.raises(UnsupportedModel, match=r"\[3, 3\].*\[1, 2\].*128 x 128"):
        moe_comm.from_pretrained(tmp_path)
    quantization["quant_method"] = "awq"
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(UnsupportedModel, match="awq"):
        moe_comm.from_pretrained(tmp_path)


def _saved(tensors: dict[str, Tensor], path: Path) -> Path:
    save_file(tensors, path)
    return path


def _block(rank: int, world: int, folder: Path) -> None:
    for style in (Mixtral, DeepSeek, Torchtitan):
        torch.manual_seed(0)
        original = Model(style)
        path = folder / f"{style.__name__}.safetensors"
        if rank == 0:
            save_file(original.state_dict(), path)
        dist.barrier()
        torch.manual_seed(1)
        model = moe_comm.swap_moe(Model(style), ep_group(4))
        report = moe_comm.load_checkpoint(model, path)
        assert report.kept < report.whole
        state = moe_comm.gather_state_dict(model)
        assert all(torch.equal(state[name], value) for name, value in original.state_dict().items())
    assert EXPERTS % world  # uneven


def test_blocks_of_users(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_block, tmp_path)


def _moe_layers(rank: int, world: int, folder: Path) -> None:
    """Save and load layers with whole experts, and with experts in slices (etp)."""

    def model(groups: Any, device: str = "cpu", seed: int = 0) -> nn.Module:
        torch.manual_seed(0)
        config = moe_comm.MoEConfig(16, 24, moe_comm.RouterConfig(7, 2), shared_ffn=8)
        layer = moe_comm.MoELayer.build(config, groups, seed=seed, device=device)
        return nn.Sequential(nn.Linear(8, 16, device=device), layer)

    for number, groups in enumerate((ep_group(2), MoEGroups(dist.group.WORLD, 2), MoEGroups(ep_group(2), 2))):
        original, out = model(groups), folder / str(number)
        state = moe_comm.gather_state_dict(original)
        moe_comm.save_checkpoint(original, out)
        written = load_file(out / SINGLE)
        assert written.keys() == state.keys()
        assert all(torch.equal(written[name], value) for name, value in state.items())
        x = torch.randn(5, 8)
        for loaded in (model(groups, "meta"), model(ep_group(4), seed=1)):
            moe_comm.load_checkpoint(loaded, out, device="cpu")
            again = moe_comm.gather_state_dict(loaded)
            assert all(torch.equal(again[name], value) for name, value in state.items())
            assert torch.allclose(loaded(x), original(x), atol=1e-6)


def test_models_with_moe_layers(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_moe_layers, tmp_path)


def _transformers(rank: int, world: int, folder: Path) -> None:
    def model(mapping: ParallelConfig, seed: int) -> Transformer:
        model = Transformer(LATENT, ModelPlan.of(ParallelMesh(mapping)))
        initialize(model, seed)
        return model

    whole = Transformer(LATENT)
    initialize(whole, 3)
    expected = whole.state_dict()
    before: Path | None = None
    for number, mapping in enumerate((ParallelConfig(tp=2, dp=2, ep=2, etp=2), ParallelConfig(dp=4, ep=4))):
        split, out = model(mapping, seed=3 if before is None else 4), folder / f"transformer-{number}"
        if before is not None:
            moe_comm.load_checkpoint(split, before)
        moe_comm.save_checkpoint(split, out)
        written = load_file(out / SINGLE)
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], value) for name, value in expected.items())
        split.close()
        before = out


def test_a_transformer_with_tensor_parallelism(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_transformers, tmp_path)


def _wrapped(rank: int, world: int, folders: tuple[Path, Path]) -> None:
    """Load into models that DDP and FSDP2 wrap. A forward pass has gathered parameters, in another dtype."""
    first, second = folders
    expected = moe_comm.state_dict(moe_comm.from_pretrained(second, ep_group(2)))
    ids = batch()[rank]
    for wrap in (nn.parallel.DistributedDataParallel, sharded):
        model = wrap(moe_comm.from_pretrained(first, ep_group(2)))
        with torch.no_grad():
            before = model(ids).logits
        if rank == 3:
            with pytest.raises(ConfigError, match="missing"):
                moe_comm.load_checkpoint(model, second / "missing")
        else:
            with pytest.raises(ConfigError, match="rank"):
                moe_comm.load_checkpoint(model, second)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, before)
        report = moe_comm.load_checkpoint(model, second)
        held = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        assert report.kept == sum(one.nbytes for one in held)
        state = moe_comm.state_dict(model)
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    with torch.device("meta"):
        model = fully_shard(new_model("mixtral", **CHANGES["mixtral"]))
    with pytest.raises(UnsupportedModel, match="to_empty"):
        moe_comm.load_checkpoint(model, second)


def test_models_under_ddp_and_fsdp2(folder_of: Callable[[str], Path], pool: RankPool, tmp_path: Path) -> None:
    model = new_model("mixtral", **CHANGES["mixtral"])
    randomise(model, 1)
    model.save_pretrained(tmp_path)
    pool.run(_wrapped, (folder_of("mixtral"), tmp_path))


CODE = """
from transformers import MixtralForCausalLM

class Scaled(MixtralForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 3 * output.logits
        return output
"""


def test_models_with_their_own_code(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(folder_of("mixtral"), folder)
    (folder / "modeling_scaled.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Scaled"], "auto_map": {"AutoModelForCausalLM": "modeling_scaled.Scaled"}}
    (folder / "config.json").write_text(json.dumps(config))
    model = moe_comm.from_pretrained(folder, trust_remote_code=True)
    expected = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__name__ == "Scaled"
    _equal(model, moe_comm.swap_moe(expected))
    moe_comm.save_checkpoint(model, tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    _equal(model, moe_comm.swap_moe(again))


def _refused(rank: int, world: int, job: tuple[dict[int, str], str, str]) -> None:
    folders, kind, words = job
    with torch.device("meta"):
        model = moe_comm.swap_moe(new_model("qwen2_moe"), ep_group(4))
    with pytest.raises(MoeCommError, match=words) as caught:
        moe_comm.load_checkpoint(model, folders.get(rank, folders[0]))
    assert type(caught.value).__name__ == kind
    assert kind == "CheckpointError" or all(parameter.is_meta for parameter in model.parameters())


EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"
NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda state: state.pop(EXPERT), InputError, EXPERT),
        (lambda state: state.update(extra=torch.ones(3)), InputError, "extra"),
        (lambda state: state.update({EXPERT: state[EXPERT].T.contiguous()}), InputError, r"\[32, 24\].*\[24, 32\]"),
        (lambda state: state.update({NORM: state[NORM].to(torch.int8)}), UnsupportedModel, "I8"),
        (lambda state: state.update({EXPERT: state[EXPERT].to(torch.float8_e4m3fn)}), UnsupportedModel, "_scale_inv"),
    ],
    ids=["missing", "extra", "transposed", "int8", "fp8 without scales"],
)
def test_a_checkpoint_of_another_model_is_refused_before_reading(
    change: Callable[[dict[str, Tensor]], Any],
    kind: type[Exception],
    words: str,
    folder_of: Callable[[str], Path],
    pool: RankPool,
    tmp_path: Path,
) -> None:
    folder = folder_of("qwen2_moe")
    state = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    change(state)
    save_file(state, tmp_path / SINGLE)
    pool.run(_refused, ({0: str(tmp_path)}, kind.__name__, words))


def test_a_damaged_or_missing_file_of_one_rank_raises_on_all(
    folder_of: Callable[[str], Path], pool: RankPool, tmp_path: Path
) -> None:
    folder, other = folder_of("qwen2_moe"), tmp_path / "other"
    shutil.copytree(folder, other)
    file = sorted(other.glob("*.safetensors"))[-1]
    whole = file.read_bytes()
    file.write_bytes(whole[:-2])
    pool.run(_refused, ({0: str(folder), 2: str(other)}, CorruptFile.__name__, file.name))
    file.unlink()
    pool.run(_refused, ({0: str(folder), 2: str(other)}, ConfigError.__name__, file.name))


def test_ranks_that_read_different_values_raise(
    folder_of: Callable[[str], Path], pool: RankPool, tmp_path: Path
) -> None:
    folder, other = folder_of("qwen2_moe"), tmp_path / "other"
    shutil.copytree(folder, other)
    file = sorted(other.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-2] + b"\x01\x3c")
    pool.run(_refused, ({0: str(folder), 2: str(other)}, RankMismatch.__name__, "different contents"))


def test_one_file_is_preferred_to_an_older_index(tmp_path: Path) -> None:
    for seed, size in ((0, "10KB"), (1, "1GB")):
        model = new_model("mixtral")
        randomise(model, seed)
        model.save_pretrained(tmp_path, max_shard_size=size)
    loaded = moe_comm.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight)
    assert (tmp_path / INDEX).exists()


def _fails(rank: int, world: int, folder: str) -> None:
    with torch.device("meta"):
        model = moe_comm.swap_moe(new_model("qwen2_moe"), ep_group(4))
    patch = pytest.MonkeyPatch()
    if rank == 1:

        def fail(*_: Any) -> int:
            raise OSError("the disk is gone")

        patch.setattr("os.preadv", fail)
    with patch.context(), pytest.raises(CheckpointError, match="the disk is gone"):
        moe_comm.load_checkpoint(model, folder)
    patch.undo()


def test_an_error_of_reading_on_one_rank_raises_on_all(folder_of: Callable[[str], Path], pool: RankPool) -> None:
    pool.run(_fails, str(folder_of("qwen2_moe")))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device_map": "auto"}, "device"),
        ({"device": "meta"}, "meta"),
        ({"load_in_8bit": True}, "load_in_8bit"),
        ({"bakend": "auto"}, "backend"),
        ({"dtype": "int8"}, "dtype"),
        ({"dtype": "brain"}, "dtype"),
        ({"model_class": nn.Linear}, "model_class"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], words: str, folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=words):
        moe_comm.from_pretrained(folder_of("mixtral"), **settings)
    with pytest.raises(ConfigError, match=r"config"):
        moe_comm.from_pretrained("nobody/no-such-model")
    with pytest.raises(ConfigError, match=r"/no/such/folder, which is neither a folder nor"):
        moe_comm.from_pretrained("/no/such/folder")


def test_pickled_weights_are_refused_with_what_to_do(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(ConfigError, match=r"Load pytorch_model-00001-of-00002\.bin .*save_pretrained"):
        moe_comm.load_checkpoint(nn.Linear(2, 2), tmp_path)
    save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="load the base model, and wrap it"):
        moe_comm.load_checkpoint(nn.Linear(2, 2), tmp_path)


class _Table(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("table", torch.ones(3), persistent=False)


def test_buffers_without_values_are_refused(tmp_path: Path) -> None:
    save_file(_Table().state_dict(), tmp_path / SINGLE)
    with torch.device("meta"):
        model = _Table()
    with pytest.raises(ConfigError, match=r"table.*include_buffers=False"):
        moe_comm.load_checkpoint(model, tmp_path)
    model.table = torch.ones(3)
    moe_comm.load_checkpoint(model, tmp_path)
    assert not model.linear.weight.is_meta
