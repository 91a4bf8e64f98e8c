"""Report of ``check_grads``: one line per case and tensor, with the worst value over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def max_ulps(got: Tensor, want: Tensor) -> float:
    """Return the maximum distance in units in the last place of their dtype; inf if only one value is NaN."""
    if not got.numel():
        return 0.0
    if bool((got.isnan() != want.isnan()).any()):
        return float("inf")

    def ordered(x: Tensor) -> Tensor:
        bits = x.nan_to_num(0.0).contiguous().view(BITS[x.dtype])
        lowest = torch.iinfo(bits.dtype).min
        return torch.where(bits < 0, lowest - bits.double(), bits.double())

    return float((ordered(got) - ordered(want)).abs().max())


@dataclass(frozen=True)
class Comparison:
    """Comparison of one tensor of one case with a reference, the worst over all ranks.

    Attributes:
        against: "EP 1" (same layer, one rank holds all experts) or "float64" (plain loop over experts).
        equal_bits: the tensors have equal bits on all ranks.
        max_rel: maximum absolute difference divided by the largest value of the reference.
        max_ulp: maximum difference in units in the last place.
        tolerance: bound on ``max_rel``; None if equal bits are required.
    """

    case: str
    tensor: str
    against: str
    equal_bits: bool
    max_abs: float
    max_rel: float
    max_ulp: float
    tolerance: float | None

    @property
    def ok(self) -> bool:
        """Whether the comparison meets its requirement."""
        return self.equal_bits if self.tolerance is None else self.equal_bits or self.max_rel <= self.tolerance


@dataclass(frozen=True)
class GradReport:
    """Result of ``check_grads``, equal on all ranks; ``str`` returns a table."""

    world: int
    backend: str
    comparisons: tuple[Comparison, ...]

    @property
    def ok(self) -> bool:
        """Whether all comparisons meet their requirements."""
        return all(c.ok for c in self.comparisons)

    @property
    def failures(self) -> tuple[Comparison, ...]:
        """Comparisons beyond their tolerance."""
        return tuple(c for c in self.comparisons if not c.ok)

    def __str__(self) -> str:
        head = ("", "case", "tensor", "against", "bits", "max abs", "max rel", "max ulp", "required")
        rows = [head]
        for c in self.comparisons:
            rows.append(
                (
                    "ok" if c.ok else "WRONG",
                    c.case,
                    c.tensor,
                    c.against,
                    "equal" if c.equal_bits else "differ",
                    f"{c.max_abs:.2e}",
                    f"{c.max_rel:.2e}",
                    f"{c.max_ulp:.0f}" if c.against == "EP 1" else "-",
                    "equal bits" if c.tolerance is None else f"rel <= {c.tolerance:.0e}",
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        verdict = "all right" if self.ok else f"{len(self.failures)} of {len(self.comparisons)} WRONG"
        return "\n".join([*lines, f"{self.world} rank(s), {self.backend}: {verdict}"])


def compare(case: str, tensor: str, against: str, got: Tensor, want: Tensor, tolerance: float | None) -> Comparison:
    """Compare two tensors on this rank; ``want`` may have a wider dtype than ``got``."""
    got, want = got.detach(), want.detach()
    if got.shape != want.shape:
        return Comparison(case, tensor, against, False, float("inf"), float("inf"), float("inf"), tolerance)
    difference = (got.double() - want.double()).abs()
    difference = torch.where(got.double().eq(want.double()), 0.0, difference).nan_to_num(float("inf"), float("inf"))
    max_abs = float(difference.max()) if got.numel() else 0.0
    largest = float(want.double().nan_to_num(0.0).abs().max()) if got.numel() else 0.0
    max_rel = max_abs / largest if largest else (0.0 if not max_abs else float("inf"))
    same_dtype = got.dtype == want.dtype
    equal = torch.equal(got, want) if same_dtype else max_abs == 0.0
    return Comparison(
        case, tensor, against, equal, max_abs, max_rel, max_ulps(got, want) if same_dtype else 0.0, tolerance
    )
