"""Work of documents on the ranks of context and data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_comm.layers.transformer.shape import ModelShape

SCORES_BACKWARD, WEIGHTS_BACKWARD = 2.5, 2.0
"""Backward FLOPs per forward FLOP: of scores, which flash attention computes again, and of products with weights."""


@dataclass(frozen=True)
class LengthCost:
    """Work of a document, in FLOPs of forward and backward of the whole model. Integers: equal on every machine.

    ``moe_plan.step.lengths`` converts it to time.

    Attributes:
        pair: work per query and key.
        token: work per token at its own rank. Experts are not included if their rows go to other ranks.
        document: work per document.
        window: tokens that a query attends to in the other layers than ``full_layers`` of ``layers``; None: all layers
            attend to all previous tokens.
        key_bytes: bytes per token that one rank receives and returns for attention: keys and values forward and
            backward, and their gradients, over all layers.
        transfers: (ranks, work per token of a document whose keys that many ranks exchange). ``measured_cost`` sets it.
    """

    pair: int
    token: int
    document: int = 0
    window: int | None = None
    full_layers: int = 0
    layers: int = 1
    key_bytes: int = 0
    transfers: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, shape: ModelShape, experts_stay: bool, itemsize: int = 4) -> LengthCost:
        """Return the cost of a model.

        Args:
            experts_stay: a rank computes the experts of its own tokens (ep = 1).
            itemsize: bytes of a key element. Gradients are fp32.
        """
        blocks = shape.blocks()
        pair = sum(times * block.per_context for block, times in blocks)
        token = sum(
            times * weight.flops
            for block, times in blocks
            for weight in block.weights
            if weight.product and (experts_stay or weight.operator != "experts")
        )
        attentions = sum(times for block, times in blocks if block.per_context)
        elements = shape.key_heads * (shape.score_dim + shape.value_dim)
        return cls(
            round(pair * (1 + SCORES_BACKWARD)),
            round(token * (1 + WEIGHTS_BACKWARD)),
            window=shape.window,
            full_layers=shape.full_layers,
            layers=shape.layers,
            key_bytes=attentions * elements * (2 * itemsize + 4),
        )

    def work(self, length: int) -> int:
        """Return the work of a document of ``length`` tokens."""
        return self.pair * self._pairs(length) + self.token * length + self.document

    def received(self, pieces: Sequence[tuple[int, int]]) -> int:
        """Return the tokens whose keys a rank with ``pieces`` of a document receives, as a mean over the layers.

        pieces: (first token, end) of each, ascending. The rank needs all tokens before, or those in the window.
        """
        before = [first - own for (first, _), own in zip(pieces, [0, *(last for _, last in pieces)], strict=False)]
        if self.window is None:
            return sum(before)
        narrow = sum(min(tokens, self.window - 1) for tokens in before)
        return narrow + (sum(before) - narrow) * self.full_layers // self.layers

    def exposed(self, lengths: Sequence[int], ranks: int) -> list[int]:
        """Return for documents on ``ranks`` ranks the work of each in transfers that its attention does not hide."""
        transfer = dict(self.transfers).get(ranks, 0)
        if not transfer:
            return [0] * len(lengths)
        return [
            max(0, transfer * self._received(length, ranks) - self.pair * self._pairs(length) // ranks)
            for length in lengths
        ]

    def _received(self, length: int, ranks: int) -> int:
        """Return the tokens of a document on ``ranks`` ranks whose keys are needed, as a mean over the layers."""
        if self.window is None:
            return length
        narrow = min(length, 2 * self.window * ranks // (ranks - 1))  # before both chunks of a rank
        return narrow + (length - narrow) * self.full_layers // self.layers

    def _pairs(self, length: int) -> int:
        """Return the queries and keys of a document, as a mean over the layers."""
        pairs = full = length * (length + 1) // 2
        window = self.window
        if window is not None and window < length:
            narrow = window * (window + 1) // 2 + (length - window) * window
            pairs = narrow + (full - narrow) * self.full_layers // self.layers
        return pairs
