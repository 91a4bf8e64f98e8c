"""``peer_to_peer`` on a GPU, one rank: the CPU's bits, for kernels compiled by nvcc and by NVRTC."""

from __future__ import annotations

import pytest
import torch

from moe_comm.dispatch import DispatchOptions
from moe_comm.dispatch.backends.local import LocalDispatcher
from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher
from moe_comm.dispatch.types import PeerToPeerOptions
from moe_comm.gpu import nvrtc
from moe_comm.gpu.launch import Launcher, NativeLauncher, nvrtc_launcher
from moe_comm.topology import ExpertPlacement

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLACEMENT = ExpertPlacement.balanced(16, 1)
OPTIONS = DispatchOptions(timeout_s=10, peer_to_peer=PeerToPeerOptions(heap_bytes=512 << 20))


def launcher(kind: str) -> Launcher:
    native = pytest.importorskip("moe_comm._C", reason="the native core is not built")
    if kind == "nvrtc":
        return nvrtc_launcher(torch.cuda.current_device())
    if not native.cuda_archs():
        pytest.skip("built without CUDA")
    return NativeLauncher("cuda")


@pytest.mark.parametrize("kind", ["nvcc", "nvrtc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "hidden", "top_k"), [(0, 64, 2), (1, 8, 1), (300, 7168, 8), (129, 1000, 3)])
def test_forward_and_backward_have_the_bits_of_the_cpu(
    kind: str, dtype: torch.dtype, tokens: int, hidden: int, top_k: int
) -> None:
    peer_to_peer = PeerToPeerDispatcher(PLACEMENT, None, 0, OPTIONS, "cuda", launcher(kind))
    plain = LocalDispatcher(PLACEMENT, None, 0, OPTIONS)
    maker = torch.Generator().manual_seed(tokens)
    x_TD = torch.randn(tokens, hidden, generator=maker).to(dtype)
    ids_TK = torch.rand(tokens, 16, generator=maker).topk(top_k).indices
    weights_TK = torch.rand(tokens, top_k, generator=maker)
    grad_TD = torch.randn(tokens, hidden, generator=maker).to(dtype)
    results = []
    for dispatcher, device in ((peer_to_peer, "cuda"), (plain, "cpu")):
        x, weights = (t.to(device).requires_grad_() for t in (x_TD, weights_TK))
        sent = dispatcher.dispatch(x, ids_TK.to(device))
        y = dispatcher.combine(sent.rows_RD * 2, weights, sent.handle)
        grads = torch.autograd.grad(y, (x, weights), grad_TD.to(device))
        results.append([t.detach().cpu() for t in (sent.rows_RD, y, *grads)])
    for name, gpu, cpu in zip(("rows", "y", "grad of x", "grad of weights"), *results, strict=True):
        assert torch.equal(gpu, cpu), name


def test_compiled_kernels_are_stored_in_the_cache_folder() -> None:
    compiler = nvrtc.find()
    arch = nvrtc.arch_for(torch.cuda.get_device_capability(), compiler.archs)
    nvrtc.kernels(arch, compiler=compiler)
    assert any(path.name.startswith(arch) for path in nvrtc.cache_folder().iterdir())
