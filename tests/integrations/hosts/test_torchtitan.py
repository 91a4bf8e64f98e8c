"""The token dispatcher of torchtitan, on CPU ranks, against ``AllToAllTokenDispatcher`` and one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from tests.pool import RankPool

pytest.importorskip("torchtitan", reason="needs torchtitan: make adapters")
HIDDEN = 16


@dataclass(frozen=True)
class Case:
    """tokens: of the even and odd ranks. one: all slots choose one expert."""

    name: str
    tokens: tuple[int, int] = (6, 6)
    num_experts: int = 8
    top_k: int = 2
    one: bool = False
    dtype: torch.dtype = torch.float32


CASES = (
    Case("plain"),
    Case("uneven tokens, bfloat16", tokens=(3, 9), top_k=3, dtype=torch.bfloat16),
    Case("zero tokens on some ranks", tokens=(0, 7)),
    Case("all tokens to one expert", one=True, top_k=1),
    Case("top-k 8 of 8", top_k=8),
)
UNEVEN = Case("experts that do not divide by the ranks", num_experts=7)


def inputs(case: Case, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens [T, D], a router [D, E] that all ranks share, and the gradient of the output."""
    router = torch.randn(HIDDEN, case.num_experts, generator=torch.Generator().manual_seed(3))
    g = torch.Generator().manual_seed(50 + rank)
    tokens = case.tokens[rank % 2]
    return torch.randn(tokens, HIDDEN, generator=g), router, torch.randn(tokens, HIDDEN, generator=g)


def route(case: Case, x: Tensor, router: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores [T, K], ids [T, K] and tokens per expert [E]."""
    logits = x @ router
    if case.one:
        logits = logits + torch.tensor([0.0, 100.0] + [0.0] * (case.num_experts - 2), dtype=x.dtype)
    scores = logits.sigmoid() if not case.one else (logits - 100).sigmoid()
    ids = logits.topk(case.top_k, -1, sorted=False).indices
    return scores.gather(1, ids), ids, torch.bincount(ids.flatten(), minlength=case.num_experts)


def make(kind: str, case: Case, world: int) -> Any:
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from moe_comm.integrations.torchtitan import MoeCommTokenDispatcher

    set_spmd_backend("partial_dtensor")  # spmd_types needs the mesh of a trainer
    cls = MoeCommTokenDispatcher if kind == "moe_comm" else AllToAllTokenDispatcher
    dispatcher = cls(cls.Config(num_experts=case.num_experts, top_k=case.top_k))
    dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)))
    return dispatcher


def experts(rows: Tensor, counts: Tensor, start: int) -> Tensor:
    """Apply expert e, x * (e + 1)."""
    scale = torch.arange(start + 1, start + 1 + len(counts)).repeat_interleave(counts)
    return rows * scale.to(rows.dtype).unsqueeze(1)


def step(dispatcher: Any, case: Case, rank: int, start: int) -> tuple[Tensor, ...]:
    x, router, grad = inputs(case, rank)
    x.requires_grad_()
    router.requires_grad_()
    scores, ids, counts_E = route(case, x, router)
    rows, counts, metadata = dispatcher.dispatch(x.to(case.dtype), scores, ids, counts_E)
    y = dispatcher.combine(experts(rows, counts, start), metadata, x.to(case.dtype))
    y.backward(grad.to(case.dtype))
    assert x.grad is not None and router.grad is not None
    return rows.detach(), counts, y.detach(), x.grad, router.grad


def expected(case: Case, rank: int) -> tuple[Tensor, ...]:
    """Return output, input gradient and router gradient in float64, without dispatch."""
    x, router, grad = (t.double() for t in inputs(case, rank))
    x.requires_grad_()
    router.requires_grad_()
    scores, ids, _ = route(case, x, router)
    (y := x * (scores * (ids + 1)).sum(1, keepdim=True)).backward(grad)
    assert x.grad is not None and router.grad is not None
    return y.detach(), x.grad, router.grad


def compare(rank: int, world: int, case: Case) -> tuple[Any, ...]:
    from moe_comm.topology import ExpertPlacement

    start = ExpertPlacement.of(case.num_experts, world).local_range(rank).start
    ours = step(make("moe_comm", case, world), case, rank, start)
    theirs = None if case.num_experts % world else step(make("all_to_all", case, world), case, rank, start)
    return ours, theirs, expected(case, rank)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", [*CASES, UNEVEN], ids=lambda case: case.name)
def test_rows_and_counts_have_the_bits_of_torchtitans_dispatcher(
    case: Case, world: int, pools: dict[int, RankPool]
) -> None:
    tolerance = 1e-5 if case.dtype is torch.float32 else 0.05
    for ours, theirs, whole in pools[world].run(compare, case):
        if theirs is not None:
            for got, want in zip(ours[:2], theirs[:2], strict=True):
                assert got.dtype == want.dtype and torch.equal(got, want)
            for got, want in zip(ours[2:], theirs[2:], strict=True):
                torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        for got, want in zip(ours[2:], whole, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=20 * tolerance)


class Block(nn.Module):
    """A router, a dispatcher and experts that scale rows."""

    def __init__(self, dispatcher: Any, case: Case, router: Tensor, start: int) -> None:
        super().__init__()
        self.dispatcher, self.case, self.start = dispatcher, case, start
        self.router = nn.Parameter(router)

    def forward(self, x: Tensor) -> Tensor:
        scores, ids, counts_E = route(self.case, x, self.router)
        rows, counts, metadata = self.dispatcher.dispatch(x, scores, ids, counts_E)
        return self.dispatcher.combine(experts(rows, counts, self.start).sin(), metadata, x).cos()  # type: ignore[no-any-return]


def checkpointed(rank: int, world: int, kind: str) -> tuple[Any, ...]:
    """Return gradients of two blocks under a checkpointing policy, and the number of operations of the dispatcher."""
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    from moe_comm.dispatch import operators
    from moe_comm.integrations.torchtitan import MoeCommSelectiveAC, MoeCommTokenDispatcher

    case = Case("checkpointed", tokens=(0, 6))
    dispatcher = make("moe_comm", case, world)
    assert isinstance(dispatcher, MoeCommTokenDispatcher)
    x, router, grad = inputs(case, rank)
    start = rank * case.num_experts // world
    model = nn.Module()
    model.layers = nn.ModuleDict({str(i): Block(dispatcher, case, router.clone(), start) for i in range(2)})
    policies: dict[str, Any] = {"full": FullAC, "selective": SelectiveAC, "moe_comm": MoeCommSelectiveAC}
    if kind != "none":
        policies[kind](policies[kind].Config()).apply(model)
    x.requires_grad_()
    core = dispatcher._dispatcher(x.device)
    before, y = core.num_calls, x
    for layer in model.layers.values():
        y = layer(y)
    y.backward(grad)
    del y
    grads = [x.grad, *(p.grad for p in model.parameters())]
    return grads, core.num_calls - before, len(operators._sent)


def test_selective_checkpointing_saves_transfers_and_releases_handles(pools: dict[int, RankPool]) -> None:
    plain = pools[2].run(checkpointed, "none")
    for kind, calls in (("full", 12), ("selective", 12), ("moe_comm", 8)):
        for (grads, got, kept), (expected_grads, expected_calls, _) in zip(
            pools[2].run(checkpointed, kind), plain, strict=True
        ):
            assert all(map(torch.equal, grads, expected_grads))
            assert (expected_calls, got) == (8, calls), kind
            assert kept == 0


def test_overrides_replace_configs() -> None:
    from torchtitan.config.override import _REGISTRY
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from moe_comm.integrations.torchtitan import MoeCommSelectiveAC, MoeCommTokenDispatcher, overrides

    config = overrides.moe_comm(AllToAllTokenDispatcher.Config(num_experts=8, top_k=2), backend="all_to_all")
    assert config == MoeCommTokenDispatcher.Config(num_experts=8, top_k=2, backend="all_to_all")
    policy = overrides.save_transfers(SelectiveAC.Config(preserve_rng_state=False))
    assert isinstance(policy, MoeCommSelectiveAC.Config) and not policy.preserve_rng_state
    assert {"moe_comm.integrations.torchtitan.overrides." + name for name in ("moe_comm", "save_transfers")} <= {
        *_REGISTRY
    }
    local = config.build()
    x, ids = torch.randn(3, 4), torch.tensor([[0, 1], [2, 7], [1, 3]])
    rows, _, metadata = local.dispatch(x, torch.ones(3, 2), ids, torch.bincount(ids.flatten(), minlength=8))
    torch.testing.assert_close(local.combine(rows, metadata, x), 2 * x)  # without a mesh


def debug_model(rank: int, world: int, imports: list[str]) -> tuple[list[float], list[str]]:
    """Train the first layers of torchtitan's MoE debug model, as its ``Trainer`` builds it. Return losses."""
    import torch.nn.functional as F
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", torch.cpu  # before the modules that copy them are imported
    from torchtitan.config import OverrideConfig
    from torchtitan.config.override import apply_overrides
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.qwen3 import model_registry
    from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

    config = qwen3_moe_debug()
    config.model_spec = model_registry("debugmodel_moe")
    model_config = config.model_spec.model
    del model_config.layers[2:]
    for layer in model_config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention needs a GPU to train
    config.training.seq_len, config.training.local_batch_size = 32, 2
    config.parallelism.expert_parallel_degree = world
    config.parallelism.spmd_backend = "partial_dtensor"
    config.override = OverrideConfig(imports=imports)  # --override.imports
    set_spmd_backend(config.parallelism.spmd_backend)
    parallel_dims = ParallelDims.from_config(config.parallelism, world)
    parallel_dims.build_mesh()
    model_config.update_from_config(config=config)
    replaced = apply_overrides(config.override, config) if imports else []
    with torch.device("meta"):
        model = model_config.build()
    model = config.model_spec.parallelize_fn(
        model,
        parallel_dims=parallel_dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    model.to_empty(device="cpu")
    torch.manual_seed(7)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    g = torch.Generator().manual_seed(rank)
    ids = torch.randint(model_config.vocab_size, (2, 33), generator=g)
    losses = []
    for _ in range(4):
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, replaced


def test_the_debug_model_has_the_losses_of_torchtitans_dispatcher() -> None:
    overrides = "moe_comm.integrations.torchtitan.overrides."
    with RankPool(2) as pool:  # ranks that have not imported torchtitan
        plain = pool.run(debug_model, [])
        ours = pool.run(debug_model, [overrides + "moe_comm", overrides + "save_transfers"])
    for (losses, _), (got, replaced) in zip(plain, ours, strict=True):
        assert got == pytest.approx(losses, rel=2e-3) and got[-1] < got[0] - 0.1
        assert got[0] == pytest.approx(losses[0], rel=1e-5)
        assert sum("MoeCommTokenDispatcher" in line for line in replaced) == 2  # once for each layer
        assert sum("MoeCommSelectiveAC" in line for line in replaced) == 1
