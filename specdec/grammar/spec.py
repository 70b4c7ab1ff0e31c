"""A grammar as users write it: JSON schema, regular expression or Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ..errors import ConfigError
from ..utils.checks import require
from ..utils.data_files import DataError, parse_json
from ..utils.printable import shorten

GrammarKind = Literal["json_schema", "regex", "lark"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)
#: The most bytes of a grammar's text: the compiler's stack grows with its length.
MAX_GRAMMAR_BYTES = 1 << 17
#: The most patterns that may have to hold together. Checking whether a text can match
#: all of them takes a second for ten, and minutes and gigabytes for twenty.
MAX_JOINED_PATTERNS = 8
_NAMES = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "lark": "Lark grammar",
}


@dataclass(frozen=True)
class Grammar:
    """The form of a request's whole output, from its first token.

    Made by :meth:`json_schema`, :meth:`json_object`, :meth:`regex`, :meth:`choice` or
    :meth:`lark`, and passed as ``SamplingParams(grammar=...)``. It needs the package
    llguidance (extra ``structured``).

    Args:
        kind: how to read ``text``.
        text: the schema as JSON, the expression, or the grammar; up to 128 KiB.
        label: what messages call it; empty: its kind. Messages about a Lark grammar
            that has one do not quote it.

    Raises:
        ConfigError: the text is empty, too long or not Unicode; a schema is not a JSON
            object, or nested deeper than 100; or more than 8 patterns may have to hold
            together. Other errors in it are found when a request with it is added.
    """

    kind: GrammarKind
    text: str
    label: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        rule = f"{', '.join(GRAMMAR_KINDS[:-1])} or {GRAMMAR_KINDS[-1]}"
        require(self.kind in GRAMMAR_KINDS, "grammar kind", self.kind, rule)
        require(isinstance(self.text, str), self.name, self.text, "a text")
        require(bool(self.text.strip()), self.name, self.text, "a text, not empty")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the {self.name} has half of a surrogate pair (character "
                f"{error.start}): give Unicode text"
            ) from error
        if size > MAX_GRAMMAR_BYTES:
            raise ConfigError(
                f"the {self.name} has {size} bytes: give one of at most "
                f"{MAX_GRAMMAR_BYTES}"
            )
        joined = 0
        if self.kind == "json_schema":
            joined = _joined_patterns(self._schema())
        elif self.kind == "lark":
            joined = _joined_terminals(self.text)
        if joined > MAX_JOINED_PATTERNS:
            raise ConfigError(
                f"the {self.name} has {joined} patterns, and some of them have to hold "
                f"together: give at most {MAX_JOINED_PATTERNS}, or none that join "
                "others (such as allOf, &)"
            )

    def _schema(self) -> dict[str, Any]:
        try:
            schema = parse_json(self.text)
        except DataError as error:
            raise ConfigError(
                f"the {self.name} cannot be read: {error}: give one JSON object"
            ) from error
        if not isinstance(schema, dict):
            raise ConfigError(
                f"the {self.name} is {shorten(self.text)}: it must be an object"
            )
        return schema

    @property
    def name(self) -> str:
        """The grammar's label, or its kind in words."""
        return self.label or _NAMES[self.kind]

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str, label: str = "") -> Grammar:
        """JSON that follows a schema.

        Properties come in the order of the schema. Tokens of JSON are separated by one
        space, a line break with up to 20 blanks, or nothing.

        Args:
            schema: the schema, or its JSON text.
            label: what messages call it.

        Raises:
            ConfigError: it is not a schema; see the class.
        """
        if not isinstance(schema, str):
            try:
                schema = json.dumps(schema, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise ConfigError(
                    f"the JSON schema is no JSON: {shorten(error)}"
                ) from error
        return cls("json_schema", schema, label)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that matches a regular expression as a whole (Rust's syntax).

        Raises:
            ConfigError: see the class.
        """
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of several texts.

        Raises:
            ConfigError: see the class.
        """
        words = " | ".join(map(json.dumps, texts))
        return cls("lark", f"start: {words}", "list of choices")

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Text that follows a context-free grammar, in llguidance's variant of Lark.

        Raises:
            ConfigError: see the class.
        """
        return cls("lark", text)


# Keys of a schema. If one table has two of them, both must hold.
_APPLICATORS = ("pattern", "$ref", "$dynamicRef", "anyOf", "oneOf")


def _joined_patterns(schema: Any) -> int:
    """How many patterns a schema has, if any may have to hold together; else 0."""
    patterns, joins, left = 0, False, [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            patterns += isinstance(value.get("pattern"), str)
            some = sum(isinstance(value.get(key), str | list) for key in _APPLICATORS)
            joins |= some > 1 or isinstance(value.get("allOf"), list)
            left += value.values()
        elif isinstance(value, list):
            left += value
    return patterns if joins else 0


_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")


def _joined_terminals(text: str) -> int:
    """As above for Lark: how many terminals ``&`` joins, plus patterns of ``%json``."""
    joined = _LITERAL.sub("", text).count("&")
    if "%json" in text:
        plain = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)
        joined += plain.count('"pattern"')
    return joined
