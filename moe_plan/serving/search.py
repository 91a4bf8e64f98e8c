"""Search of a mapping for serving: the highest throughput per price under a bound of the time of a step.

For all tp_a and tp_e that fit the memory, n_a near the one that balances the pools, and m up to ``MOST_MICRO_BATCHES``,
a binary search finds the largest micro-batch that fits the KV cache and the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from moe_comm.errors import ConfigError
from moe_plan.machine.collectives import check_positive
from moe_plan.machine.hardware import Cluster
from moe_plan.serving.cost import ServeMapping, ServeModel, StepTimes, usable_memory

TP = (1, 2, 4, 8)
MOST_MICRO_BATCHES, MOST_HOSTS = 4, 4
LARGEST_BATCH = 1 << 16
"""Upper bound of the requests of a micro-batch of a node."""
PRICES = {"h20": 1.85, "l40s": 1.08}
"""Prices of accelerators relative to each other, from MegaScale-Infer's bandwidth and rate per price."""


@dataclass(frozen=True)
class ServePlan:
    """A mapping with its largest batch, and the times of a step of it.

    requests: of a micro-batch of an attention node. price: of all accelerators.
    """

    mapping: ServeMapping
    requests: int
    times: StepTimes
    gpus: tuple[int, int]
    price: float

    @property
    def batch(self) -> int:
        """B: requests of all nodes and micro-batches."""
        return self.requests * self.mapping.m * self.mapping.n_a

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.times.step_s

    @property
    def value(self) -> float:
        """Tokens per second and price."""
        return self.tokens_per_s / self.price


@dataclass(frozen=True, eq=False)
class ServeRequest:
    """What to plan for.

    context: mean tokens of a running request. tpot_s: bound of the time of a step. prices: of accelerators by name;
    1 for others.
    """

    model: ServeModel
    context: float
    tpot_s: float
    prices: Mapping[str, float] = field(default_factory=lambda: PRICES)

    def __post_init__(self) -> None:
        check_positive("request", context=self.context, tpot_s=self.tpot_s)

    def price(self, pool: Cluster) -> float:
        """Return the price of an accelerator."""
        return self.prices.get(pool.accelerator.name, 1.0)

    def best(self, keep: int = 1) -> list[ServePlan]:
        """Return the plans with the highest throughput per price, the best first.

        Raises:
            ConfigError: the weights do not fit, or no step is as short as ``tpot_s``.
        """
        plans = sorted((one for mapping in self._mappings() if (one := self.plan(mapping))), key=lambda one: -one.value)
        if not plans:
            raise ConfigError(
                f"{self.model.shape.name} cannot be served with {self.model.attention.accelerator.name} and "
                f"{self.model.experts.accelerator.name} in {self.tpot_s:g} s per token with {self.context:.0f} "
                "tokens of context: its weights do not fit, or each step takes longer"
            )
        return plans[:keep]

    def plan(self, mapping: ServeMapping) -> ServePlan | None:
        """Return the plan of a mapping with its largest batch; None if not even one request fits."""
        model = self.model
        most = min(int(model.kv_tokens(mapping.tp_a) // (self.context * mapping.m)), LARGEST_BATCH)

        def times(requests: int) -> StepTimes:
            return model.step(mapping, requests, requests * self.context)

        if not model.experts_fit(mapping.tp_e):
            return None
        fits = self._largest(most, lambda requests: times(requests).step_s)
        if not fits:
            return None
        gpus = mapping.n_a * mapping.tp_a, model.shape.experts * mapping.tp_e
        price = gpus[0] * self.price(model.attention) + gpus[1] * self.price(model.experts)
        return ServePlan(mapping, fits, times(fits), gpus, price)

    def colocated(self) -> tuple[int, float]:
        """Return the hosts, and the tokens per second and price, of the whole model on hosts of ``model.attention``.

        It is sharded over the accelerators of a host, and in pipeline stages over up to ``MOST_HOSTS`` hosts, which
        work on batches of their own. 0 hosts: it does not fit.
        """
        model, gpus = self.model, self.model.attention.host_size
        weights = model.other_bytes + model.shape.experts * model.expert_bytes
        results = [(0.0, 0)]
        for hosts in range(1, MOST_HOSTS + 1):
            free = hosts * gpus * usable_memory(model.attention) - weights
            kv_bytes = model.kv_bytes * model.kv_copies(gpus) * self.context
            most = min(int(free // (kv_bytes * hosts)), LARGEST_BATCH)
            batch = self._largest(most, lambda requests: model.colocated_s(requests, requests * self.context, gpus))
            if batch:
                seconds = model.colocated_s(batch, batch * self.context, gpus)
                results.append((batch / seconds / (gpus * self.price(model.attention)), -hosts))
        value, hosts = max(results)
        return -hosts, value

    def _largest(self, most: int, seconds: Callable[[int], float]) -> int:
        """Return the largest number of requests up to ``most`` with a step of at most ``tpot_s``; 0 if none."""
        if most < 1 or seconds(1) > self.tpot_s:
            return 0
        fits, over = 1, most + 1
        while over - fits > 1:
            middle = (fits + over) // 2
            fits, over = (middle, over) if seconds(middle) <= self.tpot_s else (fits, middle)
        return fits

    def _mappings(self) -> Iterator[ServeMapping]:
        for tp_a in TP:
            for tp_e in TP:
                if tp_a > self.model.attention.host_size or tp_e > self.model.experts.host_size:
                    continue
                balanced = self.model.balanced_nodes(self.context, tp_a, tp_e)
                nodes = {max(1, math.floor(balanced * share)) for share in (0.5, 0.75, 1)}
                for n_a in sorted(nodes | {math.ceil(balanced)}):
                    for m in range(1, MOST_MICRO_BATCHES + 1):
                        yield ServeMapping(tp_a, tp_e, n_a, m)


def enough_micro_batches(transfer_s: float, slower_s: float) -> int:
    """Return the smallest m with m T_f >= 2 (T_f + T_c): neither pool waits if T_a = T_e."""
    return math.ceil(2 * (1 + transfer_s / slower_s) - 1e-9)
