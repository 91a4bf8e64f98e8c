"""The serial executor: dispatch, experts and combine one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

from torch import Tensor

from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.types import Dispatched, Layout
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.overlap.executors.base import ExpertCall
from moe_comm.overlap.executors.grouped import grouped


class SerialCall(ExpertCall):
    """Nothing is in transfer between the calls."""

    def __init__(self, dispatcher: Dispatcher, dispatched: Dispatched, weights_TK: Tensor) -> None:
        self._dispatcher, self._layout, self._weights_TK = dispatcher, dispatched.layout, weights_TK
        self.rows = dispatched.rows_RD

    @property
    def layout(self) -> Layout:
        return self._layout

    def compute(self, rows: Tensor, rows_per_expert: Sequence[int], mlp: ExpertMLP) -> Tensor:
        dispatcher, label = self._dispatcher, self._layout.label
        mlp.check(rows, rows_per_expert)
        # Not a guard of this object, which holds the rows.
        guard = partial(dispatcher.abort_on_error, label)
        return grouped(mlp, rows, rows_per_expert, dispatcher.empty_rows, label, guard)

    def combine(self, rows: Tensor) -> Tensor:
        return self._dispatcher.combine(rows, self._weights_TK, self._layout)

    def abort_on_error(self) -> AbstractContextManager[None]:
        return self._dispatcher.abort_on_error(self._layout.label)
