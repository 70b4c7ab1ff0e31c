"""One wave of data: user turns that the target makes up, and its answers to them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np

from ...models.runner import ModelRunner
from . import seed_prompts
from .cancellation import Check, go_on
from .chat_template import UserTurn, begin_of_turn, prompt_tokens, user_turn
from .corpus import GREEDY, SAMPLED, TEXT, Document
from .writing import write

# A loop of at most this many tokens that comes this often in a row is cut.
_LONGEST_LOOP, _REPEATS = 24, 4
_SHORTEST_TURN = 8  # characters


@dataclass(frozen=True, kw_only=True)
class Wave:
    """How a wave is written.

    Args:
        batch_size: user turns of a wave: rows that are decoded together.
        turn_tokens: most tokens of a user turn.
        answer_tokens: most tokens of an answer.
        turn_temperature: of user turns.
        temperature: of the answers that are not greedy.
        seed: of all draws.
    """

    batch_size: int = 1
    turn_tokens: int = 128
    answer_tokens: int = 256
    turn_temperature: float = 0.8
    temperature: float = 0.7
    seed: int = 0


class Author:
    """Makes up user turns and answers them.

    Args:
        runner: runs the target.
        tokenizer: of the target.
        options: how.
        check: called every few steps.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Any,
        options: Wave,
        check: Check = go_on,
    ):
        self._runner = runner
        self._check = check
        self._tokenizer = tokenizer
        self._options = options
        self._turn: UserTurn | None = user_turn(tokenizer)
        self._ends = frozenset(tokenizer.eos_token_ids)

    def wave(self, number: int) -> list[Document]:
        """The documents of a wave: a function of its number and the options."""
        texts = self.user_turns(number)
        if self._turn is None:
            prompts = [begin_of_turn(self._tokenizer, None, text) for text in texts]
        else:
            prompts = [prompt_tokens(self._tokenizer, text) for text in texts]
        return self.answers(prompts, number)

    def answers(
        self, prompts: Sequence[Sequence[int]], number: int, *, sampled: bool = True
    ) -> list[Document]:
        """Each prompt answered greedily and, if asked for, at the temperature."""
        options, documents = self._options, []
        key = mx.random.key(options.seed << 20 | number << 1 | 1)
        temperatures = [0.0, options.temperature] if sampled else [0.0]
        for temperature in temperatures:
            answers = write(
                self._runner,
                prompts,
                max_tokens=options.answer_tokens,
                ends=self._ends,
                temperature=temperature,
                key=key,
                check=self._check,
            )
            kind = SAMPLED if temperature else GREEDY
            for prompt, kept in zip(prompts, without_loops(answers), strict=True):
                if kept:
                    documents.append(Document((*prompt, *kept), len(prompt), kind))
        return documents

    def user_turns(self, number: int) -> list[str]:
        """Texts that users might write; none of them twice."""
        options, tokenizer = self._options, self._tokenizer
        rng = Random(f"{options.seed} {number}")
        begun = [seed_prompts.draw(rng) for _ in range(options.batch_size)]
        prompts = [begin_of_turn(tokenizer, self._turn, o.text) for o in begun]
        ends = self._ends if self._turn is None else self._turn.ends
        written = write(
            self._runner,
            prompts,
            # Without turns a prompt is just a begin.
            max_tokens=options.turn_tokens if self._turn else 1,
            ends=ends,
            temperature=options.turn_temperature,
            key=mx.random.key(options.seed << 20 | number << 1),
            check=self._check,
        )
        found: dict[str, None] = {}
        cut = without_loops(written)
        for opening, tokens, kept in zip(begun, written, cut, strict=True):
            if len(kept) < len(tokens):
                continue
            text = _turn_text(tokenizer, opening, tokens, ends, self._turn is not None)
            if text is not None:
                found[text] = None
        return list(found)


def _turn_text(
    tokenizer: Any,
    opening: seed_prompts.Opening,
    tokens: Sequence[int],
    ends: Collection[int],
    must_end: bool,
) -> str | None:
    """The user's text; ``None`` where it is of no use."""
    ended = bool(tokens) and tokens[-1] in ends
    kept = list(tokens[:-1] if ended else tokens)
    text = opening.text + str(tokenizer.decode(kept))
    if opening.until is not None:
        at = text.find(opening.until, len(opening.text))
        if at >= 0:
            text, ended = text[: at + len(opening.until)] + "\n", True
    else:
        text = text.strip()
    usable = ended or not must_end
    if not usable or len(text.strip()) < _SHORTEST_TURN or "\ufffd" in text:
        return None
    return text


def without_loops(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each text up to where it has repeated itself several times over.

    A loop is easy to foretell: more of it teaches nothing.
    """
    lengths = np.array([len(text) for text in texts], np.int32)
    width = int(lengths.max(initial=0))
    tokens = np.zeros((len(texts), width), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    ends = lengths.copy()
    for period in range(1, min(_LONGEST_LOOP, width - 1) + 1):
        same = tokens[:, period:] == tokens[:, :-period]
        same &= np.arange(period, width) < lengths[:, None]
        # Positions in a row that are as a period before: runs of so many end there.
        run = max(period * (_REPEATS - 1), 2 * _REPEATS)
        if run > same.shape[1]:
            continue
        counts = np.pad(np.cumsum(same, axis=1, dtype=np.int32), ((0, 0), (1, 0)))
        found = counts[:, run:] - counts[:, :-run] == run
        first = period + run + found.argmax(axis=1)
        ends = np.where(found.any(axis=1), np.minimum(ends, first), ends)
    return [list(text[:end]) for text, end in zip(texts, ends.tolist(), strict=True)]


def text_documents(
    tokenizer: Any, texts: Iterable[str], *, max_tokens: int
) -> list[Document]:
    """Texts that were given, in pieces."""
    documents = []
    for text in texts:
        tokens = [int(t) for t in tokenizer.encode(text)]
        for first in range(0, len(tokens), max_tokens):
            piece = tuple(tokens[first : first + max_tokens])
            if len(piece) > 1:
                documents.append(Document(piece, 1, TEXT))
    return documents
