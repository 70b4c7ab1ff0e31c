"""Compares the vocabularies of two models, so that one can draft for the other."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import VocabularyMismatchError
from .loaded import LoadedModel

#: The least share of the target's tokens that a draft must have. By Zipf's law, the
#: most frequent twentieth of a vocabulary makes up about three quarters of a text. A
#: draft with less would lack every fourth token of a text, so no round would keep more
#: than three.
LEAST_SHARE = 0.05

#: The bytes that a token stands for, and whether it is a special token. A special token
#: is never the same as its text.
Piece = tuple[bytes, bool]

# More tokens than any model has logits: a token beyond them is never read or proposed.
_MOST_TOKENS = 1 << 24
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class VocabularyMap:
    """What a draft reads and proposes for the tokens of a target with other ids.

    Args:
        reads: the draft's token that is read for each target id, shape (N,), int32.
        proposes: whether the draft may propose each target id, shape (N,), boolean;
            no two of these are read as the same token.
        share: share of the target's tokens that the draft may propose, 0 to 1.
    """

    reads: npt.NDArray[np.int32]
    proposes: npt.NDArray[np.bool_]
    share: float

    def sized(self, target_size: int, draft_size: int) -> VocabularyMap:
        """The same map for models with these numbers of logits.

        An embedding may have more rows than there are tokens, or fewer.
        """
        count = min(target_size, len(self.reads))
        reads = np.zeros(target_size, np.int32)
        reads[:count] = self.reads[:count]
        proposes = np.zeros(target_size, np.bool_)
        proposes[:count] = self.proposes[:count]
        proposes &= reads < draft_size
        return VocabularyMap(
            np.minimum(reads, draft_size - 1, dtype=np.int32), proposes, self.share
        )


def map_vocabulary(target: LoadedModel, draft: LoadedModel) -> VocabularyMap | None:
    """Map the target's tokens to the draft's.

    Two tokens are the same if they stand for the same bytes. Special tokens are the
    same if they have the same name, or if both end (or begin) texts. In place of a
    token that it lacks, the draft reads its longest token that ends the same way. The
    numbers of logits do not matter here, see :meth:`VocabularyMap.sized`.

    Returns:
        ``None`` if every token has the same id in both.

    Raises:
        VocabularyMismatchError: the draft has too few of the target's tokens.
    """
    if draft.tokenizer is target.tokenizer:
        return None
    if target.tokenizer.get_vocab() == draft.tokenizer.get_vocab():
        return None
    of_target, of_draft = _Pieces.of(target.tokenizer), _Pieces.of(draft.tokenizer)
    same = _same_tokens(of_target, of_draft)
    share = len(same) / max(len(of_target.of_id), 1)
    if share < LEAST_SHARE:
        raise VocabularyMismatchError(
            f"draft {draft.name} cannot draft for {target.name}: it has {len(same)} of "
            f"its {len(of_target.of_id)} tokens, and a draft needs {LEAST_SHARE:.0%} "
            "of them; take a draft of the target's family, or self:4bit"
        )
    size = max(of_target.of_id) + 1
    reads = np.full(size, of_draft.fallback, np.int32)
    proposes = np.zeros(size, np.bool_)
    lacking = {i: text for i, (text, _) in of_target.of_id.items() if i not in same}
    closest = of_draft.closest(lacking.values())
    for token, text in lacking.items():
        reads[token] = closest[text]
    for token, read in same.items():
        reads[token] = read
        proposes[token] = True
    return VocabularyMap(reads, proposes, share)


def _same_tokens(target: _Pieces, draft: _Pieces) -> dict[int, int]:
    """The draft's token for each target token that it has; none is used twice."""
    same = {
        token: draft.ids[piece]
        for piece, token in target.ids.items()
        if piece in draft.ids
    }
    for role, token in target.roles.items():
        other = draft.roles.get(role)
        if other is not None and token not in same and other not in same.values():
            same[token] = other
    return same


@dataclass(frozen=True)
class _Pieces:
    """The tokens of a vocabulary.

    Args:
        of_id: the piece that each token stands for.
        ids: the token for each piece: the lowest of several, and a byte token only if
            there is no other.
        roles: tokens that end and begin texts.
        fallback: the token to read if no other fits.
    """

    of_id: dict[int, Piece]
    ids: dict[Piece, int] = field(default_factory=dict)
    roles: dict[str, int] = field(default_factory=dict)
    fallback: int = 0

    @classmethod
    def of(cls, tokenizer: Any) -> _Pieces:
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        special = {i for i, token in added.items() if getattr(token, "special", False)}
        spelling = _Spelling.of(tokenizer)
        of_id: dict[int, Piece] = {}
        ids: dict[Piece, int] = {}
        bytes_: list[int] = []
        for text, token in sorted(vocabulary.items(), key=lambda item: item[1]):
            if not 0 <= token < _MOST_TOKENS:
                continue
            if token in special:
                of_id[token] = (_utf8(text), True)
            else:
                of_id[token] = (spelling.read(text), False)
            if spelling.is_byte(text):
                bytes_.append(token)
            else:
                ids.setdefault(of_id[token], token)
        for token in bytes_:
            ids.setdefault(of_id[token], token)
        roles = _ids_of(tokenizer, ("eos", "bos"), of_id)
        return cls(of_id, ids, roles, _ids_of(tokenizer, ("unk",), of_id).get("unk", 0))

    def closest(self, texts: Iterable[bytes]) -> dict[bytes, int]:
        """For each text, the longest token that it ends with, or the fallback.

        The text that follows depends most on how the text so far ends.
        """
        ends = {text[::-1]: i for (text, special), i in self.ids.items() if not special}
        ends.pop(b"", None)
        backwards = {text[::-1] for text in texts}
        closest: dict[bytes, int] = {}
        # In this order, a beginning of a text comes before the text, and between them
        # come only texts with the same beginning.
        beginnings: list[bytes] = []
        for text in sorted(backwards | ends.keys()):
            while beginnings and not text.startswith(beginnings[-1]):
                beginnings.pop()
            if text in ends:
                beginnings.append(text)
            longest = beginnings[-1] if beginnings else None
            if text in backwards:
                closest[text[::-1]] = (
                    self.fallback if longest is None else ends[longest]
                )
        return closest


def _ids_of(
    tokenizer: Any, roles: Iterable[str], known: dict[int, Piece]
) -> dict[str, int]:
    ids = {role: getattr(tokenizer, f"{role}_token_id", None) for role in roles}
    return {role: i for role, i in ids.items() if isinstance(i, int) and i in known}


@dataclass(frozen=True)
class _Spelling:
    """How a tokenizer writes the bytes of its tokens.

    Args:
        byte_level: whether each byte is written as a character, as in GPT-2.
        byte_fallback: whether bytes without another token have one like ``<0x0A>``.
        blank: the spelling of a space; "": a space.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    blank: str = ""

    @classmethod
    def of(cls, tokenizer: Any) -> _Spelling:
        # Only the decoder shows the spelling. Without a decoder, tokens are texts.
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", "")
        described = str(decoder)
        return cls(
            byte_level="ByteLevel(" in described,
            byte_fallback="ByteFallback(" in described,
            blank="▁" if "▁" in described else "",
        )

    def is_byte(self, token: str) -> bool:
        """Whether it stands for a byte that may be a part of a character."""
        return self.byte_fallback and _BYTE_TOKEN.fullmatch(token) is not None

    def read(self, token: str) -> bytes:
        """The bytes that a token stands for."""
        if self.byte_level:
            characters = _byte_characters()
            # Tokens that were added later may be plain text.
            if characters.keys() >= set(map(ord, token)):
                return token.translate(characters).encode("latin-1")
        elif self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return _utf8(token.replace(self.blank, " ") if self.blank else token)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@cache
def _byte_characters() -> dict[int, int]:
    """The byte that each character stands for in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {byte: byte for byte in printable} | {
        0x100 + i: byte for i, byte in enumerate(others)
    }
