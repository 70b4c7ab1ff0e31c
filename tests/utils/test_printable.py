"""Errors are one printable line, and no longer than reads."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from specdec import errors
from specdec.models import convert, load, map_vocabulary
from specdec.utils.checks import require
from specdec.utils.printable import one_line, quoted, shorten

from ..models.gguf_files import byte_level, random_model, write_model

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.SpecdecError)
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a plain  one: as it is", "a plain  one: as it is"),
        ("one\n  two\r\n\nthree\u2028four\x85", "one two three four"),
        ("tab\there", "tab here"),
        ("\x1b[31mred\0 \udcff", "?[31mred? ?"),
        ("naïve 日本 🤗", "naïve 日本 🤗"),
        ("", ""),
    ],
)
def test_every_error_is_one_printable_line(
    kind: type[errors.SpecdecError], text: str, shown: str
) -> None:
    error = kind(text)
    assert str(error) == shown
    assert error.args == (shown,)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (kind, shown)


def test_long_texts_are_cut() -> None:
    """A value of any length is echoed whole, or the way out is cut off."""
    assert shorten("x" * 240) == "x" * 240
    assert shorten("x" * 241) == "x" * 237 + "..."
    assert shorten(ValueError(" short \n")) == "short"
    for longest in range(10, 80):
        for length in (longest - 1, longest, longest + 1, 7 * longest, 9 * longest):
            text = "".join(chr(0x4E00 + n) for n in range(length))
            cut = one_line(text, longest)
            assert len(cut) == min(length, longest)
            assert (cut[0], cut[-1]) == (text[0], text[-1])
            assert one_line(cut, longest) == cut
    error = errors.ConfigError(f"{'a' * 5000}: no such file: check the path")
    assert len(str(error)) < 300
    assert str(error).endswith(": no such file: check the path")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_values_that_have_no_text() -> None:
    """Python refuses to write them: the message would be another error."""
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    for value in (nested, 10**5000):
        assert "too long to show" in quoted(value)
        with pytest.raises(errors.ConfigError, match="too long to show"):
            require(False, "batch_size", value, "small")
    del nested
    assert quoted("a\x1bb") == r"'a\x1bb'"
    assert len(quoted("x" * 5000)) == 60


def test_a_path_with_newlines(tmp_path: Path) -> None:
    """It is quoted by most messages of this package."""
    folder = tmp_path / "two\nlines"
    folder.mkdir()
    path = write_model(folder / "m.gguf", "mamba", random_model("llama"))
    with pytest.raises(errors.UnsupportedModelError, match="two lines") as one:
        load(path)
    assert "\n" not in str(one.value)
    with pytest.raises(errors.ModelError, match="two lines is not empty") as two:
        convert(path, folder)
    assert "\n" not in str(two.value)
    path = write_model(folder / "a.gguf", "llama", random_model("llama"))
    other = byte_level("gpt-2")
    other.tokens = [f"{token} " for token in other.tokens]
    other.merges = []
    draft = write_model(
        folder / "b.gguf", "llama", random_model("llama"), vocabulary=other
    )
    with pytest.raises(errors.VocabularyMismatchError) as three:
        map_vocabulary(load(path), load(draft))
    assert "\n" not in str(three.value)
