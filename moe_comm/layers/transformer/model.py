"""A decoder-only MoE transformer, or the part of it that one rank and one pipeline stage hold.

ids [B, S/cp] ─ embed ─▶ x [B, S/(cp*tp), D] ─ layers ─▶ x ─ norm ─▶ hidden ─ head, cross-entropy ─▶ loss
                first stage                                 last stage
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels.autograd import accumulate_dtype
from moe_comm.layers.attention.placed import PlacedDocuments
from moe_comm.layers.attention.rope import Rope, RopeTable
from moe_comm.layers.attention.sequence import Documents, local_positions
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.parallel.dense import RMSNorm
from moe_comm.layers.parallel.embedding import VocabParallelEmbedding, VocabParallelHead
from moe_comm.layers.parallel.interleave import Steps, TurnParameters, finish, in_turns
from moe_comm.layers.parallel.module import ParallelModule
from moe_comm.layers.transformer.block import ShortcutBlock, TokenContext, TransformerBlock, TurnTokens, materialize
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.model_plan import ModelPlan

__all__ = ["ModelPlan", "Transformer"]

EMBEDDING, HEAD = "embed.weight", "head.weight"


@dataclass(frozen=True, eq=False)
class StageInput:
    """Arguments of ``Transformer.forward`` for one micro-batch."""

    x: Tensor
    positions: Tensor | None = None
    documents: Documents | Tensor | None = None
    mask: Tensor | None = None


class Transformer(ParallelModule):
    """The part of the model ``config`` that ``plan`` assigns to this rank. Collective over the ranks of the stage.

    Parameter names are those of the full model: "embed.weight", "layers.3.attention.q.weight",
    "layers.3.moe.experts.w13", "norm.weight", "head.weight". Weights are NaN until ``initialize`` sets them or a
    checkpoint is loaded. On the meta device nothing is allocated or sent.

    If the embedding is tied to the head and both are on this stage, they are one parameter, "embed.weight". On the last
    of several pipeline stages, the head holds a copy, "head.weight", with the same initial values; see ``tied_names``.

    Each rank's loss is the sum over its own tokens outside of attention, so losses add up over all ranks of the last
    stage. Gradients are plain sums; ``shardings_of`` describes over which ranks. Auxiliary losses are attached to the
    backward pass of their layer.

    Args:
        plan: groups, layers and options of this rank; None: the full model on one rank.

    Attributes:
        embed: embedding, on the first stage.
        layers: blocks by global id.
        norm, head: final norm and output projection, on the last stage.
        turn_parameters: leaves of the parameters for ``forward_in_turns``.

    Raises:
        ConfigError: a size is not divisible by the number of ranks, or the plan has layers that do not exist.
    """

    def __init__(self, config: TransformerConfig, plan: ModelPlan | None = None) -> None:
        super().__init__()
        self.config, self.plan = config, plan or ModelPlan()
        plan = self.plan
        layer_ids = tuple(range(config.layers)) if plan.layers is None else plan.layers
        if any(not 0 <= layer < config.layers for layer in layer_ids):
            raise ConfigError(f"the layers of the plan must be in 0..{config.layers - 1}; got {layer_ids}")
        size = config.vocab, config.hidden
        end_modules: list[nn.Module] = []
        if plan.has_embedding:
            self.embed = VocabParallelEmbedding(*size, plan.tp_group, dtype=plan.dtype, device="meta")
            end_modules.append(self.embed)
        self.layers = nn.ModuleDict({str(layer): _block_of(config, layer, plan) for layer in layer_ids})
        if plan.has_head:
            self.norm = RMSNorm(config.hidden, config.norm_eps, dtype=plan.dtype, device="meta")
            self.head = VocabParallelHead(*size, plan.tp_group, dtype=plan.dtype, device="meta")
            end_modules += [self.norm, self.head]
        if not plan.is_meta:
            for module in end_modules:
                materialize(module, plan.weights_device or plan.device)
        if config.tie and plan.has_embedding and plan.has_head:
            self.head.weight = self.embed.weight
        self.turn_parameters = TurnParameters()
        attention = config.attention
        self.rope = Rope(attention.rope, attention.head_dim if attention.mla is None else attention.mla.rope_dim)

    @property
    def tied_names(self) -> tuple[str, ...]:
        """Names of the two copies of a tied embedding on different stages; () otherwise."""
        on_one_stage = self.plan.has_embedding and self.plan.has_head
        return (EMBEDDING, HEAD) if self.config.tie and not on_one_stage else ()

    def origin_of(self, name: str) -> str:
        """Return the parameter that ``name`` is a copy of: the embedding for a tied head, else ``name``."""
        return EMBEDDING if name == HEAD and self.config.tie else name

    def shared_by_copies(self) -> list[Any]:
        """Return the plan, whose groups the copies use as well."""
        return [self.plan]

    def moe_layers(self) -> Iterator[MoELayer]:
        """Iterate over the MoE layers of this stage, in order; a stage may have none."""
        for block in self.layers.values():
            if isinstance(block, TransformerBlock) and block.is_moe:
                yield block.moe

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Documents | Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Run this stage on a micro-batch. Collective over all ranks of the stage.

        Args:
            x: on the first stage ids [B, S / cp], equal on the ranks of a tensor-parallel group; on other stages the
                output of the previous stage.
            positions: [B or 1, S / cp] integers for RoPE; None: positions in the sequence.
            documents: [B, S / cp] ids of packed documents, or ``Documents``, which saves the exchange of the ids.
                Tokens attend within their document. None: each sequence is one document.
            mask: [B, S / cp] bool, False for padding, which MoE layers skip (``MoELayer.forward``). Attention does not
                use it: put padding after the tokens of a sequence, or into documents of its own. None: no padding.

        Returns:
            x_BSD [B, S / (cp * tp), D]; on the last stage after the final norm, as ``loss`` and ``logits`` expect it.

        Raises:
            InputError: shapes do not match, or ids are outside of the vocabulary.
            PeerDied, PeerTimeout: a rank of the stage failed, or did not call in time.
        """
        x, tokens = self._prepare_input(StageInput(x, positions, documents, mask))
        for block in self.layers.values():
            x = block(x, tokens)
        return self._finish_output(x)

    def forward_in_turns(self, inputs: Sequence[StageInput]) -> tuple[Tensor, ...]:
        """Run ``forward`` for several micro-batches, interleaved layer by layer. Collective over the stage.

        One micro-batch computes while transfers of another are in flight; see ``layers/parallel/interleave.py``.
        Backward is interleaved as well if one ``torch.autograd.backward`` covers all losses of ``losses_in_turns``, or
        their sum. Outputs and gradients have the bits of sequential micro-batches.

        Layers whose forward pass must not be divided (``recompute`` "full", FSDP, other wrappers) run as modules on all
        micro-batches. Their micro-batches are interleaved, but the layer ends when all are complete, so the last
        combine is not hidden. Hooks of other layers, and of this module, do not run.

        Args:
            inputs: the arguments of ``forward`` for each micro-batch.

        Returns:
            The result of ``forward`` for each micro-batch.

        Raises:
            ConfigError: an FSDP unit inside of a layer is not gathered with the layer.
            InputError, PeerDied, PeerTimeout: as ``forward``.
        """
        return finish(self.forward_steps(inputs))

    def forward_steps(self, inputs: Sequence[StageInput]) -> Steps[tuple[Tensor, ...]]:
        """Run ``forward_in_turns``, but yield where other work can hide transfers in flight.

        With FSDP, call ``forward_in_turns``, which gathers the weights of the root.
        """
        from torch.distributed.fsdp import FSDPModule  # imported here because it is slow

        blocks = list(self.layers.values())
        whole = self.plan.recompute == "full" or any(
            not isinstance(block, TransformerBlock) or isinstance(block, FSDPModule) for block in blocks
        )
        if not whole:
            return (yield from in_turns([self._steps(turn, one) for turn, one in enumerate(inputs)]))
        prepared = [self._begin_turn(turn, micro_batch) for turn, micro_batch in enumerate(inputs)]
        xs = tuple(x for x, _ in prepared)
        tokens = TurnTokens(tuple(tokens for _, tokens in prepared), self.turn_parameters)
        for block in blocks:
            xs = block(xs, tokens)
            yield
        return tuple(self._end_turn(turn, x) for turn, x in enumerate(xs))

    def losses_in_turns(self, hidden: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return ``loss`` of each micro-batch of ``forward_in_turns``. Collective over the tp group."""
        losses = []
        for turn, (hidden_BSD, targets_BS) in enumerate(zip(hidden, targets, strict=True)):
            with self.turn_parameters.used(turn, self.head):
                losses.append(self.loss(hidden_BSD, targets_BS))
        return tuple(losses)

    def _steps(self, turn: int, inputs: StageInput) -> Steps[Tensor]:
        x, tokens = self._begin_turn(turn, inputs)
        for block in self.layers.values():
            assert isinstance(block, TransformerBlock)
            x = yield from self.turn_parameters.steps(turn, block, block.steps(x, tokens))
        return self._end_turn(turn, x)

    def _begin_turn(self, turn: int, inputs: StageInput) -> tuple[Tensor, TokenContext]:
        with self.turn_parameters.used(turn, *([self.embed] if self.plan.has_embedding else [])):
            return self._prepare_input(inputs)

    def _end_turn(self, turn: int, x_BSD: Tensor) -> Tensor:
        with self.turn_parameters.used(turn, *([self.norm] if self.plan.has_head else [])):
            return self._finish_output(x_BSD)

    def _prepare_input(self, inputs: StageInput) -> tuple[Tensor, TokenContext]:
        """Return the input of the first layer and the context of its tokens."""
        plan, x = self.plan, inputs.x
        if plan.has_embedding:
            if x.dim() != 2:
                raise InputError(f"the first stage expects token ids [B, S]; got {tuple(x.shape)}")
            length = x.shape[1]
            self._check_length(length, inputs)
            x = self.embed(x)
        else:
            if x.dim() != 3 or x.shape[-1] != self.config.hidden:
                raise InputError(f"this stage expects activations [B, S, {self.config.hidden}]; got {tuple(x.shape)}")
            length = x.shape[1] * plan.sizes["tp"]
            self._check_length(length, inputs)
        return x, self._token_context(x, length, inputs)

    def _finish_output(self, x_BSD: Tensor) -> Tensor:
        if not self.plan.has_head:
            return x_BSD
        normed_BSD: Tensor = self.norm(x_BSD)
        return normed_BSD

    def loss(self, hidden_BSD: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the sum of the cross-entropy over this rank's tokens, a scalar. Collective over the tp group.

        Args:
            hidden_BSD: result of ``forward`` on the last stage.
            targets_BS: [B, S / cp] ids, equal on the ranks of a tensor-parallel group; -100 has no loss.

        Raises:
            ConfigError: this stage has no head.
        """
        self._needs_head("the loss")
        return self.head.loss(hidden_BSD, targets_BS)

    def logits(self, hidden_BSD: Tensor) -> Tensor:
        """Return [B, S / cp, V] logits of all tokens of the tensor-parallel group, on each rank. Collective over it.

        For evaluation and small models: materializes the logits of the full vocabulary, which ``loss`` avoids.

        Raises:
            ConfigError: this stage has no head.
        """
        self._needs_head("logits")
        return self.head.full_logits(hidden_BSD)

    def close(self) -> None:
        """Release the resources of the dispatchers; repeated calls are allowed. Collective over the stage."""
        for layer in self.moe_layers():
            layer.dispatcher.close()

    def _token_context(self, x_BSD: Tensor, length: int, inputs: StageInput) -> TokenContext:
        plan, positions, documents, mask_BS = self.plan, inputs.positions, inputs.documents, inputs.mask
        if positions is None:
            positions_S = local_positions(length * plan.sizes["cp"], plan.sizes["cp"], plan.place["cp"], plan.context)
            positions = positions_S.unsqueeze(0).to(x_BSD.device)
        elif positions.dim() != 2:
            raise InputError(f"positions must be [B or 1, S]; got {tuple(positions.shape)}")
        rope: RopeTable = self.rope.table(positions, accumulate_dtype(x_BSD.dtype))
        if isinstance(documents, Tensor):
            documents = Documents.of(documents, plan.cp_group, plan.context)
        capacity = self.config.moe.capacity
        index_BS = None
        if capacity is not None and capacity.scope == "batch":
            index_BS = plan.token_index(x_BSD.shape[0], x_BSD.shape[1], x_BSD.device)
        if mask_BS is not None:
            if tuple(mask_BS.shape) != (x_BSD.shape[0], length) or mask_BS.dtype != torch.bool:
                raise InputError(
                    f"the mask must be bool {(x_BSD.shape[0], length)}; got {mask_BS.dtype} {tuple(mask_BS.shape)}"
                )
            local = x_BSD.shape[1]  # with sequence parallelism, the part of this tensor-parallel rank
            mask_BS = mask_BS[:, plan.place["tp"] * local :][:, :local] if local < length else mask_BS
        return TokenContext(rope, documents, index_BS, mask_BS)

    def _check_length(self, length: int, inputs: StageInput) -> None:
        if isinstance(inputs.documents, PlacedDocuments):
            return  # the tokens of a rank are of several sequences
        full = length * self.plan.sizes["cp"]
        if full > self.config.max_length:
            raise InputError(f"sequences must have at most max_length = {self.config.max_length} tokens; got {full}")

    def _needs_head(self, what: str) -> None:
        if not self.plan.has_head:
            raise ConfigError(f"{what} can be computed on the last pipeline stage only; this stage has no head")

    def extra_repr(self) -> str:
        dtype = self.plan.dtype or torch.get_default_dtype()
        return f"{len(self.layers)} of {self.config.layers} layers, {dtype}, device={self.plan.device}"


def _block_of(config: TransformerConfig, layer: int, plan: ModelPlan) -> TransformerBlock:
    kind = ShortcutBlock if config.shortcut and layer not in config.dense_layers else TransformerBlock
    return kind(config, layer, plan)
