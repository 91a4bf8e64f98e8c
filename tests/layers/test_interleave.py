"""Interleaved micro-batches: results of sequential micro-batches, with transfers overlapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from moe_comm.errors import ConfigError, InputError, MoeCommError
from moe_comm.layers.parallel.interleave import BackwardTurns, Steps, TurnParameters, finish, take_turns
from moe_comm.layers.parallel.module import state_key
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.model import ModelPlan, StageInput, Transformer
from moe_comm.layers.transformer.shape import Recompute
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.topology.parallel import ShardingMode
from moe_comm.train.config import load
from moe_comm.train.parallel import DataParallel, DataParallelOptions
from moe_comm.train.parallel.zero import clear_gradient, compute_in
from moe_comm.train.pipeline.batch import MicroBatch
from moe_comm.train.pipeline.runner import Accumulation
from tests.layers.tiny import BY_WEIGHT, TINY
from tests.layers.transfers import TransferLog, record_transfers
from tests.pool import RankPool
from tests.support.activation_memory import activation_bytes
from tests.train.interleaving import OVERLAP, micro_batches

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


def test_a_forward_pass_runs_inside_of_a_backward_pass_and_ends_after_it() -> None:
    turns, events = BackwardTurns(), list[str]()

    def backward(steps: int) -> None:
        for step in range(steps):
            events.append(f"b{step}")
            turns.advance()

    assert turns.run(_steps("a", 3, events), partial(backward, 2)) == "A"
    assert events == ["b0", "a0", "b1", "a1", "a2"]
    events.clear()
    assert turns.run(_steps("a", 1, events), partial(backward, 3)) == "A"
    assert events == ["b0", "a0", "b1", "b2"]
    turns.advance()  # nothing to run


def _open_until_closed(closed: list[bool]) -> Steps[None]:
    try:
        yield
        yield
    finally:
        closed.append(True)


def _fails() -> Steps[None]:
    yield
    raise InputError("no")


def test_if_one_computation_raises_the_others_are_closed() -> None:
    closed: list[bool] = []
    with pytest.raises(InputError, match="no"):
        take_turns([_open_until_closed(closed), _fails()])
    assert closed == [True]


def test_if_the_backward_pass_of_a_pair_raises_its_forward_pass_is_closed() -> None:
    turns, closed = BackwardTurns(), list[bool]()

    def backward() -> None:
        turns.advance()
        raise InputError("no")

    with pytest.raises(InputError, match="no"):
        turns.run(_open_until_closed(closed), backward)
    assert closed == [True]
    with pytest.raises(InputError, match="no"):
        turns.run(_fails(), lambda: None)
    assert turns.run(_steps("a", 2, []), turns.advance) == "A"


def test_if_a_backward_pass_hides_an_error_of_its_forward_pass_the_pair_raises() -> None:
    turns = BackwardTurns()

    def backward() -> None:
        for _ in range(3):
            with suppress(InputError):
                turns.advance()

    with pytest.raises(MoeCommError, match="hid the error"):
        turns.run(_fails(), backward)


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
        log.watch_attention(model)
        losses = Accumulation(model, interleave=interleave).step(micro_batches(number, plan), 0.01)
    results = {"losses": losses}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        results[name] = parameter.grad
    for index, layer in enumerate(model.moe_layers()):
        results[f"load {index}"], results[f"dropped {index}"] = layer.router.load_E, layer.dropped_total
        results |= {f"{name} {index}": value for name, value in layer.router.losses.items()}
    model.close()
    assert log.in_flight == 0 or plan.recompute == "full"
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
def test_interleaved_pairs_have_the_bits_of_sequentialmicro_batches(
    pool2: RankPool, config: TransformerConfig, mapping: ParallelConfig, options: dict[str, Any]
) -> None:
    """Compare losses, all gradients, counted and dropped slots, and auxiliary losses."""
    assert pool2.run(_differing_results, (config, mapping, options)) == [[], []]


def test_interleaved_pairs_have_the_bits_of_sequential_micro_batches_on_four_ranks(pool4: RankPool) -> None:
    assert (
        pool4.run(_differing_results, (BY_WEIGHT, ParallelConfig(tp=2, dp=2, ep=4), {"overlap": OVERLAP})) == [[]] * 4
    )


def _in_flight(rank: int, world: int, arg: tuple[bool, Recompute]) -> tuple[list[int], list[int]]:
    interleave, recompute = arg
    _, log = _train(ALL_EXPERTS, DP2, 2, interleave, overlap=OVERLAP, recompute=recompute)
    return log.counts("attention"), log.counts("attention backward")


def test_attention_overlaps_with_transfers_of_the_other_micro_batch(pool2: RankPool) -> None:
    """Only the first attention runs before all transfers, and only the last backward runs after them."""
    for forward, backward in pool2.run(_in_flight, (True, "none")):
        assert len(forward) == len(backward) == 2 * ALL_EXPERTS.layers
        assert forward[0] == 0 and min(forward[1:]) > 0
        assert backward[-1] == 0 and min(backward[:-1]) > 0
    for forward, backward in pool2.run(_in_flight, (False, "none")):
        assert max(forward) == max(backward) == 0


def test_with_full_recomputation_the_attention_of_the_second_micro_batch_overlaps(pool2: RankPool) -> None:
    """A layer ends with both micro-batches. Recomputation ends before it waits for the last results."""
    layers = ALL_EXPERTS.layers
    for attention, backward in pool2.run(_in_flight, (True, "full")):
        assert len(attention) == 4 * layers and len(backward) == 2 * layers
        forward, recomputed = attention[: 2 * layers], attention[2 * layers :]
        assert max(forward[::2]) == 0 and min(forward[1::2]) > 0
        assert all(second > first for first, second in zip(recomputed[::2], recomputed[1::2], strict=True))
        assert all(first > second for first, second in zip(backward[::2], backward[1::2], strict=True))


def _attention_order(rank: int, world: int, arg: None) -> list[str]:
    _, log = _train(ALL_EXPERTS, DP2, 2, True, overlap=OVERLAP)
    return [name for name, _ in log.events]


def test_every_rank_runs_in_the_same_order(pool2: RankPool) -> None:
    first, second = pool2.run(_attention_order, None)
    assert first == second and len(first) == 4 * ALL_EXPERTS.layers


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_interleaving_stores_as_many_activation_bytes_as_sequentialmicro_batches(recompute: Recompute) -> None:
    plan = ModelPlan(recompute=recompute)
    model = Transformer(TINY, plan)
    initialize(model, seed=3)
    inputs = [StageInput(batch.ids_BS) for batch in micro_batches(2, plan)]
    excluded = [*model.parameters(), *model.buffers(), *(stage_input.x for stage_input in inputs)]
    interleaved = activation_bytes(lambda: model.forward_in_turns(inputs), excluded)
    sequential = activation_bytes(lambda: [model(stage_input.x) for stage_input in inputs], excluded)
    assert interleaved == sequential


def test_without_gradients_outputs_are_the_same() -> None:
    model = Transformer(BY_WEIGHT, ModelPlan(recompute="selective"))
    initialize(model, seed=3)
    inputs = [StageInput(b.ids_BS, documents=b.documents) for b in micro_batches(3, ModelPlan())]
    with torch.no_grad():
        outputs = model.forward_in_turns(inputs)
        for y, stage_input in zip(outputs, inputs, strict=True):
            assert torch.equal(y, model(stage_input.x, documents=stage_input.documents))


def test_layers_that_cannot_be_interleaved_raise() -> None:
    model = Transformer(TINY, ModelPlan(recompute="full"))
    tokens: Any = None
    with pytest.raises(ConfigError, match="cannot be interleaved"):
        finish(model.layers["0"].steps(torch.zeros(1, 4, 32, requires_grad=True), tokens))  # type: ignore[operator]
    with pytest.raises(InputError, match="token ids"):
        Transformer(TINY).forward_in_turns([StageInput(torch.zeros(1, 4, 32))])


def test_an_odd_number_of_micro_batches_raises() -> None:
    runner = Accumulation(nn.Linear(1, 1), interleave=True)
    with pytest.raises(ConfigError, match="their number must be even; got 3"):
        runner.step(micro_batches(3, ModelPlan()))


def _gradients(model: Transformer, in_turns: bool) -> StepResults:
    """Return the gradients of two pairs of micro-batches."""
    batches = micro_batches(4, ModelPlan())
    for first in (0, 2):
        pair = batches[first : first + 2]
        targets = [batch.targets_BS for batch in pair]
        if in_turns:
            hidden = model.forward_in_turns([StageInput(b.ids_BS, documents=b.documents) for b in pair])
            torch.autograd.backward(list(model.losses_in_turns(hidden, targets)))
            continue
        for batch in pair:
            model.loss(model(batch.ids_BS, documents=batch.documents), batch.targets_BS).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _model(config: TransformerConfig = TINY) -> Transformer:
    model = Transformer(config)
    initialize(model, seed=3)
    return model


def test_layers_with_checkpoint_wrappers_run_in_turns() -> None:
    expected, model = _gradients(_model(), False), _model()
    model.layers["1"] = checkpoint_wrapper(model.layers["1"])
    actual = {state_key(name): grad for name, grad in _gradients(model, True).items()}
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], grad) for name, grad in expected.items())


def test_a_parameter_that_only_the_second_micro_batch_uses_gets_its_gradient() -> None:
    parameters, linear = TurnParameters(), nn.Linear(2, 1, bias=False)
    for repeats in (1, 2):
        with parameters.used(1, linear):
            y = linear(torch.tensor([1.0, 2.0]))
        y.backward()
        assert linear.weight.grad is not None and linear.weight.grad.tolist() == [[repeats, 2 * repeats]]


def test_gradients_of_a_failed_backward_pass_are_dropped() -> None:
    expected, model = _gradients(_model(), False), _model()
    batch = micro_batches(1, ModelPlan())[0]
    attention = model.layers["0"].attention
    assert isinstance(attention, nn.Module)

    def fail(*_: object) -> None:
        raise InputError("no")

    handle = attention.register_full_backward_hook(fail)
    hidden = model.forward_in_turns([StageInput(batch.ids_BS)] * 2)
    with pytest.raises(InputError, match="no"):
        torch.autograd.backward(list(model.losses_in_turns(hidden, [batch.targets_BS] * 2)))
    handle.remove()
    model.zero_grad()
    actual = _gradients(model, True)
    assert all(torch.equal(actual[name], grad) for name, grad in expected.items())


class Times(nn.Module):
    """Multiply by ``first``, and with documents by ``second`` as well, on a stage of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.tensor([0.3, 0.7])), nn.Parameter(torch.tensor([0.9, 0.1]))
        self.turn_parameters = TurnParameters()

    def forward(self, x: Tensor, positions: Tensor | None = None, documents: Any = None) -> Tensor:
        y = x * self.first
        return y if documents is None else y * self.second

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return (hidden * targets).sum()

    def forward_in_turns(self, inputs: Sequence[StageInput]) -> tuple[Tensor, ...]:
        outputs = []
        for turn, stage_input in enumerate(inputs):
            with self.turn_parameters.used(turn, self):
                outputs.append(self(stage_input.x, documents=stage_input.documents))
        return tuple(outputs)

    def losses_in_turns(self, hidden: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(map(self.loss, hidden, targets))


def _reduced(rank: int, world: int, arg: tuple[ShardingMode, bool]) -> list[Tensor]:
    """Return the gradients of two steps. Only the second micro-batch of each pair uses ``second``."""
    strategy, interleave = arg
    model, mesh = Times(), ParallelMesh(ParallelConfig(dp=world))
    options = DataParallelOptions(sharding=strategy, overlap_gradients="on" if interleave else "off")
    data_parallel = DataParallel(model, {}, mesh, options, bucket_bytes=4)
    runner = Accumulation(model, data_parallel, interleave)
    generator = torch.Generator().manual_seed(rank)
    gradients = []
    for _ in range(2):
        data_parallel.zero_grad()
        values = torch.rand(4, 2, 1, 2, generator=generator)
        runner.step([MicroBatch(x, y, documents=i % 2 or None) for i, (x, y) in enumerate(values)])
        data_parallel.reduce()
        gradients += [owned.value.grad.clone() for owned in data_parallel.owned() if owned.value.grad is not None]
    data_parallel.close()
    return gradients


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_a_parameter_that_only_the_second_micro_batch_uses_is_reduced_beside_backward(
    strategy: ShardingMode, pool2: RankPool
) -> None:
    sequential, in_turns = (pool2.run(_reduced, (strategy, interleave)) for interleave in (False, True))
    for expected, actual in zip(sequential, in_turns, strict=True):
        assert len(expected) == len(actual) > 0
        assert all(map(torch.equal, actual, expected))


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None


def test_a_first_micro_batch_without_gradient_keeps_that_of_the_second() -> None:
    parameters, linear = TurnParameters(), nn.Linear(2, 1, bias=False)
    first = _NoGradient.apply(linear.weight)  # type: ignore[no-untyped-call]
    with parameters.used(1, linear):
        second = linear(torch.tensor([1.0, 2.0]))
    (first.sum() + second.sum()).backward()
    assert linear.weight.grad is not None and linear.weight.grad.tolist() == [[1, 2]]


def test_a_gradient_that_is_complete_before_that_of_the_second_micro_batch_raises() -> None:
    """The gradient may have been reduced by then. Afterwards, all gradients are complete again."""
    parameters, linear, x = TurnParameters(), nn.Linear(2, 1, bias=False), torch.tensor([1.0, 2.0])
    for order in ((1, 0), (0, 1)):
        losses = []
        for turn in order:
            with parameters.used(turn, linear):
                losses.append(linear(x))
        with pytest.raises(ConfigError, match="in the same order") if order == (1, 0) else nullcontext():
            torch.autograd.backward(losses)
            assert linear.weight.grad is not None and linear.weight.grad.tolist() == [[2, 4]]
        linear.zero_grad()


def test_the_next_backward_pass_without_turns_drops_gradients_of_a_failed_one() -> None:
    parameters, linear, x = TurnParameters(), nn.Linear(2, 1, bias=False), torch.tensor([1.0, 2.0])

    def fail(_: Tensor) -> None:
        raise InputError("no")

    first = linear(x)
    first.register_hook(fail)
    with parameters.used(1, linear):
        second = linear(x)
    with pytest.raises(InputError, match="no"):
        (first + second).backward()
    assert linear.weight.grad is None
    linear(x).backward()
    assert linear.weight.grad is not None and linear.weight.grad.tolist() == [[1, 2]]


def test_copies_of_a_model_have_gradients_of_their_own() -> None:
    model = _model()
    expected = _gradients(model, True)
    copied = deepcopy(model)
    copied.zero_grad()
    actual = _gradients(copied, True)
    assert all(torch.equal(actual[name], grad) for name, grad in expected.items())


def _invalid_settings() -> Iterator[tuple[str, str]]:
    yield "data.micro_batches=3", r"their number must be even; got 3"
    yield "parallel.pp=2", r"2 interleaved micro-batches count as 1: 1f1b over pp = 2 ranks needs at least 2"
    yield "parallel.overlap_chunks=0", "overlap_chunks must be set, and not 0"


@pytest.mark.parametrize(("setting", "message"), list(_invalid_settings()))
def test_a_run_that_cannot_interleave_raises_before_it_starts(setting: str, message: str) -> None:
    settings = ["parallel.interleave=true", "parallel.overlap_chunks=2", "data.batch=12", "data.micro_batches=2"]
    assert load(None, settings).parallel.interleave
    with pytest.raises(
        ConfigError, match=f"the overrides: parallel.interleave runs two micro-batches at a time: .*{message}"
    ):
        load(None, [*settings, setting])
