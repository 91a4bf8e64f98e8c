"""Requests beyond the limits of a GPU are refused before setup."""

from __future__ import annotations

import pytest
import torch

from moe_comm.dispatch import DispatchOptions
from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher
from moe_comm.dispatch.types import PeerToPeerOptions
from moe_comm.errors import ConfigError
from moe_comm.gpu import launch
from moe_comm.kernels import expert_mlp_gpu
from moe_comm.topology import ExpertPlacement

pytest.importorskip("moe_comm._C", reason="the native core is not built")
CPU = torch.device("cpu")


def test_the_shared_memory_of_a_kernel_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    launch.check_shared("ll_send", CPU, "max_tokens=65535", max_tokens=65535)
    monkeypatch.setattr(launch, "shared_limit", lambda device: 100_000)
    launch.check_shared("ll_send", CPU, "max_tokens=4000", max_tokens=4000)
    with pytest.raises(ConfigError, match=r"max_tokens=5000 needs 10\d{4} bytes of shared memory per thread block"):
        launch.check_shared("ll_send", CPU, "max_tokens=5000", max_tokens=5000)
    launch.check_shared("meet", CPU, "3000 experts", experts=3000, with_counts=1)
    with pytest.raises(ConfigError, match="4000 experts needs 128"):
        launch.check_shared("meet", CPU, "4000 experts", experts=4000, with_counts=1)


def test_low_latency_with_too_many_tokens_leaves_the_dispatcher_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "shared_limit", lambda device: 40_000)
    options = DispatchOptions(peer_to_peer=PeerToPeerOptions(heap_bytes=1 << 20, emulate=True))
    dispatcher = PeerToPeerDispatcher(ExpertPlacement.of(2, 1, None), None, 0, options, "cpu")
    x_TD, ids_TK = torch.randn(3, 8), torch.tensor([[0], [1], [0]])
    with pytest.raises(ConfigError, match="max_tokens=2000"):
        dispatcher.low_latency_dispatch(x_TD, ids_TK, 2000)
    sent = dispatcher.low_latency_dispatch(x_TD, ids_TK, 4)
    rows_LND, _ = sent.receive()
    assert torch.equal(dispatcher.low_latency_combine(rows_LND, torch.ones(3, 1), sent), x_TD)


@pytest.mark.parametrize(("capability", "supported"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_experts_use_triton_only_on_gpus_with_bf16_tensor_cores(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], supported: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    expert_mlp_gpu._has_tensor_cores.cache_clear()
    assert expert_mlp_gpu._has_tensor_cores(torch.device("cuda", 0)) == supported
    expert_mlp_gpu._has_tensor_cores.cache_clear()
