"""The contestants of ``bench layer``: one class per layer implementation, with the same weights and inputs."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import redirect_stderr
from importlib import import_module, util
from io import StringIO
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_comm.bench.common.settings import LayerBench
from moe_comm.errors import pip_install
from moe_comm.layers.moe.layer import MoEConfig, MoELayer
from moe_comm.layers.moe.router import RouterConfig

SCALE = 0.02
"""Standard deviation of all weights."""


class LayerWeights:
    """Seeded weights, made on the device. Each expert has its own generator, so a rank makes only its local experts."""

    def __init__(self, settings: LayerBench) -> None:
        self.s = settings

    def router(self) -> Tensor:
        """Return the router weight, [E, D]."""
        return self._normal(self.s.experts, self.s.experts, self.s.hidden)

    def gate_up(self, expert: int) -> Tensor:
        """Return the gate and up weights of an expert, [2F, D]: gate rows, then up rows."""
        return self._normal(expert, 2 * self.s.ffn, self.s.hidden)

    def down(self, expert: int) -> Tensor:
        """Return the down weight of an expert, [D, F]."""
        return self._normal(self.s.experts + 1 + expert, self.s.hidden, self.s.ffn)

    def _normal(self, stream: int, *shape: int) -> Tensor:
        generator = torch.Generator(self.s.device).manual_seed(self.s.seed * 65536 + stream)
        values = torch.randn(*shape, generator=generator, device=self.s.device, dtype=torch.float32)
        return values.mul_(SCALE).to(self.s.torch_dtype)

    def fill(self, experts: Iterable[int], gate_up_LFD: Tensor, down_LDF: Tensor) -> None:
        """Write the weights of ``experts`` into tensors of shape [L, 2F, D] and [L, D, F]."""
        with torch.no_grad():
            for index, expert in enumerate(experts):
                gate_up_LFD[index] = self.gate_up(expert)
                down_LDF[index] = self.down(expert)


class LayerContestant(ABC):
    """A layer implementation.

    Attributes:
        expert_parallel: distributes the experts over all ranks. If False, each rank has all experts.
        tolerance: replaces the tolerance of the dtype if the layer computes in a lower precision.
        note: remark in the result.
    """

    name: ClassVar[str]
    note: ClassVar[str] = ""
    expert_parallel: ClassVar[bool] = False
    tolerance: ClassVar[float | None] = None

    def __init__(self, settings: LayerBench, rank: int) -> None:
        self.settings, self.rank = settings, rank
        self.ep = self.ep_of(settings)
        per_rank = settings.experts // self.ep
        first = rank * per_rank if self.ep > 1 else 0
        self.experts = range(first, first + per_rank)
        self.module = self.build(LayerWeights(settings))

    @classmethod
    def ep_of(cls, settings: LayerBench) -> int:
        """Return the expert-parallel size for these settings."""
        return settings.ranks if cls.expert_parallel else 1

    @classmethod
    def unavailable_reason(cls, settings: LayerBench) -> str | None:
        """Return the reason why the layer cannot run here, or None."""
        return None

    @abstractmethod
    def build(self, weights: LayerWeights) -> nn.Module:
        """Build the layer with these weights. Collective."""

    def forward(self, x_TD: Tensor) -> Tensor:
        """Run the layer on [T, D] tokens."""
        return self.module(x_TD[None])[0]  # type: ignore[no-any-return]

    @abstractmethod
    def grads(self) -> dict[str, Tensor]:
        """Return the local gradients: ``router`` [E, D], ``gate_up`` [L, 2F, D], ``down`` [L, D, F]."""

    def close(self) -> None:  # noqa: B027
        """Release the resources of the layer. Collective."""


def _hf_block(settings: LayerBench) -> Any:
    """Return the block on the meta device, so that its weights never exist in fp32."""
    config = import_module("transformers").Qwen3MoeConfig(
        hidden_size=settings.hidden,
        moe_intermediate_size=settings.ffn,
        num_experts=settings.experts,
        num_experts_per_tok=settings.top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    modeling = import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    with torch.device("meta"):
        return modeling.Qwen3MoeSparseMoeBlock(config).to(settings.torch_dtype)


class HuggingFaceLayer(LayerContestant):
    """The MoE block of Qwen3-MoE with ``experts_implementation="grouped_mm"`` and all experts on each rank."""

    name = "hf_grouped_mm"

    @classmethod
    def unavailable_reason(cls, settings: LayerBench) -> str | None:
        return None if util.find_spec("transformers") else f"not installed: {pip_install('hf')}"

    def build(self, weights: LayerWeights) -> nn.Module:
        block = _hf_block(self.settings).to_empty(device=self.settings.device)
        with torch.no_grad():
            block.gate.weight.copy_(weights.router())
        weights.fill(self.experts, block.experts.gate_up_proj, block.experts.down_proj)
        return block  # type: ignore[no-any-return]

    def grads(self) -> dict[str, Tensor]:
        module: Any = self.module
        grads = {
            "router": module.gate.weight.grad,
            "gate_up": module.experts.gate_up_proj.grad,
            "down": module.experts.down_proj.grad,
        }
        return {name: getattr(grad, "to_local", lambda grad=grad: grad)() for name, grad in grads.items()}


class HuggingFaceEPLayer(HuggingFaceLayer):
    """The same block under Hugging Face's own expert parallelism, ``ep_implementation="all_to_all"``."""

    name = "hf_all_to_all"
    expert_parallel = True

    @classmethod
    def unavailable_reason(cls, settings: LayerBench) -> str | None:
        if settings.ranks == 1:
            return "requires more than one rank"
        if (missing := super().unavailable_reason(settings)) is not None:
            return missing
        return import_error("transformers.distributed.expert_parallel")

    def build(self, weights: LayerWeights) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh

        # Like from_pretrained with DistributedConfig(tp_size=1, fsdp_size=EP, ep_size=EP), for one block.
        mesh = init_device_mesh(self.settings.device, (self.ep, 1), mesh_dim_names=("ep", "tp"))
        block = _hf_block(self.settings)
        plan = {
            "experts.gate_up_proj": "grouped_gemm",
            "experts.down_proj": "grouped_gemm",
            "experts": "ep_dispatch_experts",
        }
        apply = import_module("transformers.distributed.expert_parallel").apply_expert_parallelism
        apply(block, mesh["ep"], mesh["tp"], plan, ep_implementation="all_to_all")
        block.to_empty(device=self.settings.device)
        with torch.no_grad():
            block.gate.weight.copy_(weights.router())
        experts = block.experts
        weights.fill(self.experts, experts.gate_up_proj.to_local(), experts.down_proj.to_local())
        return block  # type: ignore[no-any-return]


class TorchtitanLayer(LayerContestant):
    """torchtitan's ``MoE``. Its experts always compute in bfloat16."""

    name = "torchtitan"
    note = "experts always in bfloat16"
    tolerance = 0.3  # for the router gradient: with 16-bit inputs, the softmax is computed in 16 bits
    expert_parallel = True

    @classmethod
    def unavailable_reason(cls, settings: LayerBench) -> str | None:
        if util.find_spec("torchtitan") is None:
            return "not installed: pip install torchtitan"
        return import_error("torchtitan.models.common.moe")

    def build(self, weights: LayerWeights) -> nn.Module:
        s = self.settings
        moe = import_module("torchtitan.models.common.moe")
        dispatchers = import_module("torchtitan.models.common.token_dispatcher")
        linear = import_module("torchtitan.models.common.linear")
        warnings.filterwarnings("ignore", "In CPU autocast")  # emitted in every forward
        import_module("torchtitan.distributed.utils").set_spmd_backend("default")
        kind = dispatchers.AllToAllTokenDispatcher if self.ep > 1 else dispatchers.LocalTokenDispatcher
        config = moe.MoE.Config(
            num_experts=s.experts,
            routed_experts=moe.RoutedExperts.Config(
                inner_experts=moe.GroupedExperts.Config(dim=s.hidden, hidden_dim=s.ffn, num_experts=len(self.experts)),
                token_dispatcher=kind.Config(num_experts=s.experts, top_k=s.top_k),
            ),
            router=moe.TokenChoiceTopKRouter.Config(
                num_experts=s.experts,
                gate=linear.Linear.Config(in_features=s.hidden, out_features=s.experts),
                top_k=s.top_k,
                score_func="softmax",
                route_norm=True,
            ),
            load_balance_coeff=None,
        )
        with torch.device(s.device):
            layer = config.build().to(s.torch_dtype)
        routed = layer.routed_experts
        if self.ep > 1:
            from torch.distributed.device_mesh import init_device_mesh

            mesh = init_device_mesh(s.device, (self.ep,), mesh_dim_names=("ep",))
            routed.token_dispatcher.wire_meshes(ep_mesh=mesh)
        inner = routed.inner_experts
        with torch.no_grad():
            layer.router.gate.weight.copy_(weights.router())
            for index, expert in enumerate(self.experts):
                gate_up = weights.gate_up(expert)
                inner.w1_EFD[index] = gate_up[: s.ffn]
                inner.w3_EFD[index] = gate_up[s.ffn :]
                inner.w2_EDF[index] = weights.down(expert)
        return layer  # type: ignore[no-any-return]

    def grads(self) -> dict[str, Tensor]:
        module: Any = self.module
        inner = module.routed_experts.inner_experts
        return {
            "router": module.router.gate.weight.grad,
            "gate_up": torch.cat((inner.w1_EFD.grad, inner.w3_EFD.grad), 1),
            "down": inner.w2_EDF.grad,
        }


def import_error(module: str) -> str | None:
    """Import ``module``. Return the error message, or None."""
    try:
        with redirect_stderr(StringIO()):
            import_module(module)
    except (ImportError, AttributeError) as fault:
        return f"{module} cannot be imported: {fault}"
    return None


class MoeCommLayer(LayerContestant):
    """``MoELayer``, expert-parallel over all ranks."""

    name = "moe_comm"
    expert_parallel = True

    def build(self, weights: LayerWeights) -> nn.Module:
        s = self.settings
        router = RouterConfig(num_experts=s.experts, top_k=s.top_k, score="softmax", normalize=True)
        alone = self.ep < s.ranks
        group = dist.new_group([self.rank], use_local_synchronization=True) if alone else dist.group.WORLD
        layer = MoELayer.build(
            MoEConfig(hidden=s.hidden, ffn=s.ffn, router=router),
            group,
            backend=s.backend if self.ep > 1 else "local",
            seed=s.seed,
            dtype=s.torch_dtype,
            device=s.device,
            label=self.name,
        )
        with torch.no_grad():
            layer.router.weight.copy_(weights.router())
        weights.fill(layer.dispatcher.local_experts, layer.experts.w13, layer.experts.w2)
        return layer

    def grads(self) -> dict[str, Tensor]:
        module: Any = self.module
        return {
            "router": module.router.weight.grad,
            "gate_up": module.experts.w13.grad,
            "down": module.experts.w2.grad,
        }

    def close(self) -> None:
        module: Any = self.module
        module.dispatcher.close()


class MoeCommReplicatedLayer(MoeCommLayer):
    """``MoELayer`` with all experts on each rank."""

    name = "moe_comm_ep1"
    expert_parallel = False


class SonicMoELayer(LayerContestant):
    """SonicMoE's layer with a softmax over the selected logits, which equals a normalized top-k of the softmax.

    The rows of its first weight alternate between gate and up: [g0, u0, g1, u1, ...].
    """

    name = "sonic_moe"

    @classmethod
    def unavailable_reason(cls, settings: LayerBench) -> str | None:
        if settings.device != "cuda":
            return "requires a Hopper or Blackwell GPU"
        if settings.torch_dtype != torch.bfloat16:
            return f"supports bfloat16 only, not {settings.dtype}"
        if util.find_spec("sonicmoe") is None:
            return "not installed: pip install sonic-moe"
        return import_error("sonicmoe")

    def build(self, weights: LayerWeights) -> nn.Module:
        s = self.settings
        sonic: Any = import_module("sonicmoe")
        self._kernels = sonic.KernelBackendMoE.sonicmoe
        layer = sonic.MoE(
            num_experts=s.experts,
            num_experts_per_tok=s.top_k,
            hidden_size=s.hidden,
            intermediate_size=s.ffn,
            activation_function=import_module("sonicmoe.enums").ActivationType.SWIGLU,
            add_bias=False,
            std=0.02,
        ).to(device=s.device, dtype=s.torch_dtype)
        with torch.no_grad():
            layer.router.weight.copy_(weights.router())
            for expert in self.experts:
                layer.c_fc.weight[expert] = _interleaved(weights.gate_up(expert))
                layer.c_proj.weight[expert] = weights.down(expert)
        return layer  # type: ignore[no-any-return]

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD: Tensor = self.module(x_TD, kernel_backend_moe=self._kernels)[0]
        return y_TD

    def grads(self) -> dict[str, Tensor]:
        module: Any = self.module
        mixed_EFD = module.c_fc.weight.grad
        return {
            "router": module.router.weight.grad,
            "gate_up": torch.cat((mixed_EFD[:, ::2], mixed_EFD[:, 1::2]), 1),
            "down": module.c_proj.weight.grad,
        }


def _interleaved(gate_up_FD: Tensor) -> Tensor:
    """Interleave the gate and up rows of a [2F, D] weight."""
    return torch.stack(gate_up_FD.chunk(2), 1).flatten(0, 1)
