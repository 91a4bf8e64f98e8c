"""The check of all timeouts that users set."""

from __future__ import annotations

import math
from numbers import Real

from moe_comm.errors import ConfigError

MOST_SECONDS = 1e9
"""Longer timeouts are this long, 31 years: added to a clock, they still fit into 64 bits of nanoseconds."""
LEAST_SECONDS = 1e-3
"""Shorter timeouts are this long: torch counts milliseconds."""


def seconds_of(name: str, value: object) -> float:
    """Return ``value``, a positive, finite number, as a timeout between ``LEAST_SECONDS`` and ``MOST_SECONDS``."""
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError:  # an int beyond the range of floats
            number = MOST_SECONDS if value > 0 else -MOST_SECONDS  # type: ignore[operator]
        if 0 < number < math.inf:
            return min(max(number, LEAST_SECONDS), MOST_SECONDS)
    raise ConfigError(f"{name} must be a positive, finite number of seconds; got {value!r}")
