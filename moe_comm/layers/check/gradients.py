"""``check_grads``: is an expert-parallel layer's gradient the gradient? The commonest bug there is, and a silent one.

Every rank runs the layer on its own tokens, then, alone, a copy that holds all experts on the tokens of all ranks,
and a float64 loop over experts in plain torch:

    output, input gradient, routing-weight gradients, expert gradients    EP n == EP 1 in every bit (deterministic)
    router and shared-expert gradients, summed over the ranks             EP n  ~ EP 1
    all of them                                                           EP n  ~ float64
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.dispatch import DispatchOptions
from moe_comm.errors import ConfigError
from moe_comm.layers.check.cases import CASES, Batch, CaseShape, joined, make_batch, tokens_of
from moe_comm.layers.check.report import Comparison, GradReport, compare
from moe_comm.layers.moe.layer import MoEConfig, MoELayer
from moe_comm.layers.moe.losses import attach_loss
from moe_comm.layers.moe.router import RouterConfig, Routing, Score
from moe_comm.layers.transformer.state import single_rank_copy

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference over largest value, against a float64 result."""


@dataclass(frozen=True)
class CheckGradsConfig:
    """A layer to check from the command line. ``tokens``: per rank. ``dtype``: float32, bfloat16, float16, float64."""

    hidden: int = 64
    ffn: int = 96
    num_experts: int = 8
    top_k: int = 2
    tokens: int = 37
    backend: str = "auto"
    dtype: str = "float32"
    device: str = "cpu"
    score: Score = "softmax"
    shared_ffn: int = 0
    balance_loss: float = 0.01
    deterministic: bool = True
    tolerance: float | None = None
    seed: int = 0
    cases: tuple[str, ...] = CASES

    def __post_init__(self) -> None:
        if self.torch_dtype not in TOLERANCE:
            raise ConfigError(f"dtype must be float32, bfloat16, float16 or float64; got {self.dtype!r}")
        if self.tokens < 1:
            raise ConfigError(f"tokens must be at least 1; got {self.tokens}")

    @property
    def torch_dtype(self) -> torch.dtype | None:
        found = getattr(torch, self.dtype, None)
        return found if isinstance(found, torch.dtype) else None


def run_check_grads(config: CheckGradsConfig, group: ProcessGroup | None = None) -> GradReport:
    """Build a layer over ``group`` and check it. Collective."""
    router = RouterConfig(config.num_experts, config.top_k, score=config.score, balance_loss=config.balance_loss)
    layer = MoELayer.build(
        MoEConfig(config.hidden, config.ffn, router, shared_ffn=config.shared_ffn),
        group,
        config.backend,
        seed=config.seed,
        options=DispatchOptions(deterministic=config.deterministic),
        dtype=config.torch_dtype,
        device=config.device,
        label="check_grads",
    )
    try:
        return check_grads(
            layer, tokens=config.tokens, seed=config.seed, tolerance=config.tolerance, cases=config.cases
        )
    finally:
        layer.dispatcher.close()


def check_grads(
    layer: MoELayer | Callable[[], MoELayer],
    *,
    tokens: int = 37,
    seed: int = 0,
    tolerance: float | None = None,
    cases: Sequence[str] = CASES,
) -> GradReport:
    """Compare a layer's output and every gradient with one rank's and with float64. Collective over its group.

    The layer is left as it was: no ``.grad``, weight or counter is touched. Its capacity, which bounds each rank's
    rows and so means something else on one rank, is off meanwhile. Every rank needs memory for all experts, three
    times over in float64.

    Args:
        layer: the layer, or a function that builds it.
        tokens: per rank in ordinary cases.
        seed: of the inputs.
        tolerance: largest difference over largest value where equal bits are not demanded; by dtype if not given.
        cases: which of ``CASES`` to run.

    Returns:
        The same report on every rank. ``report.ok`` says whether all is right; ``print(report)`` shows a table.

    Raises:
        ConfigError: an unknown case.
    """
    if unknown := [case for case in cases if case not in CASES]:
        raise ConfigError(f"unknown case {unknown[0]!r}; known: {', '.join(CASES)}")
    layer = layer if isinstance(layer, MoELayer) else layer()
    dispatcher = layer.dispatcher
    weight = layer.experts.w13
    shape = CaseShape(
        tokens,
        layer.router.hidden,
        layer.router.config.num_experts,
        layer.num_experts,
        layer.router.config.top_k,
        weight.dtype,
        weight.device,
    )
    allowed = TOLERANCE[weight.dtype] if tolerance is None else tolerance
    # Parts of an expert add up in another order than its whole does.
    exact = dispatcher.options.deterministic and weight.device.type == "cpu" and layer.sizes["etp"] == 1
    alone, wide = single_rank_copy(layer), single_rank_copy(layer, torch.float64)
    found: list[Comparison] = []
    with _undisturbed(layer):
        # The copies count the load of the whole batch by themselves.
        alone.router.training = wide.router.training = layer.router.training
        for case in cases:
            batches = [make_batch(case, shape, seed, r, dispatcher.world) for r in range(dispatcher.world)]
            found += _check_case(case, layer, alone, wide, batches, exact, allowed)
    return GradReport(dispatcher.world, dispatcher.name, tuple(_worst(found, dispatcher.group, weight.device)))


@contextmanager
def _undisturbed(layer: MoELayer) -> Iterator[None]:
    """Capacity off; auxiliary losses off unless they are those of the global batch; counters put back."""
    capacity, training, load, losses = (
        layer.capacity,
        layer.router.training,
        layer.router.load_E.clone(),
        layer.router.losses,
    )
    router = layer.router
    whole_batch = layer.dispatcher.world == 1 or router.group is layer.dispatcher.group
    layer.capacity = None
    router.training = whole_batch and router.config.balance_form == "batch"
    router.losses = {}
    try:
        yield
    finally:
        layer.capacity, router.training, router.losses = capacity, training, losses
        router.load_E.copy_(load)


Forward = Callable[[MoELayer, Tensor, Routing | None], Tensor]


def _run(layer: MoELayer, batch: Batch, forward: Forward) -> dict[str, Tensor]:
    """Output and gradients by name; those of parameters are zeros where autograd has none."""
    x_TD = batch.x_TD.clone().requires_grad_()
    inputs, names, routing = [x_TD], ["input"], None
    if batch.ids_TK is not None and batch.weights_TK is not None:
        weights_TK = batch.weights_TK.clone().requires_grad_()
        routing = Routing(batch.ids_TK, weights_TK)
        inputs.append(weights_TK)
        names.append("routing weights")
    for name, parameter in layer.named_parameters():
        inputs.append(parameter)
        names.append(name)
    y_TD = forward(layer, x_TD, routing)
    grads = torch.autograd.grad(y_TD, inputs, batch.grad_TD.to(y_TD.dtype), allow_unused=True)
    found = {
        name: torch.zeros_like(tensor) if grad is None else grad
        for name, tensor, grad in zip(names, inputs, grads, strict=True)
    }
    return {"output": y_TD.detach(), **found}


def _layer_forward(layer: MoELayer, x_TD: Tensor, routing: Routing | None) -> Tensor:
    y_TD: Tensor = layer(x_TD, routing)
    return y_TD


def plain_forward(layer: MoELayer, x_TD: Tensor, routing: Routing) -> Tensor:
    """The layer's output by a loop over its experts in plain torch; all experts must be here. No auxiliary losses."""
    experts, zero, real = layer.experts, layer.zero_experts, layer.dispatcher.num_experts
    y_TD = torch.zeros_like(x_TD)
    for e in range(real + zero.identity):
        token, slot = (routing.ids_TK == e).nonzero(as_tuple=True)
        rows = x_TD[token]
        if e < real:
            w13, w2 = (w[e].t() if not experts.transposed else w[e] for w in (experts.w13, experts.w2))
            h = rows @ w13 if experts.b13 is None else rows @ w13 + experts.b13[e]
            rows = experts.activation.fn(h) @ w2
            rows = rows if experts.b2 is None else rows + experts.b2[e]
        y_TD = y_TD.index_add(0, token, rows * routing.weights_TK[token, slot, None].to(rows.dtype))
    shared = layer.shared
    if shared is not None:
        out = shared.activation.fn(x_TD @ shared.w13.t()) @ shared.w2.t()
        y_TD = y_TD + (out if shared.gate is None else torch.sigmoid(x_TD @ shared.gate.t()) * out)
    return y_TD


def _check_case(
    case: str,
    layer: MoELayer,
    alone: MoELayer,
    wide: MoELayer,
    batches: list[Batch],
    exact: bool,
    allowed: float,
) -> list[Comparison]:
    rank, world = layer.dispatcher.rank, layer.dispatcher.world
    whole = joined(batches)
    mine = _run(layer, batches[rank], _layer_forward)
    mine = {name: _summed(name, value, layer) for name, value in mine.items()}
    first = sum(b.x_TD.shape[0] for b in batches[:rank])
    tokens = slice(first, first + batches[rank].x_TD.shape[0])

    def own(name: str, value: Tensor) -> Tensor:
        if name in ("output", "input", "routing weights"):
            return value[tokens]
        sharding = layer.shardings().get(name)
        return value if sharding is None else sharding.take(value, layer.place, layer.sizes)

    found = []
    one = _run(alone, whole, _layer_forward)
    if world > 1:
        for name, value in mine.items():
            replicated = name.startswith(("router.", "shared."))
            demanded = None if exact and not replicated else allowed
            found.append(compare(case, name, "EP 1", value, own(name, one[name]), demanded))
    # float64 must not choose other experts where two are nearly equal, so it is told the choice.
    ids_TK = alone.router(whole.x_TD).ids_TK if whole.ids_TK is None else None

    def plain(reference: MoELayer, x_TD: Tensor, routing: Routing | None) -> Tensor:
        if routing is None:
            routing = reference.router(x_TD, ids_TK=ids_TK)
        y_TD = plain_forward(reference, x_TD, routing)
        return y_TD if routing.aux_loss is None else attach_loss(y_TD, routing.aux_loss)

    truth = _run(wide, _double(whole), plain)
    for name, value in mine.items():
        found.append(compare(case, name, "float64", value, own(name, truth[name]), allowed))
    return found


def _double(batch: Batch) -> Batch:
    weights = None if batch.weights_TK is None else batch.weights_TK.double()
    return replace(batch, x_TD=batch.x_TD.double(), grad_TD=batch.grad_TD.double(), weights_TK=weights)


def _summed(name: str, value: Tensor, layer: MoELayer) -> Tensor:
    """Gradients of replicated parameters are summed over the ranks, as a training loop does."""
    group = layer.dispatcher.group
    if group is None or not name.startswith(("router.", "shared.")):
        return value
    total = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value.clone()
    dist.all_reduce(total, group=group)
    return total


def _worst(found: list[Comparison], group: ProcessGroup | None, device: torch.device) -> list[Comparison]:
    """Each comparison's worst over the ranks."""
    if group is None or dist.get_world_size(group) == 1 or not found:
        return found
    numbers = torch.tensor(
        [[float(not c.equal_bits), c.max_abs, c.max_rel, c.max_ulp] for c in found], dtype=torch.float64, device=device
    )
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    return [
        replace(c, equal_bits=not differs, max_abs=max_abs, max_rel=max_rel, max_ulp=max_ulp)
        for c, (differs, max_abs, max_rel, max_ulp) in zip(found, numbers.tolist(), strict=True)
    ]


__all__ = [
    "CASES",
    "CheckGradsConfig",
    "Comparison",
    "GradReport",
    "Score",
    "check_grads",
    "plain_forward",
    "run_check_grads",
    "tokens_of",
]
