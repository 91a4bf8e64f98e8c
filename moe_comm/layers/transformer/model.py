"""A decoder-only transformer with experts, or the part of it that one rank and one pipeline stage hold.

ids [B, S/cp] ─ embed ─▶ x [B, S/(cp*tp), D] ─ layers ─▶ x ─ norm ─▶ hidden ─ head, cross-entropy ─▶ loss
                first stage                                 last stage
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels.wide import wide_dtype
from moe_comm.layers.attention.rope import Rope, RopeTable
from moe_comm.layers.attention.sequence import Documents, local_positions
from moe_comm.layers.moe.layer import MoELayer
from moe_comm.layers.parallel.embedding import VocabParallelEmbedding, VocabParallelHead
from moe_comm.layers.parallel.interleave import StageInput, Steps, take_turns
from moe_comm.layers.parallel.module import ParallelModule
from moe_comm.layers.parallel.norm import RMSNorm
from moe_comm.layers.transformer.block import Tokens, TransformerBlock, materialize
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.model_plan import ModelPlan
from moe_comm.layers.transformer.shortcut import ShortcutBlock

__all__ = ["ModelPlan", "Transformer"]

EMBEDDING, HEAD = "embed.weight", "head.weight"


class Transformer(ParallelModule):
    """The part of ``config``'s model that ``plan`` gives this rank. Collective over the ranks of the stage.

    Names of parameters are those of the whole model, whatever the part: "embed.weight", "layers.3.attention.q.weight",
    "layers.3.moe.experts.w13", "norm.weight", "head.weight". Weights are NaN until ``initialize`` sets them or a
    checkpoint is loaded. On the meta device nothing is allocated or sent.

    Where the embedding is tied to the head and both are here, they are one parameter, "embed.weight". On the last of
    several pipeline stages the head holds a copy, "head.weight", that starts alike; see ``tied_names``.

    Every rank's loss is the sum over the tokens that are its own outside of attention, so losses add up over all ranks
    of the last stage; gradients are plain sums (``shardings_of`` says over which ranks). Auxiliary losses join in
    backward, at the layer where they arise.

    Attributes:
        embed: on the first stage. layers: by global id. norm, head: on the last stage.

    Raises:
        ConfigError: something does not divide over the plan's ranks, or the plan has layers that the model has not.
    """

    def __init__(self, config: TransformerConfig, plan: ModelPlan | None = None) -> None:
        super().__init__()
        self.config, self.plan = config, plan or ModelPlan()
        plan = self.plan
        held = tuple(range(config.layers)) if plan.layers is None else plan.layers
        if any(not 0 <= layer < config.layers for layer in held):
            raise ConfigError(f"the plan has layers {held}, but the model has {config.layers}, from 0")
        size = config.vocab, config.hidden
        ends: list[nn.Module] = []
        if plan.has_embedding:
            self.embed = VocabParallelEmbedding(*size, plan.tp_group, dtype=plan.dtype, device="meta")
            ends.append(self.embed)
        self.layers = nn.ModuleDict({str(layer): _block_of(config, layer, plan) for layer in held})
        if plan.has_head:
            self.norm = RMSNorm(config.hidden, config.norm_eps, dtype=plan.dtype, device="meta")
            self.head = VocabParallelHead(*size, plan.tp_group, dtype=plan.dtype, device="meta")
            ends += [self.norm, self.head]
        if not plan.is_meta:
            for module in ends:
                materialize(module, plan.device)
        if config.tie and plan.has_embedding and plan.has_head:
            self.head.weight = self.embed.weight
        attention = config.attention
        self.rope = Rope(attention.rope, attention.head_dim if attention.mla is None else attention.mla.rope_dim)

    @property
    def tied_names(self) -> tuple[str, ...]:
        """Names of the two copies of a tied embedding that lie on different stages; () if there are none."""
        whole = self.plan.has_embedding and self.plan.has_head
        return (EMBEDDING, HEAD) if self.config.tie and not whole else ()

    @property
    def tied_parameter(self) -> nn.Parameter | None:
        """The tied embedding, or this stage's copy of it; None if it is not tied, or not here."""
        if not self.config.tie or not (self.plan.has_embedding or self.plan.has_head):
            return None
        return self.embed.weight if self.plan.has_embedding else self.head.weight

    def origin_of(self, name: str) -> str:
        """Which parameter of the whole model ``name`` is a copy of: itself, but for the head of a tied embedding."""
        return EMBEDDING if name == HEAD and self.config.tie else name

    def shared_by_copies(self) -> list[Any]:
        """The plan, whose groups they communicate over too."""
        return [self.plan]

    def moe_layers(self) -> Iterator[MoELayer]:
        """The MoE layers of this stage, in order; a stage may have none."""
        for block in self.layers.values():
            if isinstance(block, TransformerBlock) and block.is_moe:
                yield block.moe

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Documents | Tensor | None = None,
    ) -> Tensor:
        """Run this stage on a micro-batch. Collective over all ranks of the stage.

        Args:
            x: on the first stage ids [B, S / cp], alike on the ranks of a tensor-parallel group; on others what the
                stage before returned.
            positions: [B or 1, S / cp] integers, for RoPE; None: places in the sequence.
            documents: [B, S / cp] ids of packed documents, which attend each within itself; or ``Documents`` of them,
                which saves each stage the exchange of the ids. None: each row is one.

        Returns:
            x_BSD [B, S / (cp * tp), D]; on the last stage after the final norm, as ``loss`` and ``logits`` take it.

        Raises:
            InputError: shapes that do not fit, or ids outside of the vocabulary.
            PeerDied, PeerTimeout: a rank of the stage is gone, or does not come.
        """
        x, tokens = self._enter(StageInput(x, positions, documents))
        for block in self.layers.values():
            x = block(x, tokens)
        return self._leave(x)

    def forward_in_turns(self, inputs: Sequence[StageInput]) -> tuple[Tensor, ...]:
        """``forward`` of several micro-batches, layer by layer in turns, so that one computes while what another sent
        is under way; see ``layers/parallel/interleave.py``. Collective over all ranks of the stage.

        Backward takes turns as well if it is one: ``torch.autograd.backward`` of all losses, or of their sum. Outputs,
        and gradients of activations, have the bits of one micro-batch after the other. So have the gradients of
        parameters for two micro-batches (a tied embedding's aside); for more they are added up in another order.

        Hooks on this module, its layers and their ``moe`` do not run.

        Args:
            inputs: the arguments of ``forward`` for each micro-batch.

        Returns:
            What ``forward`` returns, of each.

        Raises:
            ConfigError: ``recompute`` is "full", or a layer is wrapped (FSDP, activation checkpointing).
            InputError, PeerDied, PeerTimeout: as ``forward``.
        """
        from torch.distributed.fsdp import FSDPModule  # not at a model's import, which it would slow down

        if self.plan.recompute == "full":
            raise ConfigError(
                'layers with recompute "full" run in one go and cannot take turns; set it to "selective" or "none"'
            )
        blocks = [block for block in self.layers.values() if isinstance(block, TransformerBlock)]
        if len(blocks) < len(self.layers) or any(isinstance(block, FSDPModule) for block in blocks):
            raise ConfigError(
                "layers that are wrapped (FSDP, checkpointing) run in one go and cannot take turns: replicate weights, "
                'and compute again with ModelPlan(recompute="selective")'
            )
        return take_turns([self._steps(each, blocks) for each in inputs])

    def _steps(self, inputs: StageInput, blocks: Sequence[TransformerBlock]) -> Steps[Tensor]:
        x, tokens = self._enter(inputs)
        for block in blocks:
            x = yield from block.steps(x, tokens)
        return self._leave(x)

    def _enter(self, inputs: StageInput) -> tuple[Tensor, Tokens]:
        """Activations before the first layer, and what the layers need to know."""
        plan, x = self.plan, inputs.x
        if plan.has_embedding:
            if x.dim() != 2:
                raise InputError(f"the first stage takes token ids [B, S]; got {tuple(x.shape)}")
            length = x.shape[1]
            self._check_length(length)
            x = self.embed(x)
        else:
            if x.dim() != 3 or x.shape[-1] != self.config.hidden:
                raise InputError(f"this stage takes activations [B, S, {self.config.hidden}]; got {tuple(x.shape)}")
            length = x.shape[1] * plan.sizes["tp"]
            self._check_length(length)
        return x, self._tokens(x, length, inputs.positions, inputs.documents)

    def _leave(self, x_BSD: Tensor) -> Tensor:
        if not self.plan.has_head:
            return x_BSD
        normed_BSD: Tensor = self.norm(x_BSD)
        return normed_BSD

    def loss(self, hidden_BSD: Tensor, targets_BS: Tensor) -> Tensor:
        """Sum of the cross-entropy of the tokens that are this rank's own, scalar. Collective over the tp group.

        Args:
            hidden_BSD: what ``forward`` returned on the last stage.
            targets_BS: [B, S / cp] ids, alike on the ranks of a tensor-parallel group; -100 has no loss.
        """
        self._needs_head("the loss")
        return self.head.loss(hidden_BSD, targets_BS)

    def logits(self, hidden_BSD: Tensor) -> Tensor:
        """[B, S / cp, V] of all tokens of the tensor-parallel group, on each of its ranks. Collective over it.

        For evaluation and small models: holds the whole vocabulary's logits, which ``loss`` never does.
        """
        self._needs_head("logits")
        return self.head.full_logits(hidden_BSD)

    def close(self) -> None:
        """Give back what the dispatchers hold; calling it twice is allowed. Collective over the stage."""
        for layer in self.moe_layers():
            layer.dispatcher.close()

    def _tokens(
        self, x_BSD: Tensor, length: int, positions: Tensor | None, documents: Documents | Tensor | None
    ) -> Tokens:
        plan = self.plan
        if positions is None:
            places = local_positions(length * plan.sizes["cp"], plan.sizes["cp"], plan.place["cp"], plan.context)
            positions = places.unsqueeze(0).to(x_BSD.device)
        elif positions.dim() != 2:
            raise InputError(f"positions must be [B or 1, S]; got {tuple(positions.shape)}")
        rope: RopeTable = self.rope.table(positions, wide_dtype(x_BSD.dtype))
        if isinstance(documents, Tensor):
            documents = Documents.of(documents, plan.cp_group, plan.context)
        capacity = self.config.moe.capacity
        index_BS = None
        if capacity is not None and capacity.scope == "batch":
            index_BS = plan.token_index(x_BSD.shape[0], x_BSD.shape[1], x_BSD.device)
        return Tokens(rope, documents, index_BS)

    def _check_length(self, length: int) -> None:
        whole = length * self.plan.sizes["cp"]
        if whole > self.config.max_length:
            raise InputError(
                f"sequences of {whole} tokens are longer than the model's max_length {self.config.max_length}"
            )

    def _needs_head(self, what: str) -> None:
        if not self.plan.has_head:
            raise ConfigError(f"{what} is computed on the last pipeline stage; this one has no head")

    def extra_repr(self) -> str:
        dtype = self.plan.dtype or torch.get_default_dtype()
        return f"{len(self.layers)} of {self.config.layers} layers, {dtype}, device={self.plan.device}"


def _block_of(config: TransformerConfig, layer: int, plan: ModelPlan) -> TransformerBlock:
    kind = ShortcutBlock if config.shortcut and layer not in config.dense_layers else TransformerBlock
    return kind(config, layer, plan)
