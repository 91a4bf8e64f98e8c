"""Interleaved micro-batches: results of sequential micro-batches, with transfers overlapped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from moe_comm.errors import ConfigError, InputError
from moe_comm.layers.parallel.interleave import StageInput, Steps, finish, take_turns
from moe_comm.layers.parallel.recompute import activation_bytes
from moe_comm.layers.transformer.config import Recompute, TransformerConfig
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.model import ModelPlan, Transformer
from moe_comm.overlap.options import Overlap
from moe_comm.plan.pipeline.stages import plan_stages
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.train.config import load
from moe_comm.train.parallel.replicate import clear_gradient, compute_in
from moe_comm.train.pipeline.batch import ActivationShape, MicroBatch
from moe_comm.train.pipeline.runner import Accumulation, make_runner
from tests.layers.tiny import BY_WEIGHT, LENGTH, TINY, own
from tests.layers.transfers import TransferLog, record_transfers
from tests.pool import RankPool

OVERLAP = Overlap(chunks=2, chunk_bytes=1)
ALL_EXPERTS = replace(TINY, dense_layers=())
DP2 = ParallelConfig(dp=2, ep=2)


def _steps(name: str, number: int, events: list[str]) -> Steps[str]:
    for step in range(number):
        events.append(f"{name}{step}")
        yield
    return name.upper()


def test_computations_run_in_turns_to_completion() -> None:
    events: list[str] = []
    assert take_turns([_steps("a", 3, events), _steps("b", 1, events), _steps("c", 2, events)]) == ("A", "B", "C")
    assert events == ["a0", "b0", "c0", "a1", "c1", "a2"]
    assert finish(_steps("d", 2, events)) == "D" and events[-2:] == ["d0", "d1"]
    assert take_turns([]) == ()


def test_if_one_computation_raises_the_others_are_closed() -> None:
    closed = []

    def open_until_closed() -> Steps[None]:
        try:
            yield
            yield
        finally:
            closed.append(True)

    def fails() -> Steps[None]:
        yield
        raise InputError("no")

    with pytest.raises(InputError, match="no"):
        take_turns([open_until_closed(), fails()])
    assert closed == [True]


def _micro_batches(number: int, plan: ModelPlan) -> list[MicroBatch]:
    """Return this rank's part of different micro-batches; every second one contains packed documents."""
    generator = torch.Generator().manual_seed(11)
    batches = []
    for index in range(number):
        ids, targets = torch.randint(TINY.vocab, (2, 4, LENGTH), generator=generator)
        documents = (torch.rand(ids.shape, generator=generator) < 0.2).long().cumsum(1) if index % 2 else None
        ids_BS, targets_BS = own(ids, plan), own(targets, plan)
        assert ids_BS is not None and targets_BS is not None
        batches.append(MicroBatch(ids_BS, targets_BS, None, own(documents, plan)))
    return batches


StepResults = dict[str, Tensor]


def _train(
    config: TransformerConfig, mapping: ParallelConfig, number: int, interleave: bool, **plan_options: Any
) -> tuple[StepResults, TransferLog]:
    """Return losses, gradients and router counts of one step, and the transfers in flight during attention."""
    plan = ModelPlan.of(ParallelMesh(mapping), **{"backend": "all_to_all", "dtype": torch.float32, **plan_options})
    model = Transformer(config, plan)
    initialize(model, seed=3)
    if plan.dtype == torch.bfloat16:  # as in training: gradients are accumulated in fp32
        for parameter in model.parameters():
            compute_in(parameter, torch.bfloat16)
            clear_gradient(parameter)
    for layer in model.moe_layers():
        layer.aux_scale = 1 / number
    with record_transfers() as log:
        for block in model.layers.values():
            log.watch("attention", block.attention)  # type: ignore[arg-type]
        losses = Accumulation(model, interleave=interleave).step(_micro_batches(number, plan), 0.01)
    results = {"losses": losses}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        results[name] = parameter.grad
    for index, layer in enumerate(model.moe_layers()):
        results[f"load {index}"], results[f"dropped {index}"] = layer.router.load_E, layer.dropped_total
        results |= {f"{name} {index}": value for name, value in layer.router.losses.items()}
    model.close()
    assert log.in_flight == 0
    return results, TransferLog(log.events)


def _differing_results(rank: int, world: int, arg: Any) -> list[str]:
    config, mapping, options = arg
    # Linear layers that overlap use different GEMM kernels, so with tp both runs must overlap.
    ignored = ("recompute",) if mapping.tp > 1 else ("recompute", "overlap")
    sequential_options = {name: value for name, value in options.items() if name not in ignored}
    expected, _ = _train(config, mapping, 2, False, **sequential_options)
    actual, _ = _train(config, mapping, 2, True, **options)
    assert actual.keys() == expected.keys()
    return [name for name in expected if not torch.equal(actual[name], expected[name])]


@pytest.mark.parametrize(
    ("config", "mapping", "options"),
    [
        (TINY, DP2, {"overlap": OVERLAP}),
        (BY_WEIGHT, DP2, {"overlap": OVERLAP, "recompute": "selective"}),
        (TINY, ParallelConfig(tp=2, ep=2), {"overlap": OVERLAP, "recompute": "selective"}),
        (replace(TINY, shortcut=True), DP2, {"overlap": OVERLAP, "recompute": "selective"}),
        (replace(TINY, parallel_block=True), DP2, {"overlap": OVERLAP}),
        (TINY, ParallelConfig(cp=2, ep=2), {}),
        (TINY, ParallelConfig(tp=2, etp=2), {"backend": "auto"}),
        (TINY, DP2, {"overlap": OVERLAP, "dtype": torch.bfloat16}),
    ],
    ids=["gqa", "drops", "tp", "shortcut", "parallel", "not overlapped", "shared memory", "bf16"],
)
def test_interleaved_pairs_have_the_bits_of_sequential_micro_batches(
    pool2: RankPool, config: TransformerConfig, mapping: ParallelConfig, options: dict[str, Any]
) -> None:
    """Compare losses, all gradients, counted and dropped slots, and auxiliary losses."""
    assert pool2.run(_differing_results, (config, mapping, options)) == [[], []]


def test_interleaved_pairs_have_the_bits_of_sequential_micro_batches_on_four_ranks(pool4: RankPool) -> None:
    assert (
        pool4.run(_differing_results, (BY_WEIGHT, ParallelConfig(tp=2, dp=2, ep=4), {"overlap": OVERLAP})) == [[]] * 4
    )


def _two_pairs(rank: int, world: int, config: TransformerConfig) -> tuple[StepResults, StepResults]:
    results = [_train(config, DP2, 4, interleave, overlap=OVERLAP)[0] for interleave in (False, True)]
    return results[0], results[1]


@pytest.mark.parametrize("config", [TINY, replace(TINY, tie=True)], ids=["untied", "tied"])
def test_several_pairs_equal_sequential_ones_up_to_rounding(pool2: RankPool, config: TransformerConfig) -> None:
    for expected, actual in pool2.run(_two_pairs, config):
        assert torch.equal(actual["losses"], expected["losses"])
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()), msg=name)


def _in_flight(rank: int, world: int, interleave: bool) -> tuple[list[int], list[int]]:
    _, log = _train(ALL_EXPERTS, DP2, 2, interleave, overlap=OVERLAP)
    return log.counts("attention"), log.counts("attention backward")


def test_attention_overlaps_with_transfers_of_the_other_micro_batch(pool2: RankPool) -> None:
    """Only the first attention runs before all transfers, and only the last backward runs after them."""
    for forward, backward in pool2.run(_in_flight, True):
        assert len(forward) == len(backward) == 2 * ALL_EXPERTS.layers
        assert forward[0] == 0 and min(forward[1:]) > 0
        assert backward[-1] == 0 and min(backward[:-1]) > 0
    for forward, backward in pool2.run(_in_flight, False):
        assert max(forward) == max(backward) == 0


def _attention_order(rank: int, world: int, arg: None) -> list[str]:
    _, log = _train(ALL_EXPERTS, DP2, 2, True, overlap=OVERLAP)
    return [name for name, _ in log.events]


def test_every_rank_runs_in_the_same_order(pool2: RankPool) -> None:
    first, second = pool2.run(_attention_order, None)
    assert first == second and len(first) == 4 * ALL_EXPERTS.layers


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_interleaving_stores_as_many_activation_bytes_as_sequential_micro_batches(recompute: Recompute) -> None:
    plan = ModelPlan(recompute=recompute)
    model = Transformer(TINY, plan)
    initialize(model, seed=3)
    inputs = [StageInput(batch.ids_BS) for batch in _micro_batches(2, plan)]
    excluded = [*model.parameters(), *model.buffers(), *(stage_input.x for stage_input in inputs)]
    interleaved = activation_bytes(lambda: model.forward_in_turns(inputs), excluded)
    sequential = activation_bytes(lambda: [model(stage_input.x) for stage_input in inputs], excluded)
    assert interleaved == sequential


def test_without_gradients_outputs_are_the_same() -> None:
    model = Transformer(BY_WEIGHT, ModelPlan(recompute="selective"))
    initialize(model, seed=3)
    inputs = [StageInput(b.ids_BS, documents=b.documents) for b in _micro_batches(3, ModelPlan())]
    with torch.no_grad():
        outputs = model.forward_in_turns(inputs)
        for y, stage_input in zip(outputs, inputs, strict=True):
            assert torch.equal(y, model(stage_input.x, documents=stage_input.documents))


def test_layers_that_cannot_be_interleaved_raise() -> None:
    ids = torch.zeros(1, 4, dtype=torch.int64)
    model = Transformer(TINY, ModelPlan(recompute="full"))
    with pytest.raises(ConfigError, match='"selective" or "none"'):
        model.forward_in_turns([StageInput(ids)] * 2)
    tokens: Any = None
    with pytest.raises(ConfigError, match="cannot be interleaved"):
        finish(model.layers["0"].steps(torch.zeros(1, 4, 32, requires_grad=True), tokens))  # type: ignore[operator]
    model = Transformer(TINY)
    model.layers["1"] = checkpoint_wrapper(model.layers["1"])
    with pytest.raises(ConfigError, match="wrapped"):
        model.forward_in_turns([StageInput(ids)] * 2)
    with pytest.raises(InputError, match="token ids"):
        Transformer(TINY).forward_in_turns([StageInput(torch.zeros(1, 4, 32))])


def test_an_odd_number_of_micro_batches_raises() -> None:
    runner = Accumulation(nn.Linear(1, 1), interleave=True)
    with pytest.raises(ConfigError, match="even number of micro-batches; the step has 3"):
        runner.step(_micro_batches(3, ModelPlan()))


def test_interleaving_with_a_pipeline_raises() -> None:
    with pytest.raises(ConfigError, match="interleave is not supported with a pipeline"):
        make_runner(
            [],
            ParallelMesh(ParallelConfig()),
            plan_stages(4, 2, "1f1b"),
            "1f1b",
            ActivationShape(8, torch.float32),
            interleave=True,
        )


def _invalid_settings() -> Iterator[tuple[str, str]]:
    yield "data.micro_batches=3", r"micro_batches \(3\) must be even"
    yield "parallel.pp=2", r"pp \(2\) must be 1"
    yield "parallel.overlap_chunks=0", "overlap_chunks must not be 0"
    yield "parallel.sharding=fsdp", "fsdp"
    yield "model.recompute=full", "recompute"


@pytest.mark.parametrize(("setting", "message"), list(_invalid_settings()))
def test_a_run_that_cannot_interleave_raises_before_it_starts(setting: str, message: str) -> None:
    settings = ["parallel.interleave=true", "parallel.overlap_chunks=2", "data.batch=12", "data.micro_batches=2"]
    assert load(None, settings).parallel.interleave
    with pytest.raises(
        ConfigError, match=f"the overrides: parallel.interleave runs two micro-batches at a time: .*{message}"
    ):
        load(None, [*settings, setting])
