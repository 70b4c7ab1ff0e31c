"""Makes foreign text fit to be shown: printable, on one line, and cut.

Text from a file, an option or an exception passes through here before it is shown.
"""

from __future__ import annotations

import re

#: The most characters of a message, of a text in a message, and of a value in it.
LONGEST, LONGEST_TEXT, LONGEST_VALUE = 600, 240, 60
_CUT = "..."


def one_line(text: object, longest: int = LONGEST, *, end: bool = True) -> str:
    """``text`` on one line of printable characters.

    Args:
        longest: the most characters.
        end: keep the end of a longer text, too: messages end with the way out.
    """
    whole = str(text)
    if len(whole) > 8 * longest:  # enough for the result, and fast
        whole = f"{whole[: 4 * longest]} {whole[-4 * longest :]}"
    lines = (line.strip() for line in whole.splitlines())
    shown = printable(" ".join(line for line in lines if line))
    if len(shown) <= longest:
        return shown
    tail = (longest - len(_CUT)) // 3 if end else 0
    head = longest - len(_CUT) - tail
    return f"{shown[:head]}{_CUT}{shown[len(shown) - tail :]}"


# A value in a message: in quotes, or without blanks.
_LONG = f"{{{LONGEST_TEXT},}}"
_VALUE = re.compile(rf"""'[^'\n]{_LONG}'|"[^"\n]{_LONG}"|\S{_LONG}""")


def message(text: object) -> str:
    """A message on one line, whose values are cut as in :func:`shorten`."""

    def cut(value: re.Match[str]) -> str:
        tail = LONGEST_TEXT // 4
        return f"{value[0][: LONGEST_TEXT - tail - len(_CUT)]}{_CUT}{value[0][-tail:]}"

    return one_line(_VALUE.sub(cut, str(text)))


def shorten(text: object) -> str:
    """``text`` (an error, a path) as a part of a message."""
    return one_line(text, LONGEST_TEXT, end=False)


def first_line(error: BaseException) -> str:
    """The first line of an error, cut; its type if it has no message."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return shorten(lines[0])


def quoted(value: object, longest: int = LONGEST_VALUE) -> str:
    """``value`` as Python source, on one line and cut."""
    try:
        text = repr(value)
    except Exception:  # deep nesting, thousands of digits, or an own __repr__
        return f"a value of type {type(value).__name__} that is too long to show"
    return one_line(text, longest)


def printable(text: str) -> str:
    """``text`` with a blank or "?" in place of each control character."""
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else "?"


def counted(n: int, what: str, several: str | None = None) -> str:
    """``1 token``, ``2 tokens``; ``several`` is an irregular plural."""
    return f"{n} {what if n == 1 else several or f'{what}s'}"
