"""Old public names work for one release and warn."""

from __future__ import annotations

import pytest
import torch

import moe_comm
from moe_comm import (
    DispatchOptions,
    Experts,
    MoEConfig,
    MoELayer,
    RouterConfig,
    ZeroExperts,
    dispatch,
    layers,
    topology,
)
from moe_comm.dispatch import WireDtypes, make_dispatcher
from moe_comm.errors import ConfigError, UnsupportedModel
from moe_comm.layers import ColumnParallelLinear
from moe_comm.runtime.watch.report import DetectedFault
from moe_comm.train import optim, parallel, pipeline
from moe_comm.train.data import FileTokenizer


@pytest.mark.parametrize(
    ("package", "old", "new"),
    [
        (moe_comm, "FoldedMesh", "ParallelMesh"),
        (topology, "FoldedMesh", "ParallelMesh"),
        (dispatch, "Layout", "DispatchHandle"),
        (dispatch, "Payload", "WireDtype"),
        (dispatch, "Payloads", "WireDtypes"),
        (layers, "Flow", "DispatchStats"),
        (layers, "Part", "ExpertSlice"),
        (topology, "Share", "ShardSlice"),
        (topology, "deal", "shard_slice"),
        (pipeline, "Activations", "ActivationShape"),
        (pipeline, "Schedule", "PipelineSchedule"),
        (optim, "Schedule", "LRSchedule"),
        (parallel, "Held", "LocalParameter"),
        (parallel, "Owned", "OwnedParameter"),
        (parallel, "Traffic", "GradientTraffic"),
        (parallel, "hold", "local_parameters"),
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
    dispatcher = make_dispatcher(2)
    with pytest.warns(DeprecationWarning, match="use Dispatcher.corruption"):
        assert dispatcher.damage is dispatcher.corruption
    layer = MoELayer.build(MoEConfig(8, 4, RouterConfig(2, 1)), seed=0)
    layer(torch.ones(3, 8))
    with pytest.warns(DeprecationWarning, match="use MoELayer.dispatch_stats"):
        assert layer.flow is layer.dispatch_stats


def test_the_old_attributes_of_a_detected_fault_and_the_old_keyword_of_a_tokenizer() -> None:
    fault = DetectedFault("died", (1,), "rank 1 died", 3, "stop", 0, "", is_reporter=True)
    with pytest.warns(DeprecationWarning, match="use DetectedFault.summary"):
        assert fault.what == fault.summary  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match="use DetectedFault.is_reporter"):
        assert fault.speaks is fault.is_reporter  # type: ignore[attr-defined]
    with (
        pytest.warns(DeprecationWarning, match="use extra_files="),
        pytest.raises(ConfigError, match=r"not a readable tokenizer\.json"),
    ):
        FileTokenizer("no JSON", beside={})  # type: ignore[call-arg]


def test_the_old_parameters_of_layers() -> None:
    router = RouterConfig(5, 2)
    with pytest.warns(DeprecationWarning, match="RouterConfig"):
        config = MoEConfig(8, 4, router, zero_experts=ZeroExperts(1, 1))  # type: ignore[call-arg]
    assert (config.num_experts, config.router.num_choices, config.zero_experts) == (3, 5, ZeroExperts(1, 1))
    with (
        pytest.warns(DeprecationWarning, match="real experts"),
        pytest.raises(ConfigError, match="no real expert remains of 5"),
    ):
        MoEConfig(8, 4, router, zero_experts=ZeroExperts(5))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional arguments"):
        MoEConfig(8, 4, router, "swiglu", False, 0, False, None, False, None, "one too many")  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="MoEGroups"):
        MoELayer.build(config, None, etp=1, tokens_group=None, sequence_group=None, seed=0)  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="positional backend of MoELayer.build"):
        MoELayer.build(config, None, "auto", seed=0)  # type: ignore[misc]
    with pytest.warns(DeprecationWarning, match="positional backend of make_dispatcher"):
        make_dispatcher(2, None, "local")  # type: ignore[misc]
    with pytest.warns(DeprecationWarning, match="the attribute recompute"):
        assert Experts(2, 8, 4, recompute=True).recompute  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="gathers_input"):
        assert not ColumnParallelLinear(8, 4, enters=False).gathers_input  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="load_state_dict"):
        assert layers.load_full_state_dict is moe_comm.load_state_dict  # type: ignore[attr-defined]


def test_the_old_parameters_of_swaps() -> None:
    model = torch.nn.Linear(2, 2)
    for call, match in (
        (lambda: moe_comm.swap_moe(model, ep_group=None), "group="),
        (lambda: moe_comm.swap_attention(model, tp_group=None), "group="),
        (lambda: moe_comm.swap_attention(model, None, None), "positional cp_group"),
    ):
        with pytest.warns(DeprecationWarning, match=match), pytest.raises(UnsupportedModel):
            call()


def test_the_old_attributes_of_boxes_and_documents() -> None:
    with pytest.warns(DeprecationWarning, match=r"use Box\.full"):
        assert topology.Box((slice(1),), (slice(2),)).whole == (slice(2),)  # type: ignore[attr-defined]
    documents = layers.Documents(torch.zeros(1, 2, dtype=torch.int64))
    with pytest.warns(DeprecationWarning, match=r"use Documents\.ids_BS"):
        assert documents.whole_BS is documents.ids_BS  # type: ignore[attr-defined]
