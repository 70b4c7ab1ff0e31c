"""A chat template in place of the one that a tokenizer came with."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError


def set_chat_template(tokenizer: Any, template: str) -> None:
    """Let ``tokenizer`` render ``template``.

    Raises:
        ConfigError: it is empty, or the tokenizer's own is a function of mlx-lm's.
    """
    if not isinstance(template, str) or not template.strip():
        raise ConfigError("chat_template is empty: give a template in Jinja")
    if getattr(tokenizer, "init_kwargs", {}).get("chat_template_type"):
        raise ConfigError(
            "chat_template does not go with this tokenizer, whose template is code of "
            "mlx-lm's: leave it out"
        )
    tokenizer.chat_template = template
    tokenizer.has_chat_template = True
