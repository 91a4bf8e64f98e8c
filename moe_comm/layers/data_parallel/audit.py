"""Compare the gradients of backward with those that the optimizer uses, and raise if they are inconsistent.

Loops that reduce gradients by hand fail silently: they omit the sum over ranks, sum parameters of different experts,
average one kind of parameters and sum the other, or clip by a norm that differs between ranks. One expert parameter
``e`` and one replicated parameter ``q`` detect all of these errors. A probe is a linear function of a gradient: the sum
of sampled elements with fixed signs.

    backward          s = probe of the gradients that backward computes on this rank
    optimizer.step    f = probe of the gradient that the optimizer uses

    weights of q equal on all ranks                        else: the ranks started with other weights, or drifted
    weights of e equal on ranks with the same experts      the same
    f of q equal on all ranks                              else: not reduced, or clipped by one rank's norm
    f of e different on ranks with different experts       else: reduced as if experts were replicated
    (f of q) / (s of q of all ranks), and the same of e    equal: both sums, or both means; scaling cancels out

The ratio is compared only if all probes of a parameter have the same one. So loops that change gradients element by
element (clipping by value, weight decay in the gradient) pass this check.

Steps 1, 2, 4, 8, ... are checked; each check is one exchange of 424 bytes, and reads both parameters once for
their checksums (``equal_tensors``).
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.errors import GradientMismatch, RankMismatch
from moe_comm.layers.data_parallel.equal_tensors import DRIFTED, SAME_START, checksum
from moe_comm.layers.parallel.collectives import gather_values

_log = logging.getLogger(__name__)
NUM_PROBES = 8
SAMPLES = 512
"""Elements per probe."""
TOLERANCE = 0.02
WELL_CONDITIONED = 0.01
"""A probe is used if its absolute value is at least this fraction of the sum of magnitudes."""


class _ProbeRecorder:
    """Records the probes of one parameter."""

    def __init__(self, param: nn.Parameter) -> None:
        self._param, self.active = weakref.ref(param), True
        self._sums_2N = torch.zeros(2, NUM_PROBES, dtype=torch.float64, device="cpu")

    def record(self, grad: Tensor) -> None:
        """Record a gradient that backward is about to accumulate."""
        if not self.active:
            return
        grad_now = self._current_grad()
        if grad_now is None or not _probe(grad_now)[1].any():
            self._sums_2N.zero_()
        elif not self._sums_2N[1].any():
            self._sums_2N[0] = math.nan  # the gradient was not cleared after the last step: it cannot be compared
        self._sums_2N += _probe(grad)

    def _current_grad(self) -> Tensor | None:
        param = self._param()
        return None if param is None else param.grad

    def weights(self) -> Tensor:
        """Return the checksum of the parameter as two numbers that float64 represents exactly; 0 if it has none."""
        param = self._param()
        value = 0 if param is None else checksum(param)
        return torch.tensor([value >> 32, value & 0xFFFFFFFF], dtype=torch.float64, device="cpu")

    def take(self) -> Tensor:
        """Return the probes [3, N] and reset them.

        Rows: the sums of the gradients of backward, their magnitudes, and the sums of the gradient for the optimizer.
        """
        grad_now = self._current_grad()
        final_2N = torch.zeros_like(self._sums_2N) if grad_now is None else _probe(grad_now)
        probes_3N = torch.cat((self._sums_2N, final_2N[:1]))
        self._sums_2N.zero_()
        return probes_3N


class Audit:
    """Checks the gradients of one expert parameter and one replicated parameter of a layer.

    Args:
        ep_group: ranks that hold different experts.
        expert, replicated: the two parameters. The owner of the audit calls ``expert_delivered`` from its own hook.

    Attributes:
        group: all ranks whose gradients are reduced; None if unknown.
    """

    compares = True

    def __init__(self, label: str, ep_group: ProcessGroup, expert: nn.Parameter, replicated: nn.Parameter) -> None:
        self.label, self.ep_group = label, ep_group
        self.group = ep_group if dist.get_world_size(ep_group) == dist.get_world_size() else None
        self._steps, self._stopped = 0, False
        self._expert_recorder, self._replicated_recorder = _ProbeRecorder(expert), _ProbeRecorder(replicated)
        replicated.register_hook(self._replicated_recorder.record)

    @property
    def recording(self) -> bool:
        """Whether the gradients of this step will be checked."""
        return self._expert_recorder.active

    def expert_delivered(self, grad: Tensor) -> None:
        """Record a gradient of ``expert`` from backward, before it is scaled."""
        self._expert_recorder.record(grad)

    def stop(self) -> None:
        """Disable all further checks."""
        self._stopped = True
        self._expert_recorder.active = self._replicated_recorder.active = False

    def before_step(self) -> None:
        """Check the gradients that an optimizer is about to use. Collective over the group.

        Raises:
            GradientMismatch: the gradients are inconsistent; raised on all ranks.
            RankMismatch: the weights differ between ranks; raised on all ranks.
        """
        if self._stopped:
            return
        self._steps += 1
        due = _power_of_two(self._steps)
        # Record probes only in steps that will be checked.
        self._expert_recorder.active = self._replicated_recorder.active = _power_of_two(self._steps + 1)
        if not due:
            return
        ep_rank = torch.tensor([dist.get_rank(self.ep_group)], dtype=torch.float64, device="cpu")
        recorders = self._replicated_recorder, self._expert_recorder
        weights, probes = [one.weights() for one in recorders], [one.take().flatten() for one in recorders]
        local = torch.cat((ep_rank, *weights, *probes))
        group = self.group or self.ep_group
        rows = gather_values(local, group, f"comparing the gradients of layer {self.label!r}")
        same_experts = [rows[:, 0] == ep_rank for ep_rank in rows[:, 0].unique()]
        if differ := _weights_differ(rows[:, 1:3], [rows[same, 3:5] for same in same_experts]):
            advice = SAME_START if self._steps == 1 else DRIFTED
            raise RankMismatch(f"layer {self.label!r}: the weights of {differ}. {advice}")
        replicated_W3N, experts_W3N = rows[:, 5:].view(-1, 2, 3, NUM_PROBES).unbind(1)
        by_ep_rank = [experts_W3N[same] for same in same_experts]
        problem = _replicated_differ(replicated_W3N)
        if problem is None and self.group is not None:
            problem = _experts_reduced_as_replicated(experts_W3N) or _conventions_differ(replicated_W3N, by_ep_rank)
        if problem is not None:
            raise GradientMismatch(f"layer {self.label!r}: {problem}")


class SyncWarning:
    """Warns of a missing ``sync_gradients`` if no replicated parameter is trained, whose gradients could be compared.

    Args:
        label: of the layer. ep_size: number of its ranks.
        reduces: returns whether DDP reduces the gradients.

    Attributes:
        group: the ranks over which gradients were reduced since the last step, or None.
    """

    compares = recording = False

    def __init__(self, label: str, ep_size: int, reduces: Callable[[], bool]) -> None:
        self.group: ProcessGroup | None = None
        self._label, self._ep_size, self._reduces = label, ep_size, reduces
        self._delivered = self._stopped = False

    def expert_delivered(self, grad: Tensor) -> None:
        """Record that backward has computed a gradient of an expert."""
        self._delivered = True

    def stop(self) -> None:
        """Disable the warning."""
        self._stopped = True

    def before_step(self) -> None:
        """Warn once if the gradients that an optimizer is about to use are not reduced."""
        if self._delivered and self.group is None and not self._stopped and not self._reduces():
            self.stop()
            _log.warning(
                "layer %r: the optimizer uses gradients of experts that are not reduced, though its experts are "
                "distributed over %d of %d ranks: experts that several ranks hold will differ. Call "
                "moe_comm.sync_gradients(model) after backward, or moe_comm.skip_gradient_checks(model) if you reduce "
                "them yourself",
                self._label,
                self._ep_size,
                dist.get_world_size(),
            )
        self._delivered, self.group = False, None


def _power_of_two(step: int) -> bool:
    return step & (step - 1) == 0


def _probe(grad: Tensor) -> Tensor:
    """Return the probes of ``grad`` [2, N]: signed sums of sampled elements, and the sums of their magnitudes."""
    flat = grad.detach().reshape(-1)
    stride = max(1, flat.numel() // (NUM_PROBES * SAMPLES))
    sampled = flat[::stride][: NUM_PROBES * SAMPLES].double().cpu()
    terms = F.pad(sampled * _SIGNS[: sampled.numel()], (0, -sampled.numel() % NUM_PROBES)).view(-1, NUM_PROBES)
    return torch.stack((terms.sum(0), terms.abs().sum(0)))


_SIGNS = ((torch.arange(NUM_PROBES * SAMPLES, device="cpu") * 2654435761 >> 13) % 2 * 2 - 1).double()


def _weights_differ(replicated_W2: Tensor, experts_by_ep_rank: Sequence[Tensor]) -> str | None:
    unequal_W = (replicated_W2 != replicated_W2[:1]).any(1)
    if unequal_W.any() and replicated_W2.any(1).all():
        return f"its router differ on ranks {unequal_W.nonzero().flatten().tolist()} from those on rank 0"
    if any((sums_W2 != sums_W2[:1]).any() for sums_W2 in experts_by_ep_rank):
        return "its experts differ on ranks that hold the same experts"
    return None


def _replicated_differ(replicated_W3N: Tensor) -> str | None:
    final_WN = replicated_W3N[:, 2]
    final_WN = final_WN[final_WN.isfinite().all(1)]
    if (final_WN == final_WN[:1]).all():
        return None
    return (
        "before optimizer.step() the gradients of replicated parameters differ between ranks. Call "
        "moe_comm.sync_gradients(model) after backward, or use DistributedDataParallel; and clip with "
        "torch.nn.utils.clip_grad_norm_ or moe_comm.clip_grad_norm_, not by the norm of one rank's gradients"
    )


def _experts_reduced_as_replicated(experts_W3N: Tensor) -> str | None:
    usable = bool(experts_W3N.isfinite().all() and experts_W3N[:, 1].any(1).all())
    delivered_equal, _, final_equal = (experts_W3N == experts_W3N[:1]).all(2).all(0).tolist()
    if not usable or delivered_equal or not final_equal:
        return None
    return (
        "the gradients of different experts were reduced over ranks as if experts were replicated. Call "
        "moe_comm.sync_gradients(model) instead of reducing every parameter"
    )


def _conventions_differ(replicated_W3N: Tensor, by_ep_rank: Sequence[Tensor]) -> str | None:
    expected, ratios = _ratio(replicated_W3N), [r for probes_W3N in by_ep_rank if (r := _ratio(probes_W3N)) is not None]
    if expected is None or not ratios:
        return None
    if not all(_close(ratios[0], ratio) for ratio in ratios):
        return (
            f"the gradients of experts are scaled differently on different ranks, by {min(ratios):.4g} to "
            f"{max(ratios):.4g}. Clip with torch.nn.utils.clip_grad_norm_ or moe_comm.clip_grad_norm_, not by the norm "
            "of one rank's gradients"
        )
    ranks, copies = len(replicated_W3N), len(replicated_W3N) // len(by_ep_rank)
    # Report only factors by which a sum differs from a mean: a loop may clip experts by a separate norm.
    factors = {ranks, copies, ranks // copies} - {1}
    if not any(_close(ratios[0] * f, expected) or _close(ratios[0], expected * f) for f in factors):
        return None
    return (
        f"the optimizer receives {expected:.4g} times the sum over ranks of the gradients of replicated "
        f"parameters, but {ratios[0]:.4g} times that of experts. Both must be sums or both means; "
        "moe_comm.sync_gradients(model) takes care of both"
    )


def _ratio(probes_W3N: Tensor) -> float | None:
    """Return the final gradient divided by the sum of the ranks' gradients; None if it cannot be determined.

    A final gradient of zero is ignored: another optimizer has stepped and its gradients were cleared.
    """
    final_N = probes_W3N[0, 2]
    if not probes_W3N.isfinite().all() or not final_N.any():
        return None
    delivered_N, magnitude_N = probes_W3N[:, 0].sum(0), probes_W3N[:, 1].sum(0)
    well_conditioned_N = delivered_N.abs() > WELL_CONDITIONED * magnitude_N
    ratios: list[float] = (final_N / delivered_N)[well_conditioned_N].tolist()
    return ratios[0] if len(ratios) > 1 and all(_close(ratios[0], other) for other in ratios) else None


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= TOLERANCE * max(abs(a), abs(b))
