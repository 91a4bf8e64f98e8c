"""``swap_moe``: make the MoE blocks of a loaded model expert-parallel, of transformers or of the user's own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from moe_comm.comm.channel import Channel
from moe_comm.comm.group_setup import as_group, communicator_of, group_or_default, group_rank, group_size
from moe_comm.dispatch import DispatchOptions
from moe_comm.errors import ConfigError, MoeCommError, UnsupportedModel
from moe_comm.integrations.blocks.adapter import adapted_blocks, is_inside
from moe_comm.integrations.blocks.block import BlockPlan
from moe_comm.integrations.blocks.find import FoundBlock, find_blocks, overlooked_blocks
from moe_comm.integrations.blocks.swap import Planned, on_any_rank, optional_blocks, plan_blocks, swap_blocks
from moe_comm.integrations.hugging_face.families import find_experts, is_experts
from moe_comm.integrations.hugging_face.state import of_peft
from moe_comm.integrations.hugging_face.swap import (
    EPExperts,
    guard_libraries,
    keep_experts_only,
    load_adapter,
    names_by_weights,
    refuse_conflicts,
    save_pretrained,
    swap_experts,
    swapped_experts,
    unwrapped_name,
)
from moe_comm.kernels.fp8 import GemmDtype, check_gemm_dtype
from moe_comm.layers.data_parallel import prepare_ddp
from moe_comm.layers.data_parallel.replicas import check_loaded
from moe_comm.layers.moe.config import expert_dispatcher
from moe_comm.layers.moe.formula import ExpertsLayout
from moe_comm.layers.moe.trial import device_of
from moe_comm.lazy import after_import
from moe_comm.overlap.options import Overlap
from moe_comm.runtime.versions import require
from moe_comm.topology import Placement

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger(__name__)


def parallelize_moe(
    model: nn.Module,
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    backend: str = "auto",
    options: DispatchOptions | None = None,
    overlap: Overlap | Literal["auto"] | None = None,
    expert_gemm_dtype: GemmDtype = "same",
    placement: Placement | Sequence[int] | None = None,
) -> Any:
    """Make the MoE blocks of a loaded model expert-parallel over ``group``. Collective.

        model = AutoModelForCausalLM.from_pretrained(folder)
        model = moe_comm.swap_moe(model)                        # this rank now holds only its local experts
        loss = model(input_ids, labels=input_ids).loss          # each rank passes its own batch

    Every rank must pass a model with the same weights. They are compared by checksums, which reads the model once;
    tensors on "meta" are not compared. After the swap, each rank runs the model on its own batch. Experts are
    distributed in contiguous ranges of nearly equal size (7 experts on 2 ranks: 4 and 3), or by ``placement``. The
    weights of remote experts are freed when nothing else references them, so build the optimizer after the swap.

    Blocks that are not from transformers are recognised by what their experts compute, or described by
    ``block_adapter``. Their forward pass remains the user's code, see docs/swap.md. Each kind of block is compared with
    a swapped copy on random tokens, forward and backward in fp32, before the model is changed. A copy has one block's
    parameters, and at most 64 activations of each expert unless its code needs all. In a model that has blocks of
    transformers, other modules that look like MoE blocks and are not supported are left unchanged, and a warning names
    them.

    A model on "meta" stays there: parameters of experts have the shapes of this rank's. Its blocks are checked with
    random weights. Load it with ``moe_comm.load_checkpoint``, or with ``to_empty`` and ``load_state_dict``.

    Gradients: in a custom loop, divide the loss by the number of tokens on all ranks and call
    ``moe_comm.sync_gradients(model)`` after ``backward``. ``DistributedDataParallel(model)`` needs no other change: it
    averages gradients, and the gradients of experts are then scaled to match. Before ``fully_shard``, call
    ``moe_comm.prepare_fsdp(model)``.

    Padding: the tokens that a 2-D ``attention_mask`` of the model excludes are not dispatched, and the experts return
    zeros for them. Other masks have no such effect.
    Saving: ``save_swapped(model, folder)`` or ``gather_state_dict(model)``, on every rank. ``model.named_parameters()``
    has the experts of this rank only.

    Generation: use ``moe_comm.serving(model)``. Without it, every rank must run the same number of forward passes.

    Args:
        model: a ``PreTrainedModel``, or any module that contains MoE blocks. Changed in place.
        group: ranks to distribute the experts over: a process group, or a DeviceMesh of one dimension or with a
            dimension "ep". None: the default group, and without ``torch.distributed`` this process. To keep all experts
            on each of several ranks, pass a group of one rank:
            ``dist.new_group([dist.get_rank()], use_local_synchronization=True)``. The first rank logs what is
            distributed, as a warning for None.
        backend: dispatch backend, see ``moe_comm.make_dispatcher``. All blocks share one dispatcher.
        options: timeouts and checks.
        overlap: executor of dispatch, experts and combine, see ``MoELayer``. It does not change the results. None runs
            them serially.
        expert_gemm_dtype: operands of the experts' forward GEMMs, see ``Experts.gemm_dtype``. "fp8" needs a hidden size
            that is a multiple of 128, and another executor than "device".
        placement: the ranks that hold each expert, the same in every block; or the number of experts of each rank. With
            numbers of which some are 0, the other ranks keep only their experts, and compute them for the ranks without
            experts, see ``serve_experts``.

    Returns:
        ``model``.

    Raises:
        UnsupportedModel: the model has no MoE block, has one of an unsupported kind, or is already distributed by
            other means, or a swapped copy of a block differs from it. The model is unchanged.
        ConfigError: the model is already swapped, the backend is unknown, fp8 does not support the hidden size, or the
            placement does not fit the model.
        RankMismatch: ranks pass different arguments, or models with different weights. On every rank; the model is
            unchanged.
    """
    overlap, defaulted = Overlap.of(overlap), group is None
    group = group_or_default(as_group(group, "ep"))
    world = group_size(group)
    timeout_s = (options or DispatchOptions()).timeout_s
    channel = Channel(communicator_of(group, timeout_s), timeout_s) if group is not None and world > 1 else None
    device = torch.get_default_device()  # that weights on meta will be on
    fault: MoeCommError | None = None
    blocks: dict[str, tuple[nn.Module, ExpertsLayout]] = {}
    sharing: list[list[str]] = []
    found: list[FoundBlock] = []
    overlooked: list[str] = []
    own: list[Planned] = []
    optional: set[FoundBlock] = set()
    refused: dict[int, UnsupportedModel] = {}
    of_transformers: set[str] = set()
    adapted: list[str] = []
    linear_adapters: dict[str, Any] = {}
    placements = dict[int, Placement]()
    try:
        given: Any = model
        if not isinstance(given, nn.Module):
            model = nn.Module()
            raise ConfigError(f"swap_moe takes a model in memory, an nn.Module; got {given!r}. See from_pretrained")
        _refuse_swapped(model)
        with _without_adapters(model) as taken:
            described = adapted_blocks(model)
            left = [name for name, description in described.items() if description is None]
            of_transformers = {
                unwrapped_name(name).rpartition(".")[0]
                for name, module in model.named_modules()
                if is_experts(module) and not is_inside(name, left)
            }
            found = find_blocks(model, device, described, of_transformers)
            overlooked = overlooked_blocks(model, found)
            optional = optional_blocks(found, bool(of_transformers))
            own, refused = plan_blocks(model, found, optional)
            linear_adapters.update(taken)
        if of_transformers or not own:
            blocks = find_experts(model, lambda name: not is_inside(name, left))
            refuse_conflicts(model, blocks, world)
            sharing = names_by_weights(model, blocks)
            adapted = [name for name in blocks if _has_adapters(model, name)]
        for layout in (*(layout for _, layout in blocks.values()), *(plan.formula.layout for _, plan in own)):
            check_gemm_dtype(expert_gemm_dtype, layout.hidden)
            count = layout.num_experts
            if isinstance(placement, Placement):
                placements[count] = placement.fitting(count, world)
            else:
                placements[count] = Placement.contiguous(count, world, placement)
            if options is not None and options.balance is not None:
                placements[count] = options.balance.placement(placements[count])
        for block, plan in own if linear_adapters else ():
            settings = expert_gemm_dtype, overlap, placements[block.num_experts]
            _block_lora().refuse_adapters(linear_adapters, block, plan, settings)
        for name in adapted:
            _lora().refuse_wrappers(model, name, expert_gemm_dtype, overlap, placements[blocks[name][1].num_experts])
    except UnsupportedModel as error:
        fault = _of_quantized_experts(model, found, error) or error
    except MoeCommError as error:
        fault = error
    except Exception as error:  # of the user's code: the other ranks wait
        fault = UnsupportedModel(f"swap_moe: reading the model raised {type(error).__name__}: {error}")
        fault.__cause__ = error
    if channel is not None:
        check_loaded(model, channel, fault)
    if fault is not None:
        raise fault
    left_alone = dict.fromkeys(overlooked, "its experts do not have the same parameters")
    if optional:
        for number in on_any_rank(refused, group):
            left_alone[found[number].name] = str(refused.get(number, "it is not supported on another rank"))
            own = [(block, plan) for block, plan in own if block is not found[number]]
    first = next(iter(blocks.values()))[0] if blocks else own[0][0].block  # a model may be on several devices
    device, fp8 = device_of(first, device), expert_gemm_dtype == "fp8"
    dispatchers = {
        count: expert_dispatcher(placements[count], group, backend, options, overlap, fp8, device=device)
        for count in sorted({layout.num_experts for _, layout in blocks.values()} | {b.num_experts for b, _ in own})
    }
    with _without_adapters(model) as taken:
        after = partial(_adopt, model, taken)
        left_alone |= swap_blocks(model, own, dispatchers, overlap, optional, after)
    swap_experts(model, blocks, sharing, dispatchers, overlap)
    for experts in swapped_experts(model).values():
        experts.gemm_dtype = expert_gemm_dtype
    for name in adapted:
        _lora().adopt(model, name)
    if adapted or linear_adapters:
        _lora().audit_without_router(model)
    if not isinstance(placement, Placement | None) and 0 in placement and placement[group_rank(group)]:
        keep_experts_only(model)
    prepare_ddp(model)
    if world > 1:
        guard_libraries()
        # PEFT's model saves all experts; see ``lora.py``.
        swapped_model: Any = model
        if of_peft(model) and hasattr(model, "get_base_model"):
            swapped_model = swapped_model.get_base_model()
        if hasattr(swapped_model, "save_pretrained"):
            swapped_model.save_pretrained = MethodType(save_pretrained, swapped_model)
        if hasattr(swapped_model, "load_adapter") and not of_peft(swapped_model):
            swapped_model.load_adapter = MethodType(load_adapter, swapped_model)
    _log_swap(list(swapped_experts(model).values()), defaulted)
    if left_alone and group_rank(group) == 0:
        _log.warning(
            "swap_moe: %s unchanged, each rank keeps all their weights. The reason for the first: %s",
            ", ".join(left_alone),
            next(iter(left_alone.values())),
        )
    return model


swap_moe = parallelize_moe
"""Short alias of ``parallelize_moe``."""


def _has_adapters(model: nn.Module, name: str) -> bool:
    """Return whether PEFT wraps the experts module ``name``."""
    parent, _, child = name.rpartition(".")
    return child == "base_layer" and of_peft(model.get_submodule(parent))


def _lora() -> Any:
    require("peft", "LoRA on experts")
    from moe_comm.integrations.hugging_face import lora

    return lora


def _block_lora() -> Any:
    from moe_comm.integrations.blocks import lora

    return lora


def _without_adapters(model: nn.Module) -> AbstractContextManager[dict[str, Any]]:
    """Return a context in which PEFT's adapters of linear layers are taken off, and yields them by name."""
    context: AbstractContextManager[dict[str, Any]] = nullcontext({})
    supported = f"{__package__}.blocks.lora" in sys.modules  # ``_follow_peft`` has imported it
    return _block_lora().without_adapters(model) if supported and any(map(of_peft, model.modules())) else context


def _adopt(model: nn.Module, taken: dict[str, Any], block: FoundBlock, plan: BlockPlan) -> None:
    if taken:
        _block_lora().adopt(model, taken, block, plan)


def _log_swap(blocks: Sequence[EPExperts], defaulted: bool) -> None:
    """Log what is distributed on the first rank: as a warning if the default group was not passed explicitly."""
    first = blocks[0].dispatcher
    if first.rank == 0:
        experts = " or ".join(str(count) for count in sorted({block.num_experts for block in blocks}))
        level = logging.WARNING if defaulted and first.world > 1 else logging.INFO
        over = f"{first.world} ranks" + (", the default group" if defaulted and first.world > 1 else "")
        _log.log(level, "swap_moe: %d MoE blocks, %s experts over %s", len(blocks), experts, over)


def _of_quantized_experts(
    model: nn.Module, found: Sequence[FoundBlock], error: UnsupportedModel
) -> UnsupportedModel | None:
    """Return the error for experts that are quantized, in place of ``error``, which is a consequence."""
    paths = [f"{block.name}.{block.path}".strip(".") for block in found]
    for name, module in model.named_modules():
        if not (is_inside(name, paths) or "expert" in name):
            continue
        packed = [*module.parameters(recurse=False), *(one for one in module.buffers(recurse=False) if one.dim() > 1)]
        dtype = next((one.dtype for one in packed if not one.is_floating_point() or one.dtype.itemsize == 1), None)
        if dtype is not None:
            fault = UnsupportedModel(
                f"{name} ({type(module).__name__}) is quantized ({dtype}); swap_moe distributes experts in "
                "floating-point dtypes of 16 bits or more. Load the model without quantization, or dequantize it "
                "(model.dequantize(), or dequantize=True in the quantization_config of transformers). "
                "moe_comm.from_pretrained dequantizes fp8 with scales per block of 128 x 128 values"
            )
            fault.__cause__ = error
            return fault
    return None


def _refuse_swapped(model: nn.Module) -> None:
    already = swapped_experts(model)
    if already:
        name, first = next(iter(already.items()))
        raise ConfigError(
            f"{type(model).__name__} is already swapped ({name} is distributed over {first.dispatcher.world} ranks). "
            "Swap a freshly loaded model, or call gather_state_dict to get the full weights of this one."
        )


def _follow_peft() -> None:
    try:
        _lora().follow_peft()
    except MoeCommError as error:  # of another version, which can adapt other models and other modules
        _log.info("%s", error)
    else:
        _block_lora().follow_peft()


after_import(["peft.peft_model"], _follow_peft)
