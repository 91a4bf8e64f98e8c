"""How the experts of each model family are stored and computed.

Every MoE block of transformers 5 has a router and an ``experts`` module with the stacked weights of all experts, which
is called as ``experts(x_TD, ids_TK, weights_TK) -> y_TD``. Families differ in five properties. The decorator
``use_experts_implementation`` of transformers records them as attributes of the module, where this module reads them:

                  Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V3    gpt-oss
    gate_up_proj  [E, 2F, D]                                           [E, D, 2F]
    gate and up   concatenated                                         interleaved
    down_proj     [E, D, F]                                            [E, F, D]
    biases        no                                                   yes
    gate          silu(gate) * up                                      clamped, gate * sigmoid(alpha * gate) * (up + 1)

Families that are not in ``FAMILIES`` are supported too if their experts have these attributes, including experts with
their own gate function. Experts with other features are rejected with an error that names the feature.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_comm.errors import UnsupportedModel
from moe_comm.kernels.activations import Activation, activation_of, clamped_swiglu, glu
from moe_comm.layers.moe.formula import ExpertsLayout
from moe_comm.runtime.versions import require

_LOOKS_LIKE_MOE = re.compile(r"(moe|experts?|mixture)", re.IGNORECASE)


@dataclass(frozen=True)
class ExpertsFamily:
    """A model family whose swapped and unswapped models the tests compare."""

    title: str
    experts_class: str


FAMILIES = (
    ExpertsFamily("Mixtral", "MixtralExperts"),
    ExpertsFamily("Qwen2-MoE", "Qwen2MoeExperts"),
    ExpertsFamily("Qwen3-MoE", "Qwen3MoeExperts"),
    ExpertsFamily("OLMoE", "OlmoeExperts"),
    ExpertsFamily("DeepSeek-V3", "DeepseekV3Experts"),
    ExpertsFamily("gpt-oss", "GptOssExperts"),
)


def is_experts(module: nn.Module) -> bool:
    """Return whether transformers marked ``module`` as stacked experts with a replaceable forward."""
    return all(hasattr(module, name) for name in ("is_transposed", "is_concatenated", "has_bias", "_apply_gate"))


def read_layout(module: nn.Module, name: str = "experts") -> ExpertsLayout:
    """Read the layout of an experts module from its attributes and parameters.

    Args:
        name: its name in the model, for error messages.

    Raises:
        UnsupportedModel: this library cannot compute experts of this kind. The message states the reason.
    """
    kind = type(module).__name__

    def unsupported(reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"{name} ({kind}) is not supported: {reason}. {supported_experts()}")

    if not is_experts(module):
        raise unsupported("it is not an experts module of transformers >= 5 (no use_experts_implementation)")
    experts: Any = module
    if not getattr(experts, "has_gate", True):
        raise unsupported("its experts have no gate, only up and down projections")
    if getattr(experts, "has_post_expert_norm", False):
        raise unsupported("it normalizes each expert's output")
    weights = dict(module.named_parameters(recurse=False))
    if "gate_up_proj" not in weights or "down_proj" not in weights:
        raise unsupported(
            f"gate_up_proj and down_proj must be plain parameters; its parameters are {sorted(weights) or 'none'}"
        )

    num_experts, *down = _local_shape(weights["down_proj"])
    hidden, ffn = down[::-1] if experts.is_transposed else down
    layout = ExpertsLayout(num_experts, hidden, ffn, _read_activation(module), experts.is_transposed, experts.has_bias)
    inner = [key for key, _ in (*module.named_parameters(), *module.named_buffers()) if key not in weights]
    if inner:
        raise unsupported(f"its activation has weights or buffers ({', '.join(inner)})")
    shapes = {key: _local_shape(value) for key, value in weights.items()}
    if shapes != layout.parameters:
        raise unsupported(f"its parameters have shapes {shapes}; its attributes imply {layout.parameters}")
    quantized = {str(value.dtype) for value in weights.values() if value.dtype not in _FLOATS}
    if quantized:
        raise unsupported(f"its weights are quantized ({', '.join(sorted(quantized))})")
    return layout


_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _local_shape(weight: Tensor) -> tuple[int, ...]:
    return tuple(weight.to_local().shape if isinstance(weight, DTensor) else weight.shape)


def _read_activation(module: nn.Module) -> Activation:
    """Return the fused activation if this library has one, else the module's gate function under torch autograd."""
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import _default_apply_gate

    kind: Any = type(module)
    experts: Any = module
    if kind._apply_gate is _default_apply_gate:
        if isinstance(experts.act_fn, (nn.SiLU, SiLUActivation)):
            return activation_of("swiglu")
        return Activation(f"{type(experts.act_fn).__name__} gate", glu(experts.act_fn))
    for base in kind.__mro__:  # FSDP2 inserts its own class before the model's
        if base.__name__ == "GptOssExperts" and base.__dict__.get("_apply_gate") is kind._apply_gate:
            return clamped_swiglu(float(experts.alpha), float(experts.limit))
    bare: Any = copy(module)
    bare._parameters = {}  # the gate function reads attributes only and must not keep the full weights alive
    return Activation(f"{kind.__name__}._apply_gate", bare._apply_gate)


def find_experts(
    model: nn.Module, selected: Callable[[str], bool] = lambda name: True
) -> dict[str, tuple[nn.Module, ExpertsLayout]]:
    """Return every experts module of ``model`` with its layout, by each of its names.

    selected: whether to return the module of a name.

    Raises:
        UnsupportedModel: the model has no experts module, or one of an unsupported kind.
        MissingDependency, ConfigError: as ``require_transformers``.
    """
    require_transformers()
    experts = {
        name: (module, read_layout(module, name))
        for name, module in model.named_modules(remove_duplicate=False)
        if is_experts(module) and selected(name)
    }
    if experts:
        return experts
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    title = type(model).__name__ + (f" (model type {model_type!r})" if model_type else "")
    kinds = sorted({type(module).__name__ for module in model.modules() if module is not model})
    similar = [kind for kind in kinds if _LOOKS_LIKE_MOE.search(kind)]
    if similar:
        raise UnsupportedModel(
            f"{title} has modules that look like MoE blocks but are of an unknown kind: {', '.join(similar)}. "
            f"{supported_experts()}"
        )
    contents = ", ".join(kinds[:12]) or "none"
    raise UnsupportedModel(f"{title} has no MoE block; its modules are {contents}. {supported_experts()}")


def supported_experts() -> str:
    """Return a sentence for error messages that names the supported experts modules."""
    supported = ", ".join(f"{family.title} ({family.experts_class})" for family in FAMILIES)
    return (
        f"Supported are the experts modules of {supported}, and others that transformers' ExpertsInterface can run "
        "and whose only parameters are gate_up_proj and down_proj, with or without biases."
    )


def require_transformers() -> None:
    """Raise ``MissingDependency`` or ``ConfigError`` unless a supported version of transformers is installed."""
    require("transformers", "moe_comm.integrations.hugging_face")


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
