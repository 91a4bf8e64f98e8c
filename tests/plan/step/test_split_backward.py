"""The halves of a backward pass add up to the complete pass and the repeated work, as in torch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from moe_comm.kernels import expert_mlp
from moe_comm.kernels.cpu_gemm import ExpertWeights
from moe_comm.layers.attention.config import AttentionConfig
from moe_comm.layers.moe.config import MoEConfig
from moe_comm.layers.moe.router import RouterConfig
from moe_comm.layers.parallel import recompute as recompute_module
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.model import ModelPlan, StageInput, Transformer
from moe_comm.layers.transformer.shape import Recompute
from moe_plan.model.mapping import Mapping
from moe_plan.orders import PassKind
from moe_plan.step.blocks import FREE, halves
from moe_plan.step.operators import Operation
from tests.plan.step.test_step import model

F, B, I, W = PassKind
BACKWARD = (
    Operation("norm", "memory", 0.5),
    Operation("experts down", "product", 3.0, flops=8.0, weight_grad_s=1.0),
    Operation("experts act", "memory", 0.25),
    Operation("attention gather again", "transfer", 0.125),
    Operation("experts up", "product", 4.0, flops=8.0, weight_grad_s=2.0),
)


def seconds(operations: tuple[Operation, ...]) -> float:
    return sum(one.seconds for one in operations)


def test_the_second_half_has_the_weight_gradients_and_the_first_half_the_rest() -> None:
    input_half, second = halves(BACKWARD, 0, fused=True)
    assert seconds(input_half) + seconds(second) == seconds(BACKWARD)
    assert [one.name for one in second] == ["experts down", "experts up"] and seconds(second) == 3.0
    assert [one.name for one in input_half] == [one.name for one in BACKWARD]
    assert sum(one.flops for one in input_half) == sum(one.flops for one in second) == 8.0
    assert not any(one.weight_grad_s for one in (*input_half, *second))


def test_the_second_half_repeats_unfused_and_recomputed_work() -> None:
    _, unfused = halves(BACKWARD, 0, fused=False)
    assert seconds(unfused) == 3.0 + 2.0 + 0.25, "repeats the activation and the input gradient of experts down"
    _, recomputed = halves(BACKWARD, 1, fused=True)
    assert seconds(recomputed) == 3.0 + 0.5 + 0.125, "repeats the norm and the gather after it"


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_the_trainer_repeats_the_same_work_in_the_second_half(
    recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count expert GEMMs and recomputations of an MoE layer's backward in torch's halves.

    GEMMs of SwiGLU experts are not single calls, so the activation is another one.
    """
    attention, moe = AttentionConfig(64, 4, 2, 16), MoEConfig(64, 96, RouterConfig(4, 2), activation="geglu")
    layers = Transformer(TransformerConfig(512, 64, 1, attention, moe, 64), ModelPlan(recompute=recompute))
    initialize(layers, seed=1)
    x, tokens = layers._prepare_input(StageInput(torch.arange(64)[None], None, None))
    inside = x.detach().requires_grad_()
    (layer,) = layers.layers.values()
    y = layer(inside, tokens)
    calls: Counter[str] = Counter()

    def counted(name: str, real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            calls[name] += name != "multiply" or len(arguments[3]) == 4  # not those of the router
            return real(*arguments)

        return call

    for owner, name in ((ExpertWeights, "multiply"), (expert_mlp, "weight_gradients")):
        monkeypatch.setattr(owner, name, counted(name, getattr(owner, name)))
    get = recompute_module._RecomputedValue.get

    def counted_get(value: Any) -> Tensor:
        calls["again"] += value._value is None
        return get(value)

    monkeypatch.setattr(recompute_module._RecomputedValue, "get", counted_get)
    y = y.view_as(y).clone()
    parameters = list(layer.parameters())
    _, groups = stage_backward_input([y], [torch.ones_like(y)], [inside], iter(parameters))
    input_half, calls = calls, Counter()
    stage_backward_weight(iter(parameters), groups)
    assert (input_half["multiply"], input_half["weight_gradients"]) == (2, 0), "row gradients of 2 GEMMs"
    assert (calls["multiply"], calls["weight_gradients"]) == (1, 2), "one row gradient again, and the weight gradients"
    assert input_half["again"] == calls["again"] and bool(input_half["again"]) == (recompute == "selective")


@pytest.mark.parametrize(
    ("text", "schedule", "recompute", "expected"),
    [
        ("pp=4", None, "none", False),
        ("pp=4,vpp=2", None, "none", False),
        ("pp=4", "gpipe", "none", False),
        ("pp=4", "zero_bubble", "selective", True),
        ("pp=4", "zbv", "none", True),
        ("pp=4", "dualpipev", "none", True),
        ("pp=4", "zbv", "full", False),
    ],
)
def test_which_schedules_split_the_backward_pass(
    text: str, schedule: str | None, recompute: str, expected: bool
) -> None:
    assert Mapping.parse(text, 4, pipeline=schedule, recompute=recompute).splits is expected


def test_the_first_stage_has_no_input_half_and_the_head_no_weight_half() -> None:
    step_model = model("mixtral-8x22b", "tp=2,pp=4,ep=8", 64, pipeline="zero_bubble", overlap="inter")
    first, second, _, last = step_model.stage_passes
    assert not first.input and first.weight == first.backward
    assert {each.name for each in second.weight} < {each.name for each in second.backward}
    assert not any(each.name.startswith("head") for each in last.weight)
    assert sum(each.name.startswith("head") for each in last.input) == sum(
        each.name.startswith("head") for each in last.backward
    )
    pass_seconds = step_model._pass_seconds
    assert (pass_seconds[0, I], pass_seconds[0, W]) == (0.0, pass_seconds[0, B])
    for stage, passes in enumerate(step_model.stage_passes):
        for kind in PassKind:
            assert pass_seconds[stage, kind] == pytest.approx(sum(each.exposed for each in passes.kinds[kind]))


def test_transfers_do_not_overlap_with_split_weight_gradients() -> None:
    step_model = model("mixtral-8x22b", "tp=2,pp=4,ep=8", 64, pipeline="zero_bubble", overlap="inter")
    passes = step_model.stage_passes[1]
    assert sum(each.hidden for each in passes.backward) > 0
    assert not any(each.hidden for each in (*passes.input, *passes.weight)), (
        "neither shared experts nor recomputation hide transfers"
    )
    redone = model("mixtral-8x22b", "tp=2,pp=4,ep=8", 64, pipeline="zbv", overlap="inter", recompute="selective")
    passes = redone.stage_passes[1]
    recomputed = {each.name for each in passes.forward if each.kind == "memory"}
    memory_s = sum(each.seconds for each in passes.forward if each.name in recomputed and each.kind == "memory")
    assert 0 < sum(each.hidden for each in passes.input) <= memory_s * FREE * (1 + 1e-9)


def test_fully_recomputed_layers_compute_both_gradients_in_the_input_half() -> None:
    step_model = model("mixtral-8x22b", "tp=2,pp=4,ep=8", 64, pipeline="zero_bubble", recompute="full")
    assert (step_model._pass_seconds[:, I] == step_model._pass_seconds[:, B]).all() and not step_model._pass_seconds[
        :, W
    ].any()


def test_sharded_weights_are_gathered_for_the_first_half_and_their_gradients_scattered_after_the_second() -> None:
    unsplit, split_model = (
        model("mixtral-8x22b", "pp=4,ep=8", 64, pipeline=schedule, sharding="fsdp", reshard=True)
        for schedule in (None, "zero_bubble")
    )
    assert split_model.weight_seconds[1:, I] == pytest.approx(unsplit.weight_seconds[1:, F])
    assert (split_model.weight_seconds[:, I] + split_model.weight_seconds[:, W]) == pytest.approx(
        unsplit.weight_seconds[:, B]
    )


@pytest.mark.parametrize("schedule", [None, "zero_bubble"])
def test_a_pipeline_that_keeps_weights_and_gradients_gathers_and_scatters_once_per_step(schedule: str | None) -> None:
    each, once = (
        model("mixtral-8x22b", "pp=4,ep=8", 64, pipeline=schedule, sharding="fsdp", reshard=reshard)
        for reshard in (True, False)
    )
    gathers = each.weight_seconds[:, F]
    assert once.weight_seconds[:, F] * once.micro_batches == pytest.approx(gathers)
    assert once.weight_seconds[:, B] * once.micro_batches == pytest.approx(each.weight_seconds[:, B] - gathers)
    sent, sent_once = each.predict().sent, once.predict().sent
    for name in ("dense", "expert"):
        times = each.micro_batches
        assert sent[f"{name} gradients"] == {
            link: times * count for link, count in sent_once[f"{name} gradients"].items()
        }
        assert sent[f"{name} weights"] == {
            link: 2 * times * count for link, count in sent_once[f"{name} weights"].items()
        }
