"""Reads dataclasses from untrusted JSON, and compares tables. No mlx here."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .data_files import DataError, check_shape
from .printable import quoted

R = TypeVar("R")


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


def read_record(kind: type[R], value: Any, where: str = "") -> R:
    """Make a dataclass from a table with a value for each of its fields.

    A field with a default may be missing. Unknown keys are ignored. Annotations decide
    which values are valid: scalars, lists, tuples, tables, ``None``, ``Literal``,
    unions of them, and other dataclasses.

    Args:
        where: the value's name, for errors.

    Raises:
        DataError: a value is of another kind, out of range or missing.
    """
    record: R = _read(kind, value, where)
    return record


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _read(kind: Any, value: Any, where: str) -> Any:
    if is_dataclass(kind):
        return _record(kind, value, where)
    if kind is Any:
        return value
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _one_of(inner, value, where)
    if origin is Literal:
        if value not in inner or isinstance(value, bool):
            raise DataError(f"{where} is {quoted(value)}, none of {inner}")
        return value
    if origin is dict:
        check_shape(value, dict, where)
        return {k: _read(inner[1], each, f"{where}.{k}") for k, each in value.items()}
    if origin in (list, tuple):
        check_shape(value, list, where)
        if origin is list or inner[1:] == (Ellipsis,):
            kinds = (inner[0],) * len(value)
        else:
            kinds = inner
            if len(value) != len(kinds):
                raise DataError(f"{where} has {len(value)} values, not {len(kinds)}")
        pairs = enumerate(zip(kinds, value, strict=True))
        return origin(_read(k, each, f"{where}[{i}]") for i, (k, each) in pairs)
    return check_shape(value, None if kind is type(None) else kind, where)


def _record(kind: Any, value: Any, where: str) -> Any:
    check_shape(value, dict, where)
    values, hints = {}, _hints(kind)
    for field in fields(kind):
        inner = f"{where}.{field.name}".lstrip(".")
        if field.name in value:
            values[field.name] = _read(hints[field.name], value[field.name], inner)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise DataError(f"{inner} is missing")
    return kind(**values)


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    error: DataError | None = None
    for kind in kinds:
        try:
            return _read(kind, value, where)
        except DataError as failed:
            error = error or failed
    assert error is not None
    raise error
