"""Checks request bodies by tables of parameters.

Each protocol has a table of all parameters that its documentation names. A parameter is
honoured, or refused by name; an unknown one is refused, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..utils.data_files import DataError, Shape, check_shape
from ..utils.names import nearest
from ..utils.printable import quoted
from .refusal import Refusal


@dataclass(frozen=True)
class Parameter:
    """One parameter of a request.

    Args:
        shape: its value's shape, see :func:`~specdec.utils.data_files.check_shape`.
        default: its value if it is absent or ``null``.
        low, high: bounds of a number, or of the length of a list or a text.
        only: possible values; ``()``: all.
        refused: why values that are not in ``only`` are refused, and the way out.
        required: whether it has to be given.
        parts: an object's parts, in the same form; other parts are refused.
    """

    shape: Shape
    default: Any = None
    low: float | None = None
    high: float | None = None
    only: tuple[Any, ...] = ()
    refused: str = ""
    required: bool = False
    parts: Mapping[str, Parameter] | None = None

    def check(self, name: str, value: Any) -> Any:
        """Return the value if it is valid."""
        if self.refused and value not in self.only:
            raise Refusal.unsupported(name, f"{name} is not supported: {self.refused}")
        shaped(value, self.shape, name)
        if self.only and value not in self.only:
            allowed = ", ".join(map(str, self.only))
            raise Refusal.invalid(
                name, f"{name} is {quoted(value)}: it must be one of {allowed}"
            )
        self._check_range(name, value)
        if self.parts is not None:
            for key in value:
                if key not in self.parts:
                    raise Refusal.unsupported(
                        name, f"{name} has no {quoted(key)}: leave it out"
                    )
            check_parts(value, self.parts, name)
        return value

    def _check_range(self, name: str, value: Any) -> None:
        sized = isinstance(value, list | str | dict)
        number = len(value) if sized else value
        low, high = self.low, self.high
        if (low is None or number >= low) and (high is None or number <= high):
            return
        what = f"{name} has length {number}" if sized else f"{name} is {number}"
        rules = [] if low is None else [f"{low:g} or more"]
        rules += [] if high is None else [f"{high:g} at most"]
        raise Refusal.invalid(name, f"{what}: it must be {' and '.join(rules)}")


Table: TypeAlias = Mapping[str, Parameter]

#: Parameters of other servers that have another name here, or no equivalent.
_ELSEWHERE = {
    **dict.fromkeys(
        ("grammar", "guided_grammar", "guided_json", "guided_regex",
         "structured_outputs"),
        "response_format",
    ),
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), "max_tokens"),
    **dict.fromkeys(("cache_prompt", "draft_model", "options", "think"), ""),
}  # fmt: skip
# What a request is about, by endpoint.
_TEXTS = ("messages", "input", "prompt")


def shaped(value: Any, shape: Shape, where: str) -> Any:
    """Return ``value`` if it has the shape; ``where`` names it in messages."""
    try:
        return check_shape(value, shape, where)
    except DataError as error:
        param = str(error).partition(" ")[0]
        raise Refusal(str(error), param=param, code="invalid_type") from error


def check_parts(given: Mapping[str, Any], table: Table, where: str) -> None:
    """Check the parts of an object; ``where`` names it in messages."""
    for name, parameter in table.items():
        if given.get(name) is not None:
            parameter.check(f"{where}.{name}", given[name])
        elif parameter.required:
            raise Refusal(f"{where}.{name} is missing: add it", param=f"{where}.{name}")


def read(body: Any, table: Table) -> dict[str, Any]:
    """The values of all parameters of the table."""
    if not isinstance(body, dict):
        raise Refusal("the body is not a JSON object: send one", code="invalid_type")
    values = {}
    for name, value in body.items():
        if name not in table:
            if name in _TEXTS:
                near = next((text for text in _TEXTS if text in table), None)
            else:
                near = _ELSEWHERE.get(name, nearest(name[:100], table))
            near = near if near in table else None
            meant = f": did you mean {near}?" if near else ": leave it out"
            raise Refusal(
                f"{quoted(name)} is not a parameter of this endpoint{meant}",
                param=name[:100],
                code="unknown_parameter",
            )
        if value is not None:
            values[name] = table[name].check(name, value)
    for name, parameter in table.items():
        if parameter.required and name not in values:
            raise Refusal(
                f"{name} is missing: add it", param=name, code="missing_parameter"
            )
        values.setdefault(name, parameter.default)
    return values
