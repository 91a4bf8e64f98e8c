"""``moe_layer`` against Tutel's own, with Tutel installed or in PYTHONPATH. It is not on PyPI."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_comm.errors import UnsupportedModel
from tests.pool import RankPool

pytest.importorskip("tutel.moe", reason="needs Tutel, from its repository", exc_type=ImportError)
HIDDEN = 8
FFN: dict[str, Any] = {"type": "ffn", "hidden_size_per_expert": 12, "activation_fn": torch.relu}
TOP2: dict[str, Any] = {"type": "top", "k": 2}


class TwoDims(nn.Module):
    """Experts of tokens [2, D / 2]."""

    def __init__(self, model_dim: int, num_experts_per_device: int, sharded_count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts_per_device, 1, 2, model_dim // 2))

    def forward(self, x: Tensor, layer: Any) -> Tensor:
        return (x * self.weight).tanh().flip(2)


@dataclass(frozen=True)
class Case:
    """layer, call: arguments of the layer and of its call. tokens: of each rank. dtype: of autocast."""

    name: str
    gates: tuple[dict[str, Any], ...] = (TOP2,)
    layer: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    expert: dict[str, Any] = field(default_factory=FFN.copy)
    tokens: tuple[int, int, int, int] = (12, 12, 12, 12)
    autocast: bool = False
    local: int = 2


DROPS = {"capacity_factor": 0.5}
CASES = (
    Case("top-1", gates=({"type": "top", "k": 1, "capacity_factor": 1.0},)),
    Case("top-1 with dropped tokens", gates=({"type": "top", "k": 1, "capacity_factor": 0.5},)),
    Case("top-2", gates=(TOP2 | {"capacity_factor": 1.0},), local=3),
    Case("top-4, one expert a rank", gates=({"type": "top", "k": 4, "capacity_factor": 1.0},), local=1),
    Case("capacity as needed", call={"capacity_factor": 0.0}, gates=(TOP2 | {"capacity_factor": 0.0},)),
    Case("capacity as needed, with a bound", call={"capacity_factor": -0.5}),
    Case("top-k of the call", call={"top_k": 3} | DROPS),
    Case("batch-prioritized", layer={"batch_prioritized_routing": True}, call=DROPS),
    Case("batch-prioritized, as needed", layer={"batch_prioritized_routing": True}, call={"capacity_factor": -2.0}),
    Case("weights not normalized", layer={"normalize_gate": False}),
    Case("importance loss", layer={"is_gshard_loss": False}, gates=(TOP2 | {"gate_noise": 1.0},)),
    Case("weights before the experts", layer={"is_postscore": False}, call=DROPS),
    Case("capacity rounded up for overlap", call={"a2a_ffn_overlap_degree": 5} | DROPS),
    Case("second gate, of cosines", gates=(TOP2, {"type": "cosine_top", "k": 1}), call={"gate_index": 1}),
    Case("gate in fp32", gates=(TOP2 | {"fp32_gate": True},), layer={"use_2dh": False}),
    Case("gated experts", expert={"type": "llama_ffn", "hidden_size_per_expert": 12}),
    Case("own experts, of two dimensions", expert={"type": "custom", "module": TwoDims}, call={"reserve_dims": 2}),
    Case("function of the result", layer={"result_func": torch.tanh}),
    Case("uneven tokens", tokens=(3, 9, 1, 6), call={"inequivalent_tokens": True} | DROPS),
    Case("autocast", autocast=True, call=DROPS),
    Case("autocast, gate in fp32", autocast=True, gates=(TOP2 | {"fp32_gate": True},)),
)
ALONE = (
    Case("uneven tokens", tokens=(9, 17, 10, 20), call=DROPS),
    Case("zero tokens on some ranks", tokens=(0, 7, 0, 2), call={"capacity_factor": 4.0, "inequivalent_tokens": True}),
    Case("zero tokens on some ranks, as needed", tokens=(0, 7, 0, 2), gates=(TOP2 | {"capacity_factor": 0.0},)),
    Case("importance loss", (TOP2 | {"gate_noise": 1.0},), {"is_gshard_loss": False}, tokens=(5, 0, 3, 0)),
)


def make(case: Case, rank: int, ours: bool, **layer: Any) -> Any:
    if ours:
        from moe_comm.integrations.tutel import moe_layer
    else:
        from tutel.moe import moe_layer
    gates = [dict(gate) for gate in case.gates]  # Tutel takes entries out
    experts = {"count_per_node": case.local} | case.expert
    return moe_layer(
        **{"gate_type": gates, "model_dim": HIDDEN, "experts": experts, "seeds": (1, rank + 1, 1)} | case.layer | layer
    )


def inputs(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """Return tokens, in the shape of the call, and the gradient of the output."""
    g = torch.Generator().manual_seed(50 + rank)
    shape = (case.tokens[rank], 2, HIDDEN // 2) if "reserve_dims" in case.call else (1, case.tokens[rank], HIDDEN)
    return torch.randn(shape, generator=g), torch.randn(shape, generator=g)


def step(layer: Any, case: Case, rank: int) -> dict[str, Tensor]:
    """Return output, auxiliary loss and gradients of one step."""
    x, grad = inputs(case, rank)
    x.requires_grad_()
    torch.manual_seed(rank)  # for the noise of gates
    with torch.autocast("cpu", torch.bfloat16) if case.autocast else nullcontext():
        y = layer(x, **case.call)
    aux = layer.l_aux
    assert "result_func" in case.layer or y.l_aux is aux
    ((y * grad).sum() + 0.1 * aux).backward()
    assert x.grad is not None
    found = {"y": y.detach(), "aux": aux.detach(), "x": x.grad}
    return found | {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


def both(rank: int, world: int, case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    theirs, ours = make(case, rank, False), make(case, rank, True)
    before, after = theirs.state_dict(), ours.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    ours.load_state_dict(before)
    assert all(hasattr(param, "_tutel_expert") for param in ours.experts.parameters())
    return step(theirs, case, rank), step(ours, case, rank)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_are_those_of_tutels_layer(case: Case, world: int, pools: dict[int, RankPool]) -> None:
    tolerance = 0.02 if case.autocast else 1e-5
    for theirs, ours in pools[world].run(both, case) if world > 1 else [both(0, 1, case)]:
        assert theirs.keys() == ours.keys() and torch.equal(theirs["aux"], ours["aux"])
        if "result_func" not in case.layer:
            kept = [found["y"].flatten(2).any(-1) for found in (theirs, ours)]  # tokens with a slot that is not dropped
            assert torch.equal(*kept) and ("dropped" not in case.name or not kept[0].all())
        for name, value in theirs.items():
            torch.testing.assert_close(
                ours[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n} {m}"
            )


def alone(rank: int, world: int, case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the results of this rank, and those of Tutel with all experts and the tokens of one rank."""
    groups = [dist.new_group([one]) for one in range(world)]
    ours, whole = make(case, rank, True), make(case, rank, False, group=groups[rank], **every(case, world))
    states = [torch.empty(0)] * world
    state = {}
    for name, value in ours.experts.state_dict().items():
        states = [torch.empty_like(value) for _ in range(world)]
        dist.all_gather(states, value)
        state[f"experts.{name}"] = torch.cat(states)
    whole.load_state_dict(whole.state_dict() | ours.gates.state_dict(prefix="gates.") | state)
    found, own = step(ours, case, rank), slice(rank * case.local, (rank + 1) * case.local)
    want = step(whole, case, rank) if case.tokens[rank] else {"aux": torch.tensor(0.0)}
    for name, param in whole.named_parameters():
        grad = want.get(name, torch.zeros_like(param))
        if name.startswith("experts."):
            dist.all_reduce(grad)
            grad = grad[own]
        want[name] = grad
    return want, found


def every(case: Case, world: int) -> dict[str, Any]:
    """Return the arguments of a layer with all experts."""
    return {"experts": {"count_per_node": case.local * world} | case.expert}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_ranks_may_have_any_number_of_tokens(case: Case, world: int, pools: dict[int, RankPool]) -> None:
    for tokens, (want, found) in zip(case.tokens, pools[world].run(alone, case), strict=False):
        assert found["y"].shape == (1, tokens, HIDDEN) == found["x"].shape and len(found) > 4
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n} {m}")


def sharded(rank: int, world: int, _: None) -> None:
    with pytest.raises(UnsupportedModel, match="2 ranks share each expert"):
        make(Case("sharded", local=-2), rank, True)


def test_experts_that_ranks_share_raise(pools: dict[int, RankPool]) -> None:
    pools[4].run(sharded, None)


def weights_of_all_ranks(rank: int, world: int, _: None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    case = Case("copied", layer={"parallel_type": "adaptive:0"})
    return both(rank, world, case)


def test_a_layer_that_copies_weights_is_tutels(pools: dict[int, RankPool]) -> None:
    for theirs, ours in pools[2].run(weights_of_all_ranks, None):
        assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
