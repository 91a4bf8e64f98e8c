"""Find the MoE blocks of a user's model, recognise their experts, and make them expert-parallel.

A recognition is never trusted: before a block is swapped, the original and a swapped copy of it run on random tokens in
fp32, forward and backward, and must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from moe_comm.comm.agree import agree, gather_texts
from moe_comm.comm.group_setup import channel_of
from moe_comm.dispatch import Dispatcher
from moe_comm.errors import MoeCommError, PeerDied, PeerTimeout, UnsupportedModel
from moe_comm.integrations.blocks.adapter import MoEBlock, adapted
from moe_comm.integrations.blocks.block import (
    BlockExperts,
    BlockPlan,
    BlockSource,
    Convention,
    Probes,
    before_load,
    call_block,
    outputs_of,
    replayed,
    swapped_class,
)
from moe_comm.integrations.blocks.formula import ExpertFormula, recognise
from moe_comm.layers.data_parallel.gradients import replicated_parameter
from moe_comm.layers.data_parallel.optimizers import mark_replaced
from moe_comm.overlap.options import Overlap

TOKENS = 32
"""Number of random tokens of a rank in a check."""
TOLERANCE = 1e-4
"""Largest difference in a check, relative to the largest value of the original."""
CLIMB = 3
"""Number of modules above the experts among which the block is searched."""


@dataclass(frozen=True, eq=False)
class FoundBlock:
    """A module that looks like an MoE block, or has an adapter.

    path: of the experts in the block; the place of the swapped ones. stacked: one module has the parameters of all
    experts.
    """

    name: str
    block: nn.Module
    path: str
    num_experts: int
    stacked: bool
    adapter: MoEBlock | None = None

    @property
    def experts(self) -> Any:
        return self.block.get_submodule(self.path)

    @property
    def inside(self) -> str:
        """Prefix of the names of modules that belong to the block."""
        return f"{self.name}." if self.adapter is not None else f"{self.name}.{self.path}.".lstrip(".")


def find_blocks(model: nn.Module, *, only_adapted: bool = False) -> list[FoundBlock]:
    """Return the modules of ``model`` that look like MoE blocks.

    That is, several modules of a list, or the slices of stacked parameters, are two or three linear layers each, and a
    module around them has a matrix with as many rows, or columns: the router. Or the class has an adapter.
    """
    found: list[FoundBlock] = []
    candidates: dict[str, tuple[int, bool]] = {}
    for name, module in model.named_modules():
        inside = (*(other.inside for other in found), *(f"{other}." for other in candidates))
        if f"{name}.".startswith(inside):
            continue
        if (adapter := adapted(module)) is not None:
            path, stacked = _path_of(module, adapter.last), "{}" not in adapter.last
            found.append(FoundBlock(name, module, path, adapter.formula(module).layout.num_experts, stacked, adapter))
        elif only_adapted:
            continue
        elif (size := _list_size(module)) is not None:
            candidates[name] = size, False
        elif (size := _stack_size(module)) is not None:
            candidates[name] = size, True
    parents = {name.rpartition(".")[0] for name in candidates} | {other.name for other in found}
    for name, (size, stacked) in candidates.items():
        block_name = name
        for _ in range(CLIMB):
            if not block_name:
                break
            block_name = block_name.rpartition(".")[0]
            # A router that is nearer to other experts is theirs.
            others = {parent for parent in parents if parent != block_name and not f"{name}.".startswith(f"{parent}.")}
            params = (
                (f"{block_name}.{key}".lstrip("."), p) for key, p in model.get_submodule(block_name).named_parameters()
            )
            own = (p.shape for key, p in params if not key.startswith((f"{name}.", *(f"{o}." for o in others if o))))
            if any(len(shape) == 2 and size in shape for shape in own):
                path = name[len(block_name) :].lstrip(".")
                found.append(FoundBlock(block_name, model.get_submodule(block_name), path, size, stacked))
                break
    return found


def _path_of(block: nn.Module, parameter: str) -> str:
    """Return where the swapped experts of a block with an adapter are: in place of the module with the parameters."""
    path = parameter.partition(".{}")[0] if "{}" in parameter else parameter.rpartition(".")[0]
    return path or next(name for name in ("experts", "swapped_experts") if not hasattr(block, name))


def _list_size(module: nn.Module) -> int | None:
    """Return the number of experts in a list of modules, or None if it holds no experts."""
    if not isinstance(module, nn.ModuleList) or len(module) < 2:
        return None
    shapes = [{name: tuple(param.shape) for name, param in item.named_parameters()} for item in module]
    same = all(type(item) is type(module[0]) for item in module) and all(of == shapes[0] for of in shapes)
    return len(module) if same and _is_expert(shapes[0].values()) else None


def _stack_size(module: nn.Module) -> int | None:
    """Return the number of experts in a module of stacked parameters, or None."""
    shapes = [tuple(param.shape) for param in module.parameters(recurse=False)]
    if not shapes or any(len(shape) not in (2, 3) for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
        return None
    return shapes[0][0] if shapes[0][0] > 1 and _is_expert([shape[1:] for shape in shapes]) else None


def _is_expert(shapes: Any) -> bool:
    matrices = [shape for shape in shapes if len(shape) == 2]
    vectors = sum(len(shape) == 1 for shape in shapes)
    return len(matrices) in (2, 3) and vectors in (0, len(matrices)) and len(matrices) + vectors == len(shapes)


def swap_blocks(
    model: nn.Module,
    blocks: Sequence[tuple[FoundBlock, BlockPlan]],
    dispatchers: Mapping[int, Dispatcher],
    overlap: Overlap | None,
) -> None:
    """Check and swap the MoE blocks of a model. Collective.

    Args:
        blocks: with their plans, from ``describe``.
        dispatchers: by number of experts.

    Raises:
        UnsupportedModel: a swapped block does not compute what the original does; on every rank. The model is
            unchanged.
    """
    checked = set()
    for block, plan in blocks:
        if (kind := _signature(block, plan)) not in checked:
            check(block, plan, dispatchers[block.num_experts], overlap)
            checked.add(kind)
    for block, plan in blocks:
        experts = f"{block.name}.{plan.path}.".lstrip(".")
        names = (name for name, _ in model.named_parameters() if name.startswith(f"{block.name}.".lstrip(".")))
        router = next((name for name in names if not name.startswith(experts)), "")
        path, _, key = router.rpartition(".")
        replicated = partial(replicated_parameter, model.get_submodule(path), key) if router else lambda: None
        distribute(block, plan, dispatchers[block.num_experts], overlap, replicated)


def _signature(found: FoundBlock, plan: BlockPlan) -> str:
    """Return a text that is equal for blocks whose code does the same: classes, shapes and settings of all modules."""
    parts = [str(plan)]
    for name, module in found.block.named_modules():
        settings = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str | None)}
        shapes = {key: tuple(param.shape) for key, param in module.named_parameters(recurse=False)}
        parts.append(f"{name} {type(module).__module__}.{type(module).__qualname__} {settings} {shapes}")
    return "\n".join(parts)


def refuse_ties(model: nn.Module, blocks: Sequence[tuple[FoundBlock, BlockPlan]]) -> None:
    """Raise UnsupportedModel if parameters of experts are also used elsewhere in ``model``."""
    uses: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        uses.setdefault(id(param), []).append(name)
    for block, plan in blocks:
        params = dict(block.block.named_parameters())
        for name in plan.formula.names:
            if len(names := uses[id(params[name])]) > 1:
                raise UnsupportedModel(
                    f"{' and '.join(names)} are one parameter of experts. Each rank keeps some of the experts only, so "
                    "these cannot be shared"
                )


def describe(found: FoundBlock) -> BlockPlan:
    """Return how to run a block. It is not changed.

    Raises:
        UnsupportedModel: its experts, or what it does with their outputs, are not recognised. The message says what.
    """
    try:
        # The same random numbers on all ranks.
        device = _device(found.block)
        with torch.autocast(device.type, enabled=False), replayed(found.block, device, seed=0):
            return _described(found)
    except Exception as error:  # of the user's code: the other ranks compare weights next
        reason = error if isinstance(error, UnsupportedModel) else f"it raised {type(error).__name__}: {error}"
        raise UnsupportedModel(
            f"{found.name} ({type(found.block).__name__}) looks like an MoE block with {found.num_experts} experts in "
            f"{found.path}, but {reason}. Describe it with moe_comm.block_adapter, or build a moe_comm.MoELayer"
        ) from error


def _described(found: FoundBlock) -> BlockPlan:
    if any(param.is_meta for param in found.block.parameters()):
        raise UnsupportedModel("its weights are on meta, so that it cannot be run")
    for name, module in () if found.adapter else found.experts.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise UnsupportedModel(f"its experts have dropout {module.p} ({name}); set it to 0")
        if any(True for _ in module.buffers(recurse=False)):
            raise UnsupportedModel(f"its experts have buffers ({name or type(module).__name__})")
    if found.adapter is None:
        formula, nones = _formula(found)
    else:
        formula, nones = found.adapter.formula(found.block), -1
    params = dict(found.block.named_parameters())
    if missing := [name for name in formula.names if name not in params]:
        raise UnsupportedModel(f"{missing[0]} is also another expert's parameter")
    if len({(params[name].dtype, params[name].device) for name in formula.names}) > 1:
        raise UnsupportedModel("the parameters of its experts differ in dtype or device")
    for parts in formula.parts.values():
        if len({params[name].requires_grad for part in parts for name in formula.names_of(part.path)}) > 1:
            raise UnsupportedModel(f"only some of its {' and '.join(part.path for part in parts)} require gradients")
    block = deepcopy(found.block).float().requires_grad_(False)
    copy = replace(found, block=block)
    plan = BlockPlan(found.path, formula, "adapter", _shape(block, formula.layout.hidden), nones=nones)
    if found.adapter is not None and found.adapter.route is not None:
        return replace(plan, adapter=found.adapter)
    x = torch.randn(*plan.shape, formula.layout.hidden, dtype=torch.float32, device=_device(block))
    return _outputs(copy, replace(plan, convention=_convention(copy, x)), x)


def _shape(block: nn.Module, hidden: int) -> tuple[int, ...]:
    """Return a shape of tokens, without the hidden size, that a block takes: two sequences, or a list of tokens."""
    problem = None
    for shape in ((2, TOKENS // 2), (TOKENS,)):
        x = torch.randn(*shape, hidden, dtype=torch.float32, device=_device(block))
        try:
            with replayed(block, x.device):
                call_block(block, x)
            return shape
        except Exception as error:  # of the user's code
            problem = problem or error
    raise UnsupportedModel(f"it cannot run on tokens [.., {hidden}] alone ({type(problem).__name__}: {problem})")


def _device(block: nn.Module) -> torch.device:
    return next(block.parameters()).device


def _formula(found: FoundBlock) -> tuple[ExpertFormula, int]:
    """Recognise what an expert computes, by its outputs of random rows."""
    experts = found.experts
    expert = deepcopy(experts if found.stacked else experts[0]).double().requires_grad_(False)
    prefix = f"{found.path}." if found.stacked else f"{found.path}.{{}}."
    prefix = prefix.lstrip(".")
    shapes = {prefix + n: tuple(p.shape[1:] if found.stacked else p.shape) for n, p in expert.named_parameters()}
    tensors = {f"{prefix}{n}".format(0): param for n, param in expert.named_parameters()}
    inner = [
        module
        for module in expert.modules()
        if module is not expert and not list(module.parameters()) and not isinstance(module, nn.Dropout | nn.Identity)
    ]
    problem: Exception | None = None
    for hidden in sorted({size for shape in shapes.values() if len(shape) == 2 for size in shape}):
        if hidden < found.num_experts:
            problem = problem or UnsupportedModel(f"it has more experts than a token of {hidden} has values")
            continue
        # Large enough that activations differ.
        rows_RD = 4 * torch.randn(8, hidden, dtype=torch.float64, device=_device(expert))
        try:
            result = _run_stacked(expert, rows_RD, found.num_experts) if found.stacked else expert(rows_RD)
            y_RD, nones = _output(result)
            if y_RD is None or y_RD.shape != rows_RD.shape:
                continue
            return recognise(shapes, tensors, inner, rows_RD, y_RD, found.num_experts), nones
        except UnsupportedModel as error:
            problem = error
        except Exception as error:  # of the user's code
            problem = problem or UnsupportedModel(f"an expert cannot run on rows [R, {hidden}] ({error})")
    raise problem or UnsupportedModel(
        f"an expert with the parameters {shapes} does not map rows [R, D] to [R, D], D at least the number of experts"
    )


def _output(result: Any) -> tuple[Tensor | None, int]:
    """Return the output of an expert, and the number of Nones after it; -1 if it is no tuple."""
    if isinstance(result, Tensor):
        return result, -1
    if isinstance(result, tuple) and isinstance(result[0], Tensor) and all(other is None for other in result[1:]):
        return result[0], len(result) - 1
    return None, -1


def _run_stacked(experts: nn.Module, rows_RD: Tensor, count: int) -> Any:
    """Return the result of the first expert of a module with stacked parameters."""
    try:
        batches = experts(rows_RD.expand(count, -1, -1))
        return batches[0]
    except Exception:
        counts_E = torch.zeros(count, dtype=torch.int64, device=rows_RD.device)
        counts_E[0] = len(rows_RD)
        return experts(rows_RD, counts_E)


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
    try:
        with replayed(block, x.device):
            zeros, _ = outputs_of(block, plan, partial(call_block, block, x), "zeros")
        with replayed(block, x.device):
            units, _ = outputs_of(block, plan, partial(call_block, block, x), "unit vectors")
    except Exception as error:
        raise UnsupportedModel(f"it cannot run with probes ({type(error).__name__}: {error})") from error
    differ = [index for index, pair in enumerate(zip(zeros, units, strict=True)) if not _equal(*pair)]
    if len(differ) != 1 or units[differ[0]].numel() != x.numel() or units[differ[0]].shape[-1] != x.shape[-1]:
        raise UnsupportedModel(
            f"the outputs of its experts must reach one of its {len(zeros)} results, of the shape of the tokens; they "
            f"reach {len(differ)}"
        )
    plan = replace(plan, output=differ[0])
    if bool(zeros[plan.output].any()):
        plan = replace(plan, added=_added(block, plan, x))
        with replayed(block, x.device):
            units, _ = outputs_of(block, plan, partial(call_block, block, x), "unit vectors", plan.added)
    weights_TD = units[plan.output].reshape(-1, x.shape[-1])
    if bool(weights_TD[:, found.num_experts :].any()):
        raise UnsupportedModel("it does more with the outputs of its experts than to sum them with one weight each")
    counts_T = (weights_TD != 0).sum(1)
    # If the number differs between tokens, those of the check do not show the largest one.
    return replace(plan, top_k=found.num_experts if counts_T.unique().numel() > 1 else int(counts_T[0]))


def _added(block: nn.Module, plan: BlockPlan, x: Tensor) -> tuple[str, ...]:
    """Return the module whose outputs the block adds to those of the experts."""
    for name, module in block.named_modules():
        inside = f"{name}.".startswith(f"{plan.path}.") or f"{plan.path}.".startswith(f"{name}.")
        if not name or inside or not list(module.parameters()):
            continue
        try:
            with replayed(block, x.device):
                leaves, _ = outputs_of(block, plan, partial(call_block, block, x), "zeros", (name,))
            if not bool(leaves[plan.output].any()):
                return (name,)
        except Exception:  # the module returns no tensor
            continue
    raise UnsupportedModel(
        "it adds something to the outputs of its experts, which is not the output of one of its modules"
    )


class _StandIn(Probes, nn.Module):
    """Stands for the experts of a block that is being recognised."""

    def __init__(self, num_experts: int, plan: BlockPlan) -> None:
        super().__init__()
        self.num_experts, self.plan = num_experts, plan

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.probed(*args, **kwargs)


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def distribute(
    found: FoundBlock,
    plan: BlockPlan,
    dispatcher: Dispatcher,
    overlap: Overlap | None,
    replicated: Callable[[], nn.Parameter | None],
) -> None:
    """Replace the experts of a block by those of this rank, and its forward pass by one that dispatches."""
    block, formula = found.block, plan.formula
    source = BlockSource(block, formula).train(block.training)
    label = ".".join(part for part in (found.name, plan.path) if part)
    experts = BlockExperts(source, formula.layout, dispatcher, label, overlap, replicated)
    experts.use(plan)
    params = dict(block.named_parameters())
    for name in formula.names:
        mark_replaced(params[name], experts.gate_up_proj, f"{found.name}.{name}", "swap_moe")
    for name in formula.names:
        owner, _, key = name.rpartition(".")
        if not f"{owner}.".startswith(f"{plan.path}."):  # of a module that is not replaced
            delattr(block.get_submodule(owner), key)
    parent, _, child = plan.path.rpartition(".")
    setattr(block.get_submodule(parent), child, experts)
    block.block_plan = plan  # type: ignore[assignment]
    block.register_load_state_dict_pre_hook(before_load)
    block.__class__ = swapped_class(type(block))


def check(found: FoundBlock, plan: BlockPlan, dispatcher: Dispatcher, overlap: Overlap | None) -> None:
    """Compare a block with a swapped copy of it on random tokens, forward and backward in fp32. Collective.

    Raises:
        UnsupportedModel: they differ, on any rank. Raised on every rank.
    """
    rank, group = dispatcher.rank, dispatcher.group

    def agreed(differences: list[str]) -> None:
        outcome: str | MoeCommError = ""
        if differences:
            outcome = UnsupportedModel(
                f"{found.name} ({type(found.block).__name__}) was recognised as {plan}, but a swapped copy of it "
                f"differs from the original on random tokens: {'; '.join(differences[:3])}. Describe it with "
                "moe_comm.block_adapter"
            )
        if group is not None and dispatcher.world > 1:
            agree(outcome, partial(gather_texts, channel_of(group), f"checking the swap of {found.name}"))
        elif isinstance(outcome, MoeCommError):
            raise outcome

    differences: list[str] = []
    for training in (True, False):
        raised: list[str] = []
        try:
            block = deepcopy(found.block).float().requires_grad_().train(training)
            expected = [_run(block, plan, source) for source in range(dispatcher.world)]
        except Exception as error:  # of the user's code
            raised.append(f"the original raised {type(error).__name__}: {error}")
        agreed(raised)  # before ranks wait for each other in the copies
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in block.named_parameters()}
        of_experts = {key: plan.formula.stack(key, grads) for key in plan.formula.layout.parameters}
        block.zero_grad()
        try:
            with dispatcher.abort_on_error():
                distribute(replace(found, block=block), plan, dispatcher, overlap, lambda: None)
                got = _run(block, plan, rank)
        except (PeerDied, PeerTimeout):
            raise
        except Exception as error:
            differences.append(f"the copy raised {type(error).__name__}: {error}")
            continue
        experts: Any = block.get_submodule(plan.path)
        homes = list(experts.placement.homes_of(rank))
        pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {
            **{f"result {i}": pair for i, pair in enumerate(zip_longest(got[0], expected[rank][0]))},
            "gradient of the tokens": (got[1], expected[rank][1]),
        }
        pairs |= {f"gradient of {name}": (got[2].get(name), value) for name, value in expected[rank][2].items()}
        pairs |= {f"gradient of {key}": (getattr(experts, key).grad, value[homes]) for key, value in of_experts.items()}
        for what, (value, reference) in pairs.items():
            if text := _difference(value, reference):
                differences.append(f"{what} {text}")
    agreed(differences)


def _run(block: nn.Module, plan: BlockPlan, seed: int) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
    """Run a block on the tokens of rank ``seed``: results, and gradients of the tokens and of replicated parameters.

    Gradients of experts accumulate.
    """
    inside = {*plan.formula.names, *(f"{plan.path}.{key}" for key in plan.formula.parts)}
    replicated = {n: p for n, p in block.named_parameters() if n not in inside}
    for param in replicated.values():
        param.grad = None
    device = _device(block)
    with torch.enable_grad(), torch.autocast(device.type, enabled=False), replayed(block, device, 1000 + seed):
        x = torch.randn(*plan.shape, plan.formula.layout.hidden, dtype=torch.float32, device=device).requires_grad_()
        results = [leaf for leaf in tree_flatten(call_block(block, x))[0] if isinstance(leaf, Tensor)]
        loss = sum(
            (leaf * torch.randn_like(leaf)).sum() for leaf in results if leaf.is_floating_point() and leaf.requires_grad
        )
        assert isinstance(loss, Tensor) and x is not None
        loss.backward()
    assert x.grad is not None
    grads = {n: p.grad for n, p in replicated.items() if p.grad is not None}
    return [leaf.detach() for leaf in results], x.grad, grads


def _difference(value: Tensor | None, reference: Tensor | None) -> str:
    """Return how much a value differs from the original's; "" if it does not."""
    if value is None or reference is None or value.shape != reference.shape:
        shapes = ("none" if x is None else str(list(x.shape)) for x in (value, reference))
        return f"has the shape {' instead of '.join(shapes)}"
    if not reference.numel():
        return ""
    largest = float(reference.abs().max())
    difference = float((value.double() - reference.double()).abs().max())
    if difference <= TOLERANCE * largest + 1e-7:
        return ""
    return f"differs by {difference:.2g}, of at most {largest:.2g}"
