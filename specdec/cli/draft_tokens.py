"""``--num-draft-tokens``: a number, or ``auto``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ..config import DEFAULT_NUM_DRAFT_TOKENS, NumDraftTokens


class DraftTokens(click.ParamType[Any]):
    """A number of draft tokens, ``low`` or more, or ``auto``."""

    name = "number"

    def __init__(self, low: int):
        self._low = low

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> NumDraftTokens:
        """An int, or "auto"."""
        if value == "auto":
            return "auto"
        try:
            number = int(value)
        except ValueError:
            number = self._low - 1
        if number < self._low:
            self.fail(
                f"{value!r} is not auto, nor a number from {self._low}", param, ctx
            )
        return number


def num_draft_tokens_option(low: int, text: str) -> Callable[[Any], Any]:
    """The option, with its help text."""
    return click.option(
        "--num-draft-tokens",
        type=DraftTokens(low),
        metavar="N|auto",
        default=DEFAULT_NUM_DRAFT_TOKENS,
        show_default=True,
        help=text,
    )
