"""Old public names work for one release and warn."""

from __future__ import annotations

import pytest
import torch

import moe_comm
from moe_comm import DispatchOptions, MoEConfig, MoELayer, RouterConfig, dispatch, layers, topology
from moe_comm.dispatch import WireDtypes, make_dispatcher


@pytest.mark.parametrize(
    ("package", "old", "new"),
    [
        (moe_comm, "FoldedMesh", "ParallelMesh"),
        (topology, "FoldedMesh", "ParallelMesh"),
        (dispatch, "Layout", "DispatchHandle"),
        (dispatch, "Payload", "WireDtype"),
        (dispatch, "Payloads", "WireDtypes"),
        (layers, "Flow", "DispatchStats"),
    ],
)
def test_an_old_name_is_the_new_object(package: object, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is deprecated.*{new}"):
        assert getattr(package, old) is getattr(package, new)


def test_the_old_keyword_and_attribute_of_dispatch_options() -> None:
    with pytest.warns(DeprecationWarning, match="payloads"):
        options = DispatchOptions(payloads=WireDtypes("bf16"))  # type: ignore[call-arg]
    assert options.wire_dtypes == WireDtypes("bf16")
    with pytest.warns(DeprecationWarning, match="use DispatchOptions.wire_dtypes"):
        assert options.payloads == WireDtypes("bf16")  # type: ignore[attr-defined]


def test_the_old_attributes_of_a_dispatch_and_a_layer() -> None:
    dispatched = make_dispatcher(2).dispatch(torch.ones(3, 4), torch.zeros(3, 1, dtype=torch.int64))
    with pytest.warns(DeprecationWarning, match="use Dispatched.handle"):
        assert dispatched.layout is dispatched.handle  # type: ignore[attr-defined]
    layer = MoELayer.build(MoEConfig(8, 4, RouterConfig(2, 1)), seed=0)
    layer(torch.ones(3, 8))
    with pytest.warns(DeprecationWarning, match="use MoELayer.dispatch_stats"):
        assert layer.flow is layer.dispatch_stats
