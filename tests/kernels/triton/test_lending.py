"""Lent experts on devices: Triton's interpreter, and the kernels of ``peer_to_peer`` compiled for the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm.comm.group_setup import channel_of
from moe_comm.dispatch import DispatchOptions, PeerToPeerOptions
from moe_comm.kernels import native
from moe_comm.layers.data_parallel.expert_shard import plain
from moe_comm.overlap.options import Overlap
from tests.kernels.triton.common import drawn, kernels, needed_kernels
from tests.layers.test_balance import ALWAYS, CALLS, EXPERTS, PIPELINED, Run, build, compare, routed, run_layer
from tests.overlap.triton.common import needs_triton
from tests.overlap.triton.device_layer import DEVICE
from tests.pool import RankPool, on_ranks

pytestmark = needs_triton
pytest.importorskip("moe_comm._C", reason="the native core is not built")
BF16 = torch.bfloat16
CASES = [
    (2, Run("peer_to_peer")),
    (2, Run("peer_to_peer", dtype=BF16, recompute=True, tokens="none on rank 1")),
    (2, Run("peer_to_peer", overlap=PIPELINED, dtype=BF16, tokens="dropped")),
    (2, Run("all_to_all", dtype=BF16, halves=True)),
    (2, Run("all_to_all", overlap=Overlap("auto"), dtype=torch.float16)),
    (4, Run("all_to_all", dtype=BF16, tokens="all to one expert")),
    (4, Run("peer_to_peer", etp=2, overlap=Overlap("auto"), dtype=BF16, checkpointed=True)),
    (2, Run("peer_to_peer", overlap=DEVICE, halves=True)),
    (2, Run("peer_to_peer", overlap=DEVICE, dtype=BF16, recompute=True, tokens="none on rank 1")),
    (4, Run("peer_to_peer", overlap=DEVICE, dtype=torch.float16, tokens="all to one expert")),
    (4, Run("peer_to_peer", etp=2, overlap=DEVICE, dtype=BF16, tokens="dropped", checkpointed=True)),
]


def on_devices(rank: int, world: int, run: Run) -> dict[str, Any]:
    kernels("device")
    native.TRITON_DEVICES.add("cpu")
    channel = channel_of(dist.group.WORLD)
    channel.shared_memory = run.backend != "all_to_all"  # as on devices, whose channels use the backend of the group
    try:
        result, launched = needed_kernels(lambda: run_layer(rank, world, run))
    finally:
        native.TRITON_DEVICES.discard("cpu")
        channel.shared_memory = True
    grouped = run.overlap == DEVICE or (run.dtype is not torch.float32 and run.overlap != PIPELINED)
    assert ("tile_list_kernel" in launched) == (run.overlap == DEVICE)
    assert launched.count("grouped_weight_grad_kernel") == (2 * CALLS if grouped else 0)
    return result


@pytest.mark.parametrize(("world", "run"), CASES)
def test_lent_experts_keep_the_bits_on_devices(pools: dict[int, RankPool], world: int, run: Run) -> None:
    compare(pools[world], on_devices, world, run)


@on_ranks(2)
def test_main_grad_has_the_gradients_of_all_calls_or_of_none(rank: int) -> None:
    kernels("device")
    native.TRITON_DEVICES.add("cpu")
    try:
        layers = [build(balance, Run("peer_to_peer", dtype=BF16)) for balance in (None, None, ALWAYS)]
        for layer in layers[1:]:
            for weight in (layer.experts.w13, layer.experts.w2):
                weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device="cpu")
        for layer in layers:
            for even in (True, False):
                x, routing = routed(layer, Run(dtype=BF16), rank, 0)
                if even:
                    ids = (torch.arange(x.shape[0], device="cpu").unsqueeze(1) + torch.tensor([0, 4])) % EXPERTS
                    routing = routing._replace(ids_TK=ids)
                layer(x, routing).square().sum().backward()
                assert layer.last_plan is None or bool(layer.last_plan.lent) is not even
        for name in ("w13", "w2"):
            expected, fixed, lent = (getattr(layer.experts, name) for layer in layers)
            assert fixed.grad is None and not lent.main_grad.any()
            for got in (fixed.main_grad, lent.grad.float()):
                torch.testing.assert_close(got, plain(expected.grad).float(), rtol=2**-6, atol=2**-6)
        for layer in layers:
            layer.dispatcher.close()
    finally:
        native.TRITON_DEVICES.discard("cpu")


@pytest.mark.parametrize("overlap", [None, DEVICE], ids=["serial", "device"])
@on_ranks(2)
def test_swapped_models_lend_experts_on_devices(rank: int, overlap: Overlap | None) -> None:
    pytest.importorskip("transformers")
    from moe_comm.integrations.hugging_face import swap_moe
    from tests.integrations.models import new_model, randomise

    kernels("device")
    native.TRITON_DEVICES.add("cpu")
    try:
        results = []
        for balance in (None, ALWAYS):
            peers = PeerToPeerOptions(emulate=True)
            model = new_model("gpt_oss", num_hidden_layers=1, hidden_size=16, head_dim=4, intermediate_size=16)
            randomise(model, 0)
            options = DispatchOptions(balance=balance, peer_to_peer=peers)
            swapped = swap_moe(
                model.bfloat16(), dist.group.WORLD, backend="peer_to_peer", options=options, overlap=overlap
            )
            ids = torch.randint(3, 60, (2, 4 + rank), generator=torch.Generator().manual_seed(rank))
            logits = swapped(ids).logits
            logits.backward(drawn(*logits.shape, dtype=logits.dtype, seed=3))
            results.append((logits, dict(swapped.named_parameters())))
        (expected, wanted), (actual, got) = results
        (experts,) = (one for one in swapped.modules() if hasattr(one, "last_plan"))
        assert torch.equal(expected, actual) and experts.last_plan.lent
        for name, param in wanted.items():
            if ".experts." in name:
                assert (got[name].grad == param.grad).float().mean() > 0.98, name
            else:
                assert torch.equal(got[name].grad, param.grad), name
    finally:
        native.TRITON_DEVICES.discard("cpu")
