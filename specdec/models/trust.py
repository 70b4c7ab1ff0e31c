"""Code in a model's folder: not run unless the user trusts it.

mlx-lm and transformers can import Python files that lie beside a model's weights. Every
call that could is given the user's answer, so that none of them asks on standard input.
"""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedModelError


def tokenizer_config(trust_remote_code: bool) -> dict[str, Any]:
    """What mlx-lm is to pass on to transformers."""
    return {"trust_remote_code": bool(trust_remote_code)}


def refused_code(source: str, error: Exception) -> UnsupportedModelError | None:
    """The error of ours where ``error`` says that code was not run; else ``None``."""
    # Both libraries name their own option there.
    if not isinstance(error, ValueError) or "trust_remote_code" not in str(error):
        return None
    return UnsupportedModelError(
        f"{source} wants to run Python code from its folder: read that code, and if "
        "you trust it, add --trust-remote-code (trust_remote_code=True)"
    )
