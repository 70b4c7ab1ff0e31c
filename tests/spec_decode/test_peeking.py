"""What a drafter would have proposed in rounds that did not draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from specdec.backend import BackendDefaults
from specdec.engine.engine import Engine
from specdec.request import Request
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import (
    DraftRows,
    NgramDrafter,
    NgramOptions,
    Proposals,
    Round,
    round_times,
)
from specdec.spec_decode.ngram import NgramRows
from tests.plain import AT_ONCE, BACKENDS, VOCAB, exact
from tests.scripted import Script
from tests.spec_decode.repetitive import make_prompts
from tests.spec_decode.test_lookup import search

K = 4
LENGTHS = (40, 23, 31, 12, 40)
PROMPTS = make_prompts()[2:7]


def drafter() -> NgramDrafter:
    return NgramDrafter(NgramOptions(min_ngram=1, max_ngram=3))


def decoded(target: Any, script: Script, **options: Any) -> list[Request]:
    """Five prompts that repeat themselves, with the drafter above."""
    wanted = {"num_draft_tokens": K, "drafter": drafter(), **options}
    return exact(target, None, PROMPTS, LENGTHS, length=script, **wanted)


def alone(
    target: Any, script: Script, *, max_tokens: int = 9, **options: Any
) -> Request:
    """One row of one short prompt, likewise."""
    wanted = {"num_draft_tokens": K, "drafter": drafter(), **options}
    (row,) = exact(target, None, [[1, 2]], max_tokens, length=script, **wanted)
    return row


def by_hand(prompts: list[list[int]], outputs: list[list[int]]) -> list[list[int]]:
    """Tokens compared and right, by position, looked up in lists of the whole texts."""
    found = [[0, 0] for _ in range(K)]
    for prompt, output in zip(prompts, outputs, strict=True):
        text = [*prompt, *output]
        # The first token is the prompt's step's; the last one ends the row.
        for begin in range(len(prompt) + 1, len(text) - 1):
            size, last = search(text[:begin], held=9999, max_ngram=3, min_ngram=1)
            known = text[:begin]
            while size and len(known) < begin + K:  # copying while the copy grows
                known.append(known[last + 1 + len(known) - begin])
            proposed = known[begin:] or [-1]
            for position, token in enumerate(proposed[: len(text) - 1 - begin]):
                found[position][0] += 1
                found[position][1] += token == text[begin + position]
                if token != text[begin + position]:
                    break
    return found


@BACKENDS
@pytest.mark.parametrize("batch_size", [1, 5])
def test_plain_rounds_say_what_drafts_would_have_brought(
    target: Any,
    batch_size: int,
    backend: BackendDefaults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows end at different times; nothing is drafted, and nothing changes."""
    monkeypatch.setattr(round_times, "REST", 1)  # else not every round looks
    script = Script(lambda number: 0)
    rows = decoded(target, script, batch_size=batch_size, backend=backend)
    assert sum(row.drafted for row in rows) == 0
    found = [[0, 0] for _ in range(K)]
    for outcome in script.outcomes:
        for position, (trials, kept) in enumerate(outcome.shadow):
            found[position][0] += trials
            found[position][1] += kept
    assert found == by_hand(PROMPTS, [row.tokens for row in rows])
    assert found[K - 1][1] > 0


@BACKENDS
def test_rows_that_are_not_drafted_for_say_nothing(
    target: Any, backend: BackendDefaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be accepted there brings nobody anything."""
    monkeypatch.setattr(round_times, "REST", 1)
    refused = PROMPTS[1:3]

    def may_draft(self: Engine, running: Any, joining: Sequence[Request]) -> bool:
        return not any(list(each.prompt_tokens) in refused for each in joining)

    monkeypatch.setattr(Engine, "_may_draft", may_draft)
    script = Script(lambda number: 0)
    rows = decoded(target, script, batch_size=2, backend=backend)
    drafted = [row for row in rows if row.drafts]
    assert 0 < len(drafted) < len(rows)
    trials = sum(each.shadow[0][0] for each in script.outcomes if each.shadow)
    prompts = [list(row.prompt_tokens) for row in drafted]
    assert trials == by_hand(prompts, [row.tokens for row in drafted])[0][0]


def test_rounds_that_look_are_no_measure(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look takes a time of its own, also where each round is read at once."""
    monkeypatch.setattr(round_times, "REST", 1)
    script = Script(lambda number: 0)
    processors = (lambda tokens, logits: logits,)
    params = SamplingParams(max_tokens=30, logits_processors=processors)
    exact(
        target, None, [[1, 2]], params, num_draft_tokens=K, drafter=drafter(),
        length=script,
    )  # fmt: skip
    looked = [each for each in script.outcomes if each.shadow]
    assert len(looked) > 20
    assert not any(each.fair for each in looked)


@BACKENDS
def test_rounds_that_draft_come_between(target: Any, backend: BackendDefaults) -> None:
    """Their outcome says itself; what was looked up before them is dropped."""
    script = Script(lambda number: 2 * (number % 3 == 0))
    rows = decoded(target, script, backend=backend)
    for outcome in script.outcomes:
        positions = outcome.shadow
        assert not (outcome.num_draft_tokens and positions)
        # Two plain rounds in a row: a second position at most.
        assert len(positions) <= 2
    assert any(len(o.shadow) == 2 for o in script.outcomes)
    assert sum(row.accepted for row in rows) > 0


@pytest.mark.parametrize("says", [True, False])
def test_who_can_say_is_asked(
    target: Any, says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def peeked(self: NgramRows, round_: Round) -> Proposals:
        asked.append(round_.num_draft_tokens)
        return self.propose(round_)

    monkeypatch.setattr(NgramRows, "peek", peeked if says else DraftRows.peek)
    script = Script(lambda number: 0)
    alone(target, script)
    assert set(asked) == ({K} if says else set())
    assert any(o.shadow for o in script.outcomes) is says


def test_where_nothing_is_said_rounds_are_timed(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask a drafter that does not say holds nothing up."""
    monkeypatch.setattr(NgramRows, "peek", DraftRows.peek)
    script = Script(lambda number: 0)
    alone(target, script, max_tokens=40)
    later = script.outcomes[1:-1]
    assert len(later) > 30
    assert all(o.seconds is not None for o in later)
    assert all(o.fair for o in later)


def test_a_failure_costs_drafts_alone(
    target: Any, monkeypatch: pytest.MonkeyPatch, draft_failures: list[str]
) -> None:
    def fails(self: NgramRows, round_: Round) -> Proposals:
        raise ZeroDivisionError("no luck")

    monkeypatch.setattr(NgramRows, "peek", fails)
    alone(target, Script(lambda number: 0))
    assert "no luck" in draft_failures.pop()


def test_proposals_are_checked_beside_peeks(
    target: Any, monkeypatch: pytest.MonkeyPatch, draft_failures: list[str]
) -> None:
    """Right peeks say nothing of what is proposed after them."""
    propose = NgramRows.propose

    def proposed(self: NgramRows, round_: Round) -> Proposals:
        return Proposals(mx.zeros((1, K + 3), mx.int32))

    monkeypatch.setattr(NgramRows, "peek", propose)
    monkeypatch.setattr(NgramRows, "propose", proposed)
    alone(target, Script(lambda number: K * (number > 5)), max_tokens=20)
    assert "NgramRows: the tokens that it proposed are" in draft_failures.pop()


def test_drawn_proposals_are_not_compared(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that was drawn is right less often than it would be accepted."""

    def drawn(self: NgramRows, round_: Round) -> Proposals:
        certain = self.propose(round_)
        return replace(certain, probabilities=certain.drawn_from(VOCAB))

    monkeypatch.setattr(NgramRows, "peek", drawn)
    script = Script(lambda number: 0)
    alone(target, script)
    assert not any(o.shadow for o in script.outcomes)


@pytest.mark.parametrize("most", [None, 0])
def test_no_graph_grows_while_nothing_is_drafted(
    target: Any, most: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a look leaves to be computed, the next one does, or it is done together."""
    writes: list[int] = []
    commit, file = NgramRows.commit, tmp_path / "graph.dot"

    def noted(self: NgramRows, round_: Round, accepted: Any) -> None:
        # Of the rounds before it: this one is not handed over yet.
        mx.export_to_dot(str(file), self._ring)
        writes.append(file.read_text("utf-8").count('"ScatterAxis"'))
        commit(self, round_, accepted)

    monkeypatch.setattr(NgramRows, "commit", noted)
    script = Script(lambda number: 2 * (number == 0))
    alone(target, script, max_tokens=40, backend=replace(AT_ONCE, peek_rows=most))
    plain = len([o for o in script.outcomes if not o.num_draft_tokens])
    looked = len([o for o in script.outcomes if o.shadow])
    assert plain > 30
    assert (looked > 0) is (most is None)
    assert max(writes) < 8
    # Where nothing is looked up, rounds are written when so many have come together.
    assert looked or writes.count(0) <= plain // 8 + 1


@pytest.mark.parametrize(("most", "asks"), [(None, True), (2, True), (1, False)])
def test_a_backend_says_up_to_how_many_rows(
    target: Any, most: int | None, asks: bool
) -> None:
    """Where launching costs, looking holds a round of many rows up."""
    script = Script(lambda number: 0)
    exact(
        target, None, [[1, 2], [3]], 9, num_draft_tokens=K, drafter=drafter(),
        length=script, backend=replace(AT_ONCE, peek_rows=most),
    )  # fmt: skip
    assert any(o.shadow for o in script.outcomes) is asks
