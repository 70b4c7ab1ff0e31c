"""Tokenizers that take gigabytes or panic: refused, or one prompt's loss."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerFast

from specdec.errors import ModelError, PromptError
from specdec.models import tokenizer_check
from specdec.models.loading import load
from specdec.models.tokenizer import ExactTokenizerWrapper
from specdec.models.tokenizer_check import (
    LimitedEncoder,
    check_tokenizer,
    check_tokenizer_file,
)
from specdec.prompts import encode
from tests.models.folders import write_folder


def split(expression: str) -> dict[str, Any]:
    pattern = {"Regex": expression}
    return {
        "type": "Split",
        "pattern": pattern,
        "behavior": "Isolated",
        "invert": False,
    }


def replace(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def charsmap(trie: bytes, texts: bytes) -> dict[str, Any]:
    data = len(trie).to_bytes(4, "little") + trie + texts
    text = base64.b64encode(data).decode()
    return {"type": "Precompiled", "precompiled_charsmap": text}


def sequence(*parts: dict[str, Any], of: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", of: list(parts)}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
MODEL = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "<u>": 2}, "unk_token": "<u>"}
STRIP = {"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}


def template(*shown: str, ids: int = 1) -> dict[str, Any]:
    """What is put around a text, which ``A`` stands for."""
    special = {"id": "<u>", "ids": [2] * ids, "tokens": ["<u>"] * ids}
    return {
        "type": "TemplateProcessing",
        "single": [
            {"Sequence" if each == "A" else "SpecialToken": {"id": each, "type_id": 0}}
            for each in shown
        ],
        "pair": [{"Sequence": {"id": each, "type_id": 0}} for each in "AB"],
        "special_tokens": {"<u>": special},
    }


UNUSUAL = charsmap(b"\xff\x01\x00\x80" * 256, b"abc")
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "four times two hundred": ({"normalizer": sequence(*[replace("a", "a" * 200)] * 4)},
                               "1.6e+09 times as long"),
    "between characters": ({"normalizer": replace("x*", "y" * 300, "Regex")},
                           "301 times"),
    "in the text of answers": ({"decoder": sequence(*[replace("a", "a" * 99)] * 3,
                                                    of="decoders")}, "decoder can"),
    "a table of long texts": ({"normalizer": charsmap(b"", b"a\0" + b"b" * 999)},
                              "999 times"),
    "a text many times": ({"post_processor": template(*["A"] * 300)}, "300 times"),
    "many texts around it": ({"post_processor": template("A", *["<u>"] * 99, ids=99)},
                             "post_processor can make a text 614 times"),
    "bytes of bytes": ({"pre_tokenizer": sequence(*[BYTES] * 8, of="pretokenizers")},
                       "pre_tokenizer can make a text 256 times"),
    "normalized bytes": ({"normalizer": sequence(*[{"type": "ByteLevel"}] * 8)},
                         "256 times"),
    "expressions in answers": ({"decoder": replace("(a+)+b", "x", "Regex")},
                               "may take time without end"),
    "long words": ({"model": {**MODEL, "type": "WordPiece",
                              "continuing_subword_prefix": "##",
                              "max_input_chars_per_word": 10**9}},
                   "words of 1000000000 characters"),
    "a table that is damaged": ({"normalizer": UNUSUAL}, "it fails"),
    "a table that is empty": ({"normalizer": charsmap(b"", b"")}, "it fails"),
    "a match of nothing": ({"normalizer": replace("a*|b", "x", "Regex")}, "it fails"),
    "a decoder that panics": ({"decoder": STRIP}, "strips 1000000000 characters"),
    **{
        f"endless: {each}": ({"pre_tokenizer": split(each)}, "takes longer|it fails")
        for each in (
            "(a|b|ab)+$|(a+)+c", "((a+))+[b-z]", "(?:(?:a|aa)x?)+[b-z]",
            r"\s*\s*\s*[b-z]", "[a-z]*[a-z]+[a-z]*[0-9]", "a*a*a*a{1,}b",
        )
    },
    "endless references": ({"pre_tokenizer": split(r"(?<p>a\g<p>?\g<p>?[b-z])")},
                           "takes longer|it fails"),
}  # fmt: skip


def spec(**parts: Any) -> str:
    empty = dict.fromkeys(("truncation", "padding", *tokenizer_check._PARTS))
    return json.dumps(
        {"version": "1.0", "added_tokens": [], **empty, "model": MODEL, **parts}
    )


@pytest.mark.parametrize(("parts", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_takes_too_much_is_refused(
    parts: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """7 kB that take over 2 GB for a short prompt, or end the process."""
    write_folder(tmp_path / "m", "llama")
    file = tmp_path / "m" / "tokenizer.json"
    whole = {**json.loads(file.read_text("utf-8")), **parts}
    file.write_text(json.dumps(whole), "utf-8")
    if "takes longer" in message:
        monkeypatch.setattr(tokenizer_check, "SECONDS", 1)
    with pytest.raises(ModelError, match=message.replace("+", r"\+")) as raised:
        load(str(tmp_path / "m"))
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("file", "key"),
    [("tokenizer_config.json", "additional_special_tokens"),
     ("tokenizer_config.json", "extra_special_tokens"),
     ("tokenizer_config.json", None), ("special_tokens_map.json", None),
     ("special_tokens_map.json", "extra_special_tokens"),
     ("tokenizer.json", "added_tokens")],
)  # fmt: skip
def test_too_many_added_tokens(file: str, key: str | None, tmp_path: Path) -> None:
    """transformers compares each special token with all: 100,000 take minutes."""
    write_folder(tmp_path / "m", "llama")
    path = tmp_path / "m" / file
    names = {f"x{i}_token": f"<x{i}>" for i in range(140_000)}
    added: Any = [{"content": each} for each in names.values()]
    more = names if key is None else {key: added if key[:2] == "ad" else names}
    table = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**table, **more}), "utf-8")
    with pytest.raises(ModelError, match=rf"{file} has 14000\d \w+ tokens, and"):
        load(str(tmp_path / "m"))


def test_a_child_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended, and the next tokenizer is tried."""
    file = tmp_path / "tokenizer.json"
    file.write_text(spec(pre_tokenizer={"type": "UnicodeScripts"}), "utf-8")
    check_tokenizer_file(file)
    monkeypatch.setattr(tokenizer_check, "SECONDS", 1e-5)
    with pytest.raises(ModelError, match="takes longer than"):
        check_tokenizer_file(file)
    monkeypatch.undo()
    check_tokenizer_file(file)


def test_usual_tokenizers_are_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expressions of well-known models cost no child's start."""
    monkeypatch.setattr(tokenizer_check, "_CHILD", None)
    file = tmp_path / "tokenizer.json"
    for pre_tokenizer in (
        split(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
              r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
        split(r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}"
              r"\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}"
              r"\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|"
              r"'d)?| ?[^\s\p{L}\p{N}]+[\r\n/]*"),
        split(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
        split(r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?"
              r"[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
        {**BYTES, "use_regex": True},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"},
    ):  # fmt: skip
        normalizer = sequence({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"))
        parts = {"pre_tokenizer": pre_tokenizer, "normalizer": normalizer}
        around = template("<u>", "A", "<u>")
        file.write_text(spec(**parts, post_processor=around), "utf-8")
        check_tokenizer_file(file)


def fast(**parts: Any) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(spec(**parts)))


def wrapped(**parts: Any) -> Any:
    return ExactTokenizerWrapper(fast(**parts))


@pytest.mark.parametrize(
    "expression",
    [r"[a-z]+\d", r"\s*[\r\n]+", "x*y+|x+z", r"\w+\b", "a+(?!b)", r"a?a?a?a?a?aaaa",
     "[ab]{0,99}[ab]{0,99}c", "(?:qz|qzq|zq)+$", "(ab)*c", "a{2,}b", "a++b", "(?=a+b)a",
     "(?x) a + a + b", r"a+(b|c)", r"\X+a", "[[:alpha:]]+a", "x" * 1000],
)  # fmt: skip
def test_expressions_that_may_take_long_are_told(expression: str) -> None:
    """Those whose time may grow with the square of a text, or faster."""
    assert LimitedEncoder.of(wrapped(pre_tokenizer=split(r"\s+|\p{L}?"))) is None
    assert LimitedEncoder.of(wrapped(pre_tokenizer=split(expression))) is not None


def test_one_prompt_that_takes_long_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trial finds the text that an expression was made for: it held the process."""
    monkeypatch.setattr(tokenizer_check, "SECONDS", 1)
    around = template("<u>", "A", "<u>")
    parts = {"pre_tokenizer": split("(?:qz|q|z)+[0-9]"), "post_processor": around}
    limited = ExactTokenizerWrapper.like(wrapped(**parts))
    for text in ("a", "a b", "<u> b"):
        for options in ({}, {"add_special_tokens": False}):
            assert limited.encode(text, **options) == fast(**parts).encode(
                text, **options
            )
    text = ("qz" * 17 + "!") * 4000 + "5"
    with pytest.raises(PromptError, match="it takes longer than 3 s"):
        encode(limited, text, ignore_chat_template=True)
    assert encode(limited, "a", ignore_chat_template=True).token_ids == (2, 0, 2)
    monkeypatch.setattr(tokenizer_check, "SECONDS", 60)
    with pytest.raises(PromptError, match="it fails"):  # a panic of the library
        limited.encode("qz" * 60)


def test_a_panic_is_one_prompts_loss() -> None:
    """It is no Exception: it ended the command with a traceback, and the server."""
    with pytest.raises(PromptError, match="the tokenizer fails"):
        encode(fast(normalizer=UNUSUAL), "a", ignore_chat_template=True)
    tokenizer = wrapped()
    # Not earlier: mlx-lm's wrapper decodes something when it is made.
    tokenizer.backend_tokenizer.decoder = decoders.Strip("a", 10**9, 10**9)
    with pytest.raises(PromptError, match="the tokenizer fails"):
        encode(tokenizer, [0, 1])
    streamed = tokenizer.detokenizer
    for token in (0, 1, 0):
        streamed.add_token(token)
    streamed.finalize()
    assert streamed.text == "\ufffd" * 3


def test_a_tokenizer_of_other_files_is_checked_too() -> None:
    """What transformers makes of a SentencePiece file has no tokenizer.json."""
    with pytest.raises(ModelError, match="its tokenizer's normalizer can make"):
        check_tokenizer(wrapped(normalizer=replace("a", "a" * 999)), "m")
    check_tokenizer(wrapped(normalizer=replace("a", "▁")), "m")
    check_tokenizer(object(), "m")
