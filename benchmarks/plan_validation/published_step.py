"""Seconds of a published training step, for ``benchmarks.plan_validation.validate``.

What a source does not tell is taken as its authors would have chosen it: of all degrees that are free, micro-batches,
virtual stages and ways to recompute, the fastest that fits an accelerator. Memory is that of trainers that give weights
back after each pass of "fsdp" and cut shared experts by tp (Megatron, PyTorch's FSDP). Where a source tells what was
computed again, nothing is chosen by memory: it ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from benchmarks.plan_validation.published import StepCase
from benchmarks.plan_validation.validate import OutOfMemory
from moe_comm.errors import ConfigError
from moe_comm.plan.machine.hardware_table import cluster_named
from moe_comm.plan.model.files import model_named
from moe_comm.plan.model.load import Load
from moe_comm.plan.model.mapping import MICRO_BATCHES, RECOMPUTE, Mapping
from moe_comm.plan.model.memory import Policy
from moe_comm.plan.model.shape import ModelShape
from moe_comm.plan.search.question import Question
from moe_comm.plan.search.space import Space

POLICY = Policy(cut_shared=True, reshard=True)


def predict_step(case: StepCase) -> float | OutOfMemory:
    """Seconds of the step that ``case`` describes, or what the mapping that comes nearest to fitting lacks.

    Raises:
        ConfigError: no mapping of the case can run, whatever the memory.
    """
    chosen = choice(case)
    return chosen if isinstance(chosen, OutOfMemory) else chosen[1]


def choice(case: StepCase) -> tuple[Mapping, float] | OutOfMemory:
    """The mapping that is taken for ``case`` and its seconds. Raises as ``predict_step`` does."""
    shape, cluster = model_named(case.model), cluster_named(case.machine, case.gpus)
    best: tuple[Mapping, float] | None = None
    missing: list[int] = []
    load = Load.assumed(case.seq_len, case.dtype, case.capacity)
    again = [one for one in RECOMPUTE if case.recompute in (None, one)]
    question = Question(shape, cluster, load, case.global_batch, POLICY)
    for mapping in _mappings(case, question):
        for recompute in again:
            tried = replace(mapping, recompute=recompute)
            try:
                fit, model = question.fit(tried), question.model(tried)
            except ConfigError:  # degrees, layers or a batch that cannot be cut so
                break
            missing.append(fit.missing)
            if fit or case.recompute is not None:  # to do more again takes longer
                seconds = model.predict().seconds
                best = (tried, seconds) if best is None or seconds < best[1] else best
                break
    if best is None and not missing:
        raise ConfigError(f"{case.model} on {case.gpus} {case.machine}: no mapping {case.mapping!r} can run")
    return OutOfMemory(min(missing)) if best is None else best


def _mappings(case: StepCase, question: Question) -> Iterator[Mapping]:
    """All that the source leaves open but recomputing."""
    shape, space = question.shape, Space.of(dispatcher=None if case.dispatcher == "auto" else case.dispatcher)
    for degrees in product(*(_degrees(axis, case, shape) for axis in case.free)):
        text = ",".join(filter(None, [case.mapping, *map("{}={}".format, case.free, degrees)]))
        try:
            first = Mapping.parse(text, case.gpus, coupled=case.coupled, sharding=case.sharding, overlap=case.overlap)
        except ConfigError:
            continue
        layers = shape.layers // first.parallel.pp
        virtual = [v for v in range(1, layers + 1) if not layers % v] if first.parallel.pp > 1 else [1]
        told = [first.virtual] if "vpp" in text else virtual
        sizes = MICRO_BATCHES if case.micro_batch is None else (case.micro_batch,)
        for vpp, micro_batch, dispatcher in product(told, sizes, space.dispatchers(question, first.parallel)):
            yield replace(first, virtual=vpp, micro_batch=micro_batch, dispatcher=dispatcher)


def _degrees(axis: str, case: StepCase, shape: ModelShape) -> list[int]:
    """Powers of two that can be tried; tensor parallelism stays on a host, as a rule."""
    most = {"tp": 8, "etp": 8, "ep": shape.experts}.get(axis, case.gpus)
    return [1 << power for power in range(most.bit_length()) if 1 << power <= min(most, case.gpus)]
