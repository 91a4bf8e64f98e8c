"""A user's router in place of ``Router``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_comm.errors import ConfigError, InputError
from moe_comm.layers.moe.config import MoEGroups, token_group
from moe_comm.layers.moe.router import Router, RouterConfig, Routing, expert_counts
from moe_comm.layers.moe.trial import materialized
from moe_comm.layers.parallel.recompute import recomputing

TOKENS = 8
"""Number of random tokens with which a router is tried."""


class ModuleRouter(Router):
    """Runs a user's router: a module, or another callable, that maps tokens [T, D] to logits or to a routing.

    Args:
        function: returns logits [T, E], from which the experts are selected as ``config`` describes; ids and weights
            [T, K], in any order; or a ``Routing``. The parameters of a module are replicated parameters of the layer;
            those of another callable belong to the caller.
        config: numbers of experts; for logits, also how to select them.
        runs_empty: the function takes zero tokens.
        dtype, device: of the placeholder of ``weight`` if the function has no parameters.

    Attributes:
        weight: the first parameter of the module, preferably one that requires gradients; else a placeholder.
    """

    placeholder: Tensor

    def __init__(
        self,
        hidden: int,
        config: RouterConfig,
        groups: MoEGroups,
        function: Callable[[Tensor], Any],
        *,
        runs_empty: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(
            hidden, config, token_group(groups), sequence_group=groups.sequence, dtype=dtype, device=device
        )
        self.function, self.runs_empty = function, runs_empty

    def _create_parameters(self, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        self.bias = None
        self.register_buffer("placeholder", torch.empty(0, dtype=dtype, device=device), persistent=False)

    @property
    def weight(self) -> Any:  # type: ignore[override]
        found = list(self.parameters())
        return next((param for param in found if param.requires_grad), found[0] if found else self.placeholder)

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Reset the counters. The parameters of the user's module keep their values."""
        self.load_E.zero_()
        self.invalid.zero_()

    def forward(
        self, x_TD: Tensor, num_sequences: int = 1, ids_TK: Tensor | None = None, mask_N: Tensor | None = None
    ) -> Routing:
        """Route tokens; see ``Router.forward``. Replayed ids are possible for logits only.

        Raises:
            InputError: the function returned something else than when the layer was built.
        """
        if not len(x_TD) and not self.runs_empty:
            # Gradients of zeros for the parameters, as DDP waits for them.
            zero = sum((param.reshape(-1)[:0].sum() for param in self.parameters()), x_TD.sum())
            weights_TK = x_TD.new_zeros(0, self.config.top_k, dtype=torch.float32) + zero
            return Routing(weights_TK.detach().long(), weights_TK)
        result = routing_of(self.function(x_TD), len(x_TD), self.config.num_choices)
        if isinstance(result, Tensor):
            wide_TE = result.to(torch.promote_types(result.dtype, torch.float32))
            return self._select(wide_TE, num_sequences, ids_TK, mask_N)
        if ids_TK is not None:
            raise InputError("this layer's router selects experts itself, so ids cannot be given to it")
        if self.training and not recomputing():
            self.load_E.add_(expert_counts(result.ids_TK, self.config.num_choices))
        return result


def routing_of(result: Any, tokens: int, experts: int) -> Routing | Tensor:
    """Return what a user's router returned: a routing, or logits [T, E].

    Raises:
        InputError: it is neither.
    """
    if isinstance(result, Routing):
        return result
    values = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, tuple | list) else []
    shapes = [list(value.shape) if isinstance(value, Tensor) else type(value).__name__ for value in values]
    if len(values) == 1 and shapes[0] == [tokens, experts] and values[0].is_floating_point():
        logits_TE: Tensor = values[0]
        return logits_TE
    if len(values) == 2 and shapes[0] == shapes[1] and len(shapes[0]) == 2 and shapes[0][0] == tokens and shapes[0][1]:
        ids_TK, weights_TK = sorted(values, key=Tensor.is_floating_point)
        if not ids_TK.is_floating_point() and weights_TK.is_floating_point():
            return Routing(ids_TK.long(), weights_TK)
    raise InputError(
        f"a router must map {tokens} tokens to logits [{tokens}, {experts}], to expert ids and weights [{tokens}, K], "
        f"or to a moe_comm.Routing; it returned {shapes or type(result).__name__}"
    )


def try_router(
    function: Callable[[Tensor], Any], hidden: int, num_experts: int, device: torch.device, dtype: torch.dtype
) -> tuple[int, bool]:
    """Run a user's router on random tokens: a copy in fp32, if it is a module.

    Args:
        device, dtype: of the tokens.

    Returns:
        K, or 0 for a router that returns logits; and whether it takes zero tokens.

    Raises:
        ConfigError: it returns something else, or other experts than ``num_experts``.
    """
    run = function
    if isinstance(function, nn.Module):
        run, dtype = materialized(function, device, torch.float32), torch.float32
    x_TD = torch.randn(TOKENS, hidden, device=device, dtype=torch.float32).to(dtype)
    name = type(function).__name__ if isinstance(function, nn.Module) else getattr(function, "__name__", "the router")
    try:
        with torch.no_grad():
            result = routing_of(run(x_TD), TOKENS, num_experts)
    except InputError as error:
        raise ConfigError(f"{name} does not route among {num_experts} experts: {error}") from error
    except Exception as error:  # of the user's code
        raise ConfigError(
            f"{name} does not run on tokens [{TOKENS}, {hidden}] of the experts' hidden size: "
            f"{type(error).__name__}: {error}"
        ) from error
    if isinstance(result, Routing) and bool(((result.ids_TK < -1) | (result.ids_TK >= num_experts)).any()):
        raise ConfigError(
            f"{name} selects the experts {int(result.ids_TK.min())} to {int(result.ids_TK.max())}; there are "
            f"{num_experts} experts"
        )
    try:
        with torch.no_grad():
            routing_of(run(x_TD[:0]), 0, num_experts)
        runs_empty = True
    except Exception:
        runs_empty = False
    return 0 if isinstance(result, Tensor) else result.ids_TK.shape[1], runs_empty


def linear_router(linear: nn.Linear, config: RouterConfig, groups: MoEGroups) -> Router:
    """Return a router with the weights of ``linear``."""
    weight, bias = linear.weight, linear.bias
    config = replace(config, linear_bias=bias is not None)
    factory: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
    router = Router(linear.in_features, config, token_group(groups), sequence_group=groups.sequence, **factory)
    pairs = [(router.weight, weight)] + ([(router.bias, bias)] if router.bias is not None else [])
    for ours, theirs in pairs:
        ours.data.copy_(theirs.detach())
        ours.requires_grad_(theirs.requires_grad)
    return router
