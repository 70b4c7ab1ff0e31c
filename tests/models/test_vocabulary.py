"""What two vocabularies share: tokens of the same bytes, whatever their ids."""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
import pytest

from specdec.errors import VocabularyMismatchError
from specdec.models import LoadedModel, VocabularyMap, load, map_vocabulary

from .folders import tokenizer_of, write_folder
from .gguf_files import byte_level
from .test_gguf_tokenizer import sentencepiece_vocabulary


class Vocabulary:
    """As much of a tokenizer as is needed.

    Args:
        ids: its tokens.
        special: those that are special.
        decoder: of the library's tokenizer, as text.
        roles: the tokens that end texts (``eos``), and so on.
    """

    def __init__(
        self,
        ids: dict[str, int],
        special: Collection[str] = (),
        decoder: str = "",
        **roles: str,
    ) -> None:
        self.ids = ids
        self.added_tokens_decoder = {
            ids[token]: SimpleNamespace(special=True) for token in special
        }
        self.backend_tokenizer = SimpleNamespace(decoder=decoder)
        for role, token in roles.items():
            setattr(self, f"{role}_token_id", ids[token])

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)


def model(ids: dict[str, int], name: str) -> LoadedModel:
    tokenizer: Any = Vocabulary(ids)
    return LoadedModel(nn.Module(), tokenizer, {}, name)


def mapped(target: Any, draft: Any) -> VocabularyMap:
    """The map of two tokenizers that differ."""
    found = map_vocabulary(
        LoadedModel(nn.Module(), target, {}, "big"),
        LoadedModel(nn.Module(), draft, {}, "small"),
    )
    assert found is not None
    used = found.reads[found.proposes].tolist()
    assert len(set(used)) == len(used)
    return found


SAME = {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4}


def test_equal() -> None:
    reordered = dict(reversed(SAME.items()))
    assert map_vocabulary(model(SAME, "big"), model(reordered, "small")) is None


def test_padded_embeddings_do_not_matter(tmp_path: Path) -> None:
    write_folder(tmp_path / "a")
    write_folder(tmp_path / "b", vocab_size=384)
    target, draft = load(str(tmp_path / "a")), load(str(tmp_path / "b"))
    assert target.model.args.vocab_size != draft.model.args.vocab_size
    assert map_vocabulary(target, draft) is None


def test_other_ids_and_tokens() -> None:
    """By hand: two ids swapped, a token missing, read by how it ends, one more."""
    target = SAME | {"cab": 5, "?": 7}
    draft = {"a": 0, "b": 2, "c": 1, "d": 3, "ab": 4, "z": 5}
    found = mapped(Vocabulary(target), Vocabulary(draft))
    assert found.reads.tolist() == [0, 2, 1, 3, 0, 4, 0, 0]
    assert found.proposes.tolist() == [True] * 4 + [False] * 4
    assert found.share == 4 / 7


def test_a_special_token_is_not_its_text() -> None:
    """Text that spells one is proposed as if it ended the answer, or is read as one."""
    plain = Vocabulary({"a": 0, "<x>": 1, "y<x>": 2, "?": 3}, unk="?")
    special = Vocabulary({"<x>": 0, "?": 1, "a": 2}, special=["<x>"], unk="?")
    found = mapped(plain, special)
    assert found.reads.tolist() == [2, 1, 1, 1]
    assert found.proposes.tolist() == [True, False, False, True]
    found = mapped(special, plain)
    assert found.reads.tolist() == [1, 3, 0]
    assert found.proposes.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("draft", "read"),
    [
        (Vocabulary({"b": 0, " a": 1, "\u2581a": 2}, decoder="\u2581"), 1),
        (Vocabulary({"b": 0, "\u2581a": 1, " a": 2}, decoder="\u2581"), 1),
        (Vocabulary({"b": 0, "<0x61>": 1, "a": 2}, decoder="ByteFallback()"), 2),
        (Vocabulary({"b": 0, "<0x61>": 1}, decoder="ByteFallback()"), 1),
        (Vocabulary({"b": 0, "<0x61>": 1, "a": 2}), 2),
    ],
)
def test_of_several_spellings_one_is_read(draft: Vocabulary, read: int) -> None:
    """A byte token stands for a character of its own only if nothing else does."""
    text = " a" if "\u2581a" in draft.ids else "a"
    found = mapped(Vocabulary({"z": 0, text: 1, "b": 2}), draft)
    assert (found.reads[1], bool(found.proposes[1])) == (read, True)


def test_ends_of_texts_are_the_same_whatever_their_names() -> None:
    """But not if the draft has the target's own end, or the name means another token.

    Nor twice: a token that ends and begins texts would be proposed for both.
    """

    def read(target: Vocabulary, draft: Vocabulary, token: int = 0) -> int | None:
        found = mapped(target, draft)
        return int(found.reads[token]) if found.proposes[token] else None

    target = Vocabulary({"</s>": 0, "a": 1}, special=["</s>"], eos="</s>")
    named = {"a": 0, "<end>": 1}
    assert read(target, Vocabulary(named, special=["<end>"], eos="<end>")) == 1
    assert read(target, Vocabulary(named, special=["<end>"], bos="<end>")) is None
    both = Vocabulary(named | {"</s>": 2}, special=["<end>", "</s>"], eos="<end>")
    assert read(target, both) == 2
    other = Vocabulary(
        {"</s>": 0, "a": 1, "<end>": 2}, special=["</s>", "<end>"], eos="</s>"
    )
    assert read(other, Vocabulary(named, special=["<end>"], eos="<end>")) is None
    two = Vocabulary(
        {"</s>": 0, "<s>": 1, "a": 2}, special=["</s>", "<s>"], eos="</s>", bos="<s>"
    )
    one = Vocabulary(named, special=["<end>"], eos="<end>", bos="<end>")
    assert [read(two, one, i) for i in range(3)] == [1, None, 0]


def test_too_few_are_refused_in_a_line() -> None:
    draft = {f"token-{i}": i for i in range(5000)}
    target = {f"other-{i}": i for i in range(4900)} | {
        f"token-{i}": 4900 + i for i in range(100)
    }
    with pytest.raises(VocabularyMismatchError) as caught:
        map_vocabulary(model(target, "big"), model(draft, "small"))
    assert str(caught.value) == (
        "draft small cannot draft for big: it has 100 of its 5000 tokens, and a draft "
        "needs 5% of them; take a draft of the target's family, or self:4bit"
    )


def test_sizes_of_embeddings() -> None:
    """Logits beyond a vocabulary are never proposed, nor ids beyond the embedding."""
    draft = {"e": 0, "d": 1, "c": 2, "b": 3, "a": 4}
    found = mapped(Vocabulary(SAME), Vocabulary(draft))
    larger = found.sized(7, 9)
    assert larger.reads.tolist() == [4, 3, 2, 1, 0, 0, 0]
    assert larger.proposes.tolist() == [True] * 5 + [False] * 2
    smaller = found.sized(4, 4)
    assert smaller.reads.tolist() == [3, 3, 2, 1]
    assert smaller.proposes.tolist() == [False, True, True, True]


@pytest.mark.parametrize("draft_kind", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("target_kind", ["byte-level", "sentencepiece"])
def test_real_tokenizers(target_kind: str, draft_kind: str, tmp_path: Path) -> None:
    """Tokens that stand for each other decode to the same text, bytes and spaces too.

    Of the lacking ones the draft reads what ends in the same way.
    """

    def made(kind: str, name: str) -> Any:
        spm = sentencepiece_vocabulary(space_prefix=False)
        found = byte_level() if kind == "byte-level" else spm
        if name == "draft":  # other ids, and a token less
            found.tokens.insert(40, "<|more|>")
            found.types.insert(40, 3)
            found.scores.insert(40, 0.0)
            for role in ("bos", "eos", "unknown", "padding"):
                key = f"tokenizer.ggml.{role}_token_id"
                if found.extra.get(key, 0) >= 40:
                    found.extra[key] += 1
        return tokenizer_of(tmp_path / f"{name}-{kind}", found)

    target, draft = made(target_kind, "target"), made(draft_kind, "draft")
    found = mapped(target, draft)
    texts: Any = {i: target.decode([i]) for i in target.get_vocab().values()}
    for token, text in texts.items():
        read = draft.decode([int(found.reads[token])])
        if found.proposes[token] and token not in target.all_special_ids:
            assert read == text, token
        elif token not in target.all_special_ids and "\ufffd" not in text:
            assert text.endswith(read) or read == draft.unk_token
    words = (" the", "ab", "12", "\n\n", "'t") if target_kind == draft_kind else ("12",)
    for word in words:
        (token,) = [i for i, text in texts.items() if text == word]
        assert found.proposes[token], word
    assert found.proposes[target.eos_token_id]
    assert found.reads[target.eos_token_id] == draft.eos_token_id
    assert found.share > 0.8  # a byte may have two tokens


def test_lacking_tokens_are_read_as_the_longest_that_ends_alike() -> None:
    """Against a search of every ending; a shorter one that sorts later misleads."""
    rng = random.Random(3)
    for _ in range(200):
        words = {"".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(30)}
        held = set(rng.sample(sorted(words), len(words) // 2)) | {"c"}
        target = {word: i for i, word in enumerate(sorted(words | {"c"}))}
        draft = {word: i for i, word in enumerate(sorted(held))}
        found = mapped(Vocabulary(target), Vocabulary(draft))
        for word, token in target.items():
            ends = [word[i:] for i in range(len(word)) if word[i:] in draft]
            assert found.reads[token] == (draft[ends[0]] if ends else 0), word


def test_long_tokens() -> None:
    """Sixty of 40 kB took over a minute: every ending of each was looked up."""
    target = SAME | {chr(200 + i) + "a" * 40_000: 10 + i for i in range(60)}
    found = mapped(Vocabulary(target), Vocabulary(SAME | {"a" * 9: 5}))
    assert set(found.reads[10:].tolist()) == {5}


@pytest.mark.parametrize("far", [2**31, 2**64, -1])
def test_ids_that_no_model_has(far: int) -> None:
    """They fit no index, and are neither read nor proposed."""
    found = mapped(Vocabulary(SAME | {"x": far}), Vocabulary(SAME | {"y": far}))
    assert found.reads.tolist() == [0, 1, 2, 3, 4]
    found = mapped(Vocabulary(SAME | {"x": 5}), Vocabulary(SAME | {"x": far}))
    assert found.reads.tolist() == [0, 1, 2, 3, 4, 0]
    assert not found.proposes[5]
