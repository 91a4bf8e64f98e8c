"""Recognise what an MoE block of a user's model computes, by running copies of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_comm.errors import UnsupportedModel
from moe_comm.integrations.blocks.adapter import is_inside
from moe_comm.integrations.blocks.block import (
    BlockPlan,
    Convention,
    Probe,
    Probes,
    call_block,
    outputs_of,
    replayed,
    weights_of,
)
from moe_comm.integrations.blocks.find import FoundBlock
from moe_comm.integrations.blocks.signature import different_experts
from moe_comm.layers.moe.formula import ExpertFormula
from moe_comm.layers.moe.recognise import check_expert, recognise_experts
from moe_comm.layers.moe.trial import Trial

TOKENS = 32
"""Number of random tokens of a rank in a check."""


def describe(found: FoundBlock) -> BlockPlan:
    """Return how to run a block, from runs of copies of it.

    Raises:
        UnsupportedModel: its experts, or how it uses their outputs, are not recognised. The message names the reason.
    """
    try:
        # The same random numbers on all ranks.
        with torch.autocast(found.device.type, enabled=False), replayed(found.block, found.device, seed=0):
            return _described(found)
    except Exception as error:  # of the user's code: the other ranks compare weights next
        reason = error if isinstance(error, UnsupportedModel) else f"it raised {type(error).__name__}: {error}"
        raise UnsupportedModel(
            f"{found.name} ({type(found.block).__name__}) looks like an MoE block with {found.num_experts} experts in "
            f"{found.path}, but {reason}. Describe it with moe_comm.block_adapter, or build a moe_comm.MoELayer"
        ) from error


def _described(found: FoundBlock) -> BlockPlan:
    for name, module in () if found.adapter else found.experts.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise UnsupportedModel(f"its experts have dropout {module.p} ({name}); set it to 0")
        if any(True for _ in module.buffers(recurse=False)):
            raise UnsupportedModel(f"its experts have buffers ({name or type(module).__name__})")
    if found.adapter is None:
        prefix = f"{found.path}.".lstrip(".")
        formula, nones = recognise_experts(
            found.experts, found.num_experts, found.device, stacked=found.stacked, prefix=prefix
        )
        for number in [] if found.stacked else different_experts(found, formula.layout.hidden):
            check_expert(formula, list(found.experts.children())[number], number, found.device)
    else:
        formula, nones = found.adapter.formula(found.block), -1
    params = dict(found.block.named_parameters())
    if missing := [name for name in formula.names if name not in params]:
        raise UnsupportedModel(f"{missing[0]} is also another expert's parameter")
    if unknown := [name for name in params if is_inside(name, [found.path]) and name not in formula.names]:
        raise UnsupportedModel(f"{found.path} also has the parameter {unknown[0]}, which is not one of its experts")
    if len({(params[name].dtype, params[name].device) for name in formula.names}) > 1:
        raise UnsupportedModel("the parameters of its experts differ in dtype or device")
    for parts in formula.parts.values():
        if len({params[name].requires_grad for part in parts for name in formula.names_of(part.path)}) > 1:
            raise UnsupportedModel(f"only some of its {' and '.join(part.path for part in parts)} require gradients")
    trial = Trial.of(found.block, formula, found.device, narrow=True)
    block, narrow = trial.copy(), bool(trial.kept)
    try:
        shape = _shape(block, formula.layout.hidden)
    except UnsupportedModel:
        if not narrow:
            raise
        block, narrow = Trial.of(found.block, formula, found.device, narrow=False).copy(), False
        shape = _shape(block, formula.layout.hidden)
    plan = BlockPlan(found.path, formula, "adapter", shape, nones=nones, narrow=narrow, keys=_keys(found, formula))
    if found.adapter is not None and found.adapter.route is not None:
        return replace(plan, adapter=found.adapter)
    copy = replace(found, block=block)
    x = torch.randn(*plan.shape, formula.layout.hidden, dtype=torch.float32, device=found.device)
    return _outputs(copy, replace(plan, convention=_convention(copy, x)), x)


def _keys(found: FoundBlock, formula: ExpertFormula) -> dict[str, int]:
    """Return the number of each expert by its key, in the order of a ``ModuleDict`` of experts; else nothing."""
    experts = dict(found.block.named_modules()).get(found.path)
    if not isinstance(experts, nn.ModuleDict):
        return {}
    names = formula.names_of(formula.parts["down_proj"][0].path)
    numbers = {name.removeprefix(f"{found.path}.").partition(".")[0]: number for number, name in enumerate(names)}
    return {key: numbers[key] for key in experts if key in numbers}


def _shape(block: nn.Module, hidden: int) -> tuple[int, ...]:
    """Return a shape of tokens, without the hidden size, that a block takes: two sequences, or a list of tokens."""
    problem = None
    for shape in ((2, TOKENS // 2), (TOKENS,)):
        x = torch.randn(*shape, hidden, dtype=torch.float32, device=next(block.parameters()).device)
        try:
            with replayed(block, x.device):
                call_block(block, x)
            return shape
        except Exception as error:  # of the user's code
            problem = problem or error
    raise UnsupportedModel(f"it cannot run on tokens [.., {hidden}] alone ({type(problem).__name__}: {problem})")


def _convention(found: FoundBlock, x: Tensor) -> Convention:
    """Return how the block calls its experts, by one call of it."""
    if not found.stacked:
        return "list"
    calls: list[tuple[Any, ...]] = []
    hook = found.experts.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((*args, *kwargs.values())), with_kwargs=True
    )
    try:
        call_block(found.block, x)
    finally:
        hook.remove()
    if len(calls) == 1:
        shape = calls[0][0].shape
        if len(shape) == 3 and shape[0] == found.num_experts:
            return "batches"
        if len(shape) == 2 and len(calls[0]) > 1:
            return "counts"
    raise UnsupportedModel(
        "its experts are not called once, with [E, rows, D] or with rows [R, D] and their counts [E]"
    )


def _outputs(found: FoundBlock, plan: BlockPlan, x: Tensor) -> BlockPlan:
    """Add to a plan the index of the result for the tokens, the module that is added to it, and the top-k."""
    probing = _StandIn(plan.formula.layout.num_experts, plan)
    block = found.block
    parent, _, child = plan.path.rpartition(".")
    setattr(block.get_submodule(parent), child, probing)
    run = partial(_run, block, x)
    try:
        zeros, *units = (run(plan, probe) for probe in ("zeros", *range(plan.passes)))
    except Exception as error:
        raise UnsupportedModel(f"it cannot run with probes ({type(error).__name__}: {error})") from error
    differ = sorted({i for got in units for i, pair in enumerate(zip(zeros, got, strict=True)) if not _equal(*pair)})
    if len(differ) != 1 or zeros[differ[0]].numel() != x.numel() or zeros[differ[0]].shape[-1] != x.shape[-1]:
        raise UnsupportedModel(
            f"the outputs of its experts must reach one of its {len(zeros)} results, of the shape of the tokens; they "
            f"reach {len(differ)}"
        )
    plan = replace(plan, output=differ[0])
    if bool(zeros[plan.output].any()):
        plan = probing.plan = _with_rest(block, plan, x, zeros[plan.output])
    weights, *_ = weights_of(block, plan, partial(call_block, block, x), x.device)
    weights_TD = weights.reshape(-1, plan.passes * x.shape[-1])
    if bool(weights_TD[:, found.num_experts :].any()) or not bool(weights_TD.any()):
        raise UnsupportedModel("it does more with the outputs of its experts than to sum them with one weight each")
    counts_T = (weights_TD != 0).sum(1)
    # If the number differs between tokens, those of the check do not show the largest one.
    return replace(plan, top_k=found.num_experts if counts_T.unique().numel() > 1 else int(counts_T[0]))


def _run(block: nn.Module, x: Tensor, plan: BlockPlan, probe: Probe, silent: tuple[str, ...] = ()) -> list[Any]:
    with replayed(block, x.device):
        return outputs_of(block, plan, partial(call_block, block, x), probe, silent)[0]


def _with_rest(block: nn.Module, plan: BlockPlan, x: Tensor, rest: Tensor) -> BlockPlan:
    """Add to a plan what the block adds to the outputs of the experts: a module's outputs, or the tokens, ..."""
    for name, module in block.named_modules():
        inside = f"{name}.".startswith(f"{plan.path}.") or f"{plan.path}.".startswith(f"{name}.")
        if not name or inside or not list(module.parameters()):
            continue
        try:
            zeros, *units = (_run(block, x, plan, probe, (name,)) for probe in ("zeros", *range(plan.passes)))
        except Exception:  # the module returns no tensor
            continue
        if not bool(zeros[plan.output].any()) and any(bool(got[plan.output].any()) for got in units):
            return replace(plan, added=(name,))
    passed = rest == x.view(rest.shape)
    if bool(passed.all()):
        return replace(plan, rest="its tokens")
    if bool((passed | (rest == 0)).all()):
        return replace(plan, rest="its tokens where it has no expert for them")
    return replace(plan, rest="a value that is not the output of one of its modules")


class _StandIn(Probes, nn.Module):
    """Stands for the experts of a block that is being recognised."""

    def __init__(self, num_experts: int, plan: BlockPlan) -> None:
        super().__init__()
        self.num_experts, self.plan = num_experts, plan

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.probed(*args, **kwargs)


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)
