"""Text of others, made fit for a message."""

from __future__ import annotations

_LONGEST = 200


def shorten(text: object) -> str:
    """``text`` (an error, say), no longer than reads; errors fold it to one line."""
    shown = str(text).strip()
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
