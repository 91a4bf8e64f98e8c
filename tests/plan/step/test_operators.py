"""Operators of a layer: FLOPs equal the model's, bytes equal the published formulas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.shape import ModelShape
from moe_plan.machine.hardware_table import cluster_named
from moe_plan.model.files import model_named
from moe_plan.model.load import Workload
from moe_plan.model.mapping import Mapping, PlacedMapping
from moe_plan.step.operators import BlockOperations, Operation, Operators

SEQ = 4096


def operators(model: str | ModelShape, mapping: str, gpus: int = 8, **load: object) -> Operators:
    shape = model_named(model) if isinstance(model, str) else model
    placed = PlacedMapping(Mapping.parse(mapping, gpus), cluster_named("h100", gpus))
    return Operators(shape, placed, Workload(**{"seq_len": SEQ, **load}))  # type: ignore[arg-type]


def named(operations: Iterable[Operation], part: str) -> list[Operation]:
    return [one for one in operations if part in one.name]


def layer_flops(shape: ModelShape, kind: str) -> float:
    return sum(shape.flops_per_token(SEQ, kind=kind).values())  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["mixtral-8x22b", "qwen2-57b-a14b", "deepseek-v3", "longcat-flash"])
@pytest.mark.parametrize("mapping", ["", "tp=2,ep=8", "tp=2,cp=2,ep=4,etp=2", "tp=4,ep=2,etp=4"])
def test_flops_equal_those_of_the_model_for_every_mapping(model: str, mapping: str) -> None:
    result = operators(model, mapping)
    shape, p = result.shape, result.placed.mapping.parallel
    for kind in ("moe", "dense") if shape.dense_layers else ("moe",):
        layer = result.layer(kind)  # type: ignore[arg-type]
        flops = sum(one.flops for one in layer.forward)
        # Every tensor-parallel rank computes the router and the latent down-projections in full, not only its share.
        share = layer_flops(shape, kind) * SEQ / (p.cp * p.tp)
        assert share * (1 - 1e-9) <= flops <= share * (1.03 if p.tp == 1 or shape.latent is None else 1.2)
        assert sum(one.flops for one in layer.backward) == pytest.approx(2 * flops)
    head = result.head()
    assert sum(one.flops for one in head.forward) == pytest.approx(2 * SEQ / p.cp * shape.vocab * shape.hidden / p.tp)


def test_fp8_gemms_cast_their_rows_and_router_and_head_stay_in_bf16() -> None:
    """A cast moves 4 bytes per element: of the K input columns in forward, of the N gradient columns in backward."""
    fp8, bf16 = operators("mixtral-8x7b", "ep=8", dtype="fp8"), operators("mixtral-8x7b", "ep=8", dtype="bf16")
    layer, bf16_layer = fp8.layer("moe"), bf16.layer("moe")
    assert not named(bf16_layer.forward, "cast") and not named(fp8.head().forward, "cast")
    rows, hidden, ffn = SEQ, 4096, 14336
    input_elements = rows * (hidden + hidden) + 2 * rows * (hidden + ffn)
    output_elements = rows * (6144 + hidden) + 2 * rows * (2 * ffn + hidden)
    assert sum(one.bytes for one in named(layer.forward, "cast")) == pytest.approx(4 * input_elements)
    assert sum(one.bytes for one in named(layer.backward, "cast")) == pytest.approx(4 * output_elements)
    assert fp8.head().seconds() == bf16.head().seconds()
    assert [one.seconds for one in named(layer.forward, "router")] == [
        one.seconds for one in named(bf16_layer.forward, "router")
    ]
    up, slower = (named(one.forward, "experts up")[0].seconds for one in (layer, bf16_layer))
    assert up < 0.7 * slower


@pytest.mark.parametrize("n", [2, 4, 8])
def test_transfer_volumes_equal_the_published_formulas(n: int) -> None:
    """MegaScale-MoE (2505.11432), section 3: elements that a rank sends for a batch b s h of its group."""
    attention = operators("mixtral-8x7b", f"tp={n},ep=8").attention()
    bsh, size = SEQ * 4096, 2
    assert sum(one.bytes for one in attention.forward) - sum(
        one.bytes for one in attention.forward if one.kind != "transfer"
    ) == pytest.approx(2 * bsh * (n - 1) / n * size)
    experts = operators("mixtral-8x7b", f"tp={n},ep={n}").experts()
    sent = [one.bytes for one in experts.forward if one.kind == "transfer"]
    k = 2
    assert sum(sent) == pytest.approx(2 * k / n * bsh * (n - 1) / n * size)
    tensor = operators("mixtral-8x7b", f"tp={n},ep=1,etp={n}").experts()
    gathered = [one.bytes for one in tensor.forward if one.kind == "transfer"]
    assert sum(gathered) == pytest.approx(k * 2 * bsh * (n - 1) / n * size), (
        "each of the k rows of a token is sent to all ranks"
    )


def test_one_rank_transfers_nothing() -> None:
    result = operators("qwen3-30b-a3b", "", 1)
    for layer in (result.layer("moe"), result.head(), result.embedding()):
        assert layer.seconds("transfer") == (0, 0) and min(layer.seconds()) > 0


def test_backward_has_the_transfers_of_forward_and_gathers_again_for_weight_gradients() -> None:
    layer = operators("qwen2-57b-a14b", "tp=2,cp=2,ep=2,etp=2").layer("moe")
    forward = sorted(one.name for one in layer.forward if one.kind == "transfer")
    backward = [one.name for one in layer.backward if one.kind == "transfer"]
    assert sorted(name for name in backward if not name.endswith("again")) == forward
    assert sorted(name for name in backward if name.endswith("again")) == [
        "attention gather again",
        "shared gather again",
    ]
    assert forward == [
        "attention gather",
        "attention scatter",
        "attention swap in",
        "attention swap out",
        "combine",
        "dispatch",
        "expert gather",
        "expert scatter",
        "shared gather",
        "shared scatter",
    ]
    assert backward[-1] == "attention gather", "the transfer of the first operator comes last in backward"


def test_imbalance_lengthens_experts_up_to_the_capacity() -> None:
    def experts(**load: object) -> BlockOperations:
        return operators("mixtral-8x7b", "ep=8", **load).experts()

    def rows(result: BlockOperations) -> float:
        return named(result.forward, "experts up")[0].flops

    even, skewed = experts(), experts(imbalance=1.5)
    assert rows(skewed) == pytest.approx(1.5 * rows(even))
    assert named(skewed.forward, "dispatch")[0].bytes == pytest.approx(1.5 * named(even.forward, "dispatch")[0].bytes)
    assert rows(experts(imbalance=1.5, capacity=1.0)) == pytest.approx(rows(even))
    assert rows(experts(imbalance=1.5, capacity=1.25)) == pytest.approx(1.25 * rows(even))
    assert rows(experts(capacity=0.5)) == pytest.approx(0.5 * rows(even)), "dropped slots are not computed"


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_no_rank_can_have_more_than_all_rows(ep: int) -> None:
    assert Workload(128, imbalance=3.0).busiest(ep) == min(3.0, ep)
    assert Workload(128, imbalance=1e300, capacity=1.5).busiest(ep) == min(1.5, ep)


def test_etp_does_not_change_the_flops_of_experts() -> None:
    unsharded, sharded = (operators("mixtral-8x22b", mapping).experts() for mapping in ("ep=8", "ep=4,etp=2"))
    assert sum(one.flops for one in unsharded.forward) == pytest.approx(sum(one.flops for one in sharded.forward))
    assert sum(sharded.seconds()) > sum(unsharded.seconds()), "etp gathers rows and has narrower GEMMs"


@pytest.mark.parametrize("load", [{"seq_len": 0}, {"dtype": "int8"}, {"imbalance": 0.5}, {"capacity": 0.0}])
def test_an_invalid_load_is_rejected(load: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Workload(**{"seq_len": SEQ, **load})  # type: ignore[arg-type]


def test_imbalance_on_shared_cores_counts_only_beyond_a_full_core() -> None:
    def seconds(shared: float, imbalance: float) -> float:
        result = operators("qwen3-30b-a3b", "ep=8", imbalance=imbalance)
        cluster = replace(result.placed.cluster, accelerator=replace(result.placed.cluster.accelerator, shared=shared))
        return sum(Operators(result.shape, replace(result.placed, cluster=cluster), result.load).experts().seconds())

    even, uneven = seconds(1.0, 1.0), seconds(1.0, 1.8)
    assert uneven > 1.3 * even
    assert seconds(2.0, 1.8) == even, "other ranks' cores compute its additional rows"
    assert seconds(2.0, 3.0) == pytest.approx(seconds(1.0, 1.5))


def test_cached_blocks_equal_newly_computed_ones() -> None:
    """Layers use cached blocks; direct calls compute blocks again."""
    result: dict[str, set[int]] = {"attention": set(), "moe": set()}
    for degrees in ("ep=16", "ep=16,pp=2", "ep=8", "ep=16,cp=2", "ep=4,tp=2,etp=2"):
        for settings in ({}, {"overlap": "all"}, {"dispatcher": "all_gather"}, {"micro_batch": 2, "recompute": "full"}):
            placed = PlacedMapping(Mapping.parse(degrees, 32, **settings), cluster_named("h100", 32))
            one = Operators(model_named("deepseek-v3"), placed, Workload(SEQ, imbalance=1.2))
            direct = (one.attention(), one.experts())
            layer = one.layer("moe")
            assert layer.forward == direct[0].forward + direct[1].forward
            assert layer.backward == direct[1].backward + direct[0].backward
            for name, block in zip(result, direct, strict=True):
                result[name].add(hash(block))
    assert len(result["attention"]) == 8 < len(result["moe"]), (
        "overlap does not change attention blocks without transfers"
    )
