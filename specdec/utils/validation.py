"""Values that pydantic checks: tables and records, and what is wrong in one line.

No mlx here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, NamedTuple, NotRequired, TypeAlias, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from .data_files import DataError
from .printable import quoted

R = TypeVar("R")
T = TypeVar("T")
# The largest whole number, so that numbers computed from it stay valid.
_MOST = 2**53
#: A whole number, a count and a number of a file that anyone may have written.
Int: TypeAlias = Annotated[int, Field(ge=-_MOST, le=_MOST)]
Count: TypeAlias = Annotated[int, Field(ge=0, le=_MOST)]
Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]

_WORDS = {
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "dataclass_type": "an object",
    "none_required": "null",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "{} or more"),
    "greater_than": ("gt", "above {}"),
    "less_than_equal": ("le", "{} at most"),
}
_LENGTHS = {"too_short": ("min_length", "{} or more"),
            "too_long": ("max_length", "{} at most"),
            "string_too_short": ("min_length", "{} or more")}  # fmt: skip


def read_record(kind: type[R], value: Any, where: str = "") -> R:
    """Make a dataclass from a JSON table with a value for each of its fields.

    A field with a default may be missing. Unknown keys are ignored.

    Args:
        where: the value's name, for errors.

    Raises:
        DataError: a value is of another kind, out of range or missing.
    """
    hashable: Any = kind
    try:
        record: R = _adapter(hashable).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise DataError(problem_of(error, value, where).text) from error
    return record


def table(required: Mapping[str, Any], **optional: Any) -> Any:
    """The kind of a table with some keys, for :func:`check`; it may have others."""
    more = {key: NotRequired[kind] for key, kind in optional.items()}
    return TypedDict("table", {**required, **more})  # type: ignore[operator]


def check(kind: Any, value: T, where: str = "") -> T:
    """Return a value of a file if it is of a kind: a type, or a :func:`table`.

    Args:
        where: the value's name, for errors.

    Raises:
        DataError: the value, or a part of it, is of another kind.
    """
    try:
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        raise DataError(problem_of(error, value, where).text) from error
    return value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


class Problem(NamedTuple):
    """Why a value was refused.

    Args:
        field: the place, such as ``messages[0].role``; empty: the whole value.
        text: one line that names the place and the rule.
        code: a fixed name of the kind of problem.
    """

    field: str
    text: str
    code: str = "invalid_value"


def require_rule(valid: bool, rule: str) -> None:
    """Let a validator refuse its value, which must be as ``rule`` says."""
    if not valid:
        raise PydanticCustomError("rule", "{rule}", {"rule": rule})


def refuse_key(name: str, code: str, text: str) -> PydanticCustomError:
    """The error of a validator that refuses a key of its object.

    Args:
        code: a fixed name of the kind of problem.
        text: what is said after the key's name.
    """
    context = {"name": name, "code": code, "text": text}
    return PydanticCustomError("refused", "refused", context)


def problem_of(error: ValidationError, value: Any, where: str = "") -> Problem:
    """The problem that lies deepest; of a choice of kinds, all that were possible.

    Args:
        value: the whole value that was checked.
        where: its name.
    """
    errors = [(_path(each["loc"], value, where), each) for each in error.errors()]
    depth = max(path.count(".") + path.count("[") for path, _ in errors)
    path, first = next(
        (p, e) for p, e in errors if p.count(".") + p.count("[") == depth
    )
    kind, content, context = first["type"], first["input"], first.get("ctx", {})
    if kind == "refused":
        path = f"{path}.{context['name']}".lstrip(".")[:200]
        unknown = context["code"] == "unknown_parameter"
        shown = quoted(path, 100) if unknown else path
        return Problem(path, f"{shown} {context['text']}", str(context["code"]))
    if kind == "missing":
        return Problem(path, f"{path} is missing: add it", "missing_parameter")
    if kind == "value_error":
        return Problem(path, str(context["error"]))
    if kind in _WORDS:
        rules = [_word(each) for at, each in errors if at == path]
        rule = " or ".join(dict.fromkeys(filter(None, rules)))
        text = f"{path or 'it'} is {quoted(content)}, not {rule}"
        return Problem(path, text, "invalid_type")
    if kind in _LENGTHS:
        key, form = _LENGTHS[kind]
        rule = form.format(context[key])
        return Problem(path, f"{path} has length {len(content)}: it must be {rule}")
    if kind in _BOUNDS:
        key, form = _BOUNDS[kind]
        bound = context[key]
        rule = form.format(bound if isinstance(bound, int) else f"{bound:g}")
    else:
        rule = _word(first) or str(context.get("rule", ""))
    rule = f" it must be {rule}" if rule else f" {first['msg']}"
    return Problem(path, f"{path} is {quoted(content)}:{rule}")


def _word(error: Any) -> str:
    """What the value should have been, if the error is of its kind."""
    if error["type"] == "literal_error":
        return str(error["ctx"]["expected"]).replace("'", "")
    return _WORDS.get(error["type"], "")


def _path(loc: Sequence[int | str], value: Any, where: str) -> str:
    """A place in the value, without pydantic's names of the kinds that it tried."""
    path = where
    for i, step in enumerate(loc):
        if isinstance(value, list) and isinstance(step, int) and step < len(value):
            value, path = value[step], f"{path}[{step}]"
        elif isinstance(value, dict) and step in value:
            value, path = value[step], f"{path}.{step}"
        elif i == len(loc) - 1 and isinstance(value, list) and isinstance(step, int):
            path = f"{path}[{step}]"  # it is missing
        elif i == len(loc) - 1 and isinstance(value, dict) and isinstance(step, str):
            path = f"{path}.{step}"
    return path.lstrip(".")
