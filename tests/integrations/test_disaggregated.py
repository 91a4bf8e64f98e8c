"""Experts on ranks of their own: the same tokens and bits over every backend, and no row between two other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_comm
from moe_comm.comm.channel import Channel
from moe_comm.comm.communicator import CollectiveOptions, Communicator
from moe_comm.comm.group_setup import communicator_of, configure_collectives
from moe_comm.dispatch import DispatchOptions, PeerToPeerOptions
from moe_comm.errors import ConfigError
from moe_comm.integrations.hugging_face import swap_moe
from moe_comm.integrations.hugging_face.swap import swapped_experts
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.event_reader import read_spans
from moe_comm.runtime.events import EVENTS
from moe_comm.topology import ExpertPlacement
from tests.dispatch.workers import two_hosts
from tests.integrations.models import load, save_model
from tests.integrations.test_serving import FAMILIES, prompts, tokens
from tests.pool import RankPool

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]
BACKENDS = ("shared_memory", "all_to_all", "peer_to_peer")


@dataclass(frozen=True)
class Run:
    """The first ``attention`` ranks run the model in ``folder``, and the next ``experts`` have its experts.

    load_part: with ``from_pretrained``, so that each rank reads only its part.
    """

    folder: str
    attention: int
    experts: int
    backend: str = "auto"
    length: int = 5
    load_part: bool = False
    dtype: torch.dtype = torch.float32
    attention_code: str | None = None

    @property
    def world(self) -> int:
        return self.attention + self.experts

    @contextmanager
    def model(self, group: dist.ProcessGroup) -> Iterator[Any]:
        """Yield the model of this rank. ``hierarchical`` has two hosts, and ``all_to_all`` no shared memory."""
        configure_collectives(CollectiveOptions(shared_memory=self.backend not in ("all_to_all", "hierarchical")))
        try:
            if self.backend == "hierarchical":
                communicator_of(group).hosts = tuple(two_hosts(self.world))
            settings: dict[str, Any] = {
                "placement": [0] * self.attention + [*ExpertPlacement.balanced(8, self.experts).experts_per_rank],
                "backend": self.backend,
                "options": DispatchOptions(peer_to_peer=PeerToPeerOptions(emulate=self.backend == "peer_to_peer")),
            }
            of_model: dict[str, Any] = {"dtype": self.dtype, "attn_implementation": self.attention_code}
            if self.load_part:
                yield moe_comm.from_pretrained(self.folder, group, **of_model, **settings)
            else:
                yield swap_moe(load(self.folder, **of_model), group, **settings)
        finally:
            dist.destroy_process_group(group)  # names of torch's groups depend on the number of groups of a rank
            configure_collectives(CollectiveOptions())


@contextmanager
def sent_rows(comm: Communicator) -> Iterator[list[int]]:
    """Yield the bytes of rows that this rank sends to each rank of a group, over its torch backend."""
    sent, start = [0] * comm.world, Channel.start_all_to_all

    def counted(channel: Channel, rows: Tensor, send: list[int], *args: Any) -> Any:
        if channel.comm is comm:
            for to, count in enumerate(send):
                sent[to] += count * rows.shape[1:].numel() * rows.element_size()
        return start(channel, rows, send, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "start_all_to_all", counted)
        yield sent


@dataclass(frozen=True)
class Measured:
    """Of one rank. parameters: bytes. sent: bytes to each rank over torch's backend. by_kind: in spans."""

    parameters: int
    sent: list[int]
    by_kind: dict[Kind, int]


def generate(rank: int, world: int, run: Run) -> Measured | None:
    """Each rank with attention generates, with its own prompts, the tokens of the unswapped model."""
    group = dist.new_group(range(run.world))
    if rank >= run.world:
        return None
    with run.model(group) as model, sent_rows(communicator_of(group)) as sent:
        experts = next(iter(swapped_experts(model).values()))
        assert run.backend in ("auto", experts.dispatcher.name)
        before = {span.index for span in read_spans(EVENTS.region)}
        if rank >= run.attention:
            with pytest.raises(ConfigError, match="has only experts"):
                model(prompts(0, 1)[0])
            moe_comm.serve_experts(model)
        else:
            plain = load(run.folder, dtype=run.dtype)
            with moe_comm.serving(model):
                for ids in prompts(rank, 2 + rank):
                    assert torch.equal(tokens(model, ids, run.length), tokens(plain, ids, run.length))
        by_kind = dict.fromkeys(Kind, 0)
        for span in read_spans(EVENTS.region):
            by_kind[span.kind] += 0 if span.index in before else span.nbytes
        size = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
        return Measured(size, list(sent), by_kind)


@pytest.mark.parametrize(
    ("family", "shape", "load_part"),
    [*zip(FAMILIES, SHAPES, (False, True, True, False), strict=True)],
)
def test_ranks_without_experts_generate_with_those_of_ranks_that_have_nothing_else(
    family: str, shape: tuple[int, int], load_part: bool, saved: Callable[[str], str], pool4: RankPool
) -> None:
    folder, (attention, experts) = saved(family), shape
    ranks = pool4.run(generate, Run(folder, attention, experts, load_part=load_part))
    of_experts = {True: 0, False: 0}
    for name, parameter in load(folder).named_parameters():
        of_experts[".experts." in name] += parameter.nbytes
    sizes = [one.parameters for one in ranks[: attention + experts]]
    assert sizes[:attention] == [of_experts[False]] * attention
    assert sum(sizes[attention:]) == of_experts[True]


@pytest.mark.parametrize(
    ("backend", "shape"),
    [*((backend, shape) for backend in BACKENDS for shape in SHAPES), ("hierarchical", (2, 2))],
)
def test_rows_move_between_ranks_with_attention_and_ranks_with_experts_only(
    backend: str, shape: tuple[int, int], saved: Callable[[str], str], pool4: RankPool
) -> None:
    check_rows(Run(saved("qwen3_moe"), *shape, backend, 3), pool4)


def check_rows(run: Run, pool: RankPool) -> None:
    ranks = [one for one in pool.run(generate, run, timeout=400) if one is not None]
    of_attention, of_experts = ranks[: run.attention], ranks[run.attention :]
    for one in of_attention:
        assert not any(one.sent[: run.attention])
    for one in of_experts:
        assert not any(one.sent[run.attention :])
    if run.backend in ("all_to_all", "hierarchical"):
        assert all(any(one.sent) for one in ranks)
    if run.backend == "hierarchical" or run.length > 5:
        return  # its spans have the bytes of its inner collectives; there are more spans than are kept
    # Ranks with attention send rows, and get as many back from the ranks that have computed them.
    sent = sum(one.by_kind[Kind.DISPATCH] for one in of_attention)
    assert sent == sum(one.by_kind[Kind.COMBINE] for one in of_experts) > 0
    assert not any(one.by_kind[Kind.COMBINE] for one in of_attention)
    assert not any(one.by_kind[Kind.DISPATCH] for one in of_experts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "backend", "shape"),
    [
        ("mixtral", "all_to_all", (1, 1)),
        ("qwen3_moe", "hierarchical", (2, 2)),
        ("deepseek_v3", "peer_to_peer", (1, 2)),
        ("gpt_oss", "all_to_all", (2, 1)),
    ],
)
def test_the_tokens_are_equal_up_to_200(
    family: str, backend: str, shape: tuple[int, int], tmp_path: Path, pool4: RankPool
) -> None:
    folder = save_model(family, tmp_path, max_position_embeddings=256)
    check_rows(Run(folder, *shape, backend, 200), pool4)


def logits(rank: int, world: int, run: Run) -> list[Tensor]:
    """Return the logits of one batch, and of the next token with the keys and values of the batch in the cache."""
    group = dist.new_group(range(run.world))
    if rank >= run.world:
        return []
    with run.model(group) as model, torch.no_grad(), moe_comm.serving(model):
        if rank >= run.attention:
            return []
        ids = torch.cat([one[:, :4] for one in prompts(rank, 5)[1:]])
        first = model(ids, use_cache=True)
        second = model(ids[:, -1:], past_key_values=first.past_key_values)
        return [first.logits, second.logits]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_have_the_same_bits_for_any_number_of_ranks_with_experts(
    dtype: torch.dtype, backend: str, saved: Callable[[str], str], pool4: RankPool
) -> None:
    runs = [Run(saved("mixtral"), 1, count, backend, dtype=dtype) for count in (1, 2, 3)]
    expected, *others = (pool4.run(logits, run)[0] for run in runs)
    assert len(expected) == 2 and expected[0].dtype is dtype and not torch.equal(*(one[:, -1] for one in expected))
    for got in others:
        assert all(map(torch.equal, got, expected))
