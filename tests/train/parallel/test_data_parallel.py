"""Replication, ZeRO-1 and FSDP train like one process on all mappings."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from moe_comm.errors import ConfigError
from moe_comm.runtime.events import COMMUNICATION
from moe_comm.topology import ParallelConfig, ParallelMesh, Sharding, shard_slice
from moe_comm.train.optim import OptimizerOptions
from moe_comm.train.parallel import DataParallel, DataParallelOptions, global_norm
from moe_comm.train.pipeline import prepare_backward
from tests.pool import RankFailure, RankPool
from tests.train.toy import SHARDINGS, Toy, assemble, backward, make, pieces, train

STRATEGIES = ("replicate", "zero1", "fsdp")
OPTIMIZERS = {
    "sgd": OptimizerOptions(kind="sgd", momentum=0.5),
    "adamw": OptimizerOptions(kind="adamw"),
    "lamb": OptimizerOptions(kind="lamb"),
    "muon": OptimizerOptions(kind="muon", momentum=0.9),
}
MAPPINGS = {
    2: [
        ParallelConfig(dp=2),
        ParallelConfig(dp=2, ep=2),
        ParallelConfig(tp=2, ep=2),
        ParallelConfig(tp=2, etp=2),
    ],
    4: [
        ParallelConfig(tp=2, dp=2, ep=2, etp=2),
        ParallelConfig(tp=2, cp=2, ep=2),
        ParallelConfig(dp=4, ep=2),
    ],
}


def trained(rank: int, world: int, arg: tuple[ParallelConfig, int]) -> Any:
    """Train with each optimizer; the strategies rotate with ``number``, so that the tests cover all pairs."""
    config, number = arg
    mesh = ParallelMesh(config)
    pairs = [(STRATEGIES[(i + number) % len(STRATEGIES)], kind) for i, kind in enumerate(OPTIMIZERS)]
    return {
        (strategy, kind): trained_on(mesh, DataParallelOptions(sharding=strategy), OPTIMIZERS[kind])
        for strategy, kind in pairs
    }


def trained_on(mesh: ParallelMesh, options: DataParallelOptions, optimizer: OptimizerOptions) -> tuple[Any, Any]:
    """Return the owned shards after training, and the parameters of the model (with FSDP the same storage)."""
    data_parallel, _, model = train(mesh, options, optimizer, bucket_bytes=300)
    owned = pieces(data_parallel.owned(), mesh)
    if options.sharding == "fsdp":
        return owned, owned
    model_pieces = []
    for name, param in model.named_parameters():
        for box in SHARDINGS[name].boxes(mesh.place, mesh.sizes):
            model_pieces.append((name, box.full, param.detach()[box.local]))
    return owned, model_pieces


@pytest.mark.parametrize("world", MAPPINGS)
def test_every_strategy_and_mapping_trains_as_one_process_does(world, request):
    alone = ParallelMesh(ParallelConfig())
    expected = {k: assemble([trained_on(alone, DataParallelOptions(), o)[0]]) for k, o in OPTIMIZERS.items()}
    pool = request.getfixturevalue(f"pool{world}")
    for number, config in enumerate(MAPPINGS[world]):
        results = pool.run(trained, (config, number), timeout=200)
        for strategy, kind in results[0]:
            for which in range(2):
                tensors = assemble([result[strategy, kind][which] for result in results])
                for name, value in tensors.items():
                    difference = (value - expected[kind][name]).abs().max() / expected[kind][name].abs().max()
                    assert difference < 1e-5, f"{config}, {strategy}, {kind}: {name} differs by {difference:.1e}"


REPLICATED = [
    ParallelConfig(dp=4, ep=2),  # experts are not sharded
    ParallelConfig(dp=4),
    ParallelConfig(cp=2, dp=2, ep=2, etp=2),  # each expert shard is on one rank
    ParallelConfig(tp=2, dp=2),  # dense parameters are not sharded
]


def trained_in_blocks(rank: int, world: int, arg: tuple[ParallelConfig, str, list[str]]) -> Any:
    """Train with two blocks of FSDP; return the owned shards and the gradient norm of another step."""
    config, overlap, kinds = arg
    mesh = ParallelMesh(config)
    options = DataParallelOptions(sharding="fsdp", dp_replicate=2, overlap_gradients=overlap)
    results = {}
    for kind in kinds:
        data_parallel, _, model = train(mesh, options, OPTIMIZERS[kind], bucket_bytes=300)
        owned = pieces(data_parallel.owned(), mesh)
        backward(model, data_parallel, 2)
        results[kind] = owned, global_norm(data_parallel.owned(), mesh)
        data_parallel.finish()
        data_parallel.close()
    return results


@pytest.mark.parametrize(
    ("config", "overlap"),
    [
        *zip(REPLICATED, ("off", "on", "on"), strict=False),
        pytest.param(REPLICATED[3], "on", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fsdp_with_replicas_trains_as_one_process_does(pool4, config, overlap):
    alone = ParallelMesh(ParallelConfig())
    results = pool4.run(trained_in_blocks, (config, overlap, [*OPTIMIZERS]), timeout=200)
    for kind, optimizer in OPTIMIZERS.items():
        data_parallel, _, model = train(alone, DataParallelOptions(), optimizer)
        expected = assemble([pieces(data_parallel.owned(), alone)])
        backward(model, data_parallel, 2)
        norm = global_norm(data_parallel.owned(), alone)
        for name, value in assemble([result[kind][0] for result in results]).items():
            difference = (value - expected[name]).abs().max() / expected[name].abs().max()
            assert difference < 1e-5, f"{kind}: {name} differs by {difference:.1e}"
        assert [result[kind][1] for result in results] == pytest.approx([norm] * 4, rel=1e-5)


def on_uneven_hosts(rank: int, world: int, config: ParallelConfig) -> Any:
    """Train in two blocks of ranks 0, 1 and 2, 3, of which rank 3 is on a host of its own."""
    with patch("socket.gethostname", return_value="second" if rank == 3 else "first"):
        return trained_in_blocks(rank, world, (config, "auto", ["adamw"]))


def test_replicas_of_which_some_are_on_one_host_overlap_alike(pool4):
    config = ParallelConfig(dp=4)
    with RankPool(4) as pool:
        on_hosts = pool.run(on_uneven_hosts, config, timeout=200)
    expected = pool4.run(trained_in_blocks, (config, "off", ["adamw"]), timeout=200)
    for mine, other in zip(on_hosts, expected, strict=True):
        assert mine["adamw"][1] == pytest.approx(other["adamw"][1], rel=1e-5)


def test_the_closed_form_gradient_of_the_toy_equals_plain_torch():
    mesh = ParallelMesh(ParallelConfig())
    model, data_parallel = make(mesh, DataParallelOptions())
    backward(model, data_parallel, 2)
    plain = Toy(SHARDINGS, mesh)
    plain(torch.zeros(())).backward()
    for owned, param in zip(data_parallel.owned(), plain.parameters(), strict=True):
        torch.testing.assert_close(owned.value.grad, param.grad, rtol=1e-6, atol=1e-6)


def shares(rank: int, world: int, arg: tuple[str, int]) -> Any:
    strategy, replicas = arg
    mesh = ParallelMesh(ParallelConfig(dp=world))
    _, data_parallel = make(mesh, DataParallelOptions(sharding=strategy, dp_replicate=replicas))
    return {o.name: (o.shard, tuple(o.value.shape), o.owner_axes) for o in data_parallel.owned()}


@pytest.mark.parametrize(("strategy", "replicas"), [("zero1", 1), ("fsdp", 1), ("fsdp", 2)])
def test_parameters_are_sharded_by_shard_slice_also_unevenly(pool4, strategy, replicas):
    shards = 4 // replicas
    for rank, owned in enumerate(pool4.run(shares, (strategy, replicas))):
        assert owned.keys() == SHARDINGS.keys()
        for name, (shard, shape, axes) in owned.items():
            whole = SHARDINGS[name].shape
            if not whole:
                assert shard is None
                continue
            assert shard == shard_slice(whole, rank % shards, shards, even=strategy == "fsdp")
            assert shape == shard.shape(whole)
            assert set(axes) >= ({"edp"} if "experts" in name else {"dp"})


def with_missing(rank: int, world: int, strategy: str) -> Any:
    """Rank 1's backward does not reach the experts and one other parameter."""
    mesh = ParallelMesh(ParallelConfig(dp=2))
    model, data_parallel = make(mesh, DataParallelOptions(sharding=strategy))
    for _ in range(2):  # twice: gradients of the first step must not remain
        data_parallel.zero_grad()
        model(torch.zeros(())).backward()
        for name, param in model.named_parameters():
            if rank == 1 and ("experts" in name or "odd" in name):
                param.grad = None
        data_parallel.reduce()
    return pieces(data_parallel.owned(), mesh, {o.name: o.value.grad for o in data_parallel.owned()})


def first_half(rank: int, world: int, _: None) -> Any:
    """Return the gradients of the tokens of rank 0 of 2."""
    mesh = ParallelMesh(ParallelConfig(dp=2))
    model = Toy(SHARDINGS, mesh)
    model(torch.zeros(())).backward()
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_missing_gradients_of_a_rank_count_as_zero(pool2, strategy):
    halves = pool2.run(first_half)
    gradients = assemble(pool2.run(with_missing, strategy))
    for name, value in gradients.items():
        missing_on_rank_1 = "experts" in name or "odd" in name
        expected = halves[0][name] if missing_on_rank_1 else halves[0][name] + halves[1][name]
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)


class Gate(nn.Module):
    """Use the weight only on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(4, 2))
        self.sometimes = nn.Parameter(torch.ones(1, 4))  # sharded along dimension 1

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return (x * self.used).sum() + ((x * self.sometimes).sum() if both else 0)


def gated(rank: int, world: int, _: None) -> Any:
    mesh = ParallelMesh(ParallelConfig(dp=2))
    model = Gate()
    data_parallel = DataParallel(model, {}, mesh, DataParallelOptions(sharding="fsdp"))
    for _ in range(2):
        data_parallel.zero_grad()
        model(torch.tensor(rank + 1.0), rank == 0).backward()
        data_parallel.reduce()
    return [o.value.grad for o in data_parallel.owned()]


def test_fsdp_counts_missing_gradients_of_a_rank_as_zero(pool2):
    for used, sometimes in pool2.run(gated):
        assert torch.equal(used, torch.full((2, 2), 3.0))
        assert torch.equal(sometimes, torch.full((1, 2), 1.0))


def metered(rank: int, world: int, _: None) -> tuple[float, float]:
    """Return communication seconds of a forward and a backward pass with only FSDP's collectives."""
    mesh = ParallelMesh(ParallelConfig(dp=2))
    model = Gate()
    DataParallel(model, {}, mesh, DataParallelOptions(sharding="fsdp"))
    COMMUNICATION.take()
    loss = model(torch.tensor(1.0), True)
    forward = COMMUNICATION.take()
    loss.backward()
    return forward, COMMUNICATION.take()


def test_collectives_of_fsdp_count_as_communication(pool2):
    for in_forward, in_backward in pool2.run(metered):
        assert in_forward > 0
        assert in_backward > 0


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 2), 1 + 2**-12))  # not a bf16 number
        self.norm = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum() + (self.norm * x.float()).sum()


def in_bf16(rank: int, world: int, strategy: str) -> Any:
    mesh = ParallelMesh(ParallelConfig(dp=2))
    model = Line()
    # FSDP shards the parameters of a module together, so a single one cannot stay in fp32.
    fp32_names = () if strategy == "fsdp" else ("norm",)
    options = DataParallelOptions(sharding=strategy)
    data_parallel = DataParallel(model, {}, mesh, options, dtype=torch.bfloat16, full_precision=fp32_names)
    weight, _ = data_parallel.owned()
    start = weight.value.detach().clone()
    for _ in range(2):
        data_parallel.zero_grad()
        for i in range(40):
            prepare_backward(model, i == 39)
            model(torch.tensor(1.0 if i == 0 else 2.0**-8, dtype=torch.bfloat16)).backward()
        data_parallel.reduce()
    grad = weight.value.grad.clone()
    with torch.no_grad():
        weight.value.add_(1.0)
    data_parallel.publish()
    if strategy == "fsdp":
        model.unshard()
    model_values = [param.detach().clone() for param in model.parameters()]
    return start, grad, weight.value.detach().clone(), model_values


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_parameters_have_fp32_masters_and_accumulate_in_fp32(pool2, strategy):
    for start, grad, master, model_values in pool2.run(in_bf16, strategy):
        assert start.dtype == grad.dtype == master.dtype == torch.float32
        assert torch.equal(start, torch.full_like(start, 1 + 2**-12))
        # A bf16 accumulator would stay at 1, because 1 + 2^-8 rounds to 1 in bf16.
        assert torch.equal(grad, torch.full_like(grad, 2 * (1 + 39 * 2.0**-8)))
        assert torch.equal(master, start + 1)
        assert model_values[0].dtype == torch.bfloat16
        assert torch.equal(model_values[0], torch.full((4, 2), 2 + 2**-12).bfloat16())
        assert model_values[1].dtype == (torch.bfloat16 if strategy == "fsdp" else torch.float32)


def test_split_backward_passes_that_assign_grad_accumulate_in_fp32():
    model = Line()
    mesh = ParallelMesh(ParallelConfig())
    data_parallel = DataParallel(model, {}, mesh, dtype=torch.bfloat16)
    for _ in range(2):
        data_parallel.zero_grad()
        for dw in (1.0, 2.0**-8):  # as torch's pipelining does for the weights of zero-bubble schedules
            param, grad = model.weight, torch.full((4, 2), dw, dtype=torch.bfloat16)
            if param.grad is None:
                param.grad = grad
            else:
                param.grad += grad
        data_parallel.reduce()
        assert torch.equal(data_parallel.owned()[0].value.grad, torch.full((4, 2), 1 + 2.0**-8))


def loaded(rank: int, world: int, strategy: str) -> Any:
    """Evaluate, load new values, and return whether the model uses them."""
    mesh = ParallelMesh(ParallelConfig(dp=2))
    model, data_parallel = make(mesh, DataParallelOptions(sharding=strategy))
    with torch.no_grad():
        before = model(torch.zeros(()))
        for owned in data_parallel.owned():
            owned.value.zero_()
        data_parallel.publish()
        after = model(torch.zeros(()))
        expected_model = Toy(SHARDINGS, mesh)
        for param in expected_model.parameters():
            param.zero_()
        return before, after, expected_model(torch.zeros(()))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_publish_updates_the_model_with_loaded_values_also_after_an_evaluation(pool2, strategy):
    for before, after, expected in pool2.run(loaded, strategy):
        assert before != after
        assert torch.equal(after, expected)


class Sum(nn.Module):
    """Loss whose gradient is ``factor`` everywhere."""

    def __init__(self, names: list[str], factor: float) -> None:
        super().__init__()
        self.factor = factor
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.full((4, 2), 3.0)))

    def forward(self) -> torch.Tensor:
        return sum((self.factor * param).sum() for param in self.parameters())


def tied_ends(rank: int, world: int, strategy: str) -> Any:
    """Stage 0 has the embedding, stage 1 the tied output layer; their gradients are 1 and 10 per rank."""
    mesh = ParallelMesh(ParallelConfig(pp=2, dp=world // 2))
    model = Sum(["embed", "own"], 1.0) if mesh.place["pp"] == 0 else Sum(["head", "own"], 10.0)
    data_parallel = DataParallel(model, {}, mesh, DataParallelOptions(sharding=strategy), tied=("embed", "head"))
    data_parallel.zero_grad()
    model().backward()
    data_parallel.reduce()
    return {o.name: (o.value.grad, o.counted) for o in data_parallel.owned()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tied_copies_on_both_ends_of_the_pipeline_get_the_sum_of_both_gradients(pool4, strategy):
    results = pool4.run(tied_ends, strategy)
    for rank, gradients in enumerate(results):
        grad, counted = gradients["embed" if rank < 2 else "head"]
        assert torch.equal(grad, torch.full_like(grad, 2 * 1.0 + 2 * 10.0))
        assert counted == (rank < 2)
        assert torch.equal(gradients["own"][0], torch.full_like(gradients["own"][0], 2.0 if rank < 2 else 20.0))


def test_tied_copies_on_one_rank_get_the_sum_and_count_once():
    mesh = ParallelMesh(ParallelConfig())
    stages = [Toy({"embed.weight": Sharding((2, 2))}, mesh), Toy({"head.weight": Sharding((2, 2))}, mesh)]
    data_parallel = DataParallel(stages, {}, mesh, tied=("embed.weight", "head.weight"))
    data_parallel.zero_grad()
    (stages[0].embed.weight.sum() + 10 * stages[1].head.weight.sum()).backward()
    data_parallel.reduce()
    first, second = data_parallel.owned()
    assert torch.equal(first.value.grad, torch.full((2, 2), 11.0))
    assert torch.equal(second.value.grad, torch.full((2, 2), 11.0))
    assert (first.counted, second.counted) == (True, False)
    first.value.grad.mul_(2)  # shared memory would be scaled twice by clipping
    assert torch.equal(second.value.grad, torch.full((2, 2), 11.0))


def fsdp_of(rank: int, world: int, what: str) -> None:
    mesh = ParallelMesh(ParallelConfig(dp=2))
    if what == "mixed":
        shardings = {"dense": Sharding((2, 2)), "expert": Sharding((2, 2), expert=True)}
        DataParallel(Toy(shardings, mesh), shardings, mesh, DataParallelOptions(sharding="fsdp"))
    else:
        first, second = Sum(["own"], 1.0), Sum(["other", "own"], 1.0)
        second.own = first.own
        DataParallel([first, second], {}, mesh, DataParallelOptions(sharding="fsdp"))


@pytest.mark.parametrize(("what", "message"), [("mixed", "a separate module"), ("shared", "its own copy")])
def test_fsdp_raises_for_parameters_that_it_cannot_shard(pool2, what, message):
    with pytest.raises(RankFailure, match=message) as failure:
        pool2.run(fsdp_of, what)
    assert {name for name, _ in failure.value.errors.values()} == {"ConfigError"}


def test_invalid_arguments_raise():
    mesh = ParallelMesh(ParallelConfig())
    model = Toy({"w": Sharding((2, 2))}, mesh)
    with pytest.raises(ConfigError, match="w has shape"):
        DataParallel(model, {"w": Sharding((3, 2))}, mesh)
    with pytest.raises(ConfigError, match="two parameters are called w"):
        DataParallel([model, Toy({"w": Sharding((2, 2))}, mesh)], {}, mesh)
    with pytest.raises(ConfigError, match="float32 or bfloat16"):
        DataParallel(model, {}, mesh, dtype=torch.float16)


def test_names_are_state_dict_names_without_wrappers():
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    data_parallel = DataParallel(model, {"0.bias": Sharding((2,))}, ParallelMesh(ParallelConfig()))
    assert [owned.name for owned in data_parallel.owned()] == ["0.weight", "0.bias"]


def test_all_strategies_work_on_one_rank_without_a_process_group():
    assert not dist.is_initialized()
    mesh = ParallelMesh(ParallelConfig())
    for strategy in STRATEGIES:
        model, data_parallel = make(mesh, DataParallelOptions(sharding=strategy))
        backward(model, data_parallel)
        assert all(o.shard is None and o.value.grad is not None for o in data_parallel.owned())
