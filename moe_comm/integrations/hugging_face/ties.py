"""Find weights that several modules of a model share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn

from moe_comm.errors import UnsupportedModel


class Ties:
    """How many modules of ``model`` have each parameter, and each module as a child."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._parents = Counter(id(child) for module in modules for child in module.children())
        self._holders = Counter(id(param) for module in modules for param in module.parameters(recurse=False))

    def shared(self, module: nn.Module, holders: int = 1) -> bool:
        """Return whether ``module``, or a part of it, has several parents, or more than ``holders`` for a parameter."""
        return any(self._parents[id(part)] > 1 for part in module.modules()) or any(
            self._holders[id(param)] > holders for param in module.parameters()
        )

    def refuse(self, modules: Mapping[str, nn.Module], call: str) -> None:
        """Raise UnsupportedModel if one of ``modules``, which ``call`` would shard one by one, is shared."""
        for name, module in modules.items():
            if self.shared(module):
                raise UnsupportedModel(
                    f"{name} shares weights with another module of the model; {call} cannot keep them equal. Load the "
                    "model without these ties"
                )
