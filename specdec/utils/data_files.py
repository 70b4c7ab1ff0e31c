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
from typing import Any, TypeAlias

from .files import read_plain
from .printable import quoted, shorten

#: How deep lists and tables may be nested.
MOST_DEPTH = 100
#: The largest file of settings, in bytes.
MOST_BYTES = 10**8
_MOST_DOTS = 20 * MOST_DEPTH
# The largest whole number that a shape accepts, so that numbers computed from it stay
# valid.
_MOST = 2**53

#: A description that :func:`check_shape` compares a value with.
Shape: TypeAlias = Any


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
    table: dict[str, Any] = check_shape(read_json(path), dict)
    return table


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


def check_shape(value: Any, shape: Shape, where: str = "") -> Any:
    """Return ``value`` if it has the shape.

    Args:
        shape: ``int`` (not huge), ``float`` (finite, or an ``int``), ``str``,
            ``bool``, ``dict``, ``list`` or ``None``; ``[shape]`` for a list of any
            length, ``[shape, shape]`` for a list of exactly these; ``{key: shape}`` for
            a table with these keys (those with a question mark at the end are
            optional); a tuple for one of several shapes.
        where: the value's name, for messages.

    Raises:
        DataError: it does not have the shape; the message names the place.
    """
    name = where or "it"
    if isinstance(shape, tuple):
        if not any(_is_of(value, each) for each in shape):
            expected = " or ".join(_called(each) for each in shape)
            raise DataError(f"{name} is {quoted(value)}, not {expected}")
        shape = next(each for each in shape if _is_of(value, each))
    if not _is_of(value, shape):
        raise DataError(f"{name} is {quoted(value)}, not {_called(shape)}")
    if isinstance(shape, list):
        if len(shape) > 1 and len(value) != len(shape):
            raise DataError(f"{name} has {len(value)} values, not {len(shape)}")
        for i, each in enumerate(value):
            check_shape(each, shape[i if len(shape) > 1 else 0], f"{where}[{i}]")
    elif isinstance(shape, dict):
        for key, each in shape.items():
            key, optional = key.removesuffix("?"), key.endswith("?")
            inner = f"{where}.{key}".lstrip(".")
            if key in value:
                check_shape(value[key], each, inner)
            elif not optional:
                raise DataError(f"{inner} is missing")
    return value


_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "a table",
    list: "a list",
    None: "null",
}


def _called(shape: Shape) -> str:
    kind = type(shape) if isinstance(shape, dict | list) else shape
    return _NAMES[kind]


def _is_of(value: Any, shape: Shape) -> bool:
    """Whether ``value`` is of the outermost kind of ``shape``."""
    if shape is None:
        return value is None
    if shape is int or shape is float:
        if isinstance(value, bool):
            return False
        if isinstance(value, int):
            return abs(value) <= _MOST
        return shape is float and isinstance(value, float) and math.isfinite(value)
    kind = type(shape) if isinstance(shape, dict | list) else shape
    return isinstance(value, kind)


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
