"""Reads and checks JSON and TOML that anyone may have written.

Depth, size and kinds are bounded here, so that a bad file ends in a one-sentence error
wherever it is read. No mlx here.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from .files import read_plain
from .printable import quoted, shorten

#: How deep lists and tables may be nested.
MOST_DEPTH = 100
#: The largest file of settings, in bytes.
MOST_BYTES = 10**8
_MOST_DOTS = 20 * MOST_DEPTH


class DataError(ValueError):
    """A file or a text has the wrong form; the message says what is wrong."""


def read_json(path: str | os.PathLike[str], *, most: int = MOST_BYTES) -> Any:
    """Read the value in a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: it cannot be read, or is not JSON.
    """
    return parse_json(read_text(path, most=most))


def read_table(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the table (object) in a JSON file.

    Raises:
        FileNotFoundError, DataError: see :func:`read_json`.
    """
    return parse_table(read_text(path))


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the table in a TOML file.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: it cannot be read, or is not TOML.
    """
    return parse_toml(read_text(path))


def read_text(path: str | os.PathLike[str], *, most: int = MOST_BYTES) -> str:
    """Read a plain file of UTF-8 text.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: it cannot be read, has more than ``most`` bytes, or is not UTF-8.
    """
    try:
        data = read_plain(path, most)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(*error.args) from error
    except OSError as error:
        raise DataError(error.strerror or shorten(error)) from error
    except ValueError as error:  # the name has a byte 0
        raise DataError("no file can have that name") from error
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"it is not UTF-8 text (byte {error.start})") from error


def parse_json(text: str | bytes, *, surrogates: bool = False) -> Any:
    r"""Parse a JSON text.

    Args:
        surrogates: allow halves of surrogate pairs (``"\ud800"``), which are no text.

    Raises:
        DataError: it is not JSON, or has something unusable: ``NaN``, a number out of
            range, or lists nested too deep.
    """
    value = _parsed(json.loads, text, "JSON")
    _check_values(value, surrogates=surrogates)
    return value


def parse_table(text: str) -> dict[str, Any]:
    """Parse the table (object) in a JSON text.

    Raises:
        DataError: see :func:`parse_json`; or it is no table.
    """
    table = parse_json(text)
    if not isinstance(table, dict):
        raise DataError(f"it is {quoted(table)}, not an object")
    return table


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text.

    Raises:
        DataError: it is not TOML, or has tables nested too deep.
    """
    # Python's reader takes quadratic time in the parts of a dotted key.
    if any(line.partition("=")[0].count(".") > _MOST_DOTS for line in text.split("\n")):
        raise DataError("it is nested too deep")
    table: dict[str, Any] = _parsed(tomllib.loads, text, "TOML")
    _check_values(table, surrogates=False, finite=False)
    return table


def json_text(value: Any, *, indent: int | None = None) -> str:
    r"""``value`` as JSON that every reader accepts: NaN and infinity become ``null``.

    Characters are not escaped. A file with ``errors=HALVES`` can take halves of
    surrogate pairs, and writes JSON's escape for them.
    """
    return json.dumps(
        _finite(value), ensure_ascii=False, allow_nan=False, indent=indent
    )


#: ``errors`` for files of :func:`json_text`: writes what UTF-8 lacks as JSON escapes.
HALVES = "backslashreplace"


def _parsed(load: Callable[[Any], Any], text: str | bytes, kind: str) -> Any:
    try:
        return load(text)
    except RecursionError as error:
        raise DataError("it is nested too deep") from error
    except UnicodeDecodeError as error:
        raise DataError(f"it is not UTF-8 text (byte {error.start})") from error
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"not {kind} ({shorten(error)})") from error
    except ValueError as error:  # it has thousands of digits
        raise DataError("a number in it has too many digits") from error


def _check_values(value: Any, *, surrogates: bool, finite: bool = True) -> None:
    """Check all nested values, level by level, since Python's recursion is limited."""
    level, depth = [value], 0
    while level:
        if depth >= MOST_DEPTH and any(isinstance(x, dict | list) for x in level):
            raise DataError(f"it is nested more than {MOST_DEPTH} deep")
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each.values()
                if not surrogates:
                    below += each.keys()
            elif isinstance(each, list):
                below += each
            elif isinstance(each, float):
                if finite and not math.isfinite(each):
                    raise DataError("NaN, or a number out of range, is in it")
            elif isinstance(each, str) and not surrogates and not is_text(each):
                raise DataError(r"half of a surrogate pair, as in \ud800, is in it")
        level, depth = below, depth + 1


def first_difference(
    before: Mapping[str, Any], now: Mapping[str, Any], missing: Any = None
) -> tuple[str, Any, Any] | None:
    """The first key whose values differ, and both values; ``None``: all are equal.

    Args:
        missing: stands for a missing value.
    """
    for key in sorted(before.keys() | now.keys()):
        was, current = before.get(key, missing), now.get(key, missing)
        if was != current:
            return key, was, current
    return None


def is_text(text: str) -> bool:
    """Whether ``text`` has no half of a surrogate pair, so that it can be written."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
