"""What JSON and TOML files may hold: wrong ones end in one error with a sentence."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest

from specdec.utils.data_files import (
    HALVES,
    MOST_DEPTH,
    DataError,
    json_text,
    parse_json,
    parse_toml,
    read_json,
    read_table,
    read_text,
    read_toml,
)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [MOST_DEPTH + 1, 900, 100_000])
def test_depth(depth: int) -> None:
    """Nesting that the parser allows ends in a RecursionError somewhere else."""
    for text in (nested(depth), '{"a":' * depth + "1" + "}" * depth):
        with pytest.raises(DataError, match="nested"):
            parse_json(text)
    for text in (f"a = {nested(depth)}", f"a{'.a' * depth} = 1"):
        with pytest.raises(DataError, match="nested"):
            parse_toml(text)


def test_as_deep_as_allowed() -> None:
    """A bound that refuses what everybody writes."""
    assert parse_json(nested(MOST_DEPTH)) == json.loads(nested(MOST_DEPTH))
    assert parse_toml(f"a = {nested(MOST_DEPTH - 1)}")["a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("NaN", "NaN"),
        ("[-Infinity]", "out of range"),
        ('{"a": 1e999}', "out of range"),
        ("9" * 5000, "too many digits"),
        (r'["\ud800"]', "surrogate"),
        (r'{"\udfff": 1}', "surrogate"),
        (b"\xff", "UTF-8"),
    ],
)
def test_what_is_not_json(text: str | bytes, message: str) -> None:
    """Python's own reader allows more than JSON has, and raises what nobody catches."""
    with pytest.raises(DataError, match=message):
        parse_json(text)


@pytest.mark.parametrize("text", ["a", "a = " + "9" * 5000, "a = 2020-99-99", "\0"])
def test_what_is_not_toml(text: str) -> None:
    """Digits by the thousand are no TOMLDecodeError."""
    with pytest.raises(DataError):
        parse_toml(text)


def test_files(tmp_path: Path) -> None:
    """A pipe is waited for; a name that no file can have is another error."""
    file = tmp_path / "a.json"
    with pytest.raises(FileNotFoundError):
        read_json(file)
    file.write_text('{"a": [1, 2.5, "é", null, true]}', "utf-8")
    with pytest.raises(FileNotFoundError):  # below a file
        read_json(file / "b")
    assert read_table(file) == {"a": [1, 2.5, "é", None, True]}
    assert read_text(file, most=file.stat().st_size)
    with pytest.raises(DataError, match="more than 3 bytes"):
        read_text(file, most=3)
    file.write_text("[]")
    with pytest.raises(DataError, match="not an object"):
        read_table(file)
    file.write_bytes(b"\xff")
    with pytest.raises(DataError, match="UTF-8"):
        read_toml(file)
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "a" * 5000, "a\0b"):
        with pytest.raises(DataError):
            read_text(tmp_path / name)


def test_what_is_written_can_be_read() -> None:
    """Halves of pairs and what is no number make a line that no reader takes."""
    rng = random.Random(1)
    leaves = [
        None,
        True,
        1,
        -2.5,
        math.nan,
        -math.inf,
        "a",
        "\ud800",
        "é\udfff\n",
        "👩",
    ]

    def value(depth: int) -> Any:
        kind = rng.randrange(4) if depth else 0
        if kind == 1:
            return [value(depth - 1) for _ in range(rng.randrange(4))]
        if kind == 2:
            return {f"\udc80{i}": value(depth - 1) for i in range(rng.randrange(4))}
        return rng.choice(leaves)

    def plain(found: Any) -> Any:
        if isinstance(found, dict):
            return {key: plain(each) for key, each in found.items()}
        if isinstance(found, list):
            return [plain(each) for each in found]
        unknown = isinstance(found, float) and not math.isfinite(found)
        return None if unknown else found

    for _ in range(300):
        written = value(4)
        data = json_text(written).encode("utf-8", HALVES)
        assert parse_json(data.decode(), surrogates=True) == plain(written)
