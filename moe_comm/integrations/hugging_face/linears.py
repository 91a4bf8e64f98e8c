"""Cut the plain linears of a loaded Hugging Face model over tensor-parallel ranks.

What is replaced are the linears themselves and not the blocks around them, so the code that runs stays transformers'
own and parameter names do not change. All ranks of the group are fed the same batch:

    feed-forward block    x, alike ──copy──▶ gate_proj, up_proj (own columns) ──act──▶ down_proj (own rows) ──sum──▶ y
    embedding             ids, alike ──▶ own rows of the table, zero for others ──sum──▶ x
    lm_head               x, alike ──copy──▶ own rows of the table ──gather──▶ all logits

A block is known by its structure, whatever its class: linears gate_proj, up_proj and down_proj (Llama, Qwen, Mistral,
the dense layers and shared experts of DeepSeek, Qwen2-MoE, ...), gate_up_proj and down_proj (Phi-3, GLM), or up_proj
and down_proj (Nemotron), and nothing else that has weights. As structure does not say what the block's forward does
between them, every block is tried on a few rows before anything is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from moe_comm.comm.meeting import compare
from moe_comm.errors import ConfigError, MoeCommError, UnsupportedModel
from moe_comm.layers.attention.layer import Attention
from moe_comm.layers.parallel.collectives import channel_of, gather_values, group_size
from moe_comm.layers.parallel.embedding import VocabParallelEmbedding, VocabParallelHead
from moe_comm.layers.parallel.linear import ColumnParallelLinear, RowParallelLinear, enter
from moe_comm.layers.parallel.module import ParallelModule

Columns = dict[str, int]
"""Column-parallel linears of a block, and in how many segments each is cut."""
BLOCKS: tuple[tuple[Columns, str], ...] = (
    ({"gate_proj": 1, "up_proj": 1}, "down_proj"),
    ({"gate_up_proj": 2}, "down_proj"),
    ({"up_proj": 1}, "down_proj"),
)
"""The structures that are known: their column-parallel linears, and the row-parallel one."""
_TRIED_ROWS = 4
_FLOATS = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Dtypes that can be cut, and how far apart sums in two orders may lie."""


class _Head(VocabParallelHead):
    """An ``lm_head`` that returns the logits of the whole vocabulary, alike on every rank."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.full_logits(x_BSD)


class _Enter:
    """Brings a block's input into tensor parallelism once, where two linears read it."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (enter(args[0], self.group, None), *args[1:]), kwargs
        name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
        return args, {**kwargs, name: enter(kwargs[name], self.group, None)}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Enter:
        return self  # copies of a model communicate over the same ranks


def swap_linears(model: nn.Module, group: ProcessGroup | None = None, *, vocabulary: bool = True) -> Any:
    """Cut the feed-forward linears of a loaded transformers model over the ranks of ``group``. Collective.

        model = AutoModelForCausalLM.from_pretrained(folder)
        model = swap_linears(model, tp_group)           # this rank now holds its part
        loss = model(input_ids, labels=input_ids).loss  # the same batch on every rank of tp_group

    Every rank must hold the same weights before. Ranks of ``group`` are fed the same batch after, and get the same
    logits. Build the optimizer afterwards.

    Gradients are complete on every rank: those of what was cut cover what the rank holds, and those of everything else
    (norms, attention, routers) are the same on all ranks of ``group``. So nothing is summed over ``group``; sum or
    average over data-parallel ranks as before (``DistributedDataParallel`` needs their ``process_group``). With
    ``swap_moe`` as well, its ranks must be fed different batches: its group takes one rank of each ``group``.

    Attention is ``swap_attention``'s, and experts are ``swap_moe``'s. Blocks of another structure stay whole.

    Args:
        model: a ``PreTrainedModel``, or any module that contains one's feed-forward blocks; changed in place.
        group: ranks to cut over; None keeps everything on this rank.
        vocabulary: cut the input embedding and the output projection too, each if it is a plain one; tied stays tied.
            Any vocabulary: the last ranks hold fewer rows where it does not divide.

    Returns:
        ``model``.

    Raises:
        UnsupportedModel: neither a block nor a vocabulary that can be cut, or a block whose forward does not allow it,
            is quantised, is replaced, or has dropout inside; nothing was changed.
        ConfigError: already swapped, or a width does not divide by the ranks; nothing was changed.
        RankMismatch: ranks hold different models; nothing was changed.
        PeerDied, PeerTimeout: a rank does not take part.
    """
    fault: MoeCommError | None = None
    blocks: dict[str, tuple[Columns, str]] = {}
    ends: dict[str, nn.Module] = {}
    try:
        blocks = _find_blocks(model)
        ends = _find_ends(model) if vocabulary else {}
        _refuse(model, blocks, ends, group)
    except MoeCommError as error:
        fault = error
    if group is not None and group_size(group) > 1:
        shapes = {name: [tuple(p.shape) for p in model.get_submodule(name).parameters()] for name in (*blocks, *ends)}
        compare(channel_of(group), "swap_linears", {"what can be cut": shapes}, fault=fault)
    if fault is not None:
        raise fault
    for name, structure in blocks.items():
        _try(model.get_submodule(name), structure, group, name)
    for name, structure in blocks.items():
        _cut(model.get_submodule(name), structure, group)
    _cut_ends(model, ends, group)
    if group_size(group) > 1 and hasattr(model, "save_pretrained"):
        guard: Any = model
        guard.save_pretrained = partial(_refuse_save, type(model).__name__)
    return model


def swapped_linears(model: nn.Module) -> dict[str, nn.Module]:
    """What ``swap_linears`` put into ``model``, by module name; empty before."""
    kinds = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, _Head)
    # What swap_attention put there is of the same kinds.
    inside = {id(child) for module in model.modules() if isinstance(module, Attention) for child in module.modules()}
    return {
        name: module for name, module in model.named_modules() if isinstance(module, kinds) and id(module) not in inside
    }


def gather_linears(model: nn.Module, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The state dict of the unswapped model, bit for bit, on the CPU of every rank. Collective over the group.

    Args:
        model: what ``swap_linears`` returned.
        state: to complete: what ``gather_state_dict`` gave where ``swap_moe`` was used too, with what
            ``gather_attention`` gave in its place where ``swap_attention`` was; else the model's own.
    """
    full = {key: value.detach().cpu() for key, value in (state or model.state_dict()).items()}
    for name, module in swapped_linears(model).items():
        parallel: Any = module
        world = group_size(parallel.group)
        for key, sharding in parallel.shardings().items():
            own = parallel.get_parameter(key).detach()
            if not sharding.splits or world == 1:
                continue
            shapes = [sharding.local_shape({"tp": rank}, {"tp": world}) for rank in range(world)]
            padded = own.new_zeros(shapes[0])  # the first rank's part is the largest
            padded[tuple(slice(n) for n in own.shape)] = own
            whole = own.new_empty(sharding.shape, device="cpu")
            for rank, part in enumerate(gather_values(padded, parallel.group, f"gathering {name}.{key}").cpu()):
                for box in sharding.boxes({"tp": rank}, {"tp": world}):
                    whole[box.whole] = part[box.local]
            full[f"{name}.{key}"] = whole
    return full


def _find_blocks(model: nn.Module) -> dict[str, tuple[Columns, str]]:
    found = {}
    for name, module in model.named_modules():
        linears = {key: child for key, child in module.named_children() if isinstance(child, nn.Linear)}
        for columns, row in BLOCKS:
            if set(linears) == {*columns, row} and _fits(module, linears, columns, row):
                found[name] = (columns, row)
    return found


def _fits(module: nn.Module, linears: Mapping[str, nn.Linear], columns: Columns, row: str) -> bool:
    """Whether the shapes fit, and nothing else in ``module`` has weights (which would see a part of the columns)."""
    width, hidden = linears[row].in_features, linears[row].out_features
    others = len(list(module.parameters())) - sum(len(list(linear.parameters())) for linear in linears.values())
    return not others and all(
        linears[key].in_features == hidden and linears[key].out_features == segments * width
        for key, segments in columns.items()
    )


def _find_ends(model: nn.Module) -> dict[str, nn.Module]:
    """The plain input embedding and output projection, by name; neither if only one of a tied pair is plain."""
    whole: Any = model
    if not (hasattr(model, "get_input_embeddings") and hasattr(model, "get_output_embeddings")):
        return {}
    embed, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    plain_embed = type(embed) is nn.Embedding and embed.max_norm is None and not embed.sparse
    plain_head = type(head) is nn.Linear and head.bias is None
    if embed is not None and head is not None and embed.weight is head.weight and not (plain_embed and plain_head):
        return {}
    names = {module: name for name, module in model.named_modules()}
    return {names[end]: end for end, plain in ((embed, plain_embed), (head, plain_head)) if plain and end in names}


def _refuse(
    model: nn.Module, blocks: Mapping[str, tuple[Columns, str]], ends: Mapping[str, nn.Module], group: Any
) -> None:
    kind, world = type(model).__name__, group_size(group)
    if swapped_linears(model):
        raise ConfigError(f"{kind} is already swapped; swap a freshly loaded model, or see gather_linears")
    if not blocks and not ends:
        known = "; ".join(f"{', '.join(columns)} and {row}" for columns, row in BLOCKS)
        raise UnsupportedModel(f"{kind} has no feed-forward block of plain linears; looked for {known}")
    for name, (columns, row) in blocks.items():
        block = model.get_submodule(name)
        for inner in (block, *(block.get_submodule(key) for key in (*columns, row))):
            if "forward" in vars(inner):
                raise UnsupportedModel(f"{name} has a forward replaced, by device_map offloading or a kernel")
            if inner is not block and type(inner) is not nn.Linear:
                raise UnsupportedModel(f"{name} has a {type(inner).__name__} for a plain linear")
            if (inner is not block and inner._forward_hooks) or inner._forward_pre_hooks:
                raise UnsupportedModel(f"{name} has forward hooks; register them after swap_linears")
        if any(isinstance(module, nn.Dropout) and module.p > 0 for module in block.modules()):
            raise UnsupportedModel(f"{name} has dropout, which would differ between ranks that must stay alike")
        width = block.get_submodule(row).in_features
        if width % world:  # type: ignore[operator]
            raise ConfigError(f"{name}: its width {width} does not divide evenly over the {world} ranks of the group")
    for name in (*blocks, *ends):
        for weight in model.get_submodule(name).parameters():
            if isinstance(weight, DTensor):
                raise UnsupportedModel(f"{name} is already distributed (its parameters are DTensors)")
            if weight.dtype not in _FLOATS:
                raise UnsupportedModel(f"{name} is quantised ({weight.dtype})")


def _parts(
    block: nn.Module, structure: tuple[Columns, str], group: ProcessGroup | None
) -> dict[str, ColumnParallelLinear | RowParallelLinear]:
    """This rank's part of each linear of ``block``; the block's input comes through ``_Enter``."""
    columns, row = structure
    parts: dict[str, ColumnParallelLinear | RowParallelLinear] = {}
    for key, segments in columns.items():
        linear: Any = block.get_submodule(key)
        parts[key] = ColumnParallelLinear.from_linear(linear, group, segments=segments, enters=False)
    linear = block.get_submodule(row)
    parts[row] = RowParallelLinear.from_linear(linear, group)
    for part in parts.values():
        part.train(block.training)
    return parts


@torch.no_grad()
def _try(block: nn.Module, structure: tuple[Columns, str], group: ProcessGroup | None, name: str) -> None:
    """Compare ``block`` with its cut form on a few rows; it is as before afterwards.

    Raises:
        UnsupportedModel: on every rank, if on any of them the results differ.
    """
    columns, row = structure
    weight: Any = block.get_submodule(row).weight
    if group_size(group) == 1 or weight.device.type == "meta":
        return
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(_TRIED_ROWS, weight.shape[0], generator=generator).to(weight)
    whole = {key: block.get_submodule(key) for key in (*columns, row)}
    problem, good = "", False
    try:
        expected_TD = block(x_TD)
        for key, part in _parts(block, structure, group).items():
            setattr(block, key, part)
        got_TD = block(x_TD)
        largest = float((got_TD - expected_TD).abs().max())
        good = largest <= _FLOATS[weight.dtype] * float(expected_TD.abs().max())
        problem = f"the results differ by up to {largest:.2g} from those of the whole block"
    except MoeCommError:
        raise
    except (AttributeError, RuntimeError, TypeError) as error:  # its forward is another than its structure promises
        problem = f"trying it failed ({error})"
    finally:
        for key, linear in whole.items():
            setattr(block, key, linear)
    verdicts = gather_values(torch.tensor([good], device=weight.device), group, f"trying {name}").flatten().tolist()
    if not all(verdicts):
        raise UnsupportedModel(
            f"{name} ({type(block).__name__}) cannot be cut over {group_size(group)} ranks: "
            f"{problem if not good else 'it failed on ranks ' + str([r for r, v in enumerate(verdicts) if not v])}. "
            "Either its forward does more between its linears than a function of each element, or the ranks were "
            "given different weights."
        )


def _cut(block: nn.Module, structure: tuple[Columns, str], group: ProcessGroup | None) -> None:
    for key, part in _parts(block, structure, group).items():
        setattr(block, key, part)
    block.register_forward_pre_hook(_Enter(group), with_kwargs=True, prepend=True)


def _cut_ends(model: nn.Module, ends: Mapping[str, nn.Module], group: ProcessGroup | None) -> None:
    made: dict[nn.Parameter, ParallelModule] = {}
    for name, end in ends.items():
        weight = end.get_parameter("weight")
        if isinstance(end, nn.Embedding):
            new: Any = VocabParallelEmbedding.from_weight(weight, group, sequence_dim=None)
            new.padding_idx = end.padding_idx
        else:
            new = _Head.from_weight(weight, group, sequence_dim=None)
        if weight in made:
            new.weight = made[weight].weight
        made[weight] = new
        new.train(end.training)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)


def _refuse_save(kind: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ConfigError(
        f"save_pretrained of this {kind} would write this rank's part only. Load the unswapped model and save it with "
        "the weights that moe_comm.integrations.hugging_face.linears.gather_linears(model) gives on every rank."
    )
