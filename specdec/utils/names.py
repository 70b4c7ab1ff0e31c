"""Suggests the name that was meant, and refuses settings that do not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from ..errors import ConfigError
from .printable import shorten

C = TypeVar("C", bound=type[Any])
# A beginning of this many characters names what it begins.
_FEWEST = 3


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that ``name`` begins, or is spelt most like, ignoring case."""
    by_spelling = {each.lower(): each for each in known}
    lower = name.lower()
    longer = [each for each in by_spelling if each.startswith(lower)]
    if len(longer) == 1 and len(lower) >= _FEWEST:
        return by_spelling[longer[0]]
    similar = difflib.get_close_matches(lower, by_spelling, 1, cutoff)
    return by_spelling[similar[0]] if similar else None


# By class: the names of its settings.
_SETTINGS: dict[str, list[str]] = {}


def check_settings(names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuse names of settings that do not exist.

    Args:
        what: what has the settings, for the error.

    Raises:
        ConfigError: a name is not known; the message has the nearest one, or all.
    """
    known = list(known)
    for name in names:
        if name not in known:
            near = nearest(name[:100], known)
            hint = f"did you mean {near}?" if near else f"it has {', '.join(known)}"
            having = [other for other, its in _SETTINGS.items() if name in its]
            if having:
                hint = f"{having[0]} has it"
            raise ConfigError(f"{what} has no setting {shorten(name)}: {hint}")


def settings(cls: C) -> C:
    """Let a dataclass of settings refuse unknown ones in one line.

    Its constructor raises :class:`ConfigError`, where Python's would raise
    ``TypeError`` without a suggestion.
    """
    init, known = cls.__init__, [field.name for field in fields(cls)]
    _SETTINGS[cls.__name__] = known

    @wraps(init)
    def checked(self: Any, *positional: Any, **values: Any) -> None:
        if positional:
            raise ConfigError(
                f"{cls.__name__} takes settings by name: write {known[0]}=..."
            )
        check_settings(values, known, cls.__name__)
        init(self, **values)

    cls.__init__ = checked
    return cls
