"""The token dispatcher for Megatron-Core, on CPU ranks, against its all-gather dispatcher and one process."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_comm.errors import ConfigError
from tests.integrations.hosts.routed import (
    CASES,
    Case,
    expected,
    inputs,
    megatron_config,
    megatron_dispatcher,
    megatron_on_cpu,
    route,
    run_dispatcher,
)
from tests.pool import RankPool

# Without importing it: then DeepEP could not be installed in this process any more.
pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-Core: make adapters")

OURS = (
    *CASES,
    Case("pads to the capacity", capacity=1.0, tokens=(8, 8), pad=True),
    Case("capacity above the tokens", capacity=3.0, tokens=(5, 5), pad=True),
    Case("all tokens to one expert", one=True, top_k=1),
    Case("zero tokens on some ranks", tokens=(0, 7)),
    Case("zero tokens, padded", tokens=(0, 8), capacity=1.0, pad=True),
)


def dispatched(rank: int, world: int, sizes: tuple[int, int]) -> list[tuple[Any, ...]]:
    """Return, for each case, the results of the dispatcher of moe_comm, of Megatron's, and of one process."""
    results, (ep, etp) = [], sizes
    with megatron_on_cpu(expert_model_parallel_size=ep, expert_tensor_parallel_size=etp):
        for case in OURS:
            ours = run_dispatcher(megatron_dispatcher("moe_comm", case), case, rank, etp)
            theirs = None
            if case.tokens[0] == case.tokens[1]:  # as its all-gather needs
                theirs = run_dispatcher(megatron_dispatcher("allgather", case), case, rank, etp)
            results.append((ours, theirs, expected(case, rank)))
    return results


@pytest.mark.parametrize(("world", "ep", "etp"), [(2, 2, 1), (4, 4, 1), (2, 1, 2), (4, 2, 2), (2, 1, 1)])
def test_equals_the_allgather_dispatcher(world: int, ep: int, etp: int, pools: dict[int, RankPool]) -> None:
    for results in pools[world].run(dispatched, (ep, etp)):
        for case, ((ours, counts), theirs, whole) in zip(OURS, results, strict=True):
            for got, want in zip(ours[:3], whole, strict=True):
                torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5, msg=case.name)
            if theirs is None:
                continue
            reference, reference_counts = theirs
            assert counts == reference_counts
            for got, want in zip(ours[:3], reference[:3], strict=True):
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, msg=case.name)
            for got, want in zip(ours[3:], reference[3:], strict=True):  # rows and probabilities, in the same order
                assert torch.equal(got, want), case.name


def gpt(case: Case, ours: str, backend: str, **options: Any) -> Any:
    """Return a GPT model of Megatron-Core with MoE layers. ours: "", "spec" or "replaced". backend: for ours."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from moe_comm.integrations.megatron import MoeCommMoELayer, replace_dispatchers

    config = megatron_config(case, num_layers=2, attention_dropout=0.0, hidden_dropout=0.0, **options)
    spec = get_gpt_layer_local_spec(num_experts=case.num_experts)
    if ours == "spec":
        spec.submodules.mlp.module = MoeCommMoELayer
        spec.submodules.mlp.params = {"backend": backend}
    model = GPTModel(config, spec, vocab_size=32, max_sequence_length=8)
    if ours == "replaced":
        assert replace_dispatchers([model], backend=backend) == 2
    return model


def loss_of(model: Any, rank: int) -> Tensor:
    """Return the loss of this rank's tokens."""
    ids = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(rank))
    mask = torch.ones(1, 1, 8, 8).triu(1).bool()
    loss: Tensor = model(ids[:, :-1], torch.arange(8).expand(2, -1), mask, labels=ids[:, 1:]).mean()
    return loss


def trained(rank: int, world: int, arg: tuple[int, Case, str, dict[str, Any]]) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of three steps and the gradients of the first."""
    etp, case, ours, options = arg
    with megatron_on_cpu(expert_model_parallel_size=world // etp, expert_tensor_parallel_size=etp):
        torch.manual_seed(7)
        backend = "all_gather" if ours == "spec" else "all_to_all"
        sizes = {"expert_model_parallel_size": world // etp, "expert_tensor_parallel_size": etp}
        model = gpt(case, ours, backend, **sizes, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, grads = [], {}
        for _ in range(3):
            loss = loss_of(model, rank)
            loss.backward()
            grads = grads or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses, grads


@pytest.mark.parametrize(
    ("world", "etp", "ours", "case", "options"),
    [
        (2, 1, "spec", Case("dropless"), {"moe_shared_expert_intermediate_size": 8}),
        (2, 1, "replaced", Case("drops", capacity=0.5), {"moe_router_load_balancing_type": "aux_loss"}),
        (4, 2, "spec", Case("padded", capacity=0.5, pad=True), {"moe_aux_loss_coeff": 0.1}),
    ],
    ids=["dropless", "drops", "pads, ETP 2 x EP 2"],
)
def test_a_model_trains_as_with_the_allgather_dispatcher(
    world: int, etp: int, ours: str, case: Case, options: dict[str, Any], pools: dict[int, RankPool]
) -> None:
    plain = pools[world].run(trained, (etp, case, "", options))
    for (losses, grads), (expected_losses, expected_grads) in zip(
        pools[world].run(trained, (etp, case, ours, options)), plain, strict=True
    ):
        assert losses == pytest.approx(expected_losses, rel=1e-5) and losses[-1] < losses[0]
        assert grads.keys() == expected_grads.keys()
        assert any("router" in name for name in grads)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected_grads[name], rtol=1e-4, atol=1e-6)


def unknown_backend(rank: int, world: int, ours: str) -> str:
    """Return the error of the first step of a model whose dispatchers have a backend that does not exist."""
    with megatron_on_cpu(expert_model_parallel_size=world):
        model = gpt(Case("backend"), ours, "nccl", expert_model_parallel_size=world)
        with pytest.raises(ConfigError) as found:
            loss_of(model, rank)
    return str(found.value)


@pytest.mark.parametrize("ours", ["spec", "replaced"])
def test_options_reach_the_dispatchers(ours: str, pools: dict[int, RankPool]) -> None:
    for error in pools[2].run(unknown_backend, ours):
        assert "unknown dispatch backend 'nccl'" in error


def identity(rank: int, world: int, etp: int) -> tuple[Tensor, ...]:
    """Dispatch and combine without experts. Return tokens, probabilities, output and gradients."""
    case = Case("identity", tokens=(3, 9), num_experts=8, top_k=3)
    with megatron_on_cpu(expert_model_parallel_size=world // etp, expert_tensor_parallel_size=etp):
        dispatcher = megatron_dispatcher("moe_comm", case)
        x, router, grad = inputs(case, rank, torch.float32)
        probs, chosen = route(case, x, router)
        x.requires_grad_()
        probs.requires_grad_()
        rows, _, row_probs = dispatcher.dispatch_postprocess(
            *dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, chosen, probs))
        )
        rows = dispatcher.combine_preprocess(rows * row_probs.unsqueeze(1))
        y = dispatcher.combine_postprocess(dispatcher.token_combine(rows))
        y.backward(grad)
        assert x.grad is not None and probs.grad is not None
        return x.detach(), probs.detach(), grad, y.detach(), x.grad, probs.grad


@pytest.mark.parametrize("etp", [1, 2])
def test_without_experts_tokens_are_scaled_by_their_probabilities(etp: int, pools: dict[int, RankPool]) -> None:
    for x, probs, grad, y, x_grad, probs_grad in pools[4].run(identity, etp):
        scale = etp * probs.sum(1)[:, None, None]  # each rank of an ETP group returns the whole rows here
        torch.testing.assert_close(y, x * scale)
        torch.testing.assert_close(x_grad, grad * scale)
        want = etp * (x * grad).sum(-1).expand(probs.shape) * (probs > 0)
        torch.testing.assert_close(probs_grad, want, rtol=1e-4, atol=1e-5)


def faults(rank: int, world: int, _: None) -> dict[str, str]:
    """Return the error of each mistake, which rank 1 alone makes in its tokens and all ranks make in their options."""
    from torch import nn

    from moe_comm.integrations.megatron import MoeCommTokenDispatcher, replace_dispatchers

    case, found = Case("faults"), {}

    def attempt(name: str, action: Any) -> None:
        try:
            action()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    with megatron_on_cpu(expert_model_parallel_size=world // 2, expert_tensor_parallel_size=2):
        x, router, _grad = inputs(case, rank, torch.float32)
        probs, chosen = route(case, x, router)
        wrong: dict[str, tuple[Tensor, Tensor]] = {
            "too many experts": (torch.ones_like(chosen), probs),
            "map of floats": (chosen.float(), probs),
            "shape of probs": (chosen, probs[:2]),
        }
        dispatcher = megatron_dispatcher("moe_comm", case)

        def forward(given: tuple[Tensor, Tensor]) -> Tensor:
            rows, _, _ = dispatcher.dispatch_postprocess(
                *dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, *given))
            )
            return dispatcher.combine_postprocess(dispatcher.token_combine(rows))  # type: ignore[no-any-return]

        for name, given in wrong.items():
            attempt(name, lambda given=given: forward(given if rank == 1 else (chosen, probs)))
        attempt("afterwards", lambda: forward((chosen, probs)))
        for option in ("moe_shared_expert_overlap", "moe_router_padding_for_quantization"):
            attempt(option, lambda option=option: _with(case, option))
        config = megatron_config(case)
        config.cuda_graph_impl = "local"
        groups = SimpleNamespace(ep=dispatcher.ep_group, expt_tp=dispatcher.tp_group, tp_ep=dispatcher.tp_ep_group)
        attempt("graph", lambda: MoeCommTokenDispatcher(2, [0, 1], config, groups))
        swapped = SimpleNamespace(ep=dispatcher.tp_group, expt_tp=dispatcher.ep_group, tp_ep=dispatcher.tp_ep_group)
        attempt("order", lambda: MoeCommTokenDispatcher(2, [0, 1], megatron_config(case), swapped))
        unknown = MoeCommTokenDispatcher(2, [0, 1], megatron_config(case), groups, backend="nccl")
        attempt("backend", lambda: unknown.dispatch_preprocess(x, chosen, probs))
        assert replace_dispatchers(nn.Linear(2, 2)) == 0
    return found


def _with(case: Case, option: str) -> None:
    from moe_comm.integrations.megatron import MoeCommMoELayer

    config = megatron_config(case)
    setattr(config, option, True)
    MoeCommMoELayer(config)


def test_faults_raise_on_every_rank(pools: dict[int, RankPool]) -> None:
    for found in pools[4].run(faults):
        assert set(found) == {
            *("too many experts", "map of floats", "shape of probs", "graph", "order", "backend"),
            *("moe_shared_expert_overlap", "moe_router_padding_for_quantization"),
        }
        assert (
            found["too many experts"].startswith("InputError: ") and "moe_router_topk is 2" in found["too many experts"]
        )
        assert found["map of floats"].startswith("InputError: ") and "torch.float32" in found["map of floats"]
        assert found["shape of probs"].startswith("InputError: ")
        for name in ("graph", "order", "backend", "moe_shared_expert_overlap", "moe_router_padding_for_quantization"):
            assert found[name].startswith("ConfigError: "), name
        assert "tp precedes ep" in found["order"] and "unknown dispatch backend 'nccl'" in found["backend"]
