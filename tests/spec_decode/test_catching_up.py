"""Drafts that take in what they missed, where shapes are to repeat: in two widths."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from specdec.backend import BackendDefaults
from specdec.config import EngineConfig
from specdec.models.runner import ModelRows, ModelRunner
from specdec.request import Request
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import DraftModel, draft_model
from specdec.spec_decode.commit import Accepted
from specdec.spec_decode.drafter import Round
from specdec.spec_decode.verifier import Verifier
from tests.plain import BEHIND, VOCAB
from tests.spec_decode.by_hand import build

# Wide pieces have 128 tokens otherwise: as many forwards of fewer tokens.
NARROW, WIDE = 5, 32
K = 2


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "CATCH_UP_STEP", WIDE)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Any]) -> Any:
    """Layers that see everything, and layers with a window."""
    return build(tiny_model, "llama-sliding")


@cache
def rules_of(num_rows: int, vocab_size: int) -> Verifier:
    request = Request(0, "", (1,), SamplingParams(), frozenset())
    return Verifier.of([request] * num_rows, vocab_size)


class Decoding:
    """Rows of a draft model that go through rounds of which a test decides all."""

    def __init__(
        self,
        model: Any,
        texts: Iterable[Sequence[int]],
        max_length: int,
        *,
        backend: BackendDefaults = BEHIND,
        prefill_step_size: int = 64,
        seed: int = 0,
    ):
        self.model, self.max_length = model, max_length
        self.rng = random.Random(seed)
        config = EngineConfig(prefill_step_size=prefill_step_size)
        runner = ModelRunner(model, "draft", config, backend)
        self.vocab_size = runner.vocab_size
        self.draft = DraftModel(
            runner, vocab_size=self.vocab_size, max_draft_tokens=NARROW - 1
        )
        self.texts = [list(text) for text in texts]
        self.ended: set[int] = set()
        self.rows = self._begun(self.texts)

    def _begun(self, texts: Sequence[Sequence[int]]) -> Any:
        # The last of them is the first that was generated.
        rows = self.draft.rows([t[:-1] for t in texts], max_length=self.max_length)
        for _ in rows.prefill():
            pass
        return rows

    def join(self, text: Sequence[int]) -> None:
        self.rows.extend(self._begun([text]))
        self.texts.append(list(text))

    def replace(self, row: int, text: Sequence[int]) -> None:
        self.rows.reset([row])
        self.rows.place([row], self._begun([text]), len(self.texts))
        self.texts[row] = list(text)
        self.ended.discard(row)

    def note_lengths(self) -> None:
        lengths = list(map(len, self.texts))
        self.rows.note_lengths(max(lengths), min(lengths))

    def filter(self, kept: Sequence[int]) -> None:
        self.rows.filter(kept)
        self.texts = [self.texts[i] for i in kept]
        self.ended = {kept.index(i) for i in self.ended if i in kept}

    def _round(self, k: int) -> Round:
        rules = rules_of(len(self.texts), self.vocab_size)
        lengths = mx.array([len(t) for t in self.texts])
        draws = rules.draws(lengths, k + 1)
        active = mx.array([i not in self.ended for i in range(len(self.texts))])
        # Of rows that have ended, what is newest means nothing.
        newest = [
            [self.rng.randrange(self.vocab_size)] * 2 if i in self.ended else t[-2:]
            for i, t in enumerate(self.texts)
        ]
        recent = mx.array(newest, mx.int32)
        return Round(k, recent, active, rules.sampling, draws, lengths=lengths)

    def miss(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            self._commit(self._round(0), [[] for _ in self.texts])

    def draft_and_check(self, accepted: int | Sequence[int] = 0, *, k: int = K) -> None:
        """A round's proposals are what the model says of the whole texts.

        Args:
            accepted: of them, by each row or by all.
        """
        round_ = self._round(k)
        proposed: Any = self.rows.propose(round_).tokens.tolist()
        wanted = greedy_after(self.model, self.texts, proposed)
        for i, (text, tokens) in enumerate(zip(self.texts, proposed, strict=True)):
            if i not in self.ended:
                assert tokens == wanted[i], (i, len(text))
        counts = [accepted] * len(proposed) if isinstance(accepted, int) else accepted
        each = zip(proposed, counts, strict=True)
        self._commit(round_, [tokens[:n] for tokens, n in each])

    def _commit(self, round_: Round, accepted: Sequence[Sequence[int]]) -> None:
        """Each row's accepted tokens, and one that nobody foresaw."""
        width = round_.num_draft_tokens + 1
        chosen = [[*t, self.rng.randrange(self.vocab_size)] for t in accepted]
        kept = [0 if i in self.ended else len(c) for i, c in enumerate(chosen)]
        padded = [c + [0] * (width - len(c)) for c in chosen]
        self.rows.commit(
            round_, Accepted(mx.array(padded, mx.int32), mx.array(kept, mx.int32))
        )
        for text, tokens, n in zip(self.texts, chosen, kept, strict=True):
            text += tokens[:n]

    @property
    def held(self) -> list[int]:
        """Tokens of every row in the draft's cache."""
        offset: list[int] = self.rows._rows.offset.tolist()
        return offset

    @property
    def longest(self) -> int:
        """The same, as far as the host knows."""
        return max(int(c._longest) for c in self.rows._rows._caches)


def greedy_after(
    model: Any, texts: Sequence[Sequence[int]], proposed: Sequence[Sequence[int]]
) -> list[list[int]]:
    """What a model says after each text, and after each proposal but the last.

    By mlx-lm's own caches, all of the texts at once: no row depends on padding that
    comes after it.
    """
    k = len(proposed[0])
    whole = [[*t, *p[:-1]] for t, p in zip(texts, proposed, strict=True)]
    width = max(map(len, whole))
    tokens = mx.array([[*t, *[0] * (width - len(t))] for t in whole])
    logits = model(tokens, cache=make_prompt_cache(model))
    said: Any = mx.argmax(logits, axis=-1).tolist()
    return [row[len(t) - k : len(t)] for row, t in zip(said, whole, strict=True)]


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens per row of all forwards that are not prefill."""
    found: list[int] = []
    forward = ModelRows.forward

    def noted(self: ModelRows, tokens: mx.array) -> mx.array:
        found.append(tokens.shape[1])
        return forward(self, tokens)

    monkeypatch.setattr(ModelRows, "forward", noted)
    return found


def texts_of(*lengths: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("m", [1, 10, 11, WIDE + 5, WIDE + 11, 2 * WIDE + 14])
def test_the_draft_goes_on_as_if_it_had_missed_nothing(
    model: Any, widths: list[int], m: int
) -> None:
    """Twice, of rows of different lengths; then rounds with nothing to take in."""
    decoding = Decoding(model, texts_of(2, 30, 9), max_length=900)
    decoding.draft_and_check()
    for _ in range(2):
        decoding.miss(m)
        widths.clear()
        decoding.draft_and_check(accepted=1)
        begins = widths.index(2)
        rest = m % WIDE if m % WIDE <= 2 * NARROW else 0
        wide = -(-(m - rest) // WIDE)
        assert widths[:begins] == [WIDE] * wide + [NARROW] * -(-rest // NARROW)
        assert widths[begins:] == [2, 1]
        # The host's bound is as tight as without padding.
        assert decoding.longest <= max(decoding.held) + 2 * NARROW
        decoding.draft_and_check(accepted=K)
        decoding.draft_and_check()


@pytest.mark.parametrize("m", [3, 12, WIDE + 22])
def test_rows_that_joined_ended_or_left(model: Any, widths: list[int], m: int) -> None:
    """Those that joined missed less, or nothing; those that ended take in nothing."""
    decoding = Decoding(model, texts_of(20, 45, 3, 7), max_length=1500)
    decoding.miss(m)
    decoding.join(texts_of(33, seed=2)[0])
    decoding.miss(m // 2)
    decoding.ended = {1}
    decoding.join(texts_of(5, seed=3)[0])
    decoding.miss(m // 3)
    decoding.join(texts_of(12, seed=4)[0])
    ended = decoding.held[1]
    widths.clear()
    decoding.draft_and_check(accepted=2)
    assert decoding.held[1] == ended
    assert set(widths) <= {1, 2, NARROW, WIDE}
    decoding.miss(m)
    decoding.filter([4, 0, 1, 6])
    decoding.miss(m)
    decoding.draft_and_check()
    decoding.draft_and_check()
    assert set(widths) <= {1, 2, NARROW, WIDE}


@pytest.mark.parametrize("m", [20, 100, 145, 148])
def test_padding_stays_within_what_the_caches_may_hold(
    model: Any, widths: list[int], m: int
) -> None:
    """Rows that reach their end, where wide padding has no room: narrow, then exact."""
    length = 2 * BEHIND.read_bucket + BEHIND.read_bucket  # as long as caches may be
    decoding = Decoding(model, texts_of(length - m - 3, 6), max_length=length)
    decoding.miss(m)
    decoding.draft_and_check()
    assert max(decoding.held) <= length
    begins = widths.index(2)
    assert widths[:begins].count(WIDE) == m // WIDE
    assert set(widths[: begins - 1]) <= {NARROW, WIDE}
    assert widths[begins - 1] <= NARROW


def test_the_caches_of_all_layers_look_at_lengths_together(model: Any) -> None:
    """What one of them learns there decides shapes: masks are made from one."""
    length = 2 * BEHIND.read_bucket
    decoding = Decoding(model, texts_of(20, 6), max_length=length)
    while (
        decoding.longest + 4 * NARROW <= length
    ):  # the host does not know what is kept
        decoding.draft_and_check()
    decoding.miss(12)
    decoding.draft_and_check()
