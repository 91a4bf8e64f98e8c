"""Vocabulary-parallel embedding, head and cross-entropy compared with torch on full tensors in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_comm.errors import InputError, RankMismatch
from moe_comm.layers.parallel.cross_entropy import vocab_parallel_cross_entropy
from moe_comm.layers.parallel.embedding import VocabParallelEmbedding, VocabParallelHead, vocab_sharding
from tests.layers.reference import draw
from tests.pool import RankPool, on_ranks

BATCH, SEQUENCE, HIDDEN = 2, 8, 6
DOUBLE, SINGLE, HALF = torch.float64, torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Case:
    vocab: int = 13
    dtype: torch.dtype = DOUBLE
    chunk: int | None = 3
    sequence_dim: int | None = 1
    tied: bool = False
    factor: float = 0.25


def data(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, the table, ids, and targets, some of which are ignored."""
    x_BSD = 2 * draw(BATCH, SEQUENCE, HIDDEN, seed=1, dtype=DOUBLE)
    weight_VD = 2 * draw(case.vocab, HIDDEN, seed=2, dtype=DOUBLE)
    generator = torch.Generator().manual_seed(3)
    ids_BS = torch.randint(case.vocab, (BATCH, SEQUENCE), generator=generator)
    targets_BS = torch.randint(case.vocab, (BATCH, SEQUENCE), generator=generator)
    targets_BS[0, 1], targets_BS[1, -2:] = -100, -100
    return x_BSD.to(case.dtype), weight_VD.to(case.dtype), ids_BS, targets_BS


def reference(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss and gradients of x and of the table in float64."""
    x_BSD, weight_VD, ids_BS, targets_BS = (t.double() if t.is_floating_point() else t for t in data(case))
    x_BSD.requires_grad_(), weight_VD.requires_grad_()
    h_BSD = torch.tanh(F.embedding(ids_BS, weight_VD)) + x_BSD if case.tied else x_BSD
    logits_TV = (h_BSD @ weight_VD.t()).flatten(0, 1)
    loss = F.cross_entropy(logits_TV, targets_BS.flatten(), reduction="sum") * case.factor
    loss.backward()
    assert x_BSD.grad is not None and weight_VD.grad is not None
    return loss.detach(), x_BSD.grad, weight_VD.grad


def parts(case: Case, rank: int, group: Any) -> tuple[VocabParallelEmbedding, VocabParallelHead, Tensor]:
    """Build this rank's embedding and head, which share one weight, and its hidden states."""
    x_BSD, weight_VD, _, _ = data(case)
    embed = VocabParallelEmbedding.from_weight(weight_VD, group, sequence_dim=case.sequence_dim)
    head = VocabParallelHead.from_weight(weight_VD, group, sequence_dim=case.sequence_dim)
    head.weight = embed.weight
    if case.sequence_dim is not None and group is not None:
        x_BSD = x_BSD.chunk(dist.get_world_size(group), case.sequence_dim)[rank].clone()
    return embed, head, x_BSD.requires_grad_()


def work(rank: int, world: int, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    group = dist.group.WORLD if world > 1 else None
    embed, head, x_BSD = parts(case, rank, group)
    _, _, ids_BS, targets_BS = data(case)
    h_BSD = torch.tanh(embed(ids_BS)) + x_BSD if case.tied else x_BSD
    loss = head.loss(h_BSD, targets_BS, chunk=case.chunk) * case.factor
    loss.backward()
    with torch.no_grad():
        assert torch.equal(head.loss(h_BSD, targets_BS, chunk=case.chunk) * case.factor, loss)
    assert x_BSD.grad is not None and embed.weight.grad is not None
    assert x_BSD.grad.dtype == embed.weight.grad.dtype == case.dtype
    return loss.detach(), x_BSD.grad, embed.weight.grad


def check(results: list[tuple[Tensor, Tensor, Tensor]], case: Case, rtol: float) -> None:
    loss, grad_BSD, grad_VD = reference(case)

    def close(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=rtol * float(expected.abs().max()))

    if case.sequence_dim is None:
        for actual_loss, actual_BSD, _ in results:
            close(actual_loss, loss)
            close(actual_BSD, grad_BSD)
    else:
        close(torch.stack([result[0] for result in results]).double().sum(), loss)
        close(torch.cat([result[1] for result in results], case.sequence_dim), grad_BSD)
    close(torch.cat([result[2] for result in results]), grad_VD)


@pytest.mark.parametrize(("chunk", "tied"), [(1, False), (3, True), (16, True), (None, False)])
def test_one_rank_equals_torch(chunk: int | None, tied: bool) -> None:
    case = Case(chunk=chunk, tied=tied)
    check([work(0, 1, case)], case, 1e-12)


@pytest.mark.parametrize(
    ("world", "vocab", "sequence_dim", "tied"),
    [
        (2, 16, 1, True),
        (2, 13, None, False),
        (4, 16, None, True),
        (4, 13, 1, True),  # uneven
        (4, 9, 1, False),  # one rank has no rows
        (4, 3, None, True),
    ],
)
def test_losses_and_gradients_add_up_to_those_of_torch(
    world: int, vocab: int, sequence_dim: int | None, tied: bool, pools: dict[int, RankPool]
) -> None:
    case = Case(vocab=vocab, sequence_dim=sequence_dim, tied=tied)
    check(pools[world].run(work, case), case, 1e-12)


@pytest.mark.parametrize(("dtype", "rtol"), [(SINGLE, 2e-6), (HALF, 2e-2)], ids=str)
def test_fp32_and_bf16_are_within_rounding_of_float64(dtype: torch.dtype, rtol: float, pool4: RankPool) -> None:
    case = Case(dtype=dtype, tied=True)
    check(pool4.run(work, case), case, rtol)


def test_the_loss_of_bf16_states_is_summed_in_fp32() -> None:
    x_BSD, weight_VD, _, targets_BS = data(Case(dtype=HALF))
    loss = vocab_parallel_cross_entropy(x_BSD, weight_VD, targets_BS)
    logits_TV = (x_BSD @ weight_VD.t()).flatten(0, 1)
    assert loss.dtype == SINGLE
    torch.testing.assert_close(loss, F.cross_entropy(logits_TV.float(), targets_BS.flatten(), reduction="sum"))


def test_autocast_gives_fp32_parameters_fp32_gradients() -> None:
    x_BSD, weight_VD, _, targets_BS = data(Case(dtype=SINGLE))
    x_BSD.requires_grad_(), weight_VD.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = vocab_parallel_cross_entropy(x_BSD, weight_VD, targets_BS)
    loss.backward()
    assert x_BSD.grad is not None and weight_VD.grad is not None
    assert x_BSD.grad.dtype == weight_VD.grad.dtype == loss.dtype == SINGLE
    _, _, exact_VD = reference(Case(dtype=SINGLE, factor=1.0))
    torch.testing.assert_close(weight_VD.grad.double(), exact_VD, rtol=0.05, atol=0.02 * float(exact_VD.abs().max()))


class LargestTensor(TorchDispatchMode):
    """Records the maximum number of elements of floating-point tensors created inside."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
        self.elements = max([self.elements, *(t.numel() for t in tensors)])
        return out


def largest_tensor(rank: int, world: int, tokens: int) -> int:
    group = dist.group.WORLD if world > 1 else None
    vocab, hidden = 512, 4
    weight_VD = draw(vocab // world, hidden, seed=rank).requires_grad_()
    x_BSD = draw(1, tokens // world, hidden, seed=rank).requires_grad_()
    with LargestTensor() as recorder:
        loss = vocab_parallel_cross_entropy(x_BSD, weight_VD, torch.arange(tokens)[None] % vocab, group, chunk=8)
        loss.backward()
    return recorder.elements


def test_no_tensor_is_larger_than_the_logits_of_one_chunk(pool2: RankPool) -> None:
    assert largest_tensor(0, 1, 128) == 8 * 512
    assert largest_tensor(0, 1, 256) == 8 * 512
    assert pool2.run(largest_tensor, 128) == [8 * 256] * 2


def test_gradients_of_states_and_table_can_be_computed_separately() -> None:
    x_BSD, weight_VD, _, targets_BS = data(Case())
    _, expected_BSD, expected_VD = reference(Case(factor=1.0))
    x_BSD.requires_grad_(), weight_VD.requires_grad_()
    loss = vocab_parallel_cross_entropy(x_BSD, weight_VD, targets_BS, chunk=5)
    torch.testing.assert_close(torch.autograd.grad(loss, x_BSD, retain_graph=True)[0], expected_BSD)
    torch.testing.assert_close(torch.autograd.grad(loss, weight_VD)[0], expected_VD)
    vocab_parallel_cross_entropy(x_BSD.detach(), weight_VD, targets_BS).backward()
    torch.testing.assert_close(weight_VD.grad, expected_VD)
    vocab_parallel_cross_entropy(x_BSD, weight_VD.detach(), targets_BS).backward()
    torch.testing.assert_close(x_BSD.grad, expected_BSD)
    torch.testing.assert_close(weight_VD.grad, expected_VD)


@pytest.mark.parametrize("ignored", [True, False], ids=["all ignored", "no tokens"])
def test_without_targets_the_loss_and_gradients_are_zero(ignored: bool) -> None:
    x_BSD, weight_VD, _, targets_BS = data(Case())
    targets_BS = torch.full_like(targets_BS, -100) if ignored else targets_BS[:0]
    x_BSD = (x_BSD if ignored else x_BSD[:0]).requires_grad_()
    weight_VD.requires_grad_()
    loss = vocab_parallel_cross_entropy(x_BSD, weight_VD, targets_BS)
    loss.backward()
    assert loss == 0 and not x_BSD.grad.any() and not weight_VD.grad.any()
    assert x_BSD.grad.shape == x_BSD.shape


@pytest.mark.parametrize("size", [80.0, 1e4])
def test_large_logits_do_not_overflow(size: float) -> None:
    x_BSD, weight_VD, _, targets_BS = data(Case(dtype=SINGLE))
    x_BSD = (size * x_BSD).requires_grad_()
    loss = vocab_parallel_cross_entropy(x_BSD, weight_VD, targets_BS)
    loss.backward()
    expected = F.cross_entropy((x_BSD @ weight_VD.t()).flatten(0, 1), targets_BS.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)
    assert torch.isfinite(x_BSD.grad).all()


def full_logits(rank: int, world: int, case: Case) -> tuple[Tensor, Tensor]:
    _, head, x_BSD = parts(case, rank, dist.group.WORLD)
    logits_BSV = head.full_logits(x_BSD)
    logits_BSV.square().sum().backward()
    assert x_BSD.grad is not None
    return logits_BSV.detach(), x_BSD.grad


@pytest.mark.parametrize(("vocab", "sequence_dim"), [(16, None), (13, 1), (9, 1)])
def test_full_logits_and_their_gradients_are_those_of_the_full_table(
    vocab: int, sequence_dim: int | None, pool4: RankPool
) -> None:
    case = Case(vocab=vocab, sequence_dim=sequence_dim)
    x_BSD, weight_VD, _, _ = data(case)
    x_BSD.requires_grad_()
    expected = x_BSD @ weight_VD.t()
    expected.square().sum().backward()
    results = pool4.run(full_logits, case)
    for logits_BSV, grad_BSD in results:
        torch.testing.assert_close(logits_BSV, expected)
        if sequence_dim is None:
            torch.testing.assert_close(grad_BSD, x_BSD.grad)
    if sequence_dim is not None:
        torch.testing.assert_close(torch.cat([grad for _, grad in results], sequence_dim), x_BSD.grad)


def embed_and_backward(rank: int, world: int, case: Case) -> tuple[Tensor, Tensor]:
    embed, _, _ = parts(case, rank, dist.group.WORLD)
    out_BSD = embed(data(case)[2])
    (out_BSD * (1 + rank)).sum().backward()
    return out_BSD.detach(), embed.weight.grad


@pytest.mark.parametrize("dtype", [DOUBLE, HALF], ids=str)
def test_an_embedding_has_the_same_bits_and_its_gradient_covers_the_tokens_of_all_ranks(
    dtype: torch.dtype, pool4: RankPool
) -> None:
    case = Case(dtype=dtype)
    _, weight_VD, ids_BS, _ = data(case)
    weight_VD.requires_grad_()
    expected = F.embedding(ids_BS, weight_VD)
    (expected * (1 + torch.arange(SEQUENCE) // 2)[None, :, None].to(dtype)).sum().backward()
    results = pool4.run(embed_and_backward, case)
    assert torch.equal(torch.cat([out for out, _ in results], 1), expected)
    torch.testing.assert_close(torch.cat([grad for _, grad in results]), weight_VD.grad)


def test_shardings_have_the_true_vocabulary_and_match_the_modules() -> None:
    weight_VD = draw(13, HIDDEN)
    for ranks in (1, 2, 4, 8):
        sharding = vocab_sharding(13, HIDDEN, ranks)
        whole = [sharding.take(weight_VD, {"tp": rank}, {"tp": ranks}) for rank in range(ranks)]
        assert torch.equal(torch.cat(whole), weight_VD)
    module = VocabParallelEmbedding(13, HIDDEN)
    assert module.shardings()["weight"].local_shape({"tp": 0}, {"tp": 1}) == tuple(module.weight.shape) == (13, HIDDEN)


@on_ranks(2)
def test_invalid_input_raises_the_same_class_on_all_ranks_and_leaves_the_group_usable(rank: int) -> None:
    group = dist.group.WORLD
    case = Case(vocab=16)
    embed, head, x_BSD = parts(case, rank, group)
    _, _, ids_BS, targets_BS = data(case)
    bad_BS = ids_BS.clone()
    for bad in (16, -1):
        bad_BS[1, 2] = bad
        with pytest.raises(InputError, match=f"token id {bad}"):
            embed(bad_BS)
        with pytest.raises(InputError, match=f"target {bad}"):
            head.loss(x_BSD, bad_BS)
    with pytest.raises(InputError, match=r"\(2, 7\)" if rank else r"ranks \[1\]"):
        head.loss(x_BSD, targets_BS[:, : 8 - rank])
    with pytest.raises(RankMismatch, match="cross-entropy"):
        head.loss(x_BSD, targets_BS, chunk=3 + rank)
    with pytest.raises(RankMismatch, match="cross-entropy"):
        head.loss(x_BSD, targets_BS.clamp(min=0) if rank else targets_BS)
    with pytest.raises(InputError, match=r"the weight torch\.float64; convert"):
        head.loss(x_BSD.float(), targets_BS)
    assert torch.isfinite(head.loss(x_BSD, targets_BS))
