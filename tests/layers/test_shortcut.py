"""The shortcut of the experts: LongCat-Flash's results, equal bits with and without overlap, and hidden transfers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_comm.errors import ConfigError, UnsupportedModel
from moe_comm.layers.attention.config import AttentionConfig, MLAConfig, RopeConfig
from moe_comm.layers.moe.config import MoEConfig
from moe_comm.layers.moe.router import RouterConfig, ZeroExperts
from moe_comm.layers.parallel.module import shardings_of
from moe_comm.layers.transformer.block import BRANCH_POINTS, Shortcut, ShortcutBlock, TokenContext
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.model import ModelPlan, Transformer
from moe_comm.layers.transformer.shape import ModelShape, Recompute
from moe_comm.overlap.options import Overlap
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_plan.model.activations import ActivationMemory
from tests.layers.tiny import BY_WEIGHT, LATENT, TINY, Case, Outcome, assert_same, batch, own, run, work
from tests.layers.transfers import TransferLog, record_transfers
from tests.pool import RankPool
from tests.support.activation_memory import activation_bytes

SHORTCUT = replace(TINY, shortcut=True)
LATENT_SHORTCUT = replace(LATENT, shortcut=True, dense_layers=())
OVERLAP = Overlap(chunks=2, chunk_bytes=1)
HIDDEN, EXPERTS, IDENTITY = 32, 6, 2
LONGCAT = TransformerConfig(
    vocab=8,
    hidden=HIDDEN,
    layers=1,
    attention=AttentionConfig(
        HIDDEN, 4, 4, 4, rope=RopeConfig(10_000.0, interleaved=True), mla=MLAConfig(12, 8, 6, 4, 5), norm_eps=1e-6
    ),
    moe=MoEConfig(
        HIDDEN,
        16,
        RouterConfig(
            EXPERTS,
            3,
            normalize=False,
            scale=2.5,
            correction_bias=True,
            zero_experts=ZeroExperts(identity=IDENTITY),
        ),
    ),
    max_length=16,
    dense_ffn=48,
    norm_eps=1e-6,
    shortcut=True,
    init_std=0.3,
)


def _hugging_face() -> tuple[Any, Any]:
    """Return LongCat-Flash's layer with random weights, and its rotary embedding."""
    hub = pytest.importorskip("transformers.models.longcat_flash.modeling_longcat_flash")
    from transformers import LongcatFlashConfig

    settings: dict[str, Any] = {"attn_implementation": "eager"}
    config = LongcatFlashConfig(
        hidden_size=HIDDEN,
        num_layers=1,
        num_attention_heads=4,
        ffn_hidden_size=48,
        q_lora_rank=12,
        kv_lora_rank=8,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        head_dim=4,
        v_head_dim=5,
        n_routed_experts=EXPERTS,
        zero_expert_num=IDENTITY,
        moe_topk=3,
        expert_ffn_hidden_size=16,
        routed_scaling_factor=2.5,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        **settings,
    )
    torch.manual_seed(0)
    layer = hub.LongcatFlashDecoderLayer(config, 0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    layer.mlp.router.e_score_correction_bias.normal_(0, 0.02)
    return layer, hub.LongcatFlashRotaryEmbedding(config)


@torch.no_grad()
def _copy(hf_layer: Any, block: ShortcutBlock) -> None:
    """Copy the weights into ``block``, and fold the scales of the MLA latents into the norms before them."""
    for index, prefix in enumerate(("", "second_")):
        attention, hf_attention = getattr(block, f"{prefix}attention"), hf_layer.self_attn[index]
        attention.q_a.weight.copy_(hf_attention.q_a_proj.weight)
        attention.q_a_norm.weight.copy_(hf_attention.q_a_layernorm.weight * hf_attention.mla_scale_q_lora)
        attention.q_b.weight.copy_(hf_attention.q_b_proj.weight)
        attention.kv_a.weight.copy_(hf_attention.kv_a_proj_with_mqa.weight)
        attention.kv_a_norm.weight.copy_(hf_attention.kv_a_layernorm.weight * hf_attention.mla_scale_kv_lora)
        attention.kv_b.weight.copy_(hf_attention.kv_b_proj.weight)
        attention.o.weight.copy_(hf_attention.o_proj.weight)
        getattr(block, f"{prefix}attention_norm").weight.copy_(hf_layer.input_layernorm[index].weight)
        getattr(block, f"{prefix}ffn_norm").weight.copy_(hf_layer.post_attention_layernorm[index].weight)
        dense, mlp = getattr(block, f"{prefix}dense"), hf_layer.mlps[index]
        dense.w13.copy_(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        dense.w2.copy_(mlp.down_proj.weight)
    block.moe.router.weight.copy_(hf_layer.mlp.router.classifier.weight)
    assert block.moe.router.correction_bias is not None
    block.moe.router.correction_bias.copy_(hf_layer.mlp.router.e_score_correction_bias)
    block.moe.experts.w13.copy_(hf_layer.mlp.experts.gate_up_proj[:EXPERTS])
    block.moe.experts.w2.copy_(hf_layer.mlp.experts.down_proj)


def test_a_block_equals_that_of_longcat_flash() -> None:
    hf_layer, rotary = _hugging_face()
    block = ShortcutBlock(LONGCAT, 0, ModelPlan())
    _copy(hf_layer, block)
    x = torch.randn(2, 10, HIDDEN, generator=torch.Generator().manual_seed(1))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    positions = torch.arange(10).unsqueeze(0)
    mask = torch.full((10, 10), -torch.inf).triu(1)[None, None]
    expected = hf_layer(inputs[0], attention_mask=mask, position_embeddings=rotary(x, positions))
    y = block(inputs[1], TokenContext(block.attention.rope.table(positions, torch.float32)))
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    expected.backward(grad)
    y.backward(grad)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-3, atol=1e-3)
    pairs = [
        (block.moe.experts.w13.grad, hf_layer.mlp.experts.gate_up_proj.grad[:EXPERTS]),
        (block.moe.router.weight.grad, hf_layer.mlp.router.classifier.weight.grad),
        (block.attention.o.weight.grad, hf_layer.self_attn[0].o_proj.weight.grad),
        (block.second_dense.w2.grad, hf_layer.mlps[1].down_proj.weight.grad),
        (block.second_ffn_norm.weight.grad, hf_layer.post_attention_layernorm[1].weight.grad),
    ]
    for actual, expected_grad in pairs:
        torch.testing.assert_close(actual, expected_grad, rtol=1e-3, atol=1e-3 * float(expected_grad.abs().max()))
    load_E = block.moe.router.load_E
    assert load_E[EXPERTS:].any(), "the identity experts must be selected"


def _differing_results(rank: int, world: int, arg: tuple[TransformerConfig, ParallelConfig, str]) -> list[str]:
    """Return the results (loss, gradients, loads) that differ from those without overlap and recomputation."""
    config, mapping, backend = arg
    mesh = ParallelMesh(mapping)

    def run_step(
        overlap: Overlap | None, recompute: str = "none", schedule: Shortcut | None = None
    ) -> dict[str, Tensor]:
        # Linear layers overlap in all runs, because without overlap they use different GEMM kernels.
        options: Any = {"recompute": recompute, "overlap": OVERLAP, "backend": backend, "dtype": torch.float32}
        plan = ModelPlan.of(mesh, **options)
        model = Transformer(config, plan)
        initialize(model, seed=3)
        for block in model.layers.values():
            if isinstance(block, ShortcutBlock):
                block.moe.overlap, block.schedule = overlap, schedule or Shortcut()
        ids, targets, documents = (own(t, plan) for t in batch(True))
        assert ids is not None and targets is not None
        loss = model.loss(model(ids, documents=documents), targets)
        loss.backward()
        results = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert len(results) == len(list(model.parameters()))
        loads = {f"load {n}": layer.router.load_E for n, layer in enumerate(model.moe_layers())}
        model.close()
        return {"loss": loss.detach(), **results, **loads}

    expected = run_step(None)
    settings: list[Any] = [
        (OVERLAP,),
        (OVERLAP, "full"),
        (OVERLAP, "selective", Shortcut("start", "start")),
        (OVERLAP, "none", Shortcut("dense", "second_attention")),
        (None, "selective", Shortcut("second_attention", "second_attention")),
    ]
    differing = []
    for arguments in settings:
        results = run_step(*arguments)
        differing += [f"{name} of {arguments}" for name in expected if not torch.equal(results[name], expected[name])]
    return differing


@pytest.mark.parametrize(
    ("config", "mapping", "backend"),
    [
        (replace(BY_WEIGHT, shortcut=True), ParallelConfig(tp=2, ep=2), "all_to_all"),
        (SHORTCUT, ParallelConfig(dp=2, ep=2), "auto"),
    ],
    ids=["tp", "shared memory"],
)
def test_overlap_schedule_and_recomputation_change_no_bit(
    pool2: RankPool, config: TransformerConfig, mapping: ParallelConfig, backend: str
) -> None:
    assert pool2.run(_differing_results, (config, mapping, backend)) == [[], []]


def _run_on_one_process(config: TransformerConfig) -> Outcome:
    return run(Case(config=config))


def test_four_ranks_equal_one(pool4: RankPool) -> None:
    mapping = ParallelConfig(tp=2, dp=2, etp=2, ep=2)
    case = Case(mapping, LATENT_SHORTCUT, {"overlap": OVERLAP})
    assert_same(pool4.run(work, case), mapping, _run_on_one_process(LATENT_SHORTCUT), 1e-9)


def _log_transfers(rank: int, world: int, overlap: Overlap | None) -> TransferLog:
    config = replace(SHORTCUT, dense_layers=(0, 2))
    model = Transformer(
        config, ModelPlan.of(ParallelMesh(ParallelConfig(dp=2, ep=2)), backend="all_to_all", overlap=overlap)
    )
    initialize(model, seed=3)
    block = model.layers["1"]
    assert isinstance(block, ShortcutBlock)
    ids, targets, _ = (own(t, model.plan) for t in batch(False))
    assert ids is not None and targets is not None
    with record_transfers() as log:
        for name in ("attention", "dense", "second_attention", "second_dense"):
            log.watch(name, getattr(block, name))
        model.loss(model(ids), targets).backward()
    model.close()
    assert log.in_flight == 0 and log.started
    return TransferLog(log.events)


def test_the_rest_of_the_layer_runs_while_rows_are_in_flight(pool2: RankPool) -> None:
    parallel_modules = ("dense", "second_attention", "second_dense")
    for log in pool2.run(_log_transfers, OVERLAP):
        assert log.counts("attention") == [0] and log.counts("attention backward") == [0]
        for name in parallel_modules:
            assert log.counts(name)[0] > 0, f"{name} does not overlap with transfers"
            assert log.counts(f"{name} backward")[0] > 0, f"the backward of {name} does not overlap with transfers"
    for log in pool2.run(_log_transfers, None):
        assert not any(pending for _, pending in log.events)


def test_a_model_with_shortcuts_has_twice_the_attentions_and_dense_blocks() -> None:
    model = Transformer(SHORTCUT, ModelPlan(device="meta"))
    names = shardings_of(model).keys()
    of_layer = {name.split(".", 2)[2] for name in names if name.startswith("layers.0.")}
    assert {
        "attention.q.weight",
        "dense.w13",
        "moe.router.weight",
        "second_attention.q.weight",
        "second_attention_norm.weight",
        "second_dense.w2",
        "second_ffn_norm.weight",
    } <= of_layer
    plain = {name for name in names if name.startswith("layers.1.")}
    assert not any("second" in name or "moe" in name for name in plain), "a dense layer must be unchanged"
    assert len(list(model.moe_layers())) == 2
    shape, plain_shape = ModelShape.of(SHORTCUT), ModelShape.of(TINY)
    assert shape.params == sum(p.numel() for p in model.parameters())
    flops, plain_flops = shape.flops_per_token(TINY.max_length), plain_shape.flops_per_token(TINY.max_length)
    for operator in ("qkv", "scores", "out"):
        assert flops[operator] / plain_flops[operator] == pytest.approx(5 / 3)
    assert flops["dense"] == 5 * plain_flops["dense"], "2 blocks in each of 2 MoE layers, and 1 in the dense layer"
    for operator in ("router", "experts", "shared", "head"):
        assert flops[operator] == plain_flops[operator]
    for family in ("router", "experts", "shared experts", "head"):
        assert shape.parameters()[family] == plain_shape.parameters()[family]
        assert shape.active_parameters()[family] == plain_shape.active_parameters()[family]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_activation_estimate_of_a_shortcut_model_is_within_ten_percent(recompute: Recompute) -> None:
    config = replace(SHORTCUT, moe=replace(SHORTCUT.moe, router=RouterConfig(4, 2)))
    model = Transformer(config, ModelPlan(recompute=recompute, dtype=torch.float32))
    initialize(model, seed=3)
    ids, _, _ = batch(False)
    measured = activation_bytes(lambda: model(ids), [*model.parameters(), *model.buffers(), ids])
    estimate = ActivationMemory(ModelShape.of(config), 4, recompute=recompute, on_cpu=True)
    assert ids.numel() * estimate.saved(1, 2, 1) == pytest.approx(measured, rel=0.1)


def test_invalid_combinations_with_a_shortcut_raise() -> None:
    with pytest.raises(ConfigError, match="dense_ffn"):
        replace(TINY, dense_layers=(), dense_ffn=0, shortcut=True)
    with pytest.raises(ConfigError, match="exclude each other"):
        replace(SHORTCUT, parallel_block=True)
    with pytest.raises(ConfigError, match="must not be before compute 'second_dense'"):
        Shortcut("second_dense", "dense")
    with pytest.raises(ConfigError, match=", ".join(BRANCH_POINTS)):
        Shortcut("middle")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no experts"):
        ShortcutBlock(SHORTCUT, 1, ModelPlan(device="meta"))
    pytest.importorskip("transformers")
    from moe_comm.integrations.hugging_face.architecture import to_hugging_face

    with pytest.raises(UnsupportedModel, match="shortcut"):
        to_hugging_face(SHORTCUT, "deepseek_v3")
