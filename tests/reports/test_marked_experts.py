"""A user's own experts over a dispatcher: gradients, norms, DDP, saving and loading equal those of one process."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import moe_comm
from moe_comm import Dispatcher
from tests.pool import RankPool, on_ranks
from tests.training_loops.loops import error_of
from tests.training_loops.models import ep_group

HIDDEN, FFN, EXPERTS, TOP_K, TOKENS, STEPS = 8, 12, 5, 2, 12, 3
FORMS = ("list", "stacked", "lists of linears", "functional")


def weights(expert: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + expert)
    return torch.randn(FFN, HIDDEN, generator=generator) / 3, torch.randn(HIDDEN, FFN, generator=generator) / 3


class MLP(nn.Module):
    """One expert; the widths of experts differ."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        up, down = weights(expert)
        width = FFN - expert
        self.up, self.down = nn.Linear(HIDDEN, width, bias=False), nn.Linear(width, HIDDEN, bias=False)
        self.up.weight.data, self.down.weight.data = up[:width].clone(), down[:, :width].clone()

    def forward(self, x_RD: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x_RD)))  # type: ignore[no-any-return]


class Stacked(nn.Module):
    """The experts of a rank in two tensors."""

    def __init__(self, experts: Sequence[int]) -> None:
        super().__init__()
        ups, downs = [[weights(expert)[i] for expert in experts] for i in range(2)]
        self.up = nn.Parameter(torch.stack(ups) if ups else torch.zeros(0, FFN, HIDDEN))
        self.down = nn.Parameter(torch.stack(downs) if downs else torch.zeros(0, HIDDEN, FFN))

    def forward(self, x_RD: Tensor, rows_per_expert: Sequence[int]) -> Tensor:
        return self.apply_to(x_RD, rows_per_expert)

    def apply_to(self, x_RD: Tensor, rows_per_expert: Sequence[int]) -> Tensor:
        parts = x_RD.split(list(rows_per_expert))
        out = [F.linear(F.relu(F.linear(part, self.up[i])), self.down[i]) for i, part in enumerate(parts)]
        return torch.cat(out) + 0 * (self.up.sum() + self.down.sum()) if out else x_RD + 0 * self.up.sum()


class Lists(nn.Module):
    """A list of linear layers for each weight."""

    def __init__(self, experts: Sequence[int]) -> None:
        super().__init__()
        mlps = [MLP(expert) for expert in experts]
        self.ups, self.downs = nn.ModuleList(m.up for m in mlps), nn.ModuleList(m.down for m in mlps)

    def apply_to(self, x_RD: Tensor, rows_per_expert: Sequence[int]) -> Tensor:
        parts = x_RD.split(list(rows_per_expert))
        return torch.cat([down(F.relu(up(part))) for up, down, part in zip(self.ups, self.downs, parts, strict=True)])


class Model(nn.Module):
    """A user's model: a dense layer, a router, and experts of one of the FORMS."""

    def __init__(self, form: str, dispatcher: Dispatcher, mark: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.router = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.dispatcher, self.form = dispatcher, form
        own = dispatcher.local_experts
        self.experts: Any = (
            nn.ModuleList(map(MLP, own))
            if form == "list"
            else Lists(own)
            if form == "lists of linears"
            else Stacked(own)
        )
        self.norm = nn.LayerNorm(HIDDEN)
        if mark:
            moe_comm.mark_experts(self.experts, dispatcher, label="moe")

    def forward(self, x_TD: Tensor) -> Tensor:
        x_TD = self.dense(x_TD)
        weights_TK, ids_TK = self.router(x_TD).softmax(-1).topk(TOP_K)
        sent = self.dispatcher.dispatch(x_TD, ids_TK)
        rows_RD, handle = sent.rows_RD, sent.handle
        counts = list(handle.rows_per_expert)
        if self.form == "list":
            parts = zip(self.experts, rows_RD.split(counts), strict=True)
            out_RD = torch.cat([expert(part) for expert, part in parts])
        elif self.form == "stacked":
            out_RD = self.experts(rows_RD, counts)
        else:
            out_RD = self.experts.apply_to(rows_RD, counts)
        return self.norm(x_TD + self.dispatcher.combine(out_RD, weights_TK, handle))  # type: ignore[no-any-return]


def loss_at(model: nn.Module, step: int, rank: int, world: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x_TD = torch.randn(TOKENS, HIDDEN, generator=generator).chunk(world)[rank]
    return (model(x_TD).square() * torch.arange(HIDDEN)).sum() / TOKENS


def train(form: str, loop: str, ep: int, rank: int = 0, world: int = 1) -> tuple[Any, Any, list[float]]:
    """Return the trained model, its optimizer, and the norms of its gradients."""
    dispatcher = moe_comm.make_dispatcher(EXPERTS, ep_group(ep))
    model = Model(form, dispatcher)
    wrapped = DistributedDataParallel(moe_comm.prepare_ddp(model)) if loop == "ddp" else model
    optimizer, norms = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_at(wrapped, step, rank, world)
        (loss * world if loop == "ddp" else loss).backward()
        if loop == "own":
            moe_comm.sync_gradients(model)
        norms.append(float(moe_comm.clip_grad_norm_(model, 0.05)))
        if form == "stacked":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.04)
        optimizer.step()
    return model, optimizer, norms


def trained(rank: int, world: int, arg: tuple[str, Path]) -> list[tuple[str, dict[str, Tensor], list[float]]]:
    """Train with each loop, save and load in all forms, and return what was trained."""
    form, folder = arg
    folder.mkdir(exist_ok=True)
    results = []
    for loop, ep in (("own", world), ("ddp", world), ("own", 2), ("ddp", 2)):
        model, optimizer, norms = train(form, loop, ep, rank, world)
        state = moe_comm.state_dict(model)
        results.append((f"{loop}, ep {ep}", {key: value.clone() for key, value in state.items()}, norms))
        other = Model(form, model.dispatcher)
        for values in (state, moe_comm.state_dict(model, form="local")):
            nn.init.zeros_(other.dense.weight)
            for param in other.experts.parameters():
                nn.init.zeros_(param)
            moe_comm.load_state_dict(other, values)
            check_equal(other, model)
        assert "ConfigError" in error_of(partial(torch.save, model.state_dict(), folder / f"{rank}.pt"))
        path = folder / f"{loop}-{ep}"
        dcp.save(moe_comm.state_dict(model, form="sharded"), checkpoint_id=path)
        for param in other.parameters():
            nn.init.zeros_(param)
        dcp.load(into := moe_comm.state_dict(other, form="sharded"), checkpoint_id=path)
        moe_comm.load_state_dict(other, into)
        check_equal(other, model)
        moe_comm.save_checkpoint(model, path / "parts")
        written = load_file(path / "parts" / "model.safetensors")
        assert written.keys() == state.keys() and all(torch.equal(written[key], value) for key, value in state.items())
        for param in other.parameters():
            nn.init.zeros_(param)
        moe_comm.load_checkpoint(other, path / "parts")
        check_equal(other, model)
        save = partial(moe_comm.optimizer_state_dict, model, optimizer)
        if form == "stacked":
            again = torch.optim.AdamW(model.parameters(), 1e-2)
            moe_comm.load_optimizer_state_dict(model, again, save())
            for old, new in zip(optimizer.state.values(), again.state.values(), strict=True):
                assert all(torch.equal(old[key], new[key]) for key in old)
        if form == "list":
            assert "UnsupportedModel" in error_of(save) and "local" in error_of(save)
            assert len(save(form="local")["state"]) == len(list(model.parameters()))
            assert "clip_grad_norm_" in error_of(lambda model=model: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    return results


def check_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("form", FORMS)
def test_training_equals_one_process(form: str, pool2: RankPool, pool4: RankPool, tmp_path: Path) -> None:
    model, _, expected_norms = train(form, "own", 1)
    expected = model.state_dict()
    for pool in (pool2, pool4) if form == "list" else (pool4,):
        for results in pool.run(trained, (form, tmp_path / str(pool.world)), timeout=200):
            for loop, state, norms in results:
                assert state.keys() == expected.keys(), loop
                for name, value in state.items():
                    torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=f"{loop}: {name}")
                assert norms == pytest.approx(expected_norms, rel=1e-5), loop


@on_ranks(2)
def test_experts_that_are_not_known_are_refused_on_every_rank(rank: int, world: int) -> None:
    group = ep_group(world)
    dispatcher = moe_comm.make_dispatcher(EXPERTS, group)
    model = Model("list", dispatcher, mark=False)
    loss_at(model, 0, rank, world).backward()
    mark = partial(moe_comm.mark_experts, dispatcher=dispatcher)
    few = moe_comm.make_dispatcher(1, group)
    own = len(dispatcher.local_experts)
    other = nn.Module()
    other.weight = nn.Parameter(torch.zeros(own, 2 + rank))
    buffered = nn.ModuleList(nn.BatchNorm1d(2) if rank else nn.LayerNorm(2) for _ in range(own))
    unmarked = error_of(partial(moe_comm.sync_gradients, model))
    assert "ConfigError: this process has a dispatcher of 5 experts over 2 ranks" in unmarked
    assert "moe_comm.mark_experts(experts, dispatcher)" in unmarked
    assert "shape (3, 3)" in error_of(partial(mark, nn.Linear(3, 3) if rank else Stacked(dispatcher.local_experts)))
    assert "buffer" in error_of(partial(mark, buffered))
    assert "RankMismatch" in error_of(partial(mark, other))
    no_expert = error_of(partial(moe_comm.mark_experts, nn.ModuleList(map(MLP, few.local_experts)), few))
    assert "rank 1 has no expert in the ModuleList" in no_expert
    mark(model.experts)
    assert "already marked" in error_of(partial(mark, model.experts))
    del few
    gc.collect()
    moe_comm.sync_gradients(model)
    del model
    torch.manual_seed(0)
    moe_comm.sync_gradients(nn.Linear(2, 2))


def test_one_process_needs_no_mark() -> None:
    dispatcher = moe_comm.make_dispatcher(EXPERTS)
    model = Model("list", dispatcher)
    loss_at(model, 0, 0, 1).backward()
    moe_comm.sync_gradients(model)
    assert not dist.is_initialized()
