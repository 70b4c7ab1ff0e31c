"""Messages between ranks as JSON: plain data, records of this package, and functions.

A record is written with its class, a function as ``module:name``. Reading imports the
module of a name, and makes records; nothing else is called. No mlx here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import reduce
from importlib import import_module
from typing import Any

from ..errors import ConfigError

_PACKAGE = __name__.partition(".")[0]
_TAG = "$"


def encode(value: Any) -> bytes:
    """The JSON of a value. Tuples become lists, except in records.

    Raises:
        ConfigError: the value has an object that has no name in a module.
    """
    return json.dumps(_tagged(value), separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """The value that :func:`encode` wrote; only for data of a peer that is trusted.

    Raises:
        ValueError: it is none.
        ImportError, AttributeError: a function or its module does not exist here.
    """
    return json.loads(data, object_hook=_untagged)


def _tagged(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        plain = {*map(type, value)} <= {int, str}
        return value if plain else [*map(_tagged, value)]
    if isinstance(value, Mapping):
        # JSON has texts as keys, and the tag is no key of a table.
        if _TAG in value or not all(isinstance(key, str) for key in value):
            items = [[key, _tagged(each)] for key, each in value.items()]
            return {_TAG: "mapping", "items": items}
        return {key: _tagged(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        content = {
            each.name: _tagged(getattr(value, each.name)) for each in fields(value)
        }
        return {_TAG: _name(type(value)), "fields": content}
    return {_TAG: _name(value)}


def _untagged(table: dict[str, Any]) -> Any:
    match table:
        case {"$": "mapping", "items": items}:
            return dict(items)
        case {"$": str(name), "fields": content}:
            kind = _named(name)
            ours = name.startswith(f"{_PACKAGE}.") and is_dataclass(kind)
            if not ours or not isinstance(kind, type):
                raise ValueError(f"{name} is no record")
            return kind(**{key: _as_tuple(each) for key, each in content.items()})
        case {"$": str(name)}:
            return _named(name)
    return table


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _name(value: Any) -> str:
    try:
        name = f"{value.__module__}:{value.__qualname__}"
        if _named(name) is value:
            return name
    except (AttributeError, ImportError, ValueError):
        pass
    raise ConfigError(
        f"a {type(value).__name__} (such as a sampler or logits processor) cannot be "
        "sent to other ranks: make it a function of a module"
    )


def _named(name: str) -> Any:
    module, _, path = name.partition(":")
    return reduce(getattr, path.split("."), import_module(module))
