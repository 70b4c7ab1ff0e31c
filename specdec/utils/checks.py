"""Checks of option values: a wrong value raises a one-line error."""

from __future__ import annotations

import math

from ..errors import ConfigError
from .printable import quoted

#: The largest count of anything, so that sums fit in int32 arrays.
MOST = 2**30
#: The largest number of bytes.
MOST_BYTES = 2**62

# The range of float32.
MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
MIN_FLOAT32 = 2.0**-126


def require(condition: bool, name: str, value: object, rule: str) -> None:
    """Raise :class:`ConfigError` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(f"{name} is {quoted(value)}: it must be {rule}", field=name)


def is_int(value: object) -> bool:
    """Whether ``value`` is a whole number, not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether ``value`` is a finite number, not a bool."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number too large for a float
        return False


def is_float32(value: object) -> bool:
    """Whether ``value`` is a number that stays finite in float32."""
    return is_number(value) and abs(value) <= MAX_FLOAT32  # type: ignore[arg-type]


def require_int(
    name: str, value: object, low: int | None = None, *, other: str = ""
) -> None:
    """Require a whole number, ``low`` or more; ``other`` names what else is allowed.

    With ``low`` the value is a count, of at most ``MOST``.
    """
    rule = "a whole number" if low is None else f"a whole number, {low} or more"
    rule += f", or {other}" if other else ""
    in_range = is_int(value) and (low is None or value >= low)  # type: ignore[operator]
    require(in_range, name, value, rule)
    fits = low is None or value <= MOST  # type: ignore[operator]
    require(fits, name, value, f"a whole number, {MOST} at most")


def require_bytes(name: str, value: object, low: int) -> None:
    """Require a whole number of bytes, ``low`` or more."""
    valid = is_int(value) and low <= value <= MOST_BYTES  # type: ignore[operator]
    rule = f"a whole number of bytes, {low} or more: 8 GB are 8 * 10**9"
    require(valid, name, value, rule)


def require_range(
    name: str,
    value: object,
    low: float,
    high: float,
    *,
    note: str = "",
    open_low: bool = False,
) -> None:
    """Require a number from ``low`` (or above it) to ``high``."""
    bottom, top = (f"{x:.0f}" if x == int(x) else f"{x:g}" for x in (low, high))
    ends = f"above {bottom}, at most {top}" if open_low else f"from {bottom} to {top}"
    inside = is_number(value) and low <= value <= high  # type: ignore[operator]
    inside = inside and not (open_low and value == low)
    require(inside, name, value, f"a number {ends}" + (f" ({note})" if note else ""))


def require_one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Require one of several whole numbers or texts."""
    # 4.0 == 4, but a number of bits must be an int. An array has no truth value.
    *others, last = map(str, allowed)
    rule = f"{', '.join(others)} or {last}"
    plain = is_int(value) or isinstance(value, str)
    require(plain and value in allowed, name, value, rule)
