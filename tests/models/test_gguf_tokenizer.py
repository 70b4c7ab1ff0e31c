"""Tokenizers from GGUF metadata: splits, specials, round trips, streaming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.gguf.header import read_header
from specdec.models.gguf.tokenizer import build_tokenizer

from .gguf_files import (
    VOCAB,
    Vocabulary,
    byte_level,
    write_gguf,
)

PRES = ("smollm", "qwen2", "llama-bpe", "gpt-2")
TEXTS = (
    "the cat, the dog and the bird",
    "12345 x12 3.14",
    "def f(x):\n    return x  # don't\n\n\n",
    "naïve café, 日本語, 🤗👩‍👩‍👧",
    " leading,  trailing  ",
    "tab\there\r\nand\x00control",
    "<|im_start|>user\nhi<|im_end|>\n<tool_call>",
    "",
)


def tokenizer_of(path: Path, vocabulary: Vocabulary, arch: str = "llama") -> Any:
    return build_tokenizer(
        read_header(write_gguf(path / "t.gguf", arch, {}, {}, vocabulary))
    )


def streamed(tokenizer: Any, tokens: list[int]) -> str:
    detokenizer = tokenizer.detokenizer
    text = ""
    for token in tokens:
        detokenizer.add_token(token)
        text += detokenizer.last_segment
        assert "\ufffd" not in text
    detokenizer.finalize()
    assert detokenizer.tokens == tokens
    return text + str(detokenizer.last_segment)


def pieces(tokenizer: Any, text: str) -> list[str]:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    found: list[str] = tokenizer.convert_ids_to_tokens(tokens)
    return found


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pre", PRES)
def test_round_trip_and_streaming(pre: str, text: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, byte_level(pre))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens) == text
    assert streamed(tokenizer, tokens) == text


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        # The vocabulary can join 1, 2 and 3; who may, differs.
        ("smollm", "x123", ["x", "1", "2", "3"]),
        ("qwen2", "x123", ["x", "1", "2", "3"]),
        ("llama-bpe", "x1234", ["x", "123", "4"]),
        ("llama-bpe", "x4123", ["x", "4", "12", "3"]),
        ("gpt-2", "x4123", ["x", "4", "123"]),
        ("default", "x4123", ["x", "4", "123"]),
        # Contractions: in capitals too for the newer ones.
        ("gpt-2", "don't", ["d", "on", "'t"]),
        ("qwen2", "DON'T", ["D", "O", "N", "'", "T"]),
        # A run of newlines is one piece; before a letter GPT-2 keeps one back.
        ("qwen2", "\n\nab", ["ĊĊ", "ab"]),
        ("gpt-2", "\n\nab", ["Ċ", "Ċ", "ab"]),
        # NFC joins e and the accent before anything else.
        ("qwen2", "e\u0301", ["Ã©"]),
        ("smollm", "e\u0301", ["e", "Ì", "ģ"]),
        ("smollm", "a  x", ["a", "Ġ", "Ġx"]),
    ],
)
def test_splits(pre: str, text: str, expected: list[str], tmp_path: Path) -> None:
    assert pieces(tokenizer_of(tmp_path, byte_level(pre)), text) == expected


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_files_need_not_name_their_split(arch: str, tmp_path: Path) -> None:
    """GPT-2's would join the digits, and not the accent."""
    tokenizer = tokenizer_of(tmp_path, byte_level(None), arch)
    assert pieces(tokenizer, "x123") == ["x", "1", "2", "3"]
    assert pieces(tokenizer, "e\u0301\n\nab") == ["Ã©", "ĊĊ", "ab"]


def test_other_byte_level_files_have_to_name_their_split(tmp_path: Path) -> None:
    """A guess would give other tokens than the model's, and nobody would know."""
    with pytest.raises(ModelError, match="does not name its pre-tokenizer"):
        tokenizer_of(tmp_path, byte_level(None))
    vocabulary = sentencepiece_vocabulary(space_prefix=True)
    vocabulary.pre = None  # SentencePiece has no such thing
    assert pieces(tokenizer_of(tmp_path, vocabulary), "the cat") == ["▁the", "▁cat"]


def test_special_tokens_are_whole_and_end_texts(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, byte_level())
    ids = tokenizer.get_vocab()
    assert pieces(tokenizer, "ab<|im_end|>ab") == ["ab", "<|im_end|>", "ab"]
    assert pieces(tokenizer, "ab<tool_call>") == ["ab", "<tool_call>"]
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.bos_token == "<|endoftext|>"
    # The other usual end is found by its name.
    assert tokenizer.eos_token_ids == {ids["<|im_end|>"], ids["<|endoftext|>"]}
    kept = tokenizer.decode([ids["<|im_end|>"], ids["<tool_call>"]])
    assert kept == "<|im_end|><tool_call>"
    shown = [ids["<|im_end|>"], ids["<tool_call>"]]
    assert tokenizer.decode(shown, skip_special_tokens=True) == "<tool_call>"


@pytest.mark.parametrize(
    ("token", "kind", "ends"),
    [
        ("</s>", 3, True),
        ("</s>", 4, False),  # in Gemma 3: HTML's tag for struck-out text
        ("</s>", 1, False),
        ("<end_of_turn>", 3, True),
        ("<end_of_turn>", 4, True),
        ("<|eot_id|>", 4, True),
        ("<|eot_id|>", 1, False),
    ],
)
def test_a_name_alone_does_not_end_a_text(
    token: str, kind: int, ends: bool, tmp_path: Path
) -> None:
    """An answer with HTML in it would stop at the first ``</s>``."""
    vocabulary = byte_level()
    vocabulary.tokens[0], vocabulary.types[0] = token, kind
    assert (0 in tokenizer_of(tmp_path, vocabulary).eos_token_ids) is ends


@pytest.mark.parametrize("role", ["eos", "eot"])
def test_the_metadata_may_name_any_token_as_the_end(role: str, tmp_path: Path) -> None:
    vocabulary = byte_level()
    vocabulary.tokens[0], vocabulary.types[0] = "</s>", 4
    vocabulary.extra[f"tokenizer.ggml.{role}_token_id"] = 0
    assert 0 in tokenizer_of(tmp_path, vocabulary).eos_token_ids


@pytest.mark.parametrize("kind", [1, 4, 5])
def test_padding_is_not_vocabulary(kind: int, tmp_path: Path) -> None:
    """Older converters wrote it as user-defined, so that text could spell it."""
    vocabulary = byte_level()
    first = vocabulary.types.index(5)
    vocabulary.types[first:] = [kind] * (VOCAB - first)
    tokenizer = tokenizer_of(tmp_path, vocabulary)
    assert len(vocabulary.tokens) == VOCAB
    assert len(tokenizer) == first == 278
    assert not any("PAD" in token for token in tokenizer.get_vocab())


@pytest.mark.parametrize("token", ["[PAD]", "[PAD7]", "[PAD319] ", "[PAD0319]"])
def test_a_token_much_like_padding_is_vocabulary(token: str, tmp_path: Path) -> None:
    vocabulary = byte_level()
    vocabulary.tokens[-1] = token
    tokenizer = tokenizer_of(tmp_path, vocabulary)
    assert tokenizer.get_vocab()[token] == VOCAB - 1
    assert len(tokenizer) == VOCAB


@pytest.mark.parametrize(
    ("pre", "stated", "added"),
    [
        ("smollm", None, False),
        ("smollm", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_beginning_of_text(
    pre: str, stated: bool | None, added: bool, tmp_path: Path
) -> None:
    extra = {} if stated is None else {"tokenizer.ggml.add_bos_token": stated}
    tokenizer = tokenizer_of(tmp_path, byte_level(pre, **extra))
    begin = [tokenizer.bos_token_id] if added else []
    plain = tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.encode("ab") == begin + plain


def test_chat_template(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, byte_level())
    assert tokenizer.has_chat_template
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}])
    assert tokenizer.decode(tokens) == "<|im_start|>user\nab<|im_end|>\n"


def sentencepiece_vocabulary(*, space_prefix: bool | None) -> Vocabulary:
    made = Vocabulary(model="llama", pre="default")
    for token, role in (
        ("<pad>", "padding"),
        ("<eos>", "eos"),
        ("<bos>", "bos"),
        ("<unk>", "unknown"),
        ("<end_of_turn>", None),
    ):
        index = made.add(token, 3, -1000.0)
        if role:
            made.extra[f"tokenizer.ggml.{role}_token_id"] = index
    for byte in range(256):
        made.add(f"<0x{byte:02X}>", 6, -1000.0)
    made.add("\n\n", 4, -1000.0)
    if space_prefix is False:  # they are written as spaces in the file
        made.add("  ", 4, -1000.0)
        made.add("   ", 4, -1000.0)
    joined = (
        "▁t", "he", "▁the", "in", "an", "ing", "▁c", "at", "▁cat", "▁a", "▁an",
        "on", "'t", "12", "café", "bc", "ab", "abd",
    )  # fmt: skip
    single = "▁abcdefghijklmnopqrstuvwxyzé0123456789.,()'"
    for rank, token in enumerate([*joined, *single]):
        made.add(token, 1, -float(rank))
    if space_prefix is not None:
        made.extra["tokenizer.ggml.add_space_prefix"] = space_prefix
    return made


def reference(vocabulary: Vocabulary, space_prefix: bool) -> Any:
    """Google's own implementation over the same pieces."""
    messages: Any = sentencepiece_model_pb2  # made when imported
    proto = messages.ModelProto()
    for token, score, kind in zip(
        vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True
    ):
        piece = proto.pieces.add()
        piece.piece = token.replace(" ", "▁")
        piece.score = score
        piece.type = 2 if token == "<unk>" else kind
    proto.trainer_spec.model_type = 2
    proto.trainer_spec.byte_fallback = True
    proto.trainer_spec.unk_id = 3
    proto.trainer_spec.bos_id = 2
    proto.trainer_spec.eos_id = 1
    proto.trainer_spec.pad_id = 0
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = space_prefix
    proto.normalizer_spec.remove_extra_whitespaces = False
    proto.normalizer_spec.escape_whitespaces = True
    return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())


SPM_TEXTS = (
    "abc bcab abd",  # the better pair first: a bc, not ab c
    "the cat in an inning",
    "  two spaces,   three\n\nnewlines\n\n\nmore",
    "12 121 don't café cafés",
    "日本語 🤗 \u2581 \x00",
    " leading and trailing ",
    "x",
)


@pytest.mark.parametrize("text", SPM_TEXTS)
def test_sentencepiece_without_a_space_prefix(text: str, tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary(space_prefix=False)
    tokenizer = tokenizer_of(tmp_path, vocabulary)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokens == reference(vocabulary, False).encode(text)
    assert tokenizer.decode(tokens) == text.replace("▁", " ")
    assert streamed(tokenizer, tokens) == tokenizer.decode(tokens)
    assert tokenizer.encode(text) == [2, *tokens]


# llama.cpp, unlike SentencePiece, adds its space again after a user-defined token.
WITHOUT_RUNS = [text for text in SPM_TEXTS if "\n" not in text and text[0] != " "]


@pytest.mark.parametrize("text", WITHOUT_RUNS)
@pytest.mark.parametrize("stated", [True, None])
def test_sentencepiece_with_a_space_prefix(
    stated: bool | None, text: str, tmp_path: Path
) -> None:
    vocabulary = sentencepiece_vocabulary(space_prefix=stated)
    tokenizer = tokenizer_of(tmp_path, vocabulary)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokens == reference(vocabulary, True).encode(text)
    assert tokenizer.decode(tokens) == text.replace("▁", " ")
    assert streamed(tokenizer, tokens) == tokenizer.decode(tokens)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"pre": "tekken"}, UnsupportedModelError, "'tekken'"),
        ({"model": "bert"}, UnsupportedModelError, "'bert'"),
        ({"tokens": []}, ModelError, "no tokenizer"),
        ({"model": "llama", "scores": [0.0]}, ModelError, "without scores"),
        ({"types": [1]}, ModelError, "320 tokens and 1 token types"),
        ({"merges": ["no such"]}, ModelError, "does not fit together"),
    ],
)
def test_refused_by_name(
    change: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    vocabulary = byte_level()
    for name, value in change.items():
        setattr(vocabulary, name, value)
    with pytest.raises(error, match=message) as caught:
        tokenizer_of(tmp_path, vocabulary)
    assert "\n" not in str(caught.value)
    assert "t.gguf" in str(caught.value)
