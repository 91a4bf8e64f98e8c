"""Pipelines of 2 and 4 ranks against one process with the same micro-batches: losses and every gradient."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from moe_comm.errors import ConfigError, InputError, MoeCommError, PeerError, RoutingError
from moe_comm.layers.experts import Experts
from moe_comm.layers.initialize import initialize
from moe_comm.layers.moe import MoEConfig, MoELayer
from moe_comm.layers.router import RouterConfig
from moe_comm.layers.shard import shardings_of
from moe_comm.layers.transformer import ModelPlan, Transformer
from moe_comm.topology import FoldedMesh, ParallelConfig
from moe_comm.train.pipeline import (
    SCHEDULES,
    Accumulation,
    Activations,
    MicroBatch,
    Pipeline,
    StagePlan,
    is_tied_copy,
    make_runner,
    plan_stages,
    sum_tied_gradients,
)
from tests.layers import tiny
from tests.pool import RankPool

VOCAB, HIDDEN, FFN, EXPERTS, LENGTH = 19, 8, 12, 4, 6
MOE = MoEConfig(HIDDEN, FFN, RouterConfig(EXPERTS, 2, balance_loss=0.5, z_loss=0.1), shared_ffn=8, shared_gate=True)
SCALE = 0.125
"""What the loss is multiplied by before backward."""
AUX_SCALE = 0.25
EVALUATED = 3
"""Micro-batches of an evaluation, at most."""


@dataclass(frozen=True)
class Case:
    """One pipeline. dense: layers without experts. batch: sequences of a global micro-batch."""

    schedule: str = "1f1b"
    micro_batches: int = 4
    pp: int = 2
    dp: int = 1
    ep: int = 1
    layers: int = 4
    virtual: int | None = None
    stage_layers: tuple[int, ...] | None = None
    dense: tuple[int, ...] = (1,)
    tie: bool = False
    batch: int = 2
    fsdp: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.ep > 1 else torch.float64  # shared memory moves no float64

    @property
    def plan(self) -> StagePlan:
        return plan_stages(self.layers, self.pp, self.schedule, virtual=self.virtual, stage_layers=self.stage_layers)


@pytest.fixture(scope="module")
def pool2() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def pool4() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def drawn(case: Case, name: str, *shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return nn.Parameter((torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.4).to(case.dtype))


class Layer(nn.Module):
    """Mixes positions and documents into the stream, then an MoE or a plain feed-forward block."""

    def __init__(self, case: Case, layer: int, group: Any) -> None:
        super().__init__()
        dense = layer in case.dense
        self.mix = drawn(case, f"mix{layer}", HIDDEN, HIDDEN)
        self.norm = drawn(case, f"norm{layer}", HIDDEN)
        self.up = drawn(case, f"up{layer}", HIDDEN, HIDDEN) if dense else None
        self.moe = None if dense else MoELayer.build(MOE, group, seed=layer, dtype=case.dtype)
        if self.moe is not None:
            self.moe.reset_parameters(layer, std=0.4)
            self.moe.aux_scale = AUX_SCALE

    def forward(self, x: Tensor, positions: Tensor, documents: Any) -> Tensor:
        x = x + torch.tanh(x @ self.mix.t()) * (1 + 0.1 * positions.to(x.dtype)).unsqueeze(-1)
        x = x * documents.weight_BS.to(x.dtype).unsqueeze(-1)
        normal = F.rms_norm(x, (HIDDEN,), self.norm)
        return x + (self.moe(normal) if self.moe is not None else F.silu(normal @ self.up.t()))


class Part(nn.Module):
    """Some layers of a small transformer, with the protocol of a stage."""

    def __init__(self, case: Case, layers: Iterable[int], first: bool, last: bool, group: Any = None) -> None:
        super().__init__()
        self.embed = drawn(case, "embed", VOCAB, HIDDEN) if first else None
        self.layers = nn.ModuleDict({str(i): Layer(case, i, group) for i in layers})
        self.norm = drawn(case, "norm", HIDDEN) if last else None
        self.head = drawn(case, "embed" if case.tie else "head", VOCAB, HIDDEN) if last else None

    @property
    def moe_layers(self) -> list[MoELayer]:
        return [layer.moe for layer in self.layers.values() if layer.moe is not None]

    def forward(self, x: Tensor, *, positions: Tensor, documents: Any) -> Tensor:
        if self.embed is not None:
            x = F.embedding(x, self.embed)
        elif self.layers:
            x = torch.cat((x, x.detach()), -1)[..., :HIDDEN]  # the gradient of x is not dense
        for layer in self.layers.values():
            x = layer(x, positions, documents)
        return x.view(x.shape) if self.layers else x  # nor can a view be detached in place

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = F.rms_norm(hidden, (HIDDEN,), self.norm) @ self.head.t()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def batches_of(case: Case, index: int = 0, parts: int = 1) -> list[MicroBatch]:
    """The global micro-batches' part for data-parallel rank ``index``. Documents are of no type torch knows."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for _ in range(case.micro_batches):
        ids, targets, positions = (
            torch.randint(VOCAB, (case.batch, LENGTH), generator=generator).chunk(parts)[index] for _ in range(3)
        )
        weight = torch.rand(case.batch, LENGTH, generator=generator, dtype=torch.float64).chunk(parts)[index]
        made.append(MicroBatch(ids, targets, positions, SimpleNamespace(weight_BS=0.5 + weight)))
    return made


def reference(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses and gradients of the whole model in one process, micro-batch after micro-batch."""
    model = Part(case, range(case.layers), True, True)
    if case.tie:
        model.head = model.embed
    losses = []
    for batch in batches_of(case):
        hidden = model(batch.ids_BS, positions=batch.positions_BS, documents=batch.documents)
        loss = model.loss(hidden, batch.targets_BS)
        (loss * SCALE).backward()
        losses.append(loss.detach())
    gradients = {name: p.grad for name, p in model.named_parameters()}
    if case.tie:
        gradients["head"] = gradients["embed"]
    return torch.stack(losses).double(), gradients


def build(case: Case, mesh: FoldedMesh) -> list[Part]:
    """This rank's stages."""
    plan = case.plan
    parts = [
        Part(case, plan.layers_of(stage), plan.is_first(stage), plan.is_last(stage), mesh.group("etp", "ep"))
        for stage in plan.stages_of(mesh.place["pp"])
    ]
    for part in parts:
        for moe in part.moe_layers:  # the balance loss is that of the whole micro-batch
            moe.router.group = mesh.group("tp", "cp", "dp")
        if case.fsdp:
            for child in (*part.layers.values(), part):
                fully_shard(child, mesh=mesh.flat_mesh("dp"))
                child.set_gradient_divide_factor(1.0)
                child.set_force_sum_reduction_for_comms(True)
    return parts


def make(case: Case, parts: list[Part], mesh: FoldedMesh, **options: Any) -> Any:
    activations = Activations(HIDDEN, case.dtype)
    return make_runner(parts, mesh, case.plan, case.schedule, activations, timeout_s=30, **options)


def train(rank: int, world: int, case: Case) -> Any:
    """Losses, evaluation's losses, gradients by name, and the experts held. Steps twice, so that buffers are reused."""
    mesh = FoldedMesh(ParallelConfig(dp=case.dp, pp=case.pp, ep=case.ep))
    parts = build(case, mesh)
    calls: list[nn.Module] = []
    runner = make(case, parts, mesh, after_backward=calls.append)
    batches = batches_of(case, mesh.place["dp"], case.dp)
    first = runner.step(batches, SCALE)
    evaluated = runner.forward_only(batches[:EVALUATED])
    assert [calls.count(part) for part in parts] == [case.micro_batches] * len(parts)
    for part in parts:
        part.zero_grad()
    losses = runner.step(batches, SCALE)
    assert torch.equal(first, losses)
    if case.tie:
        tie(case, mesh, parts)
    runner.close()
    gradients = {}
    for part in parts:
        for name, p in part.named_parameters():
            assert p.grad is not None, name
            gradients[name] = p.grad.full_tensor() if case.fsdp else p.grad
            if mesh.size("dp") > 1 and not case.fsdp and not (".experts." in name and case.ep > 1):
                dist.all_reduce(gradients[name], group=mesh.group("dp"))
    held = [moe.dispatcher.local_experts for part in parts for moe in part.moe_layers]
    return losses, evaluated, gradients, held[0] if held else None


def tie(case: Case, mesh: FoldedMesh, parts: list[Part]) -> None:
    plan = case.plan
    held = dict(zip(plan.stages_of(mesh.place["pp"]), parts, strict=True))
    first, last = held.get(0), held.get(plan.num_stages - 1)
    sum_tied_gradients(plan, mesh, first.embed if first else None, last.head if last else None)


def check(case: Case, results: list[Any]) -> None:
    losses, gradients = reference(case)
    tolerance = 1e-5 if case.dtype == torch.float32 else 1e-12
    torch.testing.assert_close(sum(r[0] for r in results), losses, rtol=tolerance, atol=0)
    torch.testing.assert_close(sum(r[1] for r in results), losses[:EVALUATED], rtol=tolerance, atol=0)
    seen = set()
    for _, _, found, held in results:
        for name, grad in found.items():
            want = gradients[name][held.start : held.stop] if ".experts." in name else gradients[name]
            error = float((grad - want).abs().max() / want.abs().max())
            assert error < tolerance, f"{name}: {error}"
            seen.add(name)
    assert seen == set(gradients)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_two_ranks_give_the_losses_and_gradients_of_one(schedule: str, pool2: RankPool) -> None:
    case = Case(schedule)
    check(case, pool2.run(train, case))


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_experts_over_the_ranks_of_a_stage(schedule: str, pool4: RankPool) -> None:
    case = Case(schedule, dp=2, ep=2)
    check(case, pool4.run(train, case))


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_four_stages_with_tied_embeddings(schedule: str, pool4: RankPool) -> None:
    case = Case(schedule, pp=4, layers=8, micro_batches=8, tie=True)
    check(case, pool4.run(train, case))


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_fsdp_inside_stages_reduces_gradients_once(schedule: str, pool4: RankPool) -> None:
    case = Case(schedule, dp=2, fsdp=True, tie=True)
    check(case, pool4.run(train, case))


FOUR_LAYERS = replace(tiny.TINY, layers=4, tie=True)


def transformer(rank: int, world: int, arg: tuple[str, ParallelConfig, str, bool]) -> Any:
    """The bundled model on packed documents: losses; gradients by name, and what part of the whole each is; how often
    each expert was chosen, by layer; how often routers ran."""
    schedule, mapping, recompute, split_backward = arg
    mesh = FoldedMesh(mapping)
    plan = plan_stages(FOUR_LAYERS.layers, mapping.pp, schedule)
    stages = []
    for stage in plan.stages_of(mesh.place["pp"]):
        part = ModelPlan.of(
            mesh,
            layers=plan.layers_of(stage),
            has_embedding=plan.is_first(stage),
            has_head=plan.is_last(stage),
            recompute=recompute,
            backend="all_to_all" if mapping.ep > 1 else "auto",
            dtype=torch.float64,
        )
        stages.append(Transformer(FOUR_LAYERS, part))
        initialize(stages[-1], 3, mesh.place, mesh.sizes)
    batches = []
    for rows in zip(*(t.split(1) for t in tiny.batch(packed=True)), strict=True):
        ids, targets, documents = (tiny.own(t, stages[0].plan) for t in rows)
        batches.append(MicroBatch(ids, targets, None, documents))
    calls: list[int] = []
    for moe in (moe for stage in stages for moe in stage.moe_layers()):
        moe.router.register_forward_hook(lambda *_: calls.append(0))
    activations = Activations(FOUR_LAYERS.hidden, torch.float64, mapping.tp)
    runner = make_runner(stages, mesh, plan, schedule, activations, timeout_s=60, split_backward=split_backward)
    losses = runner.step(batches, SCALE)
    found, loads = {}, {}
    for stage in stages:
        shardings = shardings_of(stage)
        for name, parameter in stage.named_parameters():
            group = mesh.sum_group(shardings[name])
            if group is not None:
                dist.all_reduce(parameter.grad, group=group)
    ends = {index: s.tied_parameter for index, s in zip(plan.stages_of(mesh.place["pp"]), stages, strict=True)}
    sum_tied_gradients(plan, mesh, ends.get(0), ends.get(plan.num_stages - 1))
    for stage in stages:
        shardings = shardings_of(stage)
        for name, parameter in stage.named_parameters():
            found[stage.origin_of(name)] = parameter.grad, shardings[name]
        loads |= {label: block.moe.router.load_E for label, block in stage.layers.items() if block.is_moe}
        stage.close()
    runner.close()
    return losses, found, loads, len(calls)


@pytest.mark.parametrize(
    ("schedule", "recompute", "split_backward"),
    [
        ("gpipe", "none", True),
        ("1f1b", "selective", True),
        ("interleaved_1f1b", "full", True),
        ("zero_bubble", "selective", True),
        ("zero_bubble", "full", True),
        ("zero_bubble", "full", False),
        ("zbv", "selective", True),
        ("dualpipev", "full", False),
    ],
)
def test_the_bundled_model_with_tensor_and_expert_parallel_stages(
    schedule: str, recompute: str, split_backward: bool, pool4: RankPool
) -> None:
    mapping = ParallelConfig(tp=2, pp=2, ep=2)
    results = pool4.run(transformer, (schedule, mapping, recompute, split_backward))
    losses, whole, loads, calls = transformer(0, 1, ("gpipe", ParallelConfig(), "none", True))
    torch.testing.assert_close(sum(r[0] for r in results), losses, rtol=1e-10, atol=0)
    for rank, (_, found, _, _) in enumerate(results):
        for name, (grad, sharding) in found.items():
            want = sharding.take(whole[name][0], mapping.place(rank), mapping.sizes)
            error = float((grad - want).abs().max() / whole[name][0].abs().max())
            assert error < 1e-10, f"{name}: {error}"
    assert set().union(*(r[1] for r in results)) == set(whole)
    for layer, load_E in loads.items():
        assert torch.equal(sum(r[2][layer] for r in results if layer in r[2]), load_E)
    if recompute != "full" or schedule == "interleaved_1f1b" or not split_backward:
        # Every layer is on the two ranks of a stage, and runs once, or once more where it is computed again.
        assert sum(r[3] for r in results) == 2 * calls * (2 if recompute == "full" else 1)


@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", stage_layers=(3, 1), dense=(0, 1, 2)),
        Case("gpipe", stage_layers=(4, 0)),
        Case("interleaved_1f1b", stage_layers=(0, 2, 0, 2), dense=(0, 1)),
        Case("zero_bubble", stage_layers=(1, 3), dense=(0,)),
        Case("zero_bubble", virtual=2, stage_layers=(1, 0, 3, 0)),
        Case("zbv", stage_layers=(2, 0, 1, 1), dense=(3,)),
        Case("dualpipev", stage_layers=(0, 3, 0, 1)),
    ],
    ids=lambda case: f"{case.schedule}{case.stage_layers}",
)
def test_uneven_stages_stages_without_experts_and_without_layers(case: Case, pool2: RankPool) -> None:
    check(case, pool2.run(train, case))


@pytest.mark.parametrize(
    ("schedule", "micro_batches"),
    [("gpipe", 1), ("1f1b", 5), ("interleaved_1f1b", 3), ("zero_bubble", 1), ("zbv", 3), ("dualpipev", 5)],
)
def test_micro_batches_that_are_no_multiple_of_the_ranks(schedule: str, micro_batches: int, pool2: RankPool) -> None:
    case = Case(schedule, micro_batches)
    check(case, pool2.run(train, case))


def changing(rank: int, world: int, case: Case) -> Any:
    """A refused number of micro-batches, then steps of other numbers and shapes, and one under the first again."""
    mesh = FoldedMesh(ParallelConfig(pp=case.pp))
    parts = build(case, mesh)
    runner = make(case, parts, mesh)
    with pytest.raises(ConfigError, match="5"):
        runner.step(batches_of(replace(case, micro_batches=5)))
    uneven = [*batches_of(replace(case, micro_batches=3)), *batches_of(replace(case, micro_batches=1, batch=3))]
    with pytest.raises(InputError, match="number 3"):
        runner.step(uneven)
    cases = [case, replace(case, micro_batches=2), replace(case, batch=3), case]
    losses = [runner.step(batches_of(other)) for other in cases]
    runner.close()
    return losses


def test_steps_may_differ_in_number_and_shape_and_a_refusal_leaves_the_pipeline_usable(pool2: RankPool) -> None:
    case = Case("interleaved_1f1b")
    first, last = pool2.run(changing, case)
    for place, other in enumerate((case, replace(case, micro_batches=2), replace(case, batch=3), case)):
        torch.testing.assert_close(first[place] + last[place], reference(other)[0])


@pytest.mark.parametrize("tied", [False, True])
def test_without_pipeline_micro_batches_accumulate(tied: bool) -> None:
    case = Case(pp=1, micro_batches=3, tie=tied)
    mesh = FoldedMesh(ParallelConfig())
    model = Part(case, range(case.layers), True, True)
    if tied:
        model.head = model.embed
    runner = make(case, [model], mesh)
    assert isinstance(runner, Accumulation)
    losses = runner.step(batches_of(case), SCALE)
    want, gradients = reference(case)
    assert torch.equal(losses, want)
    assert torch.equal(runner.forward_only(batches_of(case)), want)
    if tied:
        sum_tied_gradients(case.plan, mesh, model.embed, model.head)
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())


def test_only_the_last_stage_holds_the_copy_of_a_tied_parameter() -> None:
    assert [is_tied_copy(Case("zbv").plan, stage) for stage in range(4)] == [False, False, False, True]
    assert not is_tied_copy(Case(pp=1).plan, 0)


def misfit(rank: int, world: int, _: None) -> list[str]:
    """Pipelines that do not fit; every one is refused here, before anything is sent."""
    mesh, case = FoldedMesh(ParallelConfig(pp=2)), Case("zbv")
    parts = build(case, mesh)
    activations = Activations(HIDDEN, case.dtype)
    refused = []
    for modules, plan, schedule in (
        (parts[:1], case.plan, "zbv"),
        (parts, case.plan, "interleaved_1f1b"),
        (parts, Case("zbv", pp=4, layers=8).plan, "zbv"),
        (parts[:1], Case(pp=1).plan, "1f1b"),
    ):
        with pytest.raises(ConfigError) as caught:
            Pipeline(modules, mesh, plan, schedule, activations)
        refused.append(str(caught.value))
    with pytest.raises(ConfigError, match="tied parameter is missing"):
        sum_tied_gradients(Case().plan, mesh, None, None)
    return refused


def test_a_plan_that_does_not_fit_mesh_schedule_or_modules_is_refused(pool2: RankPool) -> None:
    for modules, style, larger, none in pool2.run(misfit):
        assert "got 1 modules" in modules
        assert "style 'v'" in style
        assert "pp = 4" in larger
        assert "pp = 1" in none


class Failing(Part):
    """A stage that fails in its third forward, on the last rank alone."""

    how = ""
    calls = 0

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        Failing.calls += 1
        if Failing.calls == 3 and self.head is not None:
            if self.how == "die":
                os._exit(1)
            if self.how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.how == "route":
                raise RoutingError("expert 9 is outside 0..3")
            if self.how == "cast":
                return super().forward(x, **kwargs).float()
        return super().forward(x, **kwargs)


def fail(rank: int, world: int, arg: tuple[str, str]) -> tuple[str, str]:
    schedule, how = arg
    case = Case(schedule)
    mesh = FoldedMesh(ParallelConfig(pp=2))
    Failing.how, Failing.calls = how, 0
    plan = case.plan
    parts = [
        Failing(case, plan.layers_of(stage), plan.is_first(stage), plan.is_last(stage))
        for stage in plan.stages_of(mesh.place["pp"])
    ]
    runner = make_runner(parts, mesh, plan, schedule, Activations(HIDDEN, case.dtype), timeout_s=2)
    with pytest.raises(MoeCommError) as caught:
        runner.step(batches_of(case))
    if isinstance(caught.value, PeerError):  # and from then on
        with pytest.raises(type(caught.value)):
            runner.forward_only(batches_of(case))
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_a_dead_stage_is_peer_died_for_the_others(schedule: str, pool2: RankPool) -> None:
    name, message = pool2.run(fail, (schedule, "die"), expect_dead={1})[0]
    assert name == "PeerDied"
    assert "rank 1" in message


def test_a_stopped_stage_is_peer_timeout_for_the_others(pool2: RankPool) -> None:
    name, message = pool2.run(fail, ("gpipe", "stop"), expect_dead={1})[0]
    assert name == "PeerTimeout"
    assert "a pipeline step" in message


@pytest.mark.parametrize(("how", "name"), [("route", "RoutingError"), ("cast", "InputError")])
def test_an_error_inside_a_stage_keeps_its_type(how: str, name: str, pool2: RankPool) -> None:
    first, last = pool2.run(fail, ("1f1b", how))
    assert last[0] == name
    assert first[0] in ("PeerDied", "PeerTimeout")


def test_a_split_backward_computes_each_weight_gradient_of_the_experts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grouped = importlib.import_module("moe_comm.layers.grouped_mlp")  # the package has a function of that name
    products = []
    plain = grouped._mm
    monkeypatch.setattr(grouped, "_mm", lambda *args: (products.append(0), plain(*args)))
    rows = torch.randn(5, HIDDEN, dtype=torch.float64, requires_grad=True)
    w13 = torch.randn(1, 2 * FFN, HIDDEN, dtype=torch.float64, requires_grad=True)
    w2 = torch.randn(1, HIDDEN, FFN, dtype=torch.float64, requires_grad=True)
    y = grouped.grouped_mlp(rows, [5], w13, w2, None, None, Experts(1, HIDDEN, FFN).activation)
    counts = []
    found = []
    for inputs in ((rows,), (w13, w2), (rows, w13, w2)):
        products.clear()
        found += torch.autograd.grad(y.sum(), inputs, retain_graph=True)
        counts.append(len(products))
    assert counts == [2, 3, 4]
    assert all(torch.equal(half, whole) for half, whole in zip(found[:3], found[3:], strict=True))
