import pytest
import torch

from moe_comm.dispatch.slots import plain
from moe_comm.dispatch.slots.plain import ids_of_mask


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(0, 4, 2), (9, 5, 5), (33, 8, 3), (17, 29, 8)])
def test_ids_of_a_mask_ascend_and_then_drop(
    tokens: int, num_experts: int, top_k: int, native: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(plain, "on_cpu", lambda *_: False)
    generator = torch.Generator().manual_seed(tokens)
    mask_TE = (torch.rand(tokens, num_experts, generator=generator) < 0.3).to(device)
    mask_TE &= mask_TE.cumsum(1) <= top_k
    ids_TK, most = ids_of_mask(mask_TE, top_k)
    expected = [[expert for expert, chosen in enumerate(row) if chosen] for row in mask_TE.tolist()]
    assert ids_TK.tolist() == [ids + [-1] * (top_k - len(ids)) for ids in expected]
    assert most == max(map(len, expected), default=0)
    if most > 1:
        assert ids_of_mask(mask_TE, most - 1)[1] == most
