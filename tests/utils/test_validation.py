"""Dataclasses from JSON that anyone may have written."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pytest

from specdec.utils.data_files import DataError
from specdec.utils.validation import Count, Int, Number, check, read_record, table


@dataclass(frozen=True)
class Inner:
    x: float
    pair: tuple[int, str] = (0, "")


@dataclass(frozen=True)
class Outer:
    name: str
    kind: Literal["a", "b"]
    inner: Inner
    many: list[Inner] = field(default_factory=list)
    by_name: dict[str, int] = field(default_factory=dict)
    maybe: Count | str | None = None
    free: Any = None


WHOLE: dict[str, Any] = {
    "name": "n",
    "kind": "b",
    "inner": {"x": 1, "pair": [2, "c"]},
    "many": [{"x": 0.5, "of no field": 1}],
    "by_name": {"y": 3},
    "maybe": "auto",
    "free": [None],
}


def test_what_was_written_is_read() -> None:
    made = Outer(
        "n", "b", Inner(1, (2, "c")), [Inner(0.5)], {"y": 3}, maybe="auto", free=[None]
    )
    assert read_record(Outer, WHOLE) == made
    assert read_record(Outer, json.loads(json.dumps(asdict(made)))) == made
    least = {key: WHOLE[key] for key in ("name", "kind", "inner")}
    assert read_record(Outer, least) == Outer("n", "b", Inner(1, (2, "c")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 1}, "name is 1, not a text"),
        ({"kind": "c"}, "kind is 'c': it must be a or b"),
        ({"kind": True}, "kind is True"),
        ({"inner": None}, "inner is None, not an object"),
        ({"inner": {}}, "inner.x is missing"),
        ({"inner": {"x": "1"}}, "inner.x is '1', not a number"),
        ({"inner": {"x": 1, "pair": [2]}}, "inner.pair[1] is missing"),
        ({"inner": {"x": 1, "pair": [2, 3]}}, "inner.pair[1] is 3, not a text"),
        ({"many": [{"x": 1}, {"x": []}]}, "many[1].x is [], not a number"),
        ({"by_name": {"y": 1.5}}, "by_name.y is 1.5, not a whole number"),
        ({"maybe": 1.5}, "maybe is 1.5, not a whole number"),
        ({"maybe": 10**40}, "maybe is 1000"),
    ],
)
def test_what_cannot_be_is_named(change: dict[str, Any], message: str) -> None:
    """A value of another kind gets into figures, or ends in a TypeError there."""
    with pytest.raises(DataError) as caught:
        read_record(Outer, {**WHOLE, **change})
    assert message in str(caught.value)


KIND = table(
    {"n": Int, "x": Number, "many": list[list[Int]], "name": str | None},
    on=bool,
    inner=table({"k": list[Number]}) | None,
)
GOOD: dict[str, Any] = {
    "n": 3,
    "x": 1,
    "many": [[1], [2, 3]],
    "name": None,
    "inner": {"k": [0.5, 2], "more": {}},
    "else": [],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 1.5}, "n is 1.5, not a whole number"),
        ({"n": True}, "n is True, not a whole number"),
        ({"n": 10**400}, "it must be 9007199254740992 at most"),
        ({"x": 10**400}, "not a number"),
        ({"x": math.nan}, "x is nan, not a number"),
        ({"x": "1"}, "x is '1', not a number"),
        ({"many": {}}, "many is {}, not a list"),
        ({"many": [[1], [2, "a"]]}, "many[1][1] is 'a', not a whole number"),
        ({"name": 1}, "name is 1, not a text"),
        ({"on": 1}, "on is 1, not true or false"),
        ({"inner": {}}, "inner.k is missing"),
        ({"inner": {"k": ["x" * 5000]}}, "inner.k[0] is"),
    ],
)
def test_tables(change: dict[str, Any], message: str) -> None:
    """What has another kind than it was written with is used as it is."""
    assert check(KIND, GOOD) is GOOD
    with pytest.raises(DataError) as error:
        check(KIND, {**GOOD, **change})
    assert message in str(error.value)
    assert len(str(error.value)) < 200
