"""Request bodies as records, which pydantic checks.

A field of a record is honoured. A known field that cannot be honoured is refused by its
name if it would change the answer, and accepted if it would not. A field that nobody
knows is ignored and noted, unless it looks like a misspelt one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema

from ..utils.names import nearest
from ..utils.validation import problem_of, refuse_key
from .errors import RequestError

#: The most unknown fields of a request: each is compared with all known ones.
_MOST_UNKNOWN = 256


@dataclass
class Notes:
    """What the sender of a request should know about its answer.

    Args:
        strict: unknown fields are refused.

    Attributes:
        ignored: names of fields that nobody knows.
        texts: lines for the response's header.
    """

    strict: bool = False
    ignored: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Note a line, once."""
        if text not in self.texts:
            self.texts.append(text)


class Refused(NamedTuple):
    """A known field that is refused, with the way out.

    Args:
        why: what follows "is not supported".
        only: values that are the same as none.
        code: the error's name.
    """

    why: str
    only: tuple[Any, ...] = ()
    code: str = "unsupported_parameter"


def _check_lists_briefly(schema: Any) -> None:
    """Let the first wrong element of a list end its check.

    A description of each of a hundred thousand takes seconds.
    """
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        schema = schema.values()
    elif not isinstance(schema, list):
        return
    for inner in schema:
        _check_lists_briefly(inner)


class Record(BaseModel):
    """An object of a request; a field that is ``null`` counts as absent.

    Attributes:
        neutral: values of fields that are the same as none.
        refused: known fields that are not honoured.
        accepted: known fields that change no answer.
        noted: known fields of which a note says so, except for this value.
        elsewhere: other servers' names of fields.
        place: where the object is, for notes; empty: it is the body.
        guesses: whether names that look like a field are refused as misspelt.
    """

    model_config = ConfigDict(strict=True, frozen=True)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    refused: ClassVar[Mapping[str, Refused]] = {}
    accepted: ClassVar[frozenset[str]] = frozenset()
    noted: ClassVar[Mapping[str, str]] = {}
    elsewhere: ClassVar[Mapping[str, str]] = {}
    place: ClassVar[str] = ""
    guesses: ClassVar[bool] = True

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = handler(source)
        _check_lists_briefly(schema)
        return schema

    @classmethod
    def known(cls) -> frozenset[str]:
        """The names of all fields that are known."""
        return cls.honoured() | cls.refused.keys() | cls.noted.keys() | cls.accepted

    @classmethod
    def honoured(cls) -> frozenset[str]:
        """The names of the fields that the record has."""
        names = cls.model_fields.items()
        return frozenset(field.alias or name for name, field in names)

    @model_validator(mode="before")
    @classmethod
    def _fields(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        taken, names = {}, cls.honoured()
        for name, content in value.items():
            neutral = cls.neutral.get(cls.elsewhere.get(name, name), ())
            if _among(content, neutral):
                continue
            if name in names:
                taken[name] = content
            elif rule := cls.refused.get(name):
                if not _among(content, rule.only):
                    raise refuse_key(name, rule.code, f"is not supported: {rule.why}")
            elif name in cls.noted:
                if content != cls.noted[name] and info.context:
                    info.context.add(f"{name} changes nothing here")
            elif name not in cls.accepted:
                cls._unknown(name, info.context)
        return taken

    @classmethod
    def _unknown(cls, name: str, notes: Notes | None) -> None:
        notes = notes or Notes()
        path = f"{cls.place}.{name}".lstrip(".")[:100]
        if path in notes.ignored:
            return
        if len(notes.ignored) == _MOST_UNKNOWN:
            text = "is one of too many unknown fields: leave them out"
            raise refuse_key(name, "unknown_parameter", text)
        taken = cls.known() - cls.refused.keys()
        near = cls.elsewhere.get(name) or nearest(name[:100], taken, cutoff=0.75)
        if not notes.strict and (near is None or not cls.guesses):
            notes.ignored.append(path)
            return
        where = f"of {cls.place}" if cls.place else "of this endpoint"
        meant = f"did you mean {near}?" if near else "leave it out"
        text = f"is not a parameter {where}: {meant}"
        raise refuse_key(name, "unknown_parameter", text)


R = TypeVar("R", bound=Record)


def _among(value: Any, neutral: Sequence[Any]) -> bool:
    """Whether a value is ``null``, or equals a neutral one; 0 is not ``false``."""
    return value is None or any(
        value == each and isinstance(value, bool) is isinstance(each, bool)
        for each in neutral
    )


def read(kind: type[R], value: Any, notes: Notes, where: str = "") -> R:
    """A record of a value; ``where`` names the value in messages.

    Raises:
        RequestError: it is none.
    """
    try:
        return kind.model_validate(value, context=notes)
    except ValidationError as error:
        field, text, code = problem_of(error, value, where)
        if not field:
            text = "the body is not a JSON object: send one"
        raise RequestError(text, field=field or None, code=code) from error
