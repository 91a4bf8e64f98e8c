"""Weights that must be equal on several ranks are compared, and all ranks raise if they differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import MixtralConfig, MixtralForCausalLM

import moe_comm
from moe_comm import MoEConfig, MoELayer, RouterConfig
from moe_comm.errors import UnsupportedModel
from moe_comm.layers.data_parallel.equal_tensors import checksum
from moe_comm.train import run
from moe_comm.train.loop.trainer import Trainer
from tests.pool import RankPool, on_ranks
from tests.train.common import write_text
from tests.training_loops.loops import error_of
from tests.training_loops.models import Block, ep_group

HIDDEN = 16
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int8,
    torch.int64,
    torch.bool,
)


# --- the checksum ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_depends_on_every_bit_and_not_on_strides(dtype: torch.dtype) -> None:
    raw = torch.randint(2 if dtype is torch.bool else 256, (96, 8), dtype=torch.uint8)
    for rows in (1, 7, 96):
        value = raw[:rows].flatten().view(dtype)
        expected = checksum(value)
        strided = torch.stack((value, value), 1)[:, 0]
        assert expected == checksum(strided) == checksum(value.clone())
        for byte in (0, rows * 4, rows * 8 - 1):
            for bit in range(1 if dtype is torch.bool else 8):
                flipped = raw[:rows].flatten().clone()
                flipped[byte] ^= 1 << bit
                assert checksum(flipped.view(dtype)) != expected, (byte, bit)


def test_a_checksum_depends_on_signs_and_order() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        value = torch.randn(70_000).to(dtype)
        others = (-value, value.flip(0), value.roll(1), value.roll(1 << 15), value.roll(1 << 16))
        assert len({checksum(one) for one in (value, *others)}) == 6


def test_a_checksum_does_not_depend_on_defaults_and_reads_lazy_signs() -> None:
    value = torch.randn(33, 5)
    z = torch.complex(value, value + 1)
    expected = checksum(value), checksum(z.conj().resolve_conj()), checksum(-z.imag)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        assert expected == (checksum(value), checksum(z.conj()), checksum(z.conj().imag))
    finally:
        torch.set_default_device(None)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(torch.float32)
    nan = torch.full((3,), torch.nan)
    assert checksum(nan) == checksum(nan.clone()) != 0
    assert checksum(torch.zeros(0)) == checksum(torch.zeros(3, 0)) != 0


def test_tensors_without_memory_have_no_checksum() -> None:
    lazy = nn.LazyLinear(3).weight
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    for value in (torch.ones(3, device="meta"), torch.eye(3).to_sparse(), lazy, freed):
        assert checksum(value) == 0


# --- swaps ---


def mixtral(seed: int) -> Any:
    torch.manual_seed(seed)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32,
            hidden_size=HIDDEN,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            use_cache=False,
        )
    )


@torch.no_grad()
def with_a_changed(name: str, rank: int) -> Any:
    """Return a model in which one value of one tensor differs on rank 1."""
    model = mixtral(0)
    if rank == 1:
        dict(model.named_parameters())[name].view(-1)[5] *= -1
    return model


def swapped(rank: int, world: int, arg: object) -> list[str]:
    """Return the errors of swaps with different models on the ranks, and of swaps that are right."""
    group, errors = dist.group.WORLD, []
    assert group is not None

    def swap(model: Any, kind: Callable[..., Any] = moe_comm.swap_moe) -> None:
        before = {name: (id(param), param.shape) for name, param in model.named_parameters()}
        errors.append(error_of(lambda: kind(model, group)))
        if errors[-1]:
            assert before == {name: (id(param), param.shape) for name, param in model.named_parameters()}

    swap(mixtral(rank))
    swap(with_a_changed("model.layers.0.mlp.experts.down_proj", rank))
    swap(with_a_changed("model.norm.weight", rank), moe_comm.swap_attention)
    swap(with_a_changed("lm_head.weight", rank), moe_comm.swap_linears)
    for other in (HIDDEN, 2 * HIDDEN):
        model = mixtral(0)
        model.extra = nn.Linear(HIDDEN, HIDDEN if rank else other, bias=False)
        nn.init.ones_(model.extra.weight)
        swap(model)
    model = mixtral(0)
    model.norm, model.empty = nn.BatchNorm1d(4), nn.Linear(2, 2, device="meta" if rank else "cpu")
    model.norm.running_mean += rank
    model.register_buffer("cache", torch.full((2,), float(rank)), persistent=False)
    model.register_buffer("nan", torch.full((2,), torch.nan))
    swap(model)
    return errors


def test_swaps_compare_all_weights_before_the_model_changes(pool2: RankPool) -> None:
    errors, others = pool2.run(swapped)
    assert errors == others
    named = (
        "model.embed_tokens.weight [32, 16] torch.float32 (rank 1 of the group from rank 0)",
        "1 of 12 tensors, first model.layers.0.mlp.experts.down_proj",
        "1 of 12 tensors, first model.norm.weight",
        "1 of 12 tensors, first lm_head.weight",
        "",
        "rank 0: extra.weight [32, 16] torch.float32, rank 1: extra.weight [16, 16] torch.float32",
        "",
    )
    for error, text in zip(errors, named, strict=True):
        assert error.startswith("RankMismatch") == bool(text) and text in error, (error, text)
    assert "torch.manual_seed" in errors[0] and "broadcast" in errors[0]


@on_ranks(2)
def test_a_model_that_cannot_be_swapped_on_one_rank_raises_on_all(rank: int) -> None:
    for swap in (moe_comm.swap_moe, moe_comm.swap_attention):
        with pytest.raises(UnsupportedModel):
            swap(nn.Linear(2, 2) if rank else mixtral(0), dist.group.WORLD)


# --- loops ---


class Model(nn.Module):
    """A model whose weights depend on the seed of the rank, and whose experts on that of the expert-parallel group."""

    def __init__(self, seed: int, ep: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = MoEConfig(hidden=HIDDEN, ffn=24, router=RouterConfig(3, 2, correction_bias=True))
        self.embed = nn.Linear(HIDDEN, HIDDEN)
        self.block = Block(MoELayer.build(config, ep_group(ep)), None)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.block(self.embed(x_TD)) * self.scale  # type: ignore[no-any-return]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, sync: bool = True) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, HIDDEN)).square().sum().backward()
    if sync:
        moe_comm.sync_gradients(model)
    optimizer.step()


def own(model: Any) -> None:
    step(model, torch.optim.SGD(model.parameters(), 0.1))


def ddp(model: Any) -> None:
    wrapped = DistributedDataParallel(moe_comm.prepare_ddp(model))
    step(wrapped, torch.optim.SGD(model.parameters(), 0.1), sync=False)


def fsdp(model: Any) -> None:
    moe_comm.prepare_fsdp(model)
    fully_shard(model)
    step(model, torch.optim.SGD(model.parameters(), 0.1), sync=False)


def by_hand(model: Any) -> None:
    """Train the experts and the router only, with gradients that are reduced without this library."""
    model(torch.randn(4, HIDDEN)).square().sum().backward()
    for param in model.block.moe.router.parameters():
        dist.all_reduce(param.grad)
    torch.optim.SGD(model.block.moe.parameters(), 0.1).step()


def build_and_train(loop: Callable[[Any], None], seed: int) -> None:
    model = Model(seed, 2)
    model.block.moe.router.weight.data += seed  # ``build`` has drawn the same weights in a group
    loop(model)


@on_ranks(4, timeout=200)
def test_loops_compare_weights_at_their_first_step(rank: int) -> None:
    """Weights differ everywhere, in experts of replicas only, and nowhere."""
    loops = (own, ddp, fsdp, by_hand)
    different, replicas, equal = (
        [error_of(partial(build_and_train, loop, seed)) for loop in loops] for seed in (rank, rank // 2, 0)
    )
    assert all(error.startswith("RankMismatch") for error in different), different
    assert "embed.weight [16, 16] torch.float32 (ranks 1, 2, 3 of the group from rank 0)" in different[0]
    # By hand, the ranks that train together are not known, beyond those of an expert-parallel group.
    assert all(error.startswith("RankMismatch") for error in replicas[:3]), replicas
    assert "the experts that several ranks hold differ" in replicas[1]
    assert not any([replicas[3], *equal]), equal
    model = Model(0, 2)
    moe_comm.skip_gradient_checks(model)
    model.scale += rank
    own(model)


@on_ranks(4)
def test_a_later_difference_is_found_on_demand_and_by_sync_gradients(rank: int) -> None:
    """A parameter, a buffer, or the weights of a replica have changed on one rank, or none."""
    w2 = "block.moe.experts.w2"
    for change in ("embed.bias", "scale", "block.moe.router.correction_bias", w2, None):
        model = Model(0, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step(model, optimizer)
        if change is not None and rank == 3:
            model.state_dict(keep_vars=True)[change].data.view(-1)[:1] += 1
        errors = error_of(partial(moe_comm.check_replicas, model)), error_of(partial(step, model, optimizer))
        assert all(error.startswith("RankMismatch" if change else "") for error in errors) and any(errors) == bool(
            change
        )
        if change == "embed.bias":
            assert "embed.bias [16] torch.float32 (rank 3 of the group from rank 0)" in errors[0]
            assert "skip_gradient_checks" in errors[1]
        if change == w2:
            assert (w2 if rank % 2 else "between the ranks [1, 3] of the group") in errors[0]


def trainer_run(rank: int, world: int, settings: list[str]) -> list[str]:
    """Return the errors of runs in which rank 1 changes a weight before the run, in step 2, and never."""
    errors, original, original_fit = [], Trainer.train_step, Trainer.fit
    for when in (0, 2, None):

        def changed(self: Trainer, step: int, when: int | None = when) -> Any:
            report = original(self, step)
            if rank == 1 and step + 1 == when:
                change(self)
            return report

        def checked(self: Trainer, after_step: Any = None, when: int | None = when) -> str:
            if rank == 1 and when == 0:
                change(self)
            return original_fit(self, after_step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "train_step", changed)
            patch.setattr(Trainer, "fit", checked)
            errors.append(error_of(partial(run, None, settings)))
    return errors


def change(trainer: Trainer) -> None:
    owned = next(one for one in trainer.train_state.data_parallel.owned() if one.name == "norm.weight")
    owned.value.data[0] += 1


def test_the_trainer_compares_weights_when_it_starts_and_every_so_many_steps(pool2: RankPool, tmp_path: Path) -> None:
    settings = [*write_text(tmp_path), "guard.weights_every=1"]
    for errors in pool2.run(trainer_run, settings):
        assert all(error.startswith("RankMismatch") and "norm.weight" in error for error in errors[:2]), errors
        assert not errors[2]


def test_one_process_compares_nothing() -> None:
    model = Model(0, 1)
    moe_comm.check_replicas(model)
    moe_comm.sync_gradients(model)
