"""What ``check_grads`` found: one line a case and tensor, the worst over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def max_ulps(got: Tensor, want: Tensor) -> float:
    """Largest distance in units in the last place of their dtype; inf where only one is NaN."""
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
    """One tensor of one case against a reference.

    against: "EP 1" (same layer, one rank holds all experts) or "float64" (plain loop over experts).
    equal_bits: torch.equal on every rank. max_rel: largest difference over the largest value.
    tolerance: what ``max_rel`` may be; None where equal bits are demanded.
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
        """Within what was demanded."""
        return self.equal_bits if self.tolerance is None else self.equal_bits or self.max_rel <= self.tolerance


@dataclass(frozen=True)
class GradReport:
    """Result of ``check_grads``, the same on every rank; ``str`` gives a table."""

    world: int
    backend: str
    comparisons: tuple[Comparison, ...]

    @property
    def ok(self) -> bool:
        """Every comparison is within what was demanded."""
        return all(c.ok for c in self.comparisons)

    @property
    def failures(self) -> tuple[Comparison, ...]:
        return tuple(c for c in self.comparisons if not c.ok)

    def __str__(self) -> str:
        head = ("", "case", "tensor", "against", "bits", "max abs", "max rel", "max ulp", "demanded")
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
    """Compare on this rank; ``want`` may be wider than ``got``."""
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
