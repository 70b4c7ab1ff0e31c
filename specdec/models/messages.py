"""Text of others, made fit for a message of one line."""

from __future__ import annotations

_LONGEST = 200


def one_line(text: object) -> str:
    """``text`` (an error, say) on one line, printable, and no longer than reads."""
    words = " ".join(str(text).split())
    shown = "".join(c if c.isprintable() else "?" for c in words)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
