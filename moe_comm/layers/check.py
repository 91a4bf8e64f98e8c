"""``check_grads``: compare the gradients of an expert-parallel layer with those of one rank and of float64.

Wrong gradients behind a correct loss are a common and silent error. Each rank runs the layer on its own tokens. Then it
runs, without communication, a copy that holds all experts on the tokens of all ranks, and a float64 loop over experts
in plain torch:

    output, input gradient, routing-weight gradients, expert gradients    EP n == EP 1 in all bits (deterministic)
    router and shared-expert gradients, summed over the ranks             EP n  ~ EP 1
    all of them                                                           EP n  ~ float64
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.dispatch import DROPPED, DispatchOptions
from moe_comm.dispatch.selection.factory import new_dispatcher
from moe_comm.errors import ConfigError
from moe_comm.layers.data_parallel.state import gather_state_dict
from moe_comm.layers.moe.experts import Experts
from moe_comm.layers.moe.layer import MoEConfig, MoELayer
from moe_comm.layers.moe.losses import attach_loss
from moe_comm.layers.moe.module_router import ModuleRouter
from moe_comm.layers.moe.router import Router, RouterConfig, Routing, Score

CASES = (
    "routed",
    "unequal tokens",
    "no tokens on rank 0",
    "no tokens anywhere",
    "empty experts",
    "all to one expert",
    "dropped slots",
    "all dropped",
)


@dataclass(frozen=True)
class CheckBatch:
    """Input of one rank. If ``ids_TK`` and ``weights_TK`` are None, the layer's router routes."""

    x_TD: Tensor
    grad_TD: Tensor
    ids_TK: Tensor | None
    weights_TK: Tensor | None


def tokens_of(case: str, tokens: int, rank: int, world: int) -> int:
    """Return the number of tokens of ``rank``."""
    if case == "no tokens anywhere" or (case == "no tokens on rank 0" and rank == 0):
        return 0
    if case == "unequal tokens":
        return tokens * (world - rank) // world + 3 * rank
    return tokens


def _expert_ids(case: str, tokens: int, layer: MoELayer, generator: torch.Generator) -> Tensor:
    choices, top_k = layer.router.config.num_choices, layer.router.config.top_k
    usable = max(top_k, choices // 4) if case == "empty experts" else choices
    ids_TK = _random(torch.rand, (tokens, usable), generator).topk(top_k, dim=1).indices
    if case == "all to one expert":
        ids_TK = torch.full_like(ids_TK, DROPPED)
        ids_TK[:, -1] = layer.num_experts - 1
    if case == "dropped slots":
        ids_TK = ids_TK.masked_fill(_random(torch.rand, ids_TK.shape, generator) < 0.4, DROPPED)
    if case == "all dropped":
        ids_TK = torch.full_like(ids_TK, DROPPED)
    return ids_TK


def _random(draw: Callable[..., Tensor], shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return draw(*shape, generator=generator, dtype=torch.float32, device="cpu")


def make_batch(case: str, layer: MoELayer, tokens: int, seed: int, rank: int) -> CheckBatch:
    """Return the input of ``rank`` for ``layer``; each rank can compute the inputs of all ranks.

    tokens: number per rank, unless the case changes it.
    """
    generator = torch.Generator().manual_seed((seed * 1009 + CASES.index(case)) * 4099 + rank)
    dtype, device = layer.experts.w13.dtype, layer.experts.w13.device
    tokens = tokens_of(case, tokens, rank, layer.dispatcher.world)
    x_TD, grad_TD = (_random(torch.randn, (tokens, layer.router.hidden), generator) for _ in range(2))
    ids_TK = weights_TK = None
    if case != "routed":
        ids_TK = _expert_ids(case, tokens, layer, generator).to(device)
        wide = torch.promote_types(dtype, torch.float32)
        weights_TK = _random(torch.rand, ids_TK.shape, generator).to(device, wide)
    return CheckBatch(x_TD.to(device, dtype), grad_TD.to(device, dtype), ids_TK, weights_TK)


def concat_batches(batches: list[CheckBatch]) -> CheckBatch:
    """Return the tokens of all ranks as one batch, in order of rank."""

    def cat(tensors: list[Tensor | None]) -> Tensor | None:
        present = [t for t in tensors if t is not None]
        return torch.cat(present) if present else None

    return CheckBatch(
        torch.cat([b.x_TD for b in batches]),
        torch.cat([b.grad_TD for b in batches]),
        cat([b.ids_TK for b in batches]),
        cat([b.weights_TK for b in batches]),
    )


BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def max_ulps(got: Tensor, want: Tensor) -> float:
    """Return the maximum distance in units in the last place of their dtype; inf if only one value is NaN."""
    if not got.numel():
        return 0.0
    if bool((got.isnan() != want.isnan()).any()):
        return float("inf")

    def ordered(x: Tensor) -> Tensor:
        bits = x.nan_to_num(0.0).contiguous().view(BITS[x.dtype])
        lowest = torch.iinfo(bits.dtype).min
        return torch.where(bits < 0, lowest - bits.double(), bits.double())

    return float((ordered(got) - ordered(want)).abs().max())


@dataclass(frozen=True)
class Comparison:
    """Comparison of one tensor of one case with a reference, the worst over all ranks.

    Attributes:
        against: "EP 1" (same layer, one rank holds all experts) or "float64" (plain loop over experts).
        equal_bits: the tensors have equal bits on all ranks.
        max_rel: maximum absolute difference divided by the largest value of the reference.
        max_ulp: maximum difference in units in the last place.
        tolerance: bound on ``max_rel``; None if equal bits are required.
    """

    case: str
    tensor: str
    against: str
    equal_bits: bool
    max_abs: float
    max_rel: float
    max_ulp: float
    tolerance: float | None

    @property
    def ok(self) -> bool:
        """Whether the comparison meets its requirement."""
        return self.equal_bits if self.tolerance is None else self.equal_bits or self.max_rel <= self.tolerance


@dataclass(frozen=True)
class GradReport:
    """Result of ``check_grads``, equal on all ranks; ``str`` returns a table."""

    world: int
    backend: str
    comparisons: tuple[Comparison, ...]

    @property
    def ok(self) -> bool:
        """Whether all comparisons meet their requirements."""
        return all(c.ok for c in self.comparisons)

    @property
    def failures(self) -> tuple[Comparison, ...]:
        """Comparisons beyond their tolerance."""
        return tuple(c for c in self.comparisons if not c.ok)

    def __str__(self) -> str:
        head = ("", "case", "tensor", "against", "bits", "max abs", "max rel", "max ulp", "required")
        rows = [head]
        for c in self.comparisons:
            rows.append(
                (
                    "ok" if c.ok else "WRONG",
                    c.case,
                    c.tensor,
                    c.against,
                    "equal" if c.equal_bits else "differ",
                    f"{c.max_abs:.2e}",
                    f"{c.max_rel:.2e}",
                    f"{c.max_ulp:.0f}" if c.against == "EP 1" else "-",
                    "equal bits" if c.tolerance is None else f"rel <= {c.tolerance:.0e}",
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        verdict = "all right" if self.ok else f"{len(self.failures)} of {len(self.comparisons)} WRONG"
        return "\n".join([*lines, f"{self.world} rank(s), {self.backend}: {verdict}"])


def compare(case: str, tensor: str, against: str, got: Tensor, want: Tensor, tolerance: float | None) -> Comparison:
    """Compare two tensors on this rank; ``want`` may have a wider dtype than ``got``."""
    got, want = got.detach(), want.detach()
    if got.shape != want.shape:
        return Comparison(case, tensor, against, False, float("inf"), float("inf"), float("inf"), tolerance)
    difference = (got.double() - want.double()).abs()
    difference = torch.where(got.double().eq(want.double()), 0.0, difference).nan_to_num(float("inf"), float("inf"))
    max_abs = float(difference.max()) if got.numel() else 0.0
    largest = float(want.double().nan_to_num(0.0).abs().max()) if got.numel() else 0.0
    max_rel = max_abs / largest if largest else (0.0 if not max_abs else float("inf"))
    same_dtype = got.dtype == want.dtype
    equal = torch.equal(got, want) if same_dtype else max_abs == 0.0
    return Comparison(
        case, tensor, against, equal, max_abs, max_rel, max_ulps(got, want) if same_dtype else 0.0, tolerance
    )


def single_rank_copy(layer: MoELayer, dtype: torch.dtype | None = None) -> MoELayer:
    """Return a copy of ``layer`` in which this rank holds all experts. Collective over the layer's group.

    Args:
        dtype: dtype of the copy; None: the layer's.

    Raises:
        ConfigError: the layer does not consist of this library's router and experts.
    """
    router, experts = layer.router, layer.experts
    if not isinstance(router, Router) or isinstance(router, ModuleRouter) or not isinstance(experts, Experts):
        raise ConfigError(
            f"expected a layer of Router and Experts; got {type(router).__name__} and {type(experts).__name__}"
        )
    state = gather_state_dict(layer)
    w13 = experts.w13
    all_experts = Experts(
        layer.num_experts,
        experts.hidden,
        experts.ffn,
        experts.activation,
        bias=experts.b13 is not None,
        transposed=experts.transposed,
        dtype=w13.dtype,
        device=w13.device,
    )
    all_experts.recompute, all_experts.gemm_dtype = experts.recompute, experts.gemm_dtype
    single_router = Router(router.hidden, router.config, None, dtype=router.weight.dtype, device=router.weight.device)
    copied = MoELayer(
        single_router,
        all_experts,
        new_dispatcher(layer.num_experts, options=layer.dispatcher.options),
        copy.deepcopy(layer.shared),
        capacity=layer.capacity,
        label=layer.label,
    )
    copied.load_state_dict(state)
    copied.train(layer.training)
    return copied if dtype is None else copied.to(dtype)


TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Maximum difference from the float64 result, divided by the largest value."""

REPLICATED = ("router.", "shared.")
"""Prefixes of replicated parameters."""


@dataclass(frozen=True)
class CheckGradsConfig:
    """Layer and checks of ``moe-comm check-grads``.

    Args:
        tokens: tokens per rank.
        dtype: float32, bfloat16, float16 or float64.
        tolerance, cases: see ``check_grads``.
    """

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
        """The dtype that ``dtype`` names; None if there is none."""
        dtype = getattr(torch, self.dtype, None)
        return dtype if isinstance(dtype, torch.dtype) else None


def run_check_grads(config: CheckGradsConfig, group: ProcessGroup | None = None) -> GradReport:
    """Build a layer over ``group`` and check it. Collective."""
    router = RouterConfig(config.num_experts, config.top_k, score=config.score, balance_loss=config.balance_loss)
    layer = MoELayer.build(
        MoEConfig(config.hidden, config.ffn, router, shared_ffn=config.shared_ffn),
        group,
        backend=config.backend,
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
    """Compare a layer's output and all gradients with those of one rank and of float64. Collective over its group.

    The layer is unchanged afterwards: gradients, weights and counters are preserved. Its capacity is disabled, because
    it bounds the rows of each rank and is not comparable with one rank. Each rank needs memory for all experts, three
    times in float64.

    Args:
        layer: the layer, or a function that builds it.
        tokens: tokens per rank in ordinary cases.
        tolerance: maximum difference divided by the largest value, where equal bits are not required; None: by dtype.
        cases: the cases of ``CASES`` to run.

    Returns:
        The same report on all ranks. ``report.ok`` is the result; ``print(report)`` shows a table.

    Raises:
        ConfigError: an unknown case, or a tolerance that is negative, NaN or infinite.
    """
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise ConfigError(f"tolerance must be a finite number of at least 0; got {tolerance}")
    if unknown := [case for case in cases if case not in CASES]:
        raise ConfigError(f"unknown case {unknown[0]!r}; known: {', '.join(CASES)}")
    layer = layer if isinstance(layer, MoELayer) else layer()
    dispatcher, weight = layer.dispatcher, layer.experts.w13
    allowed = TOLERANCE[weight.dtype] if tolerance is None else tolerance
    # With etp > 1 the partial sums of an expert's slices are added, so the summation order differs from one rank's.
    exact = dispatcher.options.deterministic and weight.device.type == "cpu" and layer.sizes["etp"] == 1
    single_rank, float64_copy = single_rank_copy(layer), single_rank_copy(layer, torch.float64)
    comparisons: list[Comparison] = []
    with _preserve_state(layer):
        # The copies run the full batch, so they count its load without communication.
        single_rank.router.training = float64_copy.router.training = layer.router.training
        for case in cases:
            batches = [make_batch(case, layer, tokens, seed, r) for r in range(dispatcher.world)]
            comparisons += _check_case(case, layer, single_rank, float64_copy, batches, exact, allowed)
    return GradReport(
        dispatcher.world, dispatcher.name, tuple(_max_over_ranks(comparisons, dispatcher.group, weight.device))
    )


@contextmanager
def _preserve_state(layer: MoELayer) -> Iterator[None]:
    """Disable capacity, and auxiliary losses unless they cover the global batch; restore counters afterwards."""
    router = layer.router
    saved = layer.capacity, router.training, router.losses, router.load_E.clone()
    global_losses = layer.dispatcher.world == 1 or router.group is layer.dispatcher.group
    layer.capacity = None
    router.training = global_losses and router.config.balance_form == "batch"
    router.losses = {}
    try:
        yield
    finally:
        layer.capacity, router.training, router.losses, load_E = saved
        router.load_E.copy_(load_E)


def _run(layer: MoELayer, batch: CheckBatch, forward: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Return output and gradients by name; parameters without a gradient have zeros."""
    inputs, routing = {"input": batch.x_TD.clone().requires_grad_()}, None
    if batch.ids_TK is not None and batch.weights_TK is not None:
        inputs["routing weights"] = batch.weights_TK.clone().requires_grad_()
        routing = Routing(batch.ids_TK, inputs["routing weights"])
    inputs |= dict(layer.named_parameters())
    y_TD = forward(layer, inputs["input"], routing)
    grad_TD = batch.grad_TD.to(y_TD.dtype)
    grads = torch.autograd.grad(y_TD, list(inputs.values()), grad_TD, allow_unused=True, materialize_grads=True)
    return {"output": y_TD.detach(), **dict(zip(inputs, grads, strict=True))}


def plain_forward(layer: MoELayer, x_TD: Tensor, routing: Routing) -> Tensor:
    """Compute the layer's output by a loop over experts in plain torch, without auxiliary losses; needs all experts."""
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
    single_rank: MoELayer,
    float64_copy: MoELayer,
    batches: list[CheckBatch],
    exact: bool,
    allowed: float,
) -> list[Comparison]:
    rank, world = layer.dispatcher.rank, layer.dispatcher.world
    full_batch = concat_batches(batches)
    local_results = _run(layer, batches[rank], MoELayer.__call__)
    local_results = {name: _sum_replicated(name, value, layer) for name, value in local_results.items()}
    first = sum(b.x_TD.shape[0] for b in batches[:rank])
    tokens = slice(first, first + batches[rank].x_TD.shape[0])

    def local_part(name: str, value: Tensor) -> Tensor:
        if name in ("output", "input", "routing weights"):
            return value[tokens]
        sharding = layer.shardings().get(name)
        return value if sharding is None else sharding.take(value, layer.place, layer.sizes)

    comparisons = []
    if world > 1:
        reference = _run(single_rank, full_batch, MoELayer.__call__)
        for name, value in local_results.items():
            # The gradient of an expert that is lent is the sum of those of several ranks.
            summed = layer.copies is not None and name.startswith("experts.")
            required = None if exact and not summed and not name.startswith(REPLICATED) else allowed
            comparisons.append(compare(case, name, "EP 1", value, local_part(name, reference[name]), required))
    # In float64 the router may select other experts if two scores are nearly equal, so reuse the selection.
    ids_TK = single_rank.router(full_batch.x_TD).ids_TK if full_batch.ids_TK is None else None

    def float64_forward(copy: MoELayer, x_TD: Tensor, routing: Routing | None) -> Tensor:
        if routing is None:
            routing = copy.router(x_TD, ids_TK=ids_TK)
        y_TD = plain_forward(copy, x_TD, routing)
        return y_TD if routing.aux_loss is None else attach_loss(y_TD, routing.aux_loss)

    weights_TK = None if full_batch.weights_TK is None else full_batch.weights_TK.double()
    x_TD, grad_TD = full_batch.x_TD.double(), full_batch.grad_TD.double()
    float64_batch = replace(full_batch, x_TD=x_TD, grad_TD=grad_TD, weights_TK=weights_TK)
    reference = _run(float64_copy, float64_batch, float64_forward)
    for name, value in local_results.items():
        comparisons.append(compare(case, name, "float64", value, local_part(name, reference[name]), allowed))
    return comparisons


def _sum_replicated(name: str, value: Tensor, layer: MoELayer) -> Tensor:
    """Sum the gradients of replicated parameters over the ranks, as a training loop does."""
    group = layer.dispatcher.group
    if group is None or not name.startswith(REPLICATED):
        return value
    total = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value.clone()
    dist.all_reduce(total, group=group)
    return total


def _max_over_ranks(
    comparisons: list[Comparison], group: ProcessGroup | None, device: torch.device
) -> list[Comparison]:
    """Return the worst values of each comparison over the ranks."""
    if group is None or dist.get_world_size(group) == 1 or not comparisons:
        return comparisons
    numbers = torch.tensor(
        [[float(not c.equal_bits), c.max_abs, c.max_rel, c.max_ulp] for c in comparisons],
        dtype=torch.float64,
        device=device,
    )
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    return [
        replace(c, equal_bits=not differs, max_abs=max_abs, max_rel=max_rel, max_ulp=max_ulp)
        for c, (differs, max_abs, max_rel, max_ulp) in zip(comparisons, numbers.tolist(), strict=True)
    ]


__all__ = ["CASES", "CheckGradsConfig", "Comparison", "GradReport", "check_grads", "run_check_grads"]
