"""Traces of requests: JSON lines with ``arrival_s``, ``prompt_tokens`` and ``output_tokens``, or synthetic ones."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from moe_comm.errors import ConfigError
from moe_plan.machine.collectives import check_integer, check_positive

SYNTHETIC = "poisson:"
SPREAD = 0.8
"""Standard deviation of the logarithm of lengths: the longest of 100 is about 6 times the median."""
LONGEST = 1 << 20
"""Upper bound of the tokens of a request."""


@dataclass(frozen=True)
class TraceRequest:
    """A request. arrival_s: seconds since the start of the trace. prompt_tokens, output_tokens: at least 1."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        check_integer("request", prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens)
        if isinstance(self.arrival_s, bool) or not isinstance(self.arrival_s, int | float):
            raise ConfigError(f"request: arrival_s must be a number; got {self.arrival_s!r}")
        if not 0 <= self.arrival_s < math.inf or max(self.prompt_tokens, self.output_tokens) > LONGEST:
            raise ConfigError(
                f"request: arrival_s must be finite and not negative, and lengths at most {LONGEST:,}; got {self}"
            )


@dataclass(frozen=True)
class SyntheticTrace:
    """Poisson arrivals, with log-normal lengths of prompts and outputs.

    rate: requests per second. count: number of requests. prompt, output: medians of the lengths in tokens.
    """

    rate: float
    count: int
    prompt: int = 512
    output: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive("trace", rate=self.rate)
        check_integer("trace", count=self.count, prompt=self.prompt, output=self.output)
        check_integer("trace", 0, seed=self.seed)

    @classmethod
    def parse(cls, text: str) -> SyntheticTrace:
        """Return the trace of a text such as ``rate=4,count=1000,prompt=512,output=128,seed=0``."""
        names = {field.name: float if field.name == "rate" else int for field in fields(cls)}
        try:
            pairs = [one.split("=") for one in text.split(",")]
            return cls(**{name: names[name](value) for name, value in pairs})  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"expected {SYNTHETIC}rate=R,count=N[,prompt=N][,output=N][,seed=N]; got {text!r}"
            ) from None

    def requests(self) -> list[TraceRequest]:
        """Return the requests, the same for the same seed."""
        draw, now, result = random.Random(self.seed), 0.0, []
        for _ in range(self.count):
            now += draw.expovariate(self.rate)
            prompt, output = (
                min(LONGEST, max(1, round(median * math.exp(draw.gauss(0, SPREAD)))))
                for median in (self.prompt, self.output)
            )
            result.append(TraceRequest(now, prompt, output))
        return result


def read_trace(text: str) -> list[TraceRequest]:
    """Return the requests of a file of JSON lines, or of ``poisson:...`` (``SyntheticTrace.parse``), by arrival.

    Raises:
        ConfigError: the text or a line is invalid, or there is no request.
        OSError: the file cannot be read.
    """
    if text.startswith(SYNTHETIC):
        return SyntheticTrace.parse(text.removeprefix(SYNTHETIC)).requests()
    requests = []
    names = {field.name for field in fields(TraceRequest)}
    for number, line in enumerate(Path(text).read_text("utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            requests.append(TraceRequest(**{name: record[name] for name in names}))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{text}, line {number}: not a request with {', '.join(sorted(names))}: {error}"
            ) from None
    if not requests:
        raise ConfigError(f"{text} has no requests")
    return sorted(requests, key=lambda one: one.arrival_s)


def trace_lines(requests: Sequence[TraceRequest]) -> str:
    """Return the requests as JSON lines."""
    return "".join(json.dumps(asdict(one)) + "\n" for one in requests)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of ``values`` do not exceed; NaN without values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan
