"""Names the project's extras in messages about packages that are missing."""

from __future__ import annotations


def install(extra: str) -> str:
    """How to install the packages of an extra, as the end of a message."""
    return f"pip install '.[{extra}]' in a checkout"
