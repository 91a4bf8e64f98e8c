"""How the experts of each model family are stored and computed.

Every MoE block of transformers 5 is a router beside an ``experts`` module that holds all experts stacked and is
called as ``experts(x_TD, ids_TK, weights_TK) -> y_TD``. Families differ in five facts only, which transformers itself
writes on the module (its decorator ``use_experts_implementation``), so they are read from there and not guessed:

                  Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V3    gpt-oss
    gate_up_proj  [E, 2F, D]                                           [E, D, 2F]
    gate and up   one after the other                                  interleaved
    down_proj     [E, D, F]                                            [E, F, D]
    biases        no                                                   yes
    gate          silu(gate) * up                                      clamped, gate * sigmoid(alpha * gate) * (up + 1)

A family that is not in ``FAMILIES`` but states such facts too, with its own gate function perhaps, is taken as well:
transformers' own ``grouped_mm`` relies on nothing else. Anything beyond them is refused by name.
"""

from __future__ import annotations

import re
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_comm.errors import MissingDependency, UnsupportedModel
from moe_comm.kernels.activations import Activation, activation_of, clamped_swiglu, glu

_LOOKS_LIKE_MOE = re.compile(r"(moe|experts?|mixture)", re.IGNORECASE)


@dataclass(frozen=True)
class Family:
    """A model family that the tests compare with the unswapped model."""

    title: str
    experts_class: str


FAMILIES = (
    Family("Mixtral", "MixtralExperts"),
    Family("Qwen2-MoE", "Qwen2MoeExperts"),
    Family("Qwen3-MoE", "Qwen3MoeExperts"),
    Family("OLMoE", "OlmoeExperts"),
    Family("DeepSeek-V3", "DeepseekV3Experts"),
    Family("gpt-oss", "GptOssExperts"),
)


@dataclass(frozen=True)
class ExpertsLayout:
    """What one experts module holds and computes.

    num_experts: experts whose weights the module holds.
    hidden, ffn: D and F.
    activation: between the two products; knows whether gate and up are interleaved.
    transposed: weights are [E, in, out] instead of [E, out, in].
    bias: there are ``gate_up_proj_bias`` [E, 2F] and ``down_proj_bias`` [E, D].
    """

    num_experts: int
    hidden: int
    ffn: int
    activation: Activation
    transposed: bool = False
    bias: bool = False

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter, as transformers stores it."""
        up, down = (2 * self.ffn, self.hidden), (self.hidden, self.ffn)
        shapes: dict[str, tuple[int, ...]] = {
            "gate_up_proj": (self.num_experts, *(up[::-1] if self.transposed else up)),
            "down_proj": (self.num_experts, *(down[::-1] if self.transposed else down)),
        }
        if self.bias:
            shapes["gate_up_proj_bias"] = (self.num_experts, 2 * self.ffn)
            shapes["down_proj_bias"] = (self.num_experts, self.hidden)
        return shapes


def is_experts(module: nn.Module) -> bool:
    """Whether transformers marked ``module`` as stacked experts with a replaceable forward."""
    return all(hasattr(module, fact) for fact in ("is_transposed", "is_concatenated", "has_bias", "_apply_gate"))


def read_layout(module: nn.Module, name: str = "experts") -> ExpertsLayout:
    """The layout of the experts module ``module``, which stands at ``name`` in its model.

    Raises:
        UnsupportedModel: the module is of a kind that this library cannot compute; says why.
    """
    kind = type(module).__name__

    def refuse(found: str) -> UnsupportedModel:
        return UnsupportedModel(f"{name} ({kind}) cannot be run by moe_comm: {found}. {looked_for()}")

    if not is_experts(module):
        raise refuse("it is not an experts module of transformers >= 5 (no use_experts_implementation)")
    facts: Any = module
    if not getattr(facts, "has_gate", True):
        raise refuse("its experts have no gate, only up and down projections")
    if getattr(facts, "has_post_expert_norm", False):
        raise refuse("it normalises each expert's output")
    weights = dict(module.named_parameters(recurse=False))
    if "gate_up_proj" not in weights or "down_proj" not in weights:
        raise refuse(f"gate_up_proj and down_proj are not plain parameters; it holds {sorted(weights) or 'none'}")

    num_experts, *down = _local_shape(weights["down_proj"])
    hidden, ffn = down[::-1] if facts.is_transposed else down
    layout = ExpertsLayout(num_experts, hidden, ffn, _read_activation(module), facts.is_transposed, facts.has_bias)
    inner = [key for key, _ in (*module.named_parameters(), *module.named_buffers()) if key not in weights]
    if inner:
        raise refuse(f"its activation has weights or buffers of its own ({', '.join(inner)})")
    shapes = {key: _local_shape(value) for key, value in weights.items()}
    if shapes != layout.parameters:
        raise refuse(f"its parameters are {shapes}, where its own description means {layout.parameters}")
    odd = {str(value.dtype) for value in weights.values() if value.dtype not in _FLOATS}
    if odd:
        raise refuse(f"its weights are quantised ({', '.join(sorted(odd))})")
    return layout


_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _local_shape(weight: Tensor) -> tuple[int, ...]:
    return tuple(weight.to_local().shape if isinstance(weight, DTensor) else weight.shape)


def _read_activation(module: nn.Module) -> Activation:
    """Our fused ones where there is one, else the module's own gate function, differentiated by torch."""
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import _default_apply_gate

    kind: Any = type(module)
    facts: Any = module
    if kind._apply_gate is _default_apply_gate:
        if isinstance(facts.act_fn, (nn.SiLU, SiLUActivation)):
            return activation_of("swiglu")
        return Activation(f"{type(facts.act_fn).__name__} gate", glu(facts.act_fn))
    for base in kind.__mro__:  # FSDP2 puts a class of its own in front
        if base.__name__ == "GptOssExperts" and base.__dict__.get("_apply_gate") is kind._apply_gate:
            return clamped_swiglu(float(facts.alpha), float(facts.limit))
    bare: Any = copy(module)
    bare._parameters = {}  # the gate needs the module's settings, and must not keep all experts' weights alive
    return Activation(f"{kind.__name__}._apply_gate", bare._apply_gate)


def find_experts(model: nn.Module) -> dict[str, tuple[nn.Module, ExpertsLayout]]:
    """Every experts module of ``model`` by name, with its layout.

    Raises:
        UnsupportedModel: there is none, or one of them cannot be computed here. Nothing was changed.
        MissingDependency: transformers >= 5 is not installed.
    """
    require_transformers()
    found = {name: (module, read_layout(module, name)) for name, module in model.named_modules() if is_experts(module)}
    if found:
        return found
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    who = type(model).__name__ + (f" (model type {model_type!r})" if model_type else "")
    kinds = sorted({type(module).__name__ for module in model.modules() if module is not model})
    alike = [kind for kind in kinds if _LOOKS_LIKE_MOE.search(kind)]
    if alike:
        raise UnsupportedModel(
            f"{who} has modules that look like MoE blocks, but of an unknown kind: {', '.join(alike)}. {looked_for()}"
        )
    built_of = ", ".join(kinds[:12]) or "nothing"
    raise UnsupportedModel(f"{who} has no MoE block: it is built of {built_of}. {looked_for()}")


def looked_for() -> str:
    """One sentence that names what can be swapped, for error messages."""
    known = ", ".join(f"{family.title} ({family.experts_class})" for family in FAMILIES)
    return (
        f"Looked for experts modules of {known}, or any other that transformers' ExpertsInterface can run "
        "with parameters gate_up_proj and down_proj alone."
    )


def require_transformers() -> None:
    """Raise ``MissingDependency`` unless transformers >= 5.23 can be imported (older ones have no EP registry)."""
    try:
        import transformers.distributed.expert_parallel
        import transformers.integrations.moe  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            f"swapping Hugging Face models needs transformers >= 5.23 ({error}); pip install 'moe_comm[hf]'"
        ) from error
