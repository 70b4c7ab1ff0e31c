"""Sizes and counts as people write them: ``8GB``, ``6.5GiB``, ``8k`` tokens."""

from __future__ import annotations

import re
from decimal import Decimal

from ..errors import ConfigError
from .checks import MOST_BYTES
from .printable import quoted

# No model fits in fewer bytes: a smaller number probably lacks its unit.
_FEWEST_BYTES = 10**6

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**n for n, letter in enumerate("KMGT", 1)},
    **{f"{letter}IB": 1024**n for n, letter in enumerate("KMGT", 1)},
}


def parse_size(text: str, *, or_none: bool = False) -> int:
    """Parse bytes: ``8GB`` (powers of 1000), ``6.5GiB`` (of 1024) or a plain number.

    Args:
        or_none: allow 0.

    Raises:
        ConfigError: ``text`` has another form, is not above 0, or is a plain number
            that is too small to mean bytes.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)", text.strip(), re.I)
    unit = _UNITS.get(match[2].upper()) if match else None
    size = int(Decimal(match[1]) * unit) if match and unit else 0
    if or_none and match and unit and not Decimal(match[1]):
        return 0
    if not 0 < size <= MOST_BYTES:
        raise ConfigError(
            f"{quoted(text)} is not a size: write it as 8GB, 6.5GiB, 512MB or a number "
            "of bytes"
        )
    if match and not match[2] and size < _FEWEST_BYTES:
        raise ConfigError(
            f"{quoted(text)} would be {size} bytes: write the unit, as in {match[1]}GB "
            f"(or {match[1]}B for bytes)"
        )
    return size


def parse_count(text: str) -> int:
    """Parse tokens: ``8192``, ``8k`` (8 times 1024) or ``1m`` (1024 times 1024).

    Raises:
        ConfigError: ``text`` has another form.
    """
    match = re.fullmatch(r"(\d{1,12})([km]?)", text.strip(), re.I | re.ASCII)
    if match is None:
        raise ConfigError(
            f"{quoted(text)} is not a number of tokens: write it as 8192 or 8k"
        )
    return int(match[1]) << (10 * ("", "k", "m").index(match[2].lower()))


def format_size(size: int) -> str:
    """``size`` in the largest unit of 1000 that it fills, to three digits or more."""
    if size < 1000:
        return f"{size} B"
    units = ("KB", "MB", "GB", "TB")
    # What would be rounded to 1000 is shown in the next unit.
    power = next((n for n in range(1, 5) if size < 999.95 * 1000**n), len(units))
    value, unit = size / 1000**power, units[power - 1]
    return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}"
