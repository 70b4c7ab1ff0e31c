"""One wave of data: user turns that the target makes up, and its answers to them.

The engine decodes without a draft, since there is none yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from random import Random

import mlx.nn as nn
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ...config import EngineConfig
from ...decoder import SpecDecoder
from ...prompts import encode
from ...prompts.templates import render_chat
from ...sampling_params import SamplingParams
from ..decoding import Task, decode, token_level, with_end
from . import seed_prompts
from .corpus import GREEDY, SAMPLED, TEXT, Document
from .options import Check, DistillOptions, go_on

#: Temperatures of sampled answers and of user turns.
TEMPERATURE, TURN_TEMPERATURE = 0.7, 0.8
# A loop of at most _LONGEST_LOOP tokens is cut if it comes _REPEATS times in a row; one
# of 1 or 2 tokens must come more often.
_LONGEST_LOOP, _REPEATS = 24, 4
_SHORTEST_TURN = 8  # characters
_PREFILL_STEP_SIZE = 256
# A placeholder for the user's text in a rendered template.
_MARK = "specdec-user-text"


#: The template's text before the user's text, and the tokens that end the latter when
#: the model writes it.
UserTurn = tuple[str, frozenset[int]]


def user_turn(tokenizer: TokenizerWrapper) -> UserTurn | None:
    """The user turn of a tokenizer's chat template; ``None`` if there is none."""
    if not tokenizer.has_chat_template:
        return None
    try:
        rendered = render_chat(tokenizer, [{"role": "user", "content": _MARK}])
    except Exception:  # a template may raise anything
        return None
    before, mark, after = rendered.partition(_MARK)
    if not mark:
        return None
    ends = set(tokenizer.eos_token_ids)
    ends.update(tokenizer.encode(after.lstrip(), add_special_tokens=False)[:1])
    return before, frozenset(ends)


def begin_of_turn(
    tokenizer: TokenizerWrapper, turn: UserTurn | None, text: str
) -> list[int]:
    """Tokens of the beginning of a user turn, up to the end of ``text``."""
    if turn is not None:
        tokens = tokenizer.encode(turn[0] + text, add_special_tokens=False)
        return [int(token) for token in tokens]
    tokens = [int(token) for token in tokenizer.encode(text)] if text else []
    bos = getattr(tokenizer, "bos_token_id", None)
    if not tokens:
        tokens = [int(bos) if bos is not None else min(tokenizer.eos_token_ids)]
    return tokens


class Author:
    """Makes up user turns and answers them.

    Args:
        model: the target.
        tokenizer: the target's tokenizer.
        options: give the lengths and the seed.
        writers: rows that write together; also the user turns begun in a wave.
        check: called before every step.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        options: DistillOptions,
        writers: int,
        check: Check = go_on,
    ):
        self._check = check
        self._tokenizer = tokenizer
        self._options = options
        self._writers = writers
        self._turn = user_turn(tokenizer)
        config = EngineConfig(
            batch_size=writers, num_draft_tokens=0, prefill_step_size=_PREFILL_STEP_SIZE
        )
        alone = token_level(model, tokenizer.eos_token_ids)
        self._decoder = SpecDecoder(alone, config=config)

    def wave(self, number: int) -> list[Document]:
        """Write the documents of a wave, which depend on its number and the options."""
        texts = self.user_turns(number)
        if self._turn is None:
            prompts = [begin_of_turn(self._tokenizer, None, text) for text in texts]
        else:
            prompts = [list(encode(self._tokenizer, t).token_ids) for t in texts]
        return self.answers(prompts, number)

    def answers(
        self, prompts: Sequence[Sequence[int]], number: int, *, sampled: bool = True
    ) -> list[Document]:
        """Answer each prompt greedily and, if ``sampled``, at TEMPERATURE too."""
        documents = []
        for temperature in [0.0, TEMPERATURE] if sampled else [0.0]:
            answers = self._write(
                prompts,
                Random(f"{self._options.seed} {number} answers"),
                max_tokens=self._options.answer_tokens,
                temperature=temperature,
            )
            kind = SAMPLED if temperature else GREEDY
            for prompt, answer in zip(prompts, without_loops(answers), strict=True):
                if answer:
                    documents.append(Document((*prompt, *answer), len(prompt), kind))
        return documents

    def user_turns(self, number: int) -> list[str]:
        """Make up texts that users might write, without duplicates."""
        tokenizer = self._tokenizer
        rng = Random(f"{self._options.seed} {number}")
        openings = [
            seed_prompts.draw(rng, self._options.topics) for _ in range(self._writers)
        ]
        prompts = [begin_of_turn(tokenizer, self._turn, o.text) for o in openings]
        ends = self._turn[1] if self._turn else frozenset(tokenizer.eos_token_ids)
        written = self._write(
            prompts,
            rng,
            # Without user turns a prompt is just an opening.
            max_tokens=self._options.turn_tokens if self._turn else 1,
            temperature=TURN_TEMPERATURE,
            ends=ends,
        )
        texts: dict[str, None] = {}
        cut = without_loops(written)
        for opening, tokens, cut_tokens in zip(openings, written, cut, strict=True):
            if len(cut_tokens) < len(tokens):
                continue
            text = _turn_text(tokenizer, opening, tokens, ends, self._turn is not None)
            if text is not None:
                texts[text] = None
        return list(texts)

    def _write(
        self,
        prompts: Sequence[Sequence[int]],
        rng: Random,
        *,
        max_tokens: int,
        temperature: float,
        ends: Collection[int] = (),
    ) -> list[Sequence[int]]:
        """Tokens that the target writes after each prompt, including the one that ends.

        Args:
            rng: draws the prompts' seeds.
            ends: tokens that end a row, as end-of-sequence tokens do.
        """
        tasks = [
            Task.of(
                prompt,
                SamplingParams(
                    max_tokens=max_tokens,
                    temperature=temperature,
                    seed=rng.getrandbits(32),
                    stop_token_ids=tuple(ends),
                ),
            )
            for prompt in prompts
        ]
        results = decode(self._decoder, tasks, lambda ended, share: self._check())
        return [with_end(result) for result in results]


def _turn_text(
    tokenizer: TokenizerWrapper,
    opening: seed_prompts.Opening,
    tokens: Sequence[int],
    ends: Collection[int],
    must_end: bool,
) -> str | None:
    """The user's text; ``None`` if it is not usable."""
    ended = bool(tokens) and tokens[-1] in ends
    text_tokens = list(tokens[:-1] if ended else tokens)
    text = opening.text + str(tokenizer.decode(text_tokens))
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
    """The texts, each cut where it has repeated itself several times.

    A loop is easy to predict, so more of it teaches nothing.
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
        # The text is cut after a run of this many tokens that equal those one period
        # before.
        run = max(period * (_REPEATS - 1), 2 * _REPEATS)
        if run > same.shape[1]:
            continue
        counts = np.pad(np.cumsum(same, axis=1, dtype=np.int32), ((0, 0), (1, 0)))
        loops = counts[:, run:] - counts[:, :-run] == run
        first = period + run + loops.argmax(axis=1)
        ends = np.where(loops.any(axis=1), np.minimum(ends, first), ends)
    return [list(text[:end]) for text, end in zip(texts, ends.tolist(), strict=True)]


def text_documents(
    tokenizer: TokenizerWrapper, texts: Iterable[str], *, max_tokens: int
) -> list[Document]:
    """The user's texts as documents, cut into pieces."""
    documents = []
    for text in texts:
        tokens = [int(t) for t in tokenizer.encode(text)]
        for first in range(0, len(tokens), max_tokens):
            piece = tuple(tokens[first : first + max_tokens])
            if len(piece) > 1:
                documents.append(Document(piece, 1, TEXT))
    return documents
