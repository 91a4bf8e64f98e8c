"""Predict the seconds of a published training step.

Unknown settings of a source (degrees, micro-batches, virtual stages, recomputation) are set to the fastest values that
fit into memory. The memory model is that of Megatron and PyTorch's FSDP, which reshard weights after each pass and
shard shared experts over tp. If the source states the recomputation, memory is not checked, because the step ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from benchmarks.plan_validation.published import StepCase
from benchmarks.plan_validation.validate import OutOfMemory
from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.shape import ModelShape
from moe_plan.machine.hardware_table import cluster_named
from moe_plan.model.files import model_named
from moe_plan.model.load import Workload
from moe_plan.model.mapping import MICRO_BATCHES, RECOMPUTE, Mapping
from moe_plan.model.memory import MemoryPolicy
from moe_plan.search.request import PlanRequest
from moe_plan.search.space import SearchSpace

POLICY = MemoryPolicy(cut_shared=True, reshard=True, outputs=True)


def predict_step(case: StepCase) -> float | OutOfMemory:
    """Return the predicted seconds of the step, or the smallest missing memory if no mapping fits.

    Raises:
        ConfigError: no mapping of the case is valid.
    """
    chosen = choice(case)
    return chosen if isinstance(chosen, OutOfMemory) else chosen[1]


def choice(case: StepCase) -> tuple[Mapping, float] | OutOfMemory:
    """Return the mapping that is chosen for ``case`` and its seconds. Raises the errors of ``predict_step``."""
    shape, cluster = model_named(case.model), cluster_named(case.machine, case.gpus)
    best: tuple[Mapping, float] | None = None
    missing: list[int] = []
    load = Workload.assumed(case.seq_len, case.dtype, case.capacity)
    options = [one for one in RECOMPUTE if case.recompute in (None, one)]
    request = PlanRequest(shape, cluster, load, case.global_batch, POLICY)
    for mapping in _mappings(case, request):
        for recompute in options:
            candidate = replace(mapping, recompute=recompute)
            try:
                fit, model = request.fit(candidate), request.model(candidate)
            except ConfigError:  # degrees, layers or the batch are not divisible
                break
            missing.append(fit.missing)
            if fit or case.recompute is not None:  # more recomputation would be slower
                seconds = model.predict().seconds
                best = (candidate, seconds) if best is None or seconds < best[1] else best
                break
    if best is None and not missing:
        raise ConfigError(f"{case.model} on {case.gpus} {case.machine}: no mapping with {case.mapping!r} is valid")
    return OutOfMemory(min(missing)) if best is None else best


def _mappings(case: StepCase, request: PlanRequest) -> Iterator[Mapping]:
    """Yield the mappings with all values of the unknown settings except recomputation."""
    shape, space = request.shape, SearchSpace.of(dispatcher=None if case.dispatcher == "auto" else case.dispatcher)
    for degrees in product(*(_degrees(axis, case, shape) for axis in case.free)):
        text = ",".join(filter(None, [case.mapping, *map("{}={}".format, case.free, degrees)]))
        try:
            first = Mapping.parse(text, case.gpus, coupled=case.coupled, sharding=case.sharding, overlap=case.overlap)
        except ConfigError:
            continue
        layers = shape.layers // first.parallel.pp
        virtual = [v for v in range(1, layers + 1) if not layers % v] if first.parallel.pp > 1 else [1]
        virtual = [first.virtual] if "vpp" in text else virtual
        sizes = MICRO_BATCHES if case.micro_batch is None else (case.micro_batch,)
        for vpp, micro_batch, dispatcher in product(virtual, sizes, space.dispatchers(request, first.parallel)):
            yield replace(first, virtual=vpp, micro_batch=micro_batch, dispatcher=dispatcher)


def _degrees(axis: str, case: StepCase, shape: ModelShape) -> list[int]:
    """Return the powers of two to try. Tensor parallelism is limited to one host of 8 accelerators."""
    limit = {"tp": 8, "etp": 8, "ep": shape.experts}.get(axis, case.gpus)
    return [1 << power for power in range(limit.bit_length()) if 1 << power <= min(limit, case.gpus)]
