"""Compare what backward computed with what the optimizer receives, and raise if experts and the rest disagree.

Loops that reduce gradients by hand go wrong silently: they forget the sum over ranks, sum parameters of different
experts, take means of one kind and sums of the other, or clip by a norm that differs between ranks. One expert
parameter ``e`` and one replicated parameter ``q`` show all of these. A probe is a sum of sampled elements with fixed
signs, so it is linear:

    backward          s = probe of the gradients that backward delivers on this rank
    optimizer.step    f = probe of the gradient that the optimizer is about to use

    f of q equal on all ranks                              else: not reduced, or clipped by one rank's norm
    f of e different on ranks with different experts       else: reduced as if experts were replicated
    (f of q) / (s of q of all ranks), and the same of e    equal: both sums, or both means; scaling cancels out

All probes must agree on the ratio, so loops that change gradients element by element (clipping by value, weight decay
in the gradient) are not compared. Steps 1, 2, 4, 8, ... are checked; each check is one exchange of 392 bytes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.errors import GradientMismatch
from moe_comm.layers.parallel.collectives import gather_values

NUM_PROBES = 8
SAMPLES = 512
"""Elements of each probe."""
TOLERANCE = 0.02
WELL_CONDITIONED = 0.01
"""A sum of terms of both signs is compared if it is at least this part of the sum of their magnitudes."""


@dataclass(frozen=True)
class _Probed:
    """Probes on one rank: of what backward delivered for a parameter since the last step, and of its final gradient."""

    delivered: tuple[float, ...]
    magnitude: tuple[float, ...]
    final: tuple[float, ...]

    @classmethod
    def of(cls, words: Sequence[float]) -> _Probed:
        n = NUM_PROBES
        return cls(tuple(words[:n]), tuple(words[n : 2 * n]), tuple(words[2 * n :]))

    def words(self) -> tuple[float, ...]:
        return (*self.delivered, *self.magnitude, *self.final)

    @property
    def usable(self) -> bool:
        return all(map(math.isfinite, self.words())) and any(self.magnitude)


class _Watched:
    """Collects the probes of one parameter."""

    def __init__(self, param: nn.Parameter) -> None:
        self._param, self.active = weakref.ref(param), True
        self._delivered, self._magnitude = torch.zeros(2, NUM_PROBES, dtype=torch.float64)

    def deliver(self, grad: Tensor) -> None:
        """Take what backward is about to add to the gradient."""
        if not self.active:
            return
        held = self._held()
        if held is None or not _probe(held)[1].any():
            self._delivered, self._magnitude = torch.zeros(2, NUM_PROBES, dtype=torch.float64)
        elif not self._magnitude.any():
            self._delivered.fill_(math.nan)  # a gradient from before the last step is kept: nothing to compare with
        sums, magnitudes = _probe(grad)
        self._delivered += sums
        self._magnitude += magnitudes

    def _held(self) -> Tensor | None:
        param = self._param()
        return None if param is None else param.grad

    def take(self) -> _Probed:
        """The probes, which start again from zero."""
        held = self._held()
        final = torch.zeros(NUM_PROBES) if held is None else _probe(held)[0]
        words = _Probed(*(tuple(v.tolist()) for v in (self._delivered, self._magnitude, final)))
        self._delivered, self._magnitude = torch.zeros(2, NUM_PROBES, dtype=torch.float64)
        return words


class Audit:
    """Watches one expert parameter and one replicated parameter of a layer.

    Args:
        label: the layer's name.
        ep_group: ranks that hold different experts.
        expert, replicated: the two parameters. The owner of the audit calls ``expert_delivered`` from its own hook.

    Attributes:
        group: all ranks whose gradients are reduced; None if not known.
    """

    def __init__(self, label: str, ep_group: ProcessGroup, expert: nn.Parameter, replicated: nn.Parameter) -> None:
        self.label, self.ep_group = label, ep_group
        self.group = ep_group if dist.get_world_size(ep_group) == dist.get_world_size() else None
        self._steps, self._stopped = 0, False
        self._of_expert, self._of_replicated = _Watched(expert), _Watched(replicated)
        replicated.register_hook(self._of_replicated.deliver)

    def expert_delivered(self, grad: Tensor) -> None:
        """Take a gradient of ``expert`` as backward delivers it, before it is scaled."""
        self._of_expert.deliver(grad)

    def stop(self) -> None:
        """Check nothing from now on."""
        self._stopped = True
        self._of_expert.active = self._of_replicated.active = False

    def before_step(self) -> None:
        """Check the gradients that an optimizer is about to use. Collective over the group.

        Raises:
            GradientMismatch: on every rank.
        """
        if self._stopped:
            return
        self._steps += 1
        due = _power_of_two(self._steps)
        self._of_expert.active = self._of_replicated.active = _power_of_two(self._steps + 1)
        if not due:
            return
        place = float(dist.get_rank(self.ep_group))
        own = [place, *self._of_replicated.take().words(), *self._of_expert.take().words()]
        group = self.group or self.ep_group
        found = gather_values(
            torch.tensor(own, dtype=torch.float64), group, f"comparing the gradients of layer {self.label!r}"
        ).tolist()
        half = 1 + 3 * NUM_PROBES
        replicated = [_Probed.of(words[1:half]) for words in found]
        by_place: dict[float, list[_Probed]] = {}
        for words in found:
            by_place.setdefault(words[0], []).append(_Probed.of(words[half:]))
        problem = _differs(replicated)
        if problem is None and self.group is not None:
            problem = _reduced_as_replicated(by_place) or _other_convention(replicated, by_place)
        if problem is not None:
            raise GradientMismatch(f"layer {self.label!r}: {problem}")


def _power_of_two(step: int) -> bool:
    return step & (step - 1) == 0


def _probe(grad: Tensor) -> tuple[Tensor, Tensor]:
    """[probes] signed sums of sampled elements, and the sums of their magnitudes."""
    flat = grad.detach().reshape(-1)
    stride = max(1, flat.numel() // (NUM_PROBES * SAMPLES))
    sampled = flat[::stride][: NUM_PROBES * SAMPLES].double().cpu()
    terms = F.pad(sampled * _SIGNS[: sampled.numel()], (0, -sampled.numel() % NUM_PROBES)).view(-1, NUM_PROBES)
    return terms.sum(0), terms.abs().sum(0)


_SIGNS = ((torch.arange(NUM_PROBES * SAMPLES) * 2654435761 >> 13) % 2 * 2 - 1).double()


def _differs(replicated: Sequence[_Probed]) -> str | None:
    usable = [probed for probed in replicated if all(map(math.isfinite, probed.final))]
    if len({probed.final for probed in usable}) <= 1:
        return None
    return (
        "before optimizer.step() the gradients of replicated parameters differ between ranks. Call "
        "moe_comm.sync_gradients(model) after backward, or use DistributedDataParallel; and clip with "
        "torch.nn.utils.clip_grad_norm_ or moe_comm.clip_grad_norm_, not by the norm of one rank's gradients"
    )


def _reduced_as_replicated(by_place: dict[float, list[_Probed]]) -> str | None:
    experts = [probed for same in by_place.values() for probed in same]
    if len({probed.final for probed in experts}) > 1 or not all(probed.usable for probed in experts):
        return None
    if len({probed.delivered for probed in experts}) == 1:
        return None
    return (
        "the gradients of different experts were reduced over ranks as if experts were replicated. Call "
        "moe_comm.sync_gradients(model) instead of reducing every parameter"
    )


def _other_convention(replicated: Sequence[_Probed], by_place: dict[float, list[_Probed]]) -> str | None:
    expected, ratios = _ratio(replicated), [_ratio(same) for same in by_place.values()]
    known = [ratio for ratio in ratios if ratio is not None]
    if expected is None or not known:
        return None
    if not all(_close(known[0], ratio) for ratio in known):
        return (
            f"the gradients of experts are scaled differently on different ranks, by {min(known):.4g} to "
            f"{max(known):.4g}. Clip with torch.nn.utils.clip_grad_norm_ or moe_comm.clip_grad_norm_, not by the norm "
            "of one rank's gradients"
        )
    copies = len(replicated) // len(by_place)
    # Only factors that come from a sum or a mean over ranks: loops may clip experts by a norm of their own.
    factors = {len(replicated), copies, len(replicated) // copies} - {1}
    if not any(_close(known[0] * f, expected) or _close(known[0], expected * f) for f in factors):
        return None
    return (
        f"the optimizer receives {expected:.4g} times the sum over ranks of the gradients of replicated "
        f"parameters, but {known[0]:.4g} times that of experts. Both must be sums or both means; "
        "moe_comm.sync_gradients(model) takes care of both"
    )


def _ratio(probed: Sequence[_Probed]) -> float | None:
    """Final gradient over the sum of what the ranks delivered; None where that cannot be said.

    A final gradient of zero says nothing: another optimizer has stepped, and its gradients are cleared.
    """
    if not all(map(math.isfinite, (word for one in probed for word in one.words()))) or not any(probed[0].final):
        return None
    ratios = []
    for probe in range(NUM_PROBES):
        total = sum(one.delivered[probe] for one in probed)
        if abs(total) > WELL_CONDITIONED * sum(one.magnitude[probe] for one in probed):
            ratios.append(probed[0].final[probe] / total)
    return ratios[0] if len(ratios) > 1 and all(_close(ratios[0], other) for other in ratios) else None


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= TOLERANCE * max(abs(a), abs(b))
