"""Shard the feed-forward linears of a loaded Hugging Face model over tensor-parallel ranks.

Only the linears are replaced, not the blocks that contain them. The forward of a block remains transformers' own code
and parameter names do not change. All ranks of the group run the same batch:

    feed-forward block    x ──copy──▶ gate_proj, up_proj (local columns) ──act──▶ down_proj (local rows) ──sum──▶ y
    embedding             ids ──▶ local rows of the table, zero for others ──sum──▶ x
    lm_head               x ──copy──▶ local rows of the table ──gather──▶ all logits

A block is recognized by its structure, not by its class. Its linears are gate_proj, up_proj and down_proj (Llama, Qwen,
Mistral, the dense layers and shared experts of DeepSeek, Qwen2-MoE, ...), gate_up_proj and down_proj (Phi-3, GLM), or
up_proj and down_proj (Nemotron), and it has no other weights. The structure does not determine the block's forward.
Each sharded block is therefore compared with the original on a few rows before the model is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moe_comm.comm.agree import compare
from moe_comm.comm.group_setup import as_group
from moe_comm.errors import ConfigError, MoeCommError, UnsupportedModel
from moe_comm.integrations.hugging_face.families import Ties
from moe_comm.integrations.hugging_face.state import gather_full, refuse_save
from moe_comm.layers.attention.layer import Attention
from moe_comm.layers.data_parallel.optimizers import mark_replaced
from moe_comm.layers.data_parallel.replicas import check_loaded
from moe_comm.layers.parallel.collectives import channel_of, gather_values, group_size
from moe_comm.layers.parallel.embedding import VocabParallelEmbedding, VocabParallelHead
from moe_comm.layers.parallel.hooks import refuse_hooks, take_call_hooks
from moe_comm.layers.parallel.linear import ColumnParallelLinear, RowParallelLinear, gather_input
from moe_comm.layers.parallel.module import ParallelModule
from moe_comm.runtime.groups import warn_if_alone

Columns = dict[str, int]
"""Number of segments in which each column-parallel linear of a block is sharded."""
BLOCKS: tuple[tuple[Columns, str], ...] = (
    ({"gate_proj": 1, "up_proj": 1}, "down_proj"),
    ({"gate_up_proj": 2}, "down_proj"),
    ({"up_proj": 1}, "down_proj"),
)
"""Supported structures: column-parallel linears, row-parallel linear."""
_TEST_ROWS = 4
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative tolerance between two summation orders, for each supported dtype."""


class _Head(VocabParallelHead):
    """An ``lm_head`` that returns the logits of the full vocabulary on every rank."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.full_logits(x_BSD)


class _GatherInput:
    """Forward pre-hook that applies ``gather_input`` once to a block's input, which several linears read."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (gather_input(args[0], self.group, None), *args[1:]), kwargs
        name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
        return args, {**kwargs, name: gather_input(kwargs[name], self.group, None)}

    def __deepcopy__(self, memo: dict[int, Any]) -> _GatherInput:
        return self  # copies of a model share the group


def parallelize_linears(
    model: nn.Module, group: ProcessGroup | DeviceMesh | None = None, *, vocabulary: bool = True
) -> Any:
    """Shard the feed-forward linears of a loaded transformers model over the ranks of ``group``. Collective.

        model = AutoModelForCausalLM.from_pretrained(folder)
        model = swap_linears(model, tp_group)           # this rank now holds its shards
        loss = model(input_ids, labels=input_ids).loss  # the same batch on every rank of tp_group

    Every rank must pass a model with the same weights. After the swap, the ranks of ``group`` must run the same batch,
    and they return the same logits. Build the optimizer after the swap.

    Gradients need no reduction over ``group``. The gradient of a sharded parameter is the shard of the full gradient.
    Gradients of other parameters (norms, attention, routers) are the same on all ranks of ``group``. Sum or average
    over data-parallel ranks as before, and pass their group to ``DistributedDataParallel`` as ``process_group``. If
    ``swap_moe`` is used too, its ranks must run different batches, so its group must contain one rank of each
    ``group``.

    Use ``swap_attention`` for attention and ``swap_moe`` for experts. Blocks of other structures are not sharded.

    Args:
        model: a ``PreTrainedModel``, or a module that contains feed-forward blocks of one. Changed in place.
        group: ranks to shard over; they run the same batch. None keeps everything on this rank; a warning says so if
            ``torch.distributed`` has several ranks.
        vocabulary: also shard the input embedding and the output projection if they are plain modules. Tied weights
            remain tied. The vocabulary size need not be divisible by the number of ranks: the last ranks hold fewer
            rows.

    Returns:
        ``model``.

    Raises:
        UnsupportedModel: nothing can be sharded, or a block has an unsupported forward, a replaced forward, dropout,
            quantized weights, or weights of another block. The model is unchanged.
        ConfigError: the model is already swapped, or a width is not divisible by the number of ranks. The model is
            unchanged.
        RankMismatch: the ranks passed different models, or different weights. The model is unchanged.
        PeerDied, PeerTimeout: a rank failed, or did not call ``swap_linears``.
    """
    if group is None:
        warn_if_alone("swap_linears", "keeps all weights")
    group = as_group(group, "tp")
    fault: MoeCommError | None = None
    blocks: dict[str, tuple[Columns, str]] = {}
    vocab_modules: dict[str, nn.Module] = {}
    try:
        blocks = _find_blocks(model)
        vocab_modules = _find_vocab_modules(model) if vocabulary else {}
        _check_supported(model, blocks, vocab_modules, group)
    except MoeCommError as error:
        fault = error
    if group is not None and group_size(group) > 1:
        names = (*blocks, *vocab_modules)
        shapes = {name: [tuple(p.shape) for p in model.get_submodule(name).parameters()] for name in names}
        compare(channel_of(group), "swap_linears", {"shapes of the linears": shapes}, fault=fault)
        check_loaded(model, channel_of(group))
    if fault is not None:
        raise fault
    for name, structure in blocks.items():
        _check_block(model.get_submodule(name), structure, group, name)
    for name, structure in blocks.items():
        block = model.get_submodule(name)
        linears = _sharded_linears(block, structure, group)
        for key, linear in linears.items():
            _mark_replaced(block.get_submodule(key), linear, f"{name}.{key}")
        _replace_linears(block, linears)
        block.register_forward_pre_hook(_GatherInput(group), with_kwargs=True, prepend=True)
    _shard_vocab_modules(model, vocab_modules, group)
    if group_size(group) > 1:
        refuse_save(model, "shards")
    return model


swap_linears = parallelize_linears
"""Short alias of ``parallelize_linears``."""


def swapped_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that ``swap_linears`` inserted into ``model`` by name. Empty before ``swap_linears``."""
    kinds = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, _Head)
    # swap_attention inserts modules of the same classes.
    attention = {child for module in model.modules() if isinstance(module, Attention) for child in module.modules()}
    return {
        name: module for name, module in model.named_modules() if isinstance(module, kinds) and module not in attention
    }


def gather_linears(model: nn.Module, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the state dict of the unswapped model on the CPU of every rank. Collective over the group.

    Args:
        model: a model that ``swap_linears`` returned.
        state: state dict whose sharded linears are to be replaced. None: ``model.state_dict()``. If ``swap_moe`` was
            also used, pass the result of ``gather_state_dict``. If ``swap_attention`` was also used, update it with
            the result of ``gather_attention`` first.

    Returns:
        Full tensors, bit-identical to the weights of the unswapped model.
    """
    full = {key: value.detach().cpu() for key, value in (state or model.state_dict()).items()}
    modules = set(swapped_linears(model).values())
    for name, module in model.named_modules(remove_duplicate=False):  # blocks may be shared
        if module not in modules:
            continue
        parallel: Any = module
        for key, sharding in parallel.shardings().items():
            full[f"{name}.{key}"] = gather_full(parallel.get_parameter(key), sharding, parallel.group, f"{name}.{key}")
    return full


def _find_blocks(model: nn.Module) -> dict[str, tuple[Columns, str]]:
    blocks = {}
    for name, module in model.named_modules():
        linears = {key: child for key, child in module.named_children() if isinstance(child, nn.Linear)}
        for columns, row in BLOCKS:
            if set(linears) == {*columns, row} and _shapes_match(module, linears, columns, row):
                blocks[name] = (columns, row)
    return blocks


def _shapes_match(module: nn.Module, linears: Mapping[str, nn.Linear], columns: Columns, row: str) -> bool:
    """Return whether the shapes match and ``module`` has no other weights.

    Other weights would receive sharded activations, which they do not support.
    """
    width, hidden = linears[row].in_features, linears[row].out_features
    others = len(list(module.parameters())) - sum(len(list(linear.parameters())) for linear in linears.values())
    return not others and all(
        linears[key].in_features == hidden and linears[key].out_features == segments * width
        for key, segments in columns.items()
    )


def _find_vocab_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the plain input embedding and output projection by name.

    None if only one of a tied pair is plain, or if another module has the same weights.
    """
    pretrained: Any = model
    if not (hasattr(model, "get_input_embeddings") and hasattr(model, "get_output_embeddings")):
        return {}
    embed, head = pretrained.get_input_embeddings(), pretrained.get_output_embeddings()
    ties, tied = Ties(model), 2 if embed is not None and head is not None and embed.weight is head.weight else 1
    if any(module is not None and ties.shared(module, tied) for module in (embed, head)):
        return {}
    plain_embed = type(embed) is nn.Embedding and embed.max_norm is None and not embed.sparse
    plain_head = type(head) is nn.Linear and head.bias is None
    if tied == 2 and not (plain_embed and plain_head):
        return {}
    names = {module: name for name, module in model.named_modules()}
    candidates = ((embed, plain_embed), (head, plain_head))
    return {names[module]: module for module, plain in candidates if plain and module in names}


def _check_supported(
    model: nn.Module, blocks: Mapping[str, tuple[Columns, str]], vocab_modules: Mapping[str, nn.Module], group: Any
) -> None:
    kind, world = type(model).__name__, group_size(group)
    if swapped_linears(model):
        raise ConfigError(
            f"the linears of {kind} are already swapped; swap a freshly loaded model, or call gather_linears to get "
            "its full weights"
        )
    if not blocks and not vocab_modules:
        supported = "; ".join(f"{', '.join(columns)} and {row}" for columns, row in BLOCKS)
        raise UnsupportedModel(f"{kind} has no feed-forward block of plain linears; supported are {supported}")
    linears = [f"{name}.{key}".lstrip(".") for name, (columns, row) in blocks.items() for key in (*columns, row)]
    Ties(model).refuse({name: model.get_submodule(name) for name in linears}, "swap_linears")
    for name in (*linears, *vocab_modules):
        module = model.get_submodule(name)
        replaced = module.named_parameters(name) if world > 1 else ()  # else the parameters are kept
        refuse_hooks("swap_linears", [(name, module)], replaced, calls=name not in vocab_modules)
    for name, (columns, row) in blocks.items():
        block = model.get_submodule(name)
        for module in (block, *(block.get_submodule(key) for key in (*columns, row))):
            if "forward" in vars(module):
                raise UnsupportedModel(f"a forward in {name} was replaced, by device_map offloading or a kernel")
            if module is not block and type(module) is not nn.Linear:
                raise UnsupportedModel(f"{name} has a {type(module).__name__}; expected a plain nn.Linear")
        if block._forward_pre_hooks:
            raise UnsupportedModel(f"{name} has forward hooks; register them after swap_linears")
        if any(isinstance(child, nn.Dropout) and child.p > 0 for child in block.modules()):
            raise UnsupportedModel(f"{name} has dropout, which would differ between the ranks of the group")
        width = block.get_submodule(row).in_features
        if width % world:  # type: ignore[operator]
            raise ConfigError(f"{name}: the width {width} is not divisible by the {world} ranks of the group")
    for name in (*blocks, *vocab_modules):
        for weight in model.get_submodule(name).parameters():
            if isinstance(weight, DTensor):
                raise UnsupportedModel(f"{name} is already distributed (its parameters are DTensors)")
            if weight.dtype not in _TOLERANCE:
                raise UnsupportedModel(f"{name} is quantized ({weight.dtype})")


def _sharded_linears(
    block: nn.Module, structure: tuple[Columns, str], group: ProcessGroup | None
) -> dict[str, ColumnParallelLinear | RowParallelLinear]:
    """Return the local shards of the linears of ``block``. ``_GatherInput`` handles the block's input."""
    columns, row = structure
    sharded: dict[str, ColumnParallelLinear | RowParallelLinear] = {}
    for key, segments in columns.items():
        linear: Any = block.get_submodule(key)
        sharded[key] = ColumnParallelLinear.from_linear(linear, group, segments=segments, gathers_input=False)
    linear = block.get_submodule(row)
    sharded[row] = RowParallelLinear.from_linear(linear, group)
    for module in sharded.values():
        module.train(block.training)
    return sharded


@torch.no_grad()
def _check_block(block: nn.Module, structure: tuple[Columns, str], group: ProcessGroup | None, name: str) -> None:
    """Compare the outputs of ``block`` before and after sharding on a few rows. The block is unchanged afterwards.

    Raises:
        UnsupportedModel: the outputs differ on any rank. Raised on every rank.
    """
    columns, row = structure
    weight: Any = block.get_submodule(row).weight
    if group_size(group) == 1 or weight.device.type == "meta":
        return
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(_TEST_ROWS, weight.shape[0], generator=generator, dtype=torch.float32, device="cpu").to(weight)
    linears = {key: block.get_submodule(key) for key in (*columns, row)}
    problem, equal = "", False
    try:
        expected_TD = block(x_TD)
        _replace_linears(block, _sharded_linears(block, structure, group))
        largest = float((block(x_TD) - expected_TD).abs().max())
        equal = largest <= _TOLERANCE[weight.dtype] * float(expected_TD.abs().max())
        problem = f"the outputs differ by up to {largest:.2g} from those of the original block"
    except MoeCommError:
        raise
    except (AttributeError, RuntimeError, TypeError) as error:  # the forward does not match the structure
        problem = f"its forward failed ({error})"
    finally:
        _replace_linears(block, linears)
    equal_on_ranks = (
        gather_values(torch.tensor([equal], dtype=torch.bool, device=weight.device), group, f"a check of {name}")
        .flatten()
        .tolist()
    )
    if not all(equal_on_ranks):
        if equal:
            problem = f"it failed on ranks {[rank for rank, is_equal in enumerate(equal_on_ranks) if not is_equal]}"
        raise UnsupportedModel(
            f"{name} ({type(block).__name__}) cannot be sharded over {group_size(group)} ranks: "
            f"{problem}. Its forward is not elementwise between its linears."
        )


def _replace_linears(block: nn.Module, linears: Mapping[str, nn.Module]) -> None:
    for key, linear in linears.items():
        setattr(block, key, linear)


def _mark_replaced(old: nn.Module, new: nn.Module, name: str) -> None:
    for key, param in old.named_parameters():
        mark_replaced(param, new.get_parameter(key), f"{name}.{key}".lstrip("."), "swap_linears")


def _shard_vocab_modules(model: nn.Module, vocab_modules: Mapping[str, nn.Module], group: ProcessGroup | None) -> None:
    by_weight: dict[nn.Parameter, ParallelModule] = {}
    for name, module in vocab_modules.items():
        weight = module.get_parameter("weight")
        if isinstance(module, nn.Embedding):
            replacement: Any = VocabParallelEmbedding.from_weight(weight, group, sequence_dim=None)
            replacement.padding_idx = module.padding_idx
        else:
            replacement = _Head.from_weight(weight, group, sequence_dim=None)
        if weight in by_weight:  # tied
            replacement.weight = by_weight[weight].weight
        by_weight[weight] = replacement
        _mark_replaced(module, replacement, name)
        take_call_hooks(replacement, module)
        replacement.train(module.training)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replacement)
